"""Registration of the family with transformers' Auto classes."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    Qwen2Tokenizer,
)

from . import modeling
from .configuration import GatedQwenConfig, recognise_released_checkpoints


def register() -> None:
    """Register the family; calling it again changes nothing."""
    recognise_released_checkpoints()
    AutoConfig.register("gated_qwen", GatedQwenConfig, exist_ok=True)
    AutoTokenizer.register(GatedQwenConfig, tokenizer_class=Qwen2Tokenizer, exist_ok=True)
    for auto_class, model_class in (
        (AutoModel, modeling.GatedQwenModel),
        (AutoModelForCausalLM, modeling.GatedQwenForCausalLM),
        (AutoModelForSequenceClassification, modeling.GatedQwenForSequenceClassification),
        (AutoModelForTokenClassification, modeling.GatedQwenForTokenClassification),
        (AutoModelForQuestionAnswering, modeling.GatedQwenForQuestionAnswering),
    ):
        auto_class.register(GatedQwenConfig, model_class, exist_ok=True)
