"""The model card of a checkpoint, made from facts that lie beside it: its config, its headers, the record of the
conversions that made it, figures that were measured, and its source's own card."""

import math
import re
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from ..configuration import GatedQwenConfig
from .checkpoint import Checkpoint, open_checkpoint
from .errors import CheckpointError, shown
from .families import read_config
from .head_major import HEAD_MAJOR, read_head_major_config
from .headers import DTYPES, strict_json
from .record import deviation_in_words, read_record, records, verification_in_words

CARRIED_METADATA = ("license", "license_name", "license_link", "language", "pipeline_tag")
CARD_NAME, SOURCE_CARD, MEASURED = "README.md", "README.source.md", "measurements.json"
PLACEHOLDER = "PATH_OR_ID"
SEAL = "<!-- made by gated_qwen {}: a card in which something is changed is kept -->"
TO_FILL_IN = "[More Information Needed]"

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def card_of(
    folder: Path,
    repo_id: str | None = None,
    *,
    trained: bool = False,
    with_code: bool = False,
    record: dict | None = None,
    measured: bool = True,
    tags: list[str] | None = None,
) -> str:
    """The text of a card.

    Args:
        folder: the checkpoint; only its headers and small files are read
        repo_id: where it will be loaded from; None leaves a placeholder
        trained: whether its weights are others than those that its record tells of
        with_code: whether it brings its own code, so that it loads without this package
        record: of the conversion behind it, where that does not lie in the folder
        measured: whether to show the figures that were measured
        tags: further ones
    """
    checkpoint = open_checkpoint(folder)
    beside = read_record(folder)
    record = record or beside
    config = _config(checkpoint)
    name = _title(folder, record, repo_id)
    base = next((s["name"] for s in _sources(record) if "/" in s["name"] and s["commit"]), None)
    own_tags = ["gated-attention", "gated_qwen"] if isinstance(config, GatedQwenConfig) else ["gated-attention"]
    metadata = ModelCardData(
        base_model=base,
        library_name="transformers",
        tags=list(dict.fromkeys([*own_tags, *(tags or [])])),
        **_carried(folder),
    )
    rows = {
        **_of_the_record(record, trained),
        **_of_the_model(checkpoint, config, record),
        **(_measured(folder) if measured else {}),
    }
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    pointers = []
    if beside is not None:
        pointers.append("The details are in `conversion.json`.")
    if (folder / SOURCE_CARD).is_file():
        pointers.append(f"The source's own model card is kept as `{SOURCE_CARD}`.")
    details = "\n\n" + "\n\n".join(pointers) if pointers else ""
    text = f"""---
{metadata.to_yaml()}
---

# {name}

{_introduction(record, config, trained)}

| | |
|---|---|
{table}{details}

## Use

{_usage(folder, config, repo_id or PLACEHOLDER, with_code)}
"""
    text = str(ModelCard(text)).rstrip()
    return f"{text}\n\n{SEAL.format(_digest(text))}\n"


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:16]


def is_as_generated(text: str) -> bool:
    """Whether nobody has written in a card since it was made; transformers' empty template counts as such."""
    body, _, seal = text.rstrip().rpartition("\n\n")
    return seal == SEAL.format(_digest(body)) or ("# Model Card for Model ID" in text and text.count(TO_FILL_IN) > 20)


def _sources(record: dict | None) -> list[dict]:
    return [earlier["source"] for earlier in records(record)]


def _config(checkpoint: Checkpoint):
    """Of a family that is known here, or None."""
    with suppress(CheckpointError):
        if checkpoint.fields.get("model_type") in HEAD_MAJOR:
            return read_head_major_config(checkpoint.fields, "")[0]
        return read_config(checkpoint.fields, "")
    return None


def _carried(folder: Path) -> dict:
    for file in (folder / SOURCE_CARD, folder / CARD_NAME):
        if file.is_file():
            text = file.read_bytes().decode(errors="replace")
            with suppress(Exception):  # a card whose metadata cannot be read has none to carry
                fields = ModelCard(text).data.to_dict() if text.startswith("---") else {}
                carried = {name: _metadatum(fields.get(name)) for name in CARRIED_METADATA}
                return {name: value for name, value in carried.items() if value}
    return {}


def _metadatum(value) -> str | list[str] | None:
    """A word or a list of words; YAML takes Norwegian's `no` for a truth value."""
    if value is False:
        return "no"
    if isinstance(value, list) and all(isinstance(entry, str | bool) for entry in value):
        return [_metadatum(entry) for entry in value if entry is not True]
    return shown(value) if isinstance(value, str) else None


def _plain(name: str) -> str:
    """A name as text of a card: in one line, without what Markdown takes for itself."""
    return re.sub(r"[|`<>\[\]]", "_", shown(name))


def _title(folder: Path, record: dict | None, repo_id: str | None) -> str:
    if record is None:
        return _plain((repo_id or folder.name).rpartition("/")[2])
    source = _plain(record["source"]["name"].rpartition("/")[2])
    if record["command"].startswith("gated-qwen retrofit"):
        return f"{source} with {record['options'].get('attn_gate')} attention gates"
    to = record["options"].get("to", "native")
    return f"{source} in the {to} layout"


def _place(source: dict) -> str:
    name = _plain(source["name"])
    return f"[{name}](https://huggingface.co/{name})" if source["commit"] and "/" in name else f"`{name}`"


PAPER = "[arXiv 2505.06708](https://arxiv.org/abs/2505.06708)"


