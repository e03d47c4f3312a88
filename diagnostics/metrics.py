"""Figures of attention sinks, massive activations and gates.

Of one layer at a time, so that no more than one layer's (heads, tokens, tokens) attention is held.
"""

from contextlib import contextmanager

import torch

SINK_THRESHOLD = 0.3


def uniform_floor(length: int) -> float:
    """F-Attn of attention that is spread evenly: the mean of 1/t over the queries t = 1..length."""
    return sum(1 / t for t in range(1, length + 1)) / length


def first_token_attention(attention: torch.Tensor, skip: int = 0) -> torch.Tensor:
    """F-Attn (arXiv 2505.06708): the attention on key 0, averaged over heads and queries.

    Args:
        attention: probabilities, (batch, heads, tokens, tokens)
        skip: so many of the first queries are left out, which have few other keys to look at

    Returns:
        One figure for each sequence: (batch,)
    """
    return attention[:, :, skip:, 0].mean((1, 2))


def sink_ratio(attention: torch.Tensor, threshold: float = SINK_THRESHOLD) -> torch.Tensor:
    """The share of heads with a sink at any position (Sun et al., arXiv 2603.05498, appendix A).

    A head has one where some key of the first half gets, on average over all queries, more than `threshold`.

    Args:
        attention: probabilities, (batch, heads, tokens, tokens)

    Returns:
        One figure for each sequence: (batch,)
    """
    half = max(1, attention.shape[-1] // 2)
    return (attention.mean(2)[..., :half].amax(-1) > threshold).float().mean(1)


def massive_activation(hidden_states: torch.Tensor) -> torch.Tensor:
    """The largest |value| of a layer's output, for each sequence: (batch, tokens, channels) to (batch,).

    M-Act (arXiv 2505.06708) is its mean over the layers.
    """
    return hidden_states.abs().amax((1, 2)).float()


def gate_statistics(scores: torch.Tensor) -> dict[str, float]:
    """Figures of gate scores (batch, tokens, heads, 1 or head_dim): their mean, the share below 0.1, the mean at the
    first token and at the rest."""
    scores = scores.float()
    return {
        "gate_mean": scores.mean().item(),
        "gate_below_0.1": (scores < 0.1).float().mean().item(),
        "gate_mean_first": scores[:, :1].mean().item(),
        "gate_mean_rest": scores[:, 1:].mean().item(),
    }


@contextmanager
def eager_attention(model):
    """The model computes its attention in the open, in evaluation mode."""
    before, training = model.config._attn_implementation, model.training
    model.set_attn_implementation("eager")
    model.eval()
    try:
        yield
    finally:
        model.set_attn_implementation(before)
        model.train(training)


@torch.no_grad()
def measure(model, input_ids: torch.Tensor) -> dict[str, float]:
    """Sink, activation, gate and perplexity figures of a causal language model on sequences of one length.

    Args:
        model: any decoder of transformers whose layers are `model.model.layers` with a `self_attn`
        input_ids: (sequences, tokens), without padding. Nothing is put in front of them: position 0 is their first
            token.

    Returns:
        `f_attn` and `f_attn_floor` (even attention), `sink_ratio`, `m_act`, `perplexity`, and of a model with gates
        those of [`gate_statistics`]: means over the sequences and layers.
    """
    base = getattr(model, "model", model)
    found: dict[str, list[float]] = {"f_attn": [], "sink_ratio": [], "m_act": []}
    gates: list[dict[str, float]] = []

    def after_attention(module, args, output):
        found["f_attn"].append(first_token_attention(output[1]).mean().item())
        found["sink_ratio"].append(sink_ratio(output[1]).mean().item())

    def after_layer(module, args, output):
        hidden_states = output[0] if isinstance(output, tuple) else output
        found["m_act"].append(massive_activation(hidden_states).mean().item())

    def after_gate(module, args, output):
        gates.append(gate_statistics(output[1]))

    hooks = []
    for layer in base.layers:
        hooks += [layer.self_attn.register_forward_hook(after_attention), layer.register_forward_hook(after_layer)]
        if getattr(layer.self_attn, "g_proj", None) is not None:
            hooks.append(layer.self_attn.output_gate.register_forward_hook(after_gate))
    losses = []
    try:
        with eager_attention(model):
            for row in input_ids.split(1):
                losses.append(model(row, labels=row, use_cache=False).loss.item())
    finally:
        for hook in hooks:
            hook.remove()

    def mean(values):
        return sum(values) / len(values)

    figures = {"f_attn": mean(found["f_attn"]), "f_attn_floor": uniform_floor(input_ids.shape[1])}
    figures |= {"sink_ratio": mean(found["sink_ratio"]), "m_act": mean(found["m_act"])}
    figures["perplexity"] = torch.tensor(mean(losses)).exp().item()
    if gates:
        figures |= {name: mean([gate[name] for gate in gates]) for name in gates[0]}
    return figures
