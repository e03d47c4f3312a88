"""What a conversion will write, as pure data: every tensor's name, shape, dtype, and where its bytes come from.

A plan is made from headers alone. It is checked against the model that the target's config builds, printed by
`--dry-run`, and carried out by `write.py`.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedConfig

from .checkpoint import Checkpoint, why_left_out
from .errors import CheckpointError, shown
from .headers import BITS, DTYPES, Tensor, build_header

# As the Hub recommends; only new gates are split, shards of the source stay as they are.
MAX_SHARD = 5 * 10**9


@dataclass(frozen=True)
class Given:
    """These bytes."""

    data: bytes

    @property
    def nbytes(self) -> int:
        return len(self.data)


@dataclass(frozen=True)
class FileRange:
    """A whole file of the source."""

    file: Path
    nbytes: int


@dataclass(frozen=True)
class Part:
    """Bytes `start` to `end` of a tensor of the source, `repeat` times, their values times `factor`."""

    tensor: Tensor
    start: int
    end: int
    repeat: int = 1
    factor: float = 1.0

    @property
    def nbytes(self) -> int:
        return (self.end - self.start) * self.repeat


@dataclass(frozen=True)
class Zeros:
    nbytes: int


@dataclass(frozen=True)
class Shifted:
    """The numbers of a small tensor of the source plus `shift`, computed in fp64 and rounded once to `dtype`."""

    tensor: Tensor
    shift: float
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.tensor.shape) * BITS[self.dtype] // 8


@dataclass(frozen=True)
class Normal:
    """Normally distributed values: a function of `seed` alone."""

    nbytes: int
    dtype: str
    std: float
    seed: str


@dataclass(frozen=True)
class Output:
    """A tensor to be written, made of `parts` one after the other."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * BITS[self.dtype] // 8

    @property
    def is_new(self) -> bool:
        return not any(isinstance(part, Part | Shifted) for part in self.parts)


@dataclass(frozen=True)
class Shard:
    """A file of weights to be written.

    Args:
        source: the file of the source that it is, byte for byte
        origin: the name of the file of the source that its tensors come from
    """

    name: str
    tensors: tuple[Output, ...]
    source: Path | None = None
    size: int | None = None
    origin: str | None = None

    @cached_property
    def pieces(self) -> tuple:
        """All bytes of the file, in order."""
        if self.source is not None:
            return (FileRange(self.source, self.size),)
        return (Given(build_header(self.tensors)), *(part for tensor in self.tensors for part in tensor.parts))

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)


@dataclass(frozen=True)
class Plan:
    """A conversion.

    Args:
        command: "retrofit", "strip", "export" or "import"
        options: what was chosen, by name
        config: of the target
        files: of the source to be copied, by their names in the target
        left_out: files that do not come through, and why
        dropped: tensors that do not come through, and why
        deviation: the largest change that it can make to a number of the model's function; None where there is no
            such bound
        deviation_note: what that number is about
        rounding_only: where there is no bound, whether the change is that of rounding
        scaled: factors by tensor
        config_text, index_text: what config.json and the index are to hold, where it is known to the byte
        record: of the conversion that made the source, if one did
    """

    command: str
    options: dict
    source: Checkpoint
    source_config: PreTrainedConfig
    config: PreTrainedConfig
    shards: tuple[Shard, ...]
    files: dict[str, str]
    left_out: dict[str, str]
    dropped: dict[str, str]
    deviation: float | None
    deviation_note: str
    rounding_only: bool = False
    notes: tuple[str, ...] = ()
    scaled: dict[str, float] = field(default_factory=dict)
    config_text: str | None = None
    index_text: str | None = None
    record: dict | None = None

    def __str__(self) -> str:
        from .report import describe_plan

        return describe_plan(self, link=False)

    @property
    def tensors(self) -> list[Output]:
        return [tensor for shard in self.shards for tensor in shard.tensors]

    @property
    def total_parameters(self) -> int:
        return sum(math.prod(tensor.shape) for tensor in self.tensors)

    @property
    def new_parameters(self) -> int:
        return sum(math.prod(tensor.shape) for tensor in self.tensors if tensor.is_new)

    @property
    def nbytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards)


def copy_of(tensor: Tensor, factor: float = 1.0) -> Output:
    return Output(tensor.name, tensor.dtype, tensor.shape, (Part(tensor, 0, tensor.nbytes, factor=factor),))


