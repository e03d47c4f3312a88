"""A gated_qwen checkpoint in the form of another family, or in the authors' own, for engines that know only that.

    qwen3_5, qwen3_next   q_proj packed by query head, [its query rows | its gate rows, one a channel]; norms minus 1
    released              q_proj packed by key/value group, as the authors' code has it
    native                this family's own layout: see `importing.py`

None of the others has `attn_gate_scale` or layers without a gate. The scale goes into o_proj's weight, which is exact
where it is a power of two. A layer without a gate gets one whose rows are zero, and o_proj doubled, since
sigmoid(0) = 1/2. A norm's weight minus 1 needs more digits than a 16-bit number has: those are written in fp32, and
engines that run in 16 bits round them.
"""

import json
from dataclasses import replace

from transformers import PreTrainedConfig

from ..configuration import GatedQwenConfig
from .convert import carry_out, finish_with_card
from .errors import CheckpointError
from .head_major import NORMS, head_major_config, layer_of, output_factors, settle_norms
from .headers import BITS, Tensor
from .importing import plan_import
from .layouts import released_config
from .plan import (
    Output,
    Part,
    Plan,
    Zeros,
    check_plan,
    copy_of,
    expected_shapes,
    new_tensor,
    other_files,
    shards_of,
    shifted,
)
from .retrofit import keep_source_files, keep_tokenizer, settle_scaled
from .source import Source, open_source, packed_shapes, prefix_of, renamed

TARGETS = {"qwen3_5": "qwen3_5_text", "qwen3_next": "qwen3_next", "released": "gated_qwen"}


def plan_export(
    source,
    to: str,
    *,
    linear_layer: bool = False,
    revision: str | None = None,
    subfolder: str | None = None,
    token=None,
    headers_only: bool = True,
) -> Plan:
    """What [`export_checkpoint`] would write, from the source's headers alone; `headers_only` as in
    `plan_retrofit`."""
    if linear_layer and to not in ("qwen3_5", "qwen3_next"):
        raise ValueError(f"`linear_layer` is of qwen3_5 and qwen3_next, and `to` is {to!r}.")
    if to == "native":
        return plan_import(source, revision=revision, subfolder=subfolder, token=token, headers_only=headers_only)
    if to not in TARGETS:
        raise ValueError(f"`to` must be one of {', '.join(map(repr, (*TARGETS, 'native')))}, got {to!r}.")
    origin = open_source(source, revision=revision, subfolder=subfolder, token=token, headers_only=headers_only)
    checkpoint, gated, where = origin.checkpoint, origin.gated, origin.checkpoint.where()
    plain = to == "released" and gated.attn_gate is None  # the authors' baseline has no gates
    factors = {} if plain else output_factors(gated, where)
    if to == "released":
        config, text = released_target(origin, where)
        expected = packed_shapes(expected_shapes(config))
    else:
        config, text = head_major_config(gated, TARGETS[to], where, linear_layer), None
        expected = expected_shapes(config)
        keep_tokenizer(config, origin.config)

    prefix = prefix_of(expected)
    outputs, scaled = [], {}
    for tensors in origin.tensors_by_file():
        outputs.append([])
        for tensor in tensors:
            name = renamed(tensor.name, origin.prefix, prefix)
            for output in converted(tensor, origin, to, factors, config):
                outputs[-1].append(replace(output, name=renamed(output.name, origin.prefix, prefix)))
            factor = factors.get(layer_of(name)) if name.endswith("self_attn.o_proj.weight") else None
            if factor is not None:
                scaled[tensor.name] = factor
            if to != "released" and name.endswith("_proj.weight") and ".self_attn." in name:
                # Here all four linears have a bias, or none.
                bias = name.removesuffix("weight") + "bias"
                absent = f"{tensor.name.removesuffix('weight')}bias" not in checkpoint.tensors
                if config.attention_bias and absent and bias in expected:
                    outputs[-1].append(new_bias(bias, tensor, origin, expected[bias]))

    new = []
    if linear_layer:
        dtype = next(tensor.dtype for tensor in checkpoint.tensors.values() if tensor.name.endswith("o_proj.weight"))
        added = {name: shape for name, shape in expected.items() if layer_of(name) == gated.num_hidden_layers}
        new = [new_tensor(name, dtype, shape) for name, shape in added.items()]

    files, left_out = other_files(checkpoint)
    keep_source_files(files, left_out, origin.record)
    deviation, note = 0.0, "the numbers are the same, in another order"
    if to != "released":
        deviation, note = None, "none but rounding: norms multiply by 1 + weight here, where they had the weight"
    plan = Plan(
        command="export",
        options={"to": to, "linear_layer": linear_layer},
        source=checkpoint,
        source_config=origin.config,
        config=config,
        config_text=text,
        shards=shards_of(checkpoint, outputs, new),
        files=files,
        left_out=left_out,
        dropped=origin.dropped,
        deviation=deviation,
        deviation_note=note,
        rounding_only=to != "released",
        notes=tuple(origin.notes),
        record=origin.record,
        scaled=scaled,
    )
    check_plan(plan, expected)
    return plan if headers_only else settle_norms(settle_scaled(plan))


