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

from .checkpoint import open_checkpoint
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
    adapter, checkpoint, target = Path(adapter), Path(checkpoint), Path(target)
    if os.path.lexists(target):
        raise CheckpointError(f"{target} exists: name a folder that does not.")
    for name in (CONFIG, WEIGHTS):
        if not (adapter / name).is_file():
            raise CheckpointError(f"{adapter} has no {name}: name the folder of a PEFT adapter, as safetensors.")
    fields = strict_json((adapter / CONFIG).read_bytes(), str(adapter / CONFIG))
    if not isinstance(fields, dict) or fields.get("peft_type") != "LORA":
        kind = fields.get("peft_type") if isinstance(fields, dict) else fields
        raise CheckpointError(f"{adapter / CONFIG}: {shown(kind)} adapters are not converted, only LORA ones.")
    open_checkpoint(checkpoint)
    record = read_record(checkpoint)
    if record is None or not str(record.get("command")).startswith("gated-qwen retrofit "):
        raise CheckpointError(f"{checkpoint} has no conversion.json of a retrofit: it is not known what was scaled.")
    factors = {layer_of(name): factor for name, factor in (record["tensors"].get("scaled") or {}).items()}

    tensors, scaled = {}, {}
    try:
        with safe_open(adapter / WEIGHTS, "pt") as file:
            metadata = file.metadata()
            for name in file.keys():  # noqa: SIM118
                tensors[name] = file.get_tensor(name)
    except Exception as error:
        raise CheckpointError(f"{adapter / WEIGHTS} cannot be read: {shown(error, 300)}") from error
    for name, tensor in tensors.items():
        match = OUTPUT.search(name)
        factor = factors.get(layer_of(name), 1.0) if match else 1.0
        if factor == 1 or STAYS.match(match[1]):
            continue
        if not MULTIPLIED.match(match[1]):
            raise CheckpointError(f"{adapter / WEIGHTS}: it is not known how {shown(name)} acts on o_proj.")
        tensors[name] = tensor * factor
        if not torch.equal(tensors[name] / factor, tensor):
            raise CheckpointError(f"{adapter / WEIGHTS}: {shown(name)} times {factor:g} does not fit {tensor.dtype}.")
        scaled[name] = factor

    target.parent.mkdir(parents=True, exist_ok=True)
    staged = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        inside = staged / "adapter"
        shutil.copytree(adapter, inside, ignore=shutil.ignore_patterns(CONFIG, WEIGHTS))
        save_file(tensors, inside / WEIGHTS, metadata=metadata or {"format": "pt"})
        text = json.dumps({**fields, "base_model_name_or_path": str(checkpoint)}, indent=2) + "\n"
        (inside / CONFIG).write_text(text, encoding="utf-8")
        os.rename(inside, target)
    finally:
        shutil.rmtree(staged)
    return scaled
