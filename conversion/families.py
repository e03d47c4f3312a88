"""The families of models that gates can be put onto, and what their configs say in the terms of `GatedQwenConfig`.

Each family is one small function from its own config to the fields that differ from family to family. All other fields
have the same name and meaning in all of them.
"""

from collections.abc import Callable

from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

from ..configuration import GatedQwenConfig
from ..configuration.released import RELEASED_MODEL_TYPES, is_released
from .errors import CheckpointError, shown
from .headers import DTYPES


def _full(config) -> dict:
    """All layers attend to everything."""
    return {
        "layer_types": ["full_attention"] * config.num_hidden_layers,
        "use_sliding_window": False,
        "sliding_window": None,
    }


def _by_layer(config) -> dict:
    return {
        "layer_types": list(config.layer_types),
        "use_sliding_window": config.use_sliding_window,
        "sliding_window": config.sliding_window,
        "max_window_layers": config.max_window_layers,
    }


def _llama(config) -> dict:
    return {
        **_full(config),
        "use_qk_norm": False,
        "attention_bias": config.attention_bias,
        "attention_output_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
    }


def _mistral(config) -> dict:
    fields = {"use_qk_norm": False, "attention_bias": False, "attention_output_bias": False, "mlp_bias": False}
    if config.sliding_window is None:
        return {**_full(config), **fields}
    return {
        **fields,
        "layer_types": ["sliding_attention"] * config.num_hidden_layers,
        "use_sliding_window": True,
        "sliding_window": config.sliding_window,
        "max_window_layers": 0,
    }


def _qwen2(config) -> dict:
    return {
        **_by_layer(config),
        "use_qk_norm": False,
        "attention_bias": True,
        "attention_output_bias": False,
        "mlp_bias": False,
    }


def _qwen3(config) -> dict:
    return {
        **_by_layer(config),
        "use_qk_norm": True,
        "attention_bias": config.attention_bias,
        "attention_output_bias": config.attention_bias,
        "mlp_bias": False,
    }


FAMILIES: dict[str, Callable[[PreTrainedConfig], dict]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
}

# Fields of their configs that have no place in GatedQwenConfig, and say nothing of the function.
NOT_OURS = (
    "pretraining_tp",
    "auto_map",
    "transformers_version",
    "model_type",
    "architectures",
    "transformers_weights",
    "quantization_config",
    "compression_config",
    "qkv_bias",  # of the authors' form, which is read before
)

GATED = "has gates of its own, in another layout"
OTHER_FAMILIES = {
    **dict.fromkeys(("afmoe", "step3p5", "step3", "laguna", "lfm3", "dots3", "hrm_text", "spark"), GATED),
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen4"), GATED),
    "gpt_oss": "has learned attention sinks",
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text"), "has norms, scales and softcapping of its own"),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "minicpm3", "kimi_k2"), "has latent attention (MLA)"),
    **dict.fromkeys(("phi", "phi3", "stablelm", "glm", "glm4", "persimmon"), "rotates a part of each head"),
    "smollm3": "has layers without rotary embeddings",
    **dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe", "olmoe"), "is a mixture of experts"),
    **dict.fromkeys(("llama4", "llama4_text"), "has chunked attention and experts"),
    **dict.fromkeys(("cohere", "cohere2", "olmo", "olmo2", "olmo3", "granite"), "has norms or scales of its own"),
    "ministral": "has a pattern of sliding windows of its own",
}

