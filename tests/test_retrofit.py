"""Retrofit: what it writes computes what its source does, bit for bit, and says what was done.

The sources are saved by transformers, with random values in every weight, and are compared with what is loaded from
the target; nothing of the code under test takes part in reading either.
"""

import hashlib
import itertools
import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from huggingface_hub import ModelCard
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support import RELEASED, RELEASED_NAMES, max_error, randomise, tokens
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import gated_qwen
import gated_qwen.conversion.retrofit as retrofit_module
from gated_qwen import CheckpointError, GatedQwenConfig, plan_retrofit, retrofit_checkpoint
from gated_qwen.conversion import families

INDEX = "model.safetensors.index.json"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# 2 query heads per key/value head, no two sizes alike; heads * head_dim != hidden_size but for Qwen2.
SIZES = dict(
    vocab_size=131,
    hidden_size=48,
    intermediate_size=73,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=3,
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
SOURCES = {
    "llama": ("Llama", dict(head_dim=10)),
    "llama_bias": ("Llama", dict(attention_bias=True, mlp_bias=True)),
    "mistral": ("Mistral", dict(head_dim=10, sliding_window=None)),
    "mistral_window": ("Mistral", dict(head_dim=10, sliding_window=7)),
    "qwen2": ("Qwen2", dict(hidden_size=60)),
    "qwen2_window": ("Qwen2", dict(hidden_size=60, use_sliding_window=True, sliding_window=7, max_window_layers=1)),
    "qwen3": ("Qwen3", dict(hidden_size=41, head_dim=10)),
    "qwen3_bias": (
        "Qwen3",
        dict(head_dim=10, attention_bias=True, use_sliding_window=True, sliding_window=7, max_window_layers=2),
    ),
    "gated": ("GatedQwen", dict(hidden_size=41, head_dim=10, attn_gate=None, attention_bias=True, mlp_bias=True)),
}
FORMS = ("single", "sharded", "bin", "sharded_bin")
all_sources = pytest.mark.parametrize("name", SOURCES)
gates = pytest.mark.parametrize("gate", ["headwise", "elementwise"])


def class_of(family: str, kind: str):
    return getattr(gated_qwen if family == "GatedQwen" else transformers, family + kind)


def build_model(name: str, head: str = "ForCausalLM", **fields):
    family, own = SOURCES[name]
    return randomise(class_of(family, head)(class_of(family, "Config")(**{**SIZES, **own, **fields})))


def save(model, folder: Path, form: str = "single") -> Path:
    """In any of the FORMS; "sharded" are some three files."""
    if form == "single":
        model.save_pretrained(folder)
    elif form == "sharded":
        model.save_pretrained(folder, max_shard_size=model.get_memory_footprint() // 3)
        assert len(list(folder.glob("model-*.safetensors"))) > 2
    else:
        model.save_pretrained(folder)
        weights = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        save_bin(weights, folder, 3 if form == "sharded_bin" else 1)
    return folder


def save_bin(weights: dict, folder: Path, files: int = 1) -> None:
    names = list(weights)
    shards = [names[i::files] for i in range(files)]
    shards = {f"pytorch_model-{i + 1:05}-of-{files:05}.bin": shard for i, shard in enumerate(shards)}
    if files == 1:
        shards = {"pytorch_model.bin": names}
    else:
        index = {
            "metadata": {"total_size": sum(weight.nbytes for weight in weights.values())},
            "weight_map": {name: file for file, shard in shards.items() for name in shard},
        }
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    for file, shard in shards.items():
        torch.save({name: weights[name] for name in shard}, folder / file)


def edit_config(folder: Path, remove=(), **fields) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config = {name: value for name, value in config.items() if name not in remove} | fields
    file.write_text(json.dumps(config, indent=2))


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint as they are stored."""
    files = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.bin"))
    tensors = {}
    for file in files:
        found = load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=True)
        assert not tensors.keys() & found.keys()
        tensors |= found
    return tensors


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def load(folder: Path, dtype: torch.dtype | str = torch.float32, auto=AutoModelForCausalLM, **options):
    return auto.from_pretrained(folder, dtype=dtype, **options).eval()


@torch.no_grad()
def outputs(model, ids=None, **inputs) -> torch.Tensor:
    """Logits, or what the model has in their place."""
    return model(tokens(length=19) if ids is None else ids, **inputs)[0]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """`source(name, form, dtype)`: the folder of a source, which must not be changed; each is built once."""
    built = {}

    def find(name: str, form: str = "single", dtype: torch.dtype = torch.float32) -> Path:
        key = name, form, dtype
        if key not in built:
            folder = tmp_path_factory.mktemp("sources") / f"{name}-{form}"
            built[key] = save(build_model(name).to(dtype), folder, form)
            if name == "llama_bias":
                edit_config(folder, head_dim=None)
        return built[key]

    return find


@pytest.fixture
def copied(source, tmp_path):
    """`copied(name, form, dtype)`: a copy of a source, free to be changed."""

    def copy(*args, **kwargs) -> Path:
        return Path(shutil.copytree(source(*args, **kwargs), tmp_path / "source"))

    return copy


def convert(source: Path, target: Path, *args, **kwargs) -> Path:
    """A retrofit that is not verified, since the test compares."""
    retrofit_checkpoint(source, target, *args, **{"verify": False, **kwargs})
    return target


def is_gate(name: str) -> bool:
    return ".g_proj." in name or name.startswith("g_proj.")


def check_weights(source: Path, target: Path, gated_layers, gate: str, factor: float = 1.0) -> None:
    """Source tensors are there byte for byte (o_proj times `factor`), zero gates beside them, and nothing else."""
    before, after = weights_of(source), weights_of(target)
    assert {name for name in after if not is_gate(name)} == before.keys()
    for name, weight in before.items():
        scaled = name.endswith("self_attn.o_proj.weight") and int(name.split(".")[-4]) in gated_layers
        assert same_bytes(after[name], weight * factor if scaled else weight), name
    config = AutoConfig.from_pretrained(target)
    rows = config.num_attention_heads * (config.head_dim if gate == "elementwise" else 1)
    found = {name: weight for name, weight in after.items() if is_gate(name)}
    assert found.keys() == {f"model.layers.{layer}.self_attn.g_proj.weight" for layer in gated_layers}
    for name, weight in found.items():
        assert weight.shape == (rows, config.hidden_size)
        assert weight.dtype == before[name.replace("g_proj", "q_proj")].dtype
        assert not weight.any()


# Every source with both gates, in all layers and in some.
CHOICES = [("headwise", None), ("elementwise", [0, 2])]
MORE_CHOICES = [("elementwise", None), ("headwise", [1])]


@pytest.mark.parametrize(
    ("name", "gate", "layers"),
    [(name, *choice) for name in SOURCES for choice in CHOICES] + [("llama", *choice) for choice in MORE_CHOICES],
)
def test_scale_is_exact(source, tmp_path, name, gate, layers):
    folder = source(name, "sharded")
    target = convert(folder, tmp_path / "target", gate, layers=layers)
    check_weights(folder, target, range(3) if layers is None else layers, gate)
    for dtype in DTYPES:
        plain, gated = load(folder, dtype), load(target, dtype)
        assert type(gated) is gated_qwen.GatedQwenForCausalLM
        assert gated.config.attn_gate_scale == 2 and gated.config.attn_gate_layers == layers
        for attention in ("eager", "sdpa") if layers is None else ("sdpa",):
            plain.set_attn_implementation(attention)
            gated.set_attn_implementation(attention)
            expected = outputs(plain)
            assert expected.isfinite().all() and expected.std() > 0.05
            assert torch.equal(outputs(gated), expected), (dtype, attention)


@all_sources
@pytest.mark.parametrize(
    ("gate", "layers", "dtype", "attention"),
    [("headwise", [0, 2], torch.float32, "eager"), ("elementwise", None, torch.bfloat16, "sdpa")],
    ids=["float32", "bfloat16"],
)
def test_fold_is_exact(source, tmp_path, name, gate, layers, dtype, attention):
    folder = source(name, "sharded", dtype)
    target = convert(folder, tmp_path / "target", gate, start="fold", layers=layers)
    check_weights(folder, target, range(3) if layers is None else layers, gate, factor=2.0)
    plain = load(folder, "auto", attn_implementation=attention)
    gated = load(target, "auto", attn_implementation=attention)
    assert plain.dtype == gated.dtype == dtype and gated.config.attn_gate_scale == 1
    assert torch.equal(outputs(gated), outputs(plain))


@pytest.mark.parametrize(
    ("name", "start"),
    [("llama_bias", "scale"), ("mistral_window", "fold"), ("qwen2_window", "scale"), ("qwen3", "fold")],
)
def test_generation_is_the_sources(source, tmp_path, name, start):
    """With a cache that grows past the window of 7, and a padded prompt."""
    target = convert(source(name), tmp_path / "target", start=start)
    ids = tokens(length=9)
    mask = torch.ones_like(ids)
    ids[1, :3], mask[1, :3] = 0, 0
    options = dict(
        attention_mask=mask, max_new_tokens=8, min_new_tokens=8, do_sample=False, output_logits=True,
        return_dict_in_generate=True, use_cache=True,
    )  # fmt: skip
    expected = load(source(name)).generate(ids, **options)
    found = load(target).generate(ids, **options)
    assert torch.equal(found.sequences, expected.sequences)
    assert torch.equal(torch.stack(found.logits), torch.stack(expected.logits))


# fp16


def test_fold_in_fp16_stays_within_the_recorded_bound(copied, tmp_path):
    folder = copied("llama", dtype=torch.float16)
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if ".v_proj." in name:
            weight.mul_(1e-4)  # attention outputs of 2^-14 and less, where halving loses bits
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    record = retrofit_checkpoint(folder, tmp_path / "target", start="fold", verify=True)
    bound = record["largest_deviation"]["value"]

    def o_proj_inputs(model):
        inputs = []
        for layer in model.model.layers:
            layer.self_attn.o_proj.register_forward_pre_hook(lambda _, args: inputs.append(args[0].double()))
        outputs(model)
        return inputs

    plain, gated = load(folder, "auto"), load(tmp_path / "target", "auto")
    differences = []
    before, after = o_proj_inputs(plain), o_proj_inputs(gated)
    for layer, inputs, halved in zip(plain.model.layers, before, after, strict=True):
        weight = layer.self_attn.o_proj.weight.double()
        differences.append((halved @ (2 * weight).T - inputs @ weight.T).abs().max().item())
        break  # later layers' inputs differ already
    assert 0 < differences[0] <= bound < 1e-4
    assert record["verification"]["max_difference"] < 1e-2
    assert retrofit_checkpoint(folder, tmp_path / "scale", verify=True)["verification"]["max_difference"] == 0


def test_fold_in_fp16_refuses_what_overflows(copied, tmp_path):
    folder = copied("llama", dtype=torch.float16)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.self_attn.o_proj.weight"][3, 5] = 40000.0
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.o_proj\.weight .*float16.*scale"):
        convert(folder, tmp_path / "target", start="fold")
    assert not (tmp_path / "target").exists()
    convert(folder, tmp_path / "target", start="fold", layers=[0, 2])
    with pytest.raises(ValueError, match="o_proj"):
        gated_qwen.retrofit(load(folder, "auto"), start="fold")


# Forms of the files


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["llama_bias", "qwen2"])
def test_every_form_of_weights(source, tmp_path, name, form):
    folder = source(name, form, torch.bfloat16)
    target = convert(folder, tmp_path / "target", "elementwise", layers=[2])
    check_weights(folder, target, [2], "elementwise")
    assert not list(target.glob("*.bin*"))
    assert torch.equal(outputs(load(target, "auto")), outputs(load(folder, "auto")))

    files = {file.name: load_file(file) for file in target.glob("*.safetensors")}
    for file in files:
        with safe_open(target / file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
    if len(files) == 1:
        assert list(files) == ["model.safetensors"] and not (target / INDEX).exists()
        return
    index = json.loads((target / INDEX).read_text())
    assert index["weight_map"] == {tensor: file for file, tensors in files.items() for tensor in tensors}
    stored = [tensor for tensors in files.values() for tensor in tensors.values()]
    assert index["metadata"] == {
        "total_parameters": sum(tensor.numel() for tensor in stored),
        "total_size": sum(tensor.nbytes for tensor in stored),
    }


def test_dtypes_come_through_tensor_by_tensor(copied, tmp_path):
    folder = copied("qwen3")
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if "norm" not in name:
            weights[name] = weight.to(torch.float16 if "layers.1." in name else torch.bfloat16)
    assert {weight.dtype for weight in weights.values()} == set(DTYPES)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    edit_config(folder, dtype="bfloat16")
    target = convert(folder, tmp_path / "target")
    check_weights(folder, target, range(3), "headwise")
    assert weights_of(target)["model.layers.1.self_attn.g_proj.weight"].dtype == torch.float16
    folded = convert(folder, tmp_path / "folded", start="fold")
    check_weights(folder, folded, range(3), "headwise", factor=2.0)


@pytest.mark.parametrize(
    ("fields", "remove", "expected"),
    [
        ({"dtype": "bfloat16"}, (), torch.bfloat16),
        ({"torch_dtype": "float16"}, ("dtype",), torch.float16),
        ({}, ("dtype",), None),
    ],
)
def test_the_configs_dtype_is_kept(copied, tmp_path, fields, remove, expected):
    folder = copied("llama")
    edit_config(folder, remove=remove, **fields)
    target = convert(folder, tmp_path / "target")
    assert AutoConfig.from_pretrained(target).dtype == expected == AutoConfig.from_pretrained(folder).dtype


# Configs


def read(folder: Path) -> dict:
    fields = AutoConfig.from_pretrained(folder).to_dict()
    fields.pop("_name_or_path")
    return fields


# Of the target alone, or meant to differ.
OWN_FIELDS = {
    "attn_gate", "attn_gate_scale", "attn_gate_bias", "attn_gate_layers", "use_qk_norm", "attention_output_bias",
    "attention_bias", "mlp_bias", "architectures", "model_type", "transformers_version", "tokenizer_class",
}  # fmt: skip
WINDOW_FIELDS = {"layer_types", "sliding_window", "use_sliding_window", "max_window_layers"}


def check_config(source: Path, target: Path, **expected) -> None:
    before, after = read(source), read(target)
    for name, value in before.items():
        if name not in OWN_FIELDS and name in after:
            assert after[name] == value, name
    lost = before.keys() - after.keys()
    assert lost <= {"pretraining_tp"}, lost
    assert {name: after[name] for name in expected} == expected
    assert after.keys() - before.keys() <= OWN_FIELDS | WINDOW_FIELDS | {"head_dim"}


@all_sources
def test_the_config_loads_to_the_same_values(copied, tmp_path, name):
    """Every field unlike its default."""
    folder = copied(name)
    edit_config(
        folder, rms_norm_eps=3e-6, initializer_range=0.03, attention_dropout=0.25, use_cache=False, bos_token_id=7,
        eos_token_id=[8, 9], pad_token_id=6, hidden_act="gelu", num_labels=4, problem_type="regression",
        task_specific_params={"a": 1},
    )  # fmt: skip
    target = convert(folder, tmp_path / "target", "elementwise", layers=[0, 1])
    qwen = SOURCES[name][0] not in ("Llama", "Mistral")
    attention_bias = name in ("llama_bias", "qwen2", "qwen2_window", "qwen3_bias", "gated")
    check_config(
        folder, target, attn_gate="elementwise", attn_gate_scale=2.0, attn_gate_bias=False, attn_gate_layers=[0, 1],
        use_qk_norm=name in ("qwen3", "qwen3_bias", "gated"), attention_bias=attention_bias,
        attention_output_bias=attention_bias and "qwen2" not in name, mlp_bias=name in ("llama_bias", "gated"),
        architectures=["GatedQwenForCausalLM"], model_type="gated_qwen", head_dim=8 if name == "llama_bias" else 10,
        layer_types={
            "mistral_window": ["sliding_attention"] * 3,
            "qwen2_window": ["full_attention"] + ["sliding_attention"] * 2,
            "qwen3_bias": ["full_attention"] * 2 + ["sliding_attention"],
        }.get(name, ["full_attention"] * 3),
        sliding_window=7 if "window" in name or name == "qwen3_bias" else None,
    )  # fmt: skip
    if qwen:
        assert read(target)["max_window_layers"] == read(folder)["max_window_layers"]
    assert torch.equal(outputs(load(target)), outputs(load(folder)))


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_what_a_config_leaves_out_is_its_familys_default(model_type):
    """No rope, eps, heads, window, token ids: each family has its own."""
    source = families.read_config({"model_type": model_type, "num_hidden_layers": 2}, "config.json")
    before, after = source.to_dict(), families.gated_config(source, attn_gate="headwise").to_dict()
    shared = before.keys() & after.keys() - OWN_FIELDS - WINDOW_FIELDS
    assert {"rope_parameters", "rms_norm_eps", "num_key_value_heads", "bos_token_id"} <= shared
    assert {name: after[name] for name in shared} == {name: before[name] for name in shared}
    window = 4096 if model_type == "mistral" else None
    assert after["sliding_window"] == window


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (dict(use_sliding_window=False, sliding_window=5, max_window_layers=1), ["full"] * 3),
        (dict(use_sliding_window=True, sliding_window=5, max_window_layers=28), ["full"] * 3),
        (dict(use_sliding_window=True, sliding_window=5, max_window_layers=2), ["full", "full", "sliding"]),
        (dict(use_sliding_window=True, sliding_window=5, layer_types=["sliding", "full", "sliding"]), None),
    ],
)
@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_windows_by_layer(copied, tmp_path, name, fields, expected):
    expected = [f"{kind}_attention" for kind in expected or fields["layer_types"]]
    if "layer_types" in fields:
        fields = {**fields, "layer_types": expected}
    folder = copied(name)
    edit_config(folder, remove=("layer_types",), **fields)
    target = convert(folder, tmp_path / "target")
    assert read(folder)["layer_types"] == expected == read(target)["layer_types"]
    assert torch.equal(outputs(load(target)), outputs(load(folder)))


def test_qwen2_with_a_head_dim_of_its_own(tmp_path):
    """No field of Qwen2Config, and yet its model heeds it."""
    folder = save(build_model("qwen2", head_dim=14), tmp_path / "source")
    assert weights_of(folder)["model.layers.0.self_attn.k_proj.bias"].shape == (3 * 14,)
    target = convert(folder, tmp_path / "target", "elementwise", start="fold")
    check_weights(folder, target, range(3), "elementwise", factor=2.0)
    assert torch.equal(outputs(load(target)), outputs(load(folder)))


def test_what_is_not_the_models_does_not_come_through(copied, tmp_path):
    folder = copied("llama")
    edit_config(
        folder, auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"}, quantization_config=None,
        compression_config={}, _name_or_path="somewhere", _attn_implementation="eager", _flash_attn_2_enabled=True,
        transformers_version="4.31.0", pretraining_tp=2,
    )  # fmt: skip
    written = json.loads((convert(folder, tmp_path / "target") / "config.json").read_text())
    gone = {"auto_map", "quantization_config", "compression_config", "pretraining_tp"}
    assert not gone & written.keys()
    assert not [name for name in written if name.startswith("_")]
    assert written["transformers_version"] == transformers.__version__


# Rotary embeddings

ROPES = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 16, "attention_factor": 1.3},
    "yarn_plain": {"factor": 4, "original_max_position_embeddings": 16},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
    },
    "longrope": {
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4], "long_factor": [1.5, 2.0, 3.0, 4.0, 5.0],
        "original_max_position_embeddings": 16, "factor": 4.0,
    },
}  # fmt: skip
SPELLINGS = ("v4_type", "v4_rope_type", "v5")


def spell_rope(kind: str, spelling: str, theta: float) -> dict:
    own = ROPES[kind]
    kind = kind.removesuffix("_plain")
    if spelling == "v5":
        return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **own}}
    if kind == "default":
        return {"rope_theta": theta, "rope_scaling": None}
    return {"rope_theta": theta, "rope_scaling": {spelling.removeprefix("v4_"): kind, **own}}


def check_rope(folder: Path, target: Path) -> torch.Tensor:
    """Compares below and past the original context of 16 and the context of 64; returns logits far past it."""
    plain, gated = load(folder), load(target)
    assert gated.config.rope_parameters == plain.config.rope_parameters
    for length in (9, 64, 90, 9):  # some kinds change with what they have seen
        ids = tokens(length=length)
        expected, found = outputs(plain, ids), outputs(gated, ids)
        one, other = plain.model.rotary_emb, gated.model.rotary_emb
        assert torch.equal(other.inv_freq, one.inv_freq), length
        assert other.attention_scaling == one.attention_scaling
        assert torch.equal(found, expected), length
    return outputs(gated, tokens(length=90))


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("kind", ROPES)
def test_rope_is_the_sources(copied, tmp_path, kind, spelling):
    folder = copied("llama", "single")
    edit_config(folder, remove=("rope_parameters",), **spell_rope(kind, spelling, 50000.0))
    assert read(folder)["rope_parameters"]["rope_theta"] == 50000
    seen = check_rope(folder, convert(folder, tmp_path / "target"))
    edit_config(folder, remove=("rope_parameters", "rope_scaling"), rope_theta=10000.0)
    assert max_error(outputs(load(folder), tokens(length=90)), seen) > 1e-3


@pytest.mark.parametrize("spelling", ["v4_rope_type", "v5"])
@pytest.mark.parametrize(("name", "kind"), [("mistral", "yarn"), ("qwen2", "yarn_plain"), ("qwen3", "dynamic")])
def test_rope_of_other_families(copied, tmp_path, name, kind, spelling):
    folder = copied(name, "single")
    edit_config(folder, remove=("rope_parameters",), **spell_rope(kind, spelling, 1000000.0))
    check_rope(folder, convert(folder, tmp_path / "target", start="fold"))


def test_the_original_context_beside_the_other_fields(copied, tmp_path):
    """As Phi's configs have it, and other longrope ones in their manner."""
    folder = copied("llama", "single")
    scaling = {name: value for name, value in ROPES["longrope"].items() if "original" not in name}
    scaling.pop("factor")
    edit_config(
        folder, remove=("rope_parameters",), rope_theta=10000, rope_scaling={"type": "longrope", **scaling},
        original_max_position_embeddings=16,
    )  # fmt: skip
    check_rope(folder, convert(folder, tmp_path / "target"))


# Tied embeddings


@pytest.mark.parametrize(
    ("head", "form"),
    [
        ("alias", "bin"),  # two names for the same bytes are possible within a pickle only
        *itertools.product(["absent", "equal", "different", "untied"], ["single", "bin", "sharded_bin"]),
    ],
)
def test_tied_embeddings(copied, tmp_path, head, form):
    folder = copied("llama")
    weights = load_file(folder / "model.safetensors")
    own = weights.pop("lm_head.weight")
    embeddings = weights["model.embed_tokens.weight"]
    copy = {"absent": None, "alias": embeddings, "equal": embeddings.clone(), "different": own, "untied": own}[head]
    if copy is not None:
        weights["lm_head.weight"] = copy
    (folder / "model.safetensors").unlink()
    if form == "single":
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    else:
        save_bin(weights, folder, 3 if form == "sharded_bin" else 1)
    edit_config(folder, tie_word_embeddings=head != "untied")
    target = tmp_path / "target"
    record = retrofit_checkpoint(folder, target, start="fold", verify=False)

    found = weights_of(target)
    two = head in ("different", "untied")
    assert ("lm_head.weight" in found) == two
    assert AutoConfig.from_pretrained(target).tie_word_embeddings is not two
    assert ("lm_head.weight" in record["tensors"]["dropped"]) == (head in ("alias", "equal"))
    assert (record["notes"] != []) == (head == "different")
    assert all(same_bytes(found[name], weights[name]) for name in ("model.embed_tokens.weight", "model.norm.weight"))
    if two:
        assert same_bytes(found["lm_head.weight"], own)
    model = load(target)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is not two
    assert torch.equal(outputs(model), outputs(load(folder)))
    if (target / INDEX).exists():
        stored = sum(weight.nbytes for weight in found.values())
        assert json.loads((target / INDEX).read_text())["metadata"]["total_size"] == stored


# Random starts


def random_gates(folder: Path, target: Path, **options) -> dict[str, torch.Tensor]:
    convert(folder, target, start="random", **options)
    return {name: weight for name, weight in weights_of(target).items() if is_gate(name)}


def test_random_gates_depend_on_seed_and_name_only(source, tmp_path):
    found = {form: random_gates(source("llama", form), tmp_path / form, seed=3) for form in FORMS}
    first = found["single"]
    for form in FORMS:
        assert found[form].keys() == first.keys()
        assert all(same_bytes(found[form][name], first[name]) for name in first), form
    one = random_gates(source("llama", "sharded"), tmp_path / "one", seed=3, layers=[1])
    (name,) = one
    assert same_bytes(one[name], first[name])
    bfloat16 = random_gates(source("llama", "single", torch.bfloat16), tmp_path / "bfloat16", seed=3)
    assert all(same_bytes(bfloat16[name], first[name].bfloat16()) for name in first)

    other = random_gates(source("llama"), tmp_path / "other", seed=4)
    assert not any((other[name] == first[name]).any() for name in first)
    layers = list(first.values())
    assert not (layers[0] == layers[1]).any() and not (layers[1] == layers[2]).any()

    values = torch.cat([weight.flatten() for weight in first.values()])
    assert abs(values.mean()) < 0.002 and 0.018 < values.std() < 0.022  # initializer_range 0.02
    # The same on every machine and with every version, or a recorded command would not give the result again.
    assert hashlib.sha256(first["model.layers.0.self_attn.g_proj.weight"].numpy().tobytes()).hexdigest() == RANDOM_SHA


RANDOM_SHA = "639a91b7b2039481f005b5f4686a4efe9c472567ac9ef2f0ed16310db8bef65d"


def test_a_random_start_changes_the_function_a_little(source, tmp_path):
    folder = source("qwen3")
    target = tmp_path / "target"
    record = retrofit_checkpoint(folder, target, "elementwise", start="random", verify=True)
    check = {name: weight for name, weight in weights_of(target).items() if not is_gate(name)}
    assert all(same_bytes(weight, check[name]) for name, weight in weights_of(folder).items())
    plain, gated = load(folder), load(target)
    assert gated.config.attn_gate_scale == 2
    assert max_error(outputs(plain), outputs(gated)) > 1e-4
    with torch.no_grad():
        scores = gated(tokens(), output_gate_scores=True).gate_scores
    assert all(0.5 < score.min() < score.max() < 2 and 0.9 < score.mean() < 1.1 for score in scores)
    assert record["largest_deviation"]["value"] is None and record["verification"]["allowed"] is None
    assert record["verification"]["max_difference"] > 1e-4


# Gradients


@gates
def test_gates_that_start_at_zero_get_gradient(source, tmp_path, gate):
    gradients = {}
    for start in ("scale", "fold"):
        model = load(convert(source("llama_bias"), tmp_path / start, gate, start=start))
        model(tokens(), labels=tokens()).loss.backward()
        gradients[start] = {name: p.grad for name, p in model.named_parameters() if is_gate(name)}
        for gradient in gradients[start].values():
            rows = gradient.norm(dim=1)
            assert (rows > 1e-6).all()
    # Powers of two again: both starts learn at the same pace.
    assert len(gradients["scale"]) == 3
    assert all(torch.equal(gradient, gradients["fold"][name]) for name, gradient in gradients["scale"].items())


# Sources that have gates


def gated_source(folder: Path, gate: str = "headwise", form: str = "sharded", **fields) -> Path:
    model = build_model("gated", attn_gate=gate, **{"attn_gate_bias": True, **fields})
    return save(model, folder, form)


def scores_of(model) -> list[torch.Tensor]:
    with torch.no_grad():
        return list(model(tokens(length=19), output_gate_scores=True).gate_scores)


@pytest.mark.parametrize("scale", [1.0, 2.0])
@pytest.mark.parametrize("start", ["scale", "fold", "random"])
@gates
def test_gates_in_more_layers(tmp_path, gate, start, scale):
    """Those that were there keep their values and what they do, whatever the new factor is."""
    folder = gated_source(tmp_path / "source", gate, attn_gate_layers=[1], attn_gate_scale=scale)
    target = convert(folder, tmp_path / "target", gate, start=start)
    before, after = weights_of(folder), weights_of(target)
    gate_names = {name for name in before if is_gate(name)}
    assert len(gate_names) == 2 and all(same_bytes(before[name], after[name]) for name in gate_names)
    new = AutoConfig.from_pretrained(target).attn_gate_scale
    assert new == {"scale": 2, "fold": 1, "random": 2}[start]
    factors = {0: 2 / new, 1: scale / new, 2: 2 / new}
    for name, weight in before.items():
        if name.endswith("o_proj.weight"):
            assert same_bytes(after[name], weight * factors[int(name.split(".")[2])]), name
        else:
            assert same_bytes(after[name], weight), name
    assert {name for name in after if is_gate(name)} - gate_names == {
        f"model.layers.{layer}.self_attn.g_proj.{kind}" for layer in (0, 2) for kind in ("weight", "bias")
    }
    assert not after["model.layers.0.self_attn.g_proj.bias"].any()
    assert after["model.layers.0.self_attn.g_proj.weight"].any() == (start == "random")
    for dtype in (torch.float32, torch.bfloat16)[: 2 if gate == "headwise" else 1]:
        plain, gated = load(folder, dtype), load(target, dtype)
        if start != "random":
            assert torch.equal(outputs(gated), outputs(plain)), dtype
            assert torch.equal(scores_of(gated)[1] / new, scores_of(plain)[0] / scale)
        else:
            assert max_error(outputs(gated), outputs(plain)) > 1e-3


@pytest.mark.parametrize("scale", [1.0, 2.0, 1.7])
@pytest.mark.parametrize("layers", [None, [0, 2]])
def test_headwise_to_elementwise(tmp_path, layers, scale):
    folder = gated_source(tmp_path / "source", attn_gate_layers=layers, attn_gate_scale=scale)
    target = tmp_path / "target"
    verified = layers is None and scale == 1
    record = retrofit_checkpoint(folder, target, "elementwise", layers=layers, verify=verified)
    before, after = weights_of(folder), weights_of(target)
    assert before.keys() == after.keys()
    for name, weight in before.items():
        if is_gate(name):  # row h of the source is rows h * head_dim to (h + 1) * head_dim
            by_head = after[name].view(6, 10, *weight.shape[1:])
            assert all(same_bytes(by_head[h, channel], weight[h]) for h in range(6) for channel in range(10)), name
        else:
            assert same_bytes(after[name], weight), name
    plain, gated = load(folder), load(target)
    assert gated.config.attn_gate_scale == scale and gated.config.attn_gate_layers == layers
    for one, other in zip(scores_of(plain), scores_of(gated), strict=True):
        assert one.shape[-1] == 1 and other.shape[-1] == 10
        assert one.std(dim=2).min() > 0.01  # no two heads alike
        assert max_error(other, one.expand_as(other)) < 5e-6  # fp32: the logits come from a wider matrix product
    assert max_error(outputs(gated), outputs(plain)) < 1e-5
    if verified:
        assert record["verification"]["max_difference"] <= record["verification"]["allowed"] < 0.01
    assert record["largest_deviation"]["value"] is None and "rounding" in record["largest_deviation"]["meaning"]


@pytest.mark.parametrize("scale", [1.0, 2.0])
@pytest.mark.parametrize("start", ["scale", "fold"])
def test_headwise_in_some_layers_to_elementwise_in_all(tmp_path, start, scale):
    folder = gated_source(tmp_path / "source", attn_gate_layers=[0, 2], attn_gate_scale=scale)
    target = convert(folder, tmp_path / "target", "elementwise", start=start)
    plain, gated = load(folder), load(target)
    assert gated.config.attn_gate_layers is None
    assert max_error(outputs(gated), outputs(plain)) < 1e-5
    first, new, last = scores_of(gated)
    assert (new == gated.config.attn_gate_scale / 2).all()
    for one, other in zip(scores_of(plain), (first, last), strict=True):
        assert max_error(other / gated.config.attn_gate_scale, (one / scale).expand_as(other)) < 5e-6


@pytest.mark.parametrize(
    ("fields", "gate", "options", "message"),
    [
        ({}, "headwise", {}, "nothing to do"),
        ({"gate": "elementwise"}, "headwise", {}, "strip them first"),
        ({}, "headwise", {"layers": [0]}, r"layers \[1, 2\] have gates"),
        ({"attn_gate_layers": [1], "attn_gate_scale": 1.7}, "headwise", {}, "not a power of two"),
    ],
)
def test_gates_that_cannot_stay_are_refused(tmp_path, fields, gate, options, message):
    folder = gated_source(tmp_path / "source", **fields)
    with pytest.raises(CheckpointError, match=message):
        convert(folder, tmp_path / "target", gate, **options)
    with pytest.raises(CheckpointError, match=message):
        gated_qwen.retrofit(load(folder), gate, **options)


# The authors' released form


@gates
@pytest.mark.parametrize("start", ["scale", "fold"])
def test_released_baseline_gets_gates(tmp_path, gate, start):
    folder = RELEASED / "1B_baseline"
    target = convert(folder, tmp_path / "target", gate, start=start)
    before, after = weights_of(folder), weights_of(target)
    assert before.pop("lm_head.weight") is not None and "lm_head.weight" not in after
    for name, weight in before.items():
        factor = 2 if start == "fold" and name.endswith("o_proj.weight") else 1
        assert same_bytes(after[name], weight * factor), name
    for dtype in DTYPES:
        assert torch.equal(outputs(load(target, dtype)), outputs(load(folder, dtype))), dtype
    expected = load_file(folder / "expected.safetensors")
    found = outputs(load(target), expected["input_ids"], attention_mask=expected["attention_mask"])
    there = expected["attention_mask"].bool()
    assert max_error(found[there], expected["logits"][there]) < 1e-4


@pytest.mark.parametrize("qkv_bias", [False, True])
def test_released_headwise_is_unpacked(released_with_bias, tmp_path, qkv_bias):
    folder = released_with_bias("headwise") if qkv_bias else RELEASED / "1B_gate_headwise"
    target = tmp_path / "target"
    retrofit_checkpoint(folder, target, "elementwise", verify=not qkv_bias)
    plain, gated = load(folder, "auto"), load(target, "auto")
    dim = plain.config.head_dim
    before, after = plain.state_dict(), gated.state_dict()
    assert before.keys() == after.keys() and any(name.endswith("g_proj.bias") for name in before) == qkv_bias
    for name, weight in before.items():
        assert same_bytes(after[name], weight.repeat_interleave(dim, 0) if is_gate(name) else weight), name
    assert weights_of(target).keys() == before.keys() - {"lm_head.weight"}
    if not qkv_bias:
        expected = load_file(folder / "expected.safetensors")
        there = expected["attention_mask"].bool()
        with torch.no_grad():
            found = load(target)(
                expected["input_ids"], attention_mask=expected["attention_mask"], output_gate_scores=True
            )
        assert max_error(found.logits[there], expected["logits"][there]) < 1e-4
        for layer, scores in enumerate(found.gate_scores):
            theirs = expected[f"gate.{layer}"][there]
            assert max_error(scores[there], theirs.expand_as(scores[there])) < 1e-4


@pytest.fixture
def released_with_bias(tmp_path):
    """A checkpoint in the released form with qkv_bias, as .bin."""

    def make(gate: str) -> Path:
        fields = dict(attention_bias=True, attention_output_bias=True, attn_gate_bias=True, tie_word_embeddings=True)
        config = GatedQwenConfig(**{**SIZES, "head_dim": 10, "attn_gate": gate, **fields})
        model = randomise(gated_qwen.GatedQwenForCausalLM(config)).to(torch.bfloat16)
        config.dtype = torch.bfloat16
        folder = tmp_path / f"released-{gate}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(gated_qwen.conversion.released_config(config)))
        save_bin(gated_qwen.conversion.released_state_dict(model.state_dict(), config), folder)
        return folder

    return make


@pytest.mark.parametrize("name", RELEASED_NAMES[1:])
def test_released_gates_are_complete(tmp_path, name):
    with pytest.raises(CheckpointError, match="nothing to do"):
        convert(RELEASED / name, tmp_path / "target", name.removeprefix("1B_gate_"))


# In memory


def plain_fields(config) -> dict:
    """A config but for what is of a file."""
    return {
        name: value
        for name, value in config.to_dict().items()
        if name not in ("_name_or_path", "dtype", "transformers_version", "tokenizer_class")
    }


def check_same_as_on_disk(model, target: Path, **options):
    """`model` was loaded from the folder that was converted to `target`."""
    gated = gated_qwen.retrofit(model, **options)
    on_disk = load(target, "auto")
    assert type(gated) is type(on_disk)
    one, other = gated.state_dict(), on_disk.state_dict()
    assert one.keys() == other.keys()
    assert all(same_bytes(one[name], other[name]) for name in one)
    assert plain_fields(gated.config) == plain_fields(on_disk.config)
    assert torch.equal(outputs(gated), outputs(on_disk))
    return gated


@all_sources
@pytest.mark.parametrize(
    ("start", "gate", "layers", "dtype"),
    [
        ("scale", "headwise", None, torch.bfloat16),
        ("fold", "elementwise", [0, 2], torch.float32),
        ("random", "headwise", [1], torch.float16),
    ],
)
def test_in_memory_gives_what_the_files_give(source, tmp_path, name, start, gate, layers, dtype):
    folder = source(name, dtype=dtype)
    options = dict(attn_gate=gate, start=start, layers=layers, seed=5)
    model = load(folder, "auto")
    gated = check_same_as_on_disk(model, convert(folder, tmp_path / "target", **options), **options)
    own = dict(model.named_parameters())
    for parameter_name, parameter in gated.named_parameters():
        scaled = start == "fold" and parameter_name.endswith(
            ("0.self_attn.o_proj.weight", "2.self_attn.o_proj.weight")
        )
        if is_gate(parameter_name):
            assert parameter_name not in own and parameter.requires_grad and parameter.dtype == dtype
        else:
            assert (parameter is own[parameter_name]) is not scaled, parameter_name
    if start != "random":
        assert torch.equal(outputs(gated), outputs(model))


@pytest.mark.parametrize("start", ["scale", "fold"])
@pytest.mark.parametrize(("gate", "layers"), [("headwise", [1]), ("headwise", None)])
def test_in_memory_from_a_gated_model(tmp_path, gate, layers, start):
    folder = gated_source(tmp_path / "source", gate, attn_gate_layers=layers)
    options = dict(attn_gate="elementwise", start=start)
    model = load(folder)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1." not in name)
    gated = check_same_as_on_disk(model, convert(folder, tmp_path / "target", **options), **options)
    assert max_error(outputs(gated), outputs(model)) < 1e-5
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert {name for name, parameter in gated.named_parameters() if not parameter.requires_grad} == frozen


def test_in_memory_of_a_released_model():
    model = load(RELEASED / "1B_gate_headwise", "auto")
    gated = gated_qwen.retrofit(model, "elementwise")
    rows = gated.state_dict()["model.layers.0.self_attn.g_proj.weight"]
    assert same_bytes(rows, model.model.layers[0].self_attn.g_proj.weight.repeat_interleave(16, 0))
    assert max_error(outputs(gated.float()), outputs(model.float())) < 1e-4


def test_in_memory_keeps_the_state_of_the_model():
    model = build_model("qwen2_window").to(torch.bfloat16)
    model.set_attn_implementation("eager")
    model.generation_config = GenerationConfig(max_new_tokens=5, eos_token_id=[2, 9], temperature=0.3, do_sample=True)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".mlp." in name)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    gated = gated_qwen.retrofit(model, "elementwise", layers=[0, 1])

    assert gated.dtype == torch.bfloat16 and {p.dtype for p in gated.parameters()} == {torch.bfloat16}
    assert {p.device for p in gated.parameters()} == {torch.device("cpu")}
    assert gated.config._attn_implementation == "eager" == gated.model.config._attn_implementation
    assert gated.generation_config.to_dict() == model.generation_config.to_dict()
    assert gated.generation_config is not model.generation_config
    assert all(module.training for module in gated.modules())
    assert gated.is_gradient_checkpointing
    kwargs = [m.model.layers[0]._gradient_checkpointing_func.keywords for m in (model, gated)]
    assert kwargs[0] == kwargs[1]
    trainable = {name for name, parameter in gated.named_parameters() if parameter.requires_grad}
    assert {name for name in trainable if is_gate(name)} == {
        f"model.layers.{i}.self_attn.g_proj.weight" for i in (0, 1)
    }
    assert {name for name in trainable if not is_gate(name)} == {n for n in gated.state_dict() if ".mlp." in n}
    assert {name: buffer.dtype for name, buffer in gated.named_buffers()} == {
        name: buffer.dtype for name, buffer in buffers.items()
    }
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in gated.named_buffers())
    assert not any(p.is_meta for p in [*gated.parameters(), *gated.buffers()])

    # The model itself stays as it was.
    assert type(model).__name__ == "Qwen2ForCausalLM" and model.config.model_type == "qwen2"
    assert not hasattr(model.config, "attn_gate") and model.training
    gated.eval()
    assert not gated.model.layers[1].training
    assert not gated_qwen.retrofit(model.eval()).training


