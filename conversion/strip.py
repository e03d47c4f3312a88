"""The inverse of a retrofit: gates off again.

A gate that is at its start (zero) multiplies by the constant attn_gate_scale / 2, which goes back into o_proj; so a
retrofit that was not trained gives back its source, bit for bit. Gates that have moved are refused with a figure of
what removing them would change, unless that is wanted (`force`).

The result is of the source's own family where the record of the retrofit names it, or else of the first family that
can express it (Llama, Mistral, Qwen2, Qwen3), or a gated_qwen model without gates.
"""

import gc
import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.utils import logging

from .. import demo
from ..configuration import GatedQwenConfig
from .checkpoint import Checkpoint, open_checkpoint
from .convert import carry_out
from .errors import CheckpointError
from .families import FAMILIES, HEADS, gated_config, read_config
from .layouts import group_rows
from .plan import Normal, Plan, Tensor, check_plan, check_tensors, copy_of, other_files, rows_of, shards_of
from .reader import Reader, values
from .record import read_record
from .retrofit import SOURCE_CARD, known_names, settle_scaled, settle_tied
from .verify import SMALL, inputs_for, largest_difference, load, load_tokenizer, outputs_of
from .write import RECORD_NAME, blocks

GATE_FIELDS = ("attn_gate", "attn_gate_scale", "attn_gate_bias", "attn_gate_layers")
MODEL_NAMES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "gated_qwen": "GatedQwen"}


@dataclass(frozen=True)
class Moved:
    """The gate that can change most: its factor, relative to the start, stays between `low` and `high`."""

    layer: int
    low: float
    high: float


def ungated_config(config: GatedQwenConfig, checkpoint: Checkpoint) -> tuple[PreTrainedConfig, str | None]:
    """The config without gates, of the simplest family that can express it, and its text where it is recorded."""
    head = next(head for head in HEADS if config.architectures[0].endswith(head))
    record = read_record(checkpoint.folder) if checkpoint.folder else None
    if record is not None and isinstance(text := record.get("source", {}).get("config.json"), str):
        recorded = _recorded_config(text, config)
        if recorded is not None:
            return recorded, text
    for model_type in FAMILIES:
        candidate = _of_family(config, model_type)
        if candidate is not None and _same_function(gated_config(candidate), config):
            candidate.architectures = [MODEL_NAMES[model_type] + head]
            return candidate, None
    fields = {**config.to_dict(), "attn_gate": None, "attn_gate_layers": None, "attn_gate_scale": 1.0}
    fields.pop("auto_map", None)
    return GatedQwenConfig(**{**fields, "attn_gate_bias": False}), None


def _recorded_config(text: str, config: GatedQwenConfig) -> PreTrainedConfig | None:
    """The config of the retrofit's source, where it says the same as today's but for the gates."""
    import json

    try:
        source = read_config(json.loads(text), "the recorded config.json")
        if source.model_type == "gated_qwen" and (source.attn_gate is not None or source._is_released):
            return None
        return source if _same_function(gated_config(source), config) else None
    except ValueError:
        return None


def _of_family(config: GatedQwenConfig, model_type: str) -> PreTrainedConfig | None:
    fields = {name: value for name, value in config.to_dict().items() if name not in (*GATE_FIELDS, "model_type")}
    drop = {"attention_output_bias", "use_qk_norm", "transformers_version", "architectures"}
    if model_type != "llama":
        drop.add("mlp_bias")
    if model_type in ("llama", "mistral"):
        drop |= {"layer_types", "use_sliding_window", "max_window_layers"}
    if model_type == "llama":
        drop.add("sliding_window")
    if model_type in ("mistral", "qwen2"):
        drop.add("attention_bias")
    try:
        return CONFIG_MAPPING[model_type](**{name: value for name, value in fields.items() if name not in drop})
    except Exception:  # the family's own config refuses it
        return None


