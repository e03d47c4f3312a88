"""A source looked over: its config in this family's terms, and its tensors checked against it, all from headers."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from transformers import PreTrainedConfig

from ..configuration import GatedQwenConfig
from .checkpoint import Checkpoint, open_checkpoint
from .errors import CheckpointError, shown
from .families import check_architecture, gated_config, read_config
from .layouts import group_rows
from .plan import check_tensors, expected_shapes
from .reader import Reader, same_values
from .record import read_record

GATE_FIELDS = ("attn_gate", "attn_gate_scale", "attn_gate_bias", "attn_gate_layers")


# Of models with a head, of those without, and of stock classifiers from before they were alike.
PREFIXES = ("model.", "", "transformer.")


@dataclass
class Source:
    """A checkpoint to be converted.

    Args:
        config: of its own family
        gated: the same model, with the gates that it has, as a `GatedQwenConfig`
        prefix: what the names of the decoder's tensors start with; nothing in a model without a head, and another one
            than ours in some stock heads
        packed: whether q_proj has the gates' rows in it (the authors' released form)
        dropped: tensors that do not come through, and why
        notes: what the user should know
        record: of the conversion that made it, if one did
    """

    checkpoint: Checkpoint
    config: PreTrainedConfig
    gated: GatedQwenConfig
    prefix: str
    packed: bool
    dropped: dict[str, str]
    notes: list[str]
    record: dict | None

    @property
    def gated_layers(self) -> list[int]:
        return [layer for layer in range(self.gated.num_hidden_layers) if self.gated.is_gated_layer(layer)]

    def tensors_by_file(self) -> list[list]:
        """The tensors that come through, for each file."""
        files = {tensor.file: [] for tensor in self.checkpoint.tensors.values()}
        for name, tensor in self.checkpoint.tensors.items():
            if name not in self.dropped:
                files[tensor.file].append(tensor)
        return list(files.values())

    def packed_rows(self, tensor) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """The ranges of query rows and of gate rows in a packed q_proj."""
        query_rows, gate_rows = group_rows(self.gated)
        starts = [group * (query_rows + gate_rows) for group in range(self.gated.num_key_value_heads)]
        return (
            [(start, start + query_rows) for start in starts],
            [(start + query_rows, start + query_rows + gate_rows) for start in starts],
        )


def open_source(source, *, revision=None, subfolder=None, token=None, headers_only: bool) -> Source:
    """Find a checkpoint and look it over.

    Args:
        headers_only: of a Hub id, fetch only headers; and take an lm_head beside tied embeddings for a copy of them
            instead of comparing the two

    Raises:
        CheckpointError: it is damaged, disagrees with its config, or cannot be expressed.
        OSError: it is not there, or a file cannot be read.
    """
    checkpoint = open_checkpoint(
        source, revision=revision, subfolder=subfolder, headers_only=headers_only, token=token
    )
    where = checkpoint.where()
    config = read_config(checkpoint.fields, where)
    check_layers(checkpoint, config, where)
    prefix = prefix_of(checkpoint.tensors)
    if prefix not in PREFIXES:
        raise CheckpointError(
            f"{checkpoint.where('')}: the names of its tensors start with {shown(prefix)}, which transformers does "
            "not know: load it in what saved it, and save the model inside."
        )
    gates = {name: getattr(config, name) for name in GATE_FIELDS} if isinstance(config, GatedQwenConfig) else {}
    default_head = "ForCausalLM" if prefix else "Model"
    gated = gated_config(config, where, default_head, **(gates or {"attn_gate": None}))
    check_architecture(config, checkpoint.fields, where)
    packed = getattr(config, "_is_released", False) and gated.attn_gate is not None
    try:
        shapes = expected_shapes(gated)
    except Exception as error:  # sizes that no tensor can have
        rope = gated.rope_parameters
        rope = "" if rope["rope_type"] == "default" else f", with the rotary embeddings {shown(rope)}"
        raise CheckpointError(f"{where} does not describe a model{rope}: building it, {shown(error)}") from error
    if packed:
        shapes = packed_shapes(shapes)
    ours = prefix_of(shapes)
    shapes = {renamed(name, ours, prefix): shape for name, shape in shapes.items()}

    tied = gated.tie_word_embeddings and gated.architectures[0].endswith("ForCausalLM")
    dropped = check_tensors(checkpoint, shapes, tied)
    notes = settle_tied(checkpoint, gated, dropped, headers_only) if tied else []
    if checkpoint.fields.get("auto_map") and not isinstance(config, GatedQwenConfig):
        notes.append("config.json names code (auto_map), which is not run: the model is taken for a stock one.")
    return Source(checkpoint, config, gated, prefix, packed, dropped, notes, read_record(checkpoint.folder))


def check_layers(checkpoint: Checkpoint, config: PreTrainedConfig, where: str) -> None:
    """A wrong number of layers would take its time to build."""
    layers = {int(match[1]) for name in checkpoint.tensors if (match := re.search(r"\blayers\.(\d{1,6})\.", name))}
    if config.num_hidden_layers > max(1000, len(layers)):
        raise CheckpointError(
            f"{where} says num_hidden_layers {config.num_hidden_layers}, and the weights have {len(layers)} layers: "
            "get both from one place."
        )


def prefix_of(names: Iterable[str]) -> str:
    """What the names of the decoder's tensors start with."""
    for name in names:
        if name.endswith("embed_tokens.weight"):
            return name.removesuffix("embed_tokens.weight")
    return "model."


def renamed(name: str, prefix: str, other: str) -> str:
    """A tensor's name where the decoder has another prefix; heads keep theirs."""
    decoder = name.removeprefix(prefix)
    return other + decoder if name.startswith(prefix) and decoder.startswith(("layers.", "embed", "norm.")) else name


def packed_shapes(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    packed = {name: shape for name, shape in shapes.items() if ".self_attn.g_proj." not in name}
    for name in shapes.keys() - packed.keys():
        query = name.replace(".g_proj.", ".q_proj.")
        packed[query] = (shapes[query][0] + shapes[name][0], *shapes[query][1:])
    return packed


def settle_tied(checkpoint: Checkpoint, config: GatedQwenConfig, dropped: dict, headers_only: bool) -> list[str]:
    """Decide what becomes of an lm_head beside tied embeddings: dropped where it says nothing new, else untied.

    That is what transformers makes of such a checkpoint. Changes `config` and `dropped`; returns what to tell.
    """
    if "lm_head.weight" not in checkpoint.tensors:
        return []
    head, embeddings = checkpoint.tensors["lm_head.weight"], checkpoint.tensors["model.embed_tokens.weight"]
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
