"""The models themselves: shapes, what the gate computes, saving and loading, rotary embeddings, plans."""

import copy
import itertools
import json
import math
import pickle
import threading

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support import VOCABULARY, build, max_error, randomise, tiny_config, tokens
from torch import nn
from torch.nn import functional as F
from transformers import Qwen3Config, Qwen3ForCausalLM

from gated_qwen import (
    GatedQwenConfig,
    GatedQwenForCausalLM,
    GatedQwenForQuestionAnswering,
    GatedQwenForSequenceClassification,
    GatedQwenForTokenClassification,
    GatedQwenModel,
)

HEADS = (GatedQwenForSequenceClassification, GatedQwenForTokenClassification, GatedQwenForQuestionAnswering)
ALL_CLASSES = (GatedQwenModel, GatedQwenForCausalLM, *HEADS)
OURS = (
    "attn_gate", "attn_gate_scale", "attn_gate_bias", "attn_gate_layers", "use_qk_norm", "attention_output_bias",
    "mlp_bias", "model_type",
)  # fmt: skip

# Largest difference allowed in fp32, where two ways compute the same numbers of size about 10.
TOLERANCE = 5e-5

gated = pytest.mark.parametrize("gate", ["headwise", "elementwise"])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
head_counts = pytest.mark.parametrize(
    ("heads", "key_value_heads"), [(6, 3), (8, 2), (4, 1), (4, 4)], ids=["groups-of-2", "groups-of-4", "mqa", "mha"]
)


def stock(model) -> Qwen3ForCausalLM:
    """Stock Qwen3 with the weights of `model`, the gate's left out."""
    fields = {name: value for name, value in model.config.to_dict().items() if name not in OURS}
    twin = Qwen3ForCausalLM(Qwen3Config(**fields)).eval().to(model.dtype)
    twin.load_state_dict({name: value for name, value in model.state_dict().items() if ".g_proj." not in name})
    twin.set_attn_implementation(model.config._attn_implementation)
    return twin


@torch.no_grad()
def set_gates(model, weight=0.0, bias=0.0):
    for name, parameter in model.named_parameters():
        if name.endswith("g_proj.weight"):
            parameter.fill_(weight)
        elif name.endswith("g_proj.bias"):
            parameter.fill_(bias)


