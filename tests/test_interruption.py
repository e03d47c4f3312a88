"""Conversions that are killed, run out of disk space, cannot read, or are started twice: the target is absent or
complete, the source stays as it was, and a second run gives the bytes of an uninterrupted one.

A step is a call that changes what is on disk. A profile function sees each of them before it happens, whatever the
code is made of, and kills, interrupts or fails it. Processes to be killed are forked from one that has imported
everything and made the plan, which takes milliseconds instead of seconds.
"""

import errno
import fcntl
import gc
import hashlib
import io
import itertools
import json
import locale
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from contextlib import contextmanager
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers
from safetensors import safe_open

from gated_qwen import cli
from gated_qwen.conversion import command, convert, reader, write
from gated_qwen.conversion.errors import CheckpointError
from gated_qwen.conversion.retrofit import plan_retrofit, retrofit_checkpoint

OPTIONS = {"scale": {}, "fold": {"start": "fold"}, "random": {"start": "random", "attn_gate": "elementwise"}}

CHANGES = {
    "posix": {
        "copy_file_range", "ftruncate", "link", "mkdir", "open", "pwrite", "rename", "replace", "rmdir", "sendfile",
        "symlink", "truncate", "unlink", "write",
    },
    "io": {"open"},
    "_io": {"open"},
}  # fmt: skip
FILE_CHANGES = {"__exit__", "close", "flush", "truncate"}  # what is written stays in memory until then


def is_step(caller: str, function) -> bool:
    name, owner = function.__name__, getattr(function, "__self__", None)
    if isinstance(owner, io.IOBase):
        on_disk = not isinstance(owner, (io.StringIO, io.BytesIO, io.BufferedReader))
        return on_disk and name in FILE_CHANGES
    if name == "open" and (caller in ("_sync", "read_file") or "rmtree" in caller):
        return False  # these open for reading: to stop there is to stop before the step that follows
    return name in CHANGES.get(getattr(function, "__module__", None), ())


@contextmanager
def at_step(n: int, act):
    """Calls `act` with the name of the n-th step, before the step, in whichever thread it is."""
    counter = itertools.count(1)

    def profile(frame, event, function):
        if event == "c_call" and is_step(frame.f_code.co_name, function) and next(counter) == n:
            act(function.__name__)

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def use_small_chunks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(write, "CHUNK", 6144)
    patch.setattr(write, "BLOCK", 3072)
    patch.setattr(reader, "BLOCK", 3072)
    # What is synced survives a power cut, of which nothing here tells; it would take most of the time.
    patch.setattr(os, "fsync", lambda descriptor: None)


def carry_out(plan, target, *, link=False, restart=False, finish=convert.finish_with_card) -> dict:
    return convert.carry_out(
        plan, target, link=link, verify_outputs=False, restart=restart, progress=False, finish=finish
    )


def retrofit(source, target, **options) -> dict:
    return retrofit_checkpoint(source, target, **{"verify": False, **options})


# In forked processes.


def serve() -> None:
    """Answers each line of stdin, a function of this file and its arguments, by calling it in a forked process."""
    use_small_chunks(pytest.MonkeyPatch())
    Forks.plan = plan_retrofit(sys.argv[1], headers_only=False)
    gc.freeze()
    for line in sys.stdin:
        name, arguments = json.loads(line)
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            child = os.fork()
            if not child:
                gc.disable()
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                status = 99
                try:
                    status = globals()[name](**arguments) or 0
                except BaseException:
                    traceback.print_exc()
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            texts = [(file.seek(0), file.read().decode())[1] for file in (out, err)]
        print(json.dumps([status, *texts]), flush=True)


class Forks:
    """Runs functions of this file in processes of their own. Returns the exit status, stdout and stderr."""

    plan = None

    def __init__(self, source: Path):
        code = f"import {Path(__file__).stem} as tests; tests.serve()"
        # Another order of sets than here, and text encoded as the locale says: neither may show in any byte.
        environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONUTF8": "0", "LC_ALL": "C.UTF-8"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, str(source)],
            cwd=Path(__file__).parent, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def start(self, function, **arguments) -> None:
        print(json.dumps([function.__name__, arguments], default=str), file=self.process.stdin, flush=True)

    def result(self) -> tuple[int, str, str]:
        return tuple(json.loads(self.process.stdout.readline()))

    def run(self, function, **arguments) -> tuple[int, str, str]:
        self.start(function, **arguments)
        return self.result()

    def close(self) -> None:
        self.process.communicate(timeout=60)


def killed_at(n: int, target: str, workers: int = 1, **options) -> None:
    def kill(step):
        os.write(1, step.encode())
        os.kill(os.getpid(), signal.SIGKILL)

    write.WORKERS = workers
    with at_step(n, kill):
        carry_out(Forks.plan, target, **options)


