"""PyTorch GatedQwen model."""

import inspect
from collections.abc import Callable
from functools import wraps

import torch
from torch import nn
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Attention,
    Qwen3DecoderLayer,
    Qwen3ForCausalLM,
    Qwen3Model,
    Qwen3PreTrainedModel,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
    eager_attention_forward,
)
from transformers.utils import ModelOutput
from transformers.utils.output_capturing import OutputRecorder

from ..configuration import GatedQwenConfig
from .loading import ChecksWhatItLoads
from .outputs import with_gate_scores
from .saving import PublishesItself

# transformers 5.24 renamed what layers call the key/value cache.
CACHE = "cache" if "cache" in inspect.signature(Qwen3Attention.forward).parameters else "past_key_values"

# A pattern for names of modules and of parameters, either of which quantisers look for.
GATES = r".*\.g_proj"


class GatedQwenRMSNorm(Qwen3RMSNorm):
    pass


class GatedQwenMLP(LlamaMLP):
    """Llama's MLP: Qwen3's with optional biases."""


class GatedQwenRotaryEmbedding(Qwen3RotaryEmbedding):
    pass


class GatedQwenOutputGate(nn.Module):
    """Applies the gate; its scores are recorded as the model output `gate_scores`."""

    def __init__(self, config: GatedQwenConfig):
        super().__init__()
        self.scale = config.attn_gate_scale

    def forward(self, attn_output: torch.Tensor, gate_logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Args:
            attn_output: (batch, tokens, heads, head_dim)
            gate_logits: (batch, tokens, heads) headwise, (batch, tokens, heads * head_dim) elementwise

        Returns:
            `attn_output * scale * sigmoid(gate_logits)`, and the scores: (batch, tokens, heads, 1 or head_dim)
        """
        scores = torch.sigmoid(gate_logits).view(*attn_output.shape[:-1], -1)
        if self.scale != 1:
            scores = scores * self.scale
        return attn_output * scores, scores


class GatedQwenAttention(nn.Module):
    """
    Qwen3's attention, except:
    - a gate on each head's output, computed from the layer's input (arXiv 2505.06708, position G1)
    - o_proj's bias is configured apart from that of q_proj, k_proj and v_proj
    - query and key norms are optional
    """

    def __init__(self, config: GatedQwenConfig, layer_idx: int):
        super().__init__()
        self.layer_type = config.layer_types[layer_idx]
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = True
        self.sliding_window = config.sliding_window if self.layer_type == "sliding_attention" else None

        hidden_size, heads = config.hidden_size, config.num_attention_heads
        self.q_proj = nn.Linear(hidden_size, heads * self.head_dim, bias=config.attention_bias)
        self.k_proj = nn.Linear(hidden_size, config.num_key_value_heads * self.head_dim, bias=config.attention_bias)
        self.v_proj = nn.Linear(hidden_size, config.num_key_value_heads * self.head_dim, bias=config.attention_bias)
        self.o_proj = nn.Linear(heads * self.head_dim, hidden_size, bias=config.attention_output_bias)
        self.q_norm = GatedQwenRMSNorm(self.head_dim, eps=config.rms_norm_eps) if config.use_qk_norm else nn.Identity()
        self.k_norm = GatedQwenRMSNorm(self.head_dim, eps=config.rms_norm_eps) if config.use_qk_norm else nn.Identity()
        self.g_proj = None
        if config.is_gated_layer(layer_idx):
            width = {"headwise": 1, "elementwise": self.head_dim}[config.attn_gate]
            self.g_proj = nn.Linear(hidden_size, heads * width, bias=config.attn_gate_bias)
            self.output_gate = GatedQwenOutputGate(config)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        cache = kwargs.pop(CACHE, None)
        input_shape = hidden_states.shape[:-1]
        hidden_shape = (*input_shape, -1, self.head_dim)

        query_states = self.q_norm(self.q_proj(hidden_states).view(hidden_shape)).transpose(1, 2)
        key_states = self.k_norm(self.k_proj(hidden_states).view(hidden_shape)).transpose(1, 2)
        value_states = self.v_proj(hidden_states).view(hidden_shape).transpose(1, 2)

        cos, sin = position_embeddings
        query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)

        if cache is not None:
            # The paged cache of continuous batching writes to `kwargs` what its attention needs.
            key_states, value_states = cache.update(key_states, value_states, self.layer_idx, kwargs=kwargs)

        attention_interface: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        attn_output, attn_weights = attention_interface(
            self,
            query_states,
            key_states,
            value_states,
            attention_mask,
            dropout=0.0 if not self.training else self.attention_dropout,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **kwargs,
        )

        # Engines that plug in their own attention return heads flattened; tensor parallelism holds a part of them.
        attn_output = attn_output.reshape(hidden_shape)
        if self.g_proj is not None:
            attn_output, _ = self.output_gate(attn_output, self.g_proj(hidden_states))
        attn_output = self.o_proj(attn_output.reshape(*input_shape, -1))
        return attn_output, attn_weights


class GatedQwenDecoderLayer(Qwen3DecoderLayer):
    def __init__(self, config: GatedQwenConfig, layer_idx: int):
        GradientCheckpointingLayer.__init__(self)
        self.hidden_size = config.hidden_size
        self.self_attn = GatedQwenAttention(config, layer_idx)
        self.mlp = GatedQwenMLP(config)
        self.input_layernorm = GatedQwenRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = GatedQwenRMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class GatedQwenPreTrainedModel(PublishesItself, ChecksWhatItLoads, Qwen3PreTrainedModel):
    config: GatedQwenConfig
    base_model_prefix = "model"
    _no_split_modules = ["GatedQwenDecoderLayer"]
    # Quantisers leave what is named here as it is: gates are small, and carry the model.
    _keep_in_fp32_modules = [GATES]
    _can_record_outputs = {
        "hidden_states": GatedQwenDecoderLayer,
        "attentions": GatedQwenAttention,
        "gate_scores": OutputRecorder(GatedQwenOutputGate, index=1),
    }

    def _get_dtype_plan(self, dtype: torch.dtype) -> dict:
        """No gate is made float32: the list above is for quantisers alone."""
        plan = super()._get_dtype_plan(dtype)
        return {name: kept for name, kept in plan.items() if name != GATES}


class GatedQwenModel(GatedQwenPreTrainedModel, Qwen3Model):
    """
    The decoder without a head.

    With `output_gate_scores=True` the output has `gate_scores`, a tuple with one (batch, tokens, heads, 1 or head_dim)
    tensor for each gated layer: the factors on the attention output, `attn_gate_scale * sigmoid(g_proj(X))`. They
    carry gradients, but not under gradient checkpointing with `use_reentrant=True`, which records them without.
    """

    def __init__(self, config: GatedQwenConfig):
        config.check()
        super(Qwen3Model, self).__init__(config)  # Qwen3Model's own would build Qwen3's layers
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList(
            [GatedQwenDecoderLayer(config, layer_idx) for layer_idx in range(config.num_hidden_layers)]
        )
        self.norm = GatedQwenRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = GatedQwenRotaryEmbedding(config=config)
        self.gradient_checkpointing = False
        self.has_sliding_layers = "sliding_attention" in config.layer_types
        self.post_init()

    @wraps(Qwen3Model.forward)
    def forward(self, *args, gate_scores_out: list | None = None, **kwargs):
        if gate_scores_out is not None:
            kwargs["return_dict"] = True
        outputs = super().forward(*args, **kwargs)
        if isinstance(outputs, ModelOutput) and "gate_scores" in outputs:
            outputs = with_gate_scores(outputs, outputs.gate_scores)
        if gate_scores_out is not None:
            gate_scores_out.extend(outputs.gate_scores)
        return outputs


def passes_on_gate_scores(forward):
    """The forward of a head, with the `gate_scores` of its base model in the output, which it would drop."""

    @wraps(forward)
    def wrapper(self, *args, **kwargs):
        if not kwargs.get("output_gate_scores", getattr(self.config, "output_gate_scores", False)):
            return forward(self, *args, **kwargs)
        gate_scores = []
        outputs = forward(self, *args, gate_scores_out=gate_scores, **kwargs)
        return with_gate_scores(outputs, tuple(gate_scores))

    return wrapper


class GatedQwenForCausalLM(GatedQwenPreTrainedModel, Qwen3ForCausalLM):
    def __init__(self, config: GatedQwenConfig):
        super(Qwen3ForCausalLM, self).__init__(config)  # Qwen3ForCausalLM's own would build a Qwen3Model
        self.model = GatedQwenModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    forward = passes_on_gate_scores(Qwen3ForCausalLM.forward)


# transformers' generic heads build their decoder through AutoModel, which as remote code would ask for trust again.


class GatedQwenForSequenceClassification(GenericForSequenceClassification, GatedQwenPreTrainedModel):
    def __init__(self, config: GatedQwenConfig):
        GatedQwenPreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.model = GatedQwenModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()

    forward = passes_on_gate_scores(GenericForSequenceClassification.forward)


class GatedQwenForTokenClassification(GenericForTokenClassification, GatedQwenPreTrainedModel):
    def __init__(self, config: GatedQwenConfig):
        GatedQwenPreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.model = GatedQwenModel(config)
        dropout = getattr(config, "classifier_dropout", None)
        self.dropout = nn.Dropout(0.1 if dropout is None else dropout)
        self.score = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    forward = passes_on_gate_scores(GenericForTokenClassification.forward)


class GatedQwenForQuestionAnswering(GenericForQuestionAnswering, GatedQwenPreTrainedModel):
    def __init__(self, config: GatedQwenConfig):
        GatedQwenPreTrainedModel.__init__(self, config)
        self.model = GatedQwenModel(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()

    forward = passes_on_gate_scores(GenericForQuestionAnswering.forward)


__all__ = [
    "GatedQwenForCausalLM",
    "GatedQwenForQuestionAnswering",
    "GatedQwenForSequenceClassification",
    "GatedQwenForTokenClassification",
    "GatedQwenModel",
    "GatedQwenPreTrainedModel",
]
