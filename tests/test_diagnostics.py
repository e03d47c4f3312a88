"""Figures of sinks, activations and gates, against numbers computed by hand and from recorded outputs."""

import math

import pytest
import torch
from support import build, randomise, tokens
from transformers import LlamaConfig, LlamaForCausalLM

from gated_qwen.diagnostics import (
    first_token_attention,
    gate_statistics,
    massive_activation,
    measure,
    sink_ratio,
    uniform_floor,
)

# (batch 1, heads 2, tokens 3, tokens 3): the first head looks at token 0, the second at itself
ATTENTION = torch.tensor(
    [
        [
            [[1.0, 0.0, 0.0], [0.8, 0.2, 0.0], [0.6, 0.3, 0.1]],
            [[1.0, 0.0, 0.0], [0.1, 0.9, 0.0], [0.0, 0.2, 0.8]],
        ]
    ]
)


def test_first_token_attention_by_hand():
    assert first_token_attention(ATTENTION).tolist() == pytest.approx([(1 + 0.8 + 0.6 + 1 + 0.1 + 0.0) / 6])
    assert first_token_attention(ATTENTION, skip=1).tolist() == pytest.approx([(0.8 + 0.6 + 0.1 + 0.0) / 4])


def test_even_attention_has_the_floor():
    length = 9
    even = torch.ones(length, length).tril() / torch.arange(1, length + 1)[:, None]
    assert first_token_attention(even[None, None]).item() == pytest.approx(uniform_floor(length))
    # published with the definition (T = 9: 0.314, 512: 0.0133)
    assert round(uniform_floor(9), 3) == 0.314 and round(uniform_floor(512), 4) == 0.0133


def test_sink_ratio_by_hand():
    # The mean over queries of key 0 is 0.8 in the first head and 0.367 in the second.
    assert sink_ratio(ATTENTION).item() == 1.0
    assert sink_ratio(ATTENTION, threshold=0.5).item() == 0.5
    # A sink at token 1 counts, one in the second half does not.
    at = torch.zeros(1, 2, 4, 4)
    at[0, 0, :, 1] = 1.0
    at[0, 1, :, 2] = 1.0
    assert sink_ratio(at).item() == 0.5


def test_massive_activation_by_hand():
    states = torch.tensor([[[1.0, -7.0], [3.0, 2.0]], [[0.5, 0.0], [0.0, -0.25]]])
    assert massive_activation(states).tolist() == [7.0, 0.5]


def test_gate_statistics_by_hand():
    scores = torch.tensor([0.05, 0.5, 0.09, 0.9]).view(1, 2, 2, 1)
    found = gate_statistics(scores)
    expected = {"gate_mean": 0.385, "gate_below_0.1": 0.5, "gate_mean_first": 0.275, "gate_mean_rest": 0.495}
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("kind", [None, "headwise", "elementwise", "llama"])
def test_measure_equals_what_the_outputs_give(kind):
    if kind == "llama":
        config = LlamaConfig(
            vocab_size=131, hidden_size=36, intermediate_size=44, num_hidden_layers=3, num_attention_heads=6,
            num_key_value_heads=2,
        )  # fmt: skip
        model = randomise(LlamaForCausalLM(config))
    else:
        model = build(kind, attn_gate_layers=[0, 2] if kind else None)
    model.set_attn_implementation("sdpa")
    model.train()
    ids = tokens(3, 13)
    found = measure(model, ids)
    assert model.training and model.config._attn_implementation == "sdpa"
    assert not any(module._forward_hooks for module in model.modules())

    model.eval()
    model.set_attn_implementation("eager")
    recorded = {"output_gate_scores": True} if kind in ("headwise", "elementwise") else {}
    states = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda m, a, o: states.append(o[0] if isinstance(o, tuple) else o))
    with torch.no_grad():
        outputs = model(ids, labels=ids, output_attentions=True, **recorded)
    attention = torch.stack(outputs.attentions)
    assert found["f_attn"] == pytest.approx(attention[..., 0].mean().item(), rel=1e-5)
    assert found["f_attn_floor"] == pytest.approx(sum(1 / t for t in range(1, 14)) / 13)
    means = attention.mean(3)[..., :6].amax(-1)
    assert found["sink_ratio"] == pytest.approx((means > 0.3).float().mean().item(), abs=1e-6)
    assert found["m_act"] == pytest.approx(torch.stack(states).abs().amax((2, 3)).mean().item(), rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(outputs.loss.item()), rel=1e-5)
    if recorded:
        scores = torch.stack(outputs.gate_scores)
        assert found["gate_mean"] == pytest.approx(scores.mean().item(), rel=1e-5)
        assert found["gate_mean_first"] == pytest.approx(scores[:, :, 0].mean().item(), rel=1e-5)
    else:
        assert not any(name.startswith("gate") for name in found)