def interrupted_at(n: int, source: str, target: str) -> int:
    """The command line, and the signal of Ctrl-C before the n-th step."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with at_step(n, lambda step: os.kill(os.getpid(), signal.SIGINT)):
        return cli.main(["retrofit", source, target, "--no-verify", "--quiet"])


def interrupted_while_importing(source: str, target: str) -> int:
    class Finder:
        @staticmethod
        def find_spec(name, *_):
            if name == command.__name__:
                signal.raise_signal(signal.SIGINT)

    del sys.modules[command.__name__]
    sys.meta_path.insert(0, Finder)
    return interrupted_at(10**9, source, target)


def converted(source: str, target: str, character_type: str | None = None, **options) -> None:
    if character_type is not None:
        locale.setlocale(locale.LC_CTYPE, character_type)
    retrofit(source, target, **options)


def limited(target: str, limit: int, chunk: int) -> None:
    """A run that may write no file longer than `limit`, then one that may; prints what each says."""
    write.CHUNK = write.BLOCK = reader.BLOCK = chunk
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    said = []
    for soft in (limit, hard):
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        try:
            carry_out(Forks.plan, target)
            said.append("done")
        except (OSError, CheckpointError) as error:
            said.append(f"{type(error).__name__} {getattr(error, 'errno', None)} {error}")
        said.append(Path(target).exists())
    print(json.dumps(said))


def held(target: str, ready: str, go: str) -> None:
    """A conversion that waits in its first write until `go` exists."""
    pwrite = os.pwrite

    def patient(*arguments):
        Path(ready).touch()
        for _ in range(3000):
            if Path(go).exists():
                break
            time.sleep(0.01)
        return pwrite(*arguments)

    os.pwrite = patient
    carry_out(Forks.plan, target)


def audited(source: str, target: str, watched: str, **options) -> None:
    """A conversion; prints what it opened for writing or changed, below `watched` and elsewhere."""
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    changing = {
        "os.chmod": 1, "os.chown": 1, "os.mkdir": 1, "os.remove": 1, "os.rename": 2, "os.rmdir": 1, "os.setxattr": 1,
        "os.symlink": 2, "os.truncate": 1, "os.utime": 1, "shutil.rmtree": 1,
    }  # fmt: skip
    inside, outside = [], []

    def hook(event, arguments):
        if event == "open":
            paths = arguments[:1] if arguments[2] & writing else ()
        elif event == "os.link":
            paths = arguments[1:2]
        else:
            paths = arguments[: changing.get(event, 0)]
        for path in paths:
            if isinstance(path, (str, bytes, os.PathLike)):
                path = os.path.realpath(os.fsdecode(path))
                (inside if path.startswith(watched + os.sep) else outside).append(f"{event} {path}")

    sys.addaudithook(hook)
    retrofit(source, target, **options)
    print(json.dumps([inside, outside]))


# What the tests start from.


@pytest.fixture(scope="module", autouse=True)
def small_chunks():
    with pytest.MonkeyPatch.context() as patch:
        use_small_chunks(patch)
        yield


def make_source(folder: Path) -> Path:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=131, hidden_size=42, intermediate_size=74, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=3, head_dim=10, max_position_embeddings=64, initializer_range=0.2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="16KB")
    fields = {**json.loads((folder / "config.json").read_text()), "_name_or_path": "größe"}
    (folder / "config.json").write_bytes(json.dumps(fields, ensure_ascii=False).encode())
    texts = {
        "README.md": "---\nlicense: mit\n---\nA card — with text.\n",
        "tokenizer.json": "{}\n",
        "tokenizer_config.json": '{"model_max_length": 64}\n',
        "chat_template.jinja": "{% for message in messages %}{{ message.content }}{% endfor %}\n",
        "modeling_custom.py": "raise SystemExit('run')\n",
        "nested/config.json": "{}\n",
        "nested/deeper/notes.txt": "Grüße\r\n",
    }
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text.encode())
    # Not named by the index.
    shutil.copy(folder / "model-00001-of-00007.safetensors", folder / "model-00001-of-00099.safetensors")
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return make_source(tmp_path_factory.mktemp("source") / "tiny")


@pytest.fixture
def own_source(source, tmp_path) -> Path:
    """A copy that may be changed; its name, which the record holds, is the same."""
    return Path(shutil.copytree(source, tmp_path / "own" / source.name))


@pytest.fixture(scope="module")
def plan(source):
    return plan_retrofit(source, headers_only=False)


@pytest.fixture(scope="module")
def forks(source):
    forks = Forks(source)
    yield forks
    forks.close()


@pytest.fixture(scope="module")
def expected(source, tmp_path_factory):
    """What an uninterrupted run gives, by the options."""
    known = {}

    def result(**options) -> dict[str, bytes]:
        key = json.dumps(options, sort_keys=True)
        if key not in known:
            target = tmp_path_factory.mktemp("expected") / "target"
            retrofit(source, target, **options)
            known[key] = contents(target)
            assert {"config.json", "conversion.json", "README.md", "nested/deeper/notes.txt"} <= known[key].keys()
        return known[key]

    return result


def contents(folder: Path) -> dict[str, bytes]:
    """All files by name; of links where they lead, of folders nothing."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            found[name] = b"-> " + os.readlink(path).encode()
        else:
            found[name] = b"" if path.is_dir() else path.read_bytes()
    return found


def weights_of(files: dict[str, bytes]) -> dict[str, bytes]:
    return {name: data for name, data in files.items() if name.endswith(".safetensors")}


def partial(target: Path) -> Path:
    return target.with_name(target.name + ".partial")


def differing(found: dict[str, bytes], wanted: dict[str, bytes]) -> list[str]:
    return sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))


def check_same(target: Path, wanted: dict[str, bytes]) -> None:
    assert differing(contents(target), wanted) == []
    assert not partial(target).exists()


def check_one_line(error) -> str:
    text = str(error.value if isinstance(error, pytest.ExceptionInfo) else error)
    assert text and "\n" not in text
    return text


class Stopped(Exception):
    pass


def stop(*_):
    raise Stopped


def leave_all(plan, target: Path) -> Path:
    """A run that stops after the config was written, before the record is. Returns the staged checkpoint."""
    with pytest.raises(Stopped):
        carry_out(plan, target, finish=stop)
    assert (partial(target) / "checkpoint" / "config.json").is_file()
    return partial(target) / "checkpoint"


@contextmanager
def failing(name: str, n: int, code: int):
    """The n-th call of a function of `os` fails, and all later ones."""
    original, counter = getattr(os, name), itertools.count(1)

    def call(*arguments):
        if next(counter) >= n:
            raise OSError(code, os.strerror(code))
        return original(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, name, call)
        yield