def _same_function(one: GatedQwenConfig, other: GatedQwenConfig) -> bool:
    """Whether two configs differ in their gates, names and token ids at most."""
    relevant = [
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps",
        "tie_word_embeddings", "rope_parameters", "layer_types", "use_qk_norm", "attention_bias",
        "attention_output_bias", "mlp_bias",
    ]  # fmt: skip
    if "sliding_attention" in other.layer_types:
        relevant.append("sliding_window")
    return all(getattr(one, name) == getattr(other, name) for name in relevant)


def plan_strip(
    source, *, revision: str | None = None, subfolder: str | None = None, token=None, headers_only: bool = True,
    force: bool = False,
) -> Plan:  # fmt: skip
    """What [`strip_checkpoint`] would write, from the source's headers alone; `headers_only` as in `plan_retrofit`."""
    checkpoint = open_checkpoint(
        source, revision=revision, subfolder=subfolder, headers_only=headers_only, token=token
    )
    where = checkpoint.where()
    source_config = read_config(checkpoint.fields, where)
    if not isinstance(source_config, GatedQwenConfig) or source_config.attn_gate is None:
        raise CheckpointError(f"{where}: a {source_config.model_type} model without gates: there is nothing to strip.")
    prefix = "model." if any(name.startswith("model.") for name in checkpoint.tensors) else ""
    source_config = gated_config_of(source_config, where, prefix)
    packed = checkpoint_is_packed(checkpoint, prefix, source_config)
    config, text = ungated_config(source_config, checkpoint)

    dropped = check_tensors(checkpoint, known_names(source_config, prefix, None if packed else source_config))
    notes = settle_tied(checkpoint, config, dropped, headers_only)
    gates = {name: tensor for name, tensor in checkpoint.tensors.items() if ".self_attn.g_proj." in name}
    dropped |= dict.fromkeys(gates, "a gate")
    gated = [layer for layer in range(source_config.num_hidden_layers) if source_config.is_gated_layer(layer)]
    record = read_record(checkpoint.folder) if checkpoint.folder else None
    started_random = set(record["tensors"]["new"]) if record and record["options"].get("start") == "random" else set()
    # A random start left o_proj as it was.
    factor = {
        layer: 1.0 if f"{prefix}layers.{layer}.self_attn.g_proj.weight" in started_random
        else source_config.attn_gate_scale / 2
        for layer in gated
    }  # fmt: skip
    inexact = [layer for layer in gated if math.frexp(factor[layer])[0] != 0.5]
    if inexact and not force:
        raise CheckpointError(
            f"{where}: attn_gate_scale {source_config.attn_gate_scale:g} / 2 is not a power of two, so that o_proj "
            "cannot take it over exactly: pass force (--force) to strip it with rounding."
        )

    outputs, scaled = [], {}
    for file in dict.fromkeys(tensor.file for tensor in checkpoint.tensors.values()):
        out = []
        for tensor in (t for t in checkpoint.tensors.values() if t.file == file and t.name not in dropped):
            module, _, kind = tensor.name.rpartition(".")
            if packed and module.endswith("self_attn.q_proj"):
                query_rows, gate_rows = group_rows(source_config)
                rows = query_rows + gate_rows
                starts = [group * rows for group in range(source_config.num_key_value_heads)]
                out.append(rows_of(tensor, tensor.name, [(start, start + query_rows) for start in starts]))
            elif module.endswith("self_attn.o_proj") and kind == "weight":
                scale = factor.get(int(module.split(".")[-3]), 1.0)
                out.append(copy_of(tensor, scale))
                scaled |= {tensor.name: scale} if scale != 1 else {}
            else:
                out.append(copy_of(tensor))
        outputs.append(out)

    files, left_out = other_files(checkpoint)
    files.pop(RECORD_NAME, None)
    if record is not None:
        files.pop("README.md", None)  # it speaks of the gates
        if SOURCE_CARD in files:
            files["README.md"] = files.pop(SOURCE_CARD)
    plan = Plan(
        command="strip",
        options={"force": force} if force else {},
        source=checkpoint,
        source_config=source_config,
        config=config,
        shards=shards_of(checkpoint, outputs, []),
        files=files,
        left_out=left_out,
        dropped=dropped,
        deviation=0.0,
        deviation_note="the gates are at their start",
        notes=tuple(notes),
        scaled=scaled,
        config_text=text,
    )
    check_plan(plan)
    if headers_only:
        return plan
    if not inexact:
        plan = settle_scaled(plan)
    return settle_gates(plan, prefix, gated, packed, started_random, record, force)


