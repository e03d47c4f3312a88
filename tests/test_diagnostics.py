"""Figures of sinks, activations and gates: against numbers computed by hand, against eager attention's own matrices in
this family and in others, and under interventions."""

import json
import math

import pytest
import torch
import transformers
from support import build, max_error, randomise, tokens
from transformers.models.qwen3.modeling_qwen3 import eager_attention_forward
from transformers.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5TextConfig

import gated_qwen
from gated_qwen import demo
from gated_qwen.diagnostics import LABELS, attention_maps, gates_as, interventions, measure, metrics, perplexity
from gated_qwen.diagnostics import attention as observing
from gated_qwen.diagnostics.measure import decoder_layers
from gated_qwen.diagnostics.metrics import AttentionSummary

# (batch 1, heads 2, tokens 3, tokens 3): the first head looks at token 0, the second at itself
ATTENTION = torch.tensor(
    [
        [
            [[1.0, 0.0, 0.0], [0.8, 0.2, 0.0], [0.6, 0.3, 0.1]],
            [[1.0, 0.0, 0.0], [0.1, 0.9, 0.0], [0.0, 0.2, 0.8]],
        ]
    ]
)


def even(length: int) -> torch.Tensor:
    return (torch.ones(length, length).tril() / torch.arange(1, length + 1)[:, None])[None, None]


# By hand


def test_first_token_attention_by_hand():
    summary = AttentionSummary.of(ATTENTION)
    assert metrics.first_token_attention(summary).tolist() == [pytest.approx([(1 + 0.8 + 0.6) / 3, (1 + 0.1) / 3])]
    attention = torch.zeros(1, 1, 6, 6)
    attention[0, 0, :, 0] = torch.tensor([1.0, 0.9, 0.8, 0.7, 0.5, 0.2])
    later = metrics.first_token_attention(AttentionSummary.of(attention), later=True)
    assert later.item() == pytest.approx(0.35)


def test_even_attention_has_the_floor_and_the_entropy_of_even_attention():
    length = 9
    summary = AttentionSummary.of(even(length))
    assert metrics.first_token_attention(summary).item() == pytest.approx(metrics.uniform_floor(length))
    later = metrics.first_token_attention(summary, later=True).item()
    assert (
        later
        == pytest.approx(metrics.uniform_floor(length, skip=4))
        == pytest.approx(sum(1 / t for t in (5, 6, 7, 8, 9)) / 5)
    )
    assert summary.entropy.item() == pytest.approx(metrics.even_entropy(length), rel=1e-5)
    assert metrics.even_entropy(3) == pytest.approx((math.log(2) + math.log(3)) / 3)
    # published with the definition (T = 9: 0.314, 512: 0.0133)
    assert round(metrics.uniform_floor(9), 3) == 0.314 and round(metrics.uniform_floor(512), 4) == 0.0133


def test_entropy_by_hand():
    first = -(0.8 * math.log(0.8) + 0.2 * math.log(0.2)) - sum(p * math.log(p) for p in (0.6, 0.3, 0.1))
    second = -(0.1 * math.log(0.1) + 0.9 * math.log(0.9)) - sum(p * math.log(p) for p in (0.2, 0.8))
    assert AttentionSummary.of(ATTENTION).entropy.tolist() == [pytest.approx([first / 3, second / 3])]


def test_sink_rate_and_sink_ratio_by_hand():
    summary = AttentionSummary.of(ATTENTION)  # means over the queries of key 0: 0.8 and 0.367
    assert metrics.sink_rate(summary).tolist() == [[1.0, 1.0]]
    assert metrics.sink_rate(summary, threshold=0.5).tolist() == [[1.0, 0.0]]
    # A sink at token 1 counts in the second alone, one in the second half of the tokens in neither.
    at = torch.zeros(1, 2, 4, 4)
    at[0, 0, :, 1] = 1.0
    at[0, 1, :, 2] = 1.0
    assert metrics.sink_ratio(AttentionSummary.of(at)).tolist() == [[1.0, 0.0]]
    assert metrics.sink_rate(AttentionSummary.of(at)).tolist() == [[0.0, 0.0]]


