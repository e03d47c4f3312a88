"""The authors' released form: recognising its config.json and reading its fields.

A released config.json says `model_type: qwen2` and names code files in `auto_map`. What tells it apart is that it
carries the two gate flags, which no config of transformers has; the baseline carries them too, both false.
"""

import functools

from transformers import PreTrainedConfig
from transformers.utils import logging

logger = logging.get_logger(__name__)

GATE_FLAGS = {"headwise_attn_output_gate": "headwise", "elementwise_attn_output_gate": "elementwise"}

# The release says qwen2; the authors' own class, saved again, says qwen3.
RELEASED_MODEL_TYPES = (None, "qwen2", "qwen3")


def is_released(fields: dict) -> bool:
    """Whether these config fields are of the authors' form: at least one of their two gate flags is present."""
    return any(flag in fields for flag in GATE_FLAGS)


def read_released_fields(config, fields: dict) -> dict:
    """Set `config`'s gate and biases from the authors' `fields`, where there are any, and return the other fields.

    The authors' `qkv_bias` is also the bias of o_proj, and of the gate's rows inside the packed q_proj.

    Raises:
        ValueError: a field is not a boolean, or contradicts a native one.
    """
    fields = dict(fields)
    theirs = {name: fields.pop(name) for name in (*GATE_FLAGS, "qkv_bias") if name in fields}
    for name, value in theirs.items():
        if not isinstance(value, bool):
            raise ValueError(f"`{name}` must be true or false, got {value!r}.")

    if is_released(theirs):
        gates = [gate for flag, gate in GATE_FLAGS.items() if theirs.get(flag)]
        if len(gates) == 2:
            logger.warning(
                "Both `headwise_attn_output_gate` and `elementwise_attn_output_gate` are true: "
                "taking headwise, as the authors' code does."
            )
        if config.attn_gate not in ("headwise", *gates):  # headwise may be the default
            raise ValueError(
                f"`attn_gate` ({config.attn_gate!r}) and the authors' flags ({', '.join(gates) or 'both false'}) "
                "contradict each other: remove one of them."
            )
        if config.attn_gate_layers is not None:
            raise ValueError(
                "`attn_gate_layers` cannot be set beside the authors' flags, whose models have gates in all layers: "
                "remove it."
            )
        config.attn_gate = gates[0] if gates else None
        # It names the code beside the checkpoint, which is never run.
        fields.pop("auto_map", None)
        if config.architectures:
            config.architectures = [str(name).replace("Qwen3", "GatedQwen", 1) for name in config.architectures]

    qkv_bias = theirs.get("qkv_bias")
    if qkv_bias is not None:
        for name in ("attention_bias", "attention_output_bias", "attn_gate_bias"):
            native = getattr(config, name)
            if native not in (None, qkv_bias) and not (name == "attn_gate_bias" and native is False):
                raise ValueError(
                    f"`qkv_bias` ({qkv_bias}) and `{name}` ({native}) contradict each other: remove one of them."
                )
        config.attention_bias = config.attention_output_bias = qkv_bias
        config.attn_gate_bias = qkv_bias and config.attn_gate is not None
    return fields


def recognise_released_checkpoints() -> None:
    """Make every reader of config.json in transformers see a released checkpoint as `gated_qwen`.

    Stock classes would pick the file up by its `model_type` and load a wrong model, the baseline silently. Other
    configs pass through untouched. Calling this again changes nothing.
    """
    if getattr(PreTrainedConfig.get_config_dict, "recognises_released_checkpoints", False):
        return
    original = PreTrainedConfig.get_config_dict.__func__

    @functools.wraps(original)
    def get_config_dict(cls, *args, **kwargs):
        config_dict, kwargs = original(cls, *args, **kwargs)
        if is_released(config_dict) and config_dict.get("model_type") in RELEASED_MODEL_TYPES:
            config_dict = {**config_dict, "model_type": "gated_qwen"}
            # Left in, it would ask the user to trust code that is never run.
            config_dict.pop("auto_map", None)
        return config_dict, kwargs

    get_config_dict.recognises_released_checkpoints = True
    PreTrainedConfig.get_config_dict = classmethod(get_config_dict)
