"""What cannot be converted: each is refused in one line, before anything is written, and the source stays as it is."""

import contextlib
import hashlib
import json
import os
import pickle
import re
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support import RELEASED, build, randomise
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

import gated_qwen
from gated_qwen import CheckpointError, cli, retrofit, retrofit_checkpoint, strip_checkpoint
from gated_qwen.conversion.families import OTHER_FAMILIES

SIZES = dict(
    vocab_size=131,
    hidden_size=40,
    intermediate_size=72,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    bos_token_id=1,
    eos_token_id=2,
    tie_word_embeddings=False,
)
QUERY, OUTPUT = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "qo")


def llama(**fields) -> LlamaForCausalLM:
    return randomise(LlamaForCausalLM(LlamaConfig(**{**SIZES, **fields})))


def qwen3(**fields) -> Qwen3ForCausalLM:
    return randomise(Qwen3ForCausalLM(Qwen3Config(**{**SIZES, "head_dim": 12, **fields})))


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    llama().save_pretrained(folder / "llama")
    llama().save_pretrained(folder / "sharded", max_shard_size="60KB")
    qwen3().save_pretrained(folder / "qwen3")
    for gate in ("headwise", "elementwise"):
        build(gate, attn_gate_scale=2.0).save_pretrained(folder / gate)
    return folder


@pytest.fixture
def source(models, tmp_path) -> Path:
    """A Llama checkpoint, free to be changed."""
    return Path(shutil.copytree(models / "llama", tmp_path / "source"))


@pytest.fixture
def sharded(models, tmp_path) -> Path:
    return Path(shutil.copytree(models / "sharded", tmp_path / "source"))


@pytest.fixture(params=["headwise", "elementwise"])
def gated(models, tmp_path, request) -> Path:
    """A native gated checkpoint whose gates have moved."""
    return Path(shutil.copytree(models / request.param, tmp_path / "source"))


@pytest.fixture
def headwise(models, tmp_path) -> Path:
    return Path(shutil.copytree(models / "headwise", tmp_path / "source"))


def everything_in(folder: Path) -> dict[str, str]:
    return {
        str(path): os.readlink(path) if path.is_symlink() else hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def refusal(source, *words: str, target=None, convert=retrofit_checkpoint, kind=ValueError, **options) -> str:
    """The one line in which a conversion is refused, having written nothing."""
    place = source.parent if target is None else Path(target).parent
    target = place / "target" if target is None else target
    partial = Path(f"{target}.partial")
    existed, sources = os.path.lexists(target), everything_in(source)
    with pytest.raises(Exception) as error:
        convert(source, target, **options)
    assert isinstance(error.value, kind), repr(error.value)
    line = str(error.value)
    assert line.isprintable() and len(line) < 1000, f"not one plain line: {line[:2000]!r}"
    for word in words:
        assert word in line, line
    assert os.path.lexists(target) == existed and not os.path.lexists(partial)
    assert everything_in(source) == sources
    return line


def change_config(folder: Path, drop=(), **fields) -> Path:
    file = folder / "config.json"
    fields = {**json.loads(file.read_text()), **fields}
    file.write_text(json.dumps({name: value for name, value in fields.items() if name not in drop}))
    return folder


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def save(folder: Path, weights: dict, name="model.safetensors") -> Path:
    weights = {key: value.clone(memory_format=torch.contiguous_format) for key, value in weights.items()}
    save_file(weights, folder / name, metadata={"format": "pt"})
    return folder


def change_weights(folder: Path, drop=(), **added) -> Path:
    weights = weights_of(folder)
    return save(folder, {name: value for name, value in weights.items() if name not in drop} | added)


def as_pickle(folder: Path, **options) -> Path:
    torch.save(weights_of(folder), folder / "pytorch_model.bin", **options)
    (folder / "model.safetensors").unlink()
    return folder


def test_the_sources_convert_as_long_as_nothing_is_wrong_with_them(source, models, tmp_path):
    """Else the refusals below would show nothing."""
    retrofit_checkpoint(source, tmp_path / "target", verify=False)
    retrofit_checkpoint(models / "qwen3", tmp_path / "qwen3", verify=False)
    retrofit_checkpoint(models / "sharded", tmp_path / "sharded", verify=False)
    retrofit_checkpoint(as_pickle(source), tmp_path / "of a pickle", verify=False)
    strip_checkpoint(tmp_path / "target", tmp_path / "stripped", verify=False)
    strip_checkpoint(models / "headwise", tmp_path / "forced", force=True, verify=False)


# The files of weights


@pytest.mark.parametrize("size", [0, 7, 100, 5000, -1])
def test_a_truncated_file(source, size):
    file = source / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    refusal(source, str(file), "cut short", "get it again")


@pytest.mark.parametrize("shard", [0, 2, -1])
def test_a_truncated_shard(sharded, shard):
    file = sorted(sharded.glob("*.safetensors"))[shard]
    file.write_bytes(file.read_bytes()[:-1])
    refusal(sharded, str(file), "cut short", "get it again")


@pytest.mark.parametrize("shard", [0, 2, -1])
def test_a_missing_shard(sharded, shard):
    file = sorted(sharded.glob("*.safetensors"))[shard]
    file.unlink()
    refusal(sharded, "model.safetensors.index.json", file.name, "missing", "get the whole checkpoint")


def test_a_shard_that_is_a_link_to_nothing(sharded):
    file = sorted(sharded.glob("*.safetensors"))[1]
    file.unlink()
    file.symlink_to("nothing")
    refusal(sharded, str(file), kind=(OSError, ValueError))


def change_index(folder: Path, change) -> Path:
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    change(index["weight_map"])
    file.write_text(json.dumps(index))
    return file


@pytest.mark.parametrize(
    "shard", ["../other.safetensors", "/other.safetensors", "C:\\other.safetensors", "a\0.safetensors"]
)
def test_an_index_that_leads_out_of_the_folder(sharded, shard):
    save(sharded.parent, {QUERY: torch.zeros(40, 40)}, "other.safetensors")
    file = change_index(sharded, lambda index: index.update({QUERY: shard}))
    refusal(sharded, str(file), QUERY, repr(shard), "from a source that you trust")


def test_a_tensor_that_the_index_does_not_know(sharded):
    file = change_index(sharded, lambda index: index.pop(QUERY))
    refusal(sharded, QUERY, "the index does not put there", str(file.parent), "whole checkpoint again")


def test_a_tensor_that_the_index_puts_elsewhere(sharded):
    others = sorted(file.name for file in sharded.glob("*.safetensors"))
    change_index(sharded, lambda index: index.update({QUERY: next(name for name in others if name != index[QUERY])}))
    refusal(sharded, QUERY, "the index does not put there", "whole checkpoint again")


def test_a_tensor_that_no_shard_holds(sharded):
    file = change_index(sharded, lambda index: index.update({"model.norm.bias": index["model.norm.weight"]}))
    refusal(sharded, str(file), "model.norm.bias", "does not hold it", "whole checkpoint again")


def test_a_tensor_in_two_shards(sharded):
    files = sorted(sharded.glob("*.safetensors"))
    for file in files[:2]:
        save(sharded, {**load_file(file), "model.twice": torch.zeros(2)}, file.name)
    change_index(sharded, lambda index: index.update({"model.twice": files[0].name}))
    refusal(sharded, str(files[1]), "model.twice", "again")


def test_one_file_beside_an_index(sharded, models):
    shutil.copy(models / "llama" / "model.safetensors", sharded)
    refusal(sharded, str(sharded), "model.safetensors and model.safetensors.index.json", "two sets", "remove the one")


def test_one_pickle_beside_an_index_of_pickles(source):
    as_pickle(source)
    (source / "pytorch_model.bin.index.json").write_text('{"weight_map": {"a": "pytorch_model.bin"}}')
    refusal(source, "pytorch_model.bin and pytorch_model.bin.index.json", "two sets", "remove the one")


@pytest.mark.parametrize("name", ["consolidated.00.pth", "model.gguf", "other.safetensors"])
def test_weights_under_another_name(source, name):
    (source / "model.safetensors").rename(source / name)
    refusal(source, str(source), "has no model.safetensors", f"only {name}", "save_pretrained() it")


def test_no_weights(source):
    (source / "model.safetensors").unlink()
    refusal(source, str(source), "has no model.safetensors, pytorch_model.bin or index of shards")


def test_a_name_twice_in_a_header(source):
    file = source / "model.safetensors"
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    text = (
        content[8 : 8 + length].rstrip()[:-1] + b',"lm_head.weight":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'
    )
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    refusal(source, str(file), "'lm_head.weight' twice", "get the file again")


# Tensors too many, too few, of another shape or kind


@pytest.mark.parametrize(
    "name",
    [
        "model.norm.weight", "lm_head.weight", "model.embed_tokens.weight", QUERY, OUTPUT,
        "model.layers.2.input_layernorm.weight", "model.layers.1.mlp.up_proj.weight",
    ],
)  # fmt: skip
@pytest.mark.parametrize("start", ["scale", "fold"])
def test_a_missing_tensor(source, name, start):
    refusal(change_weights(source, drop=[name]), str(source), f"{name} is missing", "whole checkpoint", start=start)


def test_no_tensor_at_all(source):
    refusal(save(source, {}), str(source), "model.embed_tokens.weight is missing", "whole checkpoint")


def test_a_missing_norm_of_queries(models, tmp_path):
    source = Path(shutil.copytree(models / "qwen3", tmp_path / "source"))
    name = "model.layers.1.self_attn.q_norm.weight"
    refusal(change_weights(source, drop=[name]), str(source), f"{name} is missing", "whole checkpoint")


FOREIGN = {
    "model.layers.0.self_attn.sinks": "a learned attention sink",
    "model.layers.0.self_attn.q_proj.qweight": "GPTQ or AWQ",
    "model.layers.0.self_attn.q_proj.qzeros": "GPTQ or AWQ",
    "model.layers.0.self_attn.q_proj.scales": "GPTQ or AWQ",
    "model.layers.0.self_attn.q_proj.g_idx": "GPTQ or AWQ",
    "model.layers.0.self_attn.q_proj.weight_scale": "fp8",
    "model.layers.0.self_attn.q_proj.weight_scale_inv": "fp8",
    "model.layers.0.self_attn.q_proj.input_scale": "fp8",
    "model.layers.0.self_attn.k_scale": "fp8",
    "model.layers.0.self_attn.q_proj.weight.absmax": "bitsandbytes",
    "model.layers.0.self_attn.q_proj.weight.quant_map": "bitsandbytes",
    "model.layers.0.self_attn.q_proj.weight.quant_state.bitsandbytes__nf4": "bitsandbytes",
    "model.layers.0.self_attn.q_proj.SCB": "bitsandbytes",
    "model.layers.0.self_attn.q_proj.lora_A.weight": "merge_and_unload",
    "model.layers.0.self_attn.q_proj.lora_A.default.weight": "merge_and_unload",
    "model.layers.0.self_attn.q_proj.base_layer.weight": "merge_and_unload",
    "lm_head.modules_to_save.default.weight": "merge_and_unload",
    "model.layers.0.self_attn.g_proj.weight": "the gate of another family",
    "model.layers.0.self_attn.gate_proj.weight": "the gate of another family",
    "model.layers.0.self_attn.kv_a_proj_with_mqa.weight": "MLA",
    "model.layers.0.self_attn.q_b_proj.weight": "MLA",
    "model.layers.0.self_attn.qkv_proj.weight": "packed",
    "model.layers.0.self_attn.W_pack.weight": "packed",
    "model.layers.0.mlp.gate_up_proj.weight": "packed",
    "model.layers.0.mlp.experts.0.up_proj.weight": "mixture of experts",
    "model.layers.0.self_attn.q_norm.weight": "no place in a llama model",
    "model.layers.0.self_attn.q_proj.bias": "no place in a llama model",
    "model.layers.0.mlp.up_proj.bias": "no place in a llama model",
    "model.layers.0.post_feedforward_layernorm.weight": "no place in a llama model",
    "model.layers.3.input_layernorm.weight": "no place in a llama model",
    "model.layers.00.input_layernorm.weight": "no place in a llama model",
    "model.norm.bias": "no place in a llama model",
    "layers.0.input_layernorm.weight": "no place in a llama model",
    "model.model.norm.weight": "no place in a llama model",
    "model.mm_projector.weight": "no place in a llama model",
    "score.weight": "no place in a llama model",
    "": "no place in a llama model",
}  # fmt: skip


@pytest.mark.parametrize(("name", "words"), FOREIGN.items(), ids=FOREIGN)
@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_a_tensor_too_many(source, name, words, form):
    change_weights(source, **{name: torch.ones(4, 4)})
    if form == "bin":
        as_pickle(source)
    file = "model.safetensors" if form == "safetensors" else "pytorch_model.bin"
    line = refusal(source, str(source / file), name, words)
    assert any(way in line for way in ("start from", "merge", "have none", "scramble", "save the model", "belongs to"))


def test_gptq_weights_in_place_of_a_matrix(source):
    change_weights(
        source, [QUERY], **{QUERY.replace("weight", kind): torch.ones(4, 4).int() for kind in ("qweight", "qzeros")}
    )
    refusal(source, str(source / "model.safetensors"), "q_proj.qweight", "GPTQ or AWQ", "unquantised weights")


QUANTISED = [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool]


@pytest.mark.parametrize("dtype", QUANTISED, ids=str)
@pytest.mark.parametrize("form", ["safetensors", "bin"])
@pytest.mark.parametrize("name", [QUERY, "model.norm.weight"])
def test_a_tensor_of_a_quantised_dtype(source, name, dtype, form):
    change_weights(source, **{name: weights_of(source)[name].to(dtype)})
    if form == "bin":
        as_pickle(source)
    refusal(source, str(source), name, "quantised", "unquantised weights")


def test_a_packed_4_bit_matrix(source):
    change_weights(source, **{QUERY: torch.zeros(800, 1, dtype=torch.uint8)})
    refusal(source, str(source / "model.safetensors"), QUERY, "U8", "quantised", "unquantised weights")


def test_a_tensor_of_complex_numbers(source):
    weights = weights_of(source)
    file = as_pickle(source) / "pytorch_model.bin"
    torch.save({**weights, QUERY: weights[QUERY].to(torch.complex64)}, file)
    refusal(source, f"{file}: {QUERY} is torch.complex64")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (QUERY, (41, 40)),
        (QUERY, (40, 41)),
        (QUERY, (1600,)),
        (QUERY, (40, 40, 1)),
        (QUERY, ()),
        (QUERY, (0, 40)),
        (OUTPUT, ()),
        (OUTPUT, (0, 40)),
        (OUTPUT, (40, 41)),
        ("model.layers.0.self_attn.k_proj.weight", (40, 20)),
        ("model.norm.weight", (41,)),
        ("model.norm.weight", (40, 1)),
        ("model.embed_tokens.weight", (130, 40)),
        ("lm_head.weight", (132, 40)),
        ("lm_head.weight", ()),
    ],
)
@pytest.mark.parametrize("start", ["scale", "fold"])
def test_a_tensor_of_another_shape(source, name, shape, start):
    file = source / "model.safetensors"
    change_weights(source, **{name: torch.ones(shape)})
    refusal(source, f"{file}: {name} is {list(shape)}", str(source / "config.json"), "Get both from one", start=start)


