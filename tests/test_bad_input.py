"""Checkpoints that are damaged, incomplete, of another family, or beside a wrong config: each gives one clear line."""

import contextlib
import itertools
import json
import os
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support import RELEASED, RELEASED_NAMES, randomise, tiny_config
from transformers import (
    AfmoeConfig,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
)

from gated_qwen import GatedQwenConfig, GatedQwenForCausalLM, GatedQwenModel

HEADWISE = RELEASED / "1B_gate_headwise"
PACKED_ROWS = {"1B_baseline": 64, "1B_gate_headwise": 68, "1B_gate_elementwise": 128}
gated = pytest.mark.parametrize("gate", ["headwise", "elementwise"])


def load(folder, **kwargs):
    return AutoModelForCausalLM.from_pretrained(folder, **kwargs)


def refusal(folder, loader=load, **kwargs) -> str:
    """The one line that says why `folder` was not loaded."""
    with pytest.raises((OSError, RuntimeError, ValueError)) as error:
        loader(folder, **kwargs)
    line = str(error.value)
    assert "\n" not in line.strip(), line
    return line


def native(folder, gate="headwise", **fields) -> Path:
    randomise(GatedQwenForCausalLM(tiny_config(attn_gate=gate, **fields))).save_pretrained(folder)
    return folder


def change_config(folder, **fields) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
    return folder


