"""One result from every attention backend: padding, packing, windows, gate scores, and backends of other projects."""

import ast
import inspect
import textwrap

import pytest
import torch
from support import VOCABULARY, build, tiny_config, tokens
from transformers import AttentionInterface, AttentionMaskInterface, Qwen3Config, Qwen3ForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.utils import is_flash_attn_2_available

from gated_qwen import GatedQwenForCausalLM, GatedQwenModel
from gated_qwen.modeling.modeling_gated_qwen import CACHE, GatedQwenAttention

BACKENDS = ("eager", "sdpa", "flex_attention")

# Largest difference allowed, relative to the largest logit.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 0.06, torch.float16: 0.01}

backends = pytest.mark.parametrize("backend", BACKENDS)
gated = pytest.mark.parametrize("gate", ["headwise", "elementwise"])
dtypes = pytest.mark.parametrize("dtype", TOLERANCES, ids=["fp32", "bf16", "fp16"])


@pytest.fixture(autouse=True)
def without_gradients_and_compilation(request):
    """Compiling flex_attention takes seconds for each new shape, and on CPU it has no gradients."""
    stance = "default" if "compiled" in request.fixturenames else "force_eager"
    with torch.no_grad(), torch.compiler.set_stance(stance):
        yield


def run(model, backend, *args, **kwargs):
    model.set_attn_implementation(backend)
    return model(*args, **kwargs)


def relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape
    return ((a.float() - b.float()).abs().max() / b.float().abs().max()).item()


def set_gate_logits(model, value: float):
    """Gates all near sigmoid(value), each a little different."""
    for name, parameter in model.named_parameters():
        if name.endswith("g_proj.bias"):
            parameter.fill_(value)
        elif name.endswith("g_proj.weight"):
            parameter.mul_(0.1)


@dtypes
def test_backends_agree(gate, dtype):
    ids = tokens()
    for gate_logit in (-4.0, 0.0, 4.0):  # gates near 0.02, 0.5, 0.98
        model = build(gate, attn_gate_bias=True)
        set_gate_logits(model, gate_logit)
        model.to(dtype)
        eager, sdpa, flex = (run(model, backend, ids).logits for backend in BACKENDS)
        assert relative_error(sdpa, eager) <= TOLERANCES[dtype]
        assert relative_error(flex, eager) <= TOLERANCES[dtype]


@pytest.fixture
def compiled():
    torch.compiler.reset()


def test_compiled_flex_attention_agrees(compiled):
    model, ids = build("headwise"), tokens()
    assert relative_error(run(model, "flex_attention", ids).logits, run(model, "eager", ids).logits) <= 1e-5


def test_eager_returns_attention_weights(gate):
    model, ids = build(gate), tokens()
    attentions = run(model, "eager", ids, output_attentions=True).attentions
    assert [weights.shape for weights in attentions] == [(2, 6, 11, 11)] * 3
    for weights in attentions:
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 6, 11))
        assert (weights.triu(1) == 0).all() and (weights.tril() > 0).sum() == 2 * 6 * 66
    # The gate acts after the weights, so those of the first layer are as without one.
    ungated = build(None)
    ungated.load_state_dict(model.state_dict(), strict=False)
    assert torch.equal(attentions[0], run(ungated, "eager", ids, output_attentions=True).attentions[0])


@pytest.mark.parametrize("backend", ["sdpa", "flex_attention"])
def test_other_backends_return_no_attention_weights_as_in_stock_qwen3(gate, backend):
    model = build(gate)
    twin = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY, hidden_size=40, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=3
        )
    )
    expected = run(twin, backend, tokens(), output_attentions=True).attentions
    assert run(model, backend, tokens(), output_attentions=True).attentions == expected


# Padding and packing


def padded(side, ids, lengths):
    """`ids` with all but `lengths` tokens of each row replaced by padding, the mask, and the positions."""
    columns = torch.arange(ids.shape[1])
    lengths = torch.tensor(lengths)[:, None]
    mask = (columns < lengths) if side == "right" else (columns >= ids.shape[1] - lengths)
    return torch.where(mask, ids, 0), mask.long(), (mask.long().cumsum(-1) - 1).clamp(min=0)


