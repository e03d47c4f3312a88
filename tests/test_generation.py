"""Generation: every cache and every way to generate gives the tokens and logits of the plain forward."""

import pytest
import torch
from support import max_error, randomise, tiny_config, tokens
from transformers import ContinuousBatchingConfig, DynamicCache, GenerationConfig, StaticCache

from gated_qwen import GatedQwenForCausalLM
from gated_qwen.modeling.modeling_gated_qwen import CACHE

NEW = 8

# Largest difference allowed between logits, which are of size about 10.
TOLERANCE = 5e-5

gated = pytest.mark.parametrize("gate", ["headwise", "elementwise"])


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def build(gate, seed=0, **fields):
    return randomise(GatedQwenForCausalLM(tiny_config(attn_gate=gate, **fields)), seed)


def greedy_by_hand(model, ids, new=NEW):
    """Without any cache and without `generate`."""
    for _ in range(new):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    return ids


def generate(model, ids, **kwargs):
    """`generate`, with the end-of-text token out of the way, so that all lengths are known."""
    defaults = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(ids, **{**defaults, **kwargs})


# Caches


@pytest.mark.parametrize("make_cache", [DynamicCache, StaticCache])
@pytest.mark.parametrize("chunks", [[1] * 11, [4, 4, 3], [6, 1, 4], [11]], ids=str)
def test_cached_equals_uncached(gate, make_cache, chunks):
    model, ids = build(gate), tokens()
    full = model(ids, use_cache=False).logits
    cache = make_cache(config=model.config, **({"max_cache_len": 16} if make_cache is StaticCache else {}))
    start = 0
    for length in chunks:
        part = slice(start, start + length)
        logits = model(ids[:, part], use_cache=True, **{CACHE: cache}).logits
        start += length
        assert max_error(logits, full[:, part]) <= TOLERANCE
        assert int(cache.get_seq_length()) == start


def test_a_cache_is_made_and_used_by_default(gate):
    model, ids = build(gate), tokens()
    first = model(ids[:, :6])
    second = model(ids[:, 6:], **{CACHE: first[CACHE]})
    assert second[CACHE].get_seq_length() == 11
    assert max_error(second.logits, model(ids).logits[:, 6:]) <= TOLERANCE
    assert CACHE not in model(ids, use_cache=False)


def test_static_cache_decoding_compiles_to_one_graph(gate):
    torch.compiler.reset()
    model, ids = build(gate), tokens()
    full = model(ids, use_cache=False).logits
    cache = StaticCache(config=model.config, max_cache_len=16)
    model(ids[:, :8], **{CACHE: cache})
    step = torch.compile(model, fullgraph=True, backend="eager")
    for position in range(8, 11):
        logits = step(ids[:, position : position + 1], **{CACHE: cache}).logits
        assert max_error(logits, full[:, position : position + 1]) <= TOLERANCE


# Ways to generate


def test_greedy_equals_argmax_of_the_forward(gate):
    model, ids = build(gate), tokens()
    expected = greedy_by_hand(model, ids)
    assert torch.equal(generate(model, ids), expected)
    assert torch.equal(generate(model, ids, use_cache=False), expected)
    assert torch.equal(generate(model, ids, cache_implementation="static"), expected)
    assert torch.equal(generate(model, ids, prefill_chunk_size=4), expected)


def test_greedy_under_other_backends(gate):
    model, ids = build(gate), tokens()
    expected = generate(model, ids)
    for backend in ("eager", "flex_attention"):
        model.set_attn_implementation(backend)
        with torch.compiler.set_stance("force_eager"):  # compiling flex_attention takes seconds for each new length
            assert torch.equal(generate(model, ids), expected)


def test_greedy_with_sliding_windows(gate):
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    model, ids = build(gate, layer_types=types, use_sliding_window=True, sliding_window=4), tokens()
    expected = greedy_by_hand(model, ids)
    assert torch.equal(generate(model, ids), expected)
    assert torch.equal(generate(model, ids, cache_implementation="static"), expected)


def test_generation_stops_at_the_end_token(gate):
    model, ids = build(gate), tokens(1)
    free = generate(model, ids)[0, 11:].tolist()
    stop = free[3]
    assert generate(model, ids, eos_token_id=stop)[0, 11:].tolist() == free[: free.index(stop) + 1]