def released_target(origin: Source, where: str) -> tuple[GatedQwenConfig, str]:
    """The config with a gate in every layer and no scale, and its text in the authors' form."""
    gated = origin.gated
    fields = {**gated.to_dict(), "attn_gate_scale": 1.0, "attn_gate_layers": None}
    config = GatedQwenConfig(**fields)
    if config.architectures != ["GatedQwenForCausalLM"]:
        raise CheckpointError(f"{where}: the authors' form is of causal language models, and this is another class.")
    try:
        text = json.dumps(released_config(config), indent=2, sort_keys=True) + "\n"
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}: export it --to native.") from error
    return config, text


def converted(tensor: Tensor, origin: Source, to: str, factors: dict, config: PreTrainedConfig) -> list[Output]:
    """The tensors that come of one tensor of the source."""
    module, _, kind = tensor.name.rpartition(".")
    layer, part = layer_of(tensor.name), module.rpartition(".")[2]
    attention = module.endswith(f"self_attn.{part}")
    if attention and part == "g_proj":
        return []  # beside its q_proj
    if attention and part == "q_proj" and not (to == "released" and config.attn_gate is None):
        return [packed(tensor, origin, to, layer, kind)]
    if attention and part == "o_proj" and kind == "weight":
        return [copy_of(tensor, factors.get(layer, 1.0))]
    if part in NORMS and to != "released":
        return [shifted(tensor, -1.0, "F32" if BITS[tensor.dtype] < 32 else tensor.dtype)]
    return [copy_of(tensor)]


def packed(tensor: Tensor, origin: Source, to: str, layer: int, kind: str) -> Output:
    """A q_proj with the gate's rows in it. `tensor` is the one of the source that it takes the place of."""
    config = origin.gated
    module = tensor.name.rpartition("self_attn.")[0] + "self_attn."
    row = tensor.nbytes // tensor.shape[0]
    heads, size = config.num_attention_heads, config.head_dim
    # In the authors' form, a group's query rows stand together before its gate rows.
    together = heads // config.num_key_value_heads if to == "released" else 1
    wide = size if to != "released" or config.attn_gate == "elementwise" else 1
    rows = HeadRows(origin, module, kind, layer)
    rows.check_dtypes()
    parts = []
    for first in range(0, heads, together):
        members = range(first, first + together)
        parts += [rows.query(head, row) for head in members]
        for head in members:
            parts += rows.gate(head, row, wide)
    name, shape = f"{module}q_proj.{kind}", (heads * (size + wide), *tensor.shape[1:])
    return Output(name, tensor.dtype, shape, tuple(parts))


