"""Released checkpoints through transformers' own loading: found, recognised, right to the last digit, saved natively.

What they compute is held against the results of the authors' code beside each one (tests/data/released).
"""

import builtins
import hashlib
import importlib
import json
import os
import shutil
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from support import RELEASED, RELEASED_NAMES, randomise
from tokenizers import Tokenizer
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
    StaticCache,
    pipeline,
)
from transformers.quantizers import auto as quantizers_auto
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import get_module_from_name
from transformers.utils.quantization_config import QuantizationConfigMixin

import gated_qwen
from gated_qwen import GatedQwenConfig, GatedQwenForCausalLM, GatedQwenModel
from gated_qwen.modeling.mapped_files import let_go_of_pages
from gated_qwen.modeling.modeling_gated_qwen import CACHE

# What is promised is 1e-4. Measured in fp32: eager 0, other backends and caches up to 1e-5, on logits of about 20.
TOLERANCE = 3e-5

GATES = dict(zip(RELEASED_NAMES, (None, "headwise", "elementwise"), strict=True))
CODE = ("configuration_qwen3", "modeling_qwen3")
HEADS = {
    AutoModelForSequenceClassification: {"score.weight"},
    AutoModelForTokenClassification: {"score.weight", "score.bias"},
    AutoModelForQuestionAnswering: {"qa_outputs.weight", "qa_outputs.bias"},
}

names = pytest.mark.parametrize("name", RELEASED_NAMES)
backends = pytest.mark.parametrize("backend", ["eager", "sdpa", "flex_attention"])
gated_names = pytest.mark.parametrize("name", RELEASED_NAMES[1:])


@pytest.fixture(autouse=True)
def without_gradients_and_compilation():
    """Compiling flex_attention takes seconds for each new shape, and on CPU it has no gradients."""
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture(autouse=True)
def no_prompt(monkeypatch):
    def prompt(text=""):
        raise AssertionError(f"asked the user: {text}")

    monkeypatch.setattr(builtins, "input", prompt)


def load(folder, **kwargs):
    return AutoModelForCausalLM.from_pretrained(folder, **{"dtype": torch.float32, **kwargs})


def expected_of(name) -> dict[str, torch.Tensor]:
    return load_file(RELEASED / name / "expected.safetensors")


def inputs_of(expected) -> dict[str, torch.Tensor]:
    return {key: expected[key] for key in ("input_ids", "attention_mask", "position_ids")}


def max_error(found, expected) -> float:
    assert found.shape == expected.shape
    return (found.float() - expected).abs().max().item()


def logits_error(model, expected) -> float:
    real = expected["attention_mask"].bool()
    return max_error(model(**inputs_of(expected)).logits[real], expected["logits"][real])


def same_weights(a, b) -> bool:
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def hashes(folder: Path) -> dict[str, str]:
    files = (file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def change_config(folder, remove=(), **fields):
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **fields}
    file.write_text(json.dumps({name: value for name, value in config.items() if name not in remove}))


# The authors' results


@names
@backends
def test_results_of_the_authors_code(name, backend):
    """Row 0 is whole, row 1 padded on the left."""
    expected = expected_of(name)
    real = expected["attention_mask"].bool()
    model = load(RELEASED / name, attn_implementation=backend)
    asked = {"output_hidden_states": True, "output_gate_scores": True, "output_attentions": backend == "eager"}
    outputs = model(**inputs_of(expected), **asked)
    assert max_error(outputs.logits[real], expected["logits"][real]) <= TOLERANCE
    assert max_error(outputs.hidden_states[-1][real], expected["last_hidden_state"][real]) <= TOLERANCE
    gates = [expected[key] for key in sorted(expected) if key.startswith("gate.")]
    assert len(gates) == (0 if GATES[name] is None else 3)
    for scores, gate in zip(outputs.gate_scores, gates, strict=True):
        assert max_error(scores[real], gate[real]) <= TOLERANCE
    if backend == "eager":
        first_key = torch.stack([layer[..., 0] for layer in outputs.attentions]).transpose(2, 3)
        assert max_error(first_key[:, real], expected["attention_first_key"].transpose(2, 3)[:, real]) <= TOLERANCE


@names
@backends
def test_one_row_without_padding(name, backend):
    expected = expected_of(name)
    model = load(RELEASED / name, attn_implementation=backend)
    for row in range(2):
        real = expected["attention_mask"][row].bool()
        logits = model(expected["input_ids"][row, real][None]).logits[0]
        assert max_error(logits, expected["logits"][row, real]) <= TOLERANCE