def test_massive_activations_by_hand():
    states = torch.tensor([[[1.0, -7.0], [3.0, 2.0]], [[0.5, 0.0], [0.0, -0.25]]])
    assert metrics.massive_activation(states).tolist() == [7.0, 0.5]
    states = torch.full((3, 4, 5), 0.2)
    states[0, 0, 3] = -250.0  # over 100, and over 1000 times the median
    states[0, 2, 3] = 150.0  # not over 1000 times
    states[1] /= 100
    states[1, 0, :2] = torch.tensor([90.0, 101.0])  # over 1000 times, and one over 100
    assert metrics.massive_count(states).tolist() == [1, 1, 0]


def test_kurtosis_sparsity_and_value_norms_by_hand():
    x = torch.tensor([1.0, -1.0, 1.0, -1.0, 3.0, -3.0]).view(1, 3, 2)
    assert metrics.kurtosis(x + 5).item() == pytest.approx(((4 + 2 * 81) / 6) / ((4 + 18) / 6) ** 2, rel=1e-5)
    assert metrics.share_below(torch.tensor([[0.009, -0.02], [-0.001, 0.5]])[None], 1e-2).tolist() == [0.5]
    values = torch.tensor([[[3.0, 4.0], [0.0, 10.0], [6.0, 8.0]], [[0.0, 1.0], [2.0, 0.0], [0.0, 6.0]]])[None]
    assert metrics.value_norm_ratio(values).item() == pytest.approx((5 / 10 + 1 / 4) / 2)


def test_quantiles_are_those_of_the_scores_to_the_width_of_a_bin():
    scores = torch.rand(5000, generator=torch.Generator().manual_seed(0)) ** 3 * 2
    counts = metrics.histogram(scores, 2.0)
    assert counts.sum() == 5000
    for q in (0.0, 0.05, 0.5, 0.95, 1.0):
        assert metrics.quantile_of(counts, 2.0, q) == pytest.approx(scores.quantile(q).item(), abs=2 / metrics.BINS)


# Other families, and this one

SIZES = dict(vocab_size=131, hidden_size=48, intermediate_size=72, num_hidden_layers=4, num_attention_heads=6)
GROUPED = dict(SIZES, num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2)
WINDOW = dict(sliding_window=5, layer_types=["sliding_attention", "full_attention"] * 2, head_dim=8)
OTHERS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED)),
    "mistral, window": lambda: transformers.MistralForCausalLM(
        transformers.MistralConfig(**GROUPED, sliding_window=5)
    ),
    "qwen2, window": lambda: transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(**GROUPED, use_sliding_window=True, **WINDOW)
    ),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**GROUPED, head_dim=10)),
    "qwen3.5": lambda: Qwen3_5ForCausalLM(
        Qwen3_5TextConfig(
            **GROUPED, head_dim=16, layer_types=["linear_attention", "full_attention"] * 2, linear_num_key_heads=2,
            linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
        )
    ),
    # soft caps on logits of attention and of tokens
    "gemma2": lambda: transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(
            **GROUPED, **WINDOW, final_logit_softcapping=3.0, attn_logit_softcapping=2.0, query_pre_attn_scalar=8
        )
    ),
    # learnt sinks
    "gpt-oss": lambda: transformers.GptOssForCausalLM(
        transformers.GptOssConfig(**GROUPED, **WINDOW, num_local_experts=2, num_experts_per_tok=1)
    ),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=131, n_embd=48, n_layer=4, n_head=6, n_positions=64, bos_token_id=1, eos_token_id=2,
            scale_attn_by_inverse_layer_idx=True,
        )
    ),
    "headwise": lambda: build("headwise", attn_gate_layers=[0, 2], attn_gate_scale=2.0),
    "elementwise": lambda: build("elementwise"),
    "ungated": lambda: build(None),
}  # fmt: skip


