"""Exports to other families' forms and to the authors', and imports: same outputs, and the way back bit for bit."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support import RELEASED, RELEASED_NAMES, build, max_error, randomise, tiny_config, tokens
from transformers import AutoModelForCausalLM, Qwen3_5ForCausalLM, Qwen3NextForCausalLM

import gated_qwen
from gated_qwen import CheckpointError, cli, export_checkpoint, import_checkpoint, plan_export, plan_import

CLASSES = {"qwen3_5": Qwen3_5ForCausalLM, "qwen3_next": Qwen3NextForCausalLM}
CASES = {
    "headwise": dict(attn_gate="headwise"),
    "elementwise, scale 2": dict(attn_gate="elementwise", attn_gate_scale=2.0),
    "headwise in one layer, scale 4": dict(attn_gate="headwise", attn_gate_layers=[1], attn_gate_scale=4.0),
    "none": dict(attn_gate=None),
    "headwise with a bias of its own": dict(attn_gate="headwise", attn_gate_bias=True),
    "elementwise, biases of q, k and v": dict(
        attn_gate="elementwise", attention_bias=True, attention_output_bias=False
    ),
    "headwise, all biases, untied": dict(
        attn_gate="headwise", attention_bias=True, attn_gate_bias=True, tie_word_embeddings=False
    ),
    "elementwise, yarn": dict(
        attn_gate="elementwise",
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 20000.0, "factor": 4.0, "original_max_position_embeddings": 16,
        },
    ),
}  # fmt: skip


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def spread_norms(model) -> None:
    """Norm weights between -0.2 and 2.2, as trained ones are; several lose bits when 1 is subtracted."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(torch.rand(parameter.shape, generator=generator) * 2.4 - 0.2)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    made = {}

    def make(case: str, dtype: torch.dtype) -> Path:
        if (case, dtype) not in made:
            fields = dict(CASES[case])
            model = build(fields.pop("attn_gate"), **fields)
            spread_norms(model)
            folder = tmp_path_factory.mktemp("source")
            model.to(dtype).save_pretrained(folder, max_shard_size="30KB")
            made[case, dtype] = folder
        return made[case, dtype]

    return make


def logits(folder: Path, model_class=AutoModelForCausalLM) -> torch.Tensor:
    model = model_class.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(tokens(), use_cache=False).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("to", ["qwen3_5", "qwen3_next"])
