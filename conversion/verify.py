"""Whether a converted checkpoint computes what its source does: both are loaded, one after the other, and compared.

The inputs: a text; random tokens; tokens at positions up to and past the context length, where rotary embeddings
change their ways (the whole context where it is at most 1024 tokens, else 64 tokens around its end); and, where there
is a sliding window of at most 1024 tokens, a sequence longer than it.
"""

import gc
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers
from tqdm.auto import tqdm
from transformers import AutoTokenizer, DynamicCache
from transformers.utils import logging

from ..configuration import GatedQwenConfig
from ..modeling.modeling_gated_qwen import CACHE
from .errors import CheckpointError, shown
from .plan import Plan

# Models of up to so many parameters are verified unless that is declined.
SMALL = 1_000_000_000

AUTO_CLASSES = {
    "ForCausalLM": transformers.AutoModelForCausalLM,
    "ForSequenceClassification": transformers.AutoModelForSequenceClassification,
    "ForTokenClassification": transformers.AutoModelForTokenClassification,
    "ForQuestionAnswering": transformers.AutoModelForQuestionAnswering,
    "Model": transformers.AutoModel,
}

PROBES = (
    "Hello  world\n\tdef f(x): return x",
    "Grüße, 你好, مرحبا, 🤗🏽",
    " 1234567 -- don't  ",
    "e\u0301 </s><s>",
    "▁a b",
)

# What rounding alone may change, relative to the largest logit: for a plan whose numbers are those of the source, but
# come from another matrix product.
ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def load(folder: Path, config, dtype: str | torch.dtype = "auto"):
    head = next(head for head in AUTO_CLASSES if config.architectures[0].endswith(head))
    model = AUTO_CLASSES[head].from_pretrained(
        folder, dtype=dtype, attn_implementation="sdpa", local_files_only=True, trust_remote_code=False
    )
    model.set_attn_implementation("sdpa")  # where the config has another one
    return model


@contextmanager
def says_what_cannot_run(folder: Path):
    try:
        yield
    except Exception as error:  # whatever its files lead transformers to
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise CheckpointError(
            f"transformers cannot run {folder}: {shown(error, 400)}. Mend it, or pass verify=False (--no-verify)."
        ) from error


def load_tokenizer(folder: Path):
    """The checkpoint's tokenizer, or None where it has none that can be loaded without running its code."""
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a tokenizer that transformers cannot load says nothing of the weights
        if getattr(error, "errno", None) is not None:
            raise
        return None


def token_ids(tokenizer, text: str, **options) -> list[int] | None:
    """None where the tokenizer has no token for something in the text."""
    try:
        return tokenizer(text, **options).input_ids
    except Exception:  # its library raises plain ones
        return None


def inputs_for(config, tokenizer, text: str) -> dict[str, dict]:
    """The inputs to compare on, by what they are."""
    generator = torch.Generator().manual_seed(0)

    def random(batch: int, length: int) -> torch.Tensor:
        return torch.randint(0, config.vocab_size, (batch, length), generator=generator)

    inputs = {"random tokens": {"input_ids": random(2, 64)}}
    if tokenizer is not None:
        ids = (token_ids(tokenizer, text, add_special_tokens=False) or [])[:256]
        if ids and max(ids) < config.vocab_size:
            inputs["text"] = {"input_ids": torch.tensor([ids])}
    context = config.max_position_embeddings
    if context <= 1024:
        inputs[f"a sequence past the context of {context} tokens"] = {"input_ids": random(1, context + 8)}
    else:
        inputs[f"positions around the context's end at {context}"] = {
            "input_ids": random(1, 64),
            "position_ids": torch.arange(context - 32, context + 32)[None],
        }
    window = getattr(config, "sliding_window", None)
    if window is not None and window <= 1024 and "sliding_attention" in config.layer_types:
        inputs[f"a sequence past the window of {window} tokens"] = {"input_ids": random(1, window + 40)}
    return inputs