def leave_some(source: Path, target: Path, n: int = 20, **options) -> Path:
    """A run that fails at its n-th write. Returns the folder it leaves."""
    with failing("pwrite", n, errno.ENOSPC), pytest.raises(OSError, match="No space left"):
        retrofit(source, target, **options)
    assert not target.exists()
    assert len((partial(target) / "journal.jsonl").read_text().splitlines()) > 3
    return partial(target)


@contextmanager
def counted():
    """The number of bytes written to files of weights."""
    total, pwrite = [0], os.pwrite

    def call(descriptor, data, offset):
        count = pwrite(descriptor, data, offset)
        total[0] += count
        return count

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", call)
        yield total


# 1. SIGKILL.


class Kill:
    """A run killed before its n-th step, and the run after it."""

    def __init__(self, n: int, step: str, target: Path, wanted: dict[str, bytes], rerun):
        self.where = f"step {n} ({step})"
        self.target_existed = target.exists()
        self.target_differs = differing(contents(target), wanted) if self.target_existed else []
        self.config_staged = (partial(target) / "checkpoint" / "config.json").exists()
        self.staged_fault = self._staged_fault(partial(target), wanted)
        self.refusal = None
        try:
            rerun()
        except (CheckpointError, OSError) as error:
            self.refusal = str(error)
        self.differs = differing(contents(target), wanted)
        self.left = sorted(contents(partial(target)))

    @staticmethod
    def _staged_fault(folder: Path, wanted: dict[str, bytes]) -> str | None:
        beside = [path for config in folder.rglob("config.json") for path in config.parent.glob("*.safetensors")]
        if not beside:
            return None
        faults = differing(weights_of(contents(folder / "checkpoint")), weights_of(wanted))
        return f"config.json beside wrong or missing {faults}" if faults else None


# The first n, of which each is taken, and the stride from there.
KILLS = {
    "fresh": dict(each=10**9),
    "threads": dict(stride=8, workers=3),
    "linked": dict(stride=4, link=True),
    "resumed": dict(each=25, stride=8, prepared=True),
    "restarted": dict(each=40, stride=8, prepared=True, restart=True),
}


@pytest.fixture(scope="module", params=KILLS)
def kills(request, forks, plan, expected, tmp_path_factory) -> list[Kill]:
    """A run killed at every step, or every few, until one comes through."""
    options = dict(KILLS[request.param])
    each, stride, prepared = options.pop("each", 1), options.pop("stride", 1), options.pop("prepared", False)
    link = options.get("link", False)
    folder = tmp_path_factory.mktemp(f"killed-{request.param}")
    wanted = expected(link=link)
    if prepared:
        leave_all(plan, folder / "left")
    kills = []
    for n in itertools.chain(range(1, each), itertools.count(each, stride)):
        target = folder / str(n)
        if prepared:
            shutil.copytree(partial(folder / "left"), partial(target))
        status, step, errors = forks.run(killed_at, n=n, target=target, **options)
        if status == 0:
            check_same(target, wanted)
            break
        assert status == -signal.SIGKILL, errors
        kills.append(Kill(n, step, target, wanted, lambda target=target: carry_out(plan, target, link=link)))
        shutil.rmtree(target, ignore_errors=True)
        shutil.rmtree(partial(target), ignore_errors=True)
    assert n > 80 and len(kills) > 15
    return kills


def test_killed_the_target_is_absent_or_complete(kills):
    assert [(kill.where, kill.target_differs) for kill in kills if kill.target_differs] == []
    assert not all(kill.target_existed for kill in kills)


def test_killed_what_is_staged_never_looks_complete(kills):
    assert [(kill.where, kill.staged_fault) for kill in kills if kill.staged_fault] == []
    assert any(kill.config_staged for kill in kills)


def test_killed_a_second_run_gives_the_same_bytes(kills):
    refused = [(kill.where, kill.refusal) for kill in kills if kill.refusal and not kill.target_existed]
    assert refused == []
    assert [(kill.where, kill.differs) for kill in kills if kill.differs] == []


def test_killed_nothing_is_left_after_the_second_run(kills):
    refused = [kill for kill in kills if kill.refusal and not kill.target_existed]
    assert [(kill.where, kill.left) for kill in kills if kill.left and kill not in refused] == []


# 2. Resuming.


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_only_what_is_missing_is_written_again(source, tmp_path, expected, options):
    plan = plan_retrofit(source, headers_only=False, **options)
    with counted() as total:
        retrofit(source, tmp_path / "whole", **options)
    folder = leave_some(source, tmp_path / "target", **options)
    lines = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()[1:]]
    chunks = {(shard.name, chunk.index): chunk for shard in plan.shards for chunk in write.chunks_of(shard)}
    finished = sum(chunks[line["shard"], line["chunk"]].nbytes for line in lines)
    assert 0 < finished < total[0]
    with counted() as again:
        retrofit(source, tmp_path / "target", **options)
    # Zeros are not written into a new file, but may be into one that was there.
    zeros = sum(tensor.nbytes for tensor in plan.tensors if tensor.is_new) if options.get("start") != "random" else 0
    assert total[0] - finished <= again[0] <= total[0] - finished + zeros < total[0]
    check_same(tmp_path / "target", expected(**options))


def test_nothing_is_written_again_where_all_weights_are_there(source, plan, tmp_path, expected):
    leave_all(plan, tmp_path / "target")
    with counted() as again:
        retrofit(source, tmp_path / "target")
    assert again[0] == 0
    check_same(tmp_path / "target", expected())


def shard_names(plan, kind: str) -> list[str]:
    return [shard.name for shard in plan.shards if (shard.source is None) == (kind == "gates")]


