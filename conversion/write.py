"""Carrying out a plan: written beside the target, resumed where it was interrupted, published by one rename.

TARGET.partial/journal.jsonl    what is being converted, then a line for each finished chunk, with its checksum
TARGET.partial/checkpoint/      becomes TARGET; has no config.json before all weights are there
"""

import errno
import json
import os
import shutil
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from tqdm.auto import tqdm
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME

from .errors import CheckpointError
from .headers import DTYPES, build_index
from .plan import FileRange, Given, Normal, Part, Plan, Shard, Zeros, digest
from .reader import BLOCK, Reader, scale

# What one thread writes at a time, what is summed, and what is not written again after an interruption.
CHUNK = 1 << 28
WORKERS = min(4, os.cpu_count() or 1)
RECORD_NAME = "conversion.json"
NOTHING = memoryview(bytes(BLOCK))


@dataclass(frozen=True)
class Chunk:
    """Bytes of a file to be written, from `start`: pieces, each with the range of it that belongs here."""

    shard: Shard
    index: int
    start: int
    pieces: tuple

    @property
    def nbytes(self) -> int:
        return sum(last - first for _, first, last in self.pieces)


def chunks_of(shard: Shard) -> list[Chunk]:
    """A file's bytes in chunks of about CHUNK: only pieces that are ranges of a file are cut."""
    chunks, pieces, start, size = [], [], 0, 0

    def close():
        nonlocal pieces, start, size
        chunks.append(Chunk(shard, len(chunks), start, tuple(pieces)))
        start, pieces, size = start + size, [], 0

    for piece in shard.pieces:
        divisible = isinstance(piece, (FileRange, Zeros)) or (isinstance(piece, Part) and piece.repeat == 1)
        first = 0
        while first < piece.nbytes:
            last = min(piece.nbytes, first + CHUNK - size) if divisible else piece.nbytes
            pieces.append((piece, first, last))
            size, first = size + last - first, last
            if size >= CHUNK:
                close()
    if pieces:
        close()
    return chunks


def blocks(reader: Reader, piece, first: int, last: int, buffer: memoryview) -> Iterator[memoryview]:
    """The bytes `first` to `last` of a piece, a block at a time."""
    if isinstance(piece, Given):
        yield memoryview(piece.data)[first:last]
    elif isinstance(piece, Zeros):
        for start in range(first, last, BLOCK):
            yield NOTHING[: min(BLOCK, last - start)]
    elif isinstance(piece, Normal):
        yield from _normal(piece, buffer)
    elif isinstance(piece, Part) and piece.repeat > 1:
        row = memoryview(bytearray(piece.end - piece.start))
        reader.read(row, piece.tensor, piece.start)
        for _ in range(piece.repeat):
            yield row
    else:
        for start in range(first, last, len(buffer)):
            block = buffer[: min(len(buffer), last - start)]
            if isinstance(piece, FileRange):
                reader.read_file(block, piece.file, start)
            else:
                reader.read(block, piece.tensor, piece.start + start)
                if piece.factor != 1:
                    scale(block, piece.tensor.dtype, piece.factor)
            yield block


