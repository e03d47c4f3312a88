"""The configuration of the family, and how a released checkpoint is recognised.

Gated attention multiplies each head's attention output by a sigmoid gate computed from the layer's input:

    Y' = Y * (attn_gate_scale * sigmoid(g_proj(X)))    X: the layer's input after input_layernorm
                                                       Y: attention output per head, before o_proj

    headwise       g_proj: hidden -> heads               one number per token and head
    elementwise    g_proj: hidden -> heads * head_dim    one number per token, head and channel

The gate is a linear of its own, `self_attn.g_proj`: it can be frozen, trained, quantised or left alone by name, which
`gate_proj` (the MLP's) could not.
"""

from .configuration_gated_qwen import GatedQwenConfig
from .released import recognise_released_checkpoints

__all__ = ["GatedQwenConfig", "recognise_released_checkpoints"]
