"""What happens between a checkpoint's files and the model: the released layout is unpacked, all weights are checked.

transformers initialises what a checkpoint lacks and ignores what it has too much, with a warning. A gate left at
random makes noise of every head, so here both are errors, one line each.
"""

import dataclasses
import json
import math
import os
import pickle
import re
from contextvars import ContextVar

import torch
from safetensors import SafetensorError
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.modeling_utils import load_state_dict
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME
from transformers.utils.loading_report import update_key_name

from ..conversion.layouts import unpack_released
from .mapped_files import let_go_of_pages

# Heads may come and go between tasks; all other weights may not.
OF_THE_DECODER = re.compile(r"(^|\.)(layers\.\d+|embed_tokens|norm)\.")
OTHER_HEADS = re.compile(r"(lm_head|score|qa_outputs)\.weight|qa_outputs\.bias")

REMEDY = "get it again, or the checkpoint from its authors"

_strict: ContextVar[bool] = ContextVar("strict", default=True)


class UnpackReleasedGate(ConversionOps):
    """A packed q_proj of the released layout to q_proj and g_proj. One without gate rows passes through.

    `from_files`: the tensors are the loader's own, read from files as they are, and not needed afterwards.
    """

    def __init__(self, from_files: bool):
        self.from_files = from_files

    def convert(
        self, input_dict, source_patterns, target_patterns, full_layer_name, model, config, missing_keys, **kwargs
    ):
        (packed,) = input_dict[source_patterns[0]]
        q_proj, g_proj = target_patterns
        if missing_keys is not None and full_layer_name.replace(".q_proj.", ".g_proj.") not in missing_keys:
            return {q_proj: packed}  # the file has a gate of its own beside it; two would be one too many
        try:
            query, gate = unpack_released(packed, config, row_shards(model.get_parameter(full_layer_name)))
        except ValueError:
            return {q_proj: packed}  # the shape check names a q_proj that is neither
        if self.from_files:
            let_go_of_pages(packed)
        return {q_proj: query, g_proj: gate}


class UnpackingConverter(WeightConverter):
    """Quantises each of its two tensors, where that is asked for; transformers' own takes them for one."""

    def convert(self, layer_name, model=None, config=None, hf_quantizer=None, loading_info=None):
        self.quantization_operation = None
        weights = super().convert(layer_name, model=model, config=config, loading_info=loading_info)
        if hf_quantizer is None or hf_quantizer.pre_quantized:
            return weights
        converted = {}
        for name, weight in weights.items():
            if not hf_quantizer.param_needs_quantization(model, name):
                converted[name] = weight
                continue
            converted |= hf_quantizer.get_quantize_ops().convert(
                {name: [weight]},
                source_patterns=self.source_patterns,
                target_patterns=self.target_patterns,
                full_layer_name=name,
                model=model,
                config=config,
                missing_keys=loading_info.missing_keys,
            )
        return converted


def released_converters(from_files: bool) -> list[WeightConverter]:
    return [
        UnpackingConverter(
            source_patterns=f"self_attn.q_proj.{parameter}",
            target_patterns=[f"self_attn.q_proj.{parameter}", f"self_attn.g_proj.{parameter}"],
            operations=[UnpackReleasedGate(from_files)],
        )
        for parameter in ("weight", "bias")
    ]


def row_shards(parameter: torch.Tensor) -> int:
    """Into how many parts the rows of a parameter are split; transformers splits a checkpoint's tensors alike."""
    if not isinstance(parameter, DTensor):
        return 1
    sizes = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
    return math.prod(size for size, placement in sizes if placement.is_shard(0))


def _names(keys, most: int = 8) -> str:
    names = sorted(update_key_name(keys))
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _fault_behind(error: Exception) -> str | None:
    """What an error in reading weights says of their file, or None where it says nothing of it."""
    if isinstance(error, SafetensorError):
        return f"is cut short or damaged ({error})"
    if refused := re.search(r"GLOBAL ([\w.]+)", str(error)):
        return f"is a pickle that asks for {refused[1]}, and only plain tensors are read"
    if isinstance(error, (pickle.UnpicklingError, EOFError)) or "PytorchStreamReader" in str(error):
        return "is cut short or damaged, or holds more than plain tensors"
    return None