def test_in_memory_trains_and_saves(tmp_path):
    model = build_model("mistral_window", tie_word_embeddings=True)
    gated = gated_qwen.retrofit(model)
    assert gated.lm_head.weight is gated.model.embed_tokens.weight is model.model.embed_tokens.weight
    gated(tokens(), labels=tokens()).loss.backward()
    assert all((p.grad is not None and p.grad.any()) for p in gated.parameters())
    gated.save_pretrained(tmp_path)
    assert torch.equal(outputs(load(tmp_path)), outputs(model))


def test_in_memory_of_a_head_beside_tied_embeddings(copied, tmp_path):
    """transformers does not tie weights that differ in the file; what is saved must not lose one of them."""
    folder = copied("llama")
    edit_config(folder, tie_word_embeddings=True)
    model = load(folder)
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    gated = gated_qwen.retrofit(model)
    assert gated.lm_head.weight is model.lm_head.weight
    gated.save_pretrained(tmp_path / "saved")
    for other in (gated, load(tmp_path / "saved"), load(convert(folder, tmp_path / "target"))):
        assert torch.equal(outputs(other), outputs(model))


def test_in_memory_names_the_tokenizer_of_its_family(source, tmp_path):
    """Saved, it is found beside tokenizer files that name no class, as for a converted checkpoint."""
    model = load(source("mistral"))
    target = convert(source("mistral"), tmp_path / "target")
    assert gated_qwen.retrofit(model).config.tokenizer_class == AutoConfig.from_pretrained(target).tokenizer_class


