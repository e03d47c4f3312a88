"""The headers of safetensors files and the indexes of shards, read as input that may lie, and written.

The format: https://github.com/huggingface/safetensors#format
"""

import json
import math
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath

from .errors import CheckpointError, shown

# Bits of one element. Of those that are not in DTYPES, only the size is known: they mean quantised weights.
BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32,
    "U16": 16, "U8": 8, "BOOL": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "C64": 64,
}  # fmt: skip
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}

MAX_HEADER = 100_000_000  # as in the safetensors library


@dataclass(frozen=True)
class Tensor:
    """A tensor in a file of weights: `dtype` as safetensors spells it, and where its bytes start in the file.

    `start` is None for a tensor in a pickle whose bytes do not lie in the file one after the other; it is read through
    torch.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int | None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * BITS[self.dtype] // 8


def _integer(text: str) -> int:
    if text == "-0":
        raise ValueError("-0 is no integer")
    return int(text)


def strict_json(data: bytes, where: str):
    """JSON in UTF-8, without duplicate names and without text that cannot be written again."""

    def unique(pairs):
        names = Counter(name for name, _ in pairs)
        if len(names) < len(pairs):
            twice = names.most_common(1)[0][0]
            raise CheckpointError(f"{where} has {shown(repr(twice))} twice: get the file again.")
        return dict(pairs)

    try:
        content = json.loads(data.decode(), object_pairs_hook=unique, parse_int=_integer)
        json.dumps(content, ensure_ascii=False).encode()  # refuses halves of surrogate pairs
        return content
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is not JSON in UTF-8 ({shown(error)}): get the file again.") from error


def _is_size(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def read_header(file: Path) -> tuple[list[Tensor], dict[str, str]]:
    """The tensors of a safetensors file in the order of their bytes, and its metadata. Reads no tensor's data.

    Raises:
        CheckpointError: the header is not one, or does not fit the file: tensors must follow each other without gaps
            or overlaps to its end.
        OSError: the file cannot be read.
    """

    def refuse(what: str):
        raise CheckpointError(f"{file}: {what}. The file is damaged or cut short: get it again.")

    with open(file, "rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 or not 2 <= length <= min(MAX_HEADER, size - 8):
            refuse(f"its header cannot be {length} bytes long in a file of {size}")
        text = opened.read(length)
    if not text.startswith(b"{"):
        refuse("its header is not a JSON object")
    header = strict_json(text, f"{file}: the header")
    metadata = header.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata
    if not (isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())):
        refuse("its __metadata__ is not a map of strings")

    tensors = []
    for own_name, entry in header.items():
        name = shown(own_name)
        if not (isinstance(entry, dict) and entry.keys() == {"dtype", "shape", "data_offsets"}):
            refuse(f"{name} has no dtype, shape and data_offsets")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not (isinstance(dtype, str) and dtype in BITS):
            refuse(f"{name} has the unknown dtype {shown(repr(dtype))}")
        if not (isinstance(shape, list) and all(map(_is_size, shape))):
            refuse(f"{name} has the shape {shown(repr(shape))}")
        if not (isinstance(offsets, list) and len(offsets) == 2 and all(map(_is_size, offsets))):
            refuse(f"{name} has the data_offsets {shown(repr(offsets))}")
        tensor = Tensor(own_name, dtype, tuple(shape), file, 8 + length + offsets[0])
        if math.prod(shape) * BITS[dtype] % 8 or tensor.nbytes != offsets[1] - offsets[0]:
            refuse(f"{name} is {dtype} {shown(shape)}, which does not fill its {offsets[1] - offsets[0]} bytes")
        if math.prod(size for size in shape if size) >= 2**63:
            refuse(f"{name} has the shape {shown(shape)}")
        tensors.append(tensor)

    tensors.sort(key=lambda tensor: (tensor.start, tensor.nbytes))
    end = 8 + length
    for tensor in tensors:
        if tensor.start != end:
            refuse(f"the bytes of {shown(tensor.name)} start at {tensor.start}, where {end} was expected")
        end += tensor.nbytes
    if end != size:
        refuse(f"its tensors end at byte {end} of {size}")
    return tensors, metadata


def build_header(tensors: Iterable) -> bytes:
    """The header of a safetensors file that holds these tensors (`name`, `dtype`, `shape`, `nbytes`) in this order."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for tensor in tensors:
        offsets = [end, end := end + tensor.nbytes]
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # aligned, as the library writes it
    return len(text).to_bytes(8, "little") + text


def read_index(file: Path, suffix: str) -> dict[str, str]:
    """The `weight_map` of an index of shards: tensor names to names of files beside the index.

    Raises:
        CheckpointError: it is not one, or names a file anywhere else, or one that does not end with `suffix`.
        OSError: the file cannot be read.
    """
    index = strict_json(file.read_bytes(), str(file))
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not (isinstance(weight_map, dict) and weight_map):
        raise CheckpointError(f"{file} has no weight_map: get the file again.")
    for name, shard in weight_map.items():
        if not is_plain_name(shard) or not shard.endswith(suffix):
            raise CheckpointError(
                f"{file} puts {shown(name)} into {shown(repr(shard))}, which is not the name of a {suffix} file "
                "beside it: get the file again from a source that you trust."
            )
    return weight_map


def is_plain_name(name) -> bool:
    """Whether `name` is the name of a file in this folder, on any system: no path, no drive, no control characters."""
    return (
        isinstance(name, str)
        and name.isprintable()
        and name not in ("", ".", "..")
        and PureWindowsPath(name).name == name
        and PurePosixPath(name).name == name
        and ":" not in name
    )


def build_index(files: dict[str, list]) -> str:
    """The index for these files' tensors, in transformers' form."""
    tensors = [tensor for shard in files.values() for tensor in shard]
    index = {
        "metadata": {
            "total_parameters": sum(math.prod(tensor.shape) for tensor in tensors),
            "total_size": sum(tensor.nbytes for tensor in tensors),
        },
        "weight_map": {tensor.name: file for file, shard in files.items() for tensor in shard},
    }
    return json.dumps(index, indent=2, sort_keys=True) + "\n"
