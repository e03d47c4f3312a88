"""What a gated model does when its gates are held, shuffled, or taken away."""

from contextlib import contextmanager

import torch

from ..modeling.modeling_gated_qwen import GatedQwenOutputGate
from .measure import documents_of, next_token_loss

SHUFFLES = ("tokens", "heads")


def output_gates(model) -> dict[int, GatedQwenOutputGate]:
    """Layer to the module that applies its gate. ValueError where the model has none."""
    gates = {}
    for module in model.modules():
        for child in module.children():
            if isinstance(child, GatedQwenOutputGate):
                gates[module.layer_idx] = child
    if not gates:
        raise ValueError(f"{type(model).__name__} has no gates of this family to intervene in.")
    return gates


@contextmanager
def gates_as(model, value: float | None = None, *, layers=None, heads=None, shuffle: str | None = None, seed: int = 0):
    """Within it, the gates of a model are what is said here instead of what they compute.

    Args:
        value: the factor on a head's attention output. 1 opens the gate: the output passes as it is (the sigmoid's own
            upper end is `attn_gate_scale`); 0 closes it
        layers (`list[int]`): those it happens in; all by default
        heads (`list[int]`): those it happens to; all by default. Not with `shuffle="heads"`
        shuffle: "tokens": each head's scores go to other tokens of the sequence, "heads": each token's scores go to
            other heads, by one permutation for each layer from `seed`

    Raises:
        ValueError: the model has no gates, not these layers or heads, or not exactly one of `value` and `shuffle` is
            given.
    """
    gates = output_gates(model)
    if (value is None) == (shuffle is None) or shuffle not in (None, *SHUFFLES):
        raise ValueError(f"give either a value or shuffle, one of {', '.join(SHUFFLES)}.")
    chosen = sorted(gates) if layers is None else list(layers)
    if missing := [layer for layer in chosen if layer not in gates]:
        raise ValueError(f"layer {missing[0]} has no gate: {sorted(gates)} have.")
    count = model.config.num_attention_heads
    selected = list(range(count)) if heads is None else list(heads)
    if wrong := [head for head in selected if not 0 <= head < count]:
        raise ValueError(f"there is no head {wrong[0]}: the model has {count}.")
    if shuffle == "heads" and heads is not None:
        raise ValueError("shuffle='heads' shuffles all heads of a layer.")

    def intervene(layer):
        def hook(module, args, output):
            attn_output, scores = args[0], output[1].clone()
            if shuffle is None:
                scores[:, :, selected] = value
            else:
                generator = torch.Generator().manual_seed(seed * 100_003 + layer)
                dim = 1 if shuffle == "tokens" else 2
                order = torch.randperm(scores.shape[dim], generator=generator).to(scores.device)
                scores[:, :, selected] = scores[:, :, selected].index_select(dim, order)
            return attn_output * scores, scores

        return hook

    # Before the hooks by which transformers records scores, once it has been asked for them.
    hooks = [gates[layer].register_forward_hook(intervene(layer), prepend=True) for layer in chosen]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def perplexity(model, documents) -> float:
    """exp of the mean loss of the next token, over all tokens of the documents (see [`measure`])."""
    training = model.training
    model.eval()
    try:
        loss = predicted = 0
        for ids in documents_of(documents):
            loss += next_token_loss(model, ids.to(model.device)).item()
            predicted += ids.shape[1] - 1
    finally:
        model.train(training)
    return torch.tensor(loss / predicted, dtype=torch.float64).exp().item()


def interventions(model, documents, mean: float, per_layer: bool = False) -> dict[str, float]:
    """Perplexity as the model is, and under each intervention.

    Args:
        documents: as for [`measure`]; read several times
        mean: what all gates are held at in "held at their mean", such as the figure `gate_mean`
        per_layer: also open one layer's gates at a time
    """
    documents = list(documents_of(documents))
    ways = {
        f"held at their mean, {mean:.3g}": {"value": mean},
        "all open (1)": {"value": 1.0},
        "all closed (0)": {"value": 0.0},
        "shuffled over tokens": {"shuffle": "tokens"},
        "shuffled over heads": {"shuffle": "heads"},
    }
    if per_layer:
        ways |= {f"layer {layer} open": {"value": 1.0, "layers": [layer]} for layer in output_gates(model)}
    found = {"as they are": perplexity(model, documents)}
    for name, way in ways.items():
        with gates_as(model, **way):
            found[name] = perplexity(model, documents)
    return found