@pytest.mark.parametrize("kind", ["copied", "gates"])
@pytest.mark.parametrize("place", [0, 9, 0.5, -1], ids=["length", "header", "middle", "end"])
def test_a_damaged_chunk_is_written_again(plan, tmp_path, expected, kind, place):
    staged = leave_all(plan, tmp_path / "target")
    for name in shard_names(plan, kind):
        data = bytearray((staged / name).read_bytes())
        data[int(place * len(data)) if isinstance(place, float) else place] ^= 0x40
        with open(staged / name, "r+b") as file:
            file.write(data)
    carry_out(plan, tmp_path / "target")
    check_same(tmp_path / "target", expected())


def shorter(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def longer(file: Path) -> None:
    with open(file, "ab") as opened:
        opened.write(b"more")


def empty(file: Path) -> None:
    os.truncate(file, 0)


def hard_link(file: Path) -> None:
    """A file with a second name is not ours alone: writing to it would change the other."""
    other = file.parent.parent.parent / f"other-{file.name}"
    other.write_bytes(b"x" * file.stat().st_size)
    file.unlink()
    os.link(other, file)


@pytest.mark.parametrize("kind", ["copied", "gates"])
@pytest.mark.parametrize("change", [shorter, longer, empty, os.unlink, hard_link], ids=lambda change: change.__name__)
def test_a_shard_of_another_size_or_none_is_written_again(plan, tmp_path, expected, kind, change):
    staged = leave_all(plan, tmp_path / "target")
    for name in shard_names(plan, kind):
        change(staged / name)
    carry_out(plan, tmp_path / "target")
    check_same(tmp_path / "target", expected())
    for other in tmp_path.glob("other-*"):
        assert set(other.read_bytes()) == {ord("x")}


def test_what_does_not_belong_to_the_result_does_not_stay(plan, tmp_path, expected):
    staged = leave_all(plan, tmp_path / "target")
    (staged / "model-00001-of-00099.safetensors").write_bytes(b"stale")
    (staged / "folder").mkdir()
    (staged / "folder" / "file").touch()
    carry_out(plan, tmp_path / "target")
    check_same(tmp_path / "target", expected())


TORN = {
    "no newline": lambda text: text[:-1],
    "half": lambda text: text[:-20],
    "one letter": lambda text: text + b"{",
    "zeros": lambda text: text + bytes(100),
    "first line": lambda text: text[:30],
}


@pytest.mark.parametrize("tear", TORN.values(), ids=TORN)
def test_a_journal_whose_last_line_is_cut_short_is_used(source, tmp_path, expected, tear):
    journal = leave_some(source, tmp_path / "target") / "journal.jsonl"
    journal.write_bytes(tear(journal.read_bytes()))
    # Twice, since the lines that follow are appended to it.
    with failing("pwrite", 8, errno.ENOSPC), pytest.raises(OSError, match="No space left"):
        retrofit(source, tmp_path / "target")
    retrofit(source, tmp_path / "target")
    check_same(tmp_path / "target", expected())


DAMAGES = {
    "text": b"nonsense\n",
    "bytes": b"\xff\xfe\x00\n",
    "list": b"[]\n",
    "number": b"7\n",
    "no fields": b"{}\n",
    "no checksum": b'{"shard": "model-00001-of-00008.safetensors", "chunk": 0}\n',
    "no name": b'{"shard": [], "chunk": 0, "crc32": 1}\n',
}


def damage(journal: Path, line: bytes, first: bool) -> None:
    lines = journal.read_bytes().splitlines(keepends=True)
    lines.insert(0 if first else 2, line)
    journal.write_bytes(b"".join(lines))


@pytest.mark.parametrize("line", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("first", [True, False], ids=["first line", "third line"])
def test_a_damaged_journal_is_refused(source, tmp_path, line, first):
    folder = leave_some(source, tmp_path / "target")
    damage(folder / "journal.jsonl", line, first)
    before = contents(folder)
    with pytest.raises(CheckpointError) as error:
        retrofit(source, tmp_path / "target")
    assert "--restart" in check_one_line(error)
    assert contents(folder) == before


@pytest.mark.parametrize("line", DAMAGES.values(), ids=DAMAGES)
def test_restart_discards_a_damaged_journal(source, tmp_path, expected, line):
    folder = leave_some(source, tmp_path / "target")
    damage(folder / "journal.jsonl", line, first=False)
    retrofit(source, tmp_path / "target", restart=True)
    check_same(tmp_path / "target", expected())


def touched(source: Path) -> None:
    file = source / "model-00003-of-00007.safetensors"
    os.utime(file, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns + 1))


def other_size(source: Path) -> None:
    """A longer header, and the time of before."""
    file = source / "model-00003-of-00007.safetensors"
    status, data = file.stat(), file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    file.write_bytes((length + 8).to_bytes(8, "little") + data[8 : 8 + length] + b" " * 8 + data[8 + length :])
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def other_config(source: Path) -> None:
    fields = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**fields, "rms_norm_eps": 1e-3}))


CHANGED = {
    "gate": (lambda source: None, {"attn_gate": "elementwise"}),
    "start": (lambda source: None, {"start": "random"}),
    "layers": (lambda source: None, {"layers": [1]}),
    "time": (touched, {}),
    "size": (other_size, {}),
    "config": (other_config, {}),
}


@pytest.mark.parametrize("change, options", CHANGED.values(), ids=CHANGED)
def test_other_options_or_another_source_are_refused(own_source, tmp_path, change, options):
    folder = leave_some(own_source, tmp_path / "target")
    before = contents(folder)
    change(own_source)
    with pytest.raises(CheckpointError) as error:
        retrofit(own_source, tmp_path / "target", **options)
    assert "--restart" in check_one_line(error) and str(folder) in check_one_line(error)
    assert contents(folder) == before and not (tmp_path / "target").exists()