HEADS = {
    "Model": transformers.AutoModel,
    "ForSequenceClassification": transformers.AutoModelForSequenceClassification,
    "ForTokenClassification": transformers.AutoModelForTokenClassification,
    "ForQuestionAnswering": transformers.AutoModelForQuestionAnswering,
}


@pytest.mark.parametrize(
    ("name", "start"),
    [("llama", "scale"), ("mistral", "fold"), ("qwen2", "scale"), ("qwen3", "fold"), ("gated", "scale")],
)
@pytest.mark.parametrize("head", HEADS)
def test_other_heads(tmp_path, head, name, start):
    """On disk and in memory."""
    labels = {} if head in ("Model", "ForQuestionAnswering") else {"num_labels": 4}
    model = build_model(name, head, **labels)
    folder = save(model, tmp_path / "source", "single")
    target = convert(folder, tmp_path / "target", "elementwise", start=start, layers=[0, 1])
    on_disk = load(target, auto=HEADS[head])
    assert type(on_disk).__name__ == f"GatedQwen{head}"
    assert torch.equal(outputs(on_disk), outputs(model))
    gated = gated_qwen.retrofit(model, "elementwise", start=start, layers=[0, 1])
    assert type(gated) is type(on_disk) and plain_fields(gated.config) == plain_fields(on_disk.config)
    assert torch.equal(outputs(gated), outputs(model))
    one, other = gated.state_dict(), on_disk.state_dict()
    assert one.keys() == other.keys() and all(same_bytes(one[key], other[key]) for key in one)


