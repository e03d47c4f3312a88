"""GatedQwen model configuration"""

import dataclasses
import math
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.utils import logging

from .released import GATE_FLAGS, is_released, read_released_fields
from .saving import SavesItsCode

logger = logging.get_logger(__name__)

ATTN_GATES = (None, "headwise", "elementwise")

# Model types that gate their attention in a way of their own; loaded here, their heads would be scrambled.
OTHER_GATED_FAMILIES = ("qwen3_next", "qwen3_5", "qwen4", "afmoe", "step3", "laguna", "lfm3", "dots3", "hrm_text")


@strict
class GatedQwenConfig(SavesItsCode, Qwen3Config):
    r"""
    Configuration of a [`GatedQwenModel`]: [`Qwen3Config`] with an output gate on the attention (arXiv 2505.06708), and
    with the biases and norms that Llama, Mistral and Qwen2 models differ in.

    The fields of the authors' released checkpoints (`headwise_attn_output_gate`, `elementwise_attn_output_gate`,
    `qkv_bias`) are read too; only the ones below are written.

    Args:
        attn_gate (`str`, *optional*, defaults to `"headwise"`):
            `"headwise"` (one gate score per token and head), `"elementwise"` (one per token, head and channel), or
            `None` (no gate).
        attn_gate_scale (`float`, defaults to 1.0):
            The factor on the sigmoid. With 2.0 and `g_proj` all zeros the gate is exactly the identity.
        attn_gate_bias (`bool`, defaults to `False`):
            Whether `g_proj` has a bias.
        attn_gate_layers (`list[int]`, *optional*):
            The layers that have a gate, counted from 0. `None`: all.
        use_qk_norm (`bool`, defaults to `True`):
            Whether queries and keys are RMS-normalised per head, as in Qwen3.
        attention_bias (`bool`, *optional*):
            Whether `q_proj`, `k_proj` and `v_proj` have a bias. `None` means no.
        attention_output_bias (`bool`, *optional*):
            Whether `o_proj` has a bias. `None`: as `attention_bias`.
        mlp_bias (`bool`, defaults to `False`):
            Whether the linears of the MLP have a bias.
        head_dim (`int`, *optional*, defaults to 128):
            `None`: `hidden_size // num_attention_heads`.

    Raises:
        ValueError: a field has a value that is not allowed, or two fields contradict each other.

    ```python
    >>> from gated_qwen import GatedQwenConfig, GatedQwenForCausalLM

    >>> config = GatedQwenConfig(attn_gate="elementwise", num_hidden_layers=2, hidden_size=64, intermediate_size=128,
    ...                          num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=1000)
    >>> model = GatedQwenForCausalLM(config)
    ```
    """

    model_type = "gated_qwen"

    # The gate is split by head, like the queries it belongs to.
    base_model_tp_plan = {**Qwen3Config.base_model_tp_plan, "layers.*.self_attn.g_proj": "colwise"}

    attn_gate: Any = "headwise"  # its own check names the allowed values
    attn_gate_scale: float | int = 1.0
    attn_gate_bias: bool = False
    attn_gate_layers: list[int] | None = None
    use_qk_norm: bool = True
    attention_bias: bool | None = None
    attention_output_bias: bool | None = None
    mlp_bias: bool = False
    head_dim: int | None = 128

    def __post_init__(self, **kwargs):
        # Whether q_proj of the weights beside this config has the gate's rows in it. About that file, so never saved.
        self._is_released = is_released(kwargs)
        kwargs = read_released_fields(self, kwargs)
        # Of a file or of another model's config: what is internal is never taken over, nor is another model's type.
        kwargs = {name: value for name, value in kwargs.items() if not name.startswith("_") and name != "model_type"}
        if self.attention_bias is None:
            self.attention_bias = False
        if self.attention_output_bias is None:
            self.attention_output_bias = self.attention_bias
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        self._check_sizes()
        self._check_gate()
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        super().__post_init__(**kwargs)
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"`layer_types` must have one entry for each of the `num_hidden_layers` ({self.num_hidden_layers}) "
                f"layers, got {len(self.layer_types)}."
            )
        self.check()

    def check(self):
        """Raise a ValueError where a field is not one to build a model from, and settle what follows from the fields.

        Models call it again when they are built, since fields may have been set since.
        """
        self._check_sizes()
        self._check_gate()
        self._check_positions()
        # transformers warns of rules that match no module, and adds rules of its own.
        present = {"g_proj": self.attn_gate is not None, "q_norm": self.use_qk_norm, "k_norm": self.use_qk_norm}
        self.base_model_tp_plan = {
            name: style
            for name, style in {**type(self).base_model_tp_plan, **self.base_model_tp_plan}.items()
            if present.get(name.rpartition(".")[2], True)
        }

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path, **kwargs):
        config_dict, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        model_type = config_dict.get("model_type", cls.model_type)
        if model_type != cls.model_type:
            raise ValueError(
                f"{pretrained_model_name_or_path} is a {model_type!r} checkpoint, not a {cls.model_type!r} one"
                + (", and lays its gates out differently" if model_type.startswith(OTHER_GATED_FAMILIES) else "")
                + ": load it with AutoModelForCausalLM, which picks its own class."
            )
        return config_dict, kwargs

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        # As fields of the file, overrides are checked, and what follows from them is derived.
        names = {field.name for field in dataclasses.fields(cls)}
        names -= {field.name for field in dataclasses.fields(PreTrainedConfig)}
        names |= {*GATE_FLAGS, "qkv_bias", "rope_theta", "rope_scaling", "output_gate_scores"}
        overrides = {name: kwargs.pop(name) for name in names & kwargs.keys()}
        config_dict = {**config_dict, **overrides}
        if "num_hidden_layers" in overrides and "layer_types" not in overrides and config_dict.get("layer_types"):
            config_dict["layer_types"] = config_dict["layer_types"][: overrides["num_hidden_layers"]]
        return super().from_dict(config_dict, **kwargs)

    def is_gated_layer(self, layer_idx: int) -> bool:
        """Whether layer `layer_idx`, counted from 0, has an output gate."""
        return self.attn_gate is not None and (self.attn_gate_layers is None or layer_idx in self.attn_gate_layers)

    def to_dict(self) -> dict:
        output = super().to_dict()
        output.pop("_is_released", None)
        return output

    def _check_sizes(self):
        for name in (
            "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "intermediate_size",
            "num_hidden_layers", "vocab_size", "max_position_embeddings", "sliding_window",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"`{name}` must be at least 1, got {value}.")
        if self.hidden_act not in ACT2FN:
            raise ValueError(f"`hidden_act` must be one of {', '.join(map(repr, ACT2FN))}, got {self.hidden_act!r}.")
        if self.pad_token_id is not None and self.pad_token_id >= self.vocab_size:
            raise ValueError(f"`pad_token_id` ({self.pad_token_id}) must be below `vocab_size` ({self.vocab_size}).")
        if self.num_attention_heads % self.num_key_value_heads != 0:
            raise ValueError(
                f"`num_attention_heads` ({self.num_attention_heads}) must be a multiple of `num_key_value_heads` "
                f"({self.num_key_value_heads})."
            )
        if self.head_dim is None and self.hidden_size % self.num_attention_heads != 0:
            raise ValueError(
                f"`hidden_size` ({self.hidden_size}) is not a multiple of `num_attention_heads` "
                f"({self.num_attention_heads}): set `head_dim`."
            )
        head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        if head_dim % 2 != 0:
            raise ValueError(f"`head_dim` must be even for rotary embeddings, got {head_dim}.")

    def _check_positions(self):
        if unknown := set(self.layer_types) - {"full_attention", "sliding_attention"}:
            raise ValueError(
                "`layer_types` must hold 'full_attention' or 'sliding_attention' for each layer, "
                f"got {', '.join(map(repr, sorted(unknown)))}."
            )
        if len(self.layer_types) < self.num_hidden_layers:
            raise ValueError(
                f"`num_hidden_layers` ({self.num_hidden_layers}) is more than `layer_types` has entries "
                f"({len(self.layer_types)}): set both."
            )
        if "sliding_attention" in self.layer_types and self.sliding_window is None:
            raise ValueError(
                "`layer_types` has sliding_attention layers but no window is in force: "
                "set `use_sliding_window=True` and `sliding_window` to the number of tokens."
            )
        if self.rope_parameters.get("partial_rotary_factor", 1) != 1:
            raise ValueError(
                f"`partial_rotary_factor` must be 1, got {self.rope_parameters['partial_rotary_factor']}: "
                "these models rotate whole heads."
            )
        rope_type, rope_theta = (self.rope_parameters.get(name) for name in ("rope_type", "rope_theta"))
        if rope_type not in ("default", *ROPE_INIT_FUNCTIONS):
            raise ValueError(
                f"`rope_type` must be one of {', '.join(map(repr, ('default', *ROPE_INIT_FUNCTIONS)))}, "
                f"got {rope_type!r}."
            )
        if not isinstance(rope_theta, (int, float)) or not rope_theta > 0:
            raise ValueError(f"`rope_theta` must be a number above 0, got {rope_theta!r}.")

    def _check_gate(self):
        if self.attn_gate not in ATTN_GATES:
            raise ValueError(f"`attn_gate` must be one of {', '.join(map(repr, ATTN_GATES))}, got {self.attn_gate!r}.")
        if not (math.isfinite(self.attn_gate_scale) and self.attn_gate_scale > 0):
            raise ValueError(f"`attn_gate_scale` must be a finite number above 0, got {self.attn_gate_scale}.")
        if self.attn_gate_layers is None:
            return
        if self.attn_gate is None:
            raise ValueError("`attn_gate_layers` is set but `attn_gate` is None: name a gate or leave the layers out.")
        layers = self.attn_gate_layers
        if not layers or sorted(set(layers)) != layers or not 0 <= layers[0] <= layers[-1] < self.num_hidden_layers:
            raise ValueError(
                "`attn_gate_layers` must be None or a rising list of layers between 0 and "
                f"`num_hidden_layers` - 1 = {self.num_hidden_layers - 1}, got {layers}."
            )


__all__ = ["GatedQwenConfig"]
