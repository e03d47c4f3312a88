"""GatedQwenConfig: defaults, what it refuses and how it says so, the authors' fields, and reading what it wrote."""

import copy
import itertools
import json
import logging
import math
import pickle

import pytest
import torch
from support import RELEASED, RELEASED_NAMES, tiny_config
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config
from transformers.utils import logging as transformers_logging

from gated_qwen import GatedQwenConfig, GatedQwenForCausalLM, GatedQwenModel

NATIVE_ONLY = {
    "attn_gate": "headwise",
    "attn_gate_scale": 1.0,
    "attn_gate_bias": False,
    "attn_gate_layers": None,
    "use_qk_norm": True,
    "attention_output_bias": False,
    "mlp_bias": False,
}
AUTHORS_FIELDS = {"headwise_attn_output_gate", "elementwise_attn_output_gate", "qkv_bias"}
gated = pytest.mark.parametrize("gate", ["headwise", "elementwise"])


def refusal(**fields) -> str:
    """The last line of the error that these fields give. Only transformers' type checks put a heading before it."""
    with pytest.raises(Exception) as error:
        tiny_config(**fields)
    *heading, line = str(error.value).split("\n")
    assert not heading or len(heading) == 1 and heading[0].startswith("Validation error for field")
    return line.strip()


def flags(headwise=False, elementwise=False) -> dict:
    return {"headwise_attn_output_gate": headwise, "elementwise_attn_output_gate": elementwise}


def values(config) -> dict:
    """All fields but the name of the folder that they came from."""
    return {name: value for name, value in config.to_dict().items() if name != "_name_or_path"}


@pytest.fixture
def warnings(caplog):
    """What is logged, by transformers too, whose logger passes nothing on to the root."""
    transformers_logging.add_handler(caplog.handler)
    with caplog.at_level(logging.WARNING):
        yield caplog
    transformers_logging.remove_handler(caplog.handler)


# Defaults


def test_defaults_are_those_of_qwen3_and_a_headwise_gate():
    config, stock = GatedQwenConfig(), Qwen3Config()
    assert config.model_type == "gated_qwen"
    assert {name: getattr(config, name) for name in NATIVE_ONLY} == NATIVE_ONLY
    ours = {name: value for name, value in config.to_dict().items() if name not in NATIVE_ONLY}
    assert ours == {**stock.to_dict(), "model_type": "gated_qwen"}


def test_attention_output_bias_follows_attention_bias_unless_given():
    for bias, output in itertools.product([True, False, None], repeat=2):
        config = tiny_config(attention_bias=bias, attention_output_bias=output)
        assert config.attention_bias is bool(bias)
        assert config.attention_output_bias is (bool(bias) if output is None else output)


def test_head_dim_null_is_hidden_size_over_heads():
    assert tiny_config(hidden_size=48, head_dim=None).head_dim == 8
    assert GatedQwenConfig(hidden_size=4096, num_attention_heads=32).head_dim == 128


def test_key_value_heads_null_are_as_many_as_the_heads():
    config = tiny_config(num_key_value_heads=None)
    assert config.num_key_value_heads == 6
    assert GatedQwenModel(config).layers[0].self_attn.k_proj.out_features == 60


@gated
def test_gated_layers(gate):
    everywhere, some, none = (
        tiny_config(attn_gate=gate),
        tiny_config(attn_gate=gate, attn_gate_layers=[0, 2]),
        tiny_config(attn_gate=None),
    )
    assert [everywhere.is_gated_layer(layer) for layer in range(3)] == [True, True, True]
    assert [some.is_gated_layer(layer) for layer in range(3)] == [True, False, True]
    assert not any(none.is_gated_layer(layer) for layer in range(3))


# What is refused


@pytest.mark.parametrize("value", ["foo", "Headwise", "", True, False, 1, ["headwise"]])
def test_unknown_gates_are_refused(value):
    line = f"`attn_gate` must be one of None, 'headwise', 'elementwise', got {value!r}."
    assert refusal(attn_gate=value) == line


