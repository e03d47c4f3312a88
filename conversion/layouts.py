"""The layouts of the gate on disk, as pure functions on tensors and config fields.

H: query heads, K: key/value heads, D: head_dim, w: 1 (headwise) or D (elementwise).
"""

import torch

from ..configuration import GatedQwenConfig


def group_rows(config: GatedQwenConfig) -> tuple[int, int]:
    """How many query rows and how many gate rows one key/value group has in a packed q_proj."""
    groups = config.num_attention_heads // config.num_key_value_heads
    return groups * config.head_dim, groups * {"headwise": 1, "elementwise": config.head_dim}[config.attn_gate]


def unpack_released(
    packed: torch.Tensor, config: GatedQwenConfig, shards: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Split a packed q_proj of the authors' checkpoints into q_proj and g_proj.

    Args:
        packed: weight [H*D + H*w, hidden] or bias [H*D + H*w]
        shards: `packed` is one of so many equal parts, as under tensor parallelism; they are whole groups.

    Returns:
        q_proj [H*D, ...] and g_proj [H*w, ...] (a part of them), rows in head order.

    Raises:
        ValueError: `packed` has another number of rows.
    """
    query_rows, gate_rows = group_rows(config)
    expected, rest = divmod(config.num_key_value_heads * (query_rows + gate_rows), shards)
    if packed.shape[0] != expected or rest or config.num_key_value_heads % shards:
        raise ValueError(f"a packed {config.attn_gate} q_proj has {expected} rows here, got {packed.shape[0]}")
    by_group = packed.view(-1, query_rows + gate_rows, *packed.shape[1:])
    query, gate = by_group.split([query_rows, gate_rows], dim=1)
    return query.flatten(0, 1), gate.flatten(0, 1)


def pack_released(query: torch.Tensor, gate: torch.Tensor, config: GatedQwenConfig) -> torch.Tensor:
    """The inverse of [`unpack_released`]: q_proj [H*D, ...] and g_proj [H*w, ...] to [H*D + H*w, ...]."""
    query_rows, gate_rows = group_rows(config)
    by_group = [query.view(-1, query_rows, *query.shape[1:]), gate.view(-1, gate_rows, *gate.shape[1:])]
    return torch.cat(by_group, dim=1).flatten(0, 1)


def released_state_dict(state_dict: dict[str, torch.Tensor], config: GatedQwenConfig) -> dict[str, torch.Tensor]:
    """A native state dict in the authors' names and packing."""
    released = dict(state_dict)
    for name in state_dict:
        if ".self_attn.g_proj." in name:
            q_name = name.replace(".g_proj.", ".q_proj.")
            released[q_name] = pack_released(state_dict[q_name], released.pop(name), config)
    return released


def released_config(config: GatedQwenConfig) -> dict:
    """A native config in the fields of the authors' config.json.

    Raises:
        ValueError: `config` has something that their code cannot express.
    """
    biases = {config.attention_bias, config.attention_output_bias}
    if config.attn_gate is not None:
        biases.add(config.attn_gate_bias)
    reasons = {
        "attn_gate_scale": config.attn_gate_scale != 1,
        "attn_gate_layers": config.attn_gate_layers is not None,
        "mlp_bias": config.mlp_bias,
        "attention_output_bias or attn_gate_bias unlike attention_bias": len(biases) > 1,
        "rope_parameters": config.rope_parameters["rope_type"] != "default",
        "sliding_window": config.sliding_window is not None,
    }
    if any(reasons.values()):
        raise ValueError("the released form has no " + ", ".join(name for name, found in reasons.items() if found))
    shared = (
        "attention_dropout", "bos_token_id", "eos_token_id", "head_dim", "hidden_act", "hidden_size",
        "initializer_range", "intermediate_size", "max_position_embeddings", "num_attention_heads",
        "num_hidden_layers", "num_key_value_heads", "pad_token_id", "rms_norm_eps", "tie_word_embeddings",
        "use_cache", "use_qk_norm", "vocab_size",
    )  # fmt: skip
    dtype = {} if config.dtype is None else {"torch_dtype": str(config.dtype).removeprefix("torch.")}
    return {
        **{name: getattr(config, name) for name in shared},
        "architectures": ["Qwen3ForCausalLM"],
        "headwise_attn_output_gate": config.attn_gate == "headwise",
        "elementwise_attn_output_gate": config.attn_gate == "elementwise",
        "model_type": "qwen2",
        "qkv_bias": config.attention_bias,
        "rope_theta": config.rope_parameters["rope_theta"],
        "use_sliding_window": False,
        **dtype,
    }