@names
@backends
def test_greedy_tokens(name, backend):
    expected = expected_of(name)
    model = load(RELEASED / name, attn_implementation=backend)
    tokens = model.generate(expected["input_ids"][:1], max_new_tokens=20, do_sample=False, eos_token_id=None)
    assert torch.equal(tokens, expected["greedy"])


@names
@backends
def test_token_by_token_with_a_cache(name, backend):
    expected = expected_of(name)
    model = load(RELEASED / name, attn_implementation=backend)
    real = expected["attention_mask"].bool()
    cache, logits = None, []
    for position in range(expected["input_ids"].shape[1]):
        outputs = model(
            expected["input_ids"][:, position : position + 1],
            attention_mask=expected["attention_mask"][:, : position + 1],
            position_ids=expected["position_ids"][:, position : position + 1],
            use_cache=True,
            **{CACHE: cache},
        )
        cache = outputs[CACHE]
        assert cache.get_seq_length() == position + 1
        logits.append(outputs.logits)
    assert max_error(torch.cat(logits, dim=1)[real], expected["logits"][real]) <= TOLERANCE


@names
@pytest.mark.parametrize(
    "backend", ["eager", "sdpa"]
)  # transformers' mask for flex_attention is one key too wide here
def test_static_cache(name, backend):
    expected = expected_of(name)
    model = load(RELEASED / name, attn_implementation=backend)
    cache = StaticCache(config=model.config, max_cache_len=37)
    ids = expected["input_ids"][:1]
    parts = [model(ids[:, :20], **{CACHE: cache}).logits]
    for i in range(20, 37):
        parts.append(model(ids[:, i : i + 1], position_ids=torch.tensor([[i]]), **{CACHE: cache}).logits)
    assert max_error(torch.cat(parts, dim=1), expected["logits"][:1]) <= TOLERANCE


@names
@pytest.mark.parametrize("cache", ["dynamic", "static", None])
def test_greedy_tokens_with_and_without_a_cache(name, cache):
    expected = expected_of(name)
    model = load(RELEASED / name)
    how = {"use_cache": False} if cache is None else {"cache_implementation": cache}
    tokens = model.generate(
        expected["input_ids"][:1], max_new_tokens=20, do_sample=False, eos_token_id=None, disable_compile=True, **how
    )
    assert torch.equal(tokens, expected["greedy"])


# Ways to find a checkpoint

FRESH = """
import json, sys
import gated_qwen
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, pipeline

results = {}
for name in sys.argv[2:]:
    where = {"pretrained_model_name_or_path": "QwQZh/gated_attention", "subfolder": name}
    generator = pipeline("text-generation", model=f"{sys.argv[1]}/{name}")
    text = "The gate"
    results[name] = {
        "config": type(AutoConfig.from_pretrained(**where)).__name__,
        "base": type(AutoModel.from_pretrained(**where)).__name__,
        "model": type(AutoModelForCausalLM.from_pretrained(**where)).__name__,
        "trusting": type(AutoModelForCausalLM.from_pretrained(**where, trust_remote_code=True)).__name__,
        "tokenizer": type(AutoTokenizer.from_pretrained(**where)).__name__,
        "pipeline": type(generator.model).__name__,
        "starts": generator(text, max_new_tokens=4, do_sample=False)[0]["generated_text"].startswith(text),
    }
code = [name for name in sys.modules if "configuration_qwen3" in name and "transformers.models" not in name]
code += [name for name in sys.modules if "modeling_qwen3" in name and "transformers.models" not in name]
print(json.dumps({"results": results, "code": code}))
"""
COMMIT = "aad415c45ec6b4fa727ef3ff3f4e9f62f958d49b"


@pytest.fixture
def hub_cache(tmp_path) -> Path:
    """A Hub cache with the three checkpoints, in links to read-only blobs, as the Hub's client leaves it."""
    repository = tmp_path / "hub" / "models--QwQZh--gated_attention"
    for folder in ("blobs", "refs"):
        (repository / folder).mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    for file in RELEASED.glob("*/*"):
        content = file.read_bytes()
        blob = repository / "blobs" / hashlib.sha256(content).hexdigest()
        blob.write_bytes(content)
        blob.chmod(0o444)
        link = repository / "snapshots" / COMMIT / file.relative_to(RELEASED)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    return tmp_path / "hub"