@pytest.mark.parametrize("case", CASES)
def test_other_families_compute_the_same_and_it_comes_back(source, tmp_path, case, to, dtype):
    folder, target, again = source(case, dtype), tmp_path / "target", tmp_path / "again"
    record = export_checkpoint(folder, target, to)
    assert record["verification"]["dtype"] == "float32" and record["verification"]["max_difference"] < 4e-5
    fields = json.loads((target / "config.json").read_text())
    assert fields["architectures"] == [CLASSES[to].__name__] and "auto_map" not in fields
    found, expected = logits(target, CLASSES[to]), logits(folder)
    assert expected.abs().max() > 0.5 and max_error(found, expected) < 4e-5  # fp32, norms rounded once more

    import_checkpoint(target, again)
    assert (again / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    before, after = weights_of(folder), weights_of(again)
    assert before.keys() == after.keys()
    for name, weight in before.items():
        if "norm" in name and dtype == torch.float32:  # weight - 1 has a bit less than weight where that is below 1/2
            assert max_error(after[name], weight) <= 2**-24
        else:
            assert after[name].dtype == dtype and torch.equal(after[name], weight), name


@pytest.mark.parametrize("to", ["qwen3_5", "qwen3_next"])
@pytest.mark.parametrize("case", ["headwise", "elementwise, biases of q, k and v"])
def test_a_linear_attention_layer_that_adds_zero(source, tmp_path, case, to):
    """Outputs are those without it, bit for bit; it goes again on the way back."""
    folder, plain, target, again = (source(case, torch.bfloat16), *(tmp_path / name for name in "pta"))
    export_checkpoint(folder, plain, to)
    record = export_checkpoint(folder, target, to, linear_layer=True)
    assert record["command"].endswith(f"--to {to} --linear-layer") and record["verification"]["max_difference"] < 4e-5
    config = json.loads((target / "config.json").read_text())
    assert config["layer_types"] == ["full_attention"] * 3 + ["linear_attention"] and config["num_hidden_layers"] == 4
    assert torch.equal(logits(target, CLASSES[to]), logits(plain, CLASSES[to]))
    model = CLASSES[to].from_pretrained(target, dtype=torch.float32)
    with_cache = model.generate(tokens(), max_new_tokens=5, min_new_tokens=5, do_sample=False)
    expected = CLASSES[to].from_pretrained(plain, dtype=torch.float32)
    assert torch.equal(with_cache, expected.generate(tokens(), max_new_tokens=5, min_new_tokens=5, do_sample=False))

    assert import_checkpoint(target, again)["tensors"]["dropped"]["model.layers.3.mlp.up_proj.weight"]
    assert (again / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    before, after = weights_of(folder), weights_of(again)
    assert before.keys() == after.keys() and all(torch.equal(after[name], before[name]) for name in before)

    (file,) = [f for f in target.glob("*.safetensors") if "model.layers.3.mlp.up_proj.weight" in load_file(f)]
    weights = load_file(file)
    weights["model.layers.3.mlp.up_proj.weight"][-1, -1] = 1e-9
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"up_proj\.weight is of a linear attention layer and not zero"):
        import_checkpoint(target, tmp_path / "more")
    assert not (tmp_path / "more").exists()


def test_norms_are_kept_in_float32(source, tmp_path):
    target = tmp_path / "target"
    record = export_checkpoint(source("headwise", torch.bfloat16), target, "qwen3_5")
    before, after = weights_of(source("headwise", torch.bfloat16)), weights_of(target)
    norms = [name for name in after if "norm" in name]
    assert len(norms) == 4 * len([name for name in norms if "q_norm" in name]) + 1
    for name, weight in after.items():
        assert weight.dtype == (torch.float32 if name in norms else torch.bfloat16)
        if name in norms:
            assert torch.equal(weight + 1, before[name].float())
    rounded = max(max_error(after[name].bfloat16().float(), after[name]) for name in norms)
    assert rounded > 1e-3 and f"rounds them by up to {rounded:.2g}" in " ".join(record["notes"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "case", [case for case in CASES if "own" not in case and "q, k" not in case and "yarn" not in case]
)
def test_the_authors_form(source, tmp_path, case, dtype):
    folder, target, again = source(case, dtype), tmp_path / "target", tmp_path / "again"
    record = export_checkpoint(folder, target, "released")
    assert record["largest_deviation"]["value"] == 0 == record["verification"]["max_difference"]
    fields = json.loads((target / "config.json").read_text())
    assert fields["model_type"] == "qwen2" and "attn_gate" not in fields
    assert torch.equal(logits(target), logits(folder))
    import_checkpoint(target, again)
    assert torch.equal(logits(again), logits(folder))
    if "scale" not in case:
        before, after = weights_of(folder), weights_of(again)
        assert before.keys() == after.keys() and all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("name", RELEASED_NAMES)
def test_released_checkpoints_go_out_and_come_in(tmp_path, name):
    """Recorded results of the authors' code, through the native layout and through Qwen3.5's."""
    native, back, other = tmp_path / "native", tmp_path / "back", tmp_path / "other"
    import_checkpoint(RELEASED / name, native)
    assert json.loads((native / "config.json").read_text())["model_type"] == "gated_qwen"
    assert torch.equal(logits(native), logits(RELEASED / name))
    export_checkpoint(native, back, "released")
    before = torch.load(RELEASED / name / "pytorch_model.bin", weights_only=True)
    after = weights_of(back)
    assert all(torch.equal(after[key], before[key]) for key in after) and before.keys() - after.keys() <= {
        "lm_head.weight"
    }
    export_checkpoint(RELEASED / name, other, "qwen3_5")
    assert max_error(logits(other, Qwen3_5ForCausalLM), logits(RELEASED / name)) < 5e-5


def test_trained_in_the_other_form_it_comes_in_as_it_is(source, tmp_path):
    """Rows of a headwise gate that have moved apart are an elementwise gate."""
    target, trained = tmp_path / "target", tmp_path / "trained"
    export_checkpoint(source("headwise in one layer, scale 4", torch.float32), target, "qwen3_5")
    model = Qwen3_5ForCausalLM.from_pretrained(target)
    for file in target.glob("*.safetensors*"):
        file.unlink()
    randomise(model, 5).save_pretrained(target)
    record = import_checkpoint(target, trained)
    config = gated_qwen.GatedQwenConfig.from_pretrained(trained)
    assert (config.attn_gate, config.attn_gate_scale, config.attn_gate_layers) == ("elementwise", 1.0, None)
    assert record["verification"]["max_difference"] < 4e-5
    assert max_error(logits(trained), logits(target, Qwen3_5ForCausalLM)) < 4e-5


def test_without_the_record_it_comes_in_as_it_is(source, tmp_path):
    target = tmp_path / "target"
    export_checkpoint(source("headwise", torch.float32), target, "qwen3_next")
    (target / "conversion.json").unlink()
    import_checkpoint(target, tmp_path / "again")
    assert gated_qwen.GatedQwenConfig.from_pretrained(tmp_path / "again").attn_gate == "elementwise"
    assert max_error(logits(tmp_path / "again"), logits(source("headwise", torch.float32))) < 4e-5


@pytest.mark.parametrize(
    ("fields", "to", "words"),
    [
        (dict(use_qk_norm=False), "qwen3_5", "without norms on queries and keys"),
        (dict(mlp_bias=True), "qwen3_next", "biases in the MLP"),
        (dict(use_sliding_window=True, sliding_window=7, max_window_layers=1), "qwen3_5", "sliding windows"),
        (dict(attn_gate_scale=1.5), "qwen3_5", "attn_gate_scale 1.5 is not a power of two"),
        (dict(attn_gate_scale=1.5), "released", "attn_gate_scale 1.5 is not a power of two"),
        (dict(mlp_bias=True), "released", "mlp_bias"),
        (dict(attn_gate_bias=True), "released", "attn_gate_bias unlike attention_bias"),
    ],
)
def test_what_cannot_be_expressed_is_refused(tmp_path, fields, to, words):
    build("headwise", **fields).save_pretrained(tmp_path / "source")
    with pytest.raises(CheckpointError, match=words) as error:
        export_checkpoint(tmp_path / "source", tmp_path / "target", to)
    assert "\n" not in str(error.value) and "native" in str(error.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_other_heads_and_wrong_arguments(tmp_path):
    model = gated_qwen.GatedQwenForSequenceClassification(tiny_config(attn_gate="headwise"))
    model.save_pretrained(tmp_path / "classifier")
    for to in ("qwen3_5", "released"):
        with pytest.raises(CheckpointError, match="causal language model|another class"):
            plan_export(tmp_path / "classifier", to)
    with pytest.raises(ValueError, match="`to` must be one of 'qwen3_5'"):
        plan_export(tmp_path / "classifier", "llama")
    for to in ("released", "native"):
        with pytest.raises(ValueError, match="`linear_layer` is of qwen3_5 and qwen3_next"):
            plan_export(tmp_path / "classifier", to, linear_layer=True)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"layer_types": ["linear_attention", "full_attention", "full_attention"]}, "linear attention layers"),
        ({"partial_rotary_factor": 0.5}, "partial rotary"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}}, "partial"),
        ({"architectures": ["Qwen3_5ForConditionalGeneration"]}, "the class"),
        ({"model_type": "qwen3_5"}, "vision"),
        ({"model_type": "gemma3"}, "cannot be put onto it"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
        ({"num_hidden_layers": 2}, "layer_types|no place"),
        ({"head_dim": 20}, "is .* by"),
        ({"hidden_act": "nosuch"}, "hidden_act"),
        ({"attention_bias": True}, "bias is missing"),
    ],
)
def test_what_cannot_be_imported_is_refused(source, tmp_path, fields, words):
    target = tmp_path / "target"
    export_checkpoint(source("headwise", torch.float32), target, "qwen3_5")
    config = json.loads((target / "config.json").read_text())
    if fields.get("partial_rotary_factor"):
        config["rope_parameters"].pop("partial_rotary_factor")
    if "layer_types" in fields:
        fields = {"layer_types": fields["layer_types"][:1] * config["num_hidden_layers"]}
    (target / "config.json").write_text(json.dumps({**config, **fields}))
    with pytest.raises(CheckpointError, match=words) as error:
        import_checkpoint(target, tmp_path / "again")
    assert "\n" not in str(error.value) and not (tmp_path / "again").exists()


