"""Plans and results in words, for the command line."""

from .plan import Plan
from .record import deviation_in_words, verification_in_words


def size(nbytes: int) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.4g} TB"


def describe_plan(plan: Plan, link: bool) -> str:
    """What a conversion would do; `--dry-run` prints it."""
    source, config = plan.source, plan.config
    commit = f", commit {source.commit}" if source.commit else ""
    lines = [f"source      {source.name}{commit}: {plan.source_config.model_type}, {len(source.tensors)} tensors"]
    if plan.command == "retrofit":
        start = plan.options["start"] or "none (no new gates)"
        layers = "all" if config.attn_gate_layers is None else ", ".join(map(str, config.attn_gate_layers))
        lines += [
            f"gates       {config.attn_gate}, layers: {layers} (of {config.num_hidden_layers})",
            f"start       {start}, attn_gate_scale {config.attn_gate_scale:g}",
        ]
    else:
        lines.append(f"target      {config.model_type}")
    lines.append(f"deviation   {deviation_in_words(plan.deviation, plan.deviation_note)}")
    new = f", of them {plan.new_parameters:,} new" if plan.new_parameters else ""
    lines.append(f"parameters  {plan.total_parameters:,}{new}")
    for shard in plan.shards:
        scaled = sum(getattr(tensor.parts[0], "factor", 1) != 1 for tensor in shard.tensors if tensor.parts)
        if shard.source is not None:
            how = f"{'link to' if link else 'copy of'} {shard.source.name}"
        elif all(tensor.is_new for tensor in shard.tensors):
            how = f"new: {len(shard.tensors)} tensors"
        else:
            how = f"rewritten{f', {scaled} tensors scaled' if scaled else ''}"
        lines.append(f"file        {shard.name}  {size(shard.nbytes)}  {how}")
    linked = sum(shard.nbytes for shard in plan.shards if link and shard.source)
    lines.append(f"size        {size(plan.nbytes)}, of them {size(plan.nbytes - linked)} written")
    for name, original in sorted(plan.files.items()):
        lines.append(f"file        {name}" + (f"  (was {original})" if name != original else ""))
    lines += [f"left out    {name}: {reason}" for name, reason in sorted(plan.left_out.items())]
    lines += [f"dropped     {name}: {reason}" for name, reason in plan.dropped.items() if reason != "a gate"]
    lines += [f"note        {note}" for note in plan.notes]
    return "\n".join(lines)


def describe_result(record: dict, target) -> str:
    """What a conversion did."""
    parameters, deviation = record["parameters"], record["largest_deviation"]
    linked = sum(file.get("linked", False) for file in record["files"].values())
    written = sum(file["size"] for file in record["files"].values() if not file.get("linked"))
    verified = verification_in_words(record)
    lines = [
        f"wrote       {target}",
        f"weights     {len(record['files'])} file{'s' * (len(record['files']) != 1)}, {size(written)} written"
        + (f", {linked} linked to the source" if linked else ""),
        f"parameters  {parameters['all']:,}" + (f", of them {parameters['new']:,} new" if parameters["new"] else ""),
        f"deviation   {deviation_in_words(deviation['value'], deviation['meaning'])}",
        f"verified    {verified}" + ("" if record["verification"] else " (--verify loads both models and compares)"),
    ]
    lines += [f"left out    {name}: {reason}" for name, reason in sorted(record["left_out"].items())]
    lines += [f"note        {note}" for note in record["notes"]]
    return "\n".join(lines)