def test_a_fresh_process_needs_the_import_only(hub_cache, tmp_path):
    """By local path and by Hub id; nothing is asked, nothing of the folder is run."""
    before = hashes(hub_cache)
    environment = {**os.environ, "HF_HUB_CACHE": str(hub_cache), "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", FRESH, RELEASED, *RELEASED_NAMES],
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    ours = {
        "config": "GatedQwenConfig",
        "base": "GatedQwenModel",
        "model": "GatedQwenForCausalLM",
        "trusting": "GatedQwenForCausalLM",
        "tokenizer": "Qwen2Tokenizer",
        "pipeline": "GatedQwenForCausalLM",
        "starts": True,
    }
    assert found == {"results": dict.fromkeys(RELEASED_NAMES, ours), "code": []}
    assert hashes(hub_cache) == before


@names
def test_path_subfolder_and_hub_id_give_the_same_model(name, hub_cache):
    before = hashes(hub_cache)
    by_path = load(RELEASED / name)
    assert same_weights(load(RELEASED, subfolder=name), by_path)
    cached = {"cache_dir": hub_cache, "subfolder": name}
    for revision in ({}, {"revision": "main"}, {"revision": COMMIT}):
        by_id = load("QwQZh/gated_attention", **cached, **revision)
        assert type(by_id) is GatedQwenForCausalLM and same_weights(by_id, by_path)
    assert by_id.config.to_diff_dict() == by_path.config.to_diff_dict()
    assert by_id.generation_config.eos_token_id == [319, 317]
    ids = AutoTokenizer.from_pretrained("QwQZh/gated_attention", **cached)("The gate 😀")["input_ids"]
    assert ids == AutoTokenizer.from_pretrained(RELEASED / name)("The gate 😀")["input_ids"]
    assert hashes(hub_cache) == before


@names
@pytest.mark.parametrize("trust", [None, True, False])
def test_the_code_in_the_folder_is_never_imported(name, trust):
    before = set(sys.modules)
    for auto_class in (AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer):
        auto_class.from_pretrained(RELEASED / name, trust_remote_code=trust)
    generator = pipeline("text-generation", model=str(RELEASED / name), trust_remote_code=trust)
    assert type(generator.model) is GatedQwenForCausalLM
    imported = {module for module in set(sys.modules) - before if not module.startswith("transformers.")}
    assert not [module for module in imported if module.startswith("transformers_modules") or module.endswith(CODE)]


@names
def test_our_own_classes_load_it_too(name):
    expected = expected_of(name)
    model = GatedQwenForCausalLM.from_pretrained(RELEASED / name, dtype=torch.float32)
    assert logits_error(model, expected) <= TOLERANCE
    base = GatedQwenModel.from_pretrained(str(RELEASED / name), dtype=torch.float32)
    assert same_weights(base, model.model)
    config = GatedQwenConfig.from_pretrained(RELEASED / name, dtype=torch.float32)
    assert config.to_diff_dict() == model.config.to_diff_dict()


# Recognition


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", None])
def test_a_released_checkpoint_is_recognised_by_its_flags(released, model_type):
    change_config(released, model_type=model_type, remove=() if model_type else ("model_type",))
    config = AutoConfig.from_pretrained(released)
    assert type(config) is GatedQwenConfig and config.attn_gate == GATES[released.name]
    assert logits_error(load(released), expected_of(released.name)) <= TOLERANCE


def test_it_is_recognised_without_auto_map_and_code(released):
    change_config(released, remove=("auto_map", "architectures"))
    for name in CODE:
        (released / f"{name}.py").unlink()
    assert logits_error(load(released), expected_of(released.name)) <= TOLERANCE


@pytest.mark.parametrize(("model_type", "stock"), [("qwen2", Qwen2Config), ("qwen3", Qwen3Config)])
def test_without_the_flags_it_is_the_stock_class_that_it_says(released, model_type, stock):
    change_config(
        released,
        model_type=model_type,
        remove=("headwise_attn_output_gate", "elementwise_attn_output_gate", "qkv_bias", "auto_map"),
    )
    assert type(AutoConfig.from_pretrained(released)) is stock


def test_another_model_type_is_left_alone(released):
    change_config(released, model_type="llama", remove=("auto_map",))
    config = AutoConfig.from_pretrained(released)
    assert type(config) is transformers.LlamaConfig
    assert config.headwise_attn_output_gate is (GATES[released.name] == "headwise")


SIZES = dict(
    vocab_size=352,
    hidden_size=48,
    intermediate_size=112,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    pad_token_id=None,
)


