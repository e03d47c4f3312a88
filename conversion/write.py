"""Carrying out a plan: written beside the target, resumed where it was interrupted, published by one rename.

TARGET.partial/journal.jsonl    what is being converted, then a line for each finished chunk, with its checksum
TARGET.partial/checkpoint/      becomes TARGET; has no config.json before all weights are there
"""

import dataclasses
import json
import os
import shutil
import stat
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from tqdm.auto import tqdm
from transformers import GenerationConfig
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME

from .checkpoint import expanded
from .errors import CheckpointError
from .headers import DTYPES, build_index
from .plan import FileRange, Given, Normal, Part, Plan, Shard, Shifted, Zeros, digest
from .reader import BLOCK, Reader, scale, shift

# What one thread writes at a time, what is summed, and what is not written again after an interruption.
CHUNK = 1 << 28
WORKERS = min(4, os.cpu_count() or 1)
JOURNAL, NEW_JOURNAL, STAGED = "journal.jsonl", "journal.new", "checkpoint"
NOTHING = memoryview(bytes(BLOCK))
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


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
            # Cut between numbers, of whatever dtype.
            last = min(piece.nbytes, first + max((CHUNK - size) // 8 * 8, 8)) if divisible else piece.nbytes
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
    elif isinstance(piece, Shifted):
        yield memoryview(shift(reader, piece.tensor, piece.shift, piece.dtype))
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


def write_chunk(
    reader: Reader, chunk: Chunk, descriptor: int, kept: bool, advance: Callable, stop: threading.Event
) -> int:
    """Write a chunk at its place, and return the CRC-32 of what was written.

    Args:
        kept: the file was there before. A new one has its full size already: what is not written to it reads as zeros,
            and takes no space.
    """
    if not kept and all(isinstance(piece, Zeros) for piece, _, _ in chunk.pieces):
        advance(chunk.nbytes)
        return crc_of_zeros(chunk.nbytes)
    crc, offset = 0, chunk.start
    buffer = memoryview(bytearray(BLOCK))
    for piece, first, last in chunk.pieces:
        for block in blocks(reader, piece, first, last, buffer):
            if stop.is_set():
                raise Interrupted
            crc = zlib.crc32(block, crc)
            if kept or not isinstance(piece, Zeros):
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


def is_as_recorded(folder: Path, files: dict[str, dict]) -> bool:
    """Whether files of weights still are what a record says of them, as far as it does: not of linked ones."""
    for name, entry in files.items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != entry["size"]:
            return False
        starts = [*map(int, entry.get("crc32", ())), entry["size"]]
        for start, end in pairwise(starts):
            if f"{crc_of(file, start, end - start):08x}" != entry["crc32"][str(start)]:
                return False
    return True


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


def check_target(plan: Plan, target, link: bool) -> Path:
    """Refuse a target that exists, that overlaps the source, or that there is no space for; returns its full path.

    Raises:
        CheckpointError: nothing was written.
    """
    target = expanded(target)
    if target.name in ("", ".."):
        raise CheckpointError(f"{target} cannot be a target: name a new folder.")
    if target.is_symlink():
        raise CheckpointError(f"{target} is a link: name a new folder.")
    for parent in target.absolute().parents:
        if parent.is_symlink() and not parent.exists():
            raise CheckpointError(f"{parent} is a link to nothing: name another target.")
    target = target.parent.resolve() / target.name
    partial = partial_folder(target)
    source = plan.source.folder.resolve()
    if target == source:
        raise CheckpointError(f"{target} is the source itself: name another folder, nothing is converted in place.")
    if source in target.parents:
        raise CheckpointError(f"{target} lies inside the source {source}: name a folder outside it.")
    if target in source.parents:
        raise CheckpointError(f"{target} holds the source {source}: name another folder.")
    if partial == source or partial in source.parents:
        raise CheckpointError(
            f"the source {source} lies in {partial}, where {target} would be prepared: name another target."
        )
    for file in plan.source.stats:
        if any(folder in file.resolve().parents for folder in (target, partial)):
            raise CheckpointError(f"{file} is a link into {target} or {partial}: name another target.")
    if partial.is_symlink() or (partial.exists() and not partial.is_dir()):
        raise CheckpointError(f"{partial}, where {target} would be prepared, is not a folder: move it away.")
    if target.is_dir():
        if any(target.iterdir()):
            if is_finished(partial):
                shutil.rmtree(partial)  # what is left where a run ended between its last two steps
                raise CheckpointError(f"{target} was finished by an earlier run: it is complete.")
            raise CheckpointError(f"{target} exists and is not empty: remove it, or name another folder.")
    elif target.exists():
        raise CheckpointError(f"{target} exists and is not a folder: name another one.")
    parent = target.parent
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
    statuses = [file.lstat() for file in partial.rglob("*") if file.is_file()]
    needed -= sum(status.st_blocks * 512 for status in statuses if status.st_nlink == 1)
    free = shutil.disk_usage(parent).free
    if needed > free:
        raise CheckpointError(
            f"{parent} has {free / 1e6:,.1f} MB free and {needed / 1e6:,.1f} MB are needed: make room, or name "
            "another target."
        )
    return target


def is_finished(partial: Path) -> bool:
    """Whether a conversion's folder holds nothing but its journal."""
    journal = partial / JOURNAL
    if journal.is_symlink() or not journal.is_file() or [path.name for path in partial.iterdir()] != [JOURNAL]:
        return False
    lines = journal.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    return bool(lines) and None not in map(parse_line, lines) and "plan" in parse_line(lines[0])


def parse_line(line: str) -> dict | None:
    """A line of a journal, or None where it is not a whole one."""
    try:
        content = json.loads(line) if line.endswith("\n") else None
    except (ValueError, RecursionError):
        return None
    kinds = {name: type(value) for name, value in content.items()} if isinstance(content, dict) else None
    return content if kinds in ({"plan": str}, {"shard": str, "chunk": int, "crc32": int}) else None


class Staging:
    """The folder beside the target in which a conversion is prepared. One process at a time may hold it."""

    def __init__(self, plan: Plan, target: Path, restart: bool):
        self.target = target
        self.folder = partial_folder(target)
        self.checkpoint = self.folder / STAGED
        self.finished: dict[tuple[str, int], int] = {}
        self._plan, self._restart = plan, restart

    def __enter__(self):
        with ExitStack() as stack:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock(stack)
            started = {"plan": digest(self._plan)}
            lines = self._lines_of_an_earlier_run()
            if lines and lines[0] != started:
                raise CheckpointError(
                    f"{self.folder} holds an unfinished conversion of another source, of this one before it changed, "
                    "or with other options: finish that one, or pass restart (--restart) to discard it."
                )
            self.finished = {(line["shard"], line["chunk"]): line["crc32"] for line in lines[1:]}
            # Without a last line that was cut short; and there before any weights, so that they are known to be ours.
            whole = "".join(json.dumps(line) + "\n" for line in lines or [started])
            (self.folder / NEW_JOURNAL).unlink(missing_ok=True)  # it may be a link
            write_text(self.folder / NEW_JOURNAL, whole)
            os.replace(self.folder / NEW_JOURNAL, self.folder / JOURNAL)
            self._journal = stack.enter_context(open(self.folder / JOURNAL, "a", encoding="utf-8"))
            self.checkpoint.mkdir(exist_ok=True)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_):
        self._stack.close()

    def _lock(self, stack: ExitStack) -> None:
        try:
            import fcntl
        except ImportError:  # no such locks on Windows
            return
        descriptor = os.open(self.folder, os.O_RDONLY)
        stack.callback(os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f"{self.target} is being converted by another process: wait for it.") from None
        except OSError:  # a file system without locks
            return

    def _lines_of_an_earlier_run(self) -> list[dict]:
        """What an interrupted run noted; what it staged is discarded if that is wanted.

        Nothing is ever deleted that is not known to be a conversion's: it has a journal with something in it.
        """
        journal = self.folder / JOURNAL
        text = journal.read_text(encoding="utf-8", errors="replace") if journal.is_file() else ""
        strangers = {path.name for path in self.folder.iterdir()} - {JOURNAL, NEW_JOURNAL, STAGED}
        strangers |= {name for name in (JOURNAL, NEW_JOURNAL) if (self.folder / name).is_symlink()}
        staged = self.checkpoint.is_symlink() or (self.checkpoint.exists() and any(self.checkpoint.iterdir()))
        if strangers or (staged and not text.strip()) or self.checkpoint.is_symlink():
            raise CheckpointError(
                f"{self.folder} exists and is not an unfinished conversion: move it away, or name another target."
            )
        if self._restart:
            if self.checkpoint.is_dir():
                (self.checkpoint / CONFIG_NAME).unlink(missing_ok=True)  # first, so that the rest is no checkpoint
                shutil.rmtree(self.checkpoint)
            return []
        lines = [parse_line(line) for line in text.splitlines(keepends=True)]
        if lines and lines[-1] is None and not text.endswith("\n"):
            lines.pop()  # cut short by the end of that run
        if None in lines or (lines and "plan" not in lines[0]) or any("plan" in line for line in lines[1:]):
            raise CheckpointError(f"{journal} is damaged: pass restart (--restart) to start again.")
        return lines

    def note_finished(self, chunk: Chunk, crc: int) -> None:
        line = {"shard": chunk.shard.name, "chunk": chunk.index, "crc32": crc}
        self._journal.write(json.dumps(line) + "\n")
        self._journal.flush()

    def publish(self) -> None:
        """Make the finished folder the target, by one rename."""
        for path in sorted(self.checkpoint.rglob("*"), reverse=True):
            if path.is_dir() or path.stat().st_nlink == 1:  # a hard link's data is the source's
                sync(path)
        sync(self.checkpoint)
        self._journal.close()
        try:
            os.rename(self.checkpoint, self.target)
        except OSError as error:
            raise CheckpointError(
                f"{self.target} could not be put in place ({error.strerror}): the finished checkpoint is in "
                f"{self.checkpoint}; move it to its place."
            ) from error
        # The target is there: nothing that goes wrong from here on is a failure.
        with suppress(OSError):
            sync(self.target.parent)
        shutil.rmtree(self.folder, ignore_errors=True)


def sync(path: Path) -> None:
    """Have what was written to a file, or a folder's list of names, survive a power cut."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:  # folders cannot be opened on Windows
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
        For each file its size and, unless it was linked, the CRC-32 of each chunk of about 256 MiB, by its first byte.
    """
    linked = [shard for shard in plan.shards if link and shard.source]
    written = [shard for shard in plan.shards if shard not in linked]
    _remove_strangers(staging.checkpoint, {shard.name for shard in plan.shards})
    for shard in linked:
        place = staging.checkpoint / shard.name
        place.unlink(missing_ok=True)
        link_file(shard.source, place)

    kept = {shard.name: _sized(staging, shard) for shard in written}
    chunks = [chunk for shard in written for chunk in chunks_of(shard)]
    crcs: dict[str, dict[int, int]] = {shard.name: {} for shard in written}
    counts = Counter(chunk.shard.name for chunk in chunks)
    synced: list[Future] = []
    stop = threading.Event()
    total = sum(chunk.nbytes for chunk in chunks)
    with (
        tqdm(total=total, desc="Writing weights", unit="B", unit_scale=True, disable=not progress) as bar,
        Reader(plan.source) as reader,
        ThreadPoolExecutor(WORKERS) as executor,
        ThreadPoolExecutor(1) as syncing,
    ):
        try:
            tasks = {
                executor.submit(
                    _write_unless_finished, reader, chunk, staging, kept[chunk.shard.name], bar.update, stop
                ): chunk
                for chunk in chunks
            }
            for task in as_completed(tasks):
                chunk = tasks[task]
                crc, fresh = task.result()
                if fresh:
                    staging.note_finished(chunk, crc)
                crcs[chunk.shard.name][chunk.start] = crc
                if len(crcs[chunk.shard.name]) == counts[chunk.shard.name]:
                    # While others are written. Before the config, without which this is no checkpoint.
                    synced.append(syncing.submit(sync, staging.checkpoint / chunk.shard.name))
            for task in synced:
                task.result()
        except BaseException:
            stop.set()
            executor.shutdown(cancel_futures=True)
            raise
    plan.source.check_unchanged()

    if len(plan.shards) > 1 or plan.index_text:
        index = plan.index_text or build_index({shard.name: list(shard.tensors) for shard in plan.shards})
        write_text(staging.checkpoint / SAFE_WEIGHTS_INDEX_NAME, index)
    return {
        shard.name: {"size": shard.nbytes, "linked": True}
        if shard in linked
        else {
            "size": shard.nbytes,
            "crc32": {str(start): f"{crc:08x}" for start, crc in sorted(crcs[shard.name].items())},
        }
        for shard in plan.shards
    }


def _remove_strangers(folder: Path, names: set[str]) -> None:
    """What an interrupted run left, other than weights, is written again; the config goes first."""
    for path in sorted(folder.iterdir(), key=lambda path: path.name != CONFIG_NAME):
        if path.name not in names:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _sized(staging: Staging, shard: Shard) -> bool:
    """Have the file of a shard there at its full size. Returns whether it was there before."""
    path = staging.checkpoint / shard.name
    with suppress(FileNotFoundError):
        status = path.lstat()
        if stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and status.st_size == shard.nbytes:
            return True
        path.unlink()
    staging.finished = {key: crc for key, crc in staging.finished.items() if key[0] != shard.name}
    with open(path, "xb") as created:
        created.truncate(shard.nbytes)
    return False


def _write_unless_finished(
    reader: Reader, chunk: Chunk, staging: Staging, kept: bool, advance: Callable, stop: threading.Event
) -> tuple[int, bool]:
    path = staging.checkpoint / chunk.shard.name
    crc = staging.finished.get((chunk.shard.name, chunk.index))
    if crc is not None and crc_of(path, chunk.start, chunk.nbytes) == crc:
        advance(chunk.nbytes)
        return crc, False
    descriptor = os.open(path, os.O_RDWR | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0))
    try:
        return write_chunk(reader, chunk, descriptor, kept, advance, stop), True
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="\n")


def write_files(plan: Plan, staging: Staging) -> None:
    """Copy the source's other files byte for byte, then write the config, after which the folder is a checkpoint."""
    for name, original in plan.files.items():
        place = staging.checkpoint / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(plan.source.folder / original, place)
    if settings := generation_settings(plan):
        write_text(staging.checkpoint / GENERATION_CONFIG_NAME, settings)
    write_text(staging.checkpoint / CONFIG_NAME, plan.config_text or plan.config.to_json_string())


def generation_settings(plan: Plan) -> str | None:
    """A generation_config.json for a source that has its settings in config.json, where ours does not keep them."""
    own = {field.name for field in dataclasses.fields(plan.source_config)}
    names = GenerationConfig().to_dict().keys() - own - {"transformers_version", "_from_model_config"}
    asked = {name: value for name, value in plan.source.fields.items() if name in names and value is not None}
    if GENERATION_CONFIG_NAME in plan.files or not asked or plan.config_text:
        return None
    fields = plan.source_config.to_dict()
    tokens = {name: fields[name] for name in TOKEN_IDS if fields.get(name) is not None}
    return GenerationConfig(**{**tokens, **asked}).to_json_string()