@pytest.mark.parametrize("value", [0, 0.0, -1, math.nan, math.inf, -math.inf])
def test_gate_scales_that_are_not_above_zero_are_refused(value):
    assert refusal(attn_gate_scale=value) == f"`attn_gate_scale` must be a finite number above 0, got {value}."


@pytest.mark.parametrize("value", ["2", None, True])
def test_gate_scales_of_another_type_are_refused(value):
    line = refusal(attn_gate_scale=value)
    assert "'attn_gate_scale'" in line and "float" in line and repr(value) in line


@pytest.mark.parametrize("value", [[], [3], [-1], [0, 3], [1, 1], [2, 0]])
def test_impossible_gate_layers_are_refused(value):
    line = "`attn_gate_layers` must be None or a rising list of layers between 0 and `num_hidden_layers` - 1 = 2, got "
    assert refusal(attn_gate_layers=value) == f"{line}{value}."


@pytest.mark.parametrize("value", ["0", 1, {0: 1}, ["0"], [0.0], [True], [0, None]])
def test_gate_layers_of_another_type_are_refused(value):
    line = refusal(attn_gate_layers=value)
    assert "'attn_gate_layers'" in line and "list[int]" in line and repr(value) in line


def test_gate_layers_without_a_gate_are_refused():
    line = "`attn_gate_layers` is set but `attn_gate` is None: name a gate or leave the layers out."
    assert refusal(attn_gate=None, attn_gate_layers=[0]) == line


@pytest.mark.parametrize(
    "name", ["attn_gate_bias", "use_qk_norm", "mlp_bias", "attention_bias", "attention_output_bias"]
)
@pytest.mark.parametrize("value", [1, "true"])
def test_switches_must_be_booleans(name, value):
    line = refusal(**{name: value})
    assert f"'{name}'" in line and "bool" in line and repr(value) in line


@pytest.mark.parametrize(
    "name", ["num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "num_hidden_layers"]
)
@pytest.mark.parametrize("value", [0, -3])
def test_counts_below_one_are_refused(name, value):
    assert refusal(**{name: value}) == f"`{name}` must be at least 1, got {value}."


@pytest.mark.parametrize("heads", [5, 2])
def test_heads_that_do_not_fill_their_groups_are_refused(heads):
    line = f"`num_attention_heads` ({heads}) must be a multiple of `num_key_value_heads` (3)."
    assert refusal(num_attention_heads=heads) == line


@pytest.mark.parametrize(
    ("fields", "found"), [({"head_dim": 7}, 7), ({"hidden_size": 42, "head_dim": None}, 7)], ids=["given", "derived"]
)
def test_an_odd_head_dim_is_refused(fields, found):
    assert refusal(**fields) == f"`head_dim` must be even for rotary embeddings, got {found}."


def test_a_head_dim_that_does_not_follow_from_the_sizes_must_be_given():
    line = "`hidden_size` (40) is not a multiple of `num_attention_heads` (6): set `head_dim`."
    assert refusal(head_dim=None) == line


@pytest.mark.parametrize("count", [0, 1, 4])
def test_layer_types_of_another_length_are_refused(count):
    line = f"`layer_types` must have one entry for each of the `num_hidden_layers` (3) layers, got {count}."
    assert refusal(layer_types=["full_attention"] * count) == line


@pytest.mark.parametrize("name", ["foo", "linear_attention", "chunked_attention"])
def test_layer_types_of_other_models_are_refused(name):
    line = f"`layer_types` must hold 'full_attention' or 'sliding_attention' for each layer, got '{name}'."
    assert refusal(layer_types=["full_attention", name, "full_attention"]) == line


@pytest.mark.parametrize("fields", [{}, {"use_sliding_window": True, "sliding_window": None}, {"sliding_window": 4}])
def test_sliding_layers_without_a_window_are_refused(fields):
    line = refusal(layer_types=["sliding_attention", "full_attention", "full_attention"], **fields)
    assert line.startswith("`layer_types` has sliding_attention layers but no window is in force: set ")
    assert "`use_sliding_window=True`" in line and "`sliding_window`" in line


@pytest.mark.parametrize(
    "fields",
    [
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ],
    ids=["v4", "v5"],
)
def test_partial_rotation_is_refused(fields):
    assert refusal(**fields) == "`partial_rotary_factor` must be 1, got 0.5: these models rotate whole heads."


@pytest.mark.parametrize("name", ["num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size"])
def test_sizes_must_be_integers(name):
    for value in ("6", 6.0):
        line = refusal(**{name: value})
        assert f"'{name}'" in line and "int" in line and repr(value) in line


# The authors' fields


@pytest.mark.parametrize(
    ("fields", "gate"),
    [(flags(), None), (flags(headwise=True), "headwise"), (flags(elementwise=True), "elementwise")],
    ids=["neither", "headwise", "elementwise"],
)
def test_the_flags_name_the_gate(fields, gate, warnings):
    config = tiny_config(**fields)
    assert config.attn_gate == gate
    assert not AUTHORS_FIELDS & vars(config).keys()
    assert not warnings.records


@pytest.mark.parametrize(
    ("fields", "gate"),
    [
        ({"headwise_attn_output_gate": True}, "headwise"),
        ({"headwise_attn_output_gate": False}, None),
        ({"elementwise_attn_output_gate": True}, "elementwise"),
        ({"elementwise_attn_output_gate": False}, None),
    ],
)
def test_one_flag_is_enough(fields, gate):
    assert tiny_config(**fields).attn_gate == gate


def test_both_flags_are_headwise_with_a_warning(warnings):
    assert tiny_config(**flags(True, True)).attn_gate == "headwise"
    (record,) = warnings.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        "Both `headwise_attn_output_gate` and `elementwise_attn_output_gate` are true: "
        "taking headwise, as the authors' code does."
    )


