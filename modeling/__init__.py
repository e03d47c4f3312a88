"""The models of the family: Qwen3 with an output gate on the attention, and nothing else changed.

One attention class has the gate; one module, `GatedQwenOutputGate`, applies it to the output of whichever attention
backend ran, (batch, tokens, heads, head_dim). No state is parked on modules between calls.
"""

from .modeling_gated_qwen import (
    GatedQwenForCausalLM,
    GatedQwenForQuestionAnswering,
    GatedQwenForSequenceClassification,
    GatedQwenForTokenClassification,
    GatedQwenModel,
    GatedQwenPreTrainedModel,
)

__all__ = [
    "GatedQwenForCausalLM",
    "GatedQwenForQuestionAnswering",
    "GatedQwenForSequenceClassification",
    "GatedQwenForTokenClassification",
    "GatedQwenModel",
    "GatedQwenPreTrainedModel",
]
