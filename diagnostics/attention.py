"""Exact attention in the open, some queries at a time, for any model that runs through transformers' attention
interface: what eager attention computes, without ever holding a (tokens, tokens) matrix."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

NAME = "gated_qwen_observed"
# Of probabilities held at once: 64 MB in float32.
ELEMENTS = 2**24

observer = ContextVar("observer")


def rows_of_mask(*args, **kwargs):
    """In the place of a mask: what makes some of its rows, (batch, 1, rows, keys), True where a key is seen."""
    given = {**kwargs, "allow_is_causal_skip": False}
    names = ("batch_size", "q_length", "kv_length")
    given.update(zip(names, args, strict=False))
    offset = given.pop("q_offset", 0)

    def rows(start: int, count: int) -> torch.Tensor:
        return sdpa_mask(**{**given, "q_length": count}, q_offset=offset + start)

    return rows


def probabilities(query, key, mask, scaling, softcap=None, sinks=None) -> Iterator[tuple[int, torch.Tensor]]:
    """`(start, attention)` for one part of the queries after the other.

    Args:
        query: (batch, heads, queries, head_dim)
        key: (batch, key/value heads, keys, head_dim)
        mask: as [`rows_of_mask`] makes them; a whole one, boolean or added to the logits; or None
        sinks: (heads,) logits of a key that is in no sequence, where a model has learnt such

    Yields:
        Attention (batch, key/value heads, heads in the group, rows, keys), in the dtype of the query.
    """
    batch, heads, length, _ = query.shape
    keys = key.shape[-2]
    query = query.unflatten(1, (key.shape[1], -1))
    transposed = key.transpose(-1, -2)[:, :, None]
    count = max(1, ELEMENTS // (batch * heads * keys))
    for start in range(0, length, count):
        rows = slice(start, min(start + count, length))
        logits = query[..., rows, :] @ transposed * scaling
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        part = mask(start, rows.stop - start) if callable(mask) else mask if mask is None else mask[..., rows, :keys]
        if part is not None:
            part = part[:, :, None]
            if part.dtype == torch.bool:
                logits = logits.masked_fill(~part, torch.finfo(logits.dtype).min)
            else:
                logits = logits + part
        if sinks is not None:
            extra = sinks.view(1, key.shape[1], -1, 1, 1).expand(*logits.shape[:-1], 1)
            logits = torch.cat([logits, extra.to(logits.dtype)], -1)
        attention = torch.softmax(logits, -1, dtype=torch.float32).to(query.dtype)
        yield start, attention[..., :keys]


def observed_attention(
    module, query, key, value, attention_mask, scaling=None, softcap=None, s_aux=None, **kwargs
) -> tuple[torch.Tensor, None]:
    """An attention function of transformers' interface; the observer sees each part."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    outputs = []

    def parts():
        for start, attention in probabilities(query, key, attention_mask, scaling, softcap, s_aux):
            outputs.append((attention @ value[:, :, None]).flatten(1, 2))
            yield start, attention.flatten(1, 2)

    seen = observer.get()
    seen.attention(module, parts(), query.shape[-2])
    output = torch.cat(outputs, 2).transpose(1, 2).contiguous()
    seen.heads(module, value, output)
    return output, None


AttentionInterface.register(NAME, observed_attention)
AttentionMaskInterface.register(NAME, rows_of_mask)


@contextmanager
def observed(model, seen):
    """Within it the model, in evaluation mode, shows its attention to `seen`:

        seen.attention(module, parts, length)   parts: (start, (batch, heads, rows, keys)) pairs, to be used up
        seen.heads(module, value, output)       value (batch, key/value heads, tokens, head_dim), what o_proj gets:
                                                output (batch, tokens, heads, head_dim), before a gate

    Raises:
        ValueError: the model's attention does not go through transformers' attention interface.
    """
    before, training = model.config._attn_implementation, model.training
    token = observer.set(seen)
    try:
        model.set_attn_implementation(NAME)
        if model.config._attn_implementation != NAME:
            raise ValueError(f"{type(model).__name__} has attention of its own, outside transformers' interface.")
        model.eval()
        yield
    finally:
        observer.reset(token)
        model.set_attn_implementation(before)
        model.train(training)


class Modules:
    """An observer that notes which modules attend, in their order."""

    def __init__(self):
        self.found = {}

    def attention(self, module, parts, length):
        self.found.setdefault(module, len(self.found))
        for _ in parts:
            pass

    def heads(self, module, value, output):
        pass


@torch.no_grad()
def attention_modules(model) -> dict[torch.nn.Module, int]:
    """The modules that attend by softmax, and the index of the layer each is in, found by a pass over two tokens."""
    seen = Modules()
    with observed(model, seen):
        model(torch.zeros(1, 2, dtype=torch.long, device=model.device), use_cache=False)
    if not seen.found:
        raise ValueError(f"{type(model).__name__} has no softmax attention in transformers' interface.")
    return {module: getattr(module, "layer_idx", order) for module, order in seen.found.items()}


class Maps:
    """An observer that keeps the attention of some layers, whole: (heads, tokens, tokens)."""

    def __init__(self, modules: dict[torch.nn.Module, int], layers):
        self.modules, self.layers, self.found = modules, set(layers), {}

    def attention(self, module, parts, length):
        kept = [attention[0].float().cpu() for _, attention in parts]
        if (layer := self.modules[module]) in self.layers:
            self.found[layer] = torch.cat(kept, 1)

    def heads(self, module, value, output):
        pass


@torch.no_grad()
def attention_maps(model, input_ids: torch.Tensor, layers) -> dict[int, torch.Tensor]:
    """Attention of the chosen layers on one sequence (tokens,): layer to (heads, tokens, tokens), float32, CPU."""
    modules = attention_modules(model)
    if missing := sorted(set(layers) - set(modules.values())):
        raise ValueError(f"layer {missing[0]} has no softmax attention; {sorted(modules.values())} have.")
    seen = Maps(modules, layers)
    with observed(model, seen):
        model(input_ids.view(1, -1).to(model.device), use_cache=False)
    return seen.found