@pytest.fixture
def poisoned_memory():
    """Memory that nothing was written to reads as NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


# Shapes


def test_output_shapes(gate):
    ids = tokens(2, 7)
    assert build(gate, GatedQwenModel)(ids).last_hidden_state.shape == (2, 7, 40)
    assert build(gate)(ids).logits.shape == (2, 7, VOCABULARY)
    assert build(gate, GatedQwenForSequenceClassification, num_labels=5)(ids).logits.shape == (2, 5)
    assert build(gate, GatedQwenForTokenClassification, num_labels=5)(ids).logits.shape == (2, 7, 5)
    answer = build(gate, GatedQwenForQuestionAnswering)(ids)
    assert answer.start_logits.shape == answer.end_logits.shape == (2, 7)


def test_logits_to_keep(gate):
    model, ids = build(gate), tokens()
    full = model(ids).logits
    assert max_error(model(ids, logits_to_keep=3).logits, full[:, -3:]) <= TOLERANCE
    assert max_error(model(ids, logits_to_keep=torch.tensor([1, 4])).logits, full[:, [1, 4]]) <= TOLERANCE


def test_gate_projection_width(gate):
    attention = build(gate).model.layers[0].self_attn
    if gate is None:
        assert attention.g_proj is None
    else:
        assert attention.g_proj.weight.shape == ({"headwise": 6, "elementwise": 60}[gate], 40)


def test_inputs_embeds_equal_input_ids(gate):
    model, ids = build(gate), tokens()
    embeds = model.get_input_embeddings()(ids)
    assert torch.equal(model(inputs_embeds=embeds).logits, model(ids).logits)


def test_input_ids_and_inputs_embeds_exclude_each_other(gate):
    model, ids = build(gate), tokens()
    with pytest.raises(ValueError, match="exactly one of"):
        model(input_ids=ids, inputs_embeds=model.get_input_embeddings()(ids))
    with pytest.raises(ValueError, match="exactly one of"):
        model()


def test_export_with_gate_scores(gate):
    ids = tokens()
    for model_class in (GatedQwenModel, GatedQwenForCausalLM):
        model = build(gate, model_class)
        kwargs = {"input_ids": ids, "use_cache": False, "output_gate_scores": True}
        with torch.no_grad():
            expected = model(**kwargs)
            exported = torch.export.export(model, (), kwargs, strict=False).module()(**kwargs)
        assert type(exported) is type(expected)
        assert all(max_error(a, b) <= TOLERANCE for a, b in zip(exported[0], expected[0], strict=True))
        pairs = zip(exported.gate_scores, expected.gate_scores, strict=True)
        assert all(max_error(a, b) <= TOLERANCE for a, b in pairs)


def test_gate_scores_where_the_config_asks_for_tuples(gate):
    ids = tokens()
    for model_class in ALL_CLASSES:
        model = build(gate, model_class)
        expected = model(ids, output_gate_scores=True).gate_scores
        model.config.return_dict = False
        found = model(ids, output_gate_scores=True)[-1]
        assert len(found) == len(expected) == (0 if gate is None else 3)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# What the gate computes


@dtypes
def test_a_gate_of_one_equals_stock_qwen3_bit_for_bit(gate, dtype):
    model = build(gate, attn_gate_scale=2.0, attn_gate_bias=True).to(dtype)
    set_gates(model)
    ids = tokens()
    assert torch.equal(model(ids).logits, stock(model)(ids).logits)


@gated
@head_counts
@torch.no_grad()
def test_constant_gates_equal_stock_qwen3_with_scaled_o_proj(gate, heads, key_value_heads):
    """Each head, or channel, has a constant of its own."""
    sizes = {"num_attention_heads": heads, "num_key_value_heads": key_value_heads}
    model = build(gate, **sizes, attn_gate_bias=True, attn_gate_scale=1.7)
    for layer in model.model.layers:
        layer.self_attn.g_proj.weight.zero_()
    twin = stock(model)
    for layer, twin_layer in zip(model.model.layers, twin.model.layers, strict=True):
        constants = 1.7 * torch.sigmoid(layer.self_attn.g_proj.bias).view(heads, -1).expand(heads, 10).flatten()
        twin_layer.self_attn.o_proj.weight.mul_(constants)
    ids = tokens()
    assert max_error(model(ids).logits, twin(ids).logits) <= TOLERANCE


@gated
@head_counts
@torch.no_grad()
def test_each_head_is_scaled_by_its_own_gate(gate, heads, key_value_heads):
    sizes = {"num_attention_heads": heads, "num_key_value_heads": key_value_heads, "num_hidden_layers": 1}
    model = build(gate, **sizes, attn_gate_bias=True)
    ungated = build(None, **sizes)
    ungated.load_state_dict(model.state_dict(), strict=False)

    ids, into_o_proj = tokens(), []
    for one in (model, ungated):
        o_proj = one.model.layers[0].self_attn.o_proj
        o_proj.register_forward_pre_hook(lambda _, args: into_o_proj.append(args[0].view(2, 11, heads, 10)))
        one(ids)
    with_gate, without_gate = into_o_proj

    layer = model.model.layers[0]
    layer_input = layer.input_layernorm(model.model.embed_tokens(ids))
    rows = {"headwise": 1, "elementwise": 10}[gate]
    for head in range(heads):
        own = slice(head * rows, (head + 1) * rows)
        g_proj = layer.self_attn.g_proj
        score = torch.sigmoid(F.linear(layer_input, g_proj.weight[own], g_proj.bias[own]))
        assert max_error(with_gate[:, :, head], without_gate[:, :, head] * score) <= 1e-6


def packed_as_released(query, gate, key_value_heads):
    """Rows of q_proj and g_proj in the authors' order: for each key/value head its query rows, then its gate rows."""
    query, gate = query.chunk(key_value_heads), gate.chunk(key_value_heads)
    return torch.cat([part for pair in zip(query, gate, strict=True) for part in pair])


def rotate(x, theta):
    """x: (batch, tokens, heads, head_dim)"""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[1])[:, None] * theta ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat([x[..., :half] * cos - x[..., half:] * sin, x[..., half:] * cos + x[..., :half] * sin], dim=-1)


