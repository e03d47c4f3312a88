"""What a conversion says of itself, for programs: `conversion.json`. `card.py` says it for people."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from .errors import CheckpointError, shown
from .headers import strict_json
from .plan import Plan, Shifted
from .write import write_text

RECORD_NAME = "conversion.json"


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
            "shifted": {
                output.name: part.tensor.dtype
                for output in plan.tensors
                for part in output.parts
                if isinstance(part, Shifted)
            },
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
    if not all(_is_whole(earlier) for earlier in records(record)):
        raise CheckpointError(f"{file} is damaged: move it away, then it is not used.")
    return record


def _is_whole(record: dict) -> bool:
    """Whether a record has what this package reads of it."""
    names = ("source", "options", "tensors", "files", "largest_deviation", "parameters")
    parts = source, options, tensors, files, deviation, parameters = [record.get(name) for name in names]
    if not all(isinstance(part, dict) for part in parts):
        return False
    verification, scaled, dtypes = record.get("verification"), tensors.get("scaled"), tensors.get("shifted", {})
    return (
        all(isinstance(record.get(name), str) for name in ("made_by", "command"))
        and all(isinstance(source.get(name), str) for name in ("name", "config.json"))
        and all(isinstance(source.get(name), str | None) for name in ("commit", "subfolder", "index"))
        and isinstance(source.get("files"), dict)
        and _is_list_of_text(tensors.get("new"))
        and isinstance(scaled, dict)
        and all(re.search(r"layers\.\d+\.", name) and _is_number(factor) for name, factor in scaled.items())
        and isinstance(dtypes, dict)
        and all(dtype in ("F64", "F32", "F16", "BF16") for dtype in dtypes.values())
        and all(_is_of_a_file(entry) for entry in files.values())
        and (options.get("start") != "random" or isinstance(options.get("seed"), int))
        and isinstance(deviation.get("value"), int | float | None)
        and isinstance(deviation.get("meaning"), str)
        and isinstance(parameters.get("new"), int)
        and isinstance(record.get("same_token_ids"), bool | None)
        and (verification is None or _is_verification(verification))
    )


def _is_number(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value != 0


def _is_list_of_text(value) -> bool:
    return isinstance(value, list) and all(isinstance(entry, str) for entry in value)


def _is_verification(value) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("max_difference"), int | float)
        and isinstance(value.get("dtype"), str)
        and _is_list_of_text(value.get("inputs"))
    )


def _is_of_a_file(entry) -> bool:
    """Whether this is what a record says of a file of weights."""
    if not (isinstance(entry, dict) and isinstance(entry.get("size"), int)):
        return False
    crcs = entry.get("crc32", {})
    return isinstance(crcs, dict) and all(k.isdecimal() and isinstance(v, str) for k, v in crcs.items())


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
    if plan.command == "export":
        words += ["--to", plan.options["to"]]
        if plan.options["linear_layer"]:
            words.append("--linear-layer")
    if plan.options.get("force"):
        words.append("--force")
    return shlex.join(words)


def write_record(record: dict, folder: Path) -> None:
    write_text(folder / RECORD_NAME, json.dumps(record, indent=2, ensure_ascii=False) + "\n")


def deviation_in_words(value: float | None, meaning: str) -> str:
    if value is None:
        return meaning if meaning.startswith("none but rounding") else f"not bounded: {meaning}"
    return f"{value:g}: {meaning}"


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