@pytest.mark.parametrize(
    ("gate", "fields", "found"),
    [
        ("elementwise", flags(headwise=True), "headwise"),
        ("elementwise", flags(), "both false"),
        (None, flags(headwise=True), "headwise"),
        (None, flags(elementwise=True), "elementwise"),
    ],
)
def test_flags_that_contradict_the_gate_are_refused(gate, fields, found):
    line = f"`attn_gate` ({gate!r}) and the authors' flags ({found}) contradict each other: remove one of them."
    assert refusal(attn_gate=gate, **fields) == line


@pytest.mark.parametrize("name", sorted(AUTHORS_FIELDS))
@pytest.mark.parametrize("value", [1, 0, "true", "false", None, []])
def test_authors_fields_that_are_not_booleans_are_refused(name, value):
    assert refusal(**{name: value}) == f"`{name}` must be true or false, got {value!r}."


def projections_with_bias(config) -> set[str]:
    with torch.device("meta"):
        layer = GatedQwenModel(config).layers[0]
    return {name.split(".")[-2] for name, _ in layer.named_parameters() if name.endswith(".bias")}


ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"qkv_bias": True}, ATTENTION | {"g_proj"}),
        ({"qkv_bias": False}, set()),
        ({"attention_bias": True}, ATTENTION),
        ({"attention_bias": False}, set()),
        ({}, set()),
        ({"qkv_bias": True, "attention_bias": True}, ATTENTION | {"g_proj"}),
        ({"qkv_bias": False, "attention_bias": False}, set()),
    ],
    ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_which_projections_the_bias_fields_give_a_bias(gate, fields, expected):
    gate_flag = flags(gate == "headwise", gate == "elementwise")
    config = tiny_config(**gate_flag, **fields)
    expected = expected - ({"g_proj"} if gate is None else set())
    assert projections_with_bias(config) == expected
    assert config.attn_gate_bias is ("g_proj" in expected)
    again = GatedQwenConfig.from_dict(json.loads(config.to_json_string(use_diff=False)))
    assert projections_with_bias(again) == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("attention_bias", False),
        ("attention_bias", True),
        ("attention_output_bias", False),
        ("attention_output_bias", True),
        ("attn_gate_bias", True),
    ],
)
def test_bias_fields_that_contradict_each_other_are_refused(name, value):
    line = f"`qkv_bias` ({not value}) and `{name}` ({value}) contradict each other: remove one of them."
    assert refusal(qkv_bias=not value, **{name: value}) == line