def rows_of(tensor: Tensor, name: str, ranges: Iterable[tuple[int, int]], repeat: int = 1) -> Output:
    """Some rows of a tensor as a tensor of its own, each range `repeat` times."""
    row = tensor.nbytes // tensor.shape[0]
    parts = tuple(Part(tensor, first * row, last * row, repeat) for first, last in ranges)
    rows = sum(part.nbytes for part in parts) // row
    return Output(name, tensor.dtype, (rows, *tensor.shape[1:]), parts)


def shifted(tensor: Tensor, shift: float, dtype: str) -> Output:
    return Output(tensor.name, dtype, tensor.shape, (Shifted(tensor, shift, dtype),))


def new_tensor(name: str, dtype: str, shape: tuple[int, ...], seed: int | None = None, std: float = 0.0) -> Output:
    """Zeros, or with a `seed` normally distributed values that depend on it and on the tensor's name only."""
    nbytes = math.prod(shape) * BITS[dtype] // 8
    part = Zeros(nbytes) if seed is None else Normal(nbytes, dtype, std, f"{seed}/{name}")
    return Output(name, dtype, shape, (part,))


def shards_of(checkpoint: Checkpoint, outputs: list[list[Output]], new: list[Output]) -> tuple[Shard, ...]:
    """The files to write: one for each file of the source, given the tensors that come of it, and some for new ones.

    A file whose tensors all come through as they are is taken over byte for byte, and can be linked.
    """
    by_file = {}
    for tensor in checkpoint.tensors.values():
        by_file.setdefault(tensor.file, []).append(tensor)
    shards = []
    for (file, tensors), out in zip(by_file.items(), outputs, strict=True):
        whole = out == [copy_of(tensor) for tensor in tensors] and file.suffix == ".safetensors"
        if whole and checkpoint.metadata[file.name].get("format") == "pt":
            size = tensors[-1].start + tensors[-1].nbytes
            shards.append((tuple(out), file, size, file.name))
        elif out:
            shards.append((tuple(out), None, None, file.name))
    group, size = [], 0
    for tensor in new:
        if group and size + tensor.nbytes > MAX_SHARD:
            shards.append((tuple(group), None, None))
            group, size = [], 0
        group.append(tensor)
        size += tensor.nbytes
    if group:
        shards.append((tuple(group), None, None))
    if len(shards) == 1:
        return (Shard("model.safetensors", *shards[0]),)
    return tuple(
        Shard(f"model-{i:05}-of-{len(shards):05}.safetensors", *shard) for i, shard in enumerate(shards, start=1)
    )


# Tensors that say nothing of the function: transformers computes them, and ignores them in files.
COMPUTED = re.compile(r"(^|\.)(rotary_emb\.inv_freq|position_ids)$")

# What tensors that have no place in these models give away: pattern, what it is, what to do.
UNQUANTISED = "start from the unquantised weights"
FOREIGN = (
    (re.compile(r"\.(qweight|qzeros|scales|g_idx)$"), "of GPTQ or AWQ weights", UNQUANTISED),
    (re.compile(r"(weight|input|activation|k|v)_scale(_inv)?$|\.scale$"), "a scale of fp8 weights", UNQUANTISED),
    (re.compile(r"absmax|quant_map|quant_state|\.SCB$|weight_format"), "of bitsandbytes weights", UNQUANTISED),
    (
        re.compile(r"lora_|modules_to_save|\.base_layer\."),
        "of a PEFT adapter",
        "merge it (merge_and_unload), save that, and convert it",
    ),
    (re.compile(r"self_attn\.sinks?$|\.sinks?$"), "a learned attention sink", "these models have none"),
    (
        re.compile(r"self_attn\.(gate_proj|g_proj|gate)\."),
        "the gate of another family",
        "its layout is not known here, and guessing it would scramble the heads",
    ),
    (re.compile(r"(kv_a|kv_b|q_a|q_b)_proj"), "of latent attention (MLA)", "these models have none"),
    (re.compile(r"qkv_proj|W_pack|c_attn|gate_up_proj"), "a packed projection", "save the model with separate ones"),
    (re.compile(r"experts\.|block_sparse_moe"), "of a mixture of experts", "these models have none"),
)