# What a config may ask for that these models do not compute: field, whether a value asks, and what it is called.
FEATURES = (
    ("quantization_config", bool, "quantised weights"),
    ("compression_config", bool, "quantised weights"),
    ("attn_logit_softcapping", bool, "softcapping"),
    ("final_logit_softcapping", bool, "softcapping"),
    ("logit_softcapping", bool, "softcapping"),
    ("partial_rotary_factor", lambda value: value not in (None, 1), "partial rotary embeddings"),
    ("rotary_pct", lambda value: value not in (None, 1), "partial rotary embeddings"),
    ("kv_lora_rank", bool, "latent attention (MLA)"),
    ("q_lora_rank", bool, "latent attention (MLA)"),
    ("attention_sinks", bool, "learned attention sinks"),
    ("attn_sinks", bool, "learned attention sinks"),
    ("use_sinks", bool, "learned attention sinks"),
    ("attention_sink", bool, "learned attention sinks"),
    ("num_experts", lambda value: value not in (None, 0, 1), "experts"),
    ("num_local_experts", lambda value: value not in (None, 0, 1), "experts"),
    ("n_routed_experts", bool, "experts"),
    ("no_rope_layers", lambda value: bool(value) and 0 in value, "layers without rotary embeddings"),
    ("no_rope_layer_interval", bool, "layers without rotary embeddings"),
    ("attention_chunk_size", bool, "chunked attention"),
    ("sliding_window_pattern", bool, "a pattern of sliding windows"),
    ("alibi", bool, "ALiBi"),
    ("use_bidirectional_attention", bool, "bidirectional attention"),
    ("attn_output_gate", bool, "another family's gates"),
    ("attention_output_gate", bool, "another family's gates"),
    ("use_attn_gate", bool, "another family's gates"),
    ("use_head_wise_attn_gate", bool, "another family's gates"),
    ("gate_attn_act_mode", bool, "another family's gates"),
    ("embedding_multiplier", lambda value: value not in (None, 1), "scaled embeddings"),
    ("residual_multiplier", lambda value: value not in (None, 1), "scaled residuals"),
    ("attention_multiplier", bool, "scaled attention"),
    ("logits_scaling", lambda value: value not in (None, 1), "scaled logits"),
    ("vision_config", bool, "a vision model"),
    ("text_config", bool, "a model in a model"),
    ("transformers_weights", bool, "weights under another name"),
)


def read_config(fields: dict, where: str) -> PreTrainedConfig:
    """The config of a source, of its own family's class. Released checkpoints give a `GatedQwenConfig`.

    Raises:
        CheckpointError: it is of a family, or asks for a feature, that cannot be expressed; the line names it.
    """
    if not isinstance(fields, dict):
        raise CheckpointError(f"{where} has no fields.")
    model_type = fields.get("model_type")
    gated = model_type == "gated_qwen" or (is_released(fields) and model_type in RELEASED_MODEL_TYPES)
    if not gated:
        if not isinstance(model_type, str) or model_type not in FAMILIES:
            reason = f"is not one of {', '.join(FAMILIES)}, gated_qwen"
            reason = OTHER_FAMILIES.get(model_type, reason) if isinstance(model_type, str) else reason
            raise CheckpointError(
                f"{where}: model_type {shown(repr(model_type))} {reason}: gates cannot be put onto it here."
            )
        if is_released(fields):
            raise CheckpointError(f"{where}: model_type {model_type!r} with the gates of another one: correct it.")
    check_windows(fields, model_type, where)
    dtype = fields.get("dtype", fields.get("torch_dtype"))
    if dtype not in (None, "auto", *DTYPES.values()):
        raise CheckpointError(
            f"{where}: dtype {shown(repr(dtype))} is none of {', '.join(DTYPES.values())}: start from weights in one."
        )
    architectures = fields.get("architectures")
    named = isinstance(architectures, list) and len(architectures) == 1 and isinstance(architectures[0], str)
    if architectures is not None and not named:
        raise CheckpointError(f"{where}: `architectures` must name one class in a list, got {shown(architectures)}.")
    sizes = ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size", "num_key_value_heads")
    for name in (*sizes, "max_position_embeddings"):
        value = fields.get(name)
        if value is not None and not (isinstance(value, int) and 0 < value < 2**40):
            raise CheckpointError(f"{where}: `{name}` must be a number above 0, got {shown(repr(value))}.")
    for name, asks, feature in FEATURES:
        value = fields.get(name)
        if value is not None and _asks(asks, value):
            remedy = "start from the unquantised weights" if "quantised" in feature else "these models have none"
            raise CheckpointError(f"{where}: `{name}` asks for {feature}: {remedy}.")
    for name in ("rope_parameters", "rope_scaling"):
        rope = fields.get(name)
        if isinstance(rope, dict) and any(isinstance(value, dict) for value in rope.values()):
            raise CheckpointError(f"{where}: `{name}` differs by layer type: these models have one for all layers.")
        if isinstance(rope, dict) and (rope.get("mrope_section") or rope.get("partial_rotary_factor", 1) != 1):
            raise CheckpointError(f"{where}: `{name}` rotates in sections or partly: these models rotate whole heads.")
    own = {name: value for name, value in fields.items() if not name.startswith("_") and name != "auto_map"}
    try:
        if gated:
            return GatedQwenConfig.from_dict(own)
        return CONFIG_MAPPING[model_type].from_dict(own)
    except Exception as error:  # transformers' strict configs raise many kinds
        raise CheckpointError(f"{where} cannot be read: {shown(error, 400)}") from error


