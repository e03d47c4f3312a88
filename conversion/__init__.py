"""Everything that turns one checkpoint folder into another.

A conversion is a pipeline: read headers (`checkpoint.py`, `headers.py`, `pickles.py`) -> plan every output tensor
(`plan.py`, and one module for each command: `retrofit.py`, `strip.py`, `export.py`, `importing.py`) -> check the plan
against the model that the config builds -> write into a folder beside the target (`write.py`) -> `verify.py` ->
publish by rename. Nothing of the source is imported, run or opened for writing. The plan is pure data, made from
headers alone.

Around it: `card.py`, `remote_code.py` and `push.py` publish a folder, `adapter.py` fits a PEFT adapter to a retrofit.

The layouts of the gate on disk (`layouts.py`):

    native      q_proj [H*D, hidden], g_proj [H or H*D, hidden]
    released    q_proj packed per key/value group: [query rows of the group's heads | their gate rows]
    head-major  q_proj packed per query head: [query rows | gate rows], Qwen3.5's and Qwen3-Next's (`head_major.py`)

Where a key/value head serves one query head only, other projects' packings have the same shape as the released one and
mean something else. So a layout is named, never guessed.
"""

from .layouts import pack_released, released_config, released_state_dict, unpack_released

__all__ = ["pack_released", "released_config", "released_state_dict", "unpack_released"]