@backends
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_padding_does_not_change_real_tokens(gate, backend, side, dtype):
    model = build(gate).to(dtype)
    ids, mask, positions = padded(side, tokens(3, 11), [11, 7, 1])
    logits = run(model, backend, ids, attention_mask=mask, position_ids=positions).logits
    assert logits.isfinite().all()
    for row in range(3):
        real = mask[row].bool()
        alone = model(ids[row : row + 1, real]).logits
        assert relative_error(logits[row : row + 1, real], alone) <= TOLERANCES[dtype]


@gated
@backends
@pytest.mark.parametrize("side", ["left", "right"])
@dtypes
def test_padding_is_finite_behind_closed_gates(gate, backend, side, dtype):
    model = build(gate, attn_gate_bias=True)
    set_gate_logits(model, -200.0)
    model.to(dtype)
    ids, mask, positions = padded(side, tokens(3, 11), [11, 7, 1])
    outputs = run(model, backend, ids, attention_mask=mask, position_ids=positions, output_gate_scores=True)
    assert all((scores == 0).all() for scores in outputs.gate_scores)
    assert outputs.logits.isfinite().all()


@backends
def test_packed_sequences_do_not_see_each_other(gate, backend):
    model, ids = build(gate), tokens(1, 11)
    positions = torch.cat([torch.arange(4), torch.arange(7)])[None]
    packed = run(model, backend, ids, position_ids=positions, use_cache=False).logits
    alone = torch.cat([model(part).logits for part in (ids[:, :4], ids[:, 4:])], dim=1)
    assert relative_error(packed, alone) <= TOLERANCES[torch.float32]


# Sliding windows


MIXED = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "use_sliding_window": True,
    "sliding_window": 4,
}


@backends
def test_a_token_reaches_as_far_as_the_windows_let_it(gate, backend):
    model, ids = build(gate, **MIXED), tokens(1, 12)
    other = ids.clone()
    other[0, 0] = (other[0, 0] + 1) % VOCABULARY
    before, after = (run(model, backend, x, output_hidden_states=True).hidden_states for x in (ids, other))
    reach = [(a != b).any(-1)[0].nonzero().flatten().tolist() for a, b in zip(before, after, strict=True)]
    # A window of 4 is the token itself and the 3 before it.
    assert reach == [[0], [0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6], list(range(12)), list(range(12))]


@backends
def test_windows_equal_stock_qwen3(gate, backend):
    model = build(gate, **MIXED, attn_gate_scale=2.0)
    for layer in model.model.layers:
        if gate is not None:
            layer.self_attn.g_proj.weight.zero_()
    config = model.config
    sizes = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    )
    twin = Qwen3ForCausalLM(Qwen3Config(**MIXED, **{name: getattr(config, name) for name in sizes})).eval()
    twin.load_state_dict({name: value for name, value in model.state_dict().items() if "g_proj" not in name})
    ids = tokens(2, 12)
    assert torch.equal(run(model, backend, ids).logits, run(twin, backend, ids).logits)


@backends
def test_windows_hold_with_a_cache(gate, backend):
    model, ids = build(gate, **MIXED), tokens(2, 12)
    full = run(model, backend, ids).logits
    outputs = model(ids[:, :7], use_cache=True)
    for position in range(7, 12):
        outputs = model(ids[:, position : position + 1], **{CACHE: outputs[CACHE]})
        assert relative_error(outputs.logits, full[:, position : position + 1]) <= TOLERANCES[torch.float32]


# Gate scores


@gated
@backends
def test_gate_scores_under_every_backend(gate, backend):
    model = build(gate, GatedQwenModel, attn_gate_scale=1.7, attn_gate_bias=True)
    ids, mask, positions = padded("left", tokens(3, 11), [11, 7, 1])
    wanted = {"output_gate_scores": True, "output_hidden_states": True}
    outputs = run(model, backend, ids, attention_mask=mask, position_ids=positions, **wanted)
    assert len(outputs.gate_scores) == 3
    for layer, score, hidden_states in zip(model.layers, outputs.gate_scores, outputs.hidden_states, strict=False):
        logits = layer.self_attn.g_proj(layer.input_layernorm(hidden_states))
        assert torch.equal(score, (1.7 * logits.sigmoid()).view(3, 11, 6, -1))


