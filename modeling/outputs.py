"""transformers' model outputs with `gate_scores`: one (batch, tokens, heads, 1 or head_dim) tensor a gated layer."""

from dataclasses import dataclass

import torch
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutputWithPast,
    TokenClassifierOutput,
)


@dataclass
class GatedQwenModelOutputWithPast(BaseModelOutputWithPast):
    gate_scores: tuple[torch.Tensor, ...] | None = None


@dataclass
class GatedQwenCausalLMOutputWithPast(CausalLMOutputWithPast):
    gate_scores: tuple[torch.Tensor, ...] | None = None


@dataclass
class GatedQwenSequenceClassifierOutputWithPast(SequenceClassifierOutputWithPast):
    gate_scores: tuple[torch.Tensor, ...] | None = None


@dataclass
class GatedQwenTokenClassifierOutput(TokenClassifierOutput):
    gate_scores: tuple[torch.Tensor, ...] | None = None


@dataclass
class GatedQwenQuestionAnsweringModelOutput(QuestionAnsweringModelOutput):
    gate_scores: tuple[torch.Tensor, ...] | None = None


WITH_GATE_SCORES = {
    output.__base__: output
    for output in (
        GatedQwenModelOutputWithPast,
        GatedQwenCausalLMOutputWithPast,
        GatedQwenSequenceClassifierOutputWithPast,
        GatedQwenTokenClassifierOutput,
        GatedQwenQuestionAnsweringModelOutput,
    )
}


def with_gate_scores(outputs, gate_scores: tuple[torch.Tensor, ...]):
    """`outputs` of a stock class, or a tuple of them, with the scores."""
    if isinstance(outputs, tuple):
        return (*outputs, gate_scores)
    return WITH_GATE_SCORES[type(outputs)](**{**outputs, "gate_scores": gate_scores})
