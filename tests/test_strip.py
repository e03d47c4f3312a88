"""Strip: what a retrofit put on comes off again without a trace, and gates that do something are not lost silently."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import RELEASED, max_error, tokens
from test_retrofit import (
    INDEX,
    SOURCES,
    add_files,
    all_sources,
    build_model,
    convert,
    edit_config,
    files_in,
    gated_source,
    is_gate,
    load,
    outputs,
    same_bytes,
    save,
    weights_of,
)
from transformers import AutoConfig

import gated_qwen.conversion.strip as strip_module
from gated_qwen import CheckpointError, plan_strip, strip_checkpoint

STARTS = ("scale", "fold", "random")
STOCK = [name for name in SOURCES if name != "gated"]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """`source(name, form)`: the folder of a source with files of many sorts beside it, which must not be changed."""
    built = {}

    def find(name: str, form: str = "single") -> Path:
        if (name, form) not in built:
            folder = tmp_path_factory.mktemp("sources") / f"{name}-{form}"
            dtype = torch.float32 if form == "single" else torch.bfloat16
            built[name, form] = save(build_model(name).to(dtype), folder, form)
            left_out = files_in(folder)
            kept = add_files(folder) | {"README.md", *left_out}
            for file in files_in(folder).keys() - kept:
                (folder / file).unlink()
        return built[name, form]

    return find


def strip(source: Path, target: Path, **options) -> Path:
    strip_checkpoint(source, target, **{"verify": False, **options})
    return target


def check_identical(folder: Path, other: Path) -> None:
    before, after = files_in(folder), files_in(other)
    assert after.keys() == before.keys()
    assert [name for name in before if after[name] != before[name]] == []


@pytest.mark.parametrize("form", ["single", "sharded"])
@pytest.mark.parametrize("start", STARTS)
@all_sources
def test_the_source_comes_back_byte_for_byte(source, tmp_path, name, start, form):
    """The whole folder, in fp32 (single) and bf16 (sharded)."""
    gate, layers = ("headwise", None) if form == "single" else ("elementwise", [0, 2])
    folder = source(name, form)
    gated = convert(folder, tmp_path / "gated", gate, start=start, layers=layers)
    check_identical(folder, strip(gated, tmp_path / "stripped"))


def test_linked_files_come_back_too(source, tmp_path):
    folder = source("qwen3", "sharded")
    gated = convert(folder, tmp_path / "gated", link=True)
    check_identical(folder, strip(gated, tmp_path / "stripped", link=True))


def test_fp16_comes_back(tmp_path):
    folder = save(build_model("llama").half(), tmp_path / "source")
    gated = convert(folder, tmp_path / "gated", start="fold")
    check_identical(folder, strip(gated, tmp_path / "stripped"))


def index_of_earlier_versions(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    del index["metadata"]["total_parameters"]
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def config_with_other_line_ends(folder: Path) -> None:
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_bytes(text.rstrip().replace("\n", "\r\n").encode())


def config_of_earlier_versions(folder: Path) -> None:
    edit_config(
        folder, remove=("rope_parameters", "dtype", "head_dim"), rope_theta=10000.0, rope_scaling=None,
        torch_dtype="bfloat16", _name_or_path="Straße", transformers_version="4.40.0",
    )  # fmt: skip


def header_with_more_metadata(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        save_file(load_file(file), file, {"format": "pt", "note": "from a merge"})


def header_of_another_writer(folder: Path) -> None:
    """Names before dtypes, spaces, no alignment."""
    for file in folder.glob("*.safetensors"):
        weights = load_file(file)
        header, data = {"__metadata__": {"format": "pt"}}, b""
        for name, weight in weights.items():
            raw = bytes(weight.contiguous().view(torch.uint8).flatten().tolist())
            entry = {"shape": list(weight.shape), "dtype": "BF16", "data_offsets": [len(data), len(data) + len(raw)]}
            header[name], data = entry, data + raw
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize("start", ["scale", "fold"])
@pytest.mark.parametrize(
    "change",
    [
        index_of_earlier_versions,
        config_with_other_line_ends,
        config_of_earlier_versions,
        header_with_more_metadata,
        header_of_another_writer,
    ],
)
def test_what_other_writers_make_comes_back_byte_for_byte(tmp_path, change, start):
    folder = save(build_model("llama_bias").to(torch.bfloat16), tmp_path / "source", "sharded")
    change(folder)
    gated = convert(folder, tmp_path / "gated", start=start)
    stripped = strip(gated, tmp_path / "stripped")
    if start == "fold" and change in (header_with_more_metadata, header_of_another_writer):
        # These files were rewritten, and have our header; the tensors are the same.
        before, after = weights_of(folder), weights_of(stripped)
        assert before.keys() == after.keys() and all(same_bytes(before[name], after[name]) for name in before)
        return
    check_identical(folder, stripped)


@pytest.mark.parametrize("start", ["scale", "fold"])
def test_an_untied_head_comes_back(tmp_path, start):
    """One that differs from the embeddings, beside tie_word_embeddings: true."""
    folder = save(build_model("llama"), tmp_path / "source")
    edit_config(folder, tie_word_embeddings=True)
    gated = convert(folder, tmp_path / "gated", start=start)
    stripped = strip(gated, tmp_path / "stripped")
    before, after = (json.loads((place / "config.json").read_text()) for place in (folder, stripped))
    assert {**before, "tie_word_embeddings": False} == {
        **after,
        "transformers_version": before["transformers_version"],
    }
    assert weights_of(stripped).keys() == weights_of(folder).keys()
    assert torch.equal(outputs(load(stripped)), outputs(load(folder)))


@pytest.mark.parametrize("form", ["bin", "sharded_bin"])
def test_pickles_come_back_as_the_same_weights(tmp_path, form):
    folder = save(build_model("qwen2").to(torch.bfloat16), tmp_path / "source", form)
    stripped = strip(convert(folder, tmp_path / "gated", start="fold"), tmp_path / "stripped")
    before, after = weights_of(folder), weights_of(stripped)
    assert before.keys() == after.keys() and all(same_bytes(before[name], after[name]) for name in before)
    assert (stripped / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    assert torch.equal(outputs(load(stripped, "auto")), outputs(load(folder, "auto")))


@pytest.mark.parametrize(
    "head", ["Model", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"]
)
def test_other_heads_come_back(tmp_path, head):
    folder = save(build_model("qwen2", head), tmp_path / "source")
    gated = convert(folder, tmp_path / "gated", start="fold")
    check_identical(folder, strip(gated, tmp_path / "stripped"))
    (gated / "conversion.json").unlink()
    inferred = strip(gated, tmp_path / "inferred")
    assert AutoConfig.from_pretrained(inferred).architectures == [f"Qwen2{head}"]
    assert all(same_bytes(weights_of(inferred)[name], weight) for name, weight in weights_of(folder).items())


@pytest.mark.parametrize("starts", [("scale", "scale"), ("scale", "fold"), ("fold", "scale")])
def test_two_retrofits_come_off_at_once(source, tmp_path, starts):
    folder = source("mistral_window", "sharded")
    once = convert(folder, tmp_path / "once", start=starts[0], layers=[1])
    twice = convert(once, tmp_path / "twice", start=starts[1])
    assert torch.equal(outputs(load(twice, "auto")), outputs(load(folder, "auto")))
    stripped = strip(twice, tmp_path / "stripped")
    before, after = weights_of(folder), weights_of(stripped)
    assert before.keys() == after.keys() and all(same_bytes(before[name], after[name]) for name in before)
    assert AutoConfig.from_pretrained(stripped).model_type == "mistral"
    assert torch.equal(outputs(load(stripped, "auto")), outputs(load(folder, "auto")))


# Without the record

INFERRED = {
    "llama": "llama",
    "llama_bias": "llama",
    "mistral": "llama",  # without a window the two are one
    "mistral_window": "mistral",
    "qwen2": "qwen2",
    "qwen2_window": "qwen2",
    "qwen3": "qwen3",
    "qwen3_bias": "qwen3",
}


@pytest.mark.parametrize(("name", "start"), [("qwen3", "scale"), *((name, "fold") for name in STOCK)])
def test_the_family_is_inferred_without_the_record(source, tmp_path, name, start):
    folder = source(name)
    gated = convert(folder, tmp_path / "gated", "elementwise", start=start, layers=[1])
    (gated / "conversion.json").unlink()
    stripped = strip(gated, tmp_path / "stripped")
    before, after = weights_of(folder), weights_of(stripped)
    assert before.keys() == after.keys() and all(same_bytes(before[key], after[key]) for key in before)
    config, source_config = AutoConfig.from_pretrained(stripped), AutoConfig.from_pretrained(folder)
    assert config.model_type == INFERRED[name]
    assert config.architectures == [source_config.architectures[0].replace("Mistral", "Llama")] or name != "mistral"
    for field in ("rope_parameters", "bos_token_id", "eos_token_id", "dtype", "sliding_window"):
        assert getattr(config, field, None) == getattr(source_config, field, None), field
    assert getattr(config, "head_dim", 10) == getattr(source_config, "head_dim", 10)
    left = {"attn_gate", "attn_gate_scale", "attn_gate_layers", "use_qk_norm", "attention_output_bias"}
    assert not left & config.to_dict().keys()
    assert torch.equal(outputs(load(stripped)), outputs(load(folder)))


def test_what_no_stock_family_has_becomes_an_ungated_model(tmp_path):
    """Query and key norms beside an MLP with biases."""
    folder = save(build_model("gated"), tmp_path / "source")
    gated = convert(folder, tmp_path / "gated")
    (gated / "conversion.json").unlink()
    stripped = strip(gated, tmp_path / "stripped")
    config = AutoConfig.from_pretrained(stripped)
    assert (config.model_type, config.attn_gate, config.attn_gate_scale) == ("gated_qwen", None, 1.0)
    assert torch.equal(outputs(load(stripped)), outputs(load(folder)))


def test_random_gates_are_not_known_without_the_record(source, tmp_path):
    gated = convert(source("qwen3"), tmp_path / "gated", start="random")
    (gated / "conversion.json").unlink()
    with pytest.raises(CheckpointError, match="the gates have moved"):
        strip(gated, tmp_path / "stripped")


def test_a_record_of_another_model_is_not_believed(source, tmp_path):
    """Its config.json would be written beside weights that it does not fit."""
    gated = convert(source("qwen2"), tmp_path / "gated")
    shutil.copy(convert(source("qwen3"), tmp_path / "other") / "conversion.json", gated / "conversion.json")
    stripped = strip(gated, tmp_path / "stripped")
    assert AutoConfig.from_pretrained(stripped).model_type == "qwen2"
    assert torch.equal(outputs(load(stripped)), outputs(load(source("qwen2"))))


# After training


def train(folder: Path, target: Path, which, keep_record: bool = True, rate: float = 0.05) -> Path:
    """One step on the parameters that `which` picks by name."""
    model = load(folder)
    chosen = [parameter for name, parameter in model.named_parameters() if which(name)]
    optimizer = torch.optim.SGD(chosen, lr=rate)
    model(tokens(), labels=tokens()).loss.backward()
    optimizer.step()
    if keep_record:
        shutil.copytree(folder, target)
        for file in [*target.glob("*.safetensors"), *target.glob("*.index.json")]:
            file.unlink()
    model.save_pretrained(target)
    return target


@pytest.mark.parametrize(("start", "keep_record"), [("scale", True), ("fold", False)])
def test_trained_gates_are_refused(source, tmp_path, start, keep_record):
    folder = source("llama")
    trained = train(convert(folder, tmp_path / "gated", start=start), tmp_path / "trained", is_gate, keep_record)
    stripped = tmp_path / "stripped"
    with pytest.raises(CheckpointError, match=r"--force") as caught:
        strip(trained, stripped)
    message = str(caught.value)
    assert "\n" not in message and str(trained) in message and not stripped.exists()
    assert not (tmp_path / "stripped.partial").exists()

    low, high = map(float, re.search(r"factors .*between ([\d.e+-]+) and ([\d.e+-]+) ", message).groups())
    change, largest = map(float, re.search(r"change by up to ([\d.e+-]+) of ([\d.e+-]+)\.", message).groups())
    assert 0 < change < largest
    # The figures are bounds that hold, and are not far off.
    with torch.no_grad():
        scores = load(trained)(tokens(), output_gate_scores=True).gate_scores
    relative = torch.cat([score.flatten() for score in scores]) * (2 if start == "fold" else 1)
    assert 0.3 < low <= relative.min() < 0.99 and 1.01 < relative.max() <= high < 1.7

    record = strip_checkpoint(trained, stripped, force=True, verify=True)
    before, after = weights_of(folder), weights_of(stripped)
    assert before.keys() == after.keys() and all(same_bytes(before[name], after[name]) for name in before)
    assert record["options"] == {"force": True} and record["largest_deviation"]["value"] is None
    assert "moved" in record["largest_deviation"]["meaning"]
    assert record["verification"]["max_difference"] > 1e-4 and record["verification"]["allowed"] is None
    assert max_error(outputs(load(stripped)), outputs(load(trained))) > 1e-4


def test_one_value_of_one_gate_is_enough(source, tmp_path):
    gated = convert(source("qwen2", "sharded"), tmp_path / "gated", "elementwise")
    for file in gated.glob("*.safetensors"):
        weights = load_file(file)
        if name := next((name for name in weights if is_gate(name) and ".1." in name), None):
            weights[name][-1, -1] = 1e-3
            save_file(weights, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layer 1\)"):
        strip(gated, tmp_path / "stripped")


def test_a_trained_bias_of_a_gate_is_enough(tmp_path):
    folder = gated_source(tmp_path / "source", form="single")
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if is_gate(name):
            weight.zero_()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    strip(folder, tmp_path / "zero")
    assert torch.equal(outputs(load(tmp_path / "zero")), outputs(load(folder)))
    weights["model.layers.2.self_attn.g_proj.bias"][3] = 0.5
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layer 2\)"):
        strip(folder, tmp_path / "stripped")


@pytest.mark.parametrize(("start", "keep_record"), [("scale", True), ("fold", False), ("fold", True)])
@pytest.mark.parametrize("name", ["llama_bias", "mistral_window", "qwen2", "qwen3"])
def test_a_model_trained_beside_its_gates_is_stripped_exactly(source, tmp_path, name, start, keep_record):
    gated = convert(source(name), tmp_path / "gated", start=start, layers=[0, 2])
    trained = train(gated, tmp_path / "trained", lambda name: not is_gate(name), keep_record)
    assert max_error(outputs(load(trained)), outputs(load(gated))) > 1e-3
    record = strip_checkpoint(trained, tmp_path / "stripped", verify=False)
    stripped = load(tmp_path / "stripped")
    assert stripped.config.model_type == SOURCES[name][0].lower()
    assert torch.equal(outputs(stripped), outputs(load(trained)))
    assert record["largest_deviation"]["value"] == 0


def test_random_gates_at_their_start_beside_trained_weights(source, tmp_path):
    """They were no identity: without them the model is another, which must not happen unasked."""
    gated = convert(source("qwen3"), tmp_path / "gated", "elementwise", start="random")
    trained = train(gated, tmp_path / "trained", lambda name: not is_gate(name))
    with pytest.raises(CheckpointError, match="force"):
        strip(trained, tmp_path / "stripped")


@pytest.mark.parametrize("start", STARTS)
def test_a_config_edited_after_the_retrofit_is_kept(source, tmp_path, start):
    """The recorded config.json is not the source's any more where rope was changed, say to extend the context."""
    gated = convert(source("qwen3"), tmp_path / "gated", start=start)
    edit_config(gated, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0})
    stripped = strip(gated, tmp_path / "stripped")
    config = AutoConfig.from_pretrained(stripped)
    assert (config.model_type, config.rope_parameters["rope_type"]) == ("qwen3", "linear")
    if start != "random":
        assert torch.equal(outputs(load(stripped)), outputs(load(gated)))