@pytest.mark.parametrize(
    "fields",
    [
        {"vocab_size": 132},
        {"hidden_size": 48},
        {"intermediate_size": 71},
        {"num_attention_heads": 2},
        {"num_attention_heads": 10, "num_key_value_heads": 5},
        {"num_key_value_heads": 1},
        {"num_key_value_heads": None},
        {"head_dim": 12},
    ],
    ids=lambda fields: "-".join(fields),
)
def test_a_config_with_another_size(source, fields):
    change_config(source, **fields)
    refusal(source, str(source / "model.safetensors"), str(source / "config.json"), "belongs to other weights")


def test_a_config_with_another_number_of_layers(source):
    refusal(change_config(source, num_hidden_layers=4), "model.layers.3.", "is missing", "whole checkpoint")
    refusal(change_config(source, num_hidden_layers=2), "model.layers.2.", "no place", "config.json belongs to other")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"attention_bias": True}, "self_attn.q_proj.bias is missing"),
        ({"mlp_bias": True}, "mlp.gate_proj.bias is missing"),
        ({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}, "self_attn.q_proj.bias is missing"),
        ({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}, "self_attn.q_norm.weight is missing"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "lm_head.weight has no place"),
        ({"architectures": ["LlamaModel"]}, "has no place"),
        ({"model_type": "qwen2"}, "`architectures` names LlamaForCausalLM"),
    ],
    ids=str,
)
def test_a_config_of_other_parts(source, fields, named):
    refusal(change_config(source, **fields), str(source), named)


# Pickles


