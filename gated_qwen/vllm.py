"""vLLM's plugin: its Transformers backend finds the family without `trust_remote_code`.

vLLM calls `register` in each of its processes (entry point `vllm.general_plugins`), so that importing this package is
not left to the user's script.
"""

import transformers

from . import modeling


def register() -> None:
    """Let vLLM find the family; calling it again changes nothing.

    Importing the package registered it with the Auto classes. vLLM asks for the class that config.json names, too, and
    looks for it among transformers' own.
    """
    for name in modeling.__all__:
        setattr(transformers, name, getattr(modeling, name))
