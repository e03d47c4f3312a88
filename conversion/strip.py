"""The inverse of a retrofit: gates off again.

A gate that is at its start (zero) multiplies by the constant attn_gate_scale / 2, which goes back into o_proj; so a
retrofit that was not trained gives back its source, bit for bit. Gates that have moved are refused with a figure of
what removing them would change, unless that is wanted (`force`).

The result is of the source's own family where the record of the retrofit names it, or else of the first family that
can express it (Llama, Mistral, Qwen2, Qwen3), or a gated_qwen model without gates.
"""

import dataclasses
import gc
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.utils import logging

from .. import demo
from ..configuration import GatedQwenConfig
from .convert import carry_out
from .errors import CheckpointError
from .families import CLASS_NAMES, FAMILIES, gated_config, read_config, tokenizer_class
from .headers import Tensor, is_plain_name, strict_json
from .plan import Normal, Output, Plan, Shard, check_plan, copy_of, expected_shapes, other_files, rows_of, shards_of
from .reader import BLOCK, Reader, values
from .record import RECORD_NAME, records
from .retrofit import settle_scaled
from .source import GATE_FIELDS, Source, open_source, prefix_of, renamed
from .verify import SMALL, inputs_for, largest_difference, load, load_tokenizer, outputs_of
from .write import blocks, is_as_recorded


@dataclass(frozen=True)
class Moved:
    """The gate that can change most: its factor, relative to the start, stays between `low` and `high`."""

    layer: int
    low: float
    high: float


def ungated_config(origin: Source) -> tuple[PreTrainedConfig, str | None]:
    """The config without gates, of the simplest family that can express it, and its text where it is recorded."""
    config = origin.gated
    head = config.architectures[0].removeprefix("GatedQwen")
    families = list(FAMILIES)
    for record in records(origin.record):
        text = record["source"]["config.json"]
        try:
            fields = strict_json(text.encode(), "the record")
            recorded = read_config(fields, "the record")
            if "auto_map" in fields:  # it names code, which did not come through
                text = json.dumps({name: v for name, v in fields.items() if name != "auto_map"}, indent=2) + "\n"
            if recorded.architectures is None:
                recorded.architectures = [CLASS_NAMES[recorded.model_type] + head]
            if recorded.model_type in FAMILIES or (recorded.attn_gate is None and not recorded._is_released):
                if _says(gated_config(recorded, default_head=head), config, everything=True):
                    return recorded, text
                families.sort(key=recorded.model_type.__ne__)  # the family it was of, if it still can be
        except ValueError:
            continue
    for model_type in families:
        candidate = _of_family(config, model_type)
        if candidate is not None and _says(gated_config(candidate, default_head=head), config):
            candidate.architectures = [CLASS_NAMES[model_type] + head]
            return candidate, None
    fields = {**config.to_dict(), "attn_gate": None, "attn_gate_layers": None, "attn_gate_scale": 1.0}
    return GatedQwenConfig(**{**fields, "attn_gate_bias": False}), None


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
    if fields.get("tokenizer_class") == tokenizer_class(model_type):
        drop.add("tokenizer_class")  # what transformers takes by itself
    try:
        return CONFIG_MAPPING[model_type](**{name: value for name, value in fields.items() if name not in drop})
    except Exception:  # the family's own config refuses it
        return None


# What says nothing of the function, and what follows from other fields.
NOT_COMPARED = (*GATE_FIELDS, "transformers_version", "architectures", "tokenizer_class", "use_sliding_window",
                "max_window_layers")  # fmt: skip


def _says(one: GatedQwenConfig, other: GatedQwenConfig, everything: bool = False) -> bool:
    """Whether a config says what another one does but for its gates: in its own fields, or in any."""
    ours, theirs = one.to_dict(), other.to_dict()
    names = set(ours) | set(theirs) if everything else {field.name for field in dataclasses.fields(GatedQwenConfig)}
    names -= {name for name in names if name in NOT_COMPARED or name.startswith("_")}
    if "sliding_attention" not in other.layer_types:
        names.discard("sliding_window")
    return all(ours.get(name) == theirs.get(name) for name in names)


