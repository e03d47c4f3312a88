"""Everything that turns one checkpoint into another. So far: the layouts of the gate on disk.

    native      q_proj [H*D, hidden], g_proj [H or H*D, hidden]
    released    q_proj packed per key/value group: [query rows of the group's heads | their gate rows]

Where a key/value head serves one query head only, other projects' packings have the same shape as the released one and
mean something else. So a layout is named, never guessed.
"""

from .layouts import pack_released, released_config, released_state_dict, unpack_released

__all__ = ["pack_released", "released_config", "released_state_dict", "unpack_released"]
