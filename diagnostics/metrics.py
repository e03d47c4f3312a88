"""The figures, each with its definition and where that comes from.

T is the number of tokens, A[i, j] the attention (a probability) that query i pays to key j, both counted from 0. What
is computed of attention comes from an [`AttentionSummary`], which is filled some queries at a time: no function here
needs the (T, T) matrix.
"""

from dataclasses import dataclass

import torch

SINK_THRESHOLD = 0.3
# Queries that have few other keys to look at, left out of the figures named `_later`.
FIRST_QUERIES = 4
# A massive activation: |h| above the first, and above so many times the median of |h|.
MASSIVE = (100.0, 1000.0)
LITTLE = (1e-2, 1e-3)
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
BINS = 1000


@dataclass
class AttentionSummary:
    """
    What figures need of one layer's attention.

    Attributes:
        by_key: (batch, heads, keys), alpha_j = sum_i A[i, j] / T: what each key gets, averaged over all queries
        first_later: (batch, heads), what key 0 gets, averaged over the queries after the first `FIRST_QUERIES`
        entropy: (batch, heads), -sum_j A[i, j] ln A[i, j] in nats, averaged over the queries
    """

    by_key: torch.Tensor
    first_later: torch.Tensor
    entropy: torch.Tensor

    @classmethod
    def of(cls, attention: torch.Tensor) -> "AttentionSummary":
        """Of a whole matrix, (batch, heads, queries, keys)."""
        return cls.of_parts([(0, attention)], attention.shape[-2])

    @classmethod
    def of_parts(cls, parts, length: int) -> "AttentionSummary":
        """Of `(start, attention)` pairs, attention (batch, heads, queries, keys) of the queries from `start` on."""
        by_key = first_later = entropy = 0
        for start, attention in parts:
            attention = attention.float()
            by_key = by_key + attention.sum(-2)
            first_later = first_later + attention[:, :, max(0, FIRST_QUERIES - start) :, 0].sum(-1)
            entropy = entropy + torch.special.entr(attention).sum((-2, -1))
        later = max(1, length - FIRST_QUERIES)
        return cls(by_key / length, first_later / later, entropy / length)


def uniform_floor(length: int, skip: int = 0) -> float:
    """F-Attn of attention that is spread evenly: the mean of 1/t over the queries t = skip + 1..length."""
    queries = range(skip + 1, length + 1)
    return sum(1 / t for t in queries) / max(1, len(queries))


def even_entropy(length: int) -> float:
    """Entropy in nats of attention that is spread evenly: the mean of ln t over the queries t = 1..length."""
    return torch.arange(1, length + 1, dtype=torch.float64).log().mean().item()


def first_token_attention(summary: AttentionSummary, later: bool = False) -> torch.Tensor:
    """F-Attn (arXiv 2505.06708, section 4.2): the attention on key 0, averaged over queries. (batch, heads).

    The paper does not say whether the first queries count, which can look at little else. All do here; with `later`
    the first four do not. Either is near [`uniform_floor`] where there is no sink.
    """
    return summary.first_later if later else summary.by_key[..., 0]


def sink_rate(summary: AttentionSummary, threshold: float = SINK_THRESHOLD) -> torch.Tensor:
    """Which heads have a sink at the first token (Gu et al., arXiv 2410.10781, equation 7): alpha_0 > threshold.

    (batch, heads), 0 or 1; its mean is their Sink^eps_1, measured there on 64 tokens with eps = 0.3.
    """
    return (summary.by_key[..., 0] > threshold).float()


def sink_ratio(summary: AttentionSummary, threshold: float = SINK_THRESHOLD) -> torch.Tensor:
    """Which heads have a sink at any position (Sun et al., arXiv 2603.05498, appendix A).

    Those where some key of the first half gets, on average over all queries, more than `threshold`. (batch, heads), 0
    or 1; its mean is their sink ratio, measured there on 64 tokens.
    """
    half = max(1, summary.by_key.shape[-1] // 2)
    return (summary.by_key[..., :half].amax(-1) > threshold).float()


def massive_activation(hidden_states: torch.Tensor) -> torch.Tensor:
    """The largest |value| of a layer's output, for each sequence: (batch, tokens, channels) to (batch,).

    M-Act (arXiv 2505.06708, section 4.3) is its mean over the layers.
    """
    return hidden_states.abs().amax((1, 2)).float()


def massive_count(hidden_states: torch.Tensor) -> torch.Tensor:
    """How many massive activations a layer's output has (Sun et al., arXiv 2402.17762, section 2).

    Those with |h| > 100 and |h| > 1000 times the median of |h|, over (tokens, channels), for each sequence: (batch,).
    """
    magnitude = hidden_states.abs().flatten(1).float()
    limit = (magnitude.median(-1).values * MASSIVE[1]).clamp(min=MASSIVE[0])
    return (magnitude > limit[:, None]).sum(-1)


def kurtosis(output: torch.Tensor) -> torch.Tensor:
    """E[((x - mean) / std)^4] over all values of each sequence: (batch, tokens, channels) to (batch,). 3 if normal.

    Of the output of an attention layer, averaged over layers, it is a figure of Bondarenko et al. (arXiv 2306.12929,
    section 5), with the largest |value| there.
    """
    x = output.flatten(1).float()
    x = x - x.mean(-1, keepdim=True)
    return x.pow(4).mean(-1) / x.square().mean(-1).square()


def share_below(values: torch.Tensor, limit: float) -> torch.Tensor:
    """Share of |values| below `limit`, for each sequence. On the output of each head before and after the gate, with
    1e-2 and 1e-3, it is the sparsity of arXiv 2505.06708, figure 5."""
    return (values.abs() < limit).flatten(1).float().mean(-1)


def value_norm_ratio(values: torch.Tensor) -> torch.Tensor:
    """||v_0|| over the mean of ||v_j||, j > 0, averaged over heads: (batch, heads, tokens, head_dim) to (batch,).

    A sink's value is small, so that attention on it adds little (Gu et al., arXiv 2410.10781, section 3.1).
    """
    norms = values.float().norm(dim=-1)
    return (norms[..., 0] / norms[..., 1:].mean(-1)).mean(-1)


def histogram(scores: torch.Tensor, top: float) -> torch.Tensor:
    """Counts of gate scores in `BINS` even bins from 0 to `top`, the largest possible score."""
    return torch.histc(scores.float().cpu(), BINS, 0.0, top)


def quantile_of(counts: torch.Tensor, top: float, q: float) -> float:
    """The quantile `q` of what was counted, to the width of a bin: where the cumulated counts reach it."""
    cumulated = counts.double().cumsum(0)
    index = int(torch.searchsorted(cumulated, q * cumulated[-1]))
    before = cumulated[index - 1].item() if index else 0.0
    within = (q * cumulated[-1].item() - before) / max(1.0, counts[index].item())
    return (index + within) * top / len(counts)