class HeadRows:
    """Where the query rows and the gate rows of each head lie in the source."""

    def __init__(self, origin: Source, module: str, kind: str, layer: int):
        self.config, self.packed, self.gated = origin.gated, origin.packed, origin.gated.is_gated_layer(layer)
        self.queries = origin.checkpoint.tensors.get(f"{module}q_proj.{kind}")
        self.gates = origin.checkpoint.tensors.get(f"{module}g_proj.{kind}")
        if self.packed:
            self.gates = self.queries
            self.ranges = origin.packed_rows(self.queries)

    def check_dtypes(self) -> None:
        """One tensor has one dtype."""
        if self.gated and None not in (self.queries, self.gates) and self.queries.dtype != self.gates.dtype:
            queries, gates = (f"{tensor.name} is {tensor.dtype}" for tensor in (self.queries, self.gates))
            raise CheckpointError(
                f"{self.gates.file}: {gates} and {queries}, and there they become one tensor: save the model in one "
                "dtype (model.to(dtype).save_pretrained), and export that."
            )

    def _start(self, head: int, which: int, each: int) -> int:
        if not self.packed:
            return head * each
        group, member = divmod(head, self.config.num_attention_heads // self.config.num_key_value_heads)
        return self.ranges[which][group][0] + member * each

    def query(self, head: int, row: int) -> Part | Zeros:
        size = self.config.head_dim
        if self.queries is None:
            return Zeros(size * row)
        start = self._start(head, 0, size)
        return Part(self.queries, start * row, (start + size) * row)

    def gate(self, head: int, row: int, wide: int) -> list[Part | Zeros]:
        if not self.gated or self.gates is None:
            return [Zeros(wide * row)]
        own = self.config.head_dim if self.config.attn_gate == "elementwise" else 1
        start = self._start(head, 1, own)
        return [Part(self.gates, start * row, (start + own) * row, repeat=wide // own)]


def new_bias(name: str, weight: Tensor, origin: Source, shape: tuple[int, ...]) -> Output:
    """A bias that the source has not: zeros, but for the gate's part of q_proj's where only that has one."""
    module = weight.name.removesuffix("q_proj.weight")
    gate = origin.checkpoint.tensors.get(f"{module}g_proj.bias") if name.endswith("q_proj.bias") else None
    if gate is None:
        return new_tensor(name, weight.dtype, shape)
    return replace(packed(gate, origin, "qwen3_5", layer_of(name), "bias"), name=name)


def export_checkpoint(
    source,
    target,
    to: str,
    *,
    linear_layer: bool = False,
    link: bool = False,
    verify: bool | None = None,
    restart: bool = False,
    revision: str | None = None,
    subfolder: str | None = None,
    token: str | bool | None = None,
    progress: bool = False,
) -> dict:
    """Save a gated_qwen checkpoint in the form of another family, or in the authors' own.

    Args:
        source (`str` or `Path`): a checkpoint folder or Hub id, native or in the authors' released form
        target (`str` or `Path`): a folder that does not exist yet
        to (`str`): `"qwen3_5"` or `"qwen3_next"`, for engines that know these and need no code of ours;
            `"released"`, for the authors' code; `"native"`, the same as [`import_checkpoint`]
        linear_layer (`bool`): whether a Qwen3.5 or Qwen3-Next gets one more layer, of linear attention, whose weights
            are all zero. It adds zero to the residual stream, and lets engines run the model that cannot do without
            such a layer, such as llama.cpp
        link, verify, restart, revision, subfolder, token, progress: as in [`retrofit_checkpoint`]. Source and target
            are compared in float32.

    Returns:
        `dict`: what was done, as it is saved in the target's `conversion.json`.

    Raises:
        ValueError: `to` is not one of these, or has no linear attention.
        CheckpointError: the model cannot be expressed there, or as [`retrofit_checkpoint`].
        OSError: a file is missing, or reading or writing failed.
    """
    plan = plan_export(
        source,
        to,
        linear_layer=linear_layer,
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