@pytest.mark.parametrize("auto_map", [False, True], ids=["plain", "auto_map"])
@pytest.mark.parametrize(
    ("config", "model_class"),
    [(Qwen2Config(**SIZES), Qwen2ForCausalLM), (Qwen3Config(head_dim=16, **SIZES), Qwen3ForCausalLM)],
    ids=["qwen2", "qwen3"],
)
def test_stock_checkpoints_keep_their_classes(config, model_class, auto_map, tmp_path):
    model = randomise(model_class(config))
    model.save_pretrained(tmp_path)
    shutil.copy(RELEASED / RELEASED_NAMES[0] / "tokenizer.json", tmp_path)
    shutil.copy(RELEASED / RELEASED_NAMES[0] / "tokenizer_config.json", tmp_path)
    map_of_code = {"AutoConfig": "configuration_qwen3.C", "AutoModelForCausalLM": "modeling_qwen3.M"}
    if auto_map:
        change_config(tmp_path, auto_map=map_of_code)
        for name in CODE:
            shutil.copy(RELEASED / RELEASED_NAMES[0] / f"{name}.py", tmp_path)

    read = AutoConfig.from_pretrained(tmp_path)
    assert type(read) is type(config)
    assert getattr(read, "auto_map", None) == (map_of_code if auto_map else None)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is model_class and same_weights(loaded, model) and not any(info.values())
    assert type(AutoTokenizer.from_pretrained(tmp_path)) is Qwen2Tokenizer
    assert type(pipeline("text-generation", model=str(tmp_path)).model) is model_class
    assert type(model_class.from_pretrained(tmp_path)) is model_class


def test_registering_again_changes_nothing(tmp_path):
    Qwen2ForCausalLM(Qwen2Config(**SIZES)).save_pretrained(tmp_path)
    before = PreTrainedConfig.get_config_dict.__func__
    importlib.reload(gated_qwen)
    gated_qwen.register()
    gated_qwen.register()
    assert PreTrainedConfig.get_config_dict.__func__ is before
    assert gated_qwen.GatedQwenForCausalLM is GatedQwenForCausalLM
    for _ in range(2):
        model = load(RELEASED / "1B_gate_headwise")
        assert type(model) is GatedQwenForCausalLM
        assert logits_error(model, expected_of("1B_gate_headwise")) <= TOLERANCE
        assert type(AutoModelForCausalLM.from_pretrained(tmp_path)) is Qwen2ForCausalLM


def test_the_wrapped_reader_keeps_its_contract(tmp_path):
    """Ours is a wrapper around a method of every config in transformers."""
    config, rest = PreTrainedConfig.get_config_dict(RELEASED / "1B_baseline", subfolder="", extra=1)
    assert config["model_type"] == "gated_qwen" and rest["extra"] == 1
    assert "auto_map" not in config and config["headwise_attn_output_gate"] is False
    Qwen3Config(**SIZES).save_pretrained(tmp_path)
    config, _ = Qwen3Config.get_config_dict(tmp_path)
    config.pop("_commit_hash", None)
    assert config == json.loads((tmp_path / "config.json").read_text())


# What is loaded, and how


@names
def test_loading_is_complete_and_silent(name, log):
    model, info = AutoModelForCausalLM.from_pretrained(RELEASED / name, output_loading_info=True)
    assert not any(info.values()), info
    assert not log.records, log.text
    assert not model.training
    assert not any(parameter.is_meta for parameter in (*model.parameters(), *model.buffers()))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


@names
def test_every_weight_is_the_files_own(name):
    """Bit for bit, the packed rows too: group by group, query rows first."""
    model = AutoModelForCausalLM.from_pretrained(RELEASED / name)
    file = torch.load(RELEASED / name / "pytorch_model.bin", weights_only=True)
    for key, value in model.state_dict().items():
        if ".q_proj." in key or ".g_proj." in key:
            continue
        assert torch.equal(value, file[key])
    for index, layer in enumerate(model.model.layers):
        groups = []
        rows = 0 if GATES[name] is None else layer.self_attn.g_proj.out_features // 2
        for group in range(2):
            groups.append(layer.self_attn.q_proj.weight[32 * group : 32 * (group + 1)])
            if rows:
                groups.append(layer.self_attn.g_proj.weight[rows * group : rows * (group + 1)])
        assert torch.equal(torch.cat(groups), file[f"model.layers.{index}.self_attn.q_proj.weight"])