def plan_strip(
    source, *, revision: str | None = None, subfolder: str | None = None, token=None, headers_only: bool = True,
    force: bool = False,
) -> Plan:  # fmt: skip
    """What [`strip_checkpoint`] would write, from the source's headers alone; `headers_only` as in `plan_retrofit`."""
    origin = open_source(source, revision=revision, subfolder=subfolder, token=token, headers_only=headers_only)
    where, gated = origin.checkpoint.where(), origin.gated
    if gated.attn_gate is None:
        raise CheckpointError(f"{where}: a {origin.config.model_type} model without gates: there is nothing to strip.")
    config, text = ungated_config(origin)
    gates = [name for name in origin.checkpoint.tensors if ".self_attn.g_proj." in name]
    origin.dropped |= dict.fromkeys(gates, "a gate")

    seeds = random_starts(origin.record)
    factors = {layer: gated.attn_gate_scale / 2 for layer in origin.gated_layers}
    exact = all(math.frexp(factor)[0] == 0.5 for factor in factors.values())
    if not exact and not force:
        raise CheckpointError(
            f"{where}: attn_gate_scale {gated.attn_gate_scale:g} / 2 is not a power of two, so that o_proj cannot "
            "take it over exactly: pass force (--force) to strip it with rounding."
        )

    prefix = prefix_of(expected_shapes(config))
    outputs, scaled = [], {}
    for tensors in origin.tensors_by_file():
        outputs.append([])
        for tensor in tensors:
            output = ungated(tensor, origin, factors)
            outputs[-1].append(replace(output, name=renamed(output.name, origin.prefix, prefix)))
            factor = getattr(output.parts[0], "factor", 1) if output.parts else 1
            if factor != 1:
                scaled[tensor.name] = factor

    shards, index_text = with_first_names(shards_of(origin.checkpoint, outputs, []), origin.record)
    files, left_out = other_files(origin.checkpoint)
    if origin.record is not None:
        restore_source_files(files)
    plan = Plan(
        command="strip",
        options={"force": True} if force else {},
        source=origin.checkpoint,
        source_config=origin.config,
        config=config,
        shards=shards,
        index_text=index_text,
        files=files,
        left_out=left_out,
        dropped=origin.dropped,
        deviation=0.0 if exact else None,
        deviation_note="the gates are at their start" if exact else "the gates are at their start, o_proj is rounded",
        rounding_only=not exact,
        notes=tuple(origin.notes),
        scaled=scaled,
        config_text=text,
        record=origin.record,
    )
    check_plan(plan)
    if headers_only:
        note = "not known from headers alone; 0 where the gates are at their start, else it is refused"
        return replace(plan, deviation=None, deviation_note=note)
    if exact:
        plan = settle_scaled(plan)
    return settle_gates(plan, origin, seeds, force)


def with_first_names(shards: tuple[Shard, ...], record: dict | None) -> tuple[tuple[Shard, ...], str | None]:
    """The files' names before the first retrofit, and their index as it was, where the records have them."""
    names, index = [shard.origin for shard in shards], None
    for earlier in records(record):
        names = [earlier["source"]["files"].get(name) for name in names]
        index = earlier["source"]["index"]
    known = all(is_plain_name(name) and name.endswith(".safetensors") for name in names)
    if index is None or not known or len(set(names)) < len(names):
        return shards, None
    first = tuple(replace(shard, name=name) for shard, name in zip(shards, names, strict=True))
    weight_map = {tensor.name: shard.name for shard in first for tensor in shard.tensors}
    try:
        same = strict_json(index.encode(), "the recorded index")["weight_map"] == weight_map
    except (ValueError, LookupError, TypeError):
        same = False
    return (first, index) if same else (shards, None)


def gate_name(origin: Source, layer: int) -> str:
    return f"{origin.prefix}layers.{layer}.self_attn.g_proj.weight"


def random_starts(record: dict | None) -> dict[str, int]:
    """The gates that were given random values, and the seed of each."""
    seeds = {}
    for earlier in records(record):
        if earlier["options"].get("start") == "random":
            seeds |= {name: earlier["options"]["seed"] for name in earlier["tensors"]["new"] if name not in seeds}
    return seeds


