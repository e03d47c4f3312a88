"""Gates onto a model that has none, in some layers, or of the other kind, without changing what it computes.

A zero gate alone halves the attention output, since sigmoid(0) = 1/2. Two starts are exact:

    scale   g_proj zero, attn_gate_scale 2: the gate's factor is 2 * 1/2 = 1 in every dtype, no tensor changes
    fold    g_proj zero, attn_gate_scale 1, o_proj's weight doubled: exact in fp32 and bf16 (for attention outputs that
            are zero or at least 2^-125). In fp16, halving an attention output below 2^-13 loses its last bit; how far
            that can reach is computed and recorded

Both rest on powers of two only moving a number's exponent. `random` starts with small random gates, whose factors are
near 1, and changes the function. Gates that the source already has keep their values; a headwise one becomes
elementwise by repeating its rows head_dim times.
"""

import math
from dataclasses import replace

from transformers import PreTrainedConfig

from ..configuration import GatedQwenConfig
from .checkpoint import Checkpoint, open_checkpoint
from .convert import carry_out, finish_retrofit
from .errors import CheckpointError
from .families import gated_config, read_config, tokenizer_class
from .layouts import group_rows
from .plan import (
    Output,
    Plan,
    check_plan,
    check_tensors,
    copy_of,
    expected_shapes,
    new_tensor,
    other_files,
    rows_of,
    shards_of,
)
from .reader import Reader, check_factor, same_values

STARTS = ("scale", "fold", "random")
SOURCE_CARD = "README.source.md"

# Half the spacing of fp16 numbers below 2^-14.
HALF_SUBNORMAL = 2.0**-25


def gate_fields(
    source: PreTrainedConfig, attn_gate: str, start: str, layers: list[int] | None, where: str
) -> tuple[dict, list[int]]:
    """The gate's fields of the target's config, and the layers that get a new gate.

    Raises:
        CheckpointError: the source has gates that this would remove or cannot express, or has them all already.
        ValueError: an argument is not one of those allowed.
    """
    if attn_gate not in ("headwise", "elementwise"):
        raise ValueError(f"`attn_gate` must be 'headwise' or 'elementwise', got {attn_gate!r}.")
    if start not in STARTS:
        raise ValueError(f"`start` must be one of {', '.join(map(repr, STARTS))}, got {start!r}.")
    everything = list(range(source.num_hidden_layers))
    wanted = everything if layers is None else sorted(set(layers))
    if not wanted or not set(wanted) <= set(everything):
        raise ValueError(f"`layers` must be between 0 and {len(everything) - 1}, counted from 0, got {layers}.")
    gated = []
    if isinstance(source, GatedQwenConfig):
        gated = [layer for layer in everything if source.is_gated_layer(layer)]
    if not set(gated) <= set(wanted):
        lost = sorted(set(gated) - set(wanted))
        raise CheckpointError(f"{where}: layers {lost} have gates already: name them in `layers` too, or strip them.")
    new = [layer for layer in wanted if layer not in gated]
    if gated and (source.attn_gate, attn_gate) == ("elementwise", "headwise"):
        raise CheckpointError(f"{where}: its elementwise gates cannot be made headwise: strip them first.")
    if not new and source.attn_gate == attn_gate:
        raise CheckpointError(f"{where}: it has {attn_gate} gates in all these layers already: nothing to do.")
    fields = {
        "attn_gate": attn_gate,
        "attn_gate_scale": {"scale": 2.0, "fold": 1.0, "random": 2.0}[start] if new else source.attn_gate_scale,
        "attn_gate_layers": None if wanted == everything else wanted,
    }
    return fields, new


