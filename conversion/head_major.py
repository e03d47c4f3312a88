"""Qwen3.5's and Qwen3-Next's terms for these models: their attention layers compute exactly this one's.

Where they differ, with all layers full attention and no experts: q_proj holds, for each query head, its query rows
and then its gate rows, one a channel; the gate is a plain sigmoid, in every layer; norms multiply by 1 + weight;
biases are all or none.

Some engines hold a state for linear attention, and fail where no layer has one (llama.cpp). For these a model can have
one more layer, of linear attention, whose weights are all zero: it adds zero to the residual stream, exactly.
"""

import math
from dataclasses import replace

import numpy as np
import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig

from ..configuration import GatedQwenConfig
from .errors import CheckpointError, shown
from .plan import Plan, Shifted
from .reader import Reader, shift, values

# model_type in config.json, and the class of its causal language model.
HEAD_MAJOR = {"qwen3_5_text": "Qwen3_5ForCausalLM", "qwen3_next": "Qwen3NextForCausalLM"}

SHARED = (
    "attention_dropout", "bos_token_id", "dtype", "eos_token_id", "head_dim", "hidden_act", "hidden_size",
    "initializer_range", "intermediate_size", "max_position_embeddings", "num_attention_heads", "num_hidden_layers",
    "num_key_value_heads", "pad_token_id", "rms_norm_eps", "tie_word_embeddings", "use_cache", "vocab_size",
)  # fmt: skip

NORMS = ("input_layernorm", "post_attention_layernorm", "q_norm", "k_norm", "norm")

# Of the layer that adds zero. Heads enough for tensor parallelism over 8, of the size that kernels are made for.
LINEAR_LAYER = {
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}

ALTERNATIVE = "serve it in the native layout, through transformers or vLLM's Transformers backend"