def gated_config_of(config: GatedQwenConfig, where: str, prefix: str) -> GatedQwenConfig:
    """With the architecture filled in."""
    gate = {name: getattr(config, name) for name in GATE_FIELDS}
    return gated_config(config, where, default_head="ForCausalLM" if prefix else "Model", **gate)


def checkpoint_is_packed(checkpoint: Checkpoint, prefix: str, config: GatedQwenConfig) -> bool:
    return not any(".self_attn.g_proj." in name for name in checkpoint.tensors)


def settle_gates(plan: Plan, prefix, gated, packed, started_random, record, force: bool) -> Plan:
    """Read the gates. Where they are at their start nothing changes; else refuse, or record what it changes."""
    checkpoint, config = plan.source, plan.source_config
    random_starts = [
        f"{prefix}layers.{layer}.self_attn.g_proj.weight"
        for layer in gated
        if f"{prefix}layers.{layer}.self_attn.g_proj.weight" in started_random
    ]
    with Reader(checkpoint) as reader:
        if random_starts and all(_is_its_start(reader, config, name, record) for name in random_starts):
            still = {int(name.removeprefix(prefix).split(".")[1]) for name in random_starts}
        else:
            still = set()
        moved = [_moved(reader, checkpoint, config, prefix, layer, packed) for layer in gated if layer not in still]
    widest = max((gate for gate in moved if gate.high != 1), key=lambda gate: gate.high, default=None)
    if widest is None:
        if not still:
            return plan
        note = "the gates are at their random start: the source comes back, whose function was another"
        return replace(plan, deviation=None, deviation_note=note)
    what = (
        f"the gates have moved: their factors may lie anywhere between {widest.low:.3g} and {widest.high:.3g} of "
        f"those at the start (layer {widest.layer})"
    )
    if not force:
        measured = ""
        if plan.total_parameters <= SMALL:
            change, largest = measure_without_gates(checkpoint.folder, config)
            measured = (
                f", and without them outputs on a sample change by up to {change:.3g} (the largest is {largest:.3g})"
            )
        raise CheckpointError(
            f"{checkpoint.where('')}: {what}{measured}. Pass force (--force) to strip them all the same."
        )
    return replace(plan, deviation=None, deviation_note=what)


def _is_its_start(reader: Reader, config: GatedQwenConfig, name: str, record: dict) -> bool:
    tensor = reader.checkpoint.tensors[name]
    start = Normal(tensor.nbytes, tensor.dtype, config.initializer_range, f"{record['options']['seed']}/{name}")
    buffer = memoryview(bytearray(1 << 18))
    found = reader.blocks(tensor)
    return all(one == other for one, other in zip(blocks(reader, start, 0, start.nbytes, buffer), found, strict=True))