def test_token_ids_edited_after_the_retrofit_are_kept(source, tmp_path):
    """As chat tuning sets them: the recorded config.json would bring the source's back."""
    gated = convert(source("qwen3"), tmp_path / "gated")
    edit_config(gated, eos_token_id=[2, 77])
    assert AutoConfig.from_pretrained(strip(gated, tmp_path / "stripped")).eos_token_id == [2, 77]


def test_another_dtype_after_the_retrofit_is_kept(source, tmp_path):
    """A bf16 source trained and saved in fp32: the recorded dtype would round the weights on loading."""
    gated = convert(source("qwen3", "sharded"), tmp_path / "gated")
    trained = train(gated, tmp_path / "trained", lambda name: not is_gate(name))
    stripped = strip(trained, tmp_path / "stripped")
    assert {weight.dtype for weight in weights_of(stripped).values()} == {torch.float32}
    assert AutoConfig.from_pretrained(stripped).dtype == torch.float32
    assert torch.equal(outputs(load(stripped, "auto")), outputs(load(trained, "auto")))


# Gates that were never put on


@pytest.mark.parametrize("name", ["1B_gate_headwise", "1B_gate_elementwise"])
def test_released_checkpoints_are_stripped_with_force_only(tmp_path, name):
    folder = RELEASED / name
    with pytest.raises(CheckpointError, match="the gates have moved.*--force") as caught:
        strip(folder, tmp_path / "stripped")
    assert "\n" not in str(caught.value)
    stripped = strip(folder, tmp_path / "stripped", force=True)
    model, plain = load(folder, "auto"), load(stripped, "auto")
    assert plain.config.model_type == "qwen3"
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if is_gate(key):
                parameter.zero_()
    assert torch.equal(outputs(plain), outputs(model))
    after, before = plain.state_dict(), model.state_dict()
    assert after.keys() == {key for key in before if not is_gate(key)}
    assert all(same_bytes(after[key], before[key]) for key in after if "o_proj" not in key)


