"""Weights in pickles (`.bin`), read by torch with `weights_only` and mapped from the file."""

import re
import struct
import zipfile
from pathlib import Path

import torch

from ..modeling.mapped_files import let_go_of_pages
from .errors import CheckpointError, shown
from .headers import DTYPES, Tensor

SPELLINGS = {
    **{getattr(torch, name): spelling for spelling, name in DTYPES.items()},
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


def _reason(error: Exception) -> str:
    """What torch's reader found, without its advice to trust the file."""
    if asked := re.search(r"GLOBAL ([\w.]+)", str(error)):
        return f"it asks for {asked[1]}"
    return type(error).__name__


def _is_plain(name, value) -> bool:
    is_tensor = isinstance(name, str) and isinstance(value, torch.Tensor)
    plain = is_tensor and value.layout is torch.strided and value.device.type == "cpu"
    return plain and not value.is_neg() and not value.is_conj()


def _base_of_the_mapping(file: Path, weights: dict[str, torch.Tensor]) -> int | None:
    """The address that byte 0 of the file is mapped to, or None where it cannot be told for certain.

    Every storage is a record of the file, stored as it is. If records and storages, in their orders, are all the same
    distance apart, that distance is it.
    """
    starts = []
    with zipfile.ZipFile(file) as archive, open(file, "rb") as opened:
        orders = [archive.read(name) for name in archive.namelist() if name.endswith("/byteorder")]
        if orders not in ([], [b"little"]):
            return None  # torch turns the bytes around
        for record in archive.infolist():
            if "/data/" in record.filename and record.file_size:
                opened.seek(record.header_offset + 26)
                name_length, extra_length = struct.unpack("<HH", opened.read(4))
                starts.append(record.header_offset + 30 + name_length + extra_length)
    storages = (value.untyped_storage() for value in weights.values())
    addresses = sorted({storage.data_ptr() for storage in storages if storage.nbytes()})
    bases = {address - start for address, start in zip(addresses, sorted(starts), strict=False)}
    return bases.pop() if len(bases) == 1 and len(addresses) == len(starts) else None


def _start_in_file(file: Path, value: torch.Tensor, base: int | None) -> int | None:
    if base is None or not value.is_contiguous() or not value.numel():
        return None
    start = value.data_ptr() - base
    first = value.reshape(-1)[:1].view(torch.uint8).numpy().tobytes()
    with open(file, "rb") as opened:
        opened.seek(start)
        return start if opened.read(len(first)) == first else None


def _is_zip(file: Path) -> bool:
    try:
        return zipfile.is_zipfile(file)
    except zipfile.BadZipFile:  # of some damaged directories
        return False


class PickledTensors:
    """The tensors of one `.bin` file. Opening it reads no tensor's data.

    Raises:
        CheckpointError: it is not a file of plain tensors by name.
    """

    def __init__(self, file: Path):
        # The form of torch before 1.6 cannot be mapped: it would be held in memory whole.
        if not _is_zip(file):
            raise CheckpointError(
                f"{file} is cut short, damaged, or in the form of torch before 1.6: get it again, or load it in "
                "transformers and save_pretrained() it."
            )
        try:
            weights = torch.load(file, weights_only=True, mmap=True, map_location="cpu")
        except Exception as error:  # torch's reader raises whatever the bytes lead to
            raise CheckpointError(
                f"{file} holds more than plain tensors, or is damaged ({_reason(error)}): get it again from a source "
                "that you trust."
            ) from error
        items = weights.items() if isinstance(weights, dict) else ()
        if not isinstance(weights, dict) or not all(_is_plain(name, value) for name, value in items):
            first = next((f" ({shown(name)})" for name, value in items if not _is_plain(name, value)), "")
            raise CheckpointError(
                f"{file} does not hold plain tensors by name{first}: get the checkpoint's own weights."
            )
        unknown = [f"{name} is {value.dtype}" for name, value in weights.items() if value.dtype not in SPELLINGS]
        if unknown:
            raise CheckpointError(f"{file}: {unknown[0]}, which no weights of these models are.")
        self.weights = weights
        try:
            base = _base_of_the_mapping(file, weights)
        except (zipfile.BadZipFile, NotImplementedError, struct.error, OSError):  # what torch does not look at
            base = None
        self.tensors = [
            Tensor(name, SPELLINGS[value.dtype], tuple(value.shape), file, _start_in_file(file, value, base))
            for name, value in weights.items()
        ]

    def are_one(self, a: str, b: str) -> bool:
        """Whether two names stand for the same bytes of the file."""
        one, other = self.weights[a], self.weights[b]
        return (one.data_ptr(), one.shape, one.stride(), one.dtype) == (
            other.data_ptr(), other.shape, other.stride(), other.dtype
        )  # fmt: skip

    def read_into(self, buffer: memoryview, name: str, start: int) -> None:
        """Fill `buffer` with the tensor's bytes (row by row, as safetensors has them) from byte `start`."""
        weight = self.weights[name]
        if not weight.is_contiguous():
            rows = weight.shape[0] if weight.dim() else 1
            row = weight.nbytes // rows
            first, last = start // row, -(-(start + len(buffer)) // row)
            weight, start = weight[first:last].contiguous(), start - first * row
        flat = weight.reshape(-1).view(torch.uint8)[start : start + len(buffer)]
        buffer[:] = flat.numpy().data
        let_go_of_pages(flat)