def ungated(tensor: Tensor, origin: Source, factors: dict[int, float]) -> Output:
    module, _, kind = tensor.name.rpartition(".")
    if origin.packed and module.endswith("self_attn.q_proj"):
        return rows_of(tensor, tensor.name, origin.packed_rows(tensor)[0])
    if module.endswith("self_attn.o_proj") and kind == "weight":
        return copy_of(tensor, factors.get(int(module.split(".")[-3]), 1.0))
    return copy_of(tensor)


def restore_source_files(files: dict[str, str]) -> None:
    """The card and record speak of the gates; what they displaced goes back to its place."""
    for name, kept in (("README.md", "README.source.md"), (RECORD_NAME, "conversion.source.json")):
        files.pop(name, None)
        if kept in files:
            files[name] = files.pop(kept)


def settle_gates(plan: Plan, origin: Source, seeds: dict[str, int], force: bool) -> Plan:
    """Read the gates. Where they are at their start nothing changes; else refuse, or record what it changes."""
    checkpoint = origin.checkpoint
    files = next(records(origin.record), {}).get("files")
    if seeds and not is_as_recorded(checkpoint.folder, files):
        seeds = {}  # trained since: without its gates, it is not the source
    with Reader(checkpoint) as reader:
        still = {
            layer
            for layer in origin.gated_layers
            if gate_name(origin, layer) in seeds
            and _is_its_start(reader, origin.gated, gate_name(origin, layer), seeds[gate_name(origin, layer)])
        }
        moved = [_moved(reader, origin, layer) for layer in origin.gated_layers if layer not in still]
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
            change, largest = measure_without_gates(checkpoint.folder, origin.gated)
            measured = f", and without them outputs on a sample change by up to {change:.3g} of {largest:.3g}"
        raise CheckpointError(
            f"{checkpoint.where('')}: {what}{measured}. To strip them all the same, pass force=True (--force)."
        )
    return replace(plan, deviation=None, deviation_note=what)


def _is_its_start(reader: Reader, config: GatedQwenConfig, name: str, seed: int) -> bool:
    tensor = reader.checkpoint.tensors[name]
    start = Normal(tensor.nbytes, tensor.dtype, config.initializer_range, f"{seed}/{name}")
    found = reader.blocks(tensor)
    made = blocks(reader, start, 0, start.nbytes, memoryview(bytearray(BLOCK)))
    return all(one == other for one, other in zip(made, found, strict=True))


def _moved(reader: Reader, origin: Source, layer: int) -> Moved:
    """Bounds for a layer's gates, from weights alone.

    The layer's input is w * n, where n has a norm of at most sqrt(hidden_size) (RMSNorm), so a gate's logit is at most
    |g * w| sqrt(hidden_size) + |bias|, and its factor relative to that of logit 0 is 2 sigmoid(logit).
    """
    config, tensors = origin.gated, origin.checkpoint.tensors
    module = f"{origin.prefix}layers.{layer}.self_attn."
    norm = _numbers(reader, tensors[f"{origin.prefix}layers.{layer}.input_layernorm.weight"])
    largest = 0.0
    for tensor, first, last in _gate_rows(origin, module, "weight"):
        row = tensor.nbytes // tensor.shape[0]
        weights = _numbers(reader, tensor, first * row, last * row).view(-1, len(norm))
        largest = max(largest, (weights * norm).norm(dim=-1).max().item() * math.sqrt(config.hidden_size))
    if config.attn_gate_bias:
        bias = [
            _numbers(reader, tensor, *(n * tensor.nbytes // tensor.shape[0] for n in (first, last))).abs().max().item()
            for tensor, first, last in _gate_rows(origin, module, "bias")
        ]
        largest += max(bias)
    return Moved(layer, 2 / (1 + math.exp(min(largest, 700))), 2 / (1 + math.exp(-largest)))


def _gate_rows(origin: Source, module: str, kind: str) -> list[tuple]:
    """Where a layer's gate rows are: tensor, first and last row; at most 256 rows at a time."""
    if origin.packed:
        tensor = origin.checkpoint.tensors[f"{module}q_proj.{kind}"]
        ranges = origin.packed_rows(tensor)[1]
    else:
        tensor = origin.checkpoint.tensors[f"{module}g_proj.{kind}"]
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
    inputs = inputs_for(config, tokenizer, demo.PASSAGE.read_text(encoding="utf-8"))
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