# Files


def add_files(folder: Path) -> set[str]:
    """Files of all sorts beside a source; returns the names of those that are not the checkpoint's own."""
    (folder / "README.md").write_bytes("---\nlicense: mit\n---\n# Straße\r\n".encode())
    passed_on = {
        "chat_template.jinja": "{% for m in messages %}{{ m.content }}\r\n{% endfor %}",
        "additional_chat_templates/tool_use.jinja": "{{ tools }}",
        "tokenizer.json": Tokenizer(byte_level()).to_str(),
        "tokenizer_config.json": '{"tokenizer_class": "PreTrainedTokenizerFast",  "eos_token": "</s>"}',
        "special_tokens_map.json": "{}",
        "vocab.json": '{"a": 0}',
        "merges.txt": "#version: 0.2\n",
        "tokenizer.model": "\0\1\2",
        "added_tokens.json": '{"<x>": 130}',
        "preprocessor_config.json": "{}",
        "LICENSE": "MIT",
        "assets/图表/übersicht [1].txt": "ß",
        "assets/a b*.svg": "<svg/>",
        ".hidden": "x",
        "empty.txt": "",
    }
    left_out = {
        "modeling_evil.py": "raise SystemExit('run')",
        "nested/code/helper.py": "raise SystemExit('run')",
        "original/params.json": "{}",
        "original/consolidated.00.pth": "weights",
        "original/tokenizer.model": "x",
        "consolidated.safetensors": "weights",
        "pytorch_model.bin": "weights",
        "tf_model.h5": "weights",
        "flax_model.msgpack": "weights",
        "onnx/model.onnx": "weights",
        "model.Q4_0.gguf": "weights",
        "optimizer.pt": "weights",
        "training_args.bin": "arguments",
        ".gitattributes": "*.safetensors filter=lfs",
    }
    for name, text in {**passed_on, **left_out}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text.encode())
    return {*passed_on, "generation_config.json"}


