"""What a conversion says of itself: `conversion.json` for programs, the model card for people. Only facts."""

import json
import shlex
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from .errors import CheckpointError, shown
from .headers import DTYPES, strict_json
from .plan import Plan
from .write import write_text

RECORD_NAME = "conversion.json"
CARRIED_METADATA = ("license", "license_name", "license_link", "language", "pipeline_tag")


def build_record(plan: Plan, files: dict[str, dict], verification: dict | None, same_token_ids: bool | None) -> dict:
    """The record of a finished conversion. The same input and options give the same record.

    Args:
        files: of weights, with their sizes and checksums
    """
    from .. import __version__

    source = plan.source
    record = {
        "made_by": f"gated_qwen {__version__}",
        "command": command_line(plan),
        "options": plan.options,
        "largest_deviation": {"value": plan.deviation, "meaning": plan.deviation_note},
        "verification": verification,
        "same_token_ids": same_token_ids,
        "parameters": {"all": plan.total_parameters, "new": plan.new_parameters},
        "files": files,
        "tensors": {
            "new": [tensor.name for tensor in plan.tensors if tensor.is_new],
            "scaled": plan.scaled,
            "dropped": plan.dropped,
        },
        "left_out": {shown(name): reason for name, reason in plan.left_out.items()},
        "notes": list(plan.notes),
        "source": {
            "name": source.name,
            "commit": source.commit,
            "subfolder": source.subfolder,
            "files": {shard.name: shard.origin for shard in plan.shards if shard.origin},
            "index": source.index_text,
            "config.json": (source.folder / "config.json").read_bytes().decode(),
        },
    }
    if plan.record is not None:
        record["source"]["record"] = plan.record
    return record


def read_record(folder: Path | None) -> dict | None:
    """The record of the conversion that made this folder, or None where there is none.

    Raises:
        CheckpointError: it is damaged.
    """
    file = folder / RECORD_NAME if folder else None
    if file is None or not file.is_file():
        return None
    record = strict_json(file.read_bytes(), str(file))
    if not (isinstance(record, dict) and str(record.get("made_by")).startswith("gated_qwen ")):
        return None
    for earlier in records(record):
        source, options, tensors, files = (earlier.get(name) for name in ("source", "options", "tensors", "files"))
        whole = all(isinstance(part, dict) for part in (source, options, tensors, files)) and (
            isinstance(source.get("config.json"), str)
            and isinstance(tensors.get("new"), list)
            and (options.get("start") != "random" or isinstance(options.get("seed"), int))
            and isinstance(source.get("files"), dict)
            and isinstance(source.get("index"), str | None)
        )
        if not whole:
            raise CheckpointError(f"{file} is damaged: move it away, then it is not used.")
    return record


def records(record: dict | None) -> Iterator[dict]:
    """A record and those of the conversions before it, the latest first."""
    while isinstance(record, dict):
        yield record
        source = record.get("source")
        record = source.get("record") if isinstance(source, dict) else None


def command_line(plan: Plan) -> str:
    """The command that gives this result, with the target left open."""
    source = plan.source
    words = ["gated-qwen", plan.command, source.name, "TARGET"]
    if source.commit:
        words += ["--revision", source.commit]
    if source.subfolder:
        words += ["--subfolder", source.subfolder]
    if plan.command == "retrofit":
        words += ["--gate", plan.options["attn_gate"]]
        if plan.options["start"] is not None:
            words += ["--start", plan.options["start"]]
        if plan.options["layers"] is not None:
            words += ["--layers", ",".join(map(str, plan.options["layers"]))]
        if "seed" in plan.options:
            words += ["--seed", str(plan.options["seed"])]
    elif plan.options.get("force"):
        words.append("--force")
    return shlex.join(words)


def write_record(record: dict, folder: Path) -> None:
    write_text(folder / RECORD_NAME, json.dumps(record, indent=2, ensure_ascii=False) + "\n")


def write_card(plan: Plan, record: dict, folder: Path) -> None:
    """The model card of a retrofitted checkpoint."""
    source, config = plan.source, plan.config
    on_the_hub = "/" in source.name and source.commit is not None
    carried = {}
    if (source.folder / "README.md").is_file():
        text = (source.folder / "README.md").read_bytes().decode(errors="replace")
        with suppress(Exception):  # a card whose metadata cannot be read has none to carry
            carried = ModelCard(text).data.to_dict()
    metadata = ModelCardData(
        base_model=source.name if on_the_hub else None,
        library_name="transformers",
        tags=["gated-attention", "gated_qwen"],
        **{name: carried[name] for name in CARRIED_METADATA if name in carried},
    )
    layers = "all layers" if config.attn_gate_layers is None else f"layers {config.attn_gate_layers}"
    dtypes = sorted({DTYPES[tensor.dtype] for tensor in plan.tensors})
    base = f"[{source.name}](https://huggingface.co/{source.name})" if on_the_hub else f"`{source.name}`"
    deviation = record["largest_deviation"]
    bound = "not bounded" if deviation["value"] is None else f"{deviation['value']:g}"
    rows = {
        "source": base + (f", commit `{source.commit}`" if source.commit else ""),
        "source model type": f"`{plan.source_config.model_type}`",
        "gates": f"{config.attn_gate}, in {layers}",
        "start": f"`{plan.options['start']}`" if plan.options["start"] else "none: the gates are those of the source",
        "`attn_gate_scale`": f"{config.attn_gate_scale:g}",
        "largest deviation from the source": f"{bound} ({deviation['meaning']})",
        "verification": verification_in_words(record),
        "parameters": f"{plan.total_parameters:,}, of them {plan.new_parameters:,} new",
        "dtype": ", ".join(dtypes),
        "made by": f"{record['made_by']}: `{record['command']}`",
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    kept = "\n\nThe source's own model card is kept as `README.source.md`." if "README.source.md" in plan.files else ""
    text = f"""---
{metadata.to_yaml()}
---

# {source.name.rpartition("/")[2]} with {config.attn_gate} attention gates

{base} with output gates put onto its attention ([arXiv 2505.06708](https://arxiv.org/abs/2505.06708)) by
`gated_qwen`. {describe_start(plan)}

| | |
|---|---|
{table}

The details are in `conversion.json`.{kept}

## Use

```python
import gated_qwen
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("PATH_OR_ID")
tokenizer = AutoTokenizer.from_pretrained("PATH_OR_ID")
```
"""
    write_text(folder / "README.md", str(ModelCard(text)))


def describe_start(plan: Plan) -> str:
    if plan.options["start"] == "random":
        return "The new gates start at small random values, so the model no longer computes what its source does."
    if plan.rounding_only:
        return "The gates are those of the source, in another form: the model computes what its source does."
    return (
        "The new gates are at their start and change nothing yet: the model computes what its source does. Further "
        "training has to move them."
    )


def verification_in_words(record: dict) -> str:
    verification = record["verification"]
    tokens = {True: "; same token ids", False: "; **other token ids**", None: ""}[record["same_token_ids"]]
    if verification is None:
        return "not run" + tokens
    return (
        f"largest difference {verification['max_difference']:.3g}, of {verification['dtype']} outputs on "
        + "; ".join(verification["inputs"])
        + tokens
    )
