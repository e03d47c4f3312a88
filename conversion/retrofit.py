"""Gates onto a model that has none, in some layers, or of the other kind, without changing what it computes.

A zero gate alone halves the attention output, since sigmoid(0) = 1/2. Two starts are exact:

    scale   g_proj zero, attn_gate_scale 2: the gate's factor is 2 * 1/2 = 1 in every dtype, no tensor changes
    fold    g_proj zero, attn_gate_scale 1, o_proj's weight doubled: exact in fp32 and bf16 (for attention outputs that
            are zero or at least 2^-125). In fp16, halving an attention output below 2^-13 loses its last bit; how far
            that can reach is computed and recorded

Both rest on powers of two only moving a number's exponent. `random` starts with gates as in an untrained model, whose
factors may be anywhere between 0 and 2, and changes the function. Gates that the source already has keep their values;
a headwise one becomes elementwise by repeating its rows head_dim times.
"""

import math
from dataclasses import replace

from transformers import PreTrainedConfig

from ..configuration import GatedQwenConfig
from .convert import carry_out, finish_with_card
from .errors import CheckpointError
from .families import gated_config, tokenizer_class
from .headers import DTYPES, Tensor
from .plan import Output, Plan, check_plan, copy_of, expected_shapes, new_tensor, other_files, rows_of, shards_of
from .reader import Reader, check_factor
from .record import RECORD_NAME
from .source import Source, open_source, prefix_of, renamed

STARTS = ("scale", "fold", "random")

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
    if layers is not None and not (
        isinstance(layers, (list, tuple, set, range)) and all(type(layer) is int for layer in layers)
    ):
        raise ValueError(f"`layers` must be a list of whole numbers, counted from 0, got {layers!r}.")
    everything = list(range(source.num_hidden_layers))
    wanted = everything if layers is None else sorted(set(layers))
    if not wanted or not set(wanted) <= set(everything):
        odd = next(iter(sorted(set(wanted) - set(everything), reverse=True)), "none")
        raise ValueError(f"`layers` must be between 0 and {len(everything) - 1}, counted from 0, got {odd}.")
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
    origin = open_source(source, revision=revision, subfolder=subfolder, token=token, headers_only=headers_only)
    checkpoint, where = origin.checkpoint, origin.checkpoint.where()
    fields, new = gate_fields(origin.gated, attn_gate, start, layers, where)
    check_seed(seed)
    config = gated_config(origin.gated, where, **fields)
    keep_tokenizer(config, origin.config)
    factors = output_factors(origin.gated, config, new, start, where)

    prefix = prefix_of(expected_shapes(config))

    def rename(output: Output) -> Output:
        return replace(output, name=renamed(output.name, origin.prefix, prefix))

    outputs = [
        [rename(output) for tensor in tensors for output in convert(tensor, origin, config, factors)]
        for tensors in origin.tensors_by_file()
    ]
    scaled = {}
    for output in (output for file in outputs for output in file):
        factor = getattr(output.parts[0], "factor", 1) if output.parts else 1
        if factor != 1:
            scaled[output.parts[0].tensor.name] = factor

    gates = []
    random = start == "random"
    for layer in new:
        module = f"{prefix}layers.{layer}.self_attn"
        dtype = checkpoint.tensors[f"{origin.prefix}layers.{layer}.self_attn.q_proj.weight"].dtype
        rows = config.num_attention_heads * (config.head_dim if attn_gate == "elementwise" else 1)
        name, shape = f"{module}.g_proj.weight", (rows, config.hidden_size)
        gates.append(new_tensor(name, dtype, shape, seed if random else None, config.initializer_range))
        if config.attn_gate_bias:
            gates.append(new_tensor(f"{module}.g_proj.bias", dtype, (rows,)))

    files, left_out = other_files(checkpoint)
    keep_source_files(files, left_out, origin.record)
    repeated = origin.gated.attn_gate == "headwise" != attn_gate
    # Where all layers have their gates already, nothing starts.
    options = {"attn_gate": attn_gate, "start": start if new else None, "layers": config.attn_gate_layers}
    if random and new:
        options["seed"] = seed
    deviation, note = start_deviation(start if new else "scale", repeated)
    plan = Plan(
        command="retrofit",
        options=options,
        source=checkpoint,
        source_config=origin.config,
        config=config,
        shards=shards_of(checkpoint, outputs, gates),
        files=files,
        left_out=left_out,
        dropped=origin.dropped,
        deviation=deviation,
        deviation_note=note,
        rounding_only=repeated and not (new and random),
        notes=tuple(origin.notes),
        record=origin.record,
        scaled=scaled,
    )
    check_plan(plan)
    return plan if headers_only else settle_scaled(plan)