def _introduction(record: dict | None, config, trained: bool) -> str:
    if record is None:
        gated = isinstance(config, GatedQwenConfig) and config.attn_gate is not None
        what = f"output gates on its attention ({PAPER})" if gated else "softmax attention without gates"
        return f"A causal decoder with {what}, of the `gated_qwen` family."
    base = _place(record["source"])
    if not record["command"].startswith("gated-qwen retrofit"):
        since = " Its weights were changed since." if trained else ""
        return f"{base} in another layout of its weights, written by `gated_qwen`: the same model ({PAPER}).{since}"
    start = record["options"].get("start")
    if trained:
        state = "The weights were trained, or otherwise changed, since: what the table says of the start is of before."
    elif start == "random":
        state = "The new gates start at small random values, so the model no longer computes what its source does."
    elif start is None:
        state = "The gates are those of the source, in another form: the model computes what its source does."
    else:
        state = (
            "The new gates are at their start and change nothing yet: the model computes what its source does. "
            "Further\ntraining has to move them."
        )
    return f"{base} with output gates put onto its attention ({PAPER}) by\n`gated_qwen`. {state}"


def _of_the_record(record: dict | None, trained: bool) -> dict[str, str]:
    if record is None:
        return {}
    source, deviation = record["source"], record["largest_deviation"]
    fields = strict_json(source["config.json"].encode(), "the record")
    commit = f", commit `{source['commit']}`" if source["commit"] else ""
    rows = {
        "source": _place(source) + commit,
        "source model type": f"`{shown(fields.get('model_type'))}`" if isinstance(fields, dict) else "unknown",
    }
    if record["command"].startswith("gated-qwen retrofit"):
        start = record["options"].get("start")
        rows["start"] = f"`{start}`" if start else "none: the gates are those of the source"
    before = ", before the weights were changed" if trained else ""
    return rows | {
        f"largest deviation from the source{before}": deviation_in_words(deviation["value"], deviation["meaning"]),
        f"verification{before}": verification_in_words(record),
        "made by": f"{record['made_by']}: `{_plain(record['command'])}`",
    }


def _of_the_model(checkpoint: Checkpoint, config, record: dict | None) -> dict[str, str]:
    rows = {}
    if isinstance(config, GatedQwenConfig):
        layers = "all layers" if config.attn_gate_layers is None else f"layers {config.attn_gate_layers}"
        rows["gates"] = f"{config.attn_gate}, in {layers}" if config.attn_gate else "none"
        rows["`attn_gate_scale`"] = f"{config.attn_gate_scale:g}"
    else:
        rows["model type"] = f"`{shown(checkpoint.fields.get('model_type'))}`"
    tensors = checkpoint.tensors.values()
    number = sum(math.prod(tensor.shape) for tensor in tensors)
    gates = sum(math.prod(tensor.shape) for tensor in tensors if ".self_attn.g_proj." in tensor.name)
    new = record["parameters"].get("new") if record else None
    rows["parameters"] = (
        f"{number:,}" + (f", of them {gates:,} of gates" if gates else "") + (f" ({new:,} new)" if new else "")
    )
    rows["dtype"] = ", ".join(sorted({DTYPES.get(tensor.dtype, tensor.dtype) for tensor in tensors}))
    return rows


def _measured(folder: Path) -> dict[str, str]:
    """Figures in `measurements.json`: names to numbers or lines of text."""
    file = folder / MEASURED
    if not file.is_file():
        return {}
    figures = strict_json(file.read_bytes(), str(file))
    if not isinstance(figures, dict) or not all(isinstance(v, int | float | str) for v in figures.values()):
        raise CheckpointError(f"{file} does not map names to numbers or lines of text: correct it, or move it away.")
    return {shown(name): f"{v:.4g}" if isinstance(v, float) else shown(v) for name, v in figures.items()}


def _usage(folder: Path, config, place: str, with_code: bool) -> str:
    ours = isinstance(config, GatedQwenConfig)
    head = next(iter(getattr(config, "architectures", None) or ()), "")
    auto = {
        "ForSequenceClassification": "AutoModelForSequenceClassification",
        "ForTokenClassification": "AutoModelForTokenClassification",
        "ForQuestionAnswering": "AutoModelForQuestionAnswering",
        "Model": "AutoModel",
    }
    auto_class = next((name for ending, name in auto.items() if head.endswith(ending)), "AutoModelForCausalLM")
    trust = ", trust_remote_code=True" if ours and with_code else ""
    tokenized = any((folder / name).is_file() for name in TOKENIZER_FILES)
    lines = ["```python"]
    if ours and not with_code:
        lines.append("import gated_qwen")
    lines.append(f"from transformers import {auto_class}" + (", AutoTokenizer" if tokenized else ""))
    lines += ["", f'model = {auto_class}.from_pretrained("{place}"{trust})']
    if tokenized:
        lines.append(f'tokenizer = AutoTokenizer.from_pretrained("{place}"{trust})')
        if auto_class == "AutoModelForCausalLM":
            lines += [
                'inputs = tokenizer("Once upon a time", return_tensors="pt")',
                "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=20)[0]))",
            ]
    lines.append("```")
    if ours and with_code:
        lines += [
            "",
            "`trust_remote_code=True` runs the Python files of this repository, which need transformers alone. With "
            "the\npackage `gated_qwen` installed and imported, leave it out: its own classes are used.",
        ]
    elif ours:
        lines += ["", "It needs the package `gated_qwen`, which registers the model with transformers."]
    return "\n".join(lines)