# Spellings of transformers 4 and 5

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
ROPES = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0},
    "llama3": LLAMA3,
}


@pytest.mark.parametrize("rope_type", ROPES)
@pytest.mark.parametrize("theta", [1e4, 5e5, 1e6])
def test_all_spellings_of_rope_mean_the_same(rope_type, theta):
    expected = {"rope_type": rope_type, "rope_theta": theta, **ROPES[rope_type]}
    spellings = [
        {"rope_parameters": dict(expected)},
        {"rope_theta": theta, "rope_scaling": {"rope_type": rope_type, **ROPES[rope_type]}},
        {"rope_theta": theta, "rope_scaling": {"type": rope_type, **ROPES[rope_type]}},
    ]
    if rope_type == "default":
        spellings += [{"rope_theta": theta}, {"rope_theta": theta, "rope_scaling": None}]
    for spelling in spellings:
        config = tiny_config(**spelling)
        # transformers keeps the old name of the type beside the new one.
        assert {k: v for k, v in config.rope_parameters.items() if k != "type"} == expected
        saved = json.loads(config.to_json_string())
        assert not saved.keys() & {"rope_theta", "rope_scaling"}
        assert GatedQwenConfig.from_dict(saved).rope_parameters == config.rope_parameters


def test_rope_theta_is_ten_thousand_if_nothing_is_said():
    for fields in ({}, {"rope_scaling": None}, {"rope_parameters": None}):
        assert tiny_config(**fields).rope_parameters == {"rope_type": "default", "rope_theta": 1e4}


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_both_spellings_of_dtype_mean_the_same(name, dtype):
    config = tiny_config(**{name: dtype})
    assert config.dtype == getattr(torch, dtype)
    saved = json.loads(config.to_json_string())
    assert saved["dtype"] == dtype and "torch_dtype" not in saved


# Token ids


@pytest.mark.parametrize(
    "ids",
    [(None, None, None), (1, 2, 0), (130, [2, 5], None), (7, 7, 7), (0, [3], 0)],
    ids=["none", "three", "no-pad", "all-alike", "zeros"],
)
def test_token_ids_are_kept_exactly(ids, tmp_path):
    fields = dict(zip(("bos_token_id", "eos_token_id", "pad_token_id"), ids, strict=True))
    config = tiny_config(**fields)
    config.save_pretrained(tmp_path)
    saved = AutoConfig.from_pretrained(tmp_path)
    for one in (config, saved, GatedQwenForCausalLM(saved).config):
        assert {name: getattr(one, name) for name in fields} == fields


def test_a_model_without_a_pad_token_has_no_padding_row():
    config = tiny_config(pad_token_id=None)
    model = GatedQwenModel(config)
    assert model.padding_idx is None and model.embed_tokens.padding_idx is None
    assert model(torch.arange(5)[None]).last_hidden_state.isfinite().all()


@pytest.mark.parametrize("name", RELEASED_NAMES)
def test_the_token_ids_of_a_released_checkpoint_are_those_of_its_file(name):
    config = AutoConfig.from_pretrained(RELEASED / name)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (317, 317, None)


