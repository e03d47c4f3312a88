"""Gated softmax attention as a Hugging Face Transformers model family.

`import gated_qwen` registers the family with transformers' Auto classes; after it, `AutoConfig`, `AutoTokenizer` and
the `AutoModel...` classes load native checkpoints and the authors' released ones (arXiv 2505.06708).

- `gated_qwen.configuration`: `GatedQwenConfig`, and how a released checkpoint is recognised
- `gated_qwen.modeling`: the models, and what is checked when one is loaded
- `gated_qwen.conversion`: what turns one checkpoint into another: gates onto it, and off again
- `gated_qwen.diagnostics`: what gates and sinks do, as numbers
- `gated_qwen.training`: gates at a rate of their own or alone; the recipe that takes a sink out
- `gated_qwen.demo`: `gated-qwen demo` and the small model it shows
"""

from pathlib import Path as _Path

# In a checkout the parts of the package lie beside this folder, not inside it.
if (_Path(__file__).parents[1] / "configuration" / "configuration_gated_qwen.py").is_file():
    __path__.append(str(_Path(__file__).parents[1]))

from .auto import register
from .configuration import GatedQwenConfig
from .modeling import (
    GatedQwenForCausalLM,
    GatedQwenForQuestionAnswering,
    GatedQwenForSequenceClassification,
    GatedQwenForTokenClassification,
    GatedQwenModel,
    GatedQwenPreTrainedModel,
)

__version__ = "0.1.0"

from .conversion.adapter import retrofit_adapter
from .conversion.errors import CheckpointError
from .conversion.export import export_checkpoint, plan_export
from .conversion.importing import import_checkpoint, plan_import
from .conversion.in_memory import retrofit
from .conversion.push import push_checkpoint
from .conversion.retrofit import plan_retrofit, retrofit_checkpoint
from .conversion.strip import plan_strip, strip_checkpoint

__all__ = [
    "CheckpointError",
    "GatedQwenConfig",
    "GatedQwenForCausalLM",
    "GatedQwenForQuestionAnswering",
    "GatedQwenForSequenceClassification",
    "GatedQwenForTokenClassification",
    "GatedQwenModel",
    "GatedQwenPreTrainedModel",
    "export_checkpoint",
    "import_checkpoint",
    "plan_export",
    "plan_import",
    "plan_retrofit",
    "plan_strip",
    "push_checkpoint",
    "retrofit",
    "retrofit_adapter",
    "retrofit_checkpoint",
    "strip_checkpoint",
]

register()