def byte_level() -> models.Model:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(["</s>", *alphabet])}
    return models.BPE(vocab=vocabulary, merges=[])


def files_in(folder: Path) -> dict[str, bytes]:
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("form", ["single", "sharded"])
def test_files_come_through_byte_for_byte(copied, tmp_path, form):
    folder = copied("llama", form)
    GenerationConfig(eos_token_id=[2, 5], max_new_tokens=3).save_pretrained(folder)
    passed_on = add_files(folder)
    before = files_in(folder)
    target = tmp_path / "target"
    record = retrofit_checkpoint(folder, target, verify=False)

    after = files_in(target)
    assert files_in(folder) == before
    assert {name: after[name] for name in passed_on} == {name: before[name] for name in passed_on}
    assert after["README.source.md"] == before["README.md"] != after["README.md"]
    own = {"README.md", "README.source.md", "config.json", "conversion.json"}
    weights = {name for name in after if name.startswith("model") and (name == INDEX or name.endswith(".safetensors"))}
    assert len(weights) == (2 + 1 if form == "single" else len(list(folder.glob("model-*"))) + 2)
    assert after.keys() == passed_on | own | weights
    ours = {name for name in before if name == INDEX or (name.startswith("model") and name.endswith(".safetensors"))}
    assert record["left_out"].keys() == before.keys() - passed_on - ours - {"README.md", "config.json"}
    assert not any(path.is_symlink() for path in target.rglob("*"))
    assert GenerationConfig.from_pretrained(target).eos_token_id == [2, 5]
    assert torch.equal(outputs(load(target)), outputs(load(folder)))