# Writing and reading


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"attn_gate": "elementwise", "attn_gate_scale": 2.0, "attn_gate_bias": True, "attn_gate_layers": [0, 2]},
        {"attn_gate": None, "use_qk_norm": False, "attention_bias": True, "attention_output_bias": False},
        {"mlp_bias": True, "head_dim": None, "hidden_size": 48, "num_key_value_heads": None, "dtype": "bfloat16"},
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
        {
            "use_sliding_window": True,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"pad_token_id": None, "eos_token_id": [2, 5], "num_labels": 5, "attn_gate_scale": 1.7},
        {**flags(elementwise=True), "qkv_bias": True},
    ],
    ids=lambda fields: "-".join(fields) or "plain",
)
def test_what_is_written_is_read_back(fields, tmp_path):
    config = tiny_config(**fields)
    for use_diff in (True, False):
        assert values(GatedQwenConfig.from_dict(json.loads(config.to_json_string(use_diff)))) == values(config)
    config.save_pretrained(tmp_path)
    for reader in (AutoConfig, GatedQwenConfig):
        read = reader.from_pretrained(tmp_path)
        assert type(read) is GatedQwenConfig and values(read) == values(config)
    read.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "config.json").read_text() == (tmp_path / "config.json").read_text()


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda config: pickle.loads(pickle.dumps(config))])
@pytest.mark.parametrize("name", [None, *RELEASED_NAMES])
def test_copies_are_equal_and_independent(copied, name):
    config = tiny_config(attn_gate_layers=[0, 2]) if name is None else AutoConfig.from_pretrained(RELEASED / name)
    twin = copied(config)
    assert type(twin) is GatedQwenConfig and vars(twin) == vars(config)
    twin.attn_gate_scale = 2.0
    assert config.attn_gate_scale == 1.0


@pytest.mark.parametrize("name", RELEASED_NAMES)
def test_a_released_config_is_saved_with_native_names_only(name, tmp_path):
    config = AutoConfig.from_pretrained(RELEASED / name)
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["model_type"] == "gated_qwen" and saved["architectures"] == ["GatedQwenForCausalLM"]
    assert saved.keys() <= {*NATIVE_ONLY, *vars(Qwen3Config()), "model_type"}
    assert not any(key.startswith("_") for key in saved)
    for text in (config.to_json_string(), config.to_json_string(use_diff=False), repr(config)):
        assert not any(field in text for field in (*AUTHORS_FIELDS, "_is_released", "auto_map"))

    read = AutoConfig.from_pretrained(tmp_path)
    assert values(read) == values(config)
    theirs = json.loads((RELEASED / name / "config.json").read_text())
    same = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    same += ("head_dim", "vocab_size", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "use_qk_norm")
    assert {key: saved[key] for key in same} == {key: theirs[key] for key in same}
    assert saved["rope_parameters"] == {"rope_type": "default", "rope_theta": theirs["rope_theta"]}
    assert saved["dtype"] == "bfloat16"


def test_plans_are_not_written():
    for config in (tiny_config(), tiny_config(attn_gate=None)):
        for written in (config.to_dict(), config.to_diff_dict(), json.loads(config.to_json_string(use_diff=False))):
            assert not any(name.startswith("base_model_") for name in written)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("_attn_implementation_internal", "somebody/kernel"),
        ("_attn_implementation", "somebody/kernel"),
        ("_experts_implementation_internal", "somebody/kernel"),
        ("_is_released", True),
        ("_auto_class", "AutoModel"),
    ],
)
def test_internal_attributes_in_a_file_are_not_taken_over(name, value, tmp_path):
    config = tiny_config()
    (tmp_path / "config.json").write_text(json.dumps({**config.to_dict(), name: value}))
    read = AutoConfig.from_pretrained(tmp_path)
    assert getattr(read, name, None) == getattr(config, name, None) != value
    assert values(read) == values(config)


@pytest.mark.parametrize("name", RELEASED_NAMES)
def test_a_released_file_read_as_a_dict_is_the_same_config(name):
    fields = json.loads((RELEASED / name / "config.json").read_text())
    config = GatedQwenConfig.from_dict(fields)
    assert config.model_type == "gated_qwen"
    assert values(config) == values(AutoConfig.from_pretrained(RELEASED / name))


def test_the_released_marker_follows_the_flags_alone():
    assert AutoConfig.from_pretrained(RELEASED / "1B_baseline")._is_released is True
    assert tiny_config()._is_released is False
    assert tiny_config(qkv_bias=False)._is_released is False