def _damaged_index(folder) -> str | None:
    """The index of shards in a local folder that is not one: JSON with `metadata`, and `weight_map` to file names."""
    for name in (SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME):
        file = os.path.join(folder, name)
        try:
            with open(file) as opened:
                index = json.load(opened)
        except OSError:
            continue
        except ValueError:
            return file
        weight_map = index.get("weight_map") if isinstance(index, dict) and "metadata" in index else None
        if not (isinstance(weight_map, dict) and weight_map and all(isinstance(v, str) for v in weight_map.values())):
            return file
    return None


def what_is_wrong_with(file: str) -> str | None:
    """Why a file of weights cannot be read, or None where it can. Reads no tensor's data."""
    if not os.path.exists(file):
        return "is missing"
    try:
        weights = load_state_dict(file, map_location="meta")
    except Exception as error:
        # Of a file that is no pickle at all, torch's reader raises whatever its first bytes lead to.
        return _fault_behind(error) or f"is damaged, or no file of weights ({type(error).__name__})"
    plain = isinstance(weights, dict) and all(
        isinstance(name, str) and isinstance(value, torch.Tensor) and value.layout is torch.strided
        for name, value in weights.items()
    )
    return None if plain else "does not hold plain tensors by name"


class ChecksWhatItLoads:
    """Adds to a `PreTrainedModel` the loading of released checkpoints, and the checks on any."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, strict: bool = True, **kwargs):
        """
        [`~PreTrainedModel.from_pretrained`], for native checkpoints and for the authors' released ones.

        Args:
            strict (`bool`, *optional*, defaults to `True`):
                Whether a checkpoint must have exactly the weights of the decoder. `False`: as transformers does for
                other models, initialise what is missing and ignore what is unexpected, with a report.

        Raises:
            ValueError: `weights_only=False` was passed.
            RuntimeError: weights are missing, unexpected, or of another shape than the config gives.
            OSError: a file is missing, cut short, or a pickle that holds more than plain tensors.
        """
        if not kwargs.get("weights_only", True):
            raise ValueError("`weights_only=False` would run whatever a pickle asks for: leave it out.")
        config = kwargs.get("config")
        # By type, not by class: as remote code, transformers imports the configuration's file more than once.
        if isinstance(config, PreTrainedConfig) and config.model_type != cls.config_class.model_type:
            raise ValueError(
                f"`config` is a {type(config).__name__}, and {cls.__name__} needs a {cls.config_class.__name__}: "
                "leave it out, or load with AutoModelForCausalLM."
            )
        token = _strict.set(strict)
        try:
            return super().from_pretrained(pretrained_model_name_or_path, *model_args, **kwargs)
        except Exception as error:
            folder = os.path.join(str(pretrained_model_name_or_path), kwargs.get("subfolder") or "")
            if isinstance(error, (json.JSONDecodeError, LookupError, AttributeError, TypeError)):
                if index := _damaged_index(folder):
                    raise OSError(f"{index} is not an index of shards: {REMEDY}.") from error
            # Without a dtype in config.json, transformers reads weights before it loads them.
            if fault := _fault_behind(error):
                raise OSError(f"A file of weights in {pretrained_model_name_or_path} {fault}: {REMEDY}.") from error
            raise
        finally:
            _strict.reset(token)

    @staticmethod
    def _load_pretrained_model(model, state_dict, checkpoint_files, load_config, *args, **kwargs):
        # Added to this load only. Registered for the model type, the converters would also act on adapters, and on
        # saving a model that was never released.
        if model.config._is_released and model.config.attn_gate is not None:
            q_projs = (p for name, p in model.named_parameters() if name.endswith(".q_proj.weight"))
            shards = max(map(row_shards, q_projs), default=1)
            if model.config.num_key_value_heads % shards:
                raise ValueError(
                    f"{load_config.pretrained_model_name_or_path}: the packed q_proj cannot be split over {shards} "
                    f"ranks, which do not divide the {model.config.num_key_value_heads} key/value heads. Load it in "
                    "one process, save_pretrained() the native layout, and load that."
                )
            weight_mapping = [*(load_config.weight_mapping or []), *released_converters(from_files=state_dict is None)]
            load_config = dataclasses.replace(load_config, weight_mapping=weight_mapping)
        load = PreTrainedModel._load_pretrained_model
        try:
            return load(model, state_dict, checkpoint_files, load_config, *args, **kwargs)
        except Exception as error:
            for file in checkpoint_files or ():
                if fault := what_is_wrong_with(file):
                    raise OSError(f"{file} {fault}: {REMEDY}.") from error
            raise

    @staticmethod
    def _finalize_model_loading(model, load_config, loading_info):
        # Saving reverses the conversions of the load; what we save is native.
        model._weight_conversions = [
            conversion
            for conversion in getattr(model, "_weight_conversions", [])
            if not any(isinstance(op, UnpackReleasedGate) for op in getattr(conversion, "operations", []))
        ]
        model._adjust_missing_and_unexpected_keys(loading_info)
        if _strict.get():
            check_loaded(model, load_config, loading_info)
        missing = set(loading_info.missing_keys)
        loading_info = PreTrainedModel._finalize_model_loading(model, load_config, loading_info)
        check_tied(model, load_config, missing)
        return loading_info


def check_loaded(model, load_config, loading_info) -> None:
    """Raise a RuntimeError that names the weights in which the checkpoint and the model differ."""
    source = load_config.pretrained_model_name_or_path or "the state dict"
    if loading_info.mismatched_keys and not load_config.ignore_mismatched_sizes:
        name, found, expected = sorted(loading_info.mismatched_keys)[0]
        more = len(loading_info.mismatched_keys) - 1
        raise RuntimeError(
            f"{source}: {name} is {list(found)} in the checkpoint but {list(expected)} by its config"
            + (f", and {more} more differ" if more else "")
            + (
                ". The config belongs to other weights: get both from one place, or correct the sizes or the gate "
                "in it."
                if OF_THE_DECODER.search(name) or name == "lm_head.weight"
                else ". Pass ignore_mismatched_sizes=True for a new head of that size."
            )
        )

    # Of two tied weights, one is enough.
    tied = dict(model.all_tied_weights_keys)
    tied |= {source: target for target, source in tied.items()}
    missing = {key for key in loading_info.missing_keys if tied.get(key, key) in loading_info.missing_keys}
    missing = {key for key in missing if OF_THE_DECODER.search(key) or key == "lm_head.weight"}
    if missing and all(".g_proj." in key for key in missing):
        raise RuntimeError(
            f"{source}: the gates are missing ({_names(missing)}), but the config says "
            f"attn_gate={model.config.attn_gate!r}. Get the checkpoint that has them, or pass strict=False to start "
            "from random gates."
        )
    if missing:
        raise RuntimeError(
            f"{source}: weights are missing: {_names(missing)}. Get the whole checkpoint, or pass strict=False to "
            "start from random ones."
        )
    unexpected = {key for key in loading_info.unexpected_keys if not OTHER_HEADS.fullmatch(key)}
    if unexpected:
        raise RuntimeError(
            f"{source}: weights that this model has no place for: {_names(unexpected)}. Load it with the class and "
            "config it was saved from, or pass strict=False to leave them out."
        )


def check_tied(model, load_config, missing: set[str]) -> None:
    """Raise a RuntimeError where a weight that the checkpoint leaves to tying was not tied.

    transformers switches tying off in the whole process while it builds a model, also for loads in other threads.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for target, source in model.all_tied_weights_keys.items():
        both_here = target in parameters and source in parameters  # a pipeline stage may hold one
        if both_here and not missing.isdisjoint({target, source}) and parameters[target] is not parameters[source]:
            raise RuntimeError(
                f"{load_config.pretrained_model_name_or_path}: {target} was not tied to {source}, since models were "
                "being loaded in several threads at once: load them one after the other, in a new process."
            )


__all__ = ["ChecksWhatItLoads", "check_loaded", "released_converters"]