@pytest.mark.parametrize("link", [False, True])
def test_the_hubs_cache_is_only_read(source, tmp_path, link):
    """There, files are links to blobs that other models may share."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / ("0123456789" * 4)
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for name, data in files_in(source("llama", "sharded")).items():
        blob = blobs / hashlib.sha256(data).hexdigest()
        blob.write_bytes(data)
        (snapshot / name).symlink_to(os.path.relpath(blob, snapshot))
    before = files_in(blobs)
    for start in ("scale", "fold"):
        target = convert(snapshot, tmp_path / start, start=start, link=link)
        assert files_in(blobs) == before and all(path.is_symlink() for path in snapshot.iterdir())
        assert not any(path.is_symlink() for path in target.iterdir())
        assert torch.equal(outputs(load(target)), outputs(load(snapshot)))
        record = json.loads((target / "conversion.json").read_text())
        assert record["source"]["commit"] == snapshot.name
        linked = ["linked" in entry for entry in record["files"].values()]
        assert any(linked) == link and (not link or all(linked[:-1]) == (start == "scale"))
        # What is written to the target's small files, as people do, stays there.
        (target / "config.json").write_text("{}")
        assert files_in(blobs) == before


def test_a_card_kept_before_is_not_lost(copied, tmp_path):
    """Retrofitted twice, in one layer and in all: the card of the first source is the one that no one can rewrite."""
    folder = copied("llama")
    (folder / "README.md").write_text("# The first card\n")
    once = convert(folder, tmp_path / "once", layers=[1])
    twice = convert(once, tmp_path / "twice")
    assert any(data == b"# The first card\n" for data in files_in(twice).values())


# Tokenizers

PROBES = ["Hello  world\n\tdef f(x):", "Grüße, 你好, 🤗🏽 e\u0301", " 1234567 -- don't  </s>", "▁a b"]


def save_tokenizer(folder: Path, kind: str, fields: dict | None) -> None:
    """A real tokenizer of byte-level or of sentencepiece's kind, and its tokenizer_config.json unless that is None."""
    if kind == "byte_level":
        tokenizer = Tokenizer(byte_level())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
    else:
        letters = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"Helowrdfx"]
        vocabulary = {letter: i for i, letter in enumerate([*letters, "He", "▁w"])}
        model = models.BPE(vocab=vocabulary, merges=[("H", "e"), ("▁", "w")], unk_token="<unk>", byte_fallback=True)
        tokenizer = Tokenizer(model)
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    if fields is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", **fields}))


