"""All figures of a decoder-only model on documents, in one pass over each, layer by layer."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field

import torch
from torch.nn import functional

from ..modeling.modeling_gated_qwen import GatedQwenOutputGate
from . import metrics
from .attention import attention_modules, observed
from .metrics import LITTLE, QUANTILES, AttentionSummary

# Tokens whose logits over the vocabulary are held at once.
LOGITS = 256

# Of the figures: what a reader calls them.
LABELS = {
    "perplexity": "perplexity",
    "f_attn": "F-Attn",
    "f_attn_floor": "F-Attn of even attention",
    "f_attn_later": "F-Attn without the first 4 queries",
    "f_attn_later_floor": "the same of even attention",
    "sink_rate": "heads with a sink at the first token",
    "sink_ratio": "heads with a sink anywhere",
    "entropy": "entropy of attention (nats)",
    "entropy_even": "entropy of even attention (nats)",
    "m_act": "M-Act (mean over layers of the largest |h|)",
    "massive": "massive activations in a document",
    "kurtosis": "kurtosis of attention layers' output",
    "max_norm": "largest |value| of attention layers' output",
    "value_norm_ratio": "norm of the first value over the others'",
    "sdpa_below_0.01": "head outputs below 0.01",
    "sdpa_below_0.001": "head outputs below 0.001",
    "gated_below_0.01": "head outputs below 0.01, gated",
    "gated_below_0.001": "head outputs below 0.001, gated",
    "gate_mean": "mean gate",
    "gate_mean_first": "mean gate at the first token",
    "gate_mean_rest": "mean gate at the others",
    "gate_below_0.1": "gates below 0.1",
    "gate_q05": "gate, 5th percentile",
    "gate_q25": "gate, 25th percentile",
    "gate_q50": "gate, median",
    "gate_q75": "gate, 75th percentile",
    "gate_q95": "gate, 95th percentile",
}


@dataclass
class Measurements:
    """
    What [`measure`] found.

    Attributes:
        figures: name to value, see `LABELS`: means over documents, layers and heads; without those of what the model
            has not, such as gates
        layers: name to {layer: value}
        heads: name to {layer: values of its heads}
        gate_histogram: {layer: shares of its gate scores in even bins from 0 to `gate_top`}
        gate_by_position: {layer: mean score of its heads at each position}
        largest: for each layer where its largest |h| is: `{"layer", "value", "position", "channel"}`
        first_tokens: how many documents start with which token id. None is ever put in front
    """

    model: str
    documents: int = 0
    tokens: int = 0
    first_tokens: dict[int, int] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    layers: dict[str, dict[int, float]] = field(default_factory=dict)
    heads: dict[str, dict[int, list[float]]] = field(default_factory=dict)
    gate_histogram: dict[int, list[float]] = field(default_factory=dict)
    gate_top: float | None = None
    gate_by_position: dict[int, list[float]] = field(default_factory=dict)
    largest: list[dict] = field(default_factory=list)

    def to_dict(self) -> dict:
        """All of it, for JSON."""
        return asdict(self)


def documents_of(documents) -> Iterable[torch.Tensor]:
    """Each as (1, tokens). A (sequences, tokens) tensor, or an iterable of token ids of any lengths."""
    for document in documents:
        ids = torch.as_tensor(document).view(1, -1)
        if ids.shape[1] < 2:
            raise ValueError(f"a document has {ids.shape[1]} tokens: 2 are needed at least.")
        yield ids


def decoder_layers(model) -> list[torch.nn.Module]:
    count = model.config.get_text_config().num_hidden_layers
    for module in model.base_model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return list(module)
    raise ValueError(f"{type(model).__name__} has no list of {count} decoder layers.")


def packed_gate(module) -> bool:
    """Whether an attention module has Qwen3.5's elementwise gate, in the second half of each head of q_proj."""
    projection, heads = getattr(module, "q_proj", None), getattr(module.config, "num_attention_heads", 0)
    return getattr(projection, "out_features", 0) == 2 * heads * getattr(module, "head_dim", 0)


