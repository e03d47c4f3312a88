"""Headers of safetensors files and indexes of shards: input that lies is refused, the rest is read as it stands."""

import json
import math
import re
from pathlib import Path, PurePosixPath, PureWindowsPath

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from gated_qwen import CheckpointError
from gated_qwen.conversion.checkpoint import find_weights
from gated_qwen.conversion.headers import (
    BITS,
    DTYPES,
    MAX_HEADER,
    Tensor,
    build_header,
    build_index,
    is_plain_name,
    read_header,
    read_index,
)

# Derandomised, so that a run depends on the code alone.
steady = settings(
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=150,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
# Those that the oldest supported torch has no dtype for, or no way to read.
UNKNOWN_TO_TORCH = {"F4", "F6_E2M3", "F6_E3M2", "F8_E8M0"}


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("headers") / "model.safetensors"


@pytest.fixture(scope="module")
def index(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("indexes") / "model.safetensors.index.json"


def write(file: Path, header, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return file


def refusal(read, file: Path, *arguments) -> str:
    """The one line in which `file` is refused."""
    with pytest.raises(CheckpointError) as error:
        read(file, *arguments)
    return one_line(error.value, file)


def one_line(error: CheckpointError, file: Path) -> str:
    line = str(error)
    assert line.isprintable(), f"not one plain line: {line!r}"
    assert str(file) in line and ("get it again" in line or "get the file again" in line), line
    return line


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def read_as_the_library_does(file: Path) -> list[Tensor] | None:
    """What [`read_header`] finds in a file, compared with what the library finds; None where it is refused."""
    try:
        tensors, metadata = read_header(file)
    except CheckpointError as error:
        one_line(error, file)
        return None
    content = file.read_bytes()
    with safe_open(file, "pt") as opened:
        assert sorted(opened.keys()) == sorted(tensor.name for tensor in tensors)
        assert (opened.metadata() or {}) == metadata
        for tensor in tensors:
            found = opened.get_slice(tensor.name)
            assert (found.get_dtype(), found.get_shape()) == (tensor.dtype, list(tensor.shape))
            if tensor.dtype not in UNKNOWN_TO_TORCH:
                here = content[tensor.start : tensor.start + tensor.nbytes]
                assert bytes_of(opened.get_tensor(tensor.name)) == here
    return tensors


# Files that lie

# With surrogates, which JSON can spell and UTF-8 cannot.
any_text = st.text(st.characters(exclude_categories=()), max_size=12)
odd_numbers = st.sampled_from(
    [-1, 0, 1, 2, 7, 8, 255, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 2**65, 10**30, 10**4299]
)
odd_values = st.one_of(
    odd_numbers,
    st.sampled_from([None, True, False, 0.0, 1.0, -0.0, 1e30, float("nan"), float("inf"), "", "F32", "f32", "F4"]),
    st.sampled_from([[], [0], [0, 0], [0, 0, 0], [[0]], {}, {"dtype": "F32"}, [2**40, 2**40, 0], [0, 2**70]]),
    any_text,
)
shapes = st.lists(st.integers(0, 5), max_size=3)


@st.composite
def headers(draw) -> tuple[dict, bytes]:
    """A header without a fault, and data that fits it."""
    header, end = {}, 0
    if draw(st.booleans()):
        header["__metadata__"] = draw(st.one_of(st.just({"format": "pt"}), st.dictionaries(any_text, any_text)))
    for name in draw(st.lists(any_text, max_size=4, unique=True)):
        dtype, shape = draw(st.sampled_from(sorted(BITS))), draw(shapes)
        if math.prod(shape) * BITS[dtype] % 8:
            shape = [*shape, 8]
        start, end = end, end + math.prod(shape) * BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    return header, bytes(i % 251 for i in range(end))


def places(value, path=()) -> list[tuple]:
    """The paths to everything inside a JSON value."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return [place for key, inner in items for place in [(*path, key), *places(inner, (*path, key))]]
    return []


@st.composite
def lies(draw) -> tuple[dict, bytes]:
    """A header of which one to three things were changed, and data that fitted it before."""
    header, data = draw(headers())
    for _ in range(draw(st.integers(1, 3))):
        found = places(header)
        if not found:
            break
        *path, key = draw(st.sampled_from(found))
        inside = header
        for step in path:
            inside = inside[step]
        change = draw(st.sampled_from(["replace", "replace", "add to", "remove", "copy", "more data", "less data"]))
        if change == "replace":
            inside[key] = draw(odd_values)
        elif change == "add to" and isinstance(inside[key], int | float):
            inside[key] += draw(st.sampled_from([-8, -4, -1, 1, 4, 8]))
        elif change == "remove":
            del inside[key]
        elif change == "copy" and isinstance(inside, dict):
            inside[draw(any_text)] = json.loads(json.dumps(inside[key]))
        elif change == "more data":
            data += b"\1" * draw(st.integers(1, 9))
        elif change == "less data":
            data = data[:-1]
    return header, data


@st.composite
def spellings(draw, value) -> bytes:
    """JSON of a value, with the liberties that JSON leaves and some that it does not."""
    text = json.dumps(value, ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from([None, 1])))
    text += draw(st.sampled_from(["", " ", "  \n\t", "\0", "{}", " x"]))
    if draw(st.integers(0, 9)) == 0:
        text = text.replace("0", draw(st.sampled_from(["-0", "0.0", "0e0", "00", "+0"])))
    encoding = draw(st.sampled_from(["utf-8"] * 9 + ["utf-8-sig", "utf-16-le", "utf-16", "utf-32-le"]))
    return text.encode(encoding, "surrogatepass")


@steady
@given(content=st.binary(max_size=200))
def test_arbitrary_bytes_are_refused_or_read_as_the_library_does(file, content):
    file.write_bytes(content)
    read_as_the_library_does(file)


@steady
@given(text=st.binary(max_size=100), data=st.binary(max_size=20))
def test_arbitrary_headers_are_refused_or_read_as_the_library_does(file, text, data):
    read_as_the_library_does(write(file, b"{" + text + b"}", data))


@steady
@given(layout=headers())
def test_headers_without_a_fault_are_read_as_the_library_does(file, layout):
    header, data = layout
    names = [name for name in header if name != "__metadata__"]
    spelled = json.dumps(header, ensure_ascii=False)
    write(file, header, data)
    found = read_as_the_library_does(file)
    if not any("\ud800" <= letter <= "\udfff" for letter in spelled) and all(map(str.isprintable, names)):
        assert sorted(tensor.name for tensor in found) == sorted(names)


@settings(steady, max_examples=400)
@given(data=st.data())
def test_headers_with_lies_are_refused_or_read_as_the_library_does(file, data):
    header, content = data.draw(lies())
    read_as_the_library_does(write(file, header, content))


@steady
@given(data=st.data())
def test_headers_spelled_in_other_ways_are_refused_or_read_as_the_library_does(file, data):
    header, content = data.draw(headers())
    read_as_the_library_does(write(file, data.draw(spellings(header)), content))


@settings(steady, max_examples=400)
@given(data=st.data())
def test_files_with_changed_bytes_are_refused_or_read_as_the_library_does(file, data):
    tensors = {
        "model.norm.weight": torch.arange(6, dtype=torch.bfloat16),
        "lm_head.weight": torch.arange(15, dtype=torch.float32).view(3, 5),
        "empty": torch.zeros(0, 3, dtype=torch.float16),
    }
    save_file(tensors, file, metadata={"format": "pt"})
    content = bytearray(file.read_bytes())
    end = 8 + int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, end))
        change = data.draw(st.sampled_from(["flip", "insert", "delete", "digit", "cut", "longer"]))
        if change == "flip" and place < len(content):
            content[place] ^= 1 << data.draw(st.integers(0, 7))
        elif change == "insert":
            content[place:place] = data.draw(st.binary(min_size=1, max_size=4))
        elif change == "delete":
            del content[place : place + data.draw(st.integers(1, 9))]
        elif change == "digit":
            digits = [at for at in range(8, min(end, len(content))) if chr(content[at]).isdigit()]
            if digits:
                content[data.draw(st.sampled_from(digits))] = data.draw(st.sampled_from(b"0123456789-.e"))
        elif change == "cut":
            del content[data.draw(st.integers(0, len(content))) :]
        elif change == "longer":
            content += data.draw(st.binary(max_size=9))
    file.write_bytes(content)
    read_as_the_library_does(file)


ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
TWO = {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}
NONE = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
HUGE = int("9" * 4300)  # the longest number that Python reads

LIES = {
    "no-header": (b"", b"", "cannot be 0 bytes"),
    "not-an-object": (b"[]", b"", "not a JSON object"),
    "not-json": (b"{'a': 1}", b"", "not JSON"),
    "cut-json": (b'{"a": ', b"", "not JSON"),
    "text-after": (b"{} {}", b"", "not JSON"),
    "not-utf-8": (b'{"\xff": 1}', b"", "not JSON"),
    "byte-order-mark": (b"\xef\xbb\xbf{}", b"", "not a JSON object"),
    "utf-16": ("{}".encode("utf-16-le"), b"", "not JSON"),
    "utf-32": ("{}".encode("utf-32-le"), b"", "not JSON"),
    "nested": (b'{"a":' * 100_000 + b"}" * 100_000, b"", "not JSON"),
    "nested-lists": (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", b"", "not JSON"),
    "too-long-a-number": (b'{"a": ' + b"9" * 5000 + b"}", b"", "not JSON"),
    "twice": (b'{"a": %b, "a": %b}' % (json.dumps(ONE).encode(), json.dumps(TWO).encode()), bytes(16), "'a' twice"),
    "field-twice": (
        b'{"a": {"dtype": "F32", "dtype": "F16", "shape": [2], "data_offsets": [0, 4]}}',
        bytes(4),
        "twice",
    ),
    "metadata-twice": (b'{"__metadata__": {}, "__metadata__": {}}', b"", "'__metadata__' twice"),
    "metadata-list": ({"__metadata__": []}, b"", "__metadata__"),
    "metadata-numbers": ({"__metadata__": {"format": 1}}, b"", "__metadata__"),
    "no-tensor": ({"a": 1}, b"", "a has no dtype"),
    "no-dtype": ({"a": {"shape": [2], "data_offsets": [0, 8]}}, bytes(8), "a has no dtype"),
    "a-field-more": ({"a": {**ONE, "scale": 2}}, bytes(8), "a has no dtype"),
    "unknown-dtype": ({"a": {**ONE, "dtype": "F128"}}, bytes(8), "unknown dtype 'F128'"),
    "dtype-in-small-letters": ({"a": {**ONE, "dtype": "f32"}}, bytes(8), "unknown dtype 'f32'"),
    "dtype-null": ({"a": {**ONE, "dtype": None}}, bytes(8), "unknown dtype None"),
    "dtype-list": ({"a": {**ONE, "dtype": ["F32"]}}, bytes(8), "unknown dtype"),
    "shape-number": ({"a": {**ONE, "shape": 2}}, bytes(8), "shape 2"),
    "shape-negative": ({"a": {**ONE, "shape": [-1, -2]}}, bytes(8), "shape [-1, -2]"),
    "shape-true": ({"a": {**ONE, "shape": [2, True]}}, bytes(8), "shape [2, True]"),
    "shape-float": ({"a": {**ONE, "shape": [2.0]}}, bytes(8), "shape [2.0]"),
    "shape-nan": ({"a": {**ONE, "shape": [float("nan")]}}, bytes(8), "shape [nan]"),
    "shape-too-large": ({"a": {**ONE, "shape": [3]}}, bytes(8), "does not fill its 8 bytes"),
    "shape-overflows": ({"a": {**ONE, "shape": [2**62 + 1, 2]}}, bytes(8), "a is F32 [4611686018427387905, 2]"),
    "shape-past-64-bits": ({"a": {**NONE, "shape": [0, 2**64]}}, b"", "18446744073709551616"),
    "shape-past-64-bits-together": ({"a": {**NONE, "shape": [2**40, 2**40, 0]}}, b"", "1099511627776"),
    "half-a-byte": ({"a": {"dtype": "F4", "shape": [3], "data_offsets": [0, 2]}}, bytes(2), "a is F4 [3]"),
    "offsets-one": ({"a": {**ONE, "data_offsets": [8]}}, bytes(8), "data_offsets [8]"),
    "offsets-three": ({"a": {**ONE, "data_offsets": [0, 8, 16]}}, bytes(8), "data_offsets [0, 8, 16]"),
    "offsets-backwards": ({"a": {**ONE, "data_offsets": [8, 0]}}, bytes(8), "-8 bytes"),
    "offsets-negative": ({"a": {**ONE, "data_offsets": [-8, 0]}}, bytes(8), "data_offsets [-8, 0]"),
    "offsets-float": ({"a": {**ONE, "data_offsets": [0.0, 8.0]}}, bytes(8), "data_offsets [0.0, 8.0]"),
    "offsets-minus-zero": (b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [-0, 8]}}', bytes(8), "get"),
    "offsets-past-the-end": ({"a": TWO}, bytes(16), "a start at"),
    "offsets-huge": ({"a": {**NONE, "data_offsets": [HUGE, HUGE]}}, b"", "a"),
    "overlap": ({"a": ONE, "b": ONE}, bytes(8), "bytes of b start at"),
    "overlap-partly": ({"a": ONE, "b": {**ONE, "data_offsets": [4, 12]}}, bytes(12), "bytes of b start at"),
    "gap": ({"a": ONE, "b": {**ONE, "data_offsets": [12, 20]}}, bytes(20), "bytes of b start at"),
    "too-short": ({"a": ONE, "b": TWO}, bytes(15), "end at byte"),
    "too-long": ({"a": ONE, "b": TWO}, bytes(17), "end at byte"),
    "nothing-but-data": ({}, bytes(1), "end at byte"),
    "surrogate": (b'{"\\ud800": %b}' % json.dumps(ONE).encode(), bytes(8), "get"),
    "surrogate-in-metadata": (b'{"__metadata__": {"a": "\\udfff"}}', b"", "get"),
    "newline-in-a-name": ({"a\nb": {**ONE, "shape": [3]}}, bytes(8), "a"),
    "escape-in-a-name": ({"\x1b[2Ja": {**ONE, "shape": [3]}}, bytes(8), "a"),
}


@pytest.mark.parametrize(("header", "data", "words"), LIES.values(), ids=LIES)
def test_a_header_that_lies(file, header, data, words):
    write(file, header, data)
    assert words in refusal(read_header, file)
    assert read_as_the_library_does(file) is None


@pytest.mark.parametrize("length", [0, 1, 3, 9, 100, MAX_HEADER + 1, 2**63 - 1, 2**63, 2**64 - 8, 2**64 - 1])
def test_a_length_that_lies(file, length):
    line = refusal(read_header, write(file, b"{}" + b" " * 6, b"", length))
    assert f"cannot be {length} bytes" in line or (length == 3 and "end at byte" in line)


@pytest.mark.parametrize("size", range(0, 120, 7))
def test_a_file_that_is_cut_short(file, size):
    save_file({"a": torch.ones(3, 5), "b": torch.ones(7)}, file)
    file.write_bytes(file.read_bytes()[:size])
    assert "cut short" in refusal(read_header, file)


def test_a_header_longer_than_the_library_takes(file):
    with open(file, "wb") as opened:  # a hole: it takes no space
        opened.write((MAX_HEADER + 1).to_bytes(8, "little"))
        opened.truncate(MAX_HEADER + 100)
    assert f"cannot be {MAX_HEADER + 1} bytes" in refusal(read_header, file)
    file.unlink()


def test_a_long_name_does_not_make_a_long_line(file):
    write(file, {"a" * 100_000: {**ONE, "shape": [3]}}, bytes(8))
    assert len(refusal(read_header, file)) < 2000


def test_files_that_cannot_be_read(tmp_path):
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(OSError, match=str(path)):
            read_header(path)
        with pytest.raises(OSError, match=str(path)):
            read_index(path, ".safetensors")


# Files that are as they should be

names = st.text(st.characters(exclude_categories=("Cs",)), max_size=20).filter(lambda name: name != "__metadata__")
metadata = st.none() | st.dictionaries(names, names, min_size=1, max_size=3)
dictionaries = st.dictionaries(names, st.tuples(st.sampled_from(FLOATS), shapes), max_size=6)


def fill(layout: dict, seed: int) -> dict[str, torch.Tensor]:
    """Tensors of random bits: NaNs, infinities and subnormals too."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8, generator=generator)
        .view(dtype)
        .view(shape)
        for name, (dtype, shape) in layout.items()
    }


@steady
@given(layout=dictionaries, seed=st.integers(0, 2**32), metadata=metadata)
def test_files_of_the_library_read_back_equal(file, layout, seed, metadata):
    weights = fill(layout, seed)
    save_file(weights, file, metadata=metadata)
    found, also_found = read_header(file)
    assert also_found == (metadata or {})
    assert {tensor.name for tensor in found} == set(weights)
    content = file.read_bytes()
    for tensor in found:
        weight = weights[tensor.name]
        assert tensor.file == file and tensor.shape == tuple(weight.shape) and tensor.nbytes == weight.nbytes
        assert content[tensor.start : tensor.start + tensor.nbytes] == bytes_of(weight)
        if tensor.dtype in DTYPES:
            assert getattr(torch, DTYPES[tensor.dtype]) == weight.dtype
    assert [tensor.start for tensor in found] == sorted(tensor.start for tensor in found)


@steady
@given(layout=dictionaries, seed=st.integers(0, 2**32))
def test_the_library_reads_files_that_are_built_equal(file, layout, seed):
    weights = fill(layout, seed)
    spelling = {torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"}
    spelling |= {getattr(torch, name): spelled for spelled, name in DTYPES.items()}
    tensors = [Tensor(name, spelling[t.dtype], tuple(t.shape), file, None) for name, t in weights.items()]
    header = build_header(tensors)
    assert len(header) % 8 == 0
    file.write_bytes(header + b"".join(map(bytes_of, weights.values())))
    loaded = load_file(file)
    assert loaded.keys() == weights.keys()
    for name, weight in weights.items():
        assert (loaded[name].dtype, loaded[name].shape) == (weight.dtype, weight.shape)
        assert bytes_of(loaded[name]) == bytes_of(weight)
    again, metadata = read_header(file)
    assert metadata == {"format": "pt"}
    # Those without bytes stand at the place of the one after them.
    assert {(t.name, t.dtype, t.shape) for t in again} == {(t.name, t.dtype, t.shape) for t in tensors}
    assert [t.name for t in again if t.nbytes] == [t.name for t in tensors if t.nbytes]


def test_an_empty_file_of_weights(file):
    save_file({}, file)
    assert read_header(file) == ([], {})
    file.write_bytes(build_header([]))
    assert read_header(file) == ([], {"format": "pt"})


# Indexes of shards

ESCAPES = {
    "empty": "",
    "dot": ".",
    "dots": "..",
    "suffix-alone": "../.safetensors",
    "parent": "../model.safetensors",
    "parent-inside": "a/../../model.safetensors",
    "absolute": "/etc/model.safetensors",
    "home": "~/model.safetensors",
    "this-folder": "./model.safetensors",
    "subfolder": "sub/model.safetensors",
    "slash-after": "model.safetensors/",
    "double-slash": "//server/model.safetensors",
    "drive": "C:\\model.safetensors",
    "drive-relative": "C:model.safetensors",
    "drive-slash": "C:/model.safetensors",
    "stream": "model.bin:model.safetensors",
    "unc": "\\\\server\\share\\model.safetensors",
    "device": "\\\\?\\C:\\model.safetensors",
    "backslash": "sub\\model.safetensors",
    "parent-backslash": "..\\model.safetensors",
    "nul": "model\0.safetensors",
    "nul-before-the-suffix": "/etc/passwd\0.safetensors",
    "newline": "model\n.safetensors",
    "escape": "\x1b[2Jmodel.safetensors",
    "right-to-left": "model\u202ebin.safetensors",
    "wrong-suffix": "model.bin",
    "suffix-inside": "model.safetensors.bin",
    "suffix-in-capitals": "model.SAFETENSORS",
    "no-suffix": "model",
    "number": 1,
    "null": None,
    "list": ["model.safetensors"],
    "object": {},
    "true": True,
}


@pytest.mark.parametrize("shard", ESCAPES.values(), ids=ESCAPES)
def test_an_index_that_leads_elsewhere(index, shard):
    index.write_text(json.dumps({"weight_map": {"first": "model.safetensors", "lm_head.weight": shard}}))
    line = refusal(read_index, index, ".safetensors")
    assert "puts lm_head.weight into" in line and repr(shard) in line and "that you trust" in line
    if shard not in ("model.bin", "model.safetensors.bin", "model.SAFETENSORS", "model"):
        assert not is_plain_name(shard)


@pytest.mark.parametrize("name", ["model.safetensors", "a b.safetensors", "..a.safetensors", "模型.safetensors", "a"])
def test_plain_names(name):
    assert is_plain_name(name)


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_an_index_of_the_other_kind(index, suffix):
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": "model.bin"}}))
    other = "b" if suffix == ".safetensors" else "a"
    assert f"puts {other} into" in refusal(read_index, index, suffix)


NO_INDEXES = {
    "empty": (b"", "not JSON"),
    "text": (b"version https://git-lfs.github.com/spec/v1", "not JSON"),
    "cut": (b'{"weight_map": {"a": "model.saf', "not JSON"),
    "nan-alone": (b"NaN", "no weight_map"),
    "list": (b"[]", "no weight_map"),
    "string": (b'"weight_map"', "no weight_map"),
    "nothing": (b"{}", "no weight_map"),
    "null": (b'{"weight_map": null}', "no weight_map"),
    "empty-map": (b'{"weight_map": {}}', "no weight_map"),
    "map-list": (b'{"weight_map": [["a", "model.safetensors"]]}', "no weight_map"),
    "map-text": (b'{"weight_map": "model.safetensors"}', "no weight_map"),
    "map-nan": (b'{"weight_map": {"a": NaN}}', "puts a into nan"),
    "map-infinity": (b'{"weight_map": {"a": -Infinity}}', "puts a into -inf"),
    "map-huge": (b'{"weight_map": {"a": 1' + b"0" * 4000 + b"}}", "puts a into 1000"),
    "too-long-a-number": (b'{"metadata": {"total_size": 1' + b"0" * 5000 + b"}}", "not JSON"),
    "twice": (b'{"weight_map": {"a": "model.safetensors", "a": "other.safetensors"}}', "'a' twice"),
    "map-twice": (
        b'{"weight_map": {"a": "x.safetensors"}, "weight_map": {"a": "y.safetensors"}}',
        "'weight_map' twice",
    ),
    "metadata-twice": (b'{"metadata": {"a": 1, "a": 2}, "weight_map": {"a": "x.safetensors"}}', "'a' twice"),
    "nested": (b'{"weight_map": ' * 100_000 + b"1" + b"}" * 100_000, "not JSON"),
    "nested-lists": (b"[" * 100_000, "not JSON"),
    "not-utf-8": (b'{"weight_map": {"\xff": "model.safetensors"}}', "not JSON"),
    # transformers reads neither of these.
    "byte-order-mark": (b'\xef\xbb\xbf{"weight_map": {"a": "model.safetensors"}}', "not JSON"),
    "utf-16": ('{"weight_map": {"a": "model.safetensors"}}'.encode("utf-16"), "not JSON"),
    "surrogate": (b'{"weight_map": {"a": "model\\udcff.safetensors"}}', "get the file again"),
    "newline-in-a-name": (b'{"weight_map": {"a\\nb": 1}}', "b"),
    "long-name": (b'{"weight_map": {"%b": 1}}' % (b"a" * 100_000), "a"),
}


@pytest.mark.parametrize(("content", "words"), NO_INDEXES.values(), ids=NO_INDEXES)
def test_an_index_that_is_not_one(index, content, words):
    index.write_bytes(content)
    line = refusal(read_index, index, ".safetensors")
    assert words in line and len(line) < 6000


leaves = st.none() | st.booleans() | st.floats() | st.integers() | any_text
json_values = st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(any_text, inner), max_leaves=8)
parts = st.sampled_from(
    ["..", ".", "/", "\\", "C:", ":", "\0", "\n", "~", " ", "model", ".safetensors", "\u202e", "\ud800"]
)
shard_names = st.one_of(any_text, st.lists(parts, max_size=5).map("".join), any_text.map(lambda t: t + ".safetensors"))


def read_safely(index: Path) -> dict | None:
    """What [`read_index`] finds; whatever it accepts stays in the folder, on any system."""
    try:
        weight_map = read_index(index, ".safetensors")
    except CheckpointError as error:
        one_line(error, index)
        return None
    assert weight_map
    for name, shard in weight_map.items():
        assert isinstance(name, str) and shard.endswith(".safetensors") and not re.search(r"[\0-\x1f/\\:]", shard)
        assert (index.parent / shard).resolve().parent == index.parent.resolve()
        for flavour in (PurePosixPath, PureWindowsPath):
            path = flavour(shard)
            assert path.parts == (shard,) and not path.anchor and ".." not in path.parts
    return weight_map


@steady
@given(content=st.binary(max_size=100) | json_values.map(lambda value: json.dumps(value).encode()))
def test_arbitrary_indexes(index, content):
    index.write_bytes(content)
    assert read_safely(index) is None


@settings(steady, max_examples=250)
@given(weight_map=st.dictionaries(any_text, shard_names | json_values, max_size=3), others=json_values)
def test_arbitrary_names_of_shards(index, weight_map, others):
    index.write_text(json.dumps({"metadata": others, "weight_map": weight_map}))
    found = read_safely(index)
    assert found is None or found == weight_map


@settings(steady, max_examples=250)
@given(name=shard_names)
def test_plain_names_lead_nowhere_else(name):
    plain = is_plain_name(name)
    if plain:
        assert (Path("folder") / name).parent == Path("folder") and name not in ("", ".", "..")
        assert PureWindowsPath("folder", name).parent == PureWindowsPath("folder")
    else:
        assert not re.fullmatch(r"\w[\w. -]*", name)


@steady
@given(layout=dictionaries.filter(bool), shards=st.integers(1, 3))
def test_an_index_that_is_built_reads_back(index, layout, shards):
    tensors = [Tensor(name, "F32", tuple(shape), index, 0) for name, (_, shape) in layout.items()]
    files = {f"model-{i}.safetensors": tensors[i::shards] for i in range(shards)}
    index.write_text(build_index(files))
    expected = {tensor.name: file for file, inside in files.items() for tensor in inside}
    assert read_index(index, ".safetensors") == expected
    totals = json.loads(index.read_text())["metadata"]
    assert totals["total_size"] == sum(tensor.nbytes for tensor in tensors) == 4 * totals["total_parameters"]


# Which file the weights are in

SAFE, SAFE_INDEX = "model.safetensors", "model.safetensors.index.json"
BIN, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ([SAFE], (SAFE, None)),
        ([SAFE_INDEX], (SAFE, SAFE_INDEX)),
        ([BIN], (BIN, None)),
        ([BIN_INDEX, "pytorch_model-1.bin"], (BIN, BIN_INDEX)),
        # transformers takes safetensors where there are both.
        ([SAFE, BIN], (SAFE, None)),
        ([SAFE_INDEX, BIN, BIN_INDEX], (SAFE, SAFE_INDEX)),
        ([SAFE, BIN_INDEX], (SAFE, None)),
    ],
)
def test_the_weights_that_are_found(files, expected):
    assert find_weights(["config.json", *files], "folder") == expected


@pytest.mark.parametrize("files", [[SAFE, SAFE_INDEX], [BIN, BIN_INDEX]])
def test_one_file_and_shards(files):
    with pytest.raises(CheckpointError, match=f"folder has both {files[0]} and {files[1]}, .*remove the one"):
        find_weights(files, "folder")


@pytest.mark.parametrize(
    "other", ["consolidated.00.pth", "model.gguf", "tf_model.h5", "sub/model.safetensors", "a.bin"]
)
def test_weights_under_other_names(other):
    with pytest.raises(CheckpointError, match=f"folder has no model.safetensors, .*only {other}: load it in trans"):
        find_weights(["config.json", other], "folder")


def test_no_weights():
    with pytest.raises(
        CheckpointError, match="folder has no model.safetensors, pytorch_model.bin or index of shards: "
    ):
        find_weights(["config.json", "README.md"], "folder")
