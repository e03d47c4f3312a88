"""What gates and attention sinks do in a decoder, as numbers."""

from .metrics import first_token_attention, gate_statistics, massive_activation, measure, sink_ratio, uniform_floor

__all__ = [
    "first_token_attention",
    "gate_statistics",
    "massive_activation",
    "measure",
    "sink_ratio",
    "uniform_floor",
]
