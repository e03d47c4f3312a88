"""A checkpoint of Qwen3.5's or Qwen3-Next's form, or of the authors' own, in this family's native layout.

What `export.py` made comes back as it was before, tensor by tensor and bit for bit, as far as its record tells and the
weights still bear it out: gates of one row a head, scales, layers without gates, biases of some linears. Otherwise the
model is taken as it stands: an elementwise gate in every layer, and a scale of 1.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

from ..configuration import GatedQwenConfig
from .checkpoint import Checkpoint, open_checkpoint
from .convert import carry_out, finish_with_card
from .errors import CheckpointError, shown
from .families import gated_config, read_config
from .head_major import (
    HEAD_MAJOR,
    NORMS,
    head_major_config,
    layer_of,
    linear_layer_of,
    output_factors,
    read_head_major_config,
    settle_norms,
)
from .headers import BITS, Tensor, strict_json
from .plan import (
    Output,
    Plan,
    check_plan,
    check_tensors,
    copy_of,
    expected_shapes,
    other_files,
    rows_of,
    shards_of,
    shifted,
)
from .reader import Reader, values
from .record import read_record
from .retrofit import keep_source_files, keep_tokenizer, settle_scaled
from .source import check_layers, open_source, prefix_of, renamed, settle_tied

LIKE_BEFORE = "the checkpoint is the one before the export"


@dataclass(frozen=True)
class Before:
    """What a checkpoint was before it was exported."""

    config: GatedQwenConfig
    text: str | None
    dtypes: dict[str, str]


def plan_import(
    source, *, revision: str | None = None, subfolder: str | None = None, token=None, headers_only: bool = True
) -> Plan:
    """What [`import_checkpoint`] would write, from the source's headers alone; `headers_only` as in
    `plan_retrofit`."""
    checkpoint = open_checkpoint(
        source, revision=revision, subfolder=subfolder, headers_only=headers_only, token=token
    )
    model_type = checkpoint.fields.get("model_type")
    if model_type == "qwen3_5":
        raise CheckpointError(
            f"{checkpoint.where()}: qwen3_5 is the model with its vision tower: only causal language models "
            f"({', '.join(HEAD_MAJOR)}) are imported."
        )
    if not isinstance(model_type, str) or model_type not in HEAD_MAJOR:
        return plan_unpacking(source, revision, subfolder, token, headers_only)
    config, gated = read_head_major_config(checkpoint.fields, checkpoint.where())
    check_layers(checkpoint, config, checkpoint.where())
    record = read_record(checkpoint.folder)
    before = what_it_was(config, record)
    plan = plan_head_major(checkpoint, config, gated, record, before, headers_only)
    if headers_only:
        return plan
    if before is not None and not comes_back(plan, before.config):  # trained since, in the other form
        plan = plan_head_major(checkpoint, config, gated, record, None, headers_only)
    return settle_norms(settle_scaled(plan))


def plan_unpacking(source, revision, subfolder, token, headers_only: bool) -> Plan:
    """Of the authors' form."""
    origin = open_source(source, revision=revision, subfolder=subfolder, token=token, headers_only=headers_only)
    checkpoint, where = origin.checkpoint, origin.checkpoint.where()
    if not isinstance(origin.config, GatedQwenConfig):
        raise CheckpointError(
            f"{where}: a {origin.config.model_type} model has no gates to import: put some onto it (retrofit)."
        )
    if not origin.config._is_released:
        raise CheckpointError(f"{where}: it is in the native layout already: use it as it is.")
    config = gated_config(
        origin.gated, where, **{name: getattr(origin.gated, name) for name in ("attn_gate", "attn_gate_bias")}
    )
    keep_tokenizer(config, origin.config)
    prefix = prefix_of(expected_shapes(config))
    outputs = []
    for tensors in origin.tensors_by_file():
        outputs.append([])
        for tensor in tensors:
            module, _, kind = tensor.name.rpartition(".")
            if origin.packed and module.endswith("self_attn.q_proj"):
                query, gate = origin.packed_rows(tensor)
                gate_name = f"{module.removesuffix('q_proj')}g_proj.{kind}"
                found = [rows_of(tensor, tensor.name, query), rows_of(tensor, gate_name, gate)]
            else:
                found = [copy_of(tensor)]
            outputs[-1] += [replace(output, name=renamed(output.name, origin.prefix, prefix)) for output in found]
    return _plan(
        checkpoint,
        origin.config,
        config,
        outputs,
        dropped=origin.dropped,
        notes=tuple(origin.notes),
        record=origin.record,
        deviation=0.0,
        deviation_note="the numbers are the same, in another order",
    )