@pytest.mark.parametrize("name", ["qwen3", "gated"])
def test_nothing_to_strip(source, tmp_path, name):
    with pytest.raises(CheckpointError, match="nothing to strip"):
        strip(source(name), tmp_path / "stripped")
    with pytest.raises(CheckpointError, match="nothing to strip"):
        strip(RELEASED / "1B_baseline", tmp_path / "stripped")


def test_a_scale_that_is_no_power_of_two(tmp_path):
    folder = gated_source(tmp_path / "source", attn_gate_scale=1.5, attn_gate_bias=False)
    weights = {name: weight for name, weight in weights_of(folder).items()}
    for name, weight in weights.items():
        if is_gate(name):
            weight.zero_()
    for file in folder.glob("*.safetensors"):
        save_file({name: weights[name] for name in load_file(file)}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match="not a power of two"):
        strip(folder, tmp_path / "stripped")
    record = strip_checkpoint(folder, tmp_path / "stripped", force=True, verify=True)
    assert max_error(outputs(load(tmp_path / "stripped")), outputs(load(folder))) < 1e-4
    # Not exact, and it must not say so.
    assert record["largest_deviation"]["value"] != 0


# The rest


@pytest.mark.parametrize("start", STARTS)
def test_a_plan_is_what_is_written(source, tmp_path, start):
    gated = convert(source("qwen2_window", "sharded"), tmp_path / "gated", start=start)
    before = files_in(gated)
    plan = plan_strip(gated)
    record = strip_checkpoint(gated, tmp_path / "stripped", verify=start != "scale")
    assert files_in(gated) == before
    written = {file.name: file.stat().st_size for file in (tmp_path / "stripped").glob("*.safetensors")}
    assert {shard.name: shard.nbytes for shard in plan.shards} == written
    assert {name: entry["size"] for name, entry in record["files"].items()} == written
    assert record["parameters"]["new"] == 0
    assert set(record["tensors"]["dropped"]) == {name for name in weights_of(gated) if is_gate(name)}
    assert (record["tensors"]["scaled"] != {}) == (start == "fold")
    assert record["command"] == "gated-qwen strip gated TARGET"
    if start != "scale":
        assert (record["verification"]["max_difference"] == 0) == (start == "fold")
    assert (record["largest_deviation"]["value"] == 0) == (start != "random")