def check_windows(fields: dict, model_type: str | None, where: str) -> None:
    """Stock Llama and Mistral heed `layer_types` and windows in the cache only, and with it compute something else."""
    types, window = fields.get("layer_types"), fields.get("sliding_window")
    if model_type == "llama" and window is not None:
        raise CheckpointError(
            f"{where}: `sliding_window` ({shown(repr(window))}) in a llama model, which has none but cuts its cache "
            "to it: remove it, or name the model_type that is meant."
        )
    kind = "sliding_attention" if model_type == "mistral" and window is not None else "full_attention"
    if types is not None and not isinstance(types, list):
        raise CheckpointError(f"{where}: `layer_types` must be a list, got {shown(types)}: correct it.")
    if model_type in ("llama", "mistral") and types is not None and set(map(str, types)) != {kind}:
        raise CheckpointError(
            f"{where}: `layer_types` must be {kind} for all layers of this {model_type} model, got "
            f"{shown(types)}: remove it, or name the model_type that is meant."
        )


def _asks(asks: Callable, value) -> bool:
    try:
        return bool(asks(value))
    except TypeError:
        return True


def gated_config(
    source: PreTrainedConfig, where: str = "config.json", default_head: str = "ForCausalLM", **gate
) -> GatedQwenConfig:
    """A source's config as a `GatedQwenConfig` with the fields `gate`.

    Args:
        default_head: of a source that names no architecture

    Raises:
        CheckpointError: the two cannot be combined, or the source has a value that is not allowed.
    """
    fields = source.to_dict()
    if source.model_type in FAMILIES:
        try:
            fields |= FAMILIES[source.model_type](source)
        except Exception as error:  # fields that differ by layer, for one
            raise CheckpointError(f"{where}: {shown(error, 400)}") from error
        fields |= {"head_dim": getattr(source, "head_dim", None), "attn_gate_bias": False}
    else:
        fields |= {"attn_gate_layers": None, "attn_gate_scale": source.attn_gate_scale}
    fields = {name: value for name, value in fields.items() if name not in NOT_OURS and not name.startswith("_")}
    try:
        fields["architectures"] = [gated_class_name(name) for name in source.architectures or [default_head]]
        return GatedQwenConfig(**{**fields, **gate})
    except Exception as error:
        raise CheckpointError(f"{where}: {shown(error, 400)}") from error


HEADS = ("ForCausalLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "Model")
CLASS_NAMES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "gated_qwen": "GatedQwen"}


def gated_class_name(architecture: str) -> str:
    """`LlamaForCausalLM` to `GatedQwenForCausalLM`, and so on."""
    for head in HEADS:
        if architecture.endswith(head):
            return f"GatedQwen{head}"
    raise CheckpointError(f"`architectures` names {shown(architecture)}, and this family has only {', '.join(HEADS)}.")


def check_architecture(config: PreTrainedConfig, fields: dict, where: str) -> None:
    """Another class than transformers' own may compute anything."""
    for name in config.architectures or ():
        stock = [CLASS_NAMES[config.model_type] + head for head in HEADS]
        if name.lower() not in map(str.lower, stock):  # some Llamas are spelled LLaMA
            raise CheckpointError(
                f"{where}: `architectures` names {shown(name)}, and a {config.model_type} model that can be converted "
                f"is one of {', '.join(stock)}."
            )


def tokenizer_class(model_type: str) -> str:
    """The tokenizer that transformers takes for a source that names none, in config.json's terms."""
    name = TOKENIZER_MAPPING_NAMES.get(model_type)
    return "TokenizersBackend" if name in (None, "MistralCommonBackend") else name


__all__ = ["FAMILIES", "gated_class_name", "gated_config", "read_config"]