def rms_norm(x, norm):
    return norm.weight * x / (x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()


def reference_attention(attn, config, x):
    """The formula of the authors' code (arXiv 2505.06708), in plain torch."""
    batch, length, _ = x.shape
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    query = attn.q_proj(x)
    gate = None
    if attn.g_proj is not None:
        width = attn.g_proj.out_features // heads
        weight = packed_as_released(attn.q_proj.weight, attn.g_proj.weight, kv_heads)
        q_bias = attn.q_proj.weight.new_zeros(heads * dim) if attn.q_proj.bias is None else attn.q_proj.bias
        g_bias = attn.g_proj.weight.new_zeros(heads * width) if attn.g_proj.bias is None else attn.g_proj.bias
        packed = F.linear(x, weight, packed_as_released(q_bias, g_bias, kv_heads)).view(batch, length, kv_heads, -1)
        query, gate = packed.split([heads // kv_heads * dim, heads // kv_heads * width], dim=-1)
        gate = gate.reshape(batch, length, heads, width)
    query = query.reshape(batch, length, heads, dim)
    key, value = (proj(x).view(batch, length, kv_heads, dim) for proj in (attn.k_proj, attn.v_proj))
    if config.use_qk_norm:
        query, key = rms_norm(query, attn.q_norm), rms_norm(key, attn.k_norm)
    query, key = (rotate(states, config.rope_parameters["rope_theta"]) for states in (query, key))
    key, value = (states.repeat_interleave(heads // kv_heads, dim=2) for states in (key, value))

    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(dim)
    scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
    output = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), value)
    if gate is not None:
        output = output * config.attn_gate_scale * torch.sigmoid(gate)
    return attn.o_proj(output.reshape(batch, length, heads * dim))


@head_counts
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"attn_gate_bias": True},
        {"attention_bias": True},
        {"attention_bias": True, "attention_output_bias": False, "attn_gate_bias": True},
        {"attention_output_bias": True},
        {"use_qk_norm": False},
        {"attn_gate_layers": [0, 2]},
        {"attn_gate_scale": 1.7},
        {"attn_gate_scale": 2, "attention_bias": True, "attn_gate_bias": True, "use_qk_norm": False, "mlp_bias": True},
    ],
    ids=lambda fields: "-".join(fields) or "plain",
)
@torch.no_grad()
def test_attention_equals_the_reference(gate, fields, heads, key_value_heads):
    if gate is None:
        fields = {**fields, "attn_gate_layers": None}
    model = build(gate, GatedQwenModel, num_attention_heads=heads, num_key_value_heads=key_value_heads, **fields)
    gated_layers = [] if gate is None else fields.get("attn_gate_layers", [0, 1, 2])
    assert [i for i, layer in enumerate(model.layers) if layer.self_attn.g_proj is not None] == gated_layers

    calls = []
    for layer in model.layers:
        layer.self_attn.register_forward_hook(lambda *call: calls.append(call), with_kwargs=True)
    model(tokens())
    assert len(calls) == 3
    for attention, _, kwargs, (output, _) in calls:
        expected = reference_attention(attention, model.config, kwargs["hidden_states"])
        assert max_error(output, expected) <= TOLERANCE


@pytest.mark.parametrize("use_qk_norm", [True, False])
def test_which_projections_have_a_bias(gate, use_qk_norm):
    for qkv, output, mlp, own in itertools.product([True, False], [True, False, None], [True, False], [True, False]):
        with torch.device("meta"):
            model = GatedQwenForCausalLM(
                tiny_config(
                    attn_gate=gate,
                    use_qk_norm=use_qk_norm,
                    attention_bias=qkv,
                    attention_output_bias=output,
                    mlp_bias=mlp,
                    attn_gate_bias=own,
                )
            )
        expected = {"q_proj", "k_proj", "v_proj"} if qkv else set()
        expected |= {"o_proj"} if (qkv if output is None else output) else set()
        expected |= {"gate_proj", "up_proj", "down_proj"} if mlp else set()
        expected |= {"g_proj"} if own and gate is not None else set()
        for layer in model.model.layers:
            owners = {name.split(".")[-2] for name, _ in layer.named_parameters() if name.endswith(".bias")}
            assert owners == expected


