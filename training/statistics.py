"""What the gates do while a model trains, in the Trainer's logs."""

import torch
from transformers import TrainerCallback

from ..modeling.modeling_gated_qwen import GatedQwenOutputGate


class GateStatistics(TrainerCallback):
    """
    Adds figures of the gate scores of all training steps since the last log to `Trainer`'s logs: `gate_mean`, the
    lowest and highest mean of a layer (`gate_mean_lowest`, `gate_mean_highest`), and `gate_below_0.1`, a share.

        trainer = Trainer(...)
        GateStatistics().add_to(trainer)

    `Trainer(callbacks=[GateStatistics()])` has them in `state.log_history` and on the console, but reporting
    integrations, which come before other callbacks, do not see them. Each process counts its own batches; padding
    counts too.
    """

    def __init__(self):
        self.hooks, self.sums = [], {}

    def add_to(self, trainer) -> "GateStatistics":
        """Put it in front of the trainer's other callbacks."""
        trainer.callback_handler.callbacks.insert(0, self)
        return self

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        gates = [module for module in model.modules() if isinstance(module, GatedQwenOutputGate)]
        if not gates:
            raise ValueError("the model has no gates whose scores could be logged.")
        self.hooks = [gate.register_forward_hook(self._count(layer)) for layer, gate in enumerate(gates)]

    def _count(self, layer: int):
        def count(module, args, output):
            if module.training:
                scores = output[1].detach().float()
                figures = torch.stack([scores.mean(), (scores < 0.1).float().mean(), scores.new_ones(())])
                self.sums[layer] = self.sums.get(layer, 0) + figures

        return count

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not self.sums or "loss" not in logs:
            return
        figures = torch.stack(list(self.sums.values()))
        means, below = (figures[:, 0] / figures[:, 2]), (figures[:, 1] / figures[:, 2])
        found = {
            "gate_mean": means.mean().item(),
            "gate_mean_lowest": means.min().item(),
            "gate_mean_highest": means.max().item(),
            "gate_below_0.1": below.mean().item(),
        }
        self.sums.clear()
        logs.update(found)
        state.log_history[-1].update(found)

    def on_train_end(self, args, state, control, **kwargs):
        for hook in self.hooks:
            hook.remove()
        self.hooks = []
