"""PEFT adapters of a checkpoint on its retrofit.

After `scale` no weight has changed, and an adapter works as it is. After `fold` each o_proj is doubled, and so must be
what an adapter adds to it: LoRA's B, DoRA's magnitude, a whole weight (`modules_to_save`).
"""

import json
import os
import re
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from .checkpoint import expanded, open_checkpoint
from .errors import CheckpointError, shown
from .head_major import layer_of
from .headers import strict_json
from .record import read_record

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
OUTPUT = re.compile(r"layers\.\d+\.self_attn\.o_proj\.(.+)$")
# What is multiplied, and what stays: biases are added after o_proj's weight.
MULTIPLIED = re.compile(
    r"(lora_B(\.\w+)?\.weight|lora_magnitude_vector(\.\w+)?(\.weight)?|(modules_to_save\.)?weight)$"
)
STAYS = re.compile(r"(lora_A(\.\w+)?\.weight|lora_B(\.\w+)?\.bias|(base_layer\.)?(modules_to_save\.)?bias)$")


def retrofit_adapter(adapter, checkpoint, target) -> dict[str, float]:
    """Save a LoRA adapter of a checkpoint so that it does the same on that checkpoint's retrofit.

    Args:
        adapter (`str` or `Path`): folder of a PEFT LoRA (or DoRA) adapter of the retrofit's source, as safetensors
        checkpoint (`str` or `Path`): folder of the retrofit, with its `conversion.json`
        target (`str` or `Path`): a folder that does not exist yet

    Returns:
        `dict`: factors by tensor of the adapter; empty where it works as it is.

    Raises:
        CheckpointError: the adapter is of another kind, its numbers do not take the factor, or it is not known how
            the checkpoint was made.
        OSError: a file is missing, or reading or writing failed.
    """
    adapter, checkpoint, target = expanded(adapter), expanded(checkpoint), expanded(target)
    if os.path.lexists(target):
        raise CheckpointError(f"{target} exists: name a folder that does not.")
    for place in (adapter, checkpoint):
        if target.resolve().is_relative_to(place.resolve()):
            raise CheckpointError(f"{target} is inside {place}: name a folder elsewhere.")
    for name in (CONFIG, WEIGHTS):
        if not (adapter / name).is_file():
            raise CheckpointError(f"{adapter} has no {name}: name the folder of a PEFT adapter, as safetensors.")
    fields = strict_json((adapter / CONFIG).read_bytes(), str(adapter / CONFIG))
    if not isinstance(fields, dict) or fields.get("peft_type") != "LORA":
        kind = fields.get("peft_type") if isinstance(fields, dict) else fields
        raise CheckpointError(f"{adapter / CONFIG}: {shown(kind)} adapters are not converted, only LORA ones.")
    shapes = {name: tensor.shape for name, tensor in open_checkpoint(checkpoint).tensors.items()}
    record = read_record(checkpoint)
    if record is None or not str(record.get("command")).startswith("gated-qwen retrofit "):
        raise CheckpointError(f"{checkpoint} has no conversion.json of a retrofit: it is not known what was scaled.")
    factors = {layer_of(name): factor for name, factor in record["tensors"]["scaled"].items()}
    base = fields.get("base_model_name_or_path")
    if factors and isinstance(base, str) and base and Path(base).resolve() == checkpoint.resolve():
        raise CheckpointError(f"{adapter / CONFIG}: it is an adapter of {checkpoint} already: use it as it is.")

    tensors, scaled = {}, {}
    try:
        with safe_open(adapter / WEIGHTS, "pt") as file:
            metadata = file.metadata()
            for name in file.keys():  # noqa: SIM118
                tensors[name] = file.get_tensor(name)
    except Exception as error:
        raise CheckpointError(f"{adapter / WEIGHTS} cannot be read: {shown(error, 300)}") from error
    check_fits(adapter, tensors, checkpoint, shapes)
    for name, tensor in tensors.items():
        match = OUTPUT.search(name)
        factor = factors.get(layer_of(name), 1.0) if match else 1.0
        if factor == 1 or STAYS.match(match[1]):
            continue
        if not MULTIPLIED.match(match[1]):
            raise CheckpointError(f"{adapter / WEIGHTS}: it is not known how {shown(name)} acts on o_proj.")
        if tensor.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            raise CheckpointError(f"{adapter / WEIGHTS}: {shown(name)} is {tensor.dtype}, which is not scaled.")
        tensors[name] = tensor * factor
        if not torch.equal(tensors[name] / factor, tensor):
            raise CheckpointError(f"{adapter / WEIGHTS}: {shown(name)} times {factor:g} does not fit {tensor.dtype}.")
        scaled[name] = factor

    target.parent.mkdir(parents=True, exist_ok=True)
    staged = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        inside = staged / "adapter"
        others = shutil.ignore_patterns(CONFIG, WEIGHTS, "adapter_model.bin")
        try:
            shutil.copytree(adapter, inside, ignore=others)
        except shutil.Error as error:
            raise OSError(f"{adapter} cannot be copied: {shown(error, 300)}") from error
        save_file(tensors, inside / WEIGHTS, metadata=metadata or {"format": "pt"})
        fields = {**fields, "base_model_name_or_path": str(checkpoint), **without_gates(fields, tensors)}
        text = json.dumps(fields, indent=2) + "\n"
        (inside / CONFIG).write_text(text, encoding="utf-8")
        os.rename(inside, target)
    finally:
        shutil.rmtree(staged)
    return scaled


def check_fits(adapter: Path, tensors: dict, checkpoint: Path, shapes: dict) -> None:
    """Refuse an adapter of another model: its A and B have the sizes of what they are added to."""
    for name, tensor in tensors.items():
        match = re.fullmatch(r"base_model\.model\.(.+)\.lora_([AB])\.weight", name)
        if match is None or tensor.dim() != 2:
            continue
        shape = shapes.get(f"{match[1]}.weight")
        size = tensor.shape[1 if match[2] == "A" else 0]
        if shape is None and not match[1].endswith("lm_head"):
            raise CheckpointError(f"{adapter / WEIGHTS}: {checkpoint} has no {shown(match[1])}: name its adapter.")
        if shape is not None and size != shape[1 if match[2] == "A" else 0]:
            raise CheckpointError(
                f"{adapter / WEIGHTS}: {shown(name)} is {list(tensor.shape)}, which does not fit {list(shape)} of "
                f"{checkpoint}: name an adapter of the model that was retrofitted."
            )


def without_gates(fields: dict, tensors: dict) -> dict:
    """Keeps a pattern of targets from taking in the gates, which the source had not."""
    if not isinstance(fields.get("target_modules"), str) or any(".g_proj." in name for name in tensors):
        return {}
    excluded = fields.get("exclude_modules")
    if isinstance(excluded, str):
        return {"exclude_modules": rf"({excluded})|(.*\.)?g_proj"}
    return {"exclude_modules": [*(excluded or []), "g_proj"]}