# Gate scores


@gated
@pytest.mark.parametrize("fields", [{}, {"attn_gate_scale": 1.7, "attn_gate_bias": True, "attn_gate_layers": [0, 2]}])
@torch.no_grad()
def test_gate_scores_are_the_factors_on_the_attention_output(gate, fields):
    model = build(gate, GatedQwenModel, **fields)
    layers = fields.get("attn_gate_layers", [0, 1, 2])
    outputs = model(tokens(), output_gate_scores=True, output_hidden_states=True)
    assert isinstance(outputs.gate_scores, tuple) and len(outputs.gate_scores) == len(layers)
    for score, index in zip(outputs.gate_scores, layers, strict=True):
        layer = model.layers[index]
        logits = layer.self_attn.g_proj(layer.input_layernorm(outputs.hidden_states[index]))
        expected = model.config.attn_gate_scale * torch.sigmoid(logits)
        assert torch.equal(score, expected.view(2, 11, 6, {"headwise": 1, "elementwise": 10}[gate]))


@pytest.mark.parametrize("model_class", ALL_CLASSES)
def test_every_class_returns_gate_scores_on_request_only(gate, model_class):
    model, ids = build(gate, model_class), tokens()
    assert "gate_scores" not in model(ids)

    expected = model.base_model(ids, output_gate_scores=True).gate_scores
    assert len(expected) == (0 if gate is None else 3)
    asked, plain = model(ids, output_gate_scores=True), model(ids)
    assert all(map(torch.equal, asked.gate_scores, expected)) and len(asked.gate_scores) == len(expected)
    assert torch.equal(asked[0], plain[0]), "asking for the scores changes the result"

    without, with_scores = (model(ids, return_dict=False, output_gate_scores=asked) for asked in (False, True))
    assert isinstance(with_scores, tuple) and len(with_scores) == len(without) + 1
    assert all(map(torch.equal, with_scores[-1], expected)) and len(with_scores[-1]) == len(expected)

    model.config.output_gate_scores = True
    assert all(map(torch.equal, model(ids).gate_scores, expected))
    assert "gate_scores" not in model(ids, output_gate_scores=False)


@gated
def test_gate_scores_come_beside_the_loss_and_the_other_outputs(gate):
    model, ids = build(gate), tokens()
    model.set_attn_implementation("eager")
    wanted = {"output_gate_scores": True, "output_hidden_states": True, "output_attentions": True}
    outputs = model(ids, labels=ids, **wanted)
    assert outputs.loss.isfinite()
    assert [len(outputs[name]) for name in ("gate_scores", "hidden_states", "attentions")] == [3, 4, 3]


@gated
def test_a_loss_on_gate_scores_reaches_the_gates(gate):
    model = build(gate)
    sum(score.sum() for score in model(tokens(), output_gate_scores=True).gate_scores).backward()
    assert all(layer.self_attn.g_proj.weight.grad.abs().sum() > 0 for layer in model.model.layers)


@gated
def test_two_threads_get_their_own_gate_scores(gate):
    model = build(gate)
    inputs = [tokens(2, 5, seed=1), tokens(3, 8, seed=2)]
    expected = [model(ids, output_gate_scores=True).gate_scores for ids in inputs]

    # Each layer waits until both threads have reached it.
    barrier = threading.Barrier(2, timeout=60)

    def meet(*_):
        barrier.wait()

    for layer in model.model.layers:
        layer.register_forward_pre_hook(meet)
    found = [None, None]

    def run(index):
        found[index] = model(inputs[index], output_gate_scores=True).gate_scores

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for mine, wanted in zip(found, expected, strict=True):
        assert len(mine) == 3 and all(map(torch.equal, mine, wanted))


@gated
def test_a_forward_leaves_nothing_on_the_modules(gate):
    def state(model):
        return {name: dict(vars(module)) for name, module in model.named_modules()}

    model = build(gate)
    model(tokens(), output_gate_scores=True)  # the first request installs transformers' hooks
    before = state(model)
    model(tokens(3, 6), output_gate_scores=True)
    after = state(model)
    assert before.keys() == after.keys()
    for name, attributes in before.items():
        assert attributes.keys() == after[name].keys()
        assert all(after[name][key] is value for key, value in attributes.items()), name