def encodings(folder: Path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = [tokenizer(probe).input_ids for probe in PROBES]
    return [*ids, *([ord(letter) for letter in tokenizer.decode(sequence)] for sequence in ids)]


@pytest.mark.parametrize("fields", [None, {}, {"tokenizer_class": "PreTrainedTokenizerFast"}], ids=["", "{}", "class"])
@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "gated"])
def test_tokenizers_encode_alike(copied, tmp_path, name, kind, fields):
    folder = copied(name)
    save_tokenizer(folder, kind, fields)
    expected = encodings(folder)
    target = convert(folder, tmp_path / "target")
    record = json.loads((target / "conversion.json").read_text())
    alike = encodings(target) == expected
    assert record["same_token_ids"] is alike
    assert any("token ids" in note for note in record["notes"]) is not alike
    # transformers overrules what a Qwen2 checkpoint declares, and its files must stay as they are.
    assert alike is not (name == "qwen2" and fields == {"tokenizer_class": "PreTrainedTokenizerFast"})
    assert expected[0] != expected[1]


@pytest.mark.parametrize("tokenizer_class", ["LlamaTokenizer", "LlamaTokenizerFast", "Qwen2Tokenizer"])
def test_tokenizers_of_a_named_class_encode_alike(copied, tmp_path, tokenizer_class):
    folder = copied("llama")
    kind = "byte_level" if "Qwen" in tokenizer_class else "sentencepiece"
    save_tokenizer(folder, kind, {"tokenizer_class": tokenizer_class})
    assert encodings(convert(folder, tmp_path / "target")) == encodings(folder)


def test_a_class_named_in_the_config_is_kept(copied, tmp_path):
    folder = copied("llama")
    save_tokenizer(folder, "sentencepiece", None)
    edit_config(folder, tokenizer_class="PreTrainedTokenizerFast")
    assert encodings(convert(folder, tmp_path / "target")) == encodings(folder)


def test_a_padded_vocabulary_stays(copied, tmp_path):
    """More rows in the embeddings than the tokenizer has tokens, as in Qwen's checkpoints."""
    folder = copied("qwen2")
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(100)}, unk_token="w0"))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    target = convert(folder, tmp_path / "target")
    assert len(AutoTokenizer.from_pretrained(target)) == 100
    assert weights_of(target)["model.embed_tokens.weight"].shape[0] == 131 == read(target)["vocab_size"]


# What is recorded


@pytest.mark.parametrize("start", ["scale", "fold", "random"])
def test_record_and_card(copied, tmp_path, start):
    folder = copied("llama", "sharded", torch.bfloat16)
    (folder / "README.md").write_text(
        "---\nlicense: other\nlicense_name: a-licence\nlicense_link: https://example.org/l\nlanguage:\n- de\n"
        "pipeline_tag: text-generation\ndatasets:\n- theirs\nmodel-index: []\n---\n# Source\n"
    )
    target = tmp_path / "target"
    record = retrofit_checkpoint(folder, target, "elementwise", start=start, layers=[0, 2], seed=11, verify=True)
    assert json.loads((target / "conversion.json").read_text()) == record
    assert record["options"] == {
        "attn_gate": "elementwise", "start": start, "layers": [0, 2], **({"seed": 11} if start == "random" else {})
    }  # fmt: skip
    assert record["made_by"] == f"gated_qwen {gated_qwen.__version__}"
    command = f"gated-qwen retrofit source TARGET --gate elementwise --start {start} --layers 0,2"
    assert record["command"] == command + (" --seed 11" if start == "random" else "")
    assert record["largest_deviation"]["value"] == (None if start == "random" else 0)
    weights = weights_of(target)
    new = {name: weight for name, weight in weights.items() if is_gate(name)}
    assert record["parameters"] == {
        "all": sum(weight.numel() for weight in weights.values()),
        "new": sum(weight.numel() for weight in new.values()),
    }
    assert record["tensors"]["new"] == sorted(new)
    scaled = {f"model.layers.{layer}.self_attn.o_proj.weight": 2.0 for layer in (0, 2)}
    assert record["tensors"]["scaled"] == (scaled if start == "fold" else {})
    assert {file: entry["size"] for file, entry in record["files"].items()} == {
        file.name: file.stat().st_size for file in target.glob("*.safetensors")
    }
    assert record["source"]["config.json"] == (folder / "config.json").read_text()
    verification = record["verification"]
    assert (verification["max_difference"] == 0) == (start != "random")
    assert verification["dtype"] == "bfloat16" and verification["transformers"] == transformers.__version__
    assert any("past the context of 64" in name for name in verification["inputs"])
    assert str(tmp_path) not in json.dumps(record)

    card = ModelCard.load(target / "README.md")
    assert card.data.license == "other" and card.data.license_name == "a-licence"
    assert card.data.license_link == "https://example.org/l" and card.data.language == ["de"]
    assert card.data.pipeline_tag == "text-generation" and card.data.library_name == "transformers"
    assert "gated_qwen" in card.data.tags and card.data.get("datasets") is None
    for word in ("elementwise", "[0, 2]", f"`{start}`", command, f"{record['parameters']['new']:,}", "bfloat16"):
        assert word in card.content, word
    deviation = card.content.split("largest deviation from the source | ")[1].split(" ")[0]
    assert deviation == ("not" if start == "random" else "0:")
    assert str(tmp_path) not in card.content