@torch.no_grad()
def outputs_of(model, inputs: dict[str, dict], advance: Callable = lambda: None) -> dict[str, torch.Tensor]:
    """Logits (or what the model has in their place) for each input, without padding."""
    model.eval()
    outputs = {}
    for name, given in inputs.items():
        if model.config.pad_token_id is None and "score.weight" in dict(model.named_parameters()):
            given = {key: value[:1] for key, value in given.items()}  # classifiers take batches only with a pad token
        outputs[name] = model(**given, use_cache=False, return_dict=True)[0]
        advance()
    if model.can_generate():
        ids = inputs["random tokens"]["input_ids"]
        cache = DynamicCache(config=model.config)
        steps = [ids[:, :-8], *ids[:, -8:].split(1, dim=1)]
        logits = [model(step, use_cache=True, return_dict=True, **{CACHE: cache}).logits for step in steps]
        outputs["steps with a cache"] = torch.cat(logits, dim=1)
    return outputs


def largest_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest |a - b|; infinite where only one of two numbers is one."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    same = (a == b) | (a.isnan() & b.isnan())
    differences = (a.double() - b.double()).abs().nan_to_num(nan=float("inf"))
    return differences.masked_fill(same, 0).max().item()


def same_token_ids(plan: Plan, folder: Path, text: str) -> bool | None:
    """Whether AutoTokenizer gives the same ids for the checkpoint in `folder` as for the source of its plan; None
    where the source has no tokenizer. The files are the same, but transformers also goes by the model type."""
    tokenizer = load_tokenizer(plan.source.folder)
    if tokenizer is None:
        return None
    converted = load_tokenizer(folder)
    probes = (text, *PROBES)
    return converted is not None and all(token_ids(tokenizer, p) == token_ids(converted, p) for p in probes)


def verify(plan: Plan, folder: Path, text: str, progress: bool = False) -> dict:
    """Compare the checkpoint in `folder` with the source of the plan that made it.

    Returns:
        For the record: the largest difference over all inputs, the one that is allowed (None: any), the inputs, the
        dtype and the versions.

    Raises:
        CheckpointError: the difference is larger than the plan allows.
    """
    gated = plan.config if isinstance(plan.config, GatedQwenConfig) else plan.source_config
    inputs = inputs_for(gated, load_tokenizer(plan.source.folder), text)
    # Other families round at other places in 16 bits; in fp32 the two are the same.
    wide = torch.float32 if plan.command in ("export", "import") else "auto"
    show_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    bar = tqdm(total=2 * len(inputs), desc="Comparing outputs", disable=not progress)
    try:
        with says_what_cannot_run(plan.source.folder):
            model = load(plan.source.folder, plan.source_config if plan.source_config.architectures else gated, wide)
            expected, dtype = outputs_of(model, inputs, bar.update), model.dtype
        del model
        gc.collect()
        with says_what_cannot_run(folder):
            model = load(folder, plan.config, wide)
            found = outputs_of(model, inputs, bar.update)
        del model
    finally:
        bar.close()
        if show_bars:
            logging.enable_progress_bar()
    difference = max(largest_difference(found[name], expected[name]) for name in expected)
    largest = max(logits.abs().nan_to_num(0, 0, 0).max().item() for logits in expected.values())
    allowed = allowed_difference(plan, dtype, largest)
    if allowed is not None and not difference <= allowed:
        raise CheckpointError(
            f"verification failed: outputs differ from the source's by up to {difference:.3g}, where {allowed:.3g} is "
            f"allowed. {folder} was not published: please report this with your versions of torch and transformers."
        )
    return {
        "max_difference": difference,
        "allowed": allowed,
        "largest_output": largest,
        "inputs": sorted(expected),
        "dtype": str(dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def allowed_difference(plan: Plan, dtype: torch.dtype, largest: float) -> float | None:
    if plan.deviation == 0:
        return 0.0
    if plan.rounding_only:
        return ROUNDING[dtype] * largest
    return None