def test_left_padded_batch_generates_as_each_row_alone(gate):
    model = build(gate)
    prompts = [tokens(1, length, seed=length) for length in (11, 7, 1)]
    ids = torch.cat([torch.nn.functional.pad(prompt, (11 - prompt.shape[1], 0)) for prompt in prompts])
    together = generate(model, ids, attention_mask=(ids != 0).long())
    for row, prompt in zip(together, prompts, strict=True):
        assert torch.equal(row[11:], generate(model, prompt)[0, prompt.shape[1] :])


def test_inputs_embeds_generate_the_same_tokens(gate):
    model, ids = build(gate), tokens()
    embeds = model.get_input_embeddings()(ids)
    assert torch.equal(generate(model, None, inputs_embeds=embeds), generate(model, ids)[:, 11:])


def test_sampling_repeats_with_a_seed(gate):
    model, ids = build(gate), tokens()
    samples = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        samples.append(generate(model, ids, do_sample=True, temperature=2.0, top_k=0))
    assert torch.equal(samples[0], samples[1]) and not torch.equal(samples[0], samples[2])
    # With and without a cache the same tokens are drawn.
    torch.manual_seed(0)
    assert torch.equal(generate(model, ids, do_sample=True, temperature=2.0, top_k=0, use_cache=False), samples[0])


def log_probability(model, sequences, prompt):
    logits = model(sequences[:, :-1], use_cache=False).logits[:, prompt - 1 :].log_softmax(-1)
    return logits.gather(-1, sequences[:, prompt:, None]).sum((1, 2))


def test_beam_search(gate):
    model, ids = build(gate), tokens()
    beams = {"num_beams": 4, "num_return_sequences": 4, "length_penalty": 0.0}
    outputs = generate(model, ids, **beams, return_dict_in_generate=True, output_scores=True)
    assert torch.equal(generate(model, ids, **beams, use_cache=False), outputs.sequences)
    assert len(outputs.sequences.unique(dim=0)) == 8
    # The scores that the beams were ranked by are those of a plain forward.
    assert max_error(outputs.sequences_scores, log_probability(model, outputs.sequences, 11)) <= TOLERANCE


@pytest.mark.parametrize("assistant_gate", [None, "headwise", "elementwise"])
def test_assisted_generation_equals_greedy(gate, assistant_gate):
    model, ids = build(gate), tokens(1)
    expected = generate(model, ids)
    for assistant in (model, build(assistant_gate, seed=1, num_hidden_layers=1)):
        assert torch.equal(generate(model, ids, assistant_model=assistant), expected)


def test_prompt_lookup_generation_equals_greedy(gate):
    model, ids = build(gate), tokens(1, 5).repeat(1, 2)
    assert torch.equal(generate(model, ids, prompt_lookup_num_tokens=3), generate(model, ids))


def test_generation_returns_attentions_and_hidden_states(gate):
    model, ids = build(gate), tokens()
    model.set_attn_implementation("eager")
    outputs = generate(
        model, ids, return_dict_in_generate=True, output_attentions=True, output_hidden_states=True, output_logits=True
    )
    assert len(outputs.attentions) == len(outputs.hidden_states) == len(outputs.logits) == NEW
    assert [weights.shape for weights in outputs.attentions[0]] == [(2, 6, 11, 11)] * 3
    assert [weights.shape for weights in outputs.attentions[1]] == [(2, 6, 1, 12)] * 3
    assert [states.shape for states in outputs.hidden_states[1]] == [(2, 1, 40)] * 4
    full = model(outputs.sequences).logits
    assert max_error(torch.stack(outputs.logits, dim=1), full[:, 10:-1]) <= TOLERANCE


@gated
def test_generation_of_a_model_that_always_returns_gate_scores(gate):
    model, ids = build(gate), tokens()
    expected = generate(model, ids)
    model.config.output_gate_scores = True
    assert torch.equal(generate(model, ids), expected)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("sliding", [False, True], ids=["full", "sliding"])
def test_continuous_batching_equals_generate(gate, backend, sliding):
    windows = {"layer_types": ["sliding_attention"] * 3, "use_sliding_window": True, "sliding_window": 4}
    model = build(gate, **(windows if sliding else {}))
    prompts = [tokens(1, length, seed=length) for length in (11, 7, 1)]
    expected = [generate(model, prompt)[0, prompt.shape[1] :].tolist() for prompt in prompts]

    model.set_attn_implementation(backend)
    results = model.generate_batch(
        inputs=[prompt[0].tolist() for prompt in prompts],
        generation_config=GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=16),
        warmup=False,
        progress_bar=False,
    )
    assert [results[name].generated_tokens for name in sorted(results)] == expected