def change_weights(folder, add=None, drop=()) -> Path:
    weights = load_file(folder / "model.safetensors")
    weights = {key: value for key, value in weights.items() if not any(part in key for part in drop)}
    save_file({**weights, **(add or {})}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def cut(file, size):
    """Keep the first `size` bytes, or drop the last `-size`."""
    file.write_bytes(file.read_bytes()[:size])


@pytest.fixture
def headwise(tmp_path) -> Path:
    """A copy of the released headwise checkpoint."""
    return Path(shutil.copytree(HEADWISE, tmp_path / "headwise"))


# Damaged files


@pytest.mark.parametrize("size", [0, 1, 4, 100, 1000, 100_000, -2000, -100, -22, -1])
def test_a_pickle_that_is_cut_short(headwise, size):
    cut(headwise / "pytorch_model.bin", size)
    line = refusal(headwise)
    assert str(headwise / "pytorch_model.bin") in line and "cut short" in line and "get it again" in line


NO_PICKLES = {
    "text": b"hello, this is text",
    "lfs-pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 3\n",
    "html": b"<!DOCTYPE html>",
    "zeros": bytes(64),
    # Read as pickles, these end in a struct.error, a UnicodeDecodeError and an IndexError.
    "half-a-number": b"GM_",
    "no-utf-8": b"U\x8cg\xb1\xe5-\xd4\xd1",
    "empty-stack": b"Q.",
}


@pytest.mark.parametrize("content", NO_PICKLES.values(), ids=NO_PICKLES)
def test_something_else_under_the_name_of_the_pickle(headwise, content):
    (headwise / "pytorch_model.bin").write_bytes(content)
    line = refusal(headwise)
    assert str(headwise / "pytorch_model.bin") in line and "damaged" in line and "get it again" in line


class Runs:
    """Pickled, it asks for a command to be run."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch '{self.marker}'",)


def as_zip(content, file):
    torch.save(content, file)


def as_legacy(content, file):
    torch.save(content, file, _use_new_zipfile_serialization=False)


def as_plain_pickle(content, file):
    file.write_bytes(pickle.dumps(content, protocol=2))


@pytest.mark.parametrize("write", [as_zip, as_legacy, as_plain_pickle])
@pytest.mark.parametrize("loader", [load, GatedQwenForCausalLM.from_pretrained, AutoModel.from_pretrained])
def test_a_pickle_that_would_run_a_command_is_refused(headwise, tmp_path, write, loader):
    marker = tmp_path / "was run"
    file = headwise / "pytorch_model.bin"
    write({"model.norm.weight": Runs(marker)}, file)
    line = refusal(headwise, loader)
    assert not marker.exists()
    assert str(file) in line and "posix.system" in line and "get it again" in line

    with contextlib.suppress(RuntimeError):  # torch's complaint that it is no torch pickle comes too late
        torch.load(file, weights_only=False)
    assert marker.exists(), "the pickle is harmless, so the test shows nothing"


@pytest.mark.parametrize("loader", [load, GatedQwenForCausalLM.from_pretrained])
def test_no_argument_makes_a_pickle_run(headwise, tmp_path, loader):
    marker = tmp_path / "was run"
    as_zip({"model.norm.weight": Runs(marker)}, headwise / "pytorch_model.bin")
    assert "weights_only" in refusal(headwise, loader, weights_only=False)
    refusal(headwise, loader, trust_remote_code=True)
    assert not marker.exists()


def test_a_whole_model_in_a_pickle_is_refused(headwise):
    torch.save(GatedQwenForCausalLM(tiny_config()), headwise / "pytorch_model.bin")
    line = refusal(headwise)
    assert str(headwise / "pytorch_model.bin") in line and "GatedQwenForCausalLM" in line


def test_a_pickle_of_something_else_than_names_and_tensors(headwise):
    for content in ([torch.zeros(3)], {"model.norm.weight": 1.0}, torch.zeros(3)):
        torch.save(content, headwise / "pytorch_model.bin")
        line = refusal(headwise)
        assert str(headwise / "pytorch_model.bin") in line and "tensors" in line and "get it again" in line


@pytest.mark.parametrize("form", ["bin", "evil bin", "safetensors"])
def test_a_damaged_file_beside_a_config_without_a_dtype(tmp_path, form):
    """transformers then looks into the file before it loads it."""
    folder = native(tmp_path / "native") if form == "safetensors" else shutil.copytree(HEADWISE, tmp_path / "headwise")
    change_config(folder, dtype=None, torch_dtype=None)
    if form == "evil bin":
        as_zip({"model.norm.weight": Runs(tmp_path / "was run")}, folder / "pytorch_model.bin")
    else:
        cut(folder / ("model.safetensors" if form == "safetensors" else "pytorch_model.bin"), -100)
    line = refusal(folder)
    assert str(folder) in line and "get it again" in line
    assert ("posix.system" if form == "evil bin" else "cut short") in line
    assert not (tmp_path / "was run").exists()


@pytest.mark.parametrize("size", [0, 4, 8, 100, 2000, -1000, -1])
@pytest.mark.parametrize("loader", [load, GatedQwenForCausalLM.from_pretrained])
def test_safetensors_that_are_cut_short(tmp_path, size, loader):
    native(tmp_path)
    cut(tmp_path / "model.safetensors", size)
    line = refusal(tmp_path, loader)
    assert str(tmp_path / "model.safetensors") in line and "cut short" in line and "get it again" in line


def sharded(folder, form):
    if form == "safetensors":
        randomise(GatedQwenForCausalLM(tiny_config())).save_pretrained(folder, max_shard_size="60KB")
    else:
        shutil.copytree(HEADWISE, folder, dirs_exist_ok=True)
        file = folder / "pytorch_model.bin"
        weights = torch.load(file, weights_only=True)
        file.unlink()
        keys, files = sorted(weights), {}
        for number, part in (("00001", keys[:20]), ("00002", keys[20:])):
            name = f"pytorch_model-{number}-of-00002.bin"
            torch.save({key: weights[key] for key in part}, folder / name)
            files |= dict.fromkeys(part, name)
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return sorted(folder.glob("*-of-*"))


@pytest.mark.parametrize("form", ["safetensors", "bin"])
@pytest.mark.parametrize("shard", [0, 1, -1])
def test_a_missing_shard_is_named(tmp_path, form, shard):
    missing = sharded(tmp_path, form)[shard]
    missing.unlink()
    line = refusal(tmp_path)
    assert str(missing) in line and "get it again" in line


@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_a_cut_shard_is_refused(tmp_path, form):
    shard = sharded(tmp_path, form)[1]
    cut(shard, -30)
    line = refusal(tmp_path)
    assert str(shard) in line and "cut short" in line and "get it again" in line


@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_a_damaged_index_is_named(tmp_path, form):
    sharded(tmp_path, form)
    (index,) = tmp_path.glob("*.index.json")
    cut(index, 300)
    assert str(index) in refusal(tmp_path)


@pytest.mark.parametrize(
    "content", ["{}", "[]", '{"metadata": {}}', '{"weight_map": {}}', '{"metadata": {}, "weight_map": null}']
)
@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_an_index_of_another_form_is_named(tmp_path, form, content):
    sharded(tmp_path, form)
    (index,) = tmp_path.glob("*.index.json")
    index.write_text(content)
    assert f"{index} is not an index of shards" in refusal(tmp_path)


def test_a_gate_packed_and_apart_is_one_too_many(headwise):
    weights = torch.load(headwise / "pytorch_model.bin", weights_only=True)
    weights["model.layers.0.self_attn.g_proj.weight"] = torch.full((4, 48), 9.0)
    torch.save(weights, headwise / "pytorch_model.bin")
    assert "model.layers.0.self_attn.q_proj.weight is [68, 48]" in refusal(headwise)


def test_tying_that_did_not_happen_is_an_error(tmp_path, monkeypatch):
    native(tmp_path, tie_word_embeddings=True)
    # What a load in another thread leaves behind for the time it builds its model.
    monkeypatch.setattr(transformers.PreTrainedModel, "tie_weights", lambda *args, **kwargs: None)
    assert "lm_head.weight was not tied to model.embed_tokens.weight" in refusal(tmp_path)


def test_no_weights_at_all(headwise):
    (headwise / "pytorch_model.bin").unlink()
    line = refusal(headwise)
    assert str(headwise) in line and "model.safetensors" in line and "pytorch_model.bin" in line


@pytest.mark.parametrize("text", ["", "{", "hello", '{"model_type": "gated_qwen",}'])
@pytest.mark.parametrize("loader", [load, GatedQwenForCausalLM.from_pretrained, GatedQwenConfig.from_pretrained])
def test_a_config_that_is_not_json(headwise, text, loader):
    (headwise / "config.json").write_text(text)
    line = refusal(headwise, loader)
    assert str(headwise / "config.json") in line and "JSON" in line


@pytest.mark.parametrize("loader", [load, GatedQwenForCausalLM.from_pretrained, GatedQwenConfig.from_pretrained])
def test_a_path_that_does_not_exist(tmp_path, loader):
    assert str(tmp_path / "nothing") in refusal(tmp_path / "nothing", loader)


# A config beside other weights

SIZES_CHANGED = [
    {"intermediate_size": 128},
    {"hidden_size": 64},
    {"vocab_size": 400},
    {"num_attention_heads": 12},
    {"num_key_value_heads": 1},
    {"head_dim": 32},
    {"num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 8},
]
sizes_changed = pytest.mark.parametrize("fields", SIZES_CHANGED, ids=lambda fields: "-".join(fields))


def assert_mismatch_named(line, folder, on_disk):
    """One tensor with its shape on disk and its shape in a model of the config, and how many more there are."""
    pattern = (
        r"(\S+) is (\[[\d, ]+\]) in the checkpoint but (\[[\d, ]+\]) by its config, and (\d+) more differ\. "
        r"The config belongs to other weights: get both from one place, or correct the sizes or the gate in it\."
    )
    assert line.startswith(f"{folder}: ")
    name, found, expected, more = re.fullmatch(pattern, line.removeprefix(f"{folder}: ")).groups()
    with torch.device("meta"):
        in_model = GatedQwenForCausalLM(AutoConfig.from_pretrained(folder)).state_dict()
    assert json.loads(found) == list(on_disk[name].shape)
    assert json.loads(expected) == list(in_model[name].shape)
    assert found != expected and int(more) > 0


@sizes_changed
def test_a_released_config_with_another_size(released, fields, log):
    """Nothing is logged beside the error, no table, no report."""
    on_disk = torch.load(released / "pytorch_model.bin", weights_only=True)
    line = refusal(change_config(released, **fields))
    assert_mismatch_named(line, released, on_disk)
    assert not log.records, log.text


@sizes_changed
def test_a_native_config_with_another_size(tmp_path, gate, fields, log):
    on_disk = load_file(native(tmp_path, gate) / "model.safetensors")
    log.clear()
    line = refusal(change_config(tmp_path, **fields))
    assert_mismatch_named(line, tmp_path, on_disk)
    assert not log.records, log.text


@pytest.mark.parametrize(
    ("gate", "other", "found", "expected"),
    [("headwise", "elementwise", [6, 40], [60, 40]), ("elementwise", "headwise", [60, 40], [6, 40])],
)
def test_a_native_config_with_the_other_gate(tmp_path, gate, other, found, expected):
    line = refusal(change_config(native(tmp_path, gate), attn_gate=other))
    assert f"self_attn.g_proj.weight is {found} in the checkpoint but {expected} by its config" in line


@pytest.mark.parametrize(("name", "flagged"), list(itertools.permutations(RELEASED_NAMES, 2)))
def test_flags_of_another_released_checkpoint(name, flagged, tmp_path):
    folder = Path(shutil.copytree(RELEASED / name, tmp_path / name))
    flags = {f"{gate}_attn_output_gate": flagged == f"1B_gate_{gate}" for gate in ("headwise", "elementwise")}
    line = refusal(change_config(folder, **flags))
    assert str(folder) in line
    if name == "1B_baseline":
        assert "the gates are missing" in line and "g_proj" in line
    else:
        rows = PACKED_ROWS[name]
        assert f"layers.0.self_attn.q_proj.weight is [{rows}, 48] in the checkpoint but [64, 48] by its config" in line


def test_a_native_config_beside_released_weights(headwise):
    config = AutoConfig.from_pretrained(headwise)
    (headwise / "config.json").unlink()
    config.save_pretrained(headwise)
    line = refusal(headwise)
    assert "layers.0.self_attn.q_proj.weight is [68, 48] in the checkpoint but [64, 48] by its config" in line


@pytest.mark.parametrize("form", ["released", "native"])
def test_ignore_mismatched_sizes_is_transformers_own(headwise, form, log):
    expected = load(HEADWISE).state_dict()
    if form == "native":
        load(HEADWISE).save_pretrained(headwise)
    change_config(headwise, intermediate_size=128)
    log.clear()
    model, info = load(headwise, ignore_mismatched_sizes=True, output_loading_info=True)
    mlps = {key for key in expected if ".mlp." in key}
    assert {key for key, *_ in info["mismatched_keys"]} == mlps and not info["missing_keys"]
    assert all(torch.equal(value, expected[key]) for key, value in model.state_dict().items() if key not in mlps)
    assert "MISMATCH" in log.text


def test_a_head_with_other_labels_says_what_transformers_says(tmp_path):
    auto_class = AutoModelForSequenceClassification
    auto_class.from_config(tiny_config(num_labels=3)).save_pretrained(tmp_path)
    line = refusal(tmp_path, auto_class.from_pretrained, num_labels=5)
    assert "score.weight is [3, 40] in the checkpoint but [5, 40]" in line
    assert "ignore_mismatched_sizes=True" in line
    model = auto_class.from_pretrained(tmp_path, num_labels=5, ignore_mismatched_sizes=True)
    assert model.score.weight.shape == (5, 40)


# Weights missing, weights too many


@gated
@pytest.mark.parametrize("dropped", ["g_proj", "layers.1.self_attn.g_proj"], ids=["all", "one-layer"])
@pytest.mark.parametrize(
    "loader", [load, AutoModel.from_pretrained, AutoModelForSequenceClassification.from_pretrained]
)
def test_missing_gates_are_an_error(tmp_path, gate, dropped, loader, log):
    change_weights(native(tmp_path, gate), drop=[dropped])
    log.clear()
    line = refusal(tmp_path, loader)
    layers = "{0, 1, 2}" if dropped == "g_proj" else "1"
    assert line.startswith(f"{tmp_path}: the gates are missing (")
    assert f"layers.{layers}.self_attn.g_proj.weight), but the config says attn_gate='{gate}'." in line
    assert "strict=False" in line
    assert not log.records, log.text


@gated
@pytest.mark.parametrize("loader", [load, GatedQwenForCausalLM.from_pretrained])
def test_missing_gates_are_random_when_not_strict(tmp_path, gate, loader, log):
    native(tmp_path, gate)
    whole = load(tmp_path).state_dict()
    change_weights(tmp_path, drop=["g_proj"])
    log.clear()
    model, info = loader(tmp_path, strict=False, output_loading_info=True)
    gates = {key for key in whole if "g_proj" in key}
    assert info["missing_keys"] == gates and len(gates) == 3
    for key, value in model.state_dict().items():
        assert torch.equal(value, whole[key]) == (key not in gates)
        assert value.isfinite().all() and value.std() > 0
    assert "LOAD REPORT" in log.text and "g_proj" in log.text
    refusal(tmp_path, loader)  # the one before leaves nothing behind


@pytest.mark.parametrize(
    ("dropped", "named"),
    [
        (["layers.0.mlp.up_proj"], "model.layers.0.mlp.up_proj.weight"),
        (["model.norm"], "model.norm.weight"),
        (["input_layernorm"], "model.layers.{0, 1, 2}.input_layernorm.weight"),
        (["embed_tokens"], "model.embed_tokens.weight"),
        (["lm_head"], "lm_head.weight"),
        (
            ["q_norm", "layers.2.mlp.gate_proj"],
            "model.layers.2.mlp.gate_proj.weight, model.layers.{0, 1, 2}.self_attn.q",
        ),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, list) else "",
)
def test_other_missing_weights_are_named(tmp_path, gate, dropped, named):
    line = refusal(change_weights(native(tmp_path, gate), drop=dropped))
    assert line.startswith(f"{tmp_path}: weights are missing: {named}")
    assert "Get the whole checkpoint" in line and "strict=False" in line
    assert load(tmp_path, strict=False)(torch.tensor([[1, 2]])).logits.isfinite().all()


@gated
def test_gates_are_not_blamed_where_other_weights_are_missing_too(tmp_path, gate):
    line = refusal(change_weights(native(tmp_path, gate), drop=["g_proj", "layers.2.mlp.up_proj"]))
    assert "the gates are missing" not in line
    assert "g_proj.weight" in line and "model.layers.2.mlp.up_proj.weight" in line


def test_gates_are_not_blamed_for_a_layer_too_many_or_for_biases(headwise):
    line = refusal(change_config(headwise, num_hidden_layers=4))
    assert "the gates are missing" not in line and "model.layers.3.mlp.up_proj.weight" in line
    line = refusal(change_config(headwise, num_hidden_layers=3, qkv_bias=True))
    assert "the gates are missing" not in line and "self_attn.k_proj.bias" in line


@pytest.mark.parametrize("content", [{}, "nested"], ids=["empty", "nested"])
def test_gates_are_not_blamed_where_everything_is_missing(headwise, content):
    file = headwise / "pytorch_model.bin"
    torch.save({"model": torch.load(file, weights_only=True)} if content else {}, file)
    line = refusal(headwise)
    assert "the gates are missing" not in line and "model.embed_tokens.weight" in line


def test_of_tied_weights_one_is_enough(tmp_path):
    native(tmp_path, tie_word_embeddings=True)
    whole = load(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    head = {"lm_head.weight": weights["model.embed_tokens.weight"]}
    change_weights(tmp_path, add=head, drop=["embed_tokens"])
    model = load(tmp_path)
    assert all(torch.equal(value, whole.state_dict()[key]) for key, value in model.state_dict().items())
    line = refusal(change_weights(tmp_path, drop=["lm_head"]))
    assert "model.embed_tokens.weight" in line


@pytest.mark.parametrize(
    "extra",
    [
        "model.layers.0.self_attn.gate_proj.weight",  # AFMoE's name for its gate
        "model.layers.3.mlp.up_proj.weight",
        "model.layers.1.self_attn.sinks",
        "model.norm.bias",
        "model.layers.2.self_attn.q_proj.bias",
        "lm_head.bias",
        "something.weight",
    ],
)
def test_unexpected_decoder_weights_are_named(tmp_path, gate, extra):
    native(tmp_path, gate)
    expected = load(tmp_path).state_dict()
    line = refusal(change_weights(tmp_path, add={extra: torch.ones(3)}))
    assert line.startswith(f"{tmp_path}: weights that this model has no place for: {extra}. ")
    assert "strict=False" in line
    model = load(tmp_path, strict=False).state_dict()
    assert all(torch.equal(model[key], expected[key]) for key in expected)


@gated
def test_gates_under_an_ungated_config_are_named(tmp_path, gate):
    line = refusal(change_config(native(tmp_path, gate), attn_gate=None))
    assert "no place for: model.layers.{0, 1, 2}.self_attn.g_proj.weight" in line


def test_a_released_checkpoint_of_more_layers_than_its_config_says(headwise):
    line = refusal(change_config(headwise, num_hidden_layers=2))
    assert "no place for: model.layers.2.input_layernorm.weight, model.layers.2.mlp.down_proj.weight, " in line


@pytest.mark.parametrize(
    ("bias", "named"),
    [
        ("attention_bias", "self_attn.q_proj.bias"),
        ("attention_output_bias", "self_attn.o_proj.bias"),
        ("mlp_bias", "mlp.up_proj.bias"),
    ],
)
def test_missing_biases_are_named(tmp_path, gate, bias, named):
    line = refusal(change_config(native(tmp_path, gate), **{bias: True}))
    assert "weights are missing: " in line and named in line


# Other families

OTHER_GATED = ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "afmoe", "step3p7", "laguna", "hrm_text"]
OUR_LOADERS = [GatedQwenForCausalLM.from_pretrained, GatedQwenModel.from_pretrained, GatedQwenConfig.from_pretrained]


@pytest.mark.parametrize("model_type", OTHER_GATED)
@pytest.mark.parametrize("loader", OUR_LOADERS)
def test_another_gated_family_is_refused(tmp_path, model_type, loader):
    (tmp_path / "config.json").write_text(json.dumps(AutoConfig.for_model(model_type).to_dict()))
    line = refusal(tmp_path, loader)
    assert line == (
        f"{tmp_path} is a {model_type!r} checkpoint, not a 'gated_qwen' one, and lays its gates out differently: "
        "load it with AutoModelForCausalLM, which picks its own class."
    )
    assert type(AutoConfig.from_pretrained(tmp_path)).model_type == model_type


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("loader", OUR_LOADERS)
def test_a_plain_model_is_refused(tmp_path, model_type, loader):
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    assert refusal(tmp_path, loader) == (
        f"{tmp_path} is a {model_type!r} checkpoint, not a 'gated_qwen' one: "
        "load it with AutoModelForCausalLM, which picks its own class."
    )


SIZES = dict(
    vocab_size=40,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    pad_token_id=None,
)
EXPERTS = dict(moe_intermediate_size=8, num_experts=2, num_experts_per_tok=1)
REAL = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)),
    "qwen3_next": lambda: transformers.Qwen3NextForCausalLM(
        Qwen3NextConfig(
            **SIZES,
            **EXPERTS,
            shared_expert_intermediate_size=8,
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            layer_types=["linear_attention", "full_attention"],
        )
    ),
    "afmoe": lambda: transformers.AfmoeForCausalLM(
        AfmoeConfig(**SIZES, **EXPERTS, num_dense_layers=1, layer_types=["full_attention", "sliding_attention"])
    ),
}


@pytest.mark.parametrize("model_type", REAL)
def test_a_real_checkpoint_of_another_family_is_refused_and_still_loads_as_its_own(tmp_path, model_type):
    model = REAL[model_type]()
    model.save_pretrained(tmp_path)
    assert f"is a {model_type!r} checkpoint" in refusal(tmp_path, GatedQwenForCausalLM.from_pretrained)
    assert type(load(tmp_path)) is type(model)


@pytest.mark.parametrize("model_type", ["qwen3_next", "afmoe"])
def test_weights_of_another_family_under_our_config_are_refused(tmp_path, model_type):
    REAL[model_type]().save_pretrained(tmp_path)
    GatedQwenConfig(**SIZES, attn_gate="elementwise").save_pretrained(tmp_path)
    assert str(tmp_path) in refusal(tmp_path)


@pytest.mark.parametrize("config_class", [Qwen3Config, LlamaConfig, Qwen3NextConfig])
def test_a_config_object_of_another_class_is_refused(tmp_path, config_class):
    line = refusal(native(tmp_path), GatedQwenForCausalLM.from_pretrained, config=config_class(**SIZES))
    assert config_class.__name__ in line and "GatedQwenConfig" in line


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen3_moe", "qwen3_next"])
def test_the_flags_do_not_make_another_model_type_ours(headwise, model_type):
    change_config(headwise, model_type=model_type)
    assert AutoConfig.from_pretrained(headwise).model_type == model_type
    assert f"is a {model_type!r} checkpoint" in refusal(headwise, GatedQwenForCausalLM.from_pretrained)