def test_verification_finds_a_planted_error(source, tmp_path, monkeypatch):
    gated = convert(source("qwen3"), tmp_path / "gated", start="fold")
    original = strip_module.copy_of
    monkeypatch.setattr(strip_module, "copy_of", lambda tensor, factor=1.0: original(tensor))
    with pytest.raises(CheckpointError, match="verification failed"):
        strip(gated, tmp_path / "stripped", verify=None)
    assert not (tmp_path / "stripped").exists()
    monkeypatch.undo()
    strip(gated, tmp_path / "stripped", restart=True)
    assert torch.equal(outputs(load(tmp_path / "stripped")), outputs(load(gated)))


@pytest.mark.parametrize("form", ["single", "sharded"])
@pytest.mark.parametrize("starts", [("scale", "fold"), ("fold", "scale"), ("scale", "random"), ("fold", "fold")])
def test_two_retrofits_come_off_byte_for_byte(source, tmp_path, form, starts):
    """Headwise gates in one layer, then elementwise ones in all: the first source comes back."""
    folder = source("llama", form)
    once = convert(folder, tmp_path / "once", start=starts[0], layers=[1])
    twice = convert(once, tmp_path / "twice", "elementwise", start=starts[1])
    check_identical(folder, strip(twice, tmp_path / "stripped"))