def test_a_refusal_does_not_stand_in_the_way_of_the_next_run(source, tmp_path, expected):
    """In the same process, as in a notebook."""
    leave_some(source, tmp_path / "target")
    with pytest.raises(CheckpointError, match="--restart"):
        retrofit(source, tmp_path / "target", attn_gate="elementwise")
    retrofit(source, tmp_path / "target", attn_gate="elementwise", restart=True)
    check_same(tmp_path / "target", expected(attn_gate="elementwise"))


@pytest.mark.parametrize("before", OPTIONS.values(), ids=OPTIONS)
def test_restart_starts_clean(source, tmp_path, expected, before):
    with counted() as total:
        retrofit(source, tmp_path / "whole")
    folder = leave_some(source, tmp_path / "target", **before)
    (folder / "checkpoint" / "stale").touch()
    with counted() as again:
        retrofit(source, tmp_path / "target", restart=True)
    assert again[0] == total[0]
    check_same(tmp_path / "target", expected())


def test_restart_with_nothing_to_discard(source, tmp_path, expected):
    retrofit(source, tmp_path / "target", restart=True)
    check_same(tmp_path / "target", expected())


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("names", [["notes.txt"], ["checkpoint/config.json"], ["checkpoint/x", "journal.jsonl", "y"]])
def test_a_folder_of_someone_else_is_left_alone(source, tmp_path, names, restart):
    folder = partial(tmp_path / "target")
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("theirs")
    before = contents(folder)
    with pytest.raises(CheckpointError) as error:
        retrofit(source, tmp_path / "target", restart=restart)
    assert str(folder) in check_one_line(error)
    assert contents(folder) == before and not (tmp_path / "target").exists()


def test_a_file_in_the_place_of_the_staging_folder_is_left_alone(source, tmp_path):
    partial(tmp_path / "target").write_text("theirs")
    with pytest.raises((CheckpointError, OSError)) as error:
        retrofit(source, tmp_path / "target")
    assert str(partial(tmp_path / "target")) in check_one_line(error)
    assert partial(tmp_path / "target").read_text() == "theirs"


@pytest.mark.parametrize("restart", [False, True])
def test_a_second_process_is_refused(forks, plan, tmp_path, expected, restart):
    forks.start(held, target=tmp_path / "target", ready=tmp_path / "ready", go=tmp_path / "go")
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "ready").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        before = contents(partial(tmp_path / "target"))
        with pytest.raises(CheckpointError, match="another process") as error:
            carry_out(plan, tmp_path / "target", restart=restart)
        check_one_line(error)
        assert contents(partial(tmp_path / "target")) == before
    finally:
        (tmp_path / "go").touch()
        status, _, errors = forks.result()
    assert status == 0, errors
    check_same(tmp_path / "target", expected())


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EBADF, errno.EOPNOTSUPP], ids=errno.errorcode.get)
def test_a_file_system_without_locks_is_not_taken_for_another_process(source, tmp_path, monkeypatch, code):
    """NFS gives EBADF for an exclusive lock on what is open for reading, Lustre without locks EOPNOTSUPP."""

    def flock(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    try:
        retrofit(source, tmp_path / "target")
    except (CheckpointError, OSError) as error:
        assert "another process" not in check_one_line(error)


# 3. Errors of the disk.


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("n", [1, 2, 11, 24, 34])
def test_no_space_for_weights(source, tmp_path, expected, options, n):
    with failing("pwrite", n, errno.ENOSPC), pytest.raises(OSError) as error:
        retrofit(source, tmp_path / "target", **options)
    assert error.value.errno == errno.ENOSPC
    assert "make room" in check_one_line(error) and str(partial(tmp_path / "target")) in check_one_line(error)
    assert not (tmp_path / "target").exists()
    retrofit(source, tmp_path / "target", **options)
    check_same(tmp_path / "target", expected(**options))


def test_no_space_at_any_step(plan, tmp_path, expected, monkeypatch):
    monkeypatch.setattr(write, "WORKERS", 1)
    faults, failed = [], 0

    def fail(step):
        if step not in ("close", "rmdir", "unlink"):  # these need no space
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for n in itertools.count(1, 2):
        target, passed = tmp_path / str(n), []
        try:
            with at_step(n, lambda step, passed=passed: (passed.append(step), fail(step))):
                carry_out(plan, target)
        except (CheckpointError, OSError) as error:
            check_one_line(error)
            failed += 1
            assert not target.exists()
            try:
                carry_out(plan, target)
            except (CheckpointError, OSError) as second:
                faults.append((n, passed, str(second)))
                continue
        check_same(target, expected())
        shutil.rmtree(target, ignore_errors=True)
        if not passed:
            break
    assert failed > 50
    assert faults == []


@pytest.mark.parametrize(
    "limit, chunk",
    [(300, 6144), (5000, 6144), (12000, 6144), (16000, 128)],
    ids=["header", "first shard", "some shards", "journal"],
)
def test_files_may_not_grow(forks, tmp_path, expected, limit, chunk):
    """A real error of the system; the last case meets it in the journal, which then is longer than any shard."""
    status, output, errors = forks.run(limited, target=tmp_path / "target", limit=limit, chunk=chunk)
    assert status == 0, errors
    first, existed, second, exists = json.loads(output)
    assert first.startswith(f"OSError {errno.EFBIG} ") and "\n" not in first and not existed
    assert (second, exists) == ("done", True)
    found, wanted = contents(tmp_path / "target"), expected()
    # The record holds a checksum for each chunk, whose size is another one here.
    assert differing(found, wanted) == ([] if chunk == 6144 else ["conversion.json"])


def test_short_writes_and_reads(source, tmp_path, expected, monkeypatch):
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, offset: pwrite(descriptor, data[:333], offset))
    monkeypatch.setattr(
        os, "preadv", lambda descriptor, buffers, offset: preadv(descriptor, [buffers[0][:77]], offset)
    )
    retrofit(source, tmp_path / "target")
    check_same(tmp_path / "target", expected())


