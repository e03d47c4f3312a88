"""Training gates: at a rate of their own or alone, with their figures in the logs, and so that a sink goes away.

- `gates`: parameter groups, freezing, saving and loading gates alone
- `statistics`: `GateStatistics`, a callback of `Trainer`
- `healing`: `HealingTrainer`, whose loss takes the attention sink out of a trained model; `gated-qwen heal`
"""

from .gates import freeze_all_but_gates, gates_at_start, load_gates, parameter_groups, save_gates
from .healing import HealingArguments, HealingTrainer
from .statistics import GateStatistics

__all__ = [
    "GateStatistics",
    "HealingArguments",
    "HealingTrainer",
    "freeze_all_but_gates",
    "gates_at_start",
    "load_gates",
    "parameter_groups",
    "save_gates",
]