class Recorder:
    """Collects, document by document, what the figures are made of."""

    def __init__(self, model):
        self.modules = attention_modules(model)
        self.by_layer = defaultdict(lambda: defaultdict(list))  # name -> layer -> a value, or one of each head
        self.figures = defaultdict(list)  # name -> a value for each document
        self.top: float | None = None
        self.histogram: dict[int, torch.Tensor] = {}
        self.positions: dict[int, torch.Tensor] = {}
        self.position_counts = torch.zeros(0)
        self.largest: dict[int, dict] = {}
        self.sdpa: dict[int, torch.Tensor] = {}
        self.packed: dict[int, torch.Tensor] = {}
        self.gates = {}  # module -> layer
        for module, layer in self.modules.items():
            for child in module.modules():
                if isinstance(child, GatedQwenOutputGate):
                    self.gates[child] = layer

    def add(self, name: str, layer: int, value: torch.Tensor) -> None:
        self.by_layer[name][layer].append(value.detach().float().cpu())

    # Called by the attention function

    def attention(self, module, parts, length) -> None:
        layer, summary = self.modules[module], AttentionSummary.of_parts(parts, length)
        self.add("f_attn", layer, metrics.first_token_attention(summary)[0])
        self.add("f_attn_later", layer, metrics.first_token_attention(summary, later=True)[0])
        self.add("sink_rate", layer, metrics.sink_rate(summary)[0])
        self.add("sink_ratio", layer, metrics.sink_ratio(summary)[0])
        self.add("entropy", layer, summary.entropy[0])

    def heads(self, module, value, output) -> None:
        layer = self.modules[module]
        self.add("value_norm_ratio", layer, metrics.value_norm_ratio(value)[0])
        for limit in LITTLE:
            self.add(f"sdpa_below_{limit:g}", layer, metrics.share_below(output, limit)[0])
        if (logits := self.packed.pop(layer, None)) is not None:
            scores = torch.sigmoid(logits.view(*output.shape[:-1], -1)[..., output.shape[-1] :])
            self.gate(layer, scores, 1.0, output * scores)

    # Called by hooks

    def gate(self, layer: int, scores: torch.Tensor, top: float, gated: torch.Tensor) -> None:
        """scores (1, tokens, heads, 1 or head_dim) up to `top`; gated (1, tokens, heads, head_dim)."""
        self.top = top
        scores = scores.float()
        self.add("gate_mean", layer, scores.mean((0, 1, 3)))
        self.add("gate_below_0.1", layer, (scores < 0.1).float().mean((0, 1, 3)))
        self.add("gate_mean_first", layer, scores[:, 0].mean((0, 2)))
        self.add("gate_mean_rest", layer, scores[:, 1:].mean((0, 1, 3)))
        self.histogram[layer] = self.histogram.get(layer, 0) + metrics.histogram(scores, top).double()
        by_position = scores.mean((0, 2, 3)).cpu()
        so_far = self.positions.get(layer, torch.zeros(0))
        longest = max(len(so_far), len(by_position))
        self.positions[layer] = functional.pad(so_far, (0, longest - len(so_far))) + functional.pad(
            by_position, (0, longest - len(by_position))
        )
        for limit in LITTLE:
            self.add(f"gated_below_{limit:g}", layer, metrics.share_below(gated, limit)[0])

    def attention_output(self, layer: int, output: torch.Tensor) -> None:
        self.add("kurtosis", layer, metrics.kurtosis(output)[0])
        self.add("max_norm", layer, output.abs().max())

    def layer_output(self, layer: int, hidden_states: torch.Tensor) -> None:
        value = metrics.massive_activation(hidden_states)[0]
        self.add("m_act", layer, value)
        self.add("massive", layer, metrics.massive_count(hidden_states)[0])
        if value.item() > self.largest.get(layer, {"value": -1.0})["value"]:
            position, channel = divmod(hidden_states[0].abs().argmax().item(), hidden_states.shape[-1])
            self.largest[layer] = {
                "layer": layer, "value": value.item(), "position": position, "channel": channel,
            }  # fmt: skip

    @contextmanager
    def hooked(self, model):
        def gate(layer):
            return lambda module, args, output: self.gate(layer, output[1], float(module.scale), output[0])

        def packed(layer):
            return lambda module, args, output: self.packed.__setitem__(layer, output.detach())

        def first(function, layer):
            return lambda module, args, output: function(layer, output[0] if isinstance(output, tuple) else output)

        hooks = [module.register_forward_hook(gate(layer)) for module, layer in self.gates.items()]
        for index, layer in enumerate(decoder_layers(model)):
            hooks.append(layer.register_forward_hook(first(self.layer_output, index)))
        for module, layer in self.modules.items():
            hooks.append(module.register_forward_hook(first(self.attention_output, layer)))
            if packed_gate(module):
                hooks.append(module.q_proj.register_forward_hook(packed(layer)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def document(self, ids: torch.Tensor) -> None:
        length = ids.shape[1]
        self.figures["f_attn_floor"].append(metrics.uniform_floor(length))
        self.figures["f_attn_later_floor"].append(metrics.uniform_floor(length, metrics.FIRST_QUERIES))
        self.figures["entropy_even"].append(metrics.even_entropy(length))
        longest = max(length, len(self.position_counts))
        ones = functional.pad(torch.ones(length), (0, longest - length))
        self.position_counts = functional.pad(self.position_counts, (0, longest - len(self.position_counts))) + ones


def next_token_loss(model, ids: torch.Tensor) -> torch.Tensor | None:
    """The summed loss in nats of a pass, or None without a language model's head.

    Logits are made some tokens at a time where the head is a linear layer and nothing more.
    """
    head = model.get_output_embeddings()
    if head is None:
        model(ids, use_cache=False)
        return None
    states = {}
    hook = model.base_model.register_forward_hook(lambda module, args, output: states.update(last=output[0]))
    try:
        last = model(ids, use_cache=False, logits_to_keep=1).logits
    finally:
        hook.remove()
    hidden = states["last"]
    total = torch.zeros((), dtype=torch.float64)
    if last.shape[1] == 1 and torch.equal(head(hidden[:, -1:]), last):
        starts = range(0, ids.shape[1] - 1, LOGITS)
        parts = ((head(hidden[0, start : start + LOGITS]), start) for start in starts)
    else:
        parts = [(model(ids, use_cache=False).logits[0], 0)]
    for logits, start in parts:
        targets = ids[0, start + 1 : start + 1 + len(logits)]
        total += functional.cross_entropy(logits[: len(targets)].float(), targets, reduction="sum").double().cpu()
    return total


@torch.no_grad()
def measure(model, documents, name: str | None = None) -> Measurements:
    """Sinks, massive activations, gates and perplexity of a decoder-only model.

    Attention is exact and made some queries at a time, so that a document may be as long as the model can read; one
    document is held at a time. Nothing is put in front of them: position 0 is their first token, whatever it is.

    Args:
        model ([`PreTrainedModel`]): any whose softmax attention goes through transformers' attention interface. What
            it has not (gates, or softmax attention in each layer) is left out
        documents: token ids, (sequences, tokens) or an iterable of 1-D tensors or lists, without padding
        name: of the model, for reports; by default its path or class

    Raises:
        ValueError: the model's attention cannot be seen, or a document has fewer than two tokens.
    """
    recorder = Recorder(model)
    found = Measurements(name or model.name_or_path or type(model).__name__)
    firsts, loss, predicted = Counter(), 0.0, 0
    for ids in documents_of(documents):
        ids = ids.to(model.device)
        recorder.document(ids)
        with ExitStack() as stack:
            stack.enter_context(observed(model, recorder))
            stack.enter_context(recorder.hooked(model))
            of_document = next_token_loss(model, ids)
        loss = None if of_document is None else loss + of_document.item()
        predicted += ids.shape[1] - 1
        firsts[ids[0, 0].item()] += 1
        found.tokens += ids.shape[1]
        found.documents += 1
    if not found.documents:
        raise ValueError("there are no documents to measure on.")
    found.first_tokens = dict(firsts.most_common())
    summarise(recorder, found)
    if loss is not None:
        found.figures["perplexity"] = torch.tensor(loss / predicted).exp().item()
    found.figures = {key: found.figures[key] for key in LABELS if key in found.figures}
    return found


def summarise(recorder: Recorder, found: Measurements) -> None:
    for name, values in recorder.by_layer.items():
        means = {layer: torch.stack(of_documents).mean(0) for layer, of_documents in sorted(values.items())}
        if next(iter(means.values())).dim():
            found.heads[name] = {layer: value.tolist() for layer, value in means.items()}
        found.layers[name] = {layer: value.mean().item() for layer, value in means.items()}
        over_layers = {"max_norm": max, "massive": sum}.get(name, lambda v: sum(v) / len(v))
        found.figures[name] = over_layers(found.layers[name].values())
    for name, values in recorder.figures.items():
        found.figures[name] = sum(values) / len(values)
    found.largest = [recorder.largest[layer] for layer in sorted(recorder.largest)]
    if recorder.histogram:
        top, counts = recorder.top, sum(recorder.histogram.values())
        found.gate_top = top
        found.gate_histogram = {
            layer: (count / count.sum()).tolist() for layer, count in sorted(recorder.histogram.items())
        }
        found.gate_by_position = {
            layer: (total / recorder.position_counts).tolist() for layer, total in sorted(recorder.positions.items())
        }
        for q in QUANTILES:
            found.figures[f"gate_q{round(100 * q):02d}"] = metrics.quantile_of(counts, top, q)