# Saving and loading


def weights_on_disk(folder) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@dtypes
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("shard_size", ["10GB", "30KB"], ids=["one-file", "sharded"])
def test_save_and_load_bit_for_bit(gate, dtype, tied, shard_size, tmp_path):
    config = tiny_config(
        attn_gate=gate, tie_word_embeddings=tied, attn_gate_bias=True, attn_gate_scale=1.7, dtype=dtype
    )
    model = randomise(GatedQwenForCausalLM._from_config(config))
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    files = list(tmp_path.glob("*.safetensors"))
    assert len(files) == 1 if shard_size == "10GB" else len(files) > 2
    for file in files:
        with safe_open(file, framework="pt") as opened:
            assert opened.metadata()["format"] == "pt"

    saved, native = weights_on_disk(tmp_path), model.state_dict()
    assert saved.keys() == native.keys() - ({"lm_head.weight"} if tied else set())
    assert all(saved[name].dtype == dtype and torch.equal(saved[name], native[name]) for name in saved)

    loaded, info = GatedQwenForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    assert loaded.dtype == dtype and not loaded.training
    assert all(torch.equal(value, native[name]) for name, value in loaded.state_dict().items())
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    assert torch.equal(loaded(tokens()).logits, model(tokens()).logits)


def test_saved_config_has_native_fields_only(gate, tmp_path):
    config = tiny_config(attn_gate=gate, attn_gate_layers=None if gate is None else [0, 2])
    GatedQwenForCausalLM(config).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["model_type"] == "gated_qwen" and saved["architectures"] == ["GatedQwenForCausalLM"]
    assert saved["attn_gate"] == gate and saved["attn_gate_layers"] == config.attn_gate_layers
    assert saved.keys() <= {*vars(Qwen3Config(vocab_size=8)), *OURS}
    assert not any(name.startswith("_") for name in saved)
    assert GatedQwenConfig.from_pretrained(tmp_path).to_diff_dict() == config.to_diff_dict()


def test_generation_config_is_kept(gate, tmp_path):
    model = build(gate)
    model.generation_config.max_new_tokens = 7
    model.generation_config.do_sample = True
    model.generation_config.top_k = 5
    model.save_pretrained(tmp_path)
    loaded = GatedQwenForCausalLM.from_pretrained(tmp_path).generation_config
    assert (loaded.max_new_tokens, loaded.do_sample, loaded.top_k, loaded.eos_token_id) == (7, True, 5, 2)


