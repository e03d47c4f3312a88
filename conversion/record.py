"""What a conversion says of itself: `conversion.json` for programs, the model card for people. Only facts."""

import json
import shlex
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData, metadata_load

from .headers import DTYPES, strict_json
from .plan import Plan
from .write import RECORD_NAME

CARRIED_METADATA = ("license", "license_name", "license_link", "language", "pipeline_tag")


def build_record(plan: Plan, files: dict[str, dict], verification: dict | None) -> dict:
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
        "parameters": {"all": plan.total_parameters, "new": plan.new_parameters},
        "files": files,
        "tensors": {
            "new": [tensor.name for tensor in plan.tensors if tensor.is_new],
            "scaled": plan.scaled,
            "dropped": plan.dropped,
        },
        "left_out": plan.left_out,
        "notes": list(plan.notes),
        "source": {
            "name": source.name,
            "commit": source.commit,
            "subfolder": source.subfolder,
            "config.json": (source.folder / "config.json").read_text(),
        },
    }
    if (earlier := read_record(source.folder)) is not None:
        record["source"]["record"] = earlier
    return record


def read_record(folder: Path) -> dict | None:
    """The record of the conversion that made this folder, or None where there is none."""
    file = folder / RECORD_NAME
    if not file.is_file():
        return None
    record = strict_json(file.read_bytes(), str(file))
    return record if isinstance(record, dict) and "made_by" in record else None


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
    (folder / RECORD_NAME).write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n")


def write_card(plan: Plan, record: dict, folder: Path) -> None:
    """The model card of a retrofitted checkpoint."""
    source, config = plan.source, plan.config
    on_the_hub = "/" in source.name and source.commit is not None
    carried = {}
    if (source.folder / "README.md").is_file():
        try:
            carried = metadata_load(source.folder / "README.md") or {}
        except ValueError:  # a card whose metadata is not YAML has none to carry
            carried = {}
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
        "verification": verification_in_words(record["verification"]),
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
    ModelCard(text).save(folder / "README.md")


def describe_start(plan: Plan) -> str:
    if plan.options["start"] == "random":
        return "The new gates start at small random values, so the model no longer computes what its source does."
    if plan.rounding_only:
        return "The gates are those of the source, in another form: the model computes what its source does."
    return (
        "The new gates are at their start and change nothing yet: the model computes what its source does. Further "
        "training has to move them."
    )


def verification_in_words(verification: dict | None) -> str:
    if verification is None:
        return "not run"
    tokens = {True: "; same token ids", False: "; **other token ids**", None: ""}[verification["same_token_ids"]]
    return (
        f"largest difference {verification['max_difference']:.3g}, of {verification['dtype']} outputs on "
        + "; ".join(verification["inputs"])
        + tokens
    )