def check_tensors(checkpoint: Checkpoint, shapes: dict[str, tuple[int, ...]], tied: bool) -> dict[str, str]:
    """Compare a source's tensors with those of the model that its config describes; returns those to be dropped.

    Args:
        shapes: of all the tensors that there must be, by name
        tied: whether an lm_head may lie beside the embeddings

    Raises:
        CheckpointError: naming the first tensor that is too much, missing, quantised or of another shape.
    """
    dropped = {name: "computed, not loaded" for name in checkpoint.tensors if COMPUTED.search(name)}
    shapes = dict(shapes)
    if tied and "lm_head.weight" in checkpoint.tensors and "model.embed_tokens.weight" in shapes:
        shapes["lm_head.weight"] = shapes["model.embed_tokens.weight"]
    extra = [tensor for name, tensor in checkpoint.tensors.items() if name not in shapes and name not in dropped]
    for pattern, what, remedy in FOREIGN:
        for tensor in extra:
            if pattern.search(tensor.name):
                raise CheckpointError(f"{tensor.file}: {shown(tensor.name)} is {what}: {remedy}.")
    for tensor in checkpoint.tensors.values():
        if tensor.dtype not in DTYPES and tensor.name not in dropped:
            raise CheckpointError(
                f"{tensor.file}: {shown(tensor.name)} is {tensor.dtype}, so the weights are quantised: {UNQUANTISED}."
            )
    if extra:
        raise CheckpointError(
            f"{extra[0].file}: {shown(extra[0].name)} has no place in a {checkpoint.fields.get('model_type')} model"
            + (f" (nor have {len(extra) - 1} more tensors)" if len(extra) > 1 else "")
            + f": {checkpoint.where()} belongs to other weights, or the model is not a stock one."
        )
    missing = [name for name in shapes if name not in checkpoint.tensors]
    if missing:
        raise CheckpointError(
            f"{checkpoint.where('')}: {missing[0]} is missing"
            + (f" (and {len(missing) - 1} more tensors)" if len(missing) > 1 else "")
            + ": get the whole checkpoint."
        )
    for name, shape in shapes.items():
        tensor = checkpoint.tensors[name]
        if tensor.shape != shape:
            raise CheckpointError(
                f"{tensor.file}: {name} is {list(tensor.shape)}, but {list(shape)} by {checkpoint.where()}: the "
                "config belongs to other weights. Get both from one place, or correct the sizes or the gate in it."
            )
    return dropped


def check_plan(plan: Plan, expected: dict[str, tuple[int, ...]] | None = None) -> None:
    """Compare the plan, tensor by tensor, with the model that its config builds.

    Args:
        expected: shapes by name, where they are not those of that model

    Raises:
        CheckpointError: they differ, which is this program's mistake.
    """
    expected = expected_shapes(plan.config) if expected is None else expected
    planned = {tensor.name: tensor.shape for tensor in plan.tensors}
    full = all(tensor.nbytes == sum(part.nbytes for part in tensor.parts) for tensor in plan.tensors)
    if planned != expected or not full:
        wrong = sorted(name for name in planned.keys() | expected.keys() if planned.get(name) != expected.get(name))
        raise CheckpointError(f"{plan.source.where('')}: the plan is wrong about {wrong[:3]}: please report this.")


def expected_shapes(config: PreTrainedConfig) -> dict[str, tuple[int, ...]]:
    """The tensors that a checkpoint of this config holds. Builds the model without memory for weights."""
    from .. import modeling

    name = config.architectures[0]
    model_class = getattr(modeling, name, None) or getattr(transformers, name)
    with torch.device("meta"):
        model = model_class(config)
    tied = model.all_tied_weights_keys
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters() if name not in tied}


def other_files(checkpoint: Checkpoint) -> tuple[dict[str, str], dict[str, str]]:
    """The source's other files that come through, by their names in the target, and those that do not, and why."""
    files, left_out = {}, {}
    for file in checkpoint.files:
        if checkpoint.folder and (checkpoint.folder / file).is_dir():
            left_out[file] = "a link to a folder, which is not followed"
        elif (reason := why_left_out(file)) is not None:
            left_out[file] = reason
        else:
            files[file] = file
    return files, left_out


def digest(plan: Plan) -> str:
    """A fingerprint of what the plan writes, from which files and by which version, to recognise its leavings by."""
    from .. import __version__

    stats = sorted((str(file.resolve()), *stat) for file, stat in plan.source.stats.items())
    what = (__version__, plan.command, plan.options, plan.config.to_json_string(), plan.shards, plan.files, stats)
    # However the source's folder is spelled.
    spelled = repr(plan.source.folder)[:-2] + "/"
    return sha256(repr(what).replace(spelled, spelled[:11]).encode()).hexdigest()