@pytest.mark.parametrize("tied", [True, False])
def test_a_plain_qwen3_config_is_an_ungated_one(tied):
    """The reading that starts a retrofit: every field is kept, no gate appears."""
    stock = Qwen3Config(
        vocab_size=131,
        hidden_size=40,
        intermediate_size=72,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=10,
        attention_bias=True,
        tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        use_sliding_window=True,
        sliding_window=4,
        max_window_layers=2,
    ).to_dict()
    config = GatedQwenConfig(attn_gate=None, **stock)
    assert config.model_type == "gated_qwen" and config.to_dict()["model_type"] == "gated_qwen"
    assert not any(config.is_gated_layer(layer) for layer in range(3))
    kept = {name: value for name, value in config.to_dict().items() if name in stock}
    assert kept == {**stock, "model_type": "gated_qwen"}


def test_other_keywords_of_from_pretrained_override_the_file():
    config = AutoConfig.from_pretrained(RELEASED / "1B_gate_headwise", attn_gate_scale=2.0, max_position_embeddings=64)
    assert (config.attn_gate, config.attn_gate_scale, config.max_position_embeddings) == ("headwise", 2.0, 64)
    assert config._is_released


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"attn_gate": "bogus"}, "`attn_gate`"),
        ({"attn_gate": "elementwise"}, "`attn_gate`"),
        ({"attn_gate_scale": -1.0}, "`attn_gate_scale`"),
        ({"attn_gate_layers": [0]}, "`attn_gate_layers`"),
        ({"layer_types": ["foo"] * 3}, "`layer_types`"),
        ({"rope_theta": 0}, "`rope_theta`"),
        ({"rope_scaling": {"rope_type": "bogus"}}, "`rope_type`"),
        ({"hidden_act": "foo"}, "`hidden_act`"),
        ({"qkv_bias": "yes"}, "`qkv_bias`"),
    ],
)
def test_overrides_are_checked_like_fields_of_the_file(overrides, named):
    with pytest.raises(ValueError) as error:
        AutoModelForCausalLM.from_pretrained(RELEASED / "1B_gate_headwise", **overrides)
    assert named in str(error.value) and "\n" not in str(error.value)


def test_what_follows_from_an_override_is_derived(tmp_path):
    windows = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    config = AutoConfig.from_pretrained(RELEASED / "1B_gate_headwise", **windows)
    assert config.layer_types == ["full_attention", "sliding_attention", "sliding_attention"]
    config.save_pretrained(tmp_path)
    shorter = AutoConfig.from_pretrained(tmp_path, num_hidden_layers=2)
    assert shorter.layer_types == ["full_attention", "sliding_attention"]
    ungated = AutoConfig.from_pretrained(tmp_path, attn_gate=None)
    assert not any("g_proj" in name for name in ungated.base_model_tp_plan)
    assert AutoConfig.from_pretrained(tmp_path, output_gate_scores=True).output_gate_scores is True


def test_fields_set_on_the_object_are_checked_when_a_model_is_built():
    config = tiny_config(attn_gate=None)
    config.attn_gate = "bogus"
    with pytest.raises(ValueError, match="`attn_gate` must be one of"):
        GatedQwenForCausalLM(config)
    config.attn_gate = "headwise"
    assert "model.layers.*.self_attn.g_proj" in GatedQwenForCausalLM(config)._tp_plan
    config.num_hidden_layers = 4
    with pytest.raises(ValueError, match="`num_hidden_layers`"):
        GatedQwenForCausalLM(config)


@pytest.mark.parametrize(
    "fields", [{"rope_theta": -1}, {"rope_theta": "abc"}, {"pad_token_id": 131}, {"sliding_window": 0}]
)
def test_values_that_no_model_can_have_are_refused(fields):
    (name,) = fields
    with pytest.raises(ValueError, match=f"`{name}`"):
        tiny_config(**fields)


def test_a_model_built_from_a_released_config_is_native(tmp_path):
    config = AutoConfig.from_pretrained(RELEASED / "1B_gate_headwise")
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["model_type"] == "gated_qwen" and saved["attn_gate"] == "headwise"
    assert not saved.keys() & {*AUTHORS_FIELDS, "auto_map"}