def output_factors(source: PreTrainedConfig, target: GatedQwenConfig, new: list[int], start: str, where: str) -> dict:
    """By layer, what o_proj's weight is multiplied by so that the layer's function stays; layers at 1 are left out.

    Raises:
        CheckpointError: a factor is not a power of two, so that the product would be rounded.
    """
    factors = {layer: 2 / target.attn_gate_scale for layer in new if start != "random"}
    if isinstance(source, GatedQwenConfig):
        for layer in range(source.num_hidden_layers):
            if source.is_gated_layer(layer):
                factors[layer] = source.attn_gate_scale / target.attn_gate_scale
    for factor in factors.values():
        if math.frexp(factor)[0] != 0.5:
            raise CheckpointError(
                f"{where}: attn_gate_scale {source.attn_gate_scale:g} cannot become {target.attn_gate_scale:g} "
                "exactly, since their ratio is not a power of two: strip the gates first."
            )
    return {layer: factor for layer, factor in factors.items() if factor != 1}


def plan_retrofit(
    source,
    attn_gate: str = "headwise",
    *,
    start: str = "scale",
    seed: int = 0,
    layers: list[int] | None = None,
    revision: str | None = None,
    subfolder: str | None = None,
    token=None,
    headers_only: bool = True,
) -> Plan:
    """What [`retrofit_checkpoint`] would write, from the source's headers alone. Arguments as there.

    Args:
        headers_only: `False` also reads the weights that the conversion rests on, as it does before it writes: those
            to be scaled, and an lm_head beside tied embeddings. Of a Hub id, `True` fetches no weights.

    Raises:
        CheckpointError, OSError: as [`retrofit_checkpoint`].
    """
    checkpoint = open_checkpoint(
        source, revision=revision, subfolder=subfolder, headers_only=headers_only, token=token
    )
    where = checkpoint.where()
    source_config = read_config(checkpoint.fields, where)
    fields, new = gate_fields(source_config, attn_gate, start, layers, where)
    prefix = "model." if any(name.startswith("model.") for name in checkpoint.tensors) else ""
    config = gated_config(source_config, where, default_head="ForCausalLM" if prefix else "Model", **fields)
    keep_tokenizer(config, source_config)
    factors = output_factors(source_config, config, new, start, where)

    packed = getattr(source_config, "_is_released", False) and source_config.attn_gate is not None
    has_gates = isinstance(source_config, GatedQwenConfig) and not packed
    known = known_names(config, prefix, source_config if has_gates else None)
    dropped = check_tensors(checkpoint, known)
    notes = settle_tied(checkpoint, config, dropped, headers_only)

    outputs, scaled = [], {}
    for file in dict.fromkeys(tensor.file for tensor in checkpoint.tensors.values()):
        tensors = [t for t in checkpoint.tensors.values() if t.file == file and t.name not in dropped]
        outputs.append([output for t in tensors for output in convert(t, source_config, config, factors, packed)])
    for output in (output for file in outputs for output in file):
        factor = getattr(output.parts[0], "factor", 1)
        if factor != 1:
            scaled[output.name] = factor

    gates = []
    random = start == "random"
    for layer in new:
        module = f"{prefix}layers.{layer}.self_attn"
        query = checkpoint.tensors.get(f"{module}.q_proj.weight")
        dtype = query.dtype if query else "F32"  # a missing q_proj is refused below
        rows = config.num_attention_heads * (config.head_dim if attn_gate == "elementwise" else 1)
        name, shape = f"{module}.g_proj.weight", (rows, config.hidden_size)
        gates.append(new_tensor(name, dtype, shape, seed if random else None, config.initializer_range))
        if config.attn_gate_bias:
            gates.append(new_tensor(f"{module}.g_proj.bias", dtype, (rows,)))

    files, left_out = other_files(checkpoint)
    if "README.md" in files:
        files[SOURCE_CARD] = files.pop("README.md")
    repeated = isinstance(source_config, GatedQwenConfig) and source_config.attn_gate == "headwise" != attn_gate
    # Where all layers have their gates already, nothing starts.
    options = {"attn_gate": attn_gate, "start": start if new else None, "layers": config.attn_gate_layers}
    if random and new:
        options["seed"] = seed
    deviation, note = start_deviation(start if new else "scale", repeated)
    plan = Plan(
        command="retrofit",
        options=options,
        source=checkpoint,
        source_config=source_config,
        config=config,
        shards=shards_of(checkpoint, outputs, gates),
        files=files,
        left_out=left_out,
        dropped=dropped,
        deviation=deviation,
        deviation_note=note,
        rounding_only=repeated and not (new and random),
        notes=tuple(notes),
        scaled=scaled,
    )
    check_plan(plan)
    return plan if headers_only else settle_scaled(plan)


