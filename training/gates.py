"""The gates among a model's parameters: trained at their own rate or alone, saved alone, held at their start.

They are the parameters of `self_attn.g_proj`, with what PEFT puts in its place.
"""

import json
import os
import tempfile
from hashlib import sha256
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ..conversion.errors import CheckpointError, shown
from ..diagnostics import gates_as

FORMAT = "gated_qwen gates"


def is_gate(name: str) -> bool:
    """Whether a parameter of this name belongs to a gate."""
    return ".g_proj." in name


def parameter_groups(
    model, gate_learning_rate: float, weight_decay: float = 0.0, learning_rate: float | None = None
) -> list[dict]:
    """Groups for an optimizer: gates with a learning rate of their own and no weight decay, and all else.

    Args:
        gate_learning_rate: far above the model's, to move gates that start at the identity (1e-2 beside 1e-4)
        weight_decay: of matrices and embeddings; none of norms, biases and gates
        learning_rate: of all else; None leaves it to the optimizer, as `Trainer` does

    Raises:
        ValueError: no gate is trainable.
    """
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    gates = [parameter for name, parameter in trained if is_gate(name)]
    if not gates:
        raise ValueError("the model has no gate (g_proj) that is trained: put gates onto it, or unfreeze them.")
    others = [parameter for name, parameter in trained if not is_gate(name)]
    groups = [
        {"params": [parameter for parameter in others if parameter.dim() > 1], "weight_decay": weight_decay},
        {"params": [parameter for parameter in others if parameter.dim() <= 1], "weight_decay": 0.0},
    ]
    if learning_rate is not None:
        groups = [{**group, "lr": learning_rate} for group in groups]
    groups.append({"params": gates, "weight_decay": 0.0, "lr": gate_learning_rate})
    return [group for group in groups if group["params"]]


def freeze_all_but_gates(model) -> int:
    """Leave the gates alone trainable. Returns the number of their parameters.

    Raises:
        ValueError: the model has no gates; nothing is frozen then.
    """
    gates = [parameter for name, parameter in model.named_parameters() if is_gate(name)]
    if not gates:
        raise ValueError("the model has no gates (g_proj): put some onto it first (gated_qwen.retrofit).")
    model.requires_grad_(False)
    for parameter in gates:
        parameter.requires_grad_(True)
    return sum(parameter.numel() for parameter in gates)


def gates_of(model) -> dict[str, torch.nn.Parameter]:
    """The gates' parameters by name.

    Raises:
        CheckpointError: there are none, they are within a PEFT adapter, or not all in memory here.
    """
    gates = {name: parameter for name, parameter in model.named_parameters() if is_gate(name)}
    if not gates:
        raise CheckpointError("the model has no gates (g_proj).")
    for name, parameter in gates.items():
        if name.rpartition(".g_proj.")[2] not in ("weight", "bias"):
            raise CheckpointError(f"{name} is of an adapter: save that (save_pretrained), or merge it first.")
        if parameter.is_meta or hasattr(parameter, "device_mesh"):
            raise CheckpointError(f"{name} is offloaded or sharded: gather the model first.")
    return gates


def base_checksum(model) -> str:
    """SHA-256 of all parameters but the gates, rounded to bfloat16, so that it is the same in whichever dtype a
    checkpoint was loaded."""
    total = sha256()
    for name, parameter in sorted(model.named_parameters()):
        if is_gate(name):
            continue
        if parameter.is_meta or hasattr(parameter, "device_mesh"):
            raise CheckpointError(f"{name} is offloaded or sharded: gather the model first.")
        total.update(f"{name} {tuple(parameter.shape)}".encode())
        value = parameter.detach()
        value = value.to(torch.bfloat16) if value.is_floating_point() else value
        total.update(value.cpu().contiguous().view(torch.uint8).numpy().data)
    return total.hexdigest()


def save_gates(model, file) -> None:
    """Save a model's gates alone, in one safetensors file with the checksum of the model they belong to.

    Raises:
        CheckpointError: there are none, or they are not all here as they are.
        OSError: writing failed; a file that was there stays as it was.
    """
    file = Path(file)
    gates = {name: parameter.detach().cpu().contiguous() for name, parameter in gates_of(model).items()}
    kind = {"attn_gate": model.config.attn_gate, "attn_gate_scale": model.config.attn_gate_scale}
    metadata = {"format": "pt", "content": FORMAT, "base": base_checksum(model), "gates": json.dumps(kind)}
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=f".{file.name}-") as folder:
        save_file(gates, Path(folder) / "gates", metadata=metadata)
        os.replace(Path(folder) / "gates", file)


def load_gates(model, file) -> None:
    """Put gates that [`save_gates`] saved into the model they belong to.

    Raises:
        CheckpointError: it is not a file of gates, they are of another kind or of other layers, or the model's other
            weights are not those that they were trained with. The model stays as it was.
        OSError: the file is missing.
    """
    file = Path(file)
    if not file.is_file():
        raise FileNotFoundError(f"{file} is no file.")
    try:
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata() or {}
            gates = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except Exception as error:
        raise CheckpointError(f"{file} cannot be read: {shown(error)}") from error
    if metadata.get("content") != FORMAT:
        raise CheckpointError(f"{file} does not hold gates that save_gates saved.")
    own = gates_of(model)
    for what, names in (("has no", own.keys() - gates.keys()), ("also has", gates.keys() - own.keys())):
        if names:
            some = ", ".join(sorted(map(shown, names))[:3])
            raise CheckpointError(f"{file} {what} {some} ({len(names)} in all): take gates of this model.")
    for name, parameter in own.items():
        if parameter.shape != gates[name].shape:
            shapes = list(gates[name].shape), list(parameter.shape)
            raise CheckpointError(f"{file}: {name} is {shapes[0]}, and in the model {shapes[1]}: take its own gates.")
    kind = {"attn_gate": model.config.attn_gate, "attn_gate_scale": model.config.attn_gate_scale}
    if metadata.get("gates") != json.dumps(kind):
        raise CheckpointError(f"{file}: the gates are {shown(metadata.get('gates'))}, and the model's {kind}.")
    if metadata.get("base") != base_checksum(model):
        raise CheckpointError(f"{file}: the gates were trained with other weights than this model's: load that model.")
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(gates[name])


def gates_at_start(model):
    """Within it the gates are as they start, whatever they have learnt: `attn_gate_scale * sigmoid(0)`. After a
    retrofit by `scale` or `fold` the model then computes what its source does."""
    return gates_as(model, model.config.attn_gate_scale / 2)