def test_one_file_with_an_index_comes_back(source, tmp_path):
    folder = Path(shutil.copytree(source("llama"), tmp_path / "source"))
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    weight_map = dict.fromkeys(
        load_file(folder / "model-00001-of-00001.safetensors"), "model-00001-of-00001.safetensors"
    )
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    check_identical(folder, strip(convert(folder, tmp_path / "gated"), tmp_path / "stripped"))


def test_a_plan_from_headers_does_not_claim_to_know_the_gates(source, tmp_path):
    trained = train(convert(source("llama"), tmp_path / "gated"), tmp_path / "trained", lambda name: "g_proj" in name)
    plan = strip_module.plan_strip(trained)
    assert plan.deviation is None and "not known from headers" in plan.deviation_note
    assert "not known from headers" in str(plan)


def test_a_source_without_architectures_comes_back(source, tmp_path):
    folder = Path(shutil.copytree(source("llama"), tmp_path / "source"))
    fields = json.loads((folder / "config.json").read_text())
    del fields["architectures"]
    (folder / "config.json").write_text(json.dumps(fields))
    check_identical(folder, strip(convert(folder, tmp_path / "gated"), tmp_path / "stripped"))


def test_a_name_of_code_that_did_not_come_through_does_not_come_back(source, tmp_path):
    folder = Path(shutil.copytree(source("llama"), tmp_path / "source"))
    fields = json.loads((folder / "config.json").read_text())
    fields["auto_map"] = {"AutoModelForCausalLM": "modeling_x.X"}
    (folder / "config.json").write_text(json.dumps(fields))
    (folder / "modeling_x.py").write_text("raise SystemExit")
    stripped = strip(convert(folder, tmp_path / "gated"), tmp_path / "stripped")
    assert json.loads((stripped / "config.json").read_text()) == {k: v for k, v in fields.items() if k != "auto_map"}