@names
@pytest.mark.parametrize("dtype", ["auto", None, "float32", "bfloat16", "float16"])
def test_dtype(name, dtype):
    kwargs = {} if dtype is None else {"dtype": dtype}
    model = AutoModelForCausalLM.from_pretrained(RELEASED / name, **kwargs)
    expected = torch.bfloat16 if dtype in ("auto", None) else getattr(torch, dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {expected}
    assert model.dtype == model.config.dtype == expected


def test_dtype_of_a_config_that_names_none(released):
    change_config(released, remove=("torch_dtype",))
    model = AutoModelForCausalLM.from_pretrained(released)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert logits_error(load(released), expected_of(released.name)) <= TOLERANCE


@names
def test_the_pickle_is_read_as_plain_tensors_and_mapped(name, monkeypatch):
    calls = []
    original = torch.load

    def recorded(*args, **kwargs):
        calls.append(kwargs)
        return original(*args, **kwargs)

    monkeypatch.setattr(torch, "load", recorded)
    load(RELEASED / name)
    assert calls and all(call["weights_only"] is True and call["mmap"] is True for call in calls)


def released_layout(folder, form):
    """Rewrite the pickle of a released folder as something else with the same tensors."""
    weights = torch.load(folder / "pytorch_model.bin", weights_only=True)
    (folder / "pytorch_model.bin").unlink()
    keys = sorted(weights)
    halves = {"00001": keys[: len(keys) // 2], "00002": keys[len(keys) // 2 :]}
    suffix = "safetensors" if "safetensors" in form else "bin"
    stem = "model" if suffix == "safetensors" else "pytorch_model"

    def write(some, file):
        if suffix == "bin":
            torch.save(some, folder / file)
        else:
            save_file({key: value.clone() for key, value in some.items()}, folder / file, metadata={"format": "pt"})

    if suffix == "safetensors":
        del weights["lm_head.weight"]
    if "sharded" not in form:
        write(weights, f"{stem}.{suffix}")
        return
    index = {}
    for number, part in halves.items():
        file = f"{stem}-{number}-of-00002.{suffix}"
        part = [key for key in part if key in weights]
        write({key: weights[key] for key in part}, file)
        index |= dict.fromkeys(part, file)
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


FORMS = ("bin", "sharded bin", "safetensors", "sharded safetensors")


@pytest.mark.parametrize("form", FORMS[1:])
def test_other_files_with_the_released_layout(released, form):
    released_layout(released, form)
    model, info = load(released, output_loading_info=True)
    assert not any(info.values()), info
    assert logits_error(model, expected_of(released.name)) <= TOLERANCE
    assert model.lm_head.weight is model.model.embed_tokens.weight


SPLIT = {
    **dict.fromkeys(("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head"), "cpu"),
    "model.layers.1": "disk",
    "model.layers.2": "disk",
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("device_map", ["cpu", "auto", SPLIT], ids=["cpu", "auto", "disk"])
def test_device_map(released, form, device_map, tmp_path):
    if form != "bin":
        released_layout(released, form)
    expected = expected_of(released.name)
    model, info = load(released, device_map=device_map, offload_folder=tmp_path / "off", output_loading_info=True)
    assert not any(info.values()), info
    if device_map is SPLIT:
        assert all(parameter.is_meta for parameter in model.model.layers[1].parameters())
    assert logits_error(model, expected) <= TOLERANCE


@names
def test_everything_on_disk(name, tmp_path):
    model = load(RELEASED / name, device_map={"": "disk"}, offload_folder=tmp_path)
    assert logits_error(model, expected_of(name)) <= TOLERANCE


@names
def test_an_explicit_config(name):
    expected = expected_of(name)
    config = AutoConfig.from_pretrained(RELEASED / name)
    assert logits_error(load(RELEASED / name, config=config), expected) <= TOLERANCE
    assert logits_error(load(RELEASED / name, config=str(RELEASED / name)), expected) <= TOLERANCE
    config = AutoConfig.from_pretrained(RELEASED / name, attn_implementation="eager")
    model = GatedQwenForCausalLM.from_pretrained(RELEASED / name, config=config, dtype=torch.float32)
    assert model.config._attn_implementation == "eager"
    assert logits_error(model, expected) <= TOLERANCE


@gated_names
def test_an_override_of_the_scale(name):
    """Twice the scale is twice the gate: what the authors' code gives with o_proj doubled."""
    doubled = load(RELEASED / name, attn_gate_scale=2.0)
    plain = load(RELEASED / name)
    for layer in plain.model.layers:
        layer.self_attn.o_proj.weight.mul_(2)
    ids = expected_of(name)["input_ids"][:1]
    assert max_error(doubled(ids).logits, plain(ids).logits) <= TOLERANCE


@names
def test_a_state_dict_in_the_released_layout(name):
    weights = torch.load(RELEASED / name / "pytorch_model.bin", weights_only=True)
    config = AutoConfig.from_pretrained(RELEASED / name)
    model = GatedQwenForCausalLM.from_pretrained(None, config=config, state_dict=weights, dtype=torch.float32)
    assert logits_error(model, expected_of(name)) <= TOLERANCE


# Saving


def assert_native(folder, name):
    saved = json.loads((folder / "config.json").read_text())
    assert saved["model_type"] == "gated_qwen" and saved["attn_gate"] == GATES[name]
    assert saved["architectures"] == ["GatedQwenForCausalLM"]
    fields = ("headwise_attn_output_gate", "elementwise_attn_output_gate", "qkv_bias", "auto_map", "_is_released")
    assert not saved.keys() & set(fields)
    assert not list(folder.glob("*.py")) and not list(folder.glob("*.bin"))
    weights = load_file(folder / "model.safetensors")
    rows = {None: set(), "headwise": {(4, 48)}, "elementwise": {(64, 48)}}[GATES[name]]
    assert {tuple(value.shape) for key, value in weights.items() if ".q_proj.weight" in key} == {(64, 48)}
    assert {tuple(value.shape) for key, value in weights.items() if ".g_proj.weight" in key} == rows
    assert "lm_head.weight" not in weights


@names
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_saved_is_native_and_reloads_bit_for_bit(name, dtype, tmp_path):
    model = load(RELEASED / name, dtype=dtype)
    model.save_pretrained(tmp_path)
    assert_native(tmp_path, name)
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()) and again.dtype == dtype
    assert same_weights(again, model)
    ids = expected_of(name)["input_ids"]
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert again.generation_config.to_diff_dict() == model.generation_config.to_diff_dict()
    assert again.generation_config.eos_token_id == [319, 317] and again.generation_config.max_new_tokens == 64


PROBES = [
    "The gate of a head",
    "  two  spaces\tand\n\nlines ",
    "Grüße, naïve café – 東京 مرحبا",
    "👩‍👩‍👧 😀 é e\u0301",
    "12345 x=3.14 <|im_end|>text<|endoftext|>",
    "",
]


@names
def test_the_tokenizer_travels(name, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(RELEASED / name)
    assert tokenizer.bos_token is None and tokenizer.eos_token == "<|im_end|>"
    load(RELEASED / name).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert type(again) is type(tokenizer) is Qwen2Tokenizer
    for text in PROBES:
        ids = tokenizer(text)["input_ids"]
        assert again(text)["input_ids"] == ids
        assert tokenizer.decode(ids) == again.decode(ids)
    chat = [{"role": "user", "content": "hello"}]
    assert again.apply_chat_template(chat, tokenize=False) == tokenizer.apply_chat_template(chat, tokenize=False)
    assert (again.bos_token, again.eos_token, again.pad_token) == (None, "<|im_end|>", "<|endoftext|>")


@names
def test_tokens_are_those_of_the_file_and_none_is_added(name):
    plain = Tokenizer.from_file(str(RELEASED / name / "tokenizer.json"))
    tokenizer = AutoTokenizer.from_pretrained(RELEASED / name)
    for text in PROBES:
        text = unicodedata.normalize("NFC", text)  # as Qwen2Tokenizer does, whatever its file says
        assert tokenizer(text)["input_ids"] == plain.encode(text, add_special_tokens=False).ids


@names
def test_saving_twice_gives_the_same_bytes(name, tmp_path):
    model = load(RELEASED / name, dtype="auto")
    model.save_pretrained(tmp_path / "a")
    model.save_pretrained(tmp_path / "b")
    load(tmp_path / "a", dtype="auto").save_pretrained(tmp_path / "c")
    assert hashes(tmp_path / "a") == hashes(tmp_path / "b") == hashes(tmp_path / "c")


@names
def test_a_new_model_of_a_released_config_is_saved_native(name, tmp_path):
    config = AutoConfig.from_pretrained(RELEASED / name)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    assert_native(tmp_path, name)
    assert same_weights(AutoModelForCausalLM.from_pretrained(tmp_path), model)
    # The config still knows where it came from; native weights under it pass through untouched.
    assert same_weights(GatedQwenForCausalLM.from_pretrained(tmp_path, config=config), model)


# Heads


@names
@pytest.mark.parametrize("auto_class", HEADS, ids=lambda auto_class: auto_class.__name__)
@pytest.mark.parametrize("form", ["released", "native"])
def test_heads_are_new_and_the_decoder_is_the_checkpoints(name, auto_class, form, tmp_path, log):
    model = load(RELEASED / name)
    folder = RELEASED / name
    if form == "native":
        folder = tmp_path
        model.save_pretrained(folder)
    head, info = auto_class.from_pretrained(folder, num_labels=3, dtype=torch.float32, output_loading_info=True)
    assert type(head).__name__ == auto_class.__name__.replace("AutoModel", "GatedQwen")
    assert same_weights(head.base_model, model.model)
    assert info["missing_keys"] == HEADS[auto_class]
    assert set(info["unexpected_keys"]) <= {"lm_head.weight"} and not info["mismatched_keys"]
    assert "LOAD REPORT" in log.text and all(key in log.text for key in HEADS[auto_class])
    assert head(expected_of(name)["input_ids"][:1]).to_tuple()[0].isfinite().all()


@names
def test_the_base_model(name, tmp_path):
    expected = expected_of(name)
    real = expected["attention_mask"].bool()
    base, info = AutoModel.from_pretrained(RELEASED / name, dtype=torch.float32, output_loading_info=True)
    assert type(base) is GatedQwenModel and not info["missing_keys"] and not info["mismatched_keys"]
    states = base(**inputs_of(expected)).last_hidden_state
    assert max_error(states[real], expected["last_hidden_state"][real]) <= TOLERANCE
    base.save_pretrained(tmp_path)
    assert same_weights(AutoModel.from_pretrained(tmp_path), base)
    # A decoder saved alone still makes a whole language model: the head is the embedding.
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    assert logits_error(model, expected) <= TOLERANCE


# Adapters


def with_lora(model, *targets):
    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(r=2, target_modules=list(targets), init_lora_weights=False)).eval()


@names
def test_an_adapter_loads_on_a_released_checkpoint(name, tmp_path):
    ids = expected_of(name)["input_ids"]
    targets = ["q_proj"] if GATES[name] is None else ["q_proj", "g_proj"]
    adapted = with_lora(load(RELEASED / name), *targets)
    logits = adapted(ids).logits
    assert max_error(logits, load(RELEASED / name)(ids).logits) > 1
    adapted.save_pretrained(tmp_path)

    peft_model, info = load(RELEASED / name), None
    peft_model = PeftModel.from_pretrained(peft_model, tmp_path).eval()
    assert torch.equal(peft_model(ids).logits, logits)

    model = load(RELEASED / name)
    info = model.load_adapter(tmp_path)
    assert info is None or not (info.missing_keys or info.unexpected_keys or info.mismatched_keys)
    assert torch.equal(model(ids).logits, logits)


@names
def test_an_adapter_of_the_released_checkpoint_fits_its_native_copy(name, tmp_path):
    ids = expected_of(name)["input_ids"]
    adapted = with_lora(load(RELEASED / name), "q_proj", "v_proj")
    adapted.save_pretrained(tmp_path / "adapter")
    load(RELEASED / name).save_pretrained(tmp_path / "native")
    native = PeftModel.from_pretrained(load(tmp_path / "native"), tmp_path / "adapter").eval()
    assert torch.equal(native(ids).logits, adapted(ids).logits)


@names
def test_a_merged_adapter_is_saved_native(name, tmp_path):
    ids = expected_of(name)["input_ids"]
    merged = with_lora(load(RELEASED / name), "q_proj").merge_and_unload()
    merged.save_pretrained(tmp_path)
    assert_native(tmp_path, name)
    assert torch.equal(load(tmp_path)(ids).logits, merged(ids).logits)


# Quantisation while loading


class RoundedConfig(QuantizationConfigMixin):
    """Eighths instead of the weights: a quantisation that needs no package."""

    def __init__(self, modules_to_not_convert=(), **kwargs):
        self.quant_method = "rounded"
        self.modules_to_not_convert = list(modules_to_not_convert)


class Rounded(HfQuantizer):
    requires_calibration = False

    def param_needs_quantization(self, model, param_name, **kwargs):
        module, name = get_module_from_name(model, param_name)
        kept = self.quantization_config.modules_to_not_convert
        return isinstance(module, torch.nn.Linear) and name == "weight" and param_name.split(".")[-2] not in kept

    def get_quantize_ops(self):
        return Round(self)

    def is_serializable(self):
        return False

    @property
    def is_trainable(self):
        return False


class Round(transformers.core_model_loading.ConversionOps):
    """As some of transformers' own: it takes one tensor, in a list, and sets it on the module that it is for."""

    def __init__(self, hf_quantizer):
        self.hf_quantizer = hf_quantizer

    def convert(self, input_dict, full_layer_name=None, model=None, missing_keys=None, **kwargs):
        (values, *_) = input_dict.values()
        (value,) = values
        module, name = get_module_from_name(model, full_layer_name)
        module._parameters[name] = torch.nn.Parameter((value * 8).round() / 8, requires_grad=False)
        missing_keys.discard(full_layer_name)
        module._is_hf_initialized = True
        return {}


@pytest.fixture
def rounded(monkeypatch):
    monkeypatch.setitem(quantizers_auto.AUTO_QUANTIZATION_CONFIG_MAPPING, "rounded", RoundedConfig)
    monkeypatch.setitem(quantizers_auto.AUTO_QUANTIZER_MAPPING, "rounded", Rounded)


@pytest.mark.skipif(sys.platform != "linux", reason="pages are let go of on Linux only")
def test_pages_of_a_mapped_file_are_let_go_of_and_no_others(tmp_path):
    values = torch.arange(2**20, dtype=torch.float32)
    torch.save(values, tmp_path / "values.bin")
    mapped = torch.load(tmp_path / "values.bin", mmap=True, weights_only=True)

    def resident():
        """kB of the file in this process's memory."""
        maps = Path("/proc/self/smaps").read_text().split("values.bin")
        return sum(int(part.split("Rss:")[1].split()[0]) for part in maps[1:])

    assert torch.equal(mapped, values) and resident() > 4000
    let_go_of_pages(mapped)
    assert resident() < 100
    assert torch.equal(mapped, values)
    let_go_of_pages(values)  # not from a file: its values would be lost
    assert torch.equal(values, mapped)


@names
@pytest.mark.parametrize("kept", [(), ("g_proj",)], ids=["all", "all-but-gates"])
def test_quantisation_acts_on_the_unpacked_weights(name, kept, rounded, tmp_path):
    config = RoundedConfig(modules_to_not_convert=(*kept, "lm_head"))
    plain = load(RELEASED / name)
    model, info = load(RELEASED / name, quantization_config=config, output_loading_info=True)
    assert not any(info.values()), info
    weights = plain.state_dict()
    assert model.state_dict().keys() == weights.keys()
    for key, value in model.state_dict().items():
        linear = key.endswith("_proj.weight") and key.split(".")[-2] not in kept
        assert torch.equal(value, (weights[key] * 8).round() / 8 if linear else weights[key]), key


def torchao():
    from torchao.quantization import Int8WeightOnlyConfig

    return transformers.TorchAoConfig(Int8WeightOnlyConfig())


def bitsandbytes():
    return transformers.BitsAndBytesConfig(load_in_8bit=True)


def bitsandbytes_4_bit():
    return transformers.BitsAndBytesConfig(load_in_4bit=True)


def quanto():
    return transformers.QuantoConfig(weights="int8")


@names
@pytest.mark.parametrize("quantiser", [torchao, bitsandbytes, bitsandbytes_4_bit, quanto])
def test_quantisers_read_the_released_layout_as_they_read_the_native(name, quantiser, tmp_path):
    config = quantiser()
    where = {} if quantiser is quanto else {"device_map": "cpu"}
    model, info = load(RELEASED / name, quantization_config=config, output_loading_info=True, **where)
    assert not any(info.values()), info
    load(RELEASED / name).save_pretrained(tmp_path)
    native = load(tmp_path, quantization_config=quantiser(), **where)
    expected = expected_of(name)
    ids = expected["input_ids"][:1]
    assert torch.equal(model(ids).logits, native(ids).logits)
    if quantiser is not quanto:  # which cannot save
        model.save_pretrained(tmp_path / "quantised")
        assert torch.equal(load(tmp_path / "quantised", **where)(ids).logits, model(ids).logits)
    # On random weights: the mean error is about 1% of the logits' size, 20, in 8 bits, and 10% in 4.
    error = (model(ids).logits - expected["logits"][:1]).abs().mean()
    assert error < (3 if quantiser is bitsandbytes_4_bit else 0.2), error
    # By default the gates are left as they are; the linear beside them is not.
    if "baseline" not in name:
        kinds = {part: type(getattr(model.model.layers[0].self_attn, part).weight) for part in ("g_proj", "q_proj")}
        types = {part: type(getattr(model.model.layers[0].self_attn, part)) for part in kinds}
        assert types["g_proj"] is torch.nn.Linear and kinds["g_proj"] is torch.nn.Parameter
        assert (types["q_proj"], kinds["q_proj"]) != (types["g_proj"], kinds["g_proj"])
        plain = load(RELEASED / name).model.layers[0].self_attn.g_proj.weight
        assert torch.equal(model.model.layers[0].self_attn.g_proj.weight.float(), plain.float())


@names
def test_gates_have_the_dtype_that_was_asked_for(name):
    """What keeps quantisers off them does not make them float32, as transformers would in fp16."""
    for dtype in (torch.float16, torch.bfloat16):
        model = load(RELEASED / name, dtype=dtype)
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
        assert model(torch.tensor([[3, 4, 5]])).logits.isfinite().all()