def _plan(checkpoint: Checkpoint, source_config, config: GatedQwenConfig, outputs: list, **more) -> Plan:
    files, left_out = other_files(checkpoint)
    keep_source_files(files, left_out, more["record"])
    plan = Plan(
        command="import",
        options={},
        source=checkpoint,
        source_config=source_config,
        config=config,
        shards=shards_of(checkpoint, outputs, []),
        files=files,
        left_out=left_out,
        **more,
    )
    check_plan(plan)
    return plan


def what_it_was(config, record: dict | None) -> Before | None:
    """What the record of an export tells of its source, if the present config is still what the export made of it."""
    if record is None or not str(record.get("command")).startswith("gated-qwen export "):
        return None
    text, dtypes = record["source"]["config.json"], record["tensors"].get("shifted")
    try:
        own = read_config(strict_json(text.encode(), "the record"), "the record")
        native = isinstance(own, GatedQwenConfig) and not own._is_released
        gates = {}
        if isinstance(own, GatedQwenConfig):
            names = ("attn_gate", "attn_gate_scale", "attn_gate_bias", "attn_gate_layers")
            gates = {name: getattr(own, name) for name in names}
        gated = gated_config(own, "the record", **(gates or {"attn_gate": None}))
        linear_layer = linear_layer_of(config) is not None
        made = head_major_config(gated, config.model_type, "the record", linear_layer).to_dict()
    except ValueError:
        return None
    now = config.to_dict()
    ignored = ("transformers_version", "tokenizer_class", "dtype", "_name_or_path", "tie_word_embeddings")
    same = all(made.get(name) == now.get(name) for name in made.keys() | now.keys() if name not in ignored)
    if not same or not isinstance(dtypes, dict) or not all(dtype in BITS for dtype in dtypes.values()):
        return None
    return Before(gated, text if native else None, dtypes)


def plan_head_major(
    checkpoint: Checkpoint, config, gated: GatedQwenConfig, record: dict | None, before: Before | None, headers_only
) -> Plan:
    target = before.config if before else gated
    where = checkpoint.where()
    try:
        shapes = expected_shapes(config)
    except Exception as error:  # sizes that no tensor can have
        raise CheckpointError(f"{where} does not describe a model: building it, {shown(error)}") from error
    tied = config.tie_word_embeddings
    dropped = check_tensors(checkpoint, shapes, tied)
    if (linear := linear_layer_of(config)) is not None:
        added = {name: "of a layer that adds zero" for name in shapes if layer_of(name) == linear}
        dropped |= added
        if not headers_only:
            check_adds_zero(checkpoint, added)
    notes = settle_tied(checkpoint, config, dropped, headers_only) if tied else []
    text = before.text if before else None
    if target.tie_word_embeddings != config.tie_word_embeddings:
        target.tie_word_embeddings, text = config.tie_word_embeddings, None
    keep_tokenizer(target, config)
    factors = {}
    if before:
        factors = {layer: 1 / factor for layer, factor in output_factors(target, where).items()}

    outputs: dict = {tensor.file: [] for tensor in checkpoint.tensors.values()}
    scaled = {}
    wanted = expected_shapes(target)
    for name, tensor in checkpoint.tensors.items():
        if name in dropped:
            continue
        found = [output for output in native(tensor, target, factors, before) if output.name in wanted]
        outputs[tensor.file] += found
        if name.endswith("self_attn.o_proj.weight") and layer_of(name) in factors:
            scaled[name] = factors[layer_of(name)]
        if not found:
            dropped[name] = "zeros, which the layer was without before the export"
    note = "none but rounding: norms have the weight here, where they multiplied by 1 + weight"
    return _plan(
        checkpoint,
        config,
        target,
        list(outputs.values()),
        dropped=dropped,
        notes=tuple(notes),
        record=record,
        scaled=scaled,
        config_text=text,
        deviation=None,
        deviation_note=f"{note}; {LIKE_BEFORE}" if before else note,
        rounding_only=True,
    )


def check_adds_zero(checkpoint: Checkpoint, names: Iterable[str]) -> None:
    """Refuse a layer whose weights are not all zero."""
    with Reader(checkpoint) as reader:
        for name in names:
            tensor = checkpoint.tensors[name]
            if any(values(block, tensor.dtype).any() for block in reader.blocks(tensor)):
                raise CheckpointError(
                    f"{tensor.file}: {name} is of a linear attention layer and not zero: these models have no such "
                    "layers, and only one that does nothing can be left out."
                )