def check_seed(seed) -> None:
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise ValueError(f"`seed` must be a whole number, got {seed!r}.")


def keep_source_files(files: dict[str, str], left_out: dict[str, str], record: dict | None) -> None:
    """Find another name for what the source has under the names of our card and record, unless they are ours."""
    for name, stem, suffix in (("README.md", "README.source", ".md"), (RECORD_NAME, "conversion.source", ".json")):
        if name not in files:
            continue
        original = files.pop(name)
        if record is not None:
            left_out[name] = "of the earlier conversion, whose record is kept in this one's"
            continue
        place = stem + suffix
        while place in files:
            stem += "_"
            place = stem + suffix
        files[place] = original


def keep_tokenizer(config: GatedQwenConfig, source: PreTrainedConfig) -> None:
    """Tokenizer files are copied as they are; where they name no class, the one of the source's family is meant."""
    if source.model_type != "gated_qwen" and not getattr(config, "tokenizer_class", None):
        config.tokenizer_class = tokenizer_class(source.model_type)


def convert(tensor: Tensor, origin: Source, config: GatedQwenConfig, factors: dict) -> list[Output]:
    """The tensors that come of one tensor of the source."""
    module, _, kind = tensor.name.rpartition(".")
    repeat = origin.gated.attn_gate == "headwise" != config.attn_gate
    if origin.packed and module.endswith("self_attn.q_proj"):
        query, gate = origin.packed_rows(tensor)
        gate_name = f"{module.removesuffix('q_proj')}g_proj.{kind}"
        return [rows_of(tensor, tensor.name, query), gate_of(tensor, gate_name, gate, config, repeat)]
    if module.endswith("self_attn.g_proj") and repeat:
        return [gate_of(tensor, tensor.name, [(0, tensor.shape[0])], config, repeat)]
    if module.endswith("self_attn.o_proj") and kind == "weight":
        return [copy_of(tensor, factors.get(int(module.split(".")[-3]), 1.0))]
    return [copy_of(tensor)]


def gate_of(tensor: Tensor, name: str, ranges: list, config: GatedQwenConfig, repeat: bool) -> Output:
    if not repeat:
        return rows_of(tensor, name, ranges)
    single = [(row, row + 1) for first, last in ranges for row in range(first, last)]
    return rows_of(tensor, name, single, repeat=config.head_dim)


def start_deviation(start: str, repeated: bool) -> tuple[float | None, str]:
    if start == "random":
        return None, "each new gate multiplies its head's output by a factor between 0 and 2"
    if repeated:
        return None, "none but rounding: the gate's logits come from a wider matrix product of the same rows"
    return 0.0, "the logits are those of the source, bit for bit"


def settle_scaled(plan: Plan) -> Plan:
    """Read the weights that are to be scaled: refuse what would be rounded, and bound what fp16 can lose running."""
    if not plan.scaled:
        return plan
    bound = 0.0
    # What the model computes in, where its config names another dtype than its file has.
    running = next((spelling for spelling, name in DTYPES.items() if str(plan.config.dtype) == f"torch.{name}"), None)
    with Reader(plan.source) as reader:
        for name, factor in plan.scaled.items():
            tensor = plan.source.tensors[name]
            rows = check_factor(reader, tensor, factor, running or tensor.dtype)
            if (running or tensor.dtype) == "F16":
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
        layers (`list[int]`, *optional*): all layers that have a gate in the result, counted from 0, those that the
            source has gates in among them. `None`: all
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
        finish=finish_with_card,
    )
