"""A retrofit of a model that is loaded already."""

import copy
import re

import torch
from torch import nn
from transformers import PreTrainedModel

from .. import modeling
from ..configuration import GatedQwenConfig
from .errors import CheckpointError
from .families import CLASS_NAMES, FAMILIES, HEADS, gated_class_name, gated_config
from .headers import DTYPES
from .plan import Normal
from .reader import BLOCK
from .retrofit import check_seed, gate_fields, keep_tokenizer, output_factors
from .source import prefix_of, renamed
from .write import blocks

ADAPTED = re.compile(r"\b(base_layer|lora_|ia3_|hada_|modules_to_save)")
SPELLINGS = {spelling: getattr(torch, name) for spelling, name in DTYPES.items()}


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
    check_seed(seed)
    config = gated_config(source, where, **fields)
    keep_tokenizer(config, source)
    factors = output_factors(source, config, new, start, where)
    model_class = getattr(modeling, gated_class_name(type(model).__name__))
    with torch.device("meta"):
        gated = model_class._from_config(config, attn_implementation=model.config._attn_implementation)

    ours = prefix_of(name for name, _ in gated.named_parameters())
    theirs = prefix_of(name for name, _ in model.named_parameters())
    own = {
        renamed(name, theirs, ours): parameter for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    _check_parameters(own, gated, source, where)
    with torch.no_grad():
        for name, parameter in list(gated.named_parameters(remove_duplicate=False)):
            layer = int(name.split("layers.")[1].split(".")[0]) if "layers." in name else None
            if name in own:
                values = own[name]
                if name.endswith("self_attn.o_proj.weight") and layer in factors:
                    values = _scaled(values, factors[layer], name)
                elif ".g_proj." in name and source.attn_gate != attn_gate:
                    rows = values.repeat_interleave(config.head_dim, dim=0)
                    values = nn.Parameter(rows, requires_grad=values.requires_grad)
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
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            options = getattr(getattr(module, "_gradient_checkpointing_func", None), "keywords", None)
            gated.gradient_checkpointing_enable(options)
            break
    return gated


def _check(model) -> None:
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        hint = ": merge the adapter first (merge_and_unload)" if "Peft" in name else ""
        raise CheckpointError(f"`model` must be a transformers model, got {name}{hint}.")
    stock = type(model).__module__.startswith("transformers.models.") and model.config.model_type in FAMILIES
    stock = stock and name in {CLASS_NAMES[model.config.model_type] + head for head in HEADS}
    if not stock and type(model) is not getattr(modeling, name, None):
        raise CheckpointError(
            f"`model` must be of one of transformers' own {', '.join(FAMILIES)} classes, or gated_qwen's, got "
            f"{type(model).__module__}.{name}."
        )
    if getattr(model, "hf_quantizer", None) is not None or getattr(model, "is_quantized", False):
        raise CheckpointError(f"this {name} is quantised: load it unquantised.")
    if getattr(model, "_hf_peft_config_loaded", False) or any(ADAPTED.search(n) for n, _ in model.named_parameters()):
        raise CheckpointError(f"this {name} has adapters: merge or remove them first.")
    devices = {parameter.device for parameter in model.parameters()}
    if any(device.type == "meta" for device in devices) or any(hasattr(m, "_hf_hook") for m in model.modules()):
        raise CheckpointError(
            f"this {name} is offloaded or spread over devices: retrofit its checkpoint (retrofit_checkpoint), and "
            "load that with device_map."
        )


def _check_parameters(own: dict, gated: PreTrainedModel, source, where: str) -> None:
    """Refuse a model that was changed after it was built: what is not known here would get lost."""
    expected = {name: tuple(parameter.shape) for name, parameter in gated.named_parameters(remove_duplicate=False)}
    for name, parameter in own.items():
        if name not in expected:
            raise CheckpointError(f"{where} has the parameter {name}, which a stock model has not: remove it first.")
        gate = ".g_proj." in name and source.attn_gate != gated.config.attn_gate
        shape = (expected[name][0] // gated.config.head_dim, *expected[name][1:]) if gate else expected[name]
        if tuple(parameter.shape) != shape:
            raise CheckpointError(f"{where}: {name} is {list(parameter.shape)}, but {list(shape)} by its config.")
        if parameter.dtype not in SPELLINGS.values():
            raise CheckpointError(
                f"{where}: {name} is {parameter.dtype}: load the model in a dtype that it computes in."
            )
    missing = [name for name in expected if name not in own and ".g_proj." not in name]
    if missing:
        raise CheckpointError(f"{where} has no {missing[0]}, which a stock model of its config has.")
    layers = [int(name.split("layers.")[1].split(".")[0]) for name in own if ".self_attn.g_proj.weight" in name]
    if layers != [layer for layer in range(source.num_hidden_layers) if _is_gated(source, layer)]:
        raise CheckpointError(f"{where} has gates in layers {layers}, and others by its config.")


def _is_gated(config, layer: int) -> bool:
    return isinstance(config, GatedQwenConfig) and config.is_gated_layer(layer)


def _scaled(weight: nn.Parameter, factor: float, name: str) -> nn.Parameter:
    scaled = weight * factor
    if not (((scaled / factor == weight) & scaled.isfinite()) | ~weight.isfinite()).all():
        raise CheckpointError(f"{name} has values that times {factor:g} do not fit {weight.dtype}: use start='scale'.")
    return nn.Parameter(scaled, requires_grad=weight.requires_grad)


def _random(name: str, shape: torch.Size, dtype: torch.dtype, config: GatedQwenConfig, seed: int) -> torch.Tensor:
    """The values that `retrofit_checkpoint` gives the gate of that name."""
    spelling = next(name for name, own in SPELLINGS.items() if own == dtype)
    nbytes = shape.numel() * dtype.itemsize
    piece = Normal(nbytes, spelling, config.initializer_range, f"{seed}/{name}")
    data = bytearray().join(blocks(None, piece, 0, nbytes, memoryview(bytearray(BLOCK))))
    return torch.frombuffer(data, dtype=dtype).view(shape)
