"""A retrofit of a model that is loaded already."""

import copy

import torch
from torch import nn
from transformers import PreTrainedModel

from .. import modeling
from ..configuration import GatedQwenConfig
from .errors import CheckpointError
from .families import FAMILIES, gated_class_name, gated_config
from .plan import Normal
from .reader import BLOCK
from .retrofit import gate_fields, output_factors
from .write import blocks


def retrofit(
    model: PreTrainedModel,
    attn_gate: str = "headwise",
    *,
    start: str = "scale",
    seed: int = 0,
    layers: list[int] | None = None,
) -> modeling.GatedQwenPreTrainedModel:
    """Put output gates onto a loaded Llama, Mistral, Qwen2, Qwen3 or gated_qwen model, as `retrofit_checkpoint` does
    to one on disk.

    The result is a new model that **shares** its parameters with `model`, but for the new gates and, under
    `start="fold"`, o_proj: use one of the two. Their dtypes, devices and `requires_grad` stay; new gates take the
    dtype and device of their layer's q_proj, and are trainable.

    Args:
        model: of transformers' own class; neither quantised, nor with adapters, nor spread over devices
        attn_gate, start, seed, layers: as in [`retrofit_checkpoint`]

    Raises:
        ValueError: an argument is not allowed, or the model cannot be retrofitted; the line says why.
    """
    _check(model)
    where = f"this {type(model).__name__}"
    source = copy.deepcopy(model.config)
    source.architectures = [type(model).__name__]
    fields, new = gate_fields(source, attn_gate, start, layers, where)
    config = gated_config(source, where, **fields)
    factors = output_factors(source, config, new, start, where)
    model_class = getattr(modeling, gated_class_name(type(model).__name__))
    with torch.device("meta"):
        gated = model_class._from_config(config, attn_implementation=model.config._attn_implementation)

    own = dict(model.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, parameter in list(gated.named_parameters(remove_duplicate=False)):
            layer = int(name.split("layers.")[1].split(".")[0]) if "layers." in name else None
            if name in own:
                values = own[name]
                if name.endswith("self_attn.o_proj.weight") and layer in factors:
                    values = _scaled(values, factors[layer], name)
                elif ".g_proj." in name and source.attn_gate != attn_gate:
                    values = nn.Parameter(values.repeat_interleave(config.head_dim, dim=0))
            else:
                query = own[name[: name.index("g_proj")] + "q_proj.weight"]
                values = torch.zeros(parameter.shape, dtype=query.dtype, device=query.device)
                if start == "random" and name.endswith("weight"):
                    values.copy_(_random(name, parameter.shape, query.dtype, config, seed))
                values = nn.Parameter(values)
            module, _, leaf = name.rpartition(".")
            gated.get_submodule(module).register_parameter(leaf, values)

    # Buffers are not in checkpoints; a model cast by `.to()` has them in its own dtype.
    for name, buffer in model.base_model.rotary_emb.named_buffers():
        gated.base_model.rotary_emb.register_buffer(name, buffer.clone(), persistent=False)
    gated.train(model.training)
    if model.can_generate():
        gated.generation_config = copy.deepcopy(model.generation_config)
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        gated.gradient_checkpointing_enable()
    return gated


def _check(model) -> None:
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        hint = ": merge the adapter first (merge_and_unload)" if "Peft" in name else ""
        raise CheckpointError(f"`model` must be a transformers model, got {name}{hint}.")
    stock = type(model).__module__.startswith("transformers.models.") and model.config.model_type in FAMILIES
    if not stock and not (isinstance(model.config, GatedQwenConfig) and hasattr(modeling, name)):
        raise CheckpointError(
            f"`model` must be of one of transformers' own {', '.join(FAMILIES)} classes, or gated_qwen's, got "
            f"{type(model).__module__}.{name}."
        )
    if getattr(model, "hf_quantizer", None) is not None or getattr(model, "is_quantized", False):
        raise CheckpointError(f"this {name} is quantised: load it unquantised.")
    if getattr(model, "_hf_peft_config_loaded", False) or any("lora_" in n for n, _ in model.named_parameters()):
        raise CheckpointError(f"this {name} has adapters: merge or remove them first.")
    devices = {parameter.device for parameter in model.parameters()}
    if any(device.type == "meta" for device in devices) or any(hasattr(m, "_hf_hook") for m in model.modules()):
        raise CheckpointError(
            f"this {name} is offloaded or spread over devices: retrofit its checkpoint (retrofit_checkpoint), and "
            "load that with device_map."
        )


def _scaled(weight: nn.Parameter, factor: float, name: str) -> nn.Parameter:
    scaled = weight * factor
    if not (((scaled / factor == weight) & scaled.isfinite()) | ~weight.isfinite()).all():
        raise CheckpointError(f"{name} has values that times {factor:g} do not fit {weight.dtype}: use start='scale'.")
    return nn.Parameter(scaled, requires_grad=weight.requires_grad)


def _random(name: str, shape: torch.Size, dtype: torch.dtype, config: GatedQwenConfig, seed: int) -> torch.Tensor:
    """The values that `retrofit_checkpoint` gives the gate of that name."""
    spelling = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64"}[dtype]
    nbytes = shape.numel() * dtype.itemsize
    piece = Normal(nbytes, spelling, config.initializer_range, f"{seed}/{name}")
    data = bytearray().join(blocks(None, piece, 0, nbytes, memoryview(bytearray(BLOCK))))
    return torch.frombuffer(data, dtype=dtype).view(shape)