@pytest.mark.parametrize("model_class", ALL_CLASSES)
def test_loading_overwrites_no_weight(gate, model_class, tmp_path):
    model = build(gate, model_class, attn_gate_bias=True, attention_bias=True, mlp_bias=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    model.save_pretrained(tmp_path)
    loaded = model_class.from_pretrained(tmp_path)
    assert all((parameter == 0.5).all() for parameter in loaded.parameters())
    loaded.init_weights()
    loaded.init_weights()
    assert all((parameter == 0.5).all() for parameter in loaded.parameters())


def test_heads_load_the_decoder_of_a_language_model(gate, tmp_path):
    model = build(gate)
    model.save_pretrained(tmp_path)
    for model_class in (GatedQwenModel, *HEADS):
        loaded = model_class.from_pretrained(tmp_path).base_model.state_dict()
        assert all(torch.equal(loaded[name], value) for name, value in model.model.state_dict().items())


@gated
def test_new_gates_are_normal_with_the_configured_range(gate):
    torch.manual_seed(0)
    config = tiny_config(
        attn_gate=gate, attn_gate_bias=True, hidden_size=128, num_attention_heads=16, num_key_value_heads=4
    )
    for layer in GatedQwenForCausalLM(config).model.layers:
        weight, bias = layer.self_attn.g_proj.weight, layer.self_attn.g_proj.bias
        # 2048 values or more: 5% is over three standard errors of their deviation
        assert weight.std().item() == pytest.approx(config.initializer_range, rel=0.05)
        assert abs(weight.mean().item()) < 0.1 * config.initializer_range
        assert (bias == 0).all()


@dtypes
@pytest.mark.parametrize("model_class", ALL_CLASSES)
def test_new_models_have_no_uninitialised_weight(gate, model_class, dtype, poisoned_memory):
    config = tiny_config(attn_gate=gate, attn_gate_bias=True, attention_bias=True, mlp_bias=True, dtype=dtype)
    model = model_class._from_config(config)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert all(tensor.isfinite().all() for tensor in (*model.parameters(), *model.buffers()))


@gated
@pytest.mark.parametrize("name", ["g_proj.weight", "g_proj.bias", "k_norm.weight"])
def test_one_missing_weight_is_initialised_alone_when_not_strict(gate, name, tmp_path, poisoned_memory):
    build(gate, attn_gate_bias=True).save_pretrained(tmp_path)
    missing = f"model.layers.1.self_attn.{name}"
    weights = load_file(tmp_path / "model.safetensors")
    del weights[missing]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})

    loaded = GatedQwenForCausalLM.from_pretrained(tmp_path, strict=False).state_dict()
    new = loaded.pop(missing)
    assert all(torch.equal(value, weights[name]) for name, value in loaded.items())
    if name != "g_proj.weight":
        assert (new == (1 if name == "k_norm.weight" else 0)).all()
    else:  # initializer_range is 0.2; these are 240 values or more
        assert new.std().item() == pytest.approx(0.2, rel=0.2) and abs(new.mean().item()) < 0.05


@dtypes
@gated
def test_missing_gates_and_norms_are_initialised_when_not_strict(gate, dtype, tmp_path, poisoned_memory):
    build(gate, attn_gate_bias=True).to(dtype).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights = {name: value for name, value in weights.items() if "g_proj" not in name and "q_norm" not in name}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = GatedQwenForCausalLM.from_pretrained(tmp_path, strict=False)
    for layer in loaded.model.layers:
        attention = layer.self_attn
        assert attention.g_proj.weight.dtype == dtype
        assert attention.g_proj.weight.std().item() == pytest.approx(0.2, rel=0.2)
        assert (attention.g_proj.bias == 0).all() and (attention.q_norm.weight == 1).all()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_resized_embeddings_keep_the_old_tokens(gate, tied, tmp_path):
    model, ids = build(gate, tie_word_embeddings=tied), tokens()
    before = model(ids).logits
    model.resize_token_embeddings(140)
    after = model(ids).logits
    assert after.shape[-1] == model.config.vocab_size == 140
    assert max_error(after[..., :VOCABULARY], before) <= TOLERANCE
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied

    model.save_pretrained(tmp_path)
    assert torch.equal(GatedQwenForCausalLM.from_pretrained(tmp_path)(ids).logits, after)
    model.resize_token_embeddings(100)
    assert model(ids % 100).logits.shape[-1] == 100


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_copies_compute_the_same_and_share_nothing(gate, tied, copied):
    model, ids = build(gate, tie_word_embeddings=tied), tokens()
    before = model(ids).logits
    twin = copied(model)
    assert torch.equal(twin(ids).logits, before)
    assert (twin.lm_head.weight is twin.model.embed_tokens.weight) == tied
    randomise(twin, seed=1)
    assert torch.equal(model(ids).logits, before)


# Rotary embeddings


CONTEXT = 64
ROPES = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": CONTEXT,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": CONTEXT},
}
ropes = pytest.mark.parametrize("rope_type", ROPES)


def rope_config(rope_type, **fields):
    # A dynamic rope stretches at lengths over max_position_embeddings, which is the trained length there.
    trained = CONTEXT if rope_type in ("default", "dynamic") else 4 * CONTEXT
    rope = {"rope_type": rope_type, "rope_theta": 5000.0, **ROPES[rope_type]}
    return tiny_config(max_position_embeddings=trained, rope_parameters=rope, **fields)