class Runs:
    """Pickled, it asks for a command to be run."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch '{self.marker}'",)


def in_zip_form(content, file):
    torch.save(content, file)


def in_legacy_form(content, file):
    torch.save(content, file, _use_new_zipfile_serialization=False)


def as_plain_pickle(content, file):
    file.write_bytes(pickle.dumps(content, protocol=2))


def in_a_zip_of_its_own(content, file):
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(content, protocol=2))
        archive.writestr("archive/version", "3\n")


@pytest.mark.parametrize("write", [in_zip_form, in_legacy_form, as_plain_pickle, in_a_zip_of_its_own])
@pytest.mark.parametrize("convert", [retrofit_checkpoint, strip_checkpoint])
def test_a_pickle_that_would_run_a_command(source, tmp_path, write, convert):
    marker = tmp_path / "was run"
    file = as_pickle(source) / "pytorch_model.bin"
    write({QUERY: Runs(marker)}, file)
    refusal(source, str(file), "get it again", convert=convert)
    assert not marker.exists()

    with contextlib.suppress(Exception):  # torch's complaint that it is no torch pickle comes too late
        torch.load(file, weights_only=False)
    assert marker.exists(), "the pickle is harmless, so the test shows nothing"


def test_a_pickle_in_the_legacy_form(source):
    as_pickle(source, _use_new_zipfile_serialization=False)
    refusal(source, str(source / "pytorch_model.bin"), "torch before 1.6", "save_pretrained() it")


@pytest.mark.parametrize("size", [0, 100, 5000, -1])
def test_a_pickle_that_is_cut_short(source, size):
    file = as_pickle(source) / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:size])
    refusal(source, str(file), "damaged", "get it again")


@pytest.mark.parametrize("part", ["data.pkl", "data/0"])
def test_a_pickle_without_one_of_its_parts(source, part):
    file = as_pickle(source) / "pytorch_model.bin"
    with zipfile.ZipFile(file) as archive:
        content = {name: archive.read(name) for name in archive.namelist() if not name.endswith(part)}
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in content.items():
            archive.writestr(name, data)
    refusal(source, str(file), "damaged", "get it again")


NOT_TENSORS = {
    "list": [torch.zeros(2)],
    "tensor": torch.zeros(2),
    "number": {"model.norm.weight": 1.0},
    "nested": {"model": {"model.norm.weight": torch.zeros(40)}},
    "numbered": {0: torch.zeros(2)},
    "sparse": {"model.norm.weight": torch.eye(4).to_sparse()},
    "nothing": None,
}


@pytest.mark.parametrize("content", NOT_TENSORS.values(), ids=NOT_TENSORS)
def test_a_pickle_of_something_else_than_tensors_by_name(source, content):
    file = as_pickle(source) / "pytorch_model.bin"
    torch.save(content, file)
    refusal(source, str(file), "plain tensors", "get")


def test_a_pickle_of_a_whole_model(source):
    file = as_pickle(source) / "pytorch_model.bin"
    torch.save(llama(), file)
    refusal(source, str(file), "more than plain tensors", "get it again")


def test_a_pickle_of_tensors_without_values(source):
    weights = weights_of(source)
    file = as_pickle(source) / "pytorch_model.bin"
    torch.save({**weights, QUERY: weights[QUERY].to("meta")}, file)
    refusal(source, str(file), QUERY)


def test_a_pickle_of_parameters_is_as_good_as_one_of_tensors(source, tmp_path):
    """`torch.save(dict(model.named_parameters()))` makes one."""
    weights = weights_of(source)
    file = as_pickle(source) / "pytorch_model.bin"
    torch.save({name: nn.Parameter(weight) for name, weight in weights.items()}, file)
    retrofit_checkpoint(source, tmp_path / "target", verify=False)
    converted = weights_of(tmp_path / "target")
    assert all(torch.equal(converted[name], weight) for name, weight in weights.items())


def test_a_pickle_of_transposed_tensors_and_of_views(source, tmp_path):
    weights = weights_of(source)
    file = as_pickle(source) / "pytorch_model.bin"
    torch.save({**weights, QUERY: weights[QUERY].T.contiguous().T, OUTPUT: weights[OUTPUT].repeat(1, 2)[:, :40]}, file)
    retrofit_checkpoint(source, tmp_path / "target", verify=False)
    converted = weights_of(tmp_path / "target")
    assert all(torch.equal(converted[name], weight) for name, weight in weights.items())


def test_of_safetensors_and_a_pickle_the_safetensors_are_taken(source, tmp_path):
    """As transformers does; the pickle is not even opened."""
    torch.save({QUERY: Runs(tmp_path / "was run")}, source / "pytorch_model.bin")
    record = retrofit_checkpoint(source, tmp_path / "target", verify=False)
    assert "pytorch_model.bin" in record["left_out"] and not (tmp_path / "was run").exists()
    assert torch.equal(weights_of(tmp_path / "target")[QUERY], weights_of(source)[QUERY])


# config.json

NO_CONFIGS = {
    "empty": (b"", "not JSON"),
    "text": (b"model_type: llama", "not JSON"),
    "cut": (b'{"model_type": "llama"', "not JSON"),
    "twice": (b'{"model_type": "llama", "model_type": "qwen3"}', "'model_type' twice"),
    "nested": (b'{"a":' * 100_000, "not JSON"),
    "long-number": (b'{"model_type": "llama", "vocab_size": 1' + b"0" * 5000 + b"}", "not JSON"),
    "not-utf-8": (b'{"model_type": "\xff"}', "not JSON"),
    "list": (b"[]", "not a JSON object"),
    "string": (b'"llama"', "not a JSON object"),
    "null": (b"null", "not a JSON object"),
    "number": (b"NaN", "not a JSON object"),
}


@pytest.mark.parametrize(("content", "words"), NO_CONFIGS.values(), ids=NO_CONFIGS)
def test_a_config_that_is_not_one(source, content, words):
    (source / "config.json").write_bytes(content)
    refusal(source, str(source / "config.json"), words, "get the file again")


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_a_config_in_an_encoding_that_transformers_does_not_read(source, encoding):
    file = source / "config.json"
    file.write_bytes(file.read_text().encode(encoding))
    refusal(source, str(file), "not JSON")


def test_no_config(source):
    (source / "config.json").unlink()
    refusal(source, str(source), "has no config.json", "whole checkpoint")


def test_an_adapter(source):
    (source / "config.json").unlink()
    (source / "adapter_config.json").write_text("{}")
    refusal(source, str(source), "PEFT adapter", "merge_and_unload")


def test_an_adapter_beside_a_model(source):
    """Of such a folder, transformers loads the base model that the adapter names, and the adapter onto it."""
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "someone/else", "r": 2, "target_modules": ["q_proj"]}
    (source / "adapter_config.json").write_text(json.dumps(adapter))
    save(source, {"base_model.model.model.norm.lora_A.weight": torch.zeros(2, 40)}, "adapter_model.safetensors")
    refusal(source, str(source), "adapter", verify=False)


WRONG_VALUES = {
    "vocab_size": ["131", 131.5, [131], None, 0, -1, 10**30],
    "hidden_size": ["40", 0, -40, 10**30],
    "intermediate_size": ["72", [72, 72, 72], 0, -1],
    "num_hidden_layers": ["3", 3.5, 0, -1, None],
    "num_attention_heads": ["4", 0, -4],
    "num_key_value_heads": ["2", 0, -2, 3, 8],
    "head_dim": ["10", 0, -10, 5],
    "hidden_act": ["no_such", 1, ["silu"]],
    "rms_norm_eps": ["1e-6", [1e-6]],
    "max_position_embeddings": ["256", 0, -1],
    "tie_word_embeddings": ["false", 1],
    "attention_bias": ["true", 2],
    "mlp_bias": ["true"],
    "rope_parameters": ["default", 1],
    "architectures": ["LlamaForCausalLM", [5], [None], {"a": "LlamaForCausalLM"}],
    "dtype": [1, "int8", "float8_e4m3fn"],
    "pad_token_id": ["0", 131],
    "model_type": [["llama"], {"llama": 1}, 1, True],
}


@pytest.mark.parametrize(
    ("name", "value"),
    [pytest.param(name, value, id=f"{name}-{value}") for name in WRONG_VALUES for value in WRONG_VALUES[name]],
)
def test_a_field_with_a_wrong_value(source, name, value):
    change_config(source, **{name: value})
    refusal(source, str(source / "config.json"), name)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"hidden_size": 41}, "hidden size (41) is not a multiple"),
        ({"num_attention_heads": 3}, "not a multiple of the number of attention heads (3)"),
        ({"intermediate_size": 10**12}, "belongs to other weights"),
        ({"dtype": "no_such"}, "no_such"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "`rope_theta` must be a number above 0"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": "x"}}, "`rope_theta` must be a number above 0"),
    ],
    ids=str,
)
def test_fields_that_do_not_go_together(source, fields, words):
    refusal(change_config(source, **fields), str(source / "config.json"), words)


def test_released_flags_of_a_wrong_type(tmp_path):
    source = Path(shutil.copytree(RELEASED / "1B_gate_headwise", tmp_path / "source"))
    change_config(source, headwise_attn_output_gate="yes")
    refusal(source, str(source / "config.json"), "headwise_attn_output_gate", "true or false")


@pytest.mark.parametrize("model_type", OTHER_FAMILIES)
def test_another_family(source, model_type):
    line = refusal(change_config(source, model_type=model_type), str(source / "config.json"), repr(model_type))
    assert OTHER_FAMILIES[model_type] in line and "gates cannot be put onto it" in line


def test_other_families_are_said_to_be_what_they_are(source):
    for model_type, words in {"gpt_oss": "sinks", "gemma2": "softcapping", "deepseek_v3": "MLA"}.items():
        refusal(change_config(source, model_type=model_type), words)
    for model_type in ("qwen3_next", "afmoe"):
        refusal(change_config(source, model_type=model_type), "gates of its own, in another layout")


@pytest.mark.parametrize("model_type", ["no_such", "bert", "LLAMA", "llama ", "", None])
def test_an_unknown_family(source, model_type):
    change_config(source, model_type=model_type)
    refusal(source, str(source / "config.json"), repr(model_type), "is not one of llama, mistral, qwen2, qwen3")


def test_no_family(source):
    refusal(
        change_config(source, drop=["model_type"]), str(source / "config.json"), "model_type None", "is not one of"
    )


@pytest.mark.parametrize("model_type", ["llama", "mistral"])
def test_the_flags_of_released_checkpoints_in_another_family(source, model_type):
    change_config(source, model_type=model_type, headwise_attn_output_gate=True)
    refusal(source, str(source / "config.json"), model_type, "gates of another", "correct it")


@pytest.mark.parametrize(
    "architecture", ["LlamaForCausalLMEagle3", "LlamaForMultipleChoice", "Llama", "", "T5EncoderOnly"]
)
def test_an_architecture_without_a_counterpart(source, architecture):
    change_config(source, architectures=[architecture])
    refusal(source, str(source / "config.json"), f"`architectures` names {architecture}")


FEATURES = [
    ("quantization_config", {"quant_method": "gptq", "bits": 4}, "unquantised weights"),
    ("quantization_config", {"quant_method": "awq"}, "unquantised weights"),
    ("quantization_config", {"quant_method": "bitsandbytes", "load_in_4bit": True}, "unquantised weights"),
    ("quantization_config", {"quant_method": "fp8"}, "unquantised weights"),
    ("compression_config", {"format": "pack-quantized"}, "unquantised weights"),
    ("attn_logit_softcapping", 50.0, "softcapping"),
    ("final_logit_softcapping", 30.0, "softcapping"),
    ("partial_rotary_factor", 0.5, "partial rotary"),
    ("rotary_pct", 0.25, "partial rotary"),
    ("kv_lora_rank", 512, "MLA"),
    ("q_lora_rank", 1536, "MLA"),
    ("attention_sinks", True, "learned attention sinks"),
    ("use_sinks", True, "learned attention sinks"),
    ("num_experts", 8, "experts"),
    ("num_local_experts", 8, "experts"),
    ("n_routed_experts", 8, "experts"),
    ("no_rope_layers", [1, 1, 0], "without rotary"),
    ("attention_chunk_size", 8192, "chunked attention"),
    ("sliding_window_pattern", 6, "sliding windows"),
    ("alibi", True, "ALiBi"),
    ("use_bidirectional_attention", True, "bidirectional"),
    ("attn_output_gate", True, "another family's gates"),
    ("use_attn_gate", True, "another family's gates"),
    ("embedding_multiplier", 12.0, "scaled embeddings"),
    ("residual_multiplier", 0.2, "scaled residuals"),
    ("attention_multiplier", 0.01, "scaled attention"),
    ("logits_scaling", 8.0, "scaled logits"),
    ("vision_config", {"hidden_size": 8}, "vision"),
    ("text_config", {"model_type": "llama"}, "a model in a model"),
]


@pytest.mark.parametrize(("name", "value", "words"), FEATURES, ids=[f"{name}-{words}" for name, _, words in FEATURES])
@pytest.mark.parametrize("model", ["llama", "headwise"])
def test_a_feature_that_these_models_have_not(models, tmp_path, model, name, value, words):
    source = Path(shutil.copytree(models / model, tmp_path / "source"))
    line = refusal(change_config(source, **{name: value}), str(source / "config.json"), f"`{name}`", words)
    assert "start from the unquantised weights" in line or "these models have none" in line


@pytest.mark.parametrize("value", ["sinks", [8], {"a": 1}])
def test_a_feature_of_an_odd_type(source, value):
    change_config(source, logits_scaling=value)
    refusal(source, str(source / "config.json"), "`logits_scaling` asks for scaled logits")


@pytest.mark.parametrize(
    "layer_types",
    [
        ["full_attention", "chunked_attention", "full_attention"],
        ["full_attention", "linear_attention", "full_attention"],
        ["full_attention", "no_such", "full_attention"],
        ["full_attention"],
        ["full_attention"] * 4,
        ["sliding_attention"] * 3,
        "full_attention",
        [1, 2, 3],
    ],
    ids=str,
)
def test_a_pattern_of_layers_that_is_not_known(models, tmp_path, layer_types):
    source = Path(shutil.copytree(models / "qwen3", tmp_path / "source"))
    refusal(change_config(source, layer_types=layer_types), str(source / "config.json"))


@pytest.mark.parametrize(
    "fields",
    [
        {"sliding_window": 4},
        {"sliding_window": 4, "layer_types": ["sliding_attention"] * 3},
        {"layer_types": ["full_attention", "linear_attention", "full_attention"]},
    ],
    ids=str,
)
def test_a_window_in_a_family_that_has_none(source, fields):
    """Stock Llama ignores it without a cache, and cuts the cache to it: the two disagree."""
    name = list(fields)[0]
    refusal(change_config(source, **fields), str(source / "config.json"), name, verify=False)


@pytest.mark.parametrize(
    "fields",
    [
        {"sliding_window": 4, "layer_types": ["full_attention"] * 3},
        {"sliding_window": 4, "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        {"sliding_window": None, "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    ],
    ids=str,
)
def test_a_pattern_of_windows_in_a_family_that_has_one_for_all_layers(source, fields):
    change_config(source, model_type="mistral", architectures=["MistralForCausalLM"], **fields)
    refusal(source, str(source / "config.json"), "layer_types", verify=False)


ROPES = {
    "unknown": ({"rope_type": "no_such", "factor": 2.0}, "no_such"),
    "unknown-type": ({"type": "no_such", "factor": 2.0}, "no_such"),
    "number": ({"rope_type": 1}, "rope_type"),
    "mrope": ({"type": "mrope", "mrope_section": [2, 1, 2]}, "whole heads"),
    "mrope-default": ({"rope_type": "default", "mrope_section": [2, 1, 2]}, "whole heads"),
    "mrope-alone": ({"rope_type": "mrope"}, "mrope"),
    "partly": ({"rope_type": "default", "partial_rotary_factor": 0.5}, "whole heads"),
    "by-layer-type": (
        {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "linear", "factor": 2.0}},
        "differs by layer type",
    ),
    "linear-without-factor": ({"rope_type": "linear"}, "factor"),
    "llama3-without-its-numbers": ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor"),
    "factor-text": ({"rope_type": "linear", "factor": "two"}, "factor"),
    "longrope-of-other-length": (
        {"rope_type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [1.0, 2.0], "factor": 2.0},
        "short_factor",
    ),
    "list": ([{"rope_type": "linear", "factor": 2.0}], "rope"),
    "text": ("linear", "rope"),
}  # fmt: skip


@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(("rope", "words"), ROPES.values(), ids=ROPES)
def test_rotary_embeddings_that_are_not_known(source, field, rope, words):
    if isinstance(rope, dict) and field == "rope_parameters":
        rope = {"rope_theta": 10000.0, **rope}
    change_config(source, drop=["rope_parameters"])
    change_config(source, rope_theta=10000.0, **{field: rope})
    refusal(source, str(source / "config.json"), words)


# Other files of the source


def test_a_link_to_nothing_among_the_files(source):
    (source / "tokenizer.json").symlink_to("nothing")
    refusal(source, str(source / "tokenizer.json"), kind=(OSError, ValueError))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_a_pipe_among_the_files(source):
    os.mkfifo(source / "notes.txt")
    with pytest.raises((OSError, ValueError)) as error:
        retrofit_checkpoint(source, source.parent / "target", verify=False)
    assert "notes.txt" in str(error.value)
    assert sorted(path.name for path in source.parent.iterdir()) == ["source"]


@pytest.mark.parametrize("content", ["{", "[", b"\xff", '{"made_by": 1, "made_by": 2}'])
@pytest.mark.parametrize("convert", [retrofit_checkpoint, strip_checkpoint])
def test_a_damaged_record(headwise, content, convert):
    file = headwise / "conversion.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    options = {"force": True} if convert is strip_checkpoint else {"attn_gate": "elementwise"}
    model = json.loads((headwise / "config.json").read_text())
    assert model["attn_gate"] == "headwise"
    refusal(headwise, str(file), convert=convert, verify=False, **options)


RECORDS = {
    "empty": {},
    "maker-only": {"made_by": "x"},
    "no-tensors": {"made_by": "x", "options": {"start": "random"}},
    "odd-options": {"made_by": "x", "options": ["random"], "tensors": []},
    "odd-tensors": {"made_by": "x", "options": {"start": "random"}, "tensors": {"new": 1}},
    "no-seed": {
        "made_by": "x", "options": {"start": "random"},
        "tensors": {"new": [f"model.layers.{layer}.self_attn.g_proj.weight" for layer in range(3)]},
    },
    "odd-source": {"made_by": "x", "options": {}, "tensors": {"new": []}, "source": "x"},
    "odd-config": {"made_by": "x", "options": {}, "tensors": {"new": []}, "source": {"config.json": "[]"}},
    "odd-model-type": {
        "made_by": "x", "options": {}, "tensors": {"new": []}, "source": {"config.json": '{"model_type": []}'}
    },
}  # fmt: skip


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
def test_a_record_of_another_form_is_refused_or_ignored(headwise, tmp_path, record):
    (headwise / "conversion.json").write_text(json.dumps(record))
    try:
        strip_checkpoint(headwise, tmp_path / "target", force=True, verify=False)
    except CheckpointError as error:
        assert str(headwise / "conversion.json") in str(error)
        assert not (tmp_path / "target.partial").exists()


@pytest.mark.parametrize(
    "card",
    [
        b"---\nlicense: [\n---\n", b"---\n- a\n---\n", b"---\n\xff\n---\n", b"---\nlicense: {a: 1}\n---\n",
        b"---\nlanguage: 5\nlicense: 7\n---\n", b"---\n: : :\n\t---\n---\n", b"",
    ],
    ids=str,
)  # fmt: skip
def test_a_model_card_that_cannot_be_read_is_kept_as_it_is(source, tmp_path, card):
    (source / "README.md").write_bytes(card)
    retrofit_checkpoint(source, tmp_path / "target", verify=False)
    assert (tmp_path / "target" / "README.source.md").read_bytes() == card


def test_files_with_odd_names(source, tmp_path):
    try:
        for name in (b"\xff.txt", b"\xff.py", b"a\nb.txt"):
            (Path(os.fsdecode(os.path.join(os.fsencode(source), name)))).write_text("x")
    except OSError:
        pytest.skip("the file system has no such names")
    retrofit_checkpoint(source, tmp_path / "target", verify=False)
    assert len(list((tmp_path / "target").glob("*.txt"))) == 2


# Source and target


def test_a_source_that_is_not_there(tmp_path):
    with pytest.raises(CheckpointError, match="nothing/at/all is neither a folder nor a Hub id such as user/name"):
        retrofit_checkpoint(tmp_path / "nothing/at/all", tmp_path / "target")


@pytest.mark.parametrize(
    "name", ["a/b/c", "-a/b", "a--b/c", "a..b/c", "a/b ", "../nothing", "a/b.git", "ü/b", "a" * 99]
)
def test_a_malformed_hub_id(tmp_path, name, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError) as error:
        retrofit_checkpoint(name, tmp_path / "target")
    assert "is neither a folder nor a Hub id such as user/name" in str(error.value) and "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_a_hub_id_that_is_not_in_the_cache(tmp_path):
    with pytest.raises((OSError, ValueError)):
        retrofit_checkpoint("nobody/nothing", tmp_path / "target")
    assert not list(tmp_path.iterdir())


def test_a_source_that_is_a_file(source):
    file = source / "model.safetensors"
    with pytest.raises(CheckpointError, match=f"{file} is a file: name the checkpoint's folder"):
        retrofit_checkpoint(file, source.parent / "target")


def test_a_subfolder_that_is_not_there(source):
    refusal(source, str(source), "no folder 'nothing'", subfolder="nothing")


def test_the_source_as_target(source, tmp_path):
    (tmp_path / "link").symlink_to(source)
    (tmp_path / "parent").symlink_to(tmp_path)
    for target in (source, f"{source}/", tmp_path / "parent" / "source", source / "x" / ".."):
        refusal(source, "not", target=target)
    refusal(tmp_path / "link", "is the source itself", target=source)
    refusal(source, "is a link", target=tmp_path / "link")


def test_a_target_inside_the_source(source, tmp_path):
    (tmp_path / "link").symlink_to(source)
    for target in (source / "gated", source / "deep" / "gated", tmp_path / "link" / "gated"):
        refusal(source, "lies inside the source", target=target)
    refusal(tmp_path / "link", "lies inside the source", target=source / "gated")
    assert not (source / "deep").exists()


def test_a_target_around_the_source(source, tmp_path):
    outer = tmp_path / "outer"
    inner = Path(shutil.copytree(source, outer / "deep" / "inner"))
    (tmp_path / "link").symlink_to(outer)
    for path in (inner, tmp_path / "link" / "deep" / "inner"):
        refusal(path, "holds the source", target=outer)


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("journal", ["", '{"plan": "another"}\n'])
def test_the_source_is_what_an_earlier_conversion_left_unpublished(source, tmp_path, restart, journal):
    """Preparing TARGET.partial must not remove it."""
    partial = tmp_path / "target.partial"
    partial.mkdir()
    (partial / "journal.jsonl").write_text(journal)
    inner = Path(shutil.move(source, partial / "checkpoint"))
    before = everything_in(partial)
    with pytest.raises(CheckpointError):
        retrofit_checkpoint(inner, tmp_path / "target", restart=restart, verify=False)
    assert everything_in(partial) == before and not (tmp_path / "target").exists()


def test_the_source_is_the_folder_to_prepare_in(source, tmp_path):
    inner = source.rename(tmp_path / "target.partial")
    before = everything_in(inner)
    for restart in (False, True):
        with pytest.raises(CheckpointError, match="target.partial"):
            retrofit_checkpoint(inner, tmp_path / "target", restart=restart, verify=False)
    assert everything_in(inner) == before and not (tmp_path / "target").exists()


@pytest.mark.parametrize("restart", [False, True])
def test_a_folder_to_prepare_in_that_is_somebody_elses(source, tmp_path, restart):
    partial = tmp_path / "target.partial"
    (partial / "checkpoint").mkdir(parents=True)
    (partial / "checkpoint" / "thesis.txt").write_text("x")
    with pytest.raises(CheckpointError, match=f"{partial} exists and is not an unfinished conversion: move it away"):
        retrofit_checkpoint(source, tmp_path / "target", restart=restart)
    assert (partial / "checkpoint" / "thesis.txt").read_text() == "x"


@pytest.mark.parametrize("kind", ["file", "link", "link to nothing"])
def test_a_folder_to_prepare_in_that_is_no_folder(source, tmp_path, kind):
    partial, elsewhere = tmp_path / "target.partial", tmp_path / "elsewhere"
    if kind == "file":
        partial.write_text("x")
    else:
        if kind == "link":
            (elsewhere / "checkpoint").mkdir(parents=True)
            (elsewhere / "checkpoint" / "thesis.txt").write_text("x")
            (elsewhere / "journal.jsonl").write_text("")
        partial.symlink_to(elsewhere)
    before = everything_in(tmp_path)
    with pytest.raises((OSError, ValueError)) as error:
        retrofit_checkpoint(source, tmp_path / "target", verify=False)
    assert str(partial) in str(error.value)
    assert everything_in(tmp_path) == before


def test_a_target_that_exists(source, tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    (target / "thesis.txt").write_text("x")
    refusal(source, str(target), "exists and is not empty", "remove it, or name another", target=target)
    for convert in (retrofit_checkpoint, strip_checkpoint):
        with pytest.raises(ValueError):
            convert(source, target, restart=True)
    assert [path.name for path in target.iterdir()] == ["thesis.txt"]


def test_a_target_that_is_a_file(source, tmp_path):
    (tmp_path / "target").write_text("x")
    refusal(source, str(tmp_path / "target"), "not a folder", "name another")
    assert (tmp_path / "target").read_text() == "x"


@pytest.mark.parametrize("to", ["nothing", "empty"])
def test_a_target_that_is_a_link(source, tmp_path, to):
    (tmp_path / "empty").mkdir()
    (tmp_path / "target").symlink_to(to)
    refusal(source, str(tmp_path / "target"), "is a link", "name a new folder")
    assert not (tmp_path / "nothing").exists() and not list((tmp_path / "empty").iterdir())


@pytest.mark.parametrize("target", ["", ".", "/", ".."])
def test_a_target_without_a_name(source, target, tmp_path, monkeypatch):
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    with pytest.raises(CheckpointError, match="name (a new|another) folder|remove it, or name"):
        retrofit_checkpoint(source, target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "work"] and not list(work.iterdir())


def test_a_target_below_a_file(source, tmp_path):
    (tmp_path / "file").write_text("x")
    refusal(source, str(tmp_path / "file"), "not a folder that can be written to", target=tmp_path / "file" / "target")


def test_a_target_below_a_link_to_nothing(source, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    target = tmp_path / "link" / "target"
    with pytest.raises((OSError, ValueError)):
        retrofit_checkpoint(source, target, verify=False)
    assert not (tmp_path / "nothing").exists()


def test_a_folder_that_cannot_be_written_to(source, tmp_path, monkeypatch):
    parent = tmp_path / "parent"
    parent.mkdir()
    # What the superuser is told differs, so the answer is given here.
    monkeypatch.setattr(os, "access", lambda path, mode, **_: not (mode & os.W_OK and Path(path) == parent))
    refusal(source, str(parent), "written to", "name another target", target=parent / "target")
    refusal(source, str(parent), "written to", target=parent / "new" / "deep" / "target")
    assert not list(parent.iterdir())


def test_too_little_space(source, tmp_path, monkeypatch):
    asked = []

    def usage(path):
        asked.append(Path(path))
        return shutil._ntuple_diskusage(10**6, 10**6 - 1000, 1000)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    target = tmp_path / "new" / "target"
    refusal(source, str(tmp_path), "MB free", "are needed", "make room", target=target)
    assert asked == [tmp_path] and not target.parent.exists()


# Arguments


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"attn_gate": "both"}, "`attn_gate` must be 'headwise' or 'elementwise', got 'both'"),
        ({"attn_gate": None}, "got None"),
        ({"attn_gate": ["headwise"]}, "got ['headwise']"),
        ({"start": "zero"}, "`start` must be one of 'scale', 'fold', 'random', got 'zero'"),
        ({"start": None}, "got None"),
        ({"layers": []}, "`layers` must be between 0 and 2"),
        ({"layers": [3]}, "`layers` must be between 0 and 2, counted from 0, got 3"),
        ({"layers": [-1]}, "got -1"),
        ({"layers": [0, 1, 2, 3]}, "got 3"),
        ({"layers": ["0"]}, "`layers`"),
        ({"layers": [0, "1"]}, "`layers`"),
        ({"layers": [0.5]}, "`layers`"),
        ({"layers": [1.0]}, "layers"),
        ({"layers": [True]}, "layers"),
        ({"layers": 1}, "`layers`"),
        ({"layers": "1"}, "`layers`"),
        ({"layers": [None]}, "`layers`"),
    ],
    ids=str,
)
def test_wrong_arguments(source, options, words):
    refusal(source, words, verify=False, **options)


# Gated sources


def test_gates_of_that_kind_are_there_already(gated):
    gate = json.loads((gated / "config.json").read_text())["attn_gate"]
    refusal(gated, str(gated / "config.json"), f"it has {gate} gates in all these layers already", attn_gate=gate)


def test_elementwise_gates_cannot_become_headwise(models, tmp_path):
    source = Path(shutil.copytree(models / "elementwise", tmp_path / "source"))
    refusal(source, str(source / "config.json"), "cannot be made headwise", "strip them first")


def test_layers_that_leave_gates_out(headwise):
    refusal(headwise, "layers [0, 2] have gates already", "name them in `layers` too, or strip", layers=[1])


def test_a_scale_that_is_no_power_of_two(headwise):
    change_config(headwise, attn_gate_scale=3.0, attn_gate_layers=[0])
    weights = weights_of(headwise)
    save(headwise, {name: w for name, w in weights.items() if not re.search(r"layers\.[12]\..*g_proj", name)})
    refusal(
        headwise, str(headwise / "config.json"), "attn_gate_scale 3", "not a power of two", "strip the gates first"
    )


@pytest.mark.parametrize(
    "field", [("attn_gate", "both"), ("attn_gate_scale", -1.0), ("attn_gate_layers", [3])], ids=str
)
def test_a_native_config_with_a_wrong_gate(headwise, field):
    refusal(change_config(headwise, **dict([field])), str(headwise / "config.json"), field[0], attn_gate="elementwise")


GATE = "model.layers.1.self_attn.g_proj.weight"


@pytest.mark.parametrize("shape", [(5, 40), (7, 40), (6, 41), (0, 40), (6, 0), (60, 40), (240,), ()], ids=str)
@pytest.mark.parametrize("convert", [retrofit_checkpoint, strip_checkpoint])
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_gate_of_another_shape(headwise, shape, convert, value):
    change_weights(headwise, **{GATE: torch.full(shape, value)})
    options = {"force": True} if convert is strip_checkpoint else {"attn_gate": "elementwise"}
    file = headwise / "model.safetensors"
    refusal(headwise, str(file), f"{GATE} is {list(shape)}", convert=convert, verify=False, **options)


@pytest.mark.parametrize("which", ["one", "all"])
@pytest.mark.parametrize("convert", [retrofit_checkpoint, strip_checkpoint])
@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_missing_gates(headwise, which, convert, form):
    names = [GATE] if which == "one" else [name for name in weights_of(headwise) if "g_proj" in name]
    change_weights(headwise, drop=names)
    if form == "bin":
        as_pickle(headwise)
    options = {"force": True} if convert is strip_checkpoint else {"attn_gate": "elementwise"}
    refusal(headwise, str(headwise), "g_proj.weight is missing", convert=convert, verify=False, **options)


@pytest.mark.parametrize("convert", [retrofit_checkpoint, strip_checkpoint])
def test_missing_biases_of_gates(tmp_path, convert):
    build("headwise", attn_gate_bias=True).save_pretrained(tmp_path / "source")
    change_weights(tmp_path / "source", drop=[GATE.replace("weight", "bias")])
    options = {"force": True} if convert is strip_checkpoint else {"attn_gate": "elementwise"}
    words = "layers.1.self_attn.g_proj.bias is missing"
    refusal(tmp_path / "source", str(tmp_path / "source"), words, convert=convert, verify=False, **options)


@pytest.mark.parametrize("form", ["safetensors", "bin"])
@pytest.mark.parametrize("name", ["1B_gate_headwise", "1B_gate_elementwise"])
@pytest.mark.parametrize("rows", [0, 64, 67, 69, 128])
@pytest.mark.parametrize("convert", [retrofit_checkpoint, strip_checkpoint])
def test_a_packed_projection_of_another_number_of_rows(tmp_path, name, rows, convert, form):
    """Rows past its end would be those of the tensors behind it."""
    source = Path(shutil.copytree(RELEASED / name, tmp_path / "source"))
    weights = torch.load(source / "pytorch_model.bin", weights_only=True)
    if weights[QUERY].shape[0] == rows:
        pytest.skip("these are its rows")
    weights[QUERY] = torch.ones(rows, 48, dtype=weights[QUERY].dtype)
    file = source / "pytorch_model.bin"
    if form == "bin":
        torch.save(weights, file)
    else:
        file.unlink()
        file = save(source, weights) / "model.safetensors"
    options = {"force": True} if convert is strip_checkpoint else {"layers": None, "attn_gate": "elementwise"}
    if name == "1B_gate_elementwise" and convert is retrofit_checkpoint:
        pytest.skip("its gates are there already")
    refusal(source, str(file), f"{QUERY} is [{rows}, 48]", "config.json", convert=convert, verify=False, **options)


@pytest.mark.parametrize("convert", [retrofit_checkpoint, strip_checkpoint])
@pytest.mark.parametrize("shape", [(68, 0), (68,), (68, 47), ()], ids=str)
def test_a_packed_projection_of_another_width(tmp_path, convert, shape):
    source = Path(shutil.copytree(RELEASED / "1B_gate_headwise", tmp_path / "source"))
    file = source / "pytorch_model.bin"
    torch.save({**torch.load(file, weights_only=True), QUERY: torch.ones(shape)}, file)
    options = {"force": True} if convert is strip_checkpoint else {"attn_gate": "elementwise"}
    refusal(source, str(file), f"{QUERY} is {list(shape)}", convert=convert, verify=False, **options)


def test_a_packed_gate_and_one_apart(tmp_path):
    source = Path(shutil.copytree(RELEASED / "1B_gate_headwise", tmp_path / "source"))
    file = source / "pytorch_model.bin"
    torch.save({**torch.load(file, weights_only=True), GATE: torch.zeros(4, 48)}, file)
    refusal(source, str(file), GATE, attn_gate="elementwise", verify=False)
    refusal(source, str(file), "self_attn", convert=strip_checkpoint, force=True, verify=False)


# Stripping


@pytest.mark.parametrize("model", ["llama", "qwen3"])
def test_nothing_to_strip(models, tmp_path, model):
    source = Path(shutil.copytree(models / model, tmp_path / "source"))
    words = (str(source / "config.json"), f"a {model} model without gates", "nothing to strip")
    refusal(source, *words, convert=strip_checkpoint)
    refusal(source, *words, convert=strip_checkpoint, force=True)


def test_nothing_to_strip_from_the_baseline(tmp_path):
    source = Path(shutil.copytree(RELEASED / "1B_baseline", tmp_path / "source"))
    refusal(source, "without gates", "nothing to strip", convert=strip_checkpoint)


@pytest.mark.parametrize("model_type", ["qwen3_next", "afmoe", "gpt_oss", "no_such"])
def test_stripping_another_family(headwise, model_type):
    change_config(headwise, model_type=model_type)
    refusal(headwise, str(headwise / "config.json"), repr(model_type), convert=strip_checkpoint, force=True)


def test_gates_that_have_moved(gated):
    line = refusal(gated, str(gated), "the gates have moved", "(--force)", convert=strip_checkpoint)
    assert re.search(r"outputs\b.* by .*\d\.\d", line)


def test_stripping_a_scale_that_is_no_power_of_two(headwise):
    change_config(headwise, attn_gate_scale=3.0)
    change_weights(headwise, **{n: torch.zeros_like(w) for n, w in weights_of(headwise).items() if "g_proj" in n})
    refusal(headwise, str(headwise / "config.json"), "not a power of two", "--force", convert=strip_checkpoint)


def test_stripping_a_damaged_file(headwise):
    file = headwise / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    refusal(headwise, str(file), "cut short", convert=strip_checkpoint)


@pytest.mark.parametrize("start", ["fold"])
def test_values_that_do_not_bear_doubling(source, start):
    change_weights(source, **{OUTPUT: torch.full((40, 40), 3e38)})
    refusal(source, str(source / "model.safetensors"), OUTPUT, "times 2 do not fit float32", "scale", start=start)


# In memory


@pytest.mark.parametrize("what", [None, 1, "folder", {}, nn.Linear(2, 2), LlamaConfig(**SIZES)], ids=str)
def test_something_else_than_a_model(what):
    with pytest.raises(CheckpointError, match="`model` must be a transformers model, got"):
        retrofit(what)


def in_memory(model, *words, **options):
    state = {name: parameter.data_ptr() for name, parameter in getattr(model, "named_parameters", dict)()}
    with pytest.raises(Exception) as error:
        retrofit(model, **options)
    assert isinstance(error.value, ValueError), repr(error.value)
    line = str(error.value)
    assert line.isprintable() and all(word in line for word in words), line
    assert state == {name: parameter.data_ptr() for name, parameter in model.named_parameters()}


def test_a_quantised_model():
    for flag in ("hf_quantizer", "is_quantized"):
        model = llama()
        setattr(model, flag, True)
        in_memory(model, "LlamaForCausalLM is quantised", "load it unquantised")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=str)
def test_a_model_of_another_dtype(dtype):
    model = llama()
    query = model.model.layers[1].self_attn.q_proj
    query.weight = nn.Parameter(query.weight.detach().to(dtype), requires_grad=False)
    in_memory(model, "model.layers.1.self_attn.q_proj.weight")


@pytest.mark.parametrize("kind", ["LoraConfig", "IA3Config", "LoHaConfig"])
def test_a_model_with_adapters(kind):
    peft = pytest.importorskip("peft")
    targets = {"target_modules": ["q_proj", "up_proj"]}
    if kind == "IA3Config":
        targets["feedforward_modules"] = ["up_proj"]
    config = getattr(peft, kind)(**targets)
    model = llama()
    wrapped = peft.get_peft_model(model, config)
    in_memory(wrapped, "PeftModel", "merge_and_unload")
    in_memory(model, "LlamaForCausalLM has adapters", "merge or remove")
    in_memory(peft.inject_adapter_in_model(config, llama()), "LlamaForCausalLM has adapters", "merge or remove")


def test_a_model_that_says_it_has_adapters():
    model = llama()
    model._hf_peft_config_loaded = True
    in_memory(model, "LlamaForCausalLM has adapters", "merge or remove")


def test_a_model_of_a_class_that_is_not_stock():
    class Mine(LlamaForCausalLM):
        pass

    in_memory(Mine(LlamaConfig(**SIZES)), "llama, mistral, qwen2, qwen3", "Mine")


def test_a_model_of_a_class_that_is_named_as_one_of_ours():
    class GatedQwenForCausalLM(gated_qwen.GatedQwenForCausalLM):
        pass

    in_memory(GatedQwenForCausalLM(build(None).config), "llama, mistral, qwen2, qwen3", "GatedQwenForCausalLM")


@pytest.mark.parametrize("model_class", ["GPT2LMHeadModel", "GemmaForCausalLM"])
def test_a_model_of_another_family(model_class):
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 11} if "GPT2" in model_class else SIZES
    model_class = getattr(transformers, model_class)
    in_memory(model_class(model_class.config_class(**sizes)), "llama, mistral, qwen2, qwen3", model_class.__name__)


def test_a_model_that_is_offloaded():
    with torch.device("meta"):
        in_memory(LlamaForCausalLM(LlamaConfig(**SIZES)), "offloaded", "retrofit_checkpoint")
    model = llama()
    model.model.layers[2].mlp.up_proj.to("meta")
    in_memory(model, "offloaded", "retrofit_checkpoint")


def test_a_model_with_a_head_that_there_is_not():
    model = llama()
    model.__class__ = type("LlamaForSomething", (LlamaForCausalLM,), {"__module__": LlamaForCausalLM.__module__})
    in_memory(model, "LlamaForSomething")


@pytest.mark.parametrize("change", ["parameter", "layers more", "layers fewer", "wider head", "norm removed"])
def test_a_model_that_was_changed_after_it_was_built(change):
    """What has no place in the result must not be left behind in silence."""
    model = qwen3()
    layers = model.model.layers
    if change == "parameter":
        layers[1].self_attn.sinks = nn.Parameter(torch.ones(4))
        words = "model.layers.1.self_attn.sinks"
    elif change == "layers more":
        layers.append(layers[0])
        words = "model.layers.3."
    elif change == "layers fewer":
        del layers[2]
        words = "model.layers.2."
    elif change == "wider head":
        model.lm_head = nn.Linear(40, 140, bias=False)
        words = "lm_head.weight"
    else:
        layers[1].self_attn.q_norm = nn.Identity()
        words = "model.layers.1.self_attn.q_norm.weight"
    in_memory(model, "Qwen3ForCausalLM", words)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"attn_gate": "both"}, "'headwise' or 'elementwise', got 'both'"),
        ({"start": "zero"}, "'scale', 'fold', 'random', got 'zero'"),
        ({"layers": []}, "`layers` must be between 0 and 2"),
        ({"layers": [3]}, "got 3"),
        ({"layers": [0, "1"]}, "`layers`"),
        ({"layers": 1}, "`layers`"),
    ],
    ids=str,
)
def test_wrong_arguments_for_a_model(options, words):
    in_memory(llama(), words, **options)


def test_a_model_whose_gates_are_there_already():
    in_memory(build("headwise"), "headwise gates in all these layers already", "nothing to do")
    in_memory(build("elementwise"), "cannot be made headwise")
    in_memory(build("headwise"), "layers [0, 2] have gates already", layers=[1])


def test_a_model_that_does_not_bear_doubling():
    model = llama()
    model.model.layers[1].self_attn.o_proj.weight.data.fill_(3e38)
    in_memory(model, "model.layers.1.self_attn.o_proj.weight", "times 2 do not fit", "start='scale'", start="fold")


# The command line


def status_and_line(capsys, *arguments) -> tuple[int, str]:
    status = cli.main([str(argument) for argument in arguments])
    output, errors = capsys.readouterr()
    assert not output, output
    assert errors.endswith("\n") and len(errors.splitlines()) == 1, errors
    return status, errors


def drop_config(folder):
    (folder / "config.json").unlink()


def cut_weights(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


REFUSED = {
    "no-config": (drop_config, "has no config.json"),
    "cut": (cut_weights, "cut short"),
    "other-family": (lambda folder: change_config(folder, model_type="gpt_oss"), "learned attention sinks"),
    "model-type-list": (lambda folder: change_config(folder, model_type=["llama"]), "model_type"),
    "huge": (lambda folder: change_config(folder, vocab_size=10**30), "vocab_size"),
    "shape": (lambda folder: change_config(folder, vocab_size=132), "belongs to other weights"),
    "newline-in-a-name": (lambda folder: change_weights(folder, **{"a\nb": torch.ones(2)}), "no place"),
    "parameters": (lambda folder: torch.save({QUERY: [1]}, as_pickle(folder) / "pytorch_model.bin"), "plain tensors"),
}


@pytest.mark.parametrize(("change", "words"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("how", [[], ["--dry-run"]], ids=["", "dry-run"])
def test_refused_at_the_command_line(source, tmp_path, capsys, change, words, how):
    change(source)
    status, line = status_and_line(capsys, "retrofit", source, tmp_path / "target", "--quiet", *how)
    assert status == 1 and line.startswith("gated-qwen retrofit: ") and words in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


@pytest.mark.parametrize("how", [[], ["--dry-run"], ["--force"]], ids=["", "dry-run", "force"])
def test_stripping_refused_at_the_command_line(source, tmp_path, capsys, how):
    status, line = status_and_line(capsys, "strip", source, tmp_path / "target", *how)
    assert status == 1 and line.startswith("gated-qwen strip: ") and "nothing to strip" in line


def test_missing_gates_at_the_command_line(headwise, tmp_path, capsys):
    change_weights(headwise, drop=[GATE])
    status, line = status_and_line(capsys, "strip", headwise, tmp_path / "target", "--force")
    assert status == 1 and "g_proj.weight is missing" in line


@pytest.mark.parametrize("source", ["nobody/nothing", "no-such-folder/at/all", "a b", ""])
@pytest.mark.parametrize("command", ["retrofit", "strip"])
def test_no_source_at_the_command_line(tmp_path, capsys, monkeypatch, command, source):
    monkeypatch.chdir(tmp_path)
    status, line = status_and_line(capsys, command, source, "target")
    assert status == 1 and line.startswith(f"gated-qwen {command}: ")
    assert not list(tmp_path.iterdir())


def test_a_taken_target_at_the_command_line(source, tmp_path, capsys):
    status, line = status_and_line(capsys, "retrofit", source, source)
    assert status == 1 and "is the source itself" in line
    status, line = status_and_line(capsys, "retrofit", source, source / "x")
    assert status == 1 and "lies inside the source" in line
    status, line = status_and_line(capsys, "retrofit", source, tmp_path / "target", "--layers", "3")
    assert status == 1 and "`layers` must be between 0 and 2" in line


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["no-such-command"],
        ["retrofit"],
        ["retrofit", "SOURCE"],
        ["retrofit", "SOURCE", "TARGET", "more"],
        ["retrofit", "SOURCE", "TARGET", "--gate", "both"],
        ["retrofit", "SOURCE", "TARGET", "--start", "zero"],
        ["retrofit", "SOURCE", "TARGET", "--seed", "x"],
        ["retrofit", "SOURCE", "TARGET", "--layers", ""],
        ["retrofit", "SOURCE", "TARGET", "--layers", "a"],
        ["retrofit", "SOURCE", "TARGET", "--layers", "3-1"],
        ["retrofit", "SOURCE", "TARGET", "--layers", "-1"],
        ["retrofit", "SOURCE", "TARGET", "--layers", "0,,1"],
        ["retrofit", "SOURCE", "TARGET", "--force"],
        ["strip", "SOURCE"],
        ["strip", "SOURCE", "TARGET", "--gate", "headwise"],
    ],
    ids=" ".join,
)
def test_wrong_usage(arguments, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as error:
        cli.main(arguments)
    assert error.value.code == 2 and "usage: gated-qwen" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


# What lies at the place where a conversion is prepared


def test_what_only_looks_like_a_finished_conversion_stays(source, tmp_path):
    target, partial = tmp_path / "taken", tmp_path / "taken.partial"
    target.mkdir()
    partial.mkdir()
    (target / "a").write_text("a")
    (partial / "journal.jsonl").write_text('{"day": 1}\n')
    (partial / "thesis.txt").write_text("all of it")
    before = everything_in(tmp_path)
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        retrofit_checkpoint(source, target)
    (partial / "thesis.txt").unlink()
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        retrofit_checkpoint(source, target)
    assert everything_in(tmp_path).items() == {k: v for k, v in before.items() if "thesis" not in k}.items()


@pytest.mark.parametrize("name", ["journal.new", "journal.jsonl"])
@pytest.mark.parametrize("restart", [False, True])
def test_a_link_in_place_of_a_journal_is_not_written_through(source, tmp_path, name, restart):
    partial = tmp_path / "target.partial"
    partial.mkdir()
    (partial / name).symlink_to(source / "config.json")
    before = everything_in(source)
    with pytest.raises(CheckpointError, match="not an unfinished conversion"):
        retrofit_checkpoint(source, tmp_path / "target", restart=restart)
    assert everything_in(source) == before and (partial / name).is_symlink()


@pytest.mark.parametrize("place", ["target.partial/checkpoint", "target"])
def test_weights_that_lie_where_the_target_is_prepared_stay(source, tmp_path, place):
    weights = tmp_path / place / "model.safetensors"
    weights.parent.mkdir(parents=True)
    (source / "model.safetensors").rename(weights)
    (source / "model.safetensors").symlink_to(weights)
    if "partial" in place:
        (tmp_path / "target.partial" / "journal.jsonl").write_text('{"plan": "x"}\n')
    data = weights.read_bytes()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is a link into|not empty"):
        retrofit_checkpoint(source, tmp_path / "target", restart=True)
    assert weights.read_bytes() == data


@pytest.mark.parametrize("name", ["README.md", "conversion.json", "model.safetensors.index.json"])
def test_a_folder_named_like_a_file_that_is_written(source, name):
    (source / name).mkdir()
    (source / name / "file.txt").write_text("a")
    refusal(source, "in a folder named like a file", name)


# Values that only show when the model runs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [40000.0, 50.5 * 2**-24])
def test_fold_heeds_the_dtype_that_the_config_names(source, dtype, value):
    """Doubled and then rounded to float16, it is infinite, or not the double of what it was rounded before."""
    change_config(source, dtype="float16")
    weights = {name: weight.to(dtype) for name, weight in weights_of(source).items()}
    weights = {n: torch.where(w.abs() < 1e-3, 0.5, w) if "o_proj" in n else w for n, w in weights.items()}
    weights[OUTPUT] = torch.full_like(weights[OUTPUT], 0.5)
    save(source, weights)
    plan = gated_qwen.plan_retrofit(source, start="fold", headers_only=False)
    assert 0 < plan.deviation < 0.1  # what float16 can lose running
    weights[OUTPUT][3, 4] = value
    save(source, weights)
    refusal(source, OUTPUT, "float16", start="fold")


@pytest.mark.parametrize("file", ["generation_config.json"])
@pytest.mark.parametrize("content", ["[]", "5", '{"watermarking_config": {"a": 1}}', '{"max_new_tokens": -5}'])
def test_a_file_that_transformers_cannot_read_is_named(source, tmp_path, file, content):
    (source / file).write_text(content)
    check_cannot_run(source, tmp_path)


def test_a_config_that_transformers_cannot_run_is_named(source, tmp_path):
    check_cannot_run(change_config(source, return_dict=False), tmp_path)


def check_cannot_run(source: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="transformers cannot run .*--no-verify") as error:
        retrofit_checkpoint(source, tmp_path / "target")
    assert str(source) in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize(
    "fields",
    [
        {"attn_implementation": "eager"},
        {"_attn_implementation": "eager"},
        {"attn_implementation": "flash_attention_2"},
        {"qkv_bias": True},
    ],
)
def test_settings_of_running_do_not_get_in_the_way(source, tmp_path, fields):
    record = retrofit_checkpoint(change_config(source, **fields), tmp_path / "target", verify=True)
    assert record["verification"]["max_difference"] == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"layer_types": 5},
        {"layer_types": True},
        {"max_position_embeddings": 2**63},
        {"max_position_embeddings": 10**30},
        {"per_layer_config": {"1": {"sliding_window": 4}}},
    ],
)
@pytest.mark.parametrize("model", ["source", "qwen3"])
def test_a_field_of_an_odd_kind(source, models, tmp_path, model, fields):
    folder = source if model == "source" else Path(shutil.copytree(models / "qwen3", tmp_path / "qwen3"))
    refusal(change_config(folder, **fields), *(fields if "max" in str(fields) else ()))


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "base_model.model.", "language_model.", "foo."])
def test_a_prefix_that_transformers_does_not_know(source, prefix):
    save(source, {prefix + name: weight for name, weight in weights_of(source).items()})
    for weights in source.glob("*.safetensors"):
        assert weights.exists()
    refusal(source)


def test_a_pickle_of_negative_views(source):
    weights = weights_of(source)
    weights[QUERY] = torch._neg_view(weights[QUERY])
    torch.save(weights, source / "pytorch_model.bin")
    (source / "model.safetensors").unlink()
    refusal(source, "pytorch_model.bin", QUERY)


def test_a_big_endian_pickle_is_read_as_torch_reads_it(source, tmp_path):
    """Its first elements are zero, so that no byte of these tells the order."""
    weights = weights_of(source)
    for weight in weights.values():
        weight.view(-1)[0] = 0
    swapped = {n: w.view(torch.uint8).view(-1, 4).flip(-1).reshape(-1).view(w.dtype) for n, w in weights.items()}
    swapped = {name: weight.view(weights[name].shape) for name, weight in swapped.items()}
    torch.save(swapped, tmp_path / "little.bin")
    with zipfile.ZipFile(tmp_path / "little.bin") as old, zipfile.ZipFile(source / "pytorch_model.bin", "w") as new:
        for record in old.infolist():
            data = b"big" if record.filename.endswith("/byteorder") else old.read(record)
            new.writestr(record.filename, data)
    (source / "model.safetensors").unlink()
    loaded = torch.load(source / "pytorch_model.bin", weights_only=True)
    assert torch.equal(loaded[QUERY], weights[QUERY])
    retrofit_checkpoint(source, tmp_path / "target", verify=False)
    found = weights_of(tmp_path / "target")
    assert all(torch.equal(found[name], weight) for name, weight in weights.items())


def test_settings_of_generation_in_the_config_come_through(source, tmp_path):
    change_config(source, do_sample=True, temperature=0.3, top_k=7, repetition_penalty=1.5)
    (source / "generation_config.json").unlink()
    stock = transformers.AutoModelForCausalLM.from_pretrained(source).generation_config
    retrofit_checkpoint(source, tmp_path / "target")
    gated = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "target").generation_config
    names = ("do_sample", "temperature", "top_k", "repetition_penalty", "bos_token_id", "eos_token_id")
    assert {name: getattr(gated, name) for name in names} == {name: getattr(stock, name) for name in names}
    assert gated.top_k == 7


def test_a_tokenizer_that_does_not_know_the_sample_text(source, tmp_path):
    tokenizer = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
                 "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
                 "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "[UNK]"}}  # fmt: skip
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    (source / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    record = retrofit_checkpoint(source, tmp_path / "target")
    assert record["same_token_ids"] is True and "text" not in record["verification"]["inputs"]


def test_a_shape_of_a_million_sizes_makes_a_short_line(source):
    file = source / "model.safetensors"
    entry = {"dtype": "F32", "shape": [1] * 300_000, "data_offsets": [0, 8]}
    header = json.dumps({"a": entry}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    assert len(refusal(source, "does not fill")) < 1000


def test_a_folder_beyond_the_source(source, models):
    refusal(source, "no folder within", subfolder="../llama")
    refusal(source, "no folder within", subfolder="/tmp")


def test_a_model_in_place_of_its_folder(models, tmp_path):
    with pytest.raises(ValueError, match="must be a folder or a Hub id, got a LlamaForCausalLM"):
        retrofit_checkpoint(llama(), tmp_path / "target")


@pytest.mark.parametrize(
    "change",
    [
        lambda record: record["source"].update({"config.json": "[]"}),
        lambda record: record["source"].update({"config.json": "null"}),
        lambda record: record["source"].update({"config.json": '{"model_type": "llama", "layer_types": 5}'}),
        lambda record: record["tensors"].update({"new": [[]]}),
        lambda record: record["tensors"].update({"new": [{}]}),
        lambda record: record["files"].update({"model-00001-of-00002.safetensors": None}),
        lambda record: record["files"].update({"model-00001-of-00002.safetensors": {}}),
        lambda record: record["files"]["model-00001-of-00002.safetensors"].update({"crc32": [[]]}),
    ],
)
def test_an_odd_record_is_refused_or_not_used(source, tmp_path, change):
    gated = tmp_path / "gated"
    retrofit_checkpoint(source, gated, start="random", verify=False)
    record = json.loads((gated / "conversion.json").read_text())
    change(record)
    (gated / "conversion.json").write_text(json.dumps(record))
    try:
        strip_checkpoint(gated, tmp_path / "stripped", force=True, verify=False)
    except CheckpointError as error:
        assert str(error).isprintable() and "conversion.json is damaged" in str(error)