@pytest.mark.parametrize("card", [None, "# No metadata\n", "---\nlicense: [\n---\n# Broken\n"])
def test_a_source_without_metadata_gets_a_card(copied, tmp_path, card):
    folder = copied("llama")
    if card is not None:
        (folder / "README.md").write_text(card)
    target = convert(folder, tmp_path / "target")
    assert ModelCard.load(target / "README.md").data.license is None
    assert (target / "README.source.md").exists() == (card is not None)
    assert "not run" in (target / "README.md").read_text()


# Verification


def test_small_models_are_verified(copied, tmp_path):
    folder = copied("qwen2_window")
    save_tokenizer(folder, "byte_level", {})
    record = retrofit_checkpoint(folder, tmp_path / "target")
    verification = record["verification"]
    assert verification["max_difference"] == 0 == verification["allowed"] and record["same_token_ids"] is True
    assert verification["largest_output"] > 0.1
    inputs = " ".join(verification["inputs"])
    assert all(what in inputs for what in ("random tokens", "past the window of 7", "past the context of 64"))
    assert retrofit_checkpoint(folder, tmp_path / "other", verify=False)["verification"] is None


def wrong_factor(monkeypatch):
    monkeypatch.setattr(retrofit_module, "output_factors", lambda *_: {})


def wrong_field(monkeypatch, model_type, **fields):
    original = families.FAMILIES[model_type]
    monkeypatch.setitem(families.FAMILIES, model_type, lambda config: {**original(config), **fields})


def wrong_rope(monkeypatch):
    wrong_field(monkeypatch, "llama", rope_parameters={"rope_type": "default", "rope_theta": 10100.0})


def wrong_past_the_context(monkeypatch):
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    wrong_field(monkeypatch, "llama", rope_parameters=rope)


def wrong_window(monkeypatch):
    wrong_field(monkeypatch, "mistral", sliding_window=80)


@pytest.mark.parametrize(
    ("name", "plant"),
    [
        ("llama", wrong_factor),
        ("llama", wrong_rope),
        ("llama", wrong_past_the_context),
        ("mistral_window", wrong_window),
    ],
)
def test_verification_finds_planted_errors(source, tmp_path, monkeypatch, name, plant):
    plant(monkeypatch)
    target = tmp_path / "target"
    with pytest.raises(CheckpointError, match="verification failed: outputs differ .* by up to") as caught:
        retrofit_checkpoint(source(name), target, start="fold")
    assert "\n" not in str(caught.value)
    assert not target.exists()
    monkeypatch.undo()
    convert(source(name), target, start="fold", restart=True)
    assert torch.equal(outputs(load(target)), outputs(load(source(name))))


# Plans


class Reads:
    """Counts the reads of weights while a plan is made."""

    def __init__(self, monkeypatch):
        self.count = 0
        original = os.preadv

        def preadv(*args):
            self.count += 1
            return original(*args)

        monkeypatch.setattr(os, "preadv", preadv)


def write_sparse_llama(folder: Path, layers: int = 80, layers_a_file: int = 4) -> int:
    """Llama 3 70B in bf16 without its weights; returns their number."""
    config = transformers.LlamaConfig(
        vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=layers,
        num_attention_heads=64, num_key_value_heads=8, max_position_embeddings=8192, rms_norm_eps=1e-5,
        architectures=["LlamaForCausalLM"], dtype="bfloat16",
    )  # fmt: skip
    config.save_pretrained(folder)
    groups = [{"model.embed_tokens.weight": (128256, 8192)}]
    for first in range(0, layers, layers_a_file):
        group = {}
        for layer in range(first, first + layers_a_file):
            for name, shape in {
                "self_attn.q_proj": (8192, 8192), "self_attn.k_proj": (1024, 8192), "self_attn.v_proj": (1024, 8192),
                "self_attn.o_proj": (8192, 8192), "mlp.gate_proj": (28672, 8192), "mlp.up_proj": (28672, 8192),
                "mlp.down_proj": (8192, 28672), "input_layernorm": (8192,), "post_attention_layernorm": (8192,),
            }.items():  # fmt: skip
                group[f"model.layers.{layer}.{name}.weight"] = shape
        groups.append(group)
    groups.append({"model.norm.weight": (8192,), "lm_head.weight": (128256, 8192)})
    weight_map, total = {}, 0
    for i, group in enumerate(groups, start=1):
        file = f"model-{i:05}-of-{len(groups):05}.safetensors"
        header, end = {"__metadata__": {"format": "pt"}}, 0
        for name, shape in group.items():
            start, end = end, end + 2 * math.prod(shape)
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
            weight_map[name] = file
        text = json.dumps(header).encode()
        with open(folder / file, "wb") as opened:
            opened.write(len(text).to_bytes(8, "little") + text)
            opened.truncate(8 + len(text) + end)
        total += end // 2
    index = {"metadata": {"total_size": 2 * total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index))
    return total


def test_a_70b_model_is_planned_from_headers(tmp_path, monkeypatch):
    folder = tmp_path / "llama-70b"
    total = write_sparse_llama(folder)
    assert total == 70_553_706_496
    reads = Reads(monkeypatch)
    files = {file.name: file.stat().st_size for file in folder.glob("*.safetensors")}

    plan = plan_retrofit(folder)
    assert plan.total_parameters == total + plan.new_parameters and plan.new_parameters == 80 * 64 * 8192
    assert {shard.source.name: shard.nbytes for shard in plan.shards if shard.source} == files
    (new,) = [shard for shard in plan.shards if shard.source is None]
    assert 0 < new.nbytes - 2 * plan.new_parameters < 20_000  # a header of 80 names
    assert plan.nbytes == sum(files.values()) + new.nbytes
    assert plan.deviation == 0 and plan.dropped == {}

    elementwise = plan_retrofit(folder, "elementwise", start="fold")
    assert elementwise.new_parameters == 80 * 8192 * 8192
    assert len(elementwise.scaled) == 80 and set(elementwise.scaled.values()) == {2.0}
    fresh = [shard for shard in elementwise.shards if all(tensor.is_new for tensor in shard.tensors)]
    assert len(fresh) == 3 and all(shard.nbytes < 5.1e9 for shard in fresh)  # 10.7 GB of gates
    assert sum(tensor.nbytes for tensor in elementwise.tensors) == 2 * elementwise.total_parameters
    assert reads.count == 0


def test_what_counts_reads_sees_them(source, monkeypatch):
    reads = Reads(monkeypatch)
    plan_retrofit(source("llama"), start="fold")
    assert reads.count == 0
    plan_retrofit(source("llama"), start="fold", headers_only=False)
    assert reads.count > 0


@pytest.mark.parametrize("start", ["scale", "fold", "random"])
def test_a_plan_is_what_is_written(source, tmp_path, start):
    folder = source("qwen3_bias", "sharded", torch.bfloat16)
    plan = plan_retrofit(folder, "elementwise", start=start, layers=[1])
    target = convert(folder, tmp_path / "target", "elementwise", start=start, layers=[1])
    assert {shard.name: shard.nbytes for shard in plan.shards} == {
        file.name: file.stat().st_size for file in target.glob("*.safetensors")
    }
    found = weights_of(target)
    assert {tensor.name: tensor.shape for tensor in plan.tensors} == {
        name: tuple(weight.shape) for name, weight in found.items()
    }
    assert plan.config.to_json_string() == (target / "config.json").read_text()
    assert GatedQwenConfig.from_pretrained(target).to_dict() == plan.config.to_dict()