def gate_ranges(config: GatedQwenConfig, rows: int = 0) -> list[tuple[int, int]]:
    """The gate's rows in a q_proj packed by query head; only the first `rows` of each head, or all."""
    size = config.head_dim
    starts = [(2 * head + 1) * size for head in range(config.num_attention_heads)]
    return [(start, start + (rows or size)) for start in starts]


def native(tensor: Tensor, target: GatedQwenConfig, factors: dict, before: Before | None) -> list[Output]:
    """The tensors that come of one tensor of the source; those that the target has no place for too."""
    module, _, kind = tensor.name.rpartition(".")
    part = module.rpartition(".")[2]
    if module.endswith("self_attn.q_proj"):
        size = target.head_dim
        queries = [(start - size, start) for start, _ in gate_ranges(target)]
        gates = gate_ranges(target, 1 if target.attn_gate == "headwise" else 0)
        gate_name = f"{module.removesuffix('q_proj')}g_proj.{kind}"
        return [rows_of(tensor, tensor.name, queries), rows_of(tensor, gate_name, gates)]
    if module.endswith("self_attn.o_proj") and kind == "weight":
        return [copy_of(tensor, factors.get(layer_of(tensor.name), 1.0))]
    if part in NORMS:
        own = "F32" if BITS[tensor.dtype] < 32 else tensor.dtype
        return [shifted(tensor, 1.0, before.dtypes.get(tensor.name, own) if before else own)]
    return [copy_of(tensor)]


def comes_back(plan: Plan, config: GatedQwenConfig) -> bool:
    """Whether what the plan leaves out says nothing: rows that repeat a headwise gate, zeros where there was none."""
    kept = {tensor.name for tensor in plan.tensors}
    with Reader(plan.source) as reader:

        def bytes_of(tensor: Tensor, first: int, last: int) -> bytes:
            row = tensor.nbytes // tensor.shape[0]
            block = memoryview(bytearray((last - first) * row))
            reader.read(block, tensor, first * row)
            return bytes(block)

        for name, tensor in plan.source.tensors.items():
            if ".self_attn.q_proj." not in name:
                if name in plan.dropped and name.endswith("_proj.bias") and any(bytes_of(tensor, 0, tensor.shape[0])):
                    return False
                continue
            if name not in kept:  # a bias of the gate alone
                queries = [(first - config.head_dim, first) for first, _ in gate_ranges(config)]
                if any(any(bytes_of(tensor, *rows)) for rows in queries):
                    return False
            has_gate = config.is_gated_layer(layer_of(name)) and (name.endswith("weight") or config.attn_gate_bias)
            for first, last in gate_ranges(config):
                if not has_gate and any(bytes_of(tensor, first, last)):
                    return False
                if has_gate and config.attn_gate == "headwise":
                    rows = (bytes_of(tensor, row, row + 1) for row in range(first, last))
                    if any(one != other for one, other in pairwise(rows)):
                        return False
    return True


def import_checkpoint(
    source,
    target,
    *,
    link: bool = False,
    verify: bool | None = None,
    restart: bool = False,
    revision: str | None = None,
    subfolder: str | None = None,
    token: str | bool | None = None,
    progress: bool = False,
) -> dict:
    """Save a checkpoint of the authors' form, or of Qwen3.5's or Qwen3-Next's, as a gated_qwen one.

    Args:
        source (`str` or `Path`): a checkpoint folder or Hub id. Of Qwen3.5 and Qwen3-Next, models whose layers are all
            full attention and dense, as [`export_checkpoint`] makes them; its layer that adds zero is left out
        target (`str` or `Path`): a folder that does not exist yet
        link, verify, restart, revision, subfolder, token, progress: as in [`retrofit_checkpoint`]. Source and target
            are compared in float32.

    Returns:
        `dict`: what was done, as it is saved in the target's `conversion.json`.

    Raises:
        CheckpointError: the source cannot be expressed, or as [`retrofit_checkpoint`].
        OSError: a file is missing, or reading or writing failed.
    """
    plan = plan_import(source, revision=revision, subfolder=subfolder, token=token, headers_only=False)
    return carry_out(
        plan,
        target,
        link=link,
        verify_outputs=verify,
        restart=restart,
        progress=progress,
        finish=finish_with_card,
    )