def _moved(reader: Reader, checkpoint, config: GatedQwenConfig, prefix: str, layer: int, packed: bool) -> Moved:
    """Bounds for a layer's gates, from weights alone.

    The layer's input is w * n, where n has a norm of at most sqrt(hidden_size) (RMSNorm), so a gate's logit is at most
    |g * w| sqrt(hidden_size) + |bias|, and its factor relative to that of logit 0 is 2 sigmoid(logit).
    """
    module = f"{prefix}layers.{layer}.self_attn."
    norm = _numbers(reader, checkpoint.tensors[f"{prefix}layers.{layer}.input_layernorm.weight"])
    largest = 0.0
    for tensor, first, last in _gate_rows(checkpoint, config, module, "weight", packed):
        row = tensor.nbytes // tensor.shape[0]
        weights = _numbers(reader, tensor, first * row, last * row).view(-1, len(norm))
        largest = max(largest, (weights * norm).norm(dim=-1).max().item() * math.sqrt(config.hidden_size))
    if config.attn_gate_bias:
        bias = [
            _numbers(reader, tensor, *(n * tensor.nbytes // tensor.shape[0] for n in (first, last))).abs().max().item()
            for tensor, first, last in _gate_rows(checkpoint, config, module, "bias", packed)
        ]
        largest += max(bias)
    return Moved(layer, 2 / (1 + math.exp(min(largest, 700))), 2 / (1 + math.exp(-largest)))


def _gate_rows(checkpoint, config: GatedQwenConfig, module: str, kind: str, packed: bool) -> list[tuple]:
    """Where a layer's gate rows are: tensor, first and last row; at most 256 rows at a time."""
    if packed:
        tensor = checkpoint.tensors[f"{module}q_proj.{kind}"]
        query_rows, gate_rows = group_rows(config)
        ranges = [
            (group * (query_rows + gate_rows) + query_rows, (group + 1) * (query_rows + gate_rows))
            for group in range(config.num_key_value_heads)
        ]
    else:
        tensor = checkpoint.tensors[f"{module}g_proj.{kind}"]
        ranges = [(0, tensor.shape[0])]
    return [(tensor, start, min(start + 256, last)) for first, last in ranges for start in range(first, last, 256)]


def _numbers(reader: Reader, tensor: Tensor, start: int = 0, end: int | None = None) -> torch.Tensor:
    buffer = memoryview(bytearray((tensor.nbytes if end is None else end) - start))
    reader.read(buffer, tensor, start)
    return torch.from_numpy(values(buffer, tensor.dtype).astype("float64"))


def measure_without_gates(folder: Path, config: GatedQwenConfig) -> tuple[float, float]:
    """How far outputs move on a sample text and random tokens when all gates are put back to their start, and the
    largest output. Loads the model."""
    tokenizer = load_tokenizer(folder)
    inputs = inputs_for(config, tokenizer, demo.PASSAGE.read_text())
    show_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model = load(folder, config)
    finally:
        if show_bars:
            logging.enable_progress_bar()
    gated = outputs_of(model, inputs)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".self_attn.g_proj." in name:
                parameter.zero_()
    plain = outputs_of(model, inputs)
    del model
    gc.collect()
    largest = max(output.abs().max().item() for output in gated.values())
    return max(largest_difference(gated[name], plain[name]) for name in inputs), largest


def strip_checkpoint(
    source,
    target,
    *,
    force: bool = False,
    link: bool = False,
    verify: bool | None = None,
    restart: bool = False,
    revision: str | None = None,
    subfolder: str | None = None,
    token: str | bool | None = None,
    progress: bool = False,
) -> dict:
    """Take the gates off a gated_qwen checkpoint, and save it as one of the family it was retrofitted from.

    Args:
        source (`str` or `Path`): a checkpoint folder or Hub id, native or in the authors' released form
        target (`str` or `Path`): a folder that does not exist yet
        force (`bool`, defaults to `False`): strip gates that have moved, which changes the function
        link, verify, restart, revision, subfolder, token, progress: as in [`retrofit_checkpoint`]

    Returns:
        `dict`: what was done. It is not saved in the target, which is as the source was before the retrofit.

    Raises:
        CheckpointError: the gates have moved (the line says by how much that would change the function), or as
            [`retrofit_checkpoint`].
        OSError: a file is missing, or reading or writing failed.
    """
    plan = plan_strip(source, revision=revision, subfolder=subfolder, token=token, headers_only=False, force=force)
    return carry_out(
        plan,
        target,
        link=link,
        verify_outputs=verify,
        restart=restart,
        progress=progress,
        finish=lambda plan, record, folder: None,
    )