def keep_tokenizer(config: GatedQwenConfig, source: PreTrainedConfig) -> None:
    """Tokenizer files are copied as they are; where they name no class, the one of the source's family is meant."""
    if source.model_type != "gated_qwen" and not getattr(config, "tokenizer_class", None):
        config.tokenizer_class = tokenizer_class(source.model_type)


def known_names(config: GatedQwenConfig, prefix: str, gated: GatedQwenConfig | None) -> set[str]:
    names = set(expected_shapes(config))
    if config.tie_word_embeddings:
        names.add("lm_head.weight")
    own = set() if gated is None else {i for i in range(gated.num_hidden_layers) if gated.is_gated_layer(i)}
    return {
        name
        for name in names
        if ".self_attn.g_proj." not in name or int(name.removeprefix(prefix).split(".")[1]) in own
    }


def convert(tensor, source: PreTrainedConfig, config: GatedQwenConfig, factors: dict, packed: bool) -> list[Output]:
    """The tensors that come of one tensor of the source."""
    module, _, kind = tensor.name.rpartition(".")
    if packed and module.endswith("self_attn.q_proj"):
        query_rows, gate_rows = group_rows(source)
        rows = query_rows + gate_rows
        if not tensor.shape or tensor.shape[0] != source.num_key_value_heads * rows:
            return [copy_of(tensor)]  # refused for its shape
        starts = [group * rows for group in range(source.num_key_value_heads)]
        query = rows_of(tensor, tensor.name, [(start, start + query_rows) for start in starts])
        gate = [(start + query_rows, start + rows) for start in starts]
        gate_name = f"{module.removesuffix('q_proj')}g_proj.{kind}"
        return [query, repeat_rows(tensor, gate_name, gate, source, config)]
    if module.endswith("self_attn.g_proj") and source.attn_gate != config.attn_gate and tensor.shape:
        return [repeat_rows(tensor, tensor.name, [(0, tensor.shape[0])], source, config)]
    if module.endswith("self_attn.o_proj") and kind == "weight":
        layer = int(module.split(".")[-3])
        return [copy_of(tensor, factors.get(layer, 1.0))]
    return [copy_of(tensor)]


def repeat_rows(tensor, name: str, ranges: list, source: GatedQwenConfig, config: GatedQwenConfig) -> Output:
    if source.attn_gate == config.attn_gate:
        return rows_of(tensor, name, ranges)
    single = [(row, row + 1) for first, last in ranges for row in range(first, last)]
    return rows_of(tensor, name, single, repeat=config.head_dim)


def settle_tied(checkpoint: Checkpoint, config: GatedQwenConfig, dropped: dict, headers_only: bool) -> list[str]:
    """Decide what becomes of an lm_head beside tied embeddings: dropped where it says nothing new, else untied.

    That is what transformers makes of such a checkpoint. Changes `config` and `dropped`; returns what to tell.
    """
    if not config.tie_word_embeddings or "lm_head.weight" not in checkpoint.tensors:
        return []
    head = checkpoint.tensors["lm_head.weight"]
    embeddings = checkpoint.tensors.get("model.embed_tokens.weight")
    if embeddings is None:
        return []
    pickle = checkpoint.pickles.get(head.file)
    if head.file == embeddings.file and pickle and pickle.are_one(head.name, embeddings.name):
        dropped[head.name] = "the tied embeddings under a second name"
        return []
    if headers_only:
        dropped[head.name] = "a copy of the tied embeddings"
        return ["lm_head.weight is taken for a copy of the tied embeddings; the conversion compares them."]
    with Reader(checkpoint) as reader:
        if same_values(reader, head, embeddings):
            dropped[head.name] = "a copy of the tied embeddings"
            return []
    config.tie_word_embeddings = False
    return [
        "tie_word_embeddings is true, but lm_head.weight differs from the embeddings: transformers does not tie such "
        "weights, so both come through and tie_word_embeddings becomes false."
    ]