def test_nothing_to_import(source, tmp_path):
    with pytest.raises(CheckpointError, match="native layout already"):
        plan_import(source("headwise", torch.float32))
    with pytest.raises(CheckpointError, match="native layout already"):
        plan_export(source("headwise", torch.float32), "native")
    stock = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=11))  # fmt: skip
    stock.save_pretrained(tmp_path / "llama")
    with pytest.raises(CheckpointError, match="has no gates to import"):
        plan_import(tmp_path / "llama")


def test_a_tensor_too_many_or_missing(source, tmp_path):
    target = tmp_path / "target"
    export_checkpoint(source("headwise", torch.float32), target, "qwen3_5")
    (file,) = [f for f in target.glob("*.safetensors") if "model.norm.weight" in load_file(f)]
    weights = load_file(file)
    norm = weights.pop("model.norm.weight")
    index = json.loads((target / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.layers.0.mlp.experts.0.up_proj.weight"] = index["weight_map"].pop("model.norm.weight")
    save_file({**weights, "model.layers.0.mlp.experts.0.up_proj.weight": norm}, file, metadata={"format": "pt"})
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="mixture of experts"):
        import_checkpoint(target, tmp_path / "again")


def test_the_command_line(source, tmp_path, capsys):
    folder, target = source("headwise", torch.float32), tmp_path / "target"
    assert cli.main(["export", str(folder), str(target), "--to", "qwen3_5", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "target      qwen3_5_text" in out and "none but rounding" in out and not target.exists()
    assert cli.main(["export", str(folder), str(target), "--to", "qwen3_5", "--quiet"]) == 0
    assert "verified    largest difference" in capsys.readouterr().out
    assert cli.main(["import", str(target), str(tmp_path / "again"), "--quiet"]) == 0
    assert cli.main(["import", str(tmp_path / "again"), str(tmp_path / "more"), "--quiet"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_an_import_is_stripped_like_its_source(source, tmp_path):
    """The records of the export and of the import lie between."""
    stock = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(
        hidden_size=36, intermediate_size=44, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
        head_dim=10, vocab_size=131, max_position_embeddings=64))  # fmt: skip
    randomise(stock).save_pretrained(tmp_path / "stock")
    gated_qwen.retrofit_checkpoint(tmp_path / "stock", tmp_path / "gated")
    export_checkpoint(tmp_path / "gated", tmp_path / "exported", "qwen3_5")
    import_checkpoint(tmp_path / "exported", tmp_path / "imported")
    gated_qwen.strip_checkpoint(tmp_path / "imported", tmp_path / "stripped")
    assert (tmp_path / "stripped" / "config.json").read_bytes() == (tmp_path / "stock" / "config.json").read_bytes()
    before, after = weights_of(tmp_path / "stock"), weights_of(tmp_path / "stripped")
    assert before.keys() == after.keys()
    assert all(max_error(after[n], before[n]) <= (2**-24 if "norm" in n else 0) for n in before)


@pytest.mark.parametrize("to", ["qwen3_5", "qwen3_next", "released"])
@pytest.mark.parametrize("part", ["g_proj", "q_proj", "g_proj.bias"])
def test_gates_of_another_dtype_than_the_queries_are_refused(tmp_path, to, part):
    model = build("elementwise", attention_bias=True, attn_gate_bias=True).bfloat16()
    for name, parameter in model.named_parameters():
        if part in name:
            parameter.data = parameter.data.float()
    model.save_pretrained(tmp_path / "source")
    with pytest.raises(
        CheckpointError, match=r"q_proj\.(weight|bias) is (BF16|F32), and there they become one"
    ) as error:
        export_checkpoint(tmp_path / "source", tmp_path / "target", to, verify=False)
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": None}, {"text_config": {}}, {"text_config": "x"}, {"model_type": []}, {"head_dim": 10**30},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10**30}}, {"base_model_tp_plan": 5},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("to", ["qwen3_5", "qwen3_next"])
def test_an_odd_config_is_imported_or_refused_in_one_line(tmp_path, to, changes):
    model = build("elementwise")
    model.save_pretrained(tmp_path / "source")
    export_checkpoint(tmp_path / "source", tmp_path / "export", to, verify=False)
    file = tmp_path / "export" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    if "architectures" in changes or "text_config" in changes:
        import_checkpoint(tmp_path / "export", tmp_path / "again", verify=False)
        again = gated_qwen.GatedQwenForCausalLM.from_pretrained(tmp_path / "again")
        assert max_error(again(tokens()).logits, model(tokens()).logits) < 1e-4
        return
    with pytest.raises(CheckpointError) as error:
        import_checkpoint(tmp_path / "export", tmp_path / "again", verify=False)
    assert "\n" not in str(error.value) and not (tmp_path / "again").exists()


@pytest.mark.parametrize(
    "path",
    ["command", "largest_deviation", "largest_deviation.value", "verification.inputs", "parameters.new",
     "same_token_ids", "source.name", "source.commit", "tensors.scaled", "tensors.shifted", "files"],
)  # fmt: skip
@pytest.mark.parametrize("value", [[1], "I64"], ids=str)
def test_a_damaged_record_is_one_line(tmp_path, path, value):
    build("elementwise").save_pretrained(tmp_path / "source")
    export_checkpoint(tmp_path / "source", tmp_path / "export", "qwen3_5", verify=False)
    file = tmp_path / "export" / "conversion.json"
    record = json.loads(file.read_text())
    record["verification"] = {"max_difference": 0.0, "dtype": "float32", "inputs": ["text"]}
    *place, last = path.split(".")
    at = record[place[0]] if place else record
    at[last] = {next(iter(at[last]), "model.layers.0.x"): value} if path == "tensors.shifted" else value
    if path in ("command", "source.name", "source.commit") and isinstance(value, str):
        at[last] = {}
    file.write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match=r"conversion\.json is damaged: move it away"):
        import_checkpoint(tmp_path / "export", tmp_path / "again", verify=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["export", "source"]