def closed_form(rope_type, dim=10, theta=5000.0):
    """The frequencies, and the factor on cos and sin, as each method's authors give them."""
    frequency = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    factor = ROPES[rope_type].get("factor")
    if rope_type == "linear":
        return frequency / factor, 1.0
    if rope_type == "llama3":
        turns = CONTEXT * frequency / (2 * math.pi)
        kept = ((turns - 1) / (4 - 1)).clamp(0, 1)
        return frequency * kept + frequency / factor * (1 - kept), 1.0
    if rope_type == "yarn":

        def dimension(turns):
            return dim * math.log(CONTEXT / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = max(math.floor(dimension(32)), 0), min(math.ceil(dimension(1)), dim - 1)
        kept = 1 - ((torch.arange(dim // 2) - low) / (high - low)).clamp(0, 1)
        return frequency * kept + frequency / factor * (1 - kept), 0.1 * math.log(factor) + 1
    return frequency, 1.0  # a dynamic rope too, up to the trained length


def assert_closed_form(model, rope_type):
    rotary = model.base_model.rotary_emb
    frequency, scaling = closed_form(rope_type)
    assert rotary.inv_freq.dtype == torch.float32
    torch.testing.assert_close(rotary.inv_freq, frequency.float(), rtol=1e-6, atol=0)
    assert rotary.attention_scaling == pytest.approx(scaling, rel=1e-6)


@ropes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_rotary_frequencies_after_loading(rope_type, dtype, tmp_path):
    GatedQwenForCausalLM(rope_config(rope_type)).to(dtype).save_pretrained(tmp_path)
    model = GatedQwenForCausalLM.from_pretrained(tmp_path)
    assert model.dtype == dtype
    assert_closed_form(model, rope_type)
    assert_closed_form(GatedQwenForCausalLM.from_pretrained(tmp_path, dtype=torch.float16), rope_type)


@ropes
def test_rotary_frequencies_after_meta_construction(rope_type, poisoned_memory):
    with torch.device("meta"):
        model = GatedQwenForCausalLM(rope_config(rope_type, attn_gate_bias=True))
    model.to_empty(device="cpu")
    model.init_weights()
    assert_closed_form(model, rope_type)
    assert all(tensor.isfinite().all() for tensor in (*model.parameters(), *model.buffers()))


@ropes
@torch.no_grad()
def test_logits_past_the_trained_length_equal_stock_qwen3(rope_type):
    model = randomise(GatedQwenForCausalLM(rope_config(rope_type, attn_gate_scale=2.0)))
    set_gates(model)
    twin = stock(model)
    for length in (CONTEXT + 20, 12):  # a dynamic rope goes back to its trained frequencies at short inputs
        ids = tokens(1, length)
        assert torch.equal(model(ids).logits, twin(ids).logits)


@ropes
@torch.no_grad()
def test_both_spellings_of_rope_give_the_same_logits(gate, rope_type, tmp_path):
    model = randomise(GatedQwenForCausalLM(rope_config(rope_type, attn_gate=gate)))
    model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    saved = json.loads(file.read_text())
    rope = saved.pop("rope_parameters")
    saved["rope_theta"] = rope.pop("rope_theta")
    saved["rope_scaling"] = None if rope_type == "default" else rope
    file.write_text(json.dumps(saved))

    ids = tokens(1, CONTEXT + 20)
    loaded = GatedQwenForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert_closed_form(GatedQwenForCausalLM.from_pretrained(tmp_path), rope_type)


# Compilation


@torch.no_grad()
def test_fullgraph_compilation_equals_eager(gate):
    torch.compiler.reset()
    model = build(gate, attn_gate_scale=1.7)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for ids in (tokens(2, 9), tokens(3, 5)):
        assert torch.equal(compiled(ids).logits, model(ids).logits)
        outputs = compiled(ids, output_gate_scores=False)
        assert torch.equal(outputs.logits, model(ids).logits) and "gate_scores" not in outputs


@gated
@torch.no_grad()
def test_fullgraph_compilation_returns_gate_scores(gate):
    torch.compiler.reset()
    model, ids = build(gate), tokens()
    # transformers installs its recording hooks at the first request, under a lock, which does not compile.
    expected = model(ids, output_gate_scores=True).gate_scores
    found = torch.compile(model, fullgraph=True, backend="eager")(ids, output_gate_scores=True).gate_scores
    assert len(found) == 3 and all(map(torch.equal, found, expected))


def test_fullgraph_compilation_gives_the_same_gradients(gate):
    torch.compiler.reset()
    model, ids = build(gate), tokens()
    gradients = []
    for forward in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        model.zero_grad()
        forward(ids, labels=ids).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert max(map(max_error, *gradients)) <= TOLERANCE


@torch.no_grad()
def test_export_equals_eager_at_other_shapes(gate):
    model = build(gate)
    free = torch.export.Dim.DYNAMIC
    program = torch.export.export(
        model,
        (),
        {"input_ids": tokens(2, 9), "use_cache": False},
        dynamic_shapes={"input_ids": {0: free, 1: free}, "use_cache": None},
        strict=False,
    )
    ids = tokens(3, 14)
    exported = program.module()(input_ids=ids, use_cache=False).logits
    assert max_error(exported, model(ids).logits) <= TOLERANCE


# Flags and plans


def test_flags():
    for model_class in ALL_CLASSES:
        assert model_class._supports_attention_backend
        assert model_class._can_compile_fullgraph
        assert model_class.supports_gradient_checkpointing
        assert model_class._supports_sdpa and model_class._supports_flex_attn and model_class._supports_flash_attn
        assert model_class._no_split_modules == ["GatedQwenDecoderLayer"]


def pattern_of(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


@pytest.mark.parametrize("use_qk_norm", [True, False], ids=["qk-norm", "no-qk-norm"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_tensor_parallel_plan_names_every_linear_and_nothing_else(gate, use_qk_norm, tied):
    model = build(gate, use_qk_norm=use_qk_norm, tie_word_embeddings=tied)
    linears = {pattern_of(name) for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert ("model.layers.*.self_attn.g_proj" in linears) == (gate is not None)
    with_weights = {pattern_of(name.rpartition(".")[0]) for name, _ in model.named_parameters()} | {"lm_head"}
    assert linears <= model._tp_plan.keys() <= with_weights
    assert model._tp_plan.get("model.layers.*.self_attn.g_proj") == (None if gate is None else "colwise")


def test_the_plan_of_one_config_does_not_change_another():
    tiny_config(attn_gate=None, use_qk_norm=False)
    plan = GatedQwenForCausalLM(tiny_config())._tp_plan
    assert {"model.layers.*.self_attn.g_proj", "model.layers.*.self_attn.q_norm"} <= plan.keys()
    assert "layers.*.self_attn.g_proj" not in Qwen3Config.base_model_tp_plan


@torch.no_grad()
def test_halves_of_an_attention_split_by_the_plan_sum_to_the_whole(gate):
    model = build(gate, GatedQwenModel, num_attention_heads=8, num_key_value_heads=4, attn_gate_bias=True)
    plan = {name.rpartition(".")[2]: style for name, style in model._tp_plan.items()}
    whole = model.layers[0].self_attn
    x = torch.randn(2, 7, 40, generator=torch.Generator().manual_seed(0))
    arguments = (x, model.rotary_emb(x, torch.arange(7)[None]), None)

    total = 0
    for rank in range(2):
        half = copy.deepcopy(whole)
        for name, linear in half.named_children():
            if plan.get(name) == "colwise":
                linear.weight = nn.Parameter(linear.weight.chunk(2)[rank])
                linear.bias = None if linear.bias is None else nn.Parameter(linear.bias.chunk(2)[rank])
            elif plan.get(name) == "rowwise":
                linear.weight = nn.Parameter(linear.weight.chunk(2, dim=1)[rank])
        total = total + half(*arguments)[0]
    assert max_error(total, whole(*arguments)[0]) <= TOLERANCE


@pytest.mark.parametrize("plan", ["_pp_plan", "_fsdp_plan"])
def test_pipeline_and_sharding_plans_name_modules(gate, plan):
    model = build(gate)
    names = {pattern_of(name) for name, _ in model.named_modules()}
    assert getattr(model, plan).keys() <= names
    assert {"lm_head", "model.embed_tokens", "model.norm"} <= getattr(model, plan).keys()
    # every weight is under one of them
    assert all(name.startswith(tuple(key.rstrip("*") for key in getattr(model, plan))) for name in model.state_dict())