def _normal(piece: Normal, buffer: memoryview) -> Iterator[memoryview]:
    """The values depend on the seed alone; numpy's Philox gives the same ones on every machine."""
    key = int.from_bytes(sha256(piece.seed.encode()).digest()[:16], "little")
    generator = np.random.Generator(np.random.Philox(key=key))
    dtype = getattr(torch, DTYPES[piece.dtype])
    size = len(buffer) // dtype.itemsize
    for start in range(0, piece.nbytes // dtype.itemsize, size):
        count = min(size, piece.nbytes // dtype.itemsize - start)
        noise = torch.from_numpy(generator.standard_normal(count, dtype=np.float32)) * piece.std
        yield memoryview(noise.to(dtype).view(torch.uint8).numpy())


class Interrupted(BaseException):
    """Another thread failed or the user stopped the conversion."""


def write_chunk(reader: Reader, chunk: Chunk, descriptor: int, advance: Callable, stop: threading.Event) -> int:
    """Write a chunk at its place, and return the CRC-32 of what was written."""
    if all(isinstance(piece, Zeros) for piece, _, _ in chunk.pieces):
        advance(chunk.nbytes)
        return crc_of_zeros(chunk.nbytes)
    crc, offset = 0, chunk.start
    buffer = memoryview(bytearray(BLOCK))
    for piece, first, last in chunk.pieces:
        for block in blocks(reader, piece, first, last, buffer):
            if stop.is_set():
                raise Interrupted
            crc = zlib.crc32(block, crc)
            # The file has its full size already: what is not written reads as zeros, and takes no space.
            if not isinstance(piece, Zeros):
                _write(descriptor, block, offset)
            offset += len(block)
            advance(len(block))
    return crc


@lru_cache
def crc_of_zeros(nbytes: int) -> int:
    crc = 0
    for start in range(0, nbytes, BLOCK):
        crc = zlib.crc32(NOTHING[: min(BLOCK, nbytes - start)], crc)
    return crc


def _write(descriptor: int, block: memoryview, offset: int) -> None:
    while block:
        count = os.pwrite(descriptor, block, offset)
        block, offset = block[count:], offset + count


def crc_of(file: Path, start: int, nbytes: int) -> int | None:
    """The CRC-32 of a part of a file, or None where the file is shorter."""
    crc = 0
    with open(file, "rb") as opened:
        opened.seek(start)
        while nbytes:
            block = opened.read(min(BLOCK, nbytes))
            if not block:
                return None
            crc, nbytes = zlib.crc32(block, crc), nbytes - len(block)
    return crc


def partial_folder(target: Path) -> Path:
    return target.with_name(target.name + ".partial")


def check_target(plan: Plan, target: Path, link: bool) -> None:
    """Refuse a target that exists, that overlaps the source, or that there is no space for.

    Raises:
        CheckpointError: nothing was written.
    """
    if not target.name:
        raise CheckpointError(f"{target} cannot be a target: name a new folder.")
    if target.is_symlink():
        raise CheckpointError(f"{target} is a link: name a new folder.")
    source = plan.source.folder.resolve()
    place = target.resolve()
    if place == source:
        raise CheckpointError(f"{target} is the source itself: name another folder, nothing is converted in place.")
    if source in place.parents:
        raise CheckpointError(f"{target} lies inside the source {source}: name a folder outside it.")
    if place in source.parents:
        raise CheckpointError(f"{target} holds the source {source}: name another folder.")
    if target.is_dir():
        if any(target.iterdir()):
            raise CheckpointError(f"{target} exists and is not empty: remove it, or name another folder.")
    elif target.exists():
        raise CheckpointError(f"{target} exists and is not a folder: name another one.")
    parent = place.parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise CheckpointError(f"{parent} is not a folder that can be written to: name another target.")
    if link:
        for shard in plan.shards:
            if shard.source and shard.source.resolve().stat().st_dev != parent.stat().st_dev:
                raise CheckpointError(
                    f"{shard.source} and {target} are on different file systems, across which files cannot be "
                    "linked: leave link out, or name a target beside the source."
                )
    written = [shard for shard in plan.shards if not (link and shard.source)]
    needed = sum(p.nbytes for shard in written for p in shard.pieces if not isinstance(p, Zeros))
    partial = partial_folder(target)
    if partial.exists():
        needed -= sum(file.stat().st_blocks * 512 for file in partial.rglob("*") if file.is_file())
    free = shutil.disk_usage(parent).free
    if needed > free:
        raise CheckpointError(
            f"{parent} has {free / 1e9:.1f} GB free and {needed / 1e9:.1f} GB are needed: make room, or name another "
            "target."
        )


class Staging:
    """The folder beside the target in which a conversion is prepared. One process at a time may hold it."""

    def __init__(self, plan: Plan, target: Path, restart: bool):
        self.target = target
        self.folder = partial_folder(target)
        self.checkpoint = self.folder / "checkpoint"
        self.journal = self.folder / "journal.jsonl"
        self.finished: dict[tuple[str, int], int] = {}
        self._plan, self._restart = plan, restart

    def __enter__(self):
        self._open_folder()
        fingerprint = digest(self._plan)
        found = self._read_journal()
        if self._restart or not found:
            # What is there is deleted only where it is known to be a conversion's.
            shutil.rmtree(self.checkpoint, ignore_errors=True)
            self.journal.unlink(missing_ok=True)
        elif found[0] != {"plan": fingerprint}:
            raise CheckpointError(
                f"{self.folder} holds an unfinished conversion of another source, or with other options: finish that "
                "one, or pass restart (--restart) to discard it."
            )
        else:
            self.finished = {(line["shard"], line["chunk"]): line["crc32"] for line in found[1:]}
        self.checkpoint.mkdir(exist_ok=True)
        self._journal = open(self.journal, "a")
        if not found or self._restart:
            self._note({"plan": fingerprint})
        return self

    def __exit__(self, *_):
        self._journal.close()
        self._unlock()

    def _open_folder(self):
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            self.folder.mkdir()
        except FileExistsError:
            strangers = sorted({path.name for path in self.folder.iterdir()} - {"journal.jsonl", "checkpoint"})
            if strangers or (self.checkpoint.exists() and not self.journal.exists()):
                raise CheckpointError(
                    f"{self.folder} exists and is not an unfinished conversion: move it away, or name another target."
                ) from None
        self._lock = None
        try:
            import fcntl
        except ImportError:  # no locks on Windows
            return
        self._lock = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise CheckpointError(f"{self.target} is being converted by another process: wait for it.") from None

    def _unlock(self):
        if self._lock is not None:
            os.close(self._lock)

    def _read_journal(self) -> list[dict]:
        lines = []
        if self.journal.is_file():
            for line in self.journal.read_text().splitlines(keepends=True):
                try:
                    lines.append(json.loads(line) if line.endswith("\n") else None)
                except ValueError:
                    lines.append(None)
        # The last line may be cut short; anything else is not ours.
        if None in lines[:-1] or not all(isinstance(line, dict) for line in lines if line is not None):
            raise CheckpointError(f"{self.journal} is damaged: pass restart (--restart) to start again.")
        complete = [line for line in lines if line is not None]
        if len(complete) < len(lines):
            self.journal.write_text("".join(json.dumps(line) + "\n" for line in complete))
        return complete

    def _note(self, line: dict) -> None:
        self._journal.write(json.dumps(line) + "\n")
        self._journal.flush()

    def note_finished(self, chunk: Chunk, crc: int) -> None:
        self._note({"shard": chunk.shard.name, "chunk": chunk.index, "crc32": crc})

    def publish(self) -> None:
        """Make the finished folder the target, by one rename."""
        for path in sorted(self.checkpoint.rglob("*"), reverse=True):
            if path.is_dir() or path.stat().st_nlink == 1:  # a hard link's data is the source's
                _sync(path)
        _sync(self.checkpoint)
        try:
            os.rename(self.checkpoint, self.target)
        except OSError as error:
            raise CheckpointError(
                f"{self.target} could not be put in place ({error.strerror}): the finished checkpoint is in "
                f"{self.checkpoint}."
            ) from error
        _sync(self.target.parent)
        shutil.rmtree(self.folder, ignore_errors=True)


def _sync(path: Path) -> None:
    """Have what was written to a file, or a folder's list of names, survive a power cut."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:  # folders cannot be opened on Windows
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def link_file(source: Path, target: Path) -> None:
    """A second name for a file's data: a reflink where the file system has them, else a hard link."""
    source = source.resolve()  # in the Hub's cache, files are links to blobs
    try:
        import fcntl

        with open(source, "rb") as opened, open(target, "xb") as created:
            fcntl.ioctl(created, 0x40049409, opened.fileno())  # FICLONE
    except (ImportError, OSError):
        target.unlink(missing_ok=True)
        os.link(source, target)


def write_weights(plan: Plan, staging: Staging, link: bool, progress: bool) -> dict[str, dict]:
    """Write all files of weights, and their index where there are several.

    Returns:
        For each file its size and, unless it was linked, the CRC-32 of each chunk of about 256 MiB.
    """
    linked = [shard for shard in plan.shards if link and shard.source]
    written = [shard for shard in plan.shards if shard not in linked]
    chunks = {shard.name: chunks_of(shard) for shard in written}
    crcs: dict[tuple[str, int], int] = {}
    _remove_strangers(staging.checkpoint, {shard.name for shard in plan.shards})
    for shard in linked:
        place = staging.checkpoint / shard.name
        place.unlink(missing_ok=True)
        link_file(shard.source, place)

    total = sum(chunk.nbytes for shard in chunks.values() for chunk in shard)
    stop = threading.Event()
    descriptors = {}
    bar = tqdm(total=total, desc="Writing weights", unit="B", unit_scale=True, disable=not progress)
    try:
        with Reader(plan.source) as reader, ThreadPoolExecutor(WORKERS) as executor:
            try:
                for shard in written:
                    descriptors[shard.name] = _open_sized(staging, shard)
                futures = {}
                for chunk in (chunk for shard in chunks.values() for chunk in shard):
                    task = executor.submit(
                        _write_unless_finished, reader, chunk, staging, descriptors[chunk.shard.name], bar.update, stop
                    )
                    futures[task] = chunk
                for future in as_completed(futures):
                    chunk = futures[future]
                    crc, fresh = future.result()
                    if fresh:
                        staging.note_finished(chunk, crc)
                    crcs[chunk.shard.name, chunk.index] = crc
            except BaseException:
                stop.set()
                executor.shutdown(cancel_futures=True)
                raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise OSError(
                error.errno, f"{os.strerror(error.errno)} after part of it was written: make room and run it again",
                str(staging.folder),
            ) from error  # fmt: skip
        raise
    finally:
        bar.close()
        for descriptor in descriptors.values():
            os.close(descriptor)

    if len(plan.shards) > 1:
        index = build_index({shard.name: list(shard.tensors) for shard in plan.shards})
        (staging.checkpoint / SAFE_WEIGHTS_INDEX_NAME).write_text(index)
    return {
        shard.name: {"size": shard.nbytes, "linked": True}
        if shard in linked
        else {
            "size": shard.nbytes,
            "crc32": [f"{crcs[shard.name, index]:08x}" for index in range(len(chunks[shard.name]))],
        }
        for shard in plan.shards
    }


def _remove_strangers(folder: Path, names: set[str]) -> None:
    """What an interrupted run left, other than weights, is written again."""
    for path in folder.iterdir():
        if path.name not in names:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _open_sized(staging: Staging, shard: Shard) -> int:
    """The file of a shard, at its full size."""
    path = staging.checkpoint / shard.name
    kept = path.is_file() and path.stat().st_nlink == 1 and path.stat().st_size == shard.nbytes
    if not kept:
        path.unlink(missing_ok=True)
        staging.finished = {key: crc for key, crc in staging.finished.items() if key[0] != shard.name}
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
    os.ftruncate(descriptor, shard.nbytes)
    return descriptor


def _write_unless_finished(reader, chunk: Chunk, staging: Staging, descriptor: int, advance, stop) -> tuple[int, bool]:
    crc = staging.finished.get((chunk.shard.name, chunk.index))
    if crc is not None and crc_of(staging.checkpoint / chunk.shard.name, chunk.start, chunk.nbytes) == crc:
        advance(chunk.nbytes)
        return crc, False
    return write_chunk(reader, chunk, descriptor, advance, stop), True


def write_files(plan: Plan, staging: Staging) -> None:
    """Copy the source's other files byte for byte, then write the config, after which the folder is a checkpoint."""
    for name, original in plan.files.items():
        place = staging.checkpoint / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(plan.source.folder / original, place)
    (staging.checkpoint / CONFIG_NAME).write_text(plan.config_text or plan.config.to_json_string())