@pytest.fixture(params=OTHERS)
def model(request):
    return randomise(OTHERS[request.param]())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_parts_of_given_queries_and_keys(dtype, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 6, 19, 10, generator=generator).to(dtype)
    key, value = (torch.randn(2, 3, 19, 10, generator=generator).to(dtype) for _ in range(2))
    seen = torch.ones(19, 19, dtype=torch.bool).tril() & ~torch.ones(19, 19, dtype=torch.bool).tril(-7)
    mask = torch.zeros(2, 1, 19, 19, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
    module = build(None).model.layers[0].self_attn
    _, expected = eager_attention_forward(module, query, key, value, mask, scaling=0.3)
    for rows in (1, 4, 19):
        monkeypatch.setattr(observing, "ELEMENTS", 2 * 6 * 19 * rows)
        for given in (
            mask,
            seen[None, None].expand(2, 1, -1, -1),
            lambda start, n: seen[None, None, start : start + n],
        ):
            parts = list(observing.probabilities(query, key, given, 0.3))
            assert [start for start, _ in parts] == list(range(0, 19, rows))
            assert max_error(torch.cat([part for _, part in parts], -2).flatten(1, 2), expected) <= 1e-6


@torch.no_grad()
def test_parts_are_the_rows_of_eager_attention(model, monkeypatch):
    ids = tokens(1, 23)
    model.set_attn_implementation("eager")
    expected = model(ids, output_attentions=True, use_cache=False)
    monkeypatch.setattr(observing, "ELEMENTS", 6 * 23 * 7)  # 7 rows at a time
    modules = observing.attention_modules(model)
    maps = attention_maps(model, ids[0], modules.values())
    assert model.config._attn_implementation == "eager"
    wanted = [attention for attention in expected.attentions if attention is not None]
    assert len(maps) == len(wanted) == (2 if "3_5" in type(model).__name__ else len(decoder_layers(model)))
    for found, attention in zip(maps.values(), wanted, strict=True):
        assert max_error(found, attention[0]) <= 5e-6  # the layers before may round otherwise
    with observing.observed(model, observing.Modules()):
        assert max_error(model(ids, use_cache=False).logits, expected.logits) <= 2e-5


def test_measure_equals_what_the_outputs_give(model):
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    before = model.config._attn_implementation
    model.train()
    ids = tokens(3, 13)
    found = measure(model, ids)
    assert model.training and model.config._attn_implementation == before
    assert not any(module._forward_hooks for module in model.modules())
    assert found.documents == 3 and found.tokens == 39 and set(found.figures) <= LABELS.keys()
    assert found.first_tokens == {first: 1 for first in ids[:, 0].tolist()}
    json.dumps(found.to_dict())

    model.eval()
    model.set_attn_implementation("eager")
    states, modules = [], observing.attention_modules(model)
    of_attention = []
    hooks = [layer.register_forward_hook(lambda m, a, o: states.append(o[0] if isinstance(o, tuple) else o))
             for layer in decoder_layers(model)]  # fmt: skip
    hooks += [module.register_forward_hook(lambda m, a, o: of_attention.append(o[0])) for module in modules]
    with torch.no_grad():
        outputs = model(ids, labels=ids, output_attentions=True, use_cache=False)
    for hook in hooks:
        hook.remove()
    attention = torch.stack([one for one in outputs.attentions if one is not None])
    figures = found.figures
    assert figures["f_attn"] == pytest.approx(attention[..., 0].mean().item(), rel=1e-5)
    assert figures["f_attn_later"] == pytest.approx(attention[..., 4:, 0].mean().item(), rel=1e-5)
    assert figures["f_attn_floor"] == pytest.approx(sum(1 / t for t in range(1, 14)) / 13)
    means = attention.mean(3)
    assert figures["sink_rate"] == pytest.approx((means[..., 0] > 0.3).float().mean().item(), abs=1e-6)
    assert figures["sink_ratio"] == pytest.approx((means[..., :6].amax(-1) > 0.3).float().mean().item(), abs=1e-6)
    entropy = -torch.xlogy(attention, attention).sum(-1).mean().item()
    assert figures["entropy"] == pytest.approx(entropy, rel=1e-4)
    assert figures["m_act"] == pytest.approx(torch.stack(states).abs().amax((2, 3)).mean().item(), rel=1e-4)
    assert figures["max_norm"] == pytest.approx(
        max(output.abs().amax((1, 2)).mean().item() for output in of_attention), rel=1e-4
    )
    assert figures["perplexity"] == pytest.approx(math.exp(outputs.loss.item()), rel=1e-4)
    layers = list(modules.values())
    for layer, one in zip(layers, attention, strict=True):
        assert found.layers["f_attn"][layer] == pytest.approx(one[..., 0].mean().item(), rel=1e-5)
        assert found.heads["f_attn"][layer] == pytest.approx(one[..., 0].mean((0, 2)).tolist(), rel=1e-4)
    largest = found.largest[-1]
    state = states[-1].abs()
    assert largest["value"] == pytest.approx(state.max().item(), rel=1e-4)
    where = state.amax(0)[largest["position"], largest["channel"]].item()
    assert where == pytest.approx(state.max().item(), rel=1e-4)


GATED = [name for name in OTHERS if name in ("headwise", "elementwise", "qwen3.5")]


@pytest.mark.parametrize("kind", GATED)
@torch.no_grad()
def test_gates_and_what_they_leave(kind):
    model, ids = randomise(OTHERS[kind]()), tokens(2, 13)
    found = measure(model, ids)
    scores, before, after = {}, [], []
    if kind == "qwen3.5":
        for index, layer in enumerate(model.model.layers):
            if hasattr(layer, "self_attn"):
                layer.self_attn.q_proj.register_forward_hook(
                    lambda m, a, o, index=index: scores.update({index: o.view(2, 13, 6, 32)[..., 16:].sigmoid()})
                )
                layer.self_attn.o_proj.register_forward_pre_hook(lambda m, a: after.append(a[0].view(2, 13, 6, 16)))
        model(ids)
        before = [gated / score for gated, score in zip(after, scores.values(), strict=True)]
    else:
        layers = [index for index, layer in enumerate(model.model.layers) if layer.self_attn.g_proj is not None]
        for index in layers:
            gate = model.model.layers[index].self_attn.output_gate
            gate.register_forward_hook(lambda m, a, o: before.append(a[0]))
            gate.register_forward_hook(lambda m, a, o: after.append(o[0]))
        scores = dict(zip(layers, model(ids, output_gate_scores=True).gate_scores, strict=True))
    every = torch.cat([score.flatten() for score in scores.values()])
    assert found.gate_top == (2.0 if kind == "headwise" else 1.0)
    assert found.figures["gate_mean"] == pytest.approx(every.mean().item(), rel=1e-5)
    assert found.figures["gate_below_0.1"] == pytest.approx((every < 0.1).float().mean().item(), abs=1e-6)
    means = [torch.stack([part(score) for score in scores.values()]).mean().item()
             for part in (lambda s: s[:, 0].mean(), lambda s: s[:, 1:].mean())]  # fmt: skip
    names = ("gate_mean_first", "gate_mean_rest")
    assert [found.figures[name] for name in names] == pytest.approx(means, rel=1e-5)
    for q in (5, 25, 50, 75, 95):
        quantile = every.quantile(q / 100).item()
        assert found.figures[f"gate_q{q:02d}"] == pytest.approx(quantile, abs=2 * found.gate_top / 1000)
    for layer, score in scores.items():
        assert found.heads["gate_mean"][layer] == pytest.approx(score.mean((0, 1, 3)).tolist(), rel=1e-4)
        assert found.gate_by_position[layer] == pytest.approx(score.mean((0, 2, 3)).tolist(), rel=1e-4)
        counts = torch.histc(score, 1000, 0, found.gate_top)
        assert found.gate_histogram[layer] == pytest.approx((counts / counts.sum()).tolist(), abs=2 / score.numel())
    for limit in (1e-2, 1e-3):
        share = torch.stack([(gated.abs() < limit).float().mean() for gated in after]).mean().item()
        assert found.figures[f"gated_below_{limit:g}"] == pytest.approx(share, abs=1e-3)
    layers = [found.layers["sdpa_below_0.01"][layer] for layer in scores]
    shares = [(heads.abs() < 1e-2).float().mean().item() for heads in before]
    assert layers == pytest.approx(shares, abs=1e-3)


def test_documents_of_several_lengths_count_alike():
    model = build("elementwise")
    short, long = tokens(1, 5)[0], tokens(1, 17, seed=3)[0]
    found = measure(model, [short.tolist(), long], name="mine")
    each = [measure(model, [one]) for one in (short, long)]
    assert found.model == "mine" and (found.documents, found.tokens) == (2, 22)
    for name in ("f_attn", "f_attn_floor", "entropy", "gate_mean", "m_act", "value_norm_ratio"):
        assert found.figures[name] == pytest.approx(sum(one.figures[name] for one in each) / 2, rel=1e-5)
    losses = [math.log(one.figures["perplexity"]) for one in each]
    assert math.log(found.figures["perplexity"]) == pytest.approx((4 * losses[0] + 16 * losses[1]) / 20, rel=1e-5)
    first = [one.gate_by_position[0] for one in each]
    by_position = [(a + b) / 2 for a, b in zip(*first, strict=False)] + first[1][5:]
    assert found.gate_by_position[0] == pytest.approx(by_position, rel=1e-5)


def test_no_sink_is_a_result_and_what_cannot_be_measured_is_one_line():
    model = build("headwise")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.zero_()
    figures = measure(model, tokens(2, 40)).figures
    assert figures["f_attn"] == pytest.approx(figures["f_attn_floor"]) and figures["sink_ratio"] == 0

    def refused(words, call):
        with pytest.raises(ValueError, match=words) as error:
            call()
        assert "\n" not in str(error.value)

    refused("1 tokens: 2 are needed", lambda: measure(model, [[5]]))
    refused("no documents", lambda: measure(model, []))
    refused("layer 7 has no softmax attention", lambda: attention_maps(model, tokens(1)[0], [7]))
    bloom = transformers.BloomForCausalLM(
        transformers.BloomConfig(vocab_size=131, hidden_size=48, n_layer=2, n_head=4)
    )
    refused("BloomForCausalLM has attention of its own", lambda: measure(bloom, tokens()))
    assert not any(module._forward_hooks for module in model.modules())


def test_a_model_without_a_head_has_no_perplexity():
    found = measure(build(None, gated_qwen.GatedQwenModel), tokens())
    assert "perplexity" not in found.figures and found.figures["f_attn"] > 0


# Interventions


def test_gates_are_what_is_said(gate):
    ids = tokens(2, 13)
    if gate is None:
        with pytest.raises(ValueError, match="no gates of this family"), gates_as(build(None), 1.0):
            pass
        return
    model, plain = build(gate), build(None)
    with torch.no_grad():
        scores = model(ids, output_gate_scores=True).gate_scores
        logits = model(ids).logits
        hooks = [len(module._forward_hooks) for module in model.modules()]
        plain.load_state_dict({n: v for n, v in model.state_dict().items() if "g_proj" not in n})
        with gates_as(model, 1.0):
            outputs = model(ids, output_gate_scores=True)
            assert torch.equal(outputs.logits, plain(ids).logits)
            opened = zip(outputs.gate_scores, scores, strict=True)
            assert all((one == 1).all() and one.shape == old.shape for one, old in opened)
        with gates_as(model, 0.25, layers=[1], heads=[0, 5]):
            some = model(ids, output_gate_scores=True).gate_scores
        assert torch.equal(some[0], scores[0]) and (some[1][:, :, [0, 5]] == 0.25).all()
        assert torch.equal(some[1][:, :, 1:5], scores[1][:, :, 1:5]) and not torch.equal(some[2], scores[2])
        for shuffle, dim in (("tokens", 1), ("heads", 2)):
            with gates_as(model, shuffle=shuffle, layers=[0], seed=4):
                shuffled = model(ids, output_gate_scores=True).gate_scores[0]
            assert not torch.equal(shuffled, scores[0])
            assert torch.equal(shuffled.sort(dim).values, scores[0].sort(dim).values)
        assert torch.equal(model(ids).logits, logits)
    for words, given in (
        ("either a value or shuffle", {}),
        ("either a value or shuffle", {"value": 1.0, "shuffle": "tokens"}),
        ("one of tokens, heads", {"shuffle": "layers"}),
        ("layer 3 has no gate", {"value": 1.0, "layers": [3]}),
        ("no head 6: the model has 6", {"value": 1.0, "heads": [6]}),
        ("shuffles all heads", {"shuffle": "heads", "heads": [0]}),
    ):
        with pytest.raises(ValueError, match=words), gates_as(model, **given):
            pass
    assert hooks == [len(module._forward_hooks) for module in model.modules()]


@pytest.fixture(scope="module")
def trained():
    """The demo's model, which was trained with its gates, and text."""
    model = transformers.AutoModelForCausalLM.from_pretrained(demo.CHECKPOINT, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo.CHECKPOINT)
    return model, tokenizer, tokenizer(demo.PASSAGE.read_text(), return_tensors="pt").input_ids[:, :256]


def test_a_trained_gated_model_collapses_when_its_gates_are_opened(trained):
    """As the released ones do: 12.39 to 251,076, in public measurements of the headwise one on WikiText-2."""
    model, _, ids = trained
    found = measure(model, ids)
    under = interventions(model, ids, found.figures["gate_mean"], per_layer=True)
    assert under["as they are"] == pytest.approx(found.figures["perplexity"], rel=1e-4)
    assert under["as they are"] == pytest.approx(perplexity(model, ids), rel=1e-6)
    assert under["all open (1)"] > 3 * under["as they are"], under
    assert len(under) == 6 + model.config.num_hidden_layers
