"""What gates and attention sinks do in a decoder, as numbers and pictures.

- `metrics`: the figures, each with its definition and source
- `measure`: all of them for a model on documents
- `attention`: exact attention some queries at a time, through transformers' attention interface
- `interventions`: gates held, opened, closed, shuffled
- `pictures`: what a reader sees at a glance
- `report`, `command`: one HTML file, and `gated-qwen inspect`
"""

from .attention import attention_maps
from .interventions import gates_as, interventions, perplexity
from .measure import LABELS, Measurements, measure

__all__ = ["LABELS", "Measurements", "attention_maps", "gates_as", "interventions", "measure", "perplexity"]
