"""Reading a source's bytes, a block at a time, from several threads."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from .checkpoint import Checkpoint
from .errors import CheckpointError
from .headers import BITS, DTYPES, Tensor

# Small enough to stay in a core's cache between reading, summing and writing, and for the page cache to take them
# fast: with blocks of 256 kB a copy took a quarter longer.
BLOCK = 1 << 16


class Reader:
    """Opens the files of a checkpoint for reading, each once, and closes them on leaving."""

    def __init__(self, checkpoint: Checkpoint):
        self.checkpoint = checkpoint
        self._descriptors: dict[Path, int] = {}
        self._lock = threading.Lock()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def read_file(self, buffer: memoryview, file: Path, start: int) -> None:
        """Fill `buffer` from byte `start` of a file."""
        with self._lock:
            if file not in self._descriptors:
                self._descriptors[file] = os.open(file, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        descriptor = self._descriptors[file]
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(descriptor, [buffer[done:]], start + done)
            except OSError as error:
                raise OSError(error.errno, f"{os.strerror(error.errno)} while reading", str(file)) from error
            if count == 0:
                raise CheckpointError(f"{file} became shorter while it was read: get it again.")
            done += count

    def read(self, buffer: memoryview, tensor: Tensor, start: int) -> None:
        """Fill `buffer` from byte `start` of a tensor."""
        if tensor.start is None:
            self.checkpoint.pickles[tensor.file].read_into(buffer, tensor.name, start)
        else:
            self.read_file(buffer, tensor.file, tensor.start + start)

    def blocks(self, tensor: Tensor, multiple: int = 1) -> Iterator[memoryview]:
        """All bytes of a tensor, in blocks whose length is a multiple of `multiple`; each overwrites the last."""
        size = max(BLOCK // multiple, 1) * multiple
        buffer = memoryview(bytearray(size))
        for start in range(0, tensor.nbytes, size):
            block = buffer[: min(size, tensor.nbytes - start)]
            self.read(block, tensor, start)
            yield block


# numpy rather than torch, whose own threads get in the way of several that copy. It has no bfloat16, which is the
# upper half of a float32.
NUMPY = {"F64": np.float64, "F32": np.float32, "F16": np.float16}


def values(block: memoryview, dtype: str) -> np.ndarray:
    """The numbers in a block."""
    if dtype == "BF16":
        return (np.frombuffer(block, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(block, NUMPY[dtype])


def scale(block: memoryview, dtype: str, factor: float) -> None:
    """Multiply the numbers in a block, in place, by a power of two that `check_factor` has passed."""
    scaled = values(block, dtype) * NUMPY.get(dtype, np.float32)(factor)
    if dtype == "BF16":
        scaled = (scaled.view(np.uint32) >> 16).astype(np.uint16)
    block[:] = memoryview(scaled).cast("B")


def as_dtype(numbers: np.ndarray, dtype: str) -> bytes:
    """Numbers as the bytes of a dtype, rounded to the nearest, ties to even."""
    if dtype != "BF16":
        return numbers.astype(NUMPY[dtype]).tobytes()
    return torch.from_numpy(numbers).to(torch.bfloat16).view(torch.uint8).numpy().tobytes()


def shift(reader: Reader, tensor: Tensor, by: float, dtype: str) -> bytes:
    """The numbers of a small tensor plus `by`, as the bytes of a dtype."""
    block = memoryview(bytearray(tensor.nbytes))
    reader.read(block, tensor, 0)
    return as_dtype(values(block, tensor.dtype).astype(np.float64) + by, dtype)


def same_values(reader: Reader, a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same bytes."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return all(one == other for one, other in zip(reader.blocks(a), reader.blocks(b), strict=True))


def check_factor(reader: Reader, tensor: Tensor, factor: float, running: str) -> float:
    """Refuse a matrix whose values times `factor` would be rounded or overflow; returns its largest sum of a row's
    absolute values.

    Args:
        running: the dtype that the model is loaded in

    Raises:
        CheckpointError: naming the tensor.
    """
    row = max(tensor.nbytes // tensor.shape[0], 1)
    largest = 0.0
    for block in reader.blocks(tensor, multiple=row):
        original = bytes(block)
        weights = values(memoryview(original), tensor.dtype)
        with np.errstate(all="ignore"):
            scale(block, tensor.dtype, factor)
            scaled = values(block, tensor.dtype)
            finite = np.isfinite(weights)
            exact = (scaled * NUMPY.get(tensor.dtype, np.float32)(1 / factor) == weights) & np.isfinite(scaled)
            if running != tensor.dtype:
                before, after = (
                    values(memoryview(as_dtype(numbers, running)), running) for numbers in (weights, scaled)
                )
                exact &= (before * factor == after) & np.isfinite(after)
        if not (exact | ~finite).all():
            raise CheckpointError(
                f"{tensor.file}: {tensor.name} has values that times {factor:g} do not fit {DTYPES[running]}: "
                "leave it as it is (retrofit: --start scale), or save the checkpoint in another dtype first."
            )
        rows = np.abs(weights, dtype=np.float64).reshape(-1, row // (BITS[tensor.dtype] // 8))
        largest = max(largest, float(rows.sum(-1).max()))
    return largest