@pytest.mark.parametrize("number", [1, 4, 7])
def test_a_shard_cannot_be_read(source, tmp_path, expected, monkeypatch, number):
    file = source / f"model-{number:05}-of-00007.safetensors"
    preadv = os.preadv

    def call(descriptor, buffers, offset):
        if os.path.samestat(os.fstat(descriptor), file.stat()) and offset > 2000:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(descriptor, buffers, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", call)
        with pytest.raises(OSError) as error:
            retrofit(source, tmp_path / "target")
    assert error.value.errno == errno.EIO
    assert str(file) in check_one_line(error)
    assert not (tmp_path / "target").exists()
    retrofit(source, tmp_path / "target")
    check_same(tmp_path / "target", expected())


@pytest.mark.parametrize("link", [False, True], ids=["copied", "linked"])
def test_a_shard_becomes_shorter_after_its_header_was_read(own_source, tmp_path, expected, link):
    file = own_source / "model-00005-of-00007.safetensors"
    data, plan = file.read_bytes(), plan_retrofit(own_source, headers_only=False)
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    os.truncate(file, 6000)
    with pytest.raises(CheckpointError) as error:
        carry_out(plan, tmp_path / "target", link=link)
    assert str(file) in check_one_line(error)
    assert not (tmp_path / "target").exists()
    file.write_bytes(data)
    os.utime(file, ns=times)
    carry_out(plan, tmp_path / "target", link=link, restart=True)
    check_same(tmp_path / "target", expected(link=link))


def test_a_source_that_changes_while_it_is_read(own_source, tmp_path):
    """Half of it from before, half from after: there is no such checkpoint."""
    plan = plan_retrofit(own_source, headers_only=False)
    file, pwrite = own_source / "model-00001-of-00007.safetensors", os.pwrite
    with pytest.MonkeyPatch.context() as patch:

        def call(descriptor, data, offset):
            with open(file, "r+b") as opened:
                opened.write(bytes(file.stat().st_size))
            return pwrite(descriptor, data, offset)

        patch.setattr(os, "pwrite", call)
        with pytest.raises(CheckpointError) as error:
            carry_out(plan, tmp_path / "target")
    assert str(file) in check_one_line(error)
    assert not (tmp_path / "target").exists()


def test_everything_is_synced_before_the_rename_and_the_rename_after(plan, tmp_path, monkeypatch):
    events, rename, target = [], os.rename, tmp_path / "target"
    checkpoint = partial(target) / "checkpoint"

    def fsync(descriptor):
        events.append(os.readlink(f"/proc/self/fd/{descriptor}"))

    def recorded(old, new):
        events.append("rename")
        rename(old, new)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", recorded)
    carry_out(plan, target)
    assert events.count("rename") == 1
    before, after = events[: events.index("rename")], events[events.index("rename") + 1 :]
    assert {str(checkpoint / name) for name in contents(target)} | {str(checkpoint)} <= set(before)
    assert str(tmp_path) in after


# Where the target is.


def file_there(target: Path) -> None:
    target.write_text("theirs")


def folder_there(target: Path) -> None:
    target.mkdir()
    (target / "config.json").write_text("theirs")


def link_there(target: Path) -> None:
    (target.parent / "elsewhere").mkdir()
    target.symlink_to("elsewhere")


def dangling_link_there(target: Path) -> None:
    target.symlink_to("nowhere")


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("make", [file_there, folder_there, link_there, dangling_link_there])
def test_a_target_that_exists_is_left_alone(source, tmp_path, make, restart):
    make(tmp_path / "target")
    before = contents(tmp_path)
    with pytest.raises(CheckpointError) as error:
        retrofit(source, tmp_path / "target", restart=restart)
    assert str(tmp_path / "target") in check_one_line(error)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("make", [file_there, folder_there])
def test_a_target_that_appears_meanwhile_is_left_alone(plan, tmp_path, expected, make):
    def finish(*arguments):
        make(tmp_path / "target")
        convert.finish_with_card(*arguments)

    with pytest.raises(CheckpointError) as error:
        carry_out(plan, tmp_path / "target", finish=finish)
    assert str(tmp_path / "target") in check_one_line(error)
    make(tmp_path / "same")
    same = tmp_path / "same"
    assert (contents(tmp_path / "target") or (tmp_path / "target").read_bytes()) == (contents(same) or b"theirs")
    shutil.rmtree(tmp_path / "target") if same.is_dir() else os.unlink(tmp_path / "target")
    carry_out(plan, tmp_path / "target")
    check_same(tmp_path / "target", expected())


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize(
    "name",
    ["own/tiny", "own/tiny/out", "own/tiny/nested/out", "own", "link", "link/out", "up/tiny/out", "own/tiny/../tiny"],
)
def test_a_target_that_overlaps_the_source_is_refused(own_source, tmp_path, name, restart):
    (tmp_path / "link").symlink_to(own_source)
    (tmp_path / "up").symlink_to(own_source.parent)
    before = contents(tmp_path)
    with pytest.raises(CheckpointError) as error:
        retrofit(own_source, tmp_path / name, restart=restart)
    check_one_line(error)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("restart", [False, True])
def test_a_source_in_the_staging_folder_of_the_target_is_refused(plan, tmp_path, restart):
    """Where publishing failed, the finished checkpoint is there, and the message says so."""
    staged = leave_all(plan, tmp_path / "target")
    before = contents(partial(tmp_path / "target"))
    with pytest.raises(CheckpointError) as error:
        retrofit(staged, tmp_path / "target", attn_gate="elementwise", restart=restart)
    check_one_line(error)
    assert contents(partial(tmp_path / "target")) == before


# 4. Ctrl-C.


@pytest.mark.parametrize("n", [1, 4, 10, 40, 80, 120])
def test_interrupted_from_the_keyboard(forks, source, tmp_path, expected, n):
    target = tmp_path / "target"
    status, _, errors = forks.run(interrupted_at, n=n, source=source, target=target)
    assert status == 130, errors
    assert len(errors.strip().splitlines()) == 1 and "the same command" in errors
    assert not target.exists()
    status, output, errors = forks.run(interrupted_at, n=10**9, source=source, target=target)
    assert (status, errors) == (0, "")
    assert str(target) in output
    check_same(target, expected())


def test_interrupted_while_the_command_is_imported(forks, source, tmp_path):
    """The first seconds of a run, in which a mistake is often noticed."""
    status, _, errors = forks.run(interrupted_while_importing, source=source, target=tmp_path / "target")
    assert status == 130, errors
    assert len(errors.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_interrupted_within_a_thread_pool(source, tmp_path, expected, monkeypatch):
    """The threads stop soon: they do not first write what was queued."""
    with counted() as total:
        retrofit(source, tmp_path / "whole")
    pwrite, calls = os.pwrite, []
    monkeypatch.setattr(write, "WORKERS", 2)

    def call(*arguments):
        calls.append(arguments)
        if len(calls) == 10:
            signal.raise_signal(signal.SIGINT)
        time.sleep(0.01)
        return pwrite(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", call)
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with pytest.raises(KeyboardInterrupt):
                retrofit(source, tmp_path / "target")
        finally:
            signal.signal(signal.SIGINT, before)
    assert 10 <= len(calls) < 25 < total[0] / 3072
    retrofit(source, tmp_path / "target")
    check_same(tmp_path / "target", expected())


# 5. The source.


@pytest.fixture
def hub_cache(source, tmp_path) -> Path:
    """A snapshot in the form of the Hub's cache: links to blobs."""
    cache = tmp_path / "hub" / "models--some--tiny"
    snapshot = cache / "snapshots" / ("0123456789" * 4)
    for name in contents(source):
        if (source / name).is_file():
            data = (source / name).read_bytes()
            blob = cache / "blobs" / hashlib.sha256(data).hexdigest()
            blob.parent.mkdir(parents=True, exist_ok=True)
            if not blob.exists():
                blob.write_bytes(data)
                blob.chmod(0o440)
            (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
            (snapshot / name).symlink_to(os.path.relpath(blob, (snapshot / name).parent))
    return snapshot


def states(folder: Path) -> dict[str, tuple]:
    statuses = {path: path.lstat() for path in folder.rglob("*")}
    return {
        str(path): (status.st_ino, status.st_mode, status.st_size, status.st_mtime_ns)
        for path, status in statuses.items()
    }


@pytest.mark.parametrize("options", [{}, {"link": True}, {"start": "fold"}, {"verify": True}], ids=str)
def test_the_source_is_only_read(forks, hub_cache, tmp_path, options):
    cache = hub_cache.parent.parent
    before = contents(cache), states(cache)
    status, output, errors = forks.run(
        audited, source=hub_cache, target=tmp_path / "target", watched=cache.resolve(), **options
    )
    assert status == 0, errors
    inside, outside = json.loads(output)
    assert inside == []
    assert any(line.endswith("model.safetensors.index.json") for line in outside)
    assert (contents(cache), states(cache)) == before
    result = list((tmp_path / "target").rglob("*"))
    assert len(result) > 15 and not any(path.is_symlink() for path in result)


def test_an_interrupted_run_with_links_does_not_write_to_the_source(hub_cache, tmp_path, expected, monkeypatch):
    """First linked, then copied over what is left: a hard link must be replaced, not written to."""
    cache = hub_cache.parent.parent
    before = contents(cache), states(cache)
    plan = plan_retrofit(hub_cache, headers_only=False)
    with pytest.raises(Stopped):
        carry_out(plan, tmp_path / "target", link=True, finish=stop)
    for shard in plan.shards:
        # As if finished, with a checksum that does not fit.
        line = {"shard": shard.name, "chunk": 0, "crc32": 1}
        with open(partial(tmp_path / "target") / "journal.jsonl", "a") as journal:
            journal.write(json.dumps(line) + "\n")
    carry_out(plan, tmp_path / "target", link=False)
    assert (contents(cache), states(cache)) == before
    assert all(path.stat().st_nlink == 1 for path in (tmp_path / "target").rglob("*") if path.is_file())
    assert differing(weights_of(contents(tmp_path / "target")), weights_of(expected())) == []


def no_reflinks(*_):
    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


def copying_reflinks(target, request, source):
    """What a reflink looks like from outside: another file with the same bytes."""
    os.pwrite(target.fileno(), os.pread(source, 10**6, 0), 0)


def test_hard_links(hub_cache, tmp_path, expected, monkeypatch):
    monkeypatch.setattr(fcntl, "ioctl", no_reflinks)
    plan = plan_retrofit(hub_cache, headers_only=False)
    record = carry_out(plan, tmp_path / "target", link=True)
    for shard in plan.shards:
        file = tmp_path / "target" / shard.name
        if shard.source is None:
            assert file.stat().st_nlink == 1 and "linked" not in record["files"][shard.name]
        else:
            assert file.samefile(shard.source) and file.stat().st_nlink == 2
            assert record["files"][shard.name]["linked"] is True
    assert len(shard_names(plan, "copied")) == 7
    for path in (tmp_path / "target").rglob("*"):
        assert path.suffix == ".safetensors" or path.is_dir() or path.stat().st_nlink == 1
    assert differing(weights_of(contents(tmp_path / "target")), weights_of(expected())) == []


def test_reflinks(hub_cache, tmp_path, expected, monkeypatch):
    monkeypatch.setattr(fcntl, "ioctl", copying_reflinks)
    retrofit(hub_cache, tmp_path / "target", link=True)
    assert all(path.stat().st_nlink == 1 for path in (tmp_path / "target").rglob("*") if path.is_file())
    assert differing(weights_of(contents(tmp_path / "target")), weights_of(expected())) == []


def test_files_that_change_are_not_linked(own_source, tmp_path, expected, monkeypatch):
    monkeypatch.setattr(fcntl, "ioctl", no_reflinks)
    record = retrofit(own_source, tmp_path / "target", link=True, start="fold")
    scaled = set(record["tensors"]["scaled"])
    index = json.loads((tmp_path / "target" / "model.safetensors.index.json").read_text())["weight_map"]
    changed = {index[name] for name in scaled.union(record["tensors"]["new"])}
    assert scaled and len(changed) < len(record["files"])
    for name, file in record["files"].items():
        assert file.get("linked", False) == (name not in changed)
        assert (tmp_path / "target" / name).stat().st_nlink == (1 if name in changed else 2)
    assert differing(weights_of(contents(tmp_path / "target")), weights_of(expected(start="fold"))) == []


# 6. The same input gives the same output; the index.


def with_metadata(folder: Path, metadata) -> None:
    """Every header's __metadata__ replaced, or removed where it is ... ."""
    for file in folder.glob("*.safetensors"):
        data = file.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        header.pop("__metadata__")
        if metadata is not ...:
            header["__metadata__"] = metadata
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_two_processes_give_the_same_bytes(forks, source, tmp_path, expected, options):
    status, _, errors = forks.run(converted, source=source, target=tmp_path / "target", **options)
    assert status == 0, errors
    check_same(tmp_path / "target", expected(**options))


def test_the_locale_does_not_show(forks, source, tmp_path, expected):
    status, _, errors = forks.run(converted, source=source, target=tmp_path / "target", character_type="C")
    assert status == 0, errors
    check_same(tmp_path / "target", expected())


@pytest.mark.parametrize("threads", [1, 4])
def test_the_number_of_threads_does_not_show(source, tmp_path, expected, monkeypatch, threads):
    monkeypatch.setattr(write, "WORKERS", threads)
    retrofit(source, tmp_path / "target", start="random", attn_gate="elementwise")
    check_same(tmp_path / "target", expected(start="random", attn_gate="elementwise"))


def test_links_show_in_the_record_alone(expected):
    copied, linked = expected(), expected(link=True)
    assert differing(copied, linked) == ["conversion.json"]
    record, other = (json.loads(files["conversion.json"]) for files in (copied, linked))
    files, others = record.pop("files"), other.pop("files")
    assert record == other
    assert list(files) == list(others) and len(files) == 8
    for name, file in others.items():
        assert file == ({"size": files[name]["size"], "linked": True} if file.get("linked") else files[name])
    assert [name for name, file in others.items() if not file.get("linked")] == ["model-00008-of-00008.safetensors"]


@pytest.mark.parametrize("metadata", [{"format": "pt"}, ..., None, {}, {"format": "np"}], ids=repr)
@pytest.mark.parametrize("options", [{}, {"link": True}, {"start": "fold"}], ids=str)
def test_the_index_holds_what_was_written(own_source, tmp_path, expected, monkeypatch, metadata, options):
    monkeypatch.setattr(fcntl, "ioctl", no_reflinks)
    with_metadata(own_source, metadata)
    # An index may say anything of the sizes.
    index_file = own_source / "model.safetensors.index.json"
    given = json.loads(index_file.read_text())
    index_file.write_text(json.dumps({**given, "metadata": {"total_size": 7, "total_parameters": 7}}))
    retrofit(own_source, tmp_path / "target", **options)

    index = json.loads((tmp_path / "target" / "model.safetensors.index.json").read_text())
    shards = {path.name for path in (tmp_path / "target").rglob("*.safetensors")}
    assert shards == set(index["weight_map"].values()) and len(shards) == 8
    tensors, placed = {}, []
    for name in shards:
        with safe_open(tmp_path / "target" / name, "pt") as shard:
            assert shard.metadata() == {"format": "pt"}
            placed += [(key, name) for key in shard.keys()]
            tensors |= {key: shard.get_tensor(key) for key in shard.keys()}
    assert sorted(placed) == sorted(index["weight_map"].items())
    assert set(given["weight_map"]) | {f"model.layers.{i}.self_attn.g_proj.weight" for i in (0, 1)} == set(tensors)
    assert index["metadata"] == {
        "total_parameters": sum(tensor.numel() for tensor in tensors.values()),
        "total_size": sum(tensor.nbytes for tensor in tensors.values()),
    }

    for name, data in weights_of(expected(**options)).items():
        wanted = safetensors.torch.load(data)
        assert all(
            torch.equal(tensor, tensors[key]) and index["weight_map"][key] == name for key, tensor in wanted.items()
        )
    # Only files whose header needs no change are those of the source.
    linked = [name for name in shards if (tmp_path / "target" / name).stat().st_nlink > 1]
    assert len(linked) == (7 if options.get("link") and metadata == {"format": "pt"} else 0)


def test_a_source_that_is_spelled_in_another_way_is_the_same(own_source, tmp_path, monkeypatch):
    monkeypatch.chdir(own_source.parent)
    target = tmp_path / "target"
    digests = set()
    for spelling in (own_source, own_source.name, f"./{own_source.name}", own_source / "." / ".." / own_source.name):
        plan = plan_retrofit(spelling, headers_only=False)
        digests.add(write.digest(plan))
    assert len(digests) == 1 and not target.exists()