@gated
@backends
def test_gate_scores_of_one_token_with_a_cache(gate, backend):
    model, ids = build(gate), tokens()
    full = run(model, backend, ids, output_gate_scores=True)
    past = model(ids[:, :-1], use_cache=True)[CACHE]
    last = model(ids[:, -1:], **{CACHE: past}, output_gate_scores=True)
    for score, expected in zip(last.gate_scores, full.gate_scores, strict=True):
        assert relative_error(score, expected[:, -1:]) <= TOLERANCES[torch.float32]


# Backends of other projects


@pytest.fixture
def flat_heads():
    """An attention that returns (batch, tokens, heads * head_dim), as vLLM's does, and what it was called with."""
    calls = []

    def attention(module, query, key, value, attention_mask, **kwargs):
        calls.append((module, query.shape, key.shape, kwargs))
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return output.flatten(2), None

    AttentionInterface.register("flat_heads", attention)
    AttentionMaskInterface.register("flat_heads", sdpa_mask)
    yield calls
    del AttentionInterface._global_mapping["flat_heads"], AttentionMaskInterface._global_mapping["flat_heads"]


def test_an_attention_that_flattens_the_heads_is_called_once_per_layer(gate, flat_heads):
    model, ids = build(gate, attention_dropout=0.1, **MIXED), tokens(1, 11)
    expected = run(model, "sdpa", ids).logits
    instances = {index: object() for index in range(4)}
    positions = torch.arange(11)[None]
    logits = run(
        model,
        "flat_heads",
        ids,
        position_ids=positions,
        use_cache=False,
        return_dict=False,
        attention_instances=instances,
    )[0]
    assert torch.equal(logits, expected)
    assert [module for module, *_ in flat_heads] == [layer.self_attn for layer in model.model.layers]
    for (_, query, key, kwargs), window in zip(flat_heads, [4, 4, None, 4], strict=True):
        assert query == (1, 6, 11, 10) and key == (1, 3, 11, 10)
        assert kwargs["attention_instances"] is instances
        assert torch.equal(kwargs["position_ids"], positions)
        assert (kwargs["scaling"], kwargs["sliding_window"], kwargs["dropout"]) == (10**-0.5, window, 0.0)


def test_the_attention_gets_its_dropout_in_training_only(gate, flat_heads):
    model = build(gate, attention_dropout=0.1)
    run(model.train(), "flat_heads", tokens())
    run(model.eval(), "flat_heads", tokens())
    assert [kwargs["dropout"] for *_, kwargs in flat_heads] == [0.1] * 3 + [0.0] * 3


def test_gate_scores_under_an_attention_that_flattens_the_heads(gate, flat_heads):
    model, ids = build(gate), tokens()
    expected = run(model, "sdpa", ids, output_gate_scores=True).gate_scores
    found = run(model, "flat_heads", ids, output_gate_scores=True).gate_scores
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))


def test_forward_is_written_as_vllm_reads_it():
    """vLLM parses the source: one look-up of the attention, bound to a name called once, with a plain scaling."""
    (forward,) = ast.parse(textwrap.dedent(inspect.getsource(GatedQwenAttention.forward))).body
    names = [node for node in ast.walk(forward) if isinstance(node, ast.Name) and node.id == "ALL_ATTENTION_FUNCTIONS"]
    assert len(names) == 1
    (lookup,) = (
        node
        for node in ast.walk(forward)
        if isinstance(node, ast.Assign | ast.AnnAssign) and names[0] in ast.walk(node.value)
    )
    target = lookup.target if isinstance(lookup, ast.AnnAssign) else lookup.targets[0]
    (call,) = (
        node
        for node in ast.walk(forward)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == target.id
    )
    keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    assert keywords["scaling"] == "self.scaling" and keywords[None] == "kwargs"
    assert [ast.unparse(argument) for argument in call.args][0] == "self"


@pytest.mark.skipif(is_flash_attn_2_available(), reason="flash_attention_2 is installed")
def test_flash_attention_that_is_not_installed_is_named(gate):
    with pytest.raises(ImportError, match="FlashAttention2"):
        build(gate).set_attn_implementation("flash_attention_2")
    with pytest.raises(ImportError, match="FlashAttention2"):
        GatedQwenForCausalLM._from_config(tiny_config(attn_gate=gate), attn_implementation="flash_attention_2")


def test_an_unknown_backend_is_refused(gate):
    with pytest.raises(ValueError, match="no_such_backend"):
        GatedQwenForCausalLM._from_config(tiny_config(attn_gate=gate), attn_implementation="no_such_backend")