def start_deviation(start: str, repeated: bool) -> tuple[float | None, str]:
    if start == "random":
        return None, "each new gate multiplies its head's output by a factor between 0 and 2, near 1 at the start"
    if repeated:
        return None, "none but rounding: the gate's logits come from a wider matrix product of the same rows"
    return 0.0, "the logits are those of the source, bit for bit"


def settle_scaled(plan: Plan) -> Plan:
    """Read the weights that are to be scaled: refuse what would be rounded, and bound what fp16 can lose running."""
    if not plan.scaled:
        return plan
    bound = 0.0
    with Reader(plan.source) as reader:
        for name, factor in plan.scaled.items():
            tensor = plan.source.tensors[name]
            rows = check_factor(reader, tensor, factor)
            if tensor.dtype == "F16":
                bound = max(bound, rows * factor * HALF_SUBNORMAL)
    if bound == 0 or plan.deviation is None:
        return plan
    note = "the most by which halving small fp16 attention outputs can change an attention block's output"
    return replace(plan, deviation=bound, deviation_note=note)


def retrofit_checkpoint(
    source,
    target,
    attn_gate: str = "headwise",
    *,
    start: str = "scale",
    seed: int = 0,
    layers: list[int] | None = None,
    link: bool = False,
    verify: bool | None = None,
    restart: bool = False,
    revision: str | None = None,
    subfolder: str | None = None,
    token: str | bool | None = None,
    progress: bool = False,
) -> dict:
    """Put output gates onto a Llama, Mistral, Qwen2, Qwen3 or gated_qwen checkpoint, and save it as a gated_qwen one.

    Every tensor of the source comes through byte for byte (but for o_proj under `start="fold"`), as do the tokenizer,
    the chat template, the generation config and other files. Nothing of the source is run or written to.

    Args:
        source (`str` or `Path`): a checkpoint folder or Hub id; safetensors, or pickles that hold plain tensors only
        target (`str` or `Path`): a folder that does not exist yet. It is prepared in `TARGET.partial` and put in place
            by one rename; interrupted, another call with the same arguments goes on from there.
        attn_gate (`str`, defaults to `"headwise"`): or `"elementwise"`
        start (`str`, defaults to `"scale"`): `"scale"` and `"fold"` leave the function as it is, exactly (the module's
            docstring says how, and what fp16 can lose under fold); `"random"` does not
        seed (`int`, defaults to 0): of `start="random"`; each gate's values depend on it and on the tensor's name
        layers (`list[int]`, *optional*): the layers that have a gate in the result, counted from 0. `None`: all
        link (`bool`, defaults to `False`): share the data of files that do not change with the source, by reflink or
            else by **hard link**: then a program that edits one of these files in place changes both checkpoints.
            Programs that replace files, as `save_pretrained` does, do not.
        verify (`bool`, *optional*): whether to load source and target and compare their outputs before the target is
            put in place. `None`: for models of up to 1e9 parameters
        restart (`bool`, defaults to `False`): discard what an interrupted call left
        revision, subfolder, token: of a Hub id, as in `from_pretrained`
        progress (`bool`, defaults to `False`): show a progress bar

    Returns:
        `dict`: what was done, as it is saved in the target's `conversion.json`.

    Raises:
        ValueError: an argument is not allowed.
        CheckpointError: (a ValueError) the source is damaged, disagrees with its config or cannot be expressed, or the
            target is taken; one line names the file, the tensor and the way out. Nothing was written.
        OSError: a file is missing, or reading or writing failed.
    """
    plan = plan_retrofit(
        source,
        attn_gate,
        start=start,
        seed=seed,
        layers=layers,
        revision=revision,
        subfolder=subfolder,
        token=token,
        headers_only=False,
    )
    return carry_out(
        plan,
        target,
        link=link,
        verify_outputs=verify,
        restart=restart,
        progress=progress,
        finish=finish_retrofit,
    )