def head_major_config(
    config: GatedQwenConfig, model_type: str, where: str, linear_layer: bool = False
) -> PreTrainedConfig:
    """A native config in the terms of one of these families, with one more layer of linear attention or without.

    Raises:
        CheckpointError: it has what they cannot express.
    """
    reasons = {
        "a head other than the causal language model's": config.architectures != ["GatedQwenForCausalLM"],
        "attention without norms on queries and keys (use_qk_norm)": not config.use_qk_norm,
        "biases in the MLP (mlp_bias)": config.mlp_bias,
        "sliding windows (layer_types)": "sliding_attention" in config.layer_types,
    }
    found = [reason for reason, holds in reasons.items() if holds]
    if found:
        raise CheckpointError(f"{where}: {model_type} cannot express {', '.join(found)}: {ALTERNATIVE}.")
    half = config.head_dim // 2
    rope = {
        **config.rope_parameters,
        "partial_rotary_factor": 1.0,
        # Of text, all three positions are the same, so that any sections will do that add up to half a head.
        "mrope_section": [half - 2 * (half // 3), half // 3, half // 3],
        "mrope_interleaved": True,
    }
    if model_type == "qwen3_next":
        rope = {name: value for name, value in rope.items() if not name.startswith("mrope_")}
    biases = config.attention_bias or config.attention_output_bias or config.attn_gate_bias
    fields = {
        **{name: getattr(config, name) for name in SHARED},
        "rope_parameters": rope,
        "partial_rotary_factor": 1.0,
        "attention_bias": bool(biases),
        "layer_types": ["full_attention"] * config.num_hidden_layers,
        "architectures": [HEAD_MAJOR[model_type]],
    }
    if linear_layer:
        fields |= LINEAR_LAYER
        fields["layer_types"].append("linear_attention")
        fields["num_hidden_layers"] += 1
    if getattr(config, "tokenizer_class", None):
        fields["tokenizer_class"] = config.tokenizer_class
    if model_type == "qwen3_next":
        fields |= {
            "num_experts": 0,
            "num_experts_per_tok": 0,
            "mlp_only_layers": list(range(fields["num_hidden_layers"])),
        }
    try:
        return CONFIG_MAPPING[model_type](**fields)
    except Exception as error:  # their strict configs raise many kinds
        raise CheckpointError(f"{where}: {model_type} does not take this: {shown(error, 400)}") from error


def linear_layer_of(config: PreTrainedConfig) -> int | None:
    """The number of the one layer of linear attention that an export may have added, if there is one."""
    last = config.num_hidden_layers - 1
    return last if last and config.layer_types[last] == "linear_attention" else None


def read_head_major_config(fields: dict, where: str) -> tuple[PreTrainedConfig, GatedQwenConfig]:
    """A config.json of one of these families, and the same model in this family's terms: elementwise, scale 1,
    and without a last layer of linear attention.

    Raises:
        CheckpointError: it has what these models cannot express.
    """
    model_type = fields["model_type"]
    own = {name: value for name, value in fields.items() if not name.startswith("_") and name != "auto_map"}
    if not own.get("architectures"):
        own["architectures"] = [HEAD_MAJOR[model_type]]
    own.pop("text_config", None)  # these are text models
    if own.get("quantization_config"):
        raise CheckpointError(f"{where}: quantised weights: start from the unquantised ones.")
    try:
        config = CONFIG_MAPPING[model_type].from_dict(own)
    except Exception as error:
        raise CheckpointError(f"{where} cannot be read: {shown(error, 400)}") from error
    layers = config.num_hidden_layers
    sparse = model_type == "qwen3_next" and config.num_experts > 0
    dense = set(config.mlp_only_layers) if sparse else set(range(layers))
    own_layers = layers if linear_layer_of(config) is None else layers - 1
    reasons = {
        "linear attention layers": set(config.layer_types[:own_layers]) != {"full_attention"},
        "experts": not set(range(layers)) <= dense,
        "partial rotary embeddings": config.rope_parameters.get("partial_rotary_factor", 1) != 1,
        f"the class {shown(config.architectures)}": config.architectures != [HEAD_MAJOR[model_type]],
    }
    found = [reason for reason, holds in reasons.items() if holds]
    if found:
        raise CheckpointError(f"{where}: a {model_type} model with {', '.join(found)}: these models have none.")
    rope = {
        name: value
        for name, value in config.rope_parameters.items()
        if not name.startswith("mrope_") and name != "partial_rotary_factor"
    }
    kept = {name: getattr(config, name) for name in SHARED} | {"num_hidden_layers": own_layers}
    if getattr(config, "tokenizer_class", None):
        kept["tokenizer_class"] = config.tokenizer_class
    try:
        gated = GatedQwenConfig(
            **kept,
            rope_parameters=rope,
            attn_gate="elementwise",
            attention_bias=config.attention_bias,
            attention_output_bias=config.attention_bias,
            attn_gate_bias=config.attention_bias,
            architectures=["GatedQwenForCausalLM"],
        )
    except Exception as error:
        raise CheckpointError(f"{where}: {shown(error, 400)}") from error
    return config, gated


def layer_of(name: str) -> int | None:
    return int(name.split("layers.")[1].split(".")[0]) if "layers." in name else None


def output_factors(config: GatedQwenConfig, where: str) -> dict[int, float]:
    """By layer, what o_proj's weight is multiplied by so that a plain sigmoid gate will do; 1 is left out."""
    if config.attn_gate is not None and math.frexp(config.attn_gate_scale)[0] != 0.5:
        raise CheckpointError(
            f"{where}: attn_gate_scale {config.attn_gate_scale:g} is not a power of two, so that o_proj cannot take "
            "it over exactly: the layouts without a scale cannot express it. Export it --to native."
        )
    layers = range(config.num_hidden_layers)
    factors = {layer: config.attn_gate_scale if config.is_gated_layer(layer) else 2.0 for layer in layers}
    return {layer: float(factor) for layer, factor in factors.items() if factor != 1}


def settle_norms(plan: Plan) -> Plan:
    """Read the norms that are shifted, and note what is rounded: in the file, and by engines that run in 16 bits."""
    lost, rounded, number = 0.0, 0.0, 0
    sixteen = plan.config.dtype if plan.config.dtype in (torch.bfloat16, torch.float16) else None
    with Reader(plan.source) as reader:
        for output in plan.tensors:
            for part in output.parts:
                if not isinstance(part, Shifted):
                    continue
                block = memoryview(bytearray(part.tensor.nbytes))
                reader.read(block, part.tensor, 0)
                exact = values(block, part.tensor.dtype).astype(np.float64) + part.shift
                data = memoryview(bytearray(shift(reader, part.tensor, part.shift, part.dtype)))
                written = values(data, part.dtype).astype(np.float64)
                finite = np.isfinite(exact)
                lost = max(lost, float(np.abs(written - exact, where=finite, out=np.zeros_like(exact)).max(initial=0)))
                if sixteen is not None:
                    there = torch.from_numpy(written)
                    rounded = max(rounded, (there.to(sixteen).double() - there).nan_to_num(0).abs().max().item())
                number += 1
    notes = list(plan.notes)
    if lost:
        notes.append(f"{number} norm weights are rounded in the last place, by up to {lost:.2g}.")
    if rounded:
        name = str(sixteen).removeprefix("torch.")
        notes.append(
            f"the norm weights are kept in float32, and an engine that runs in {name} rounds them by up to "
            f"{rounded:.2g} where they are added to 1: run it in float32 to have none of that."
        )
    return replace(plan, notes=tuple(notes))
