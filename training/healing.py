"""Taking the attention sink out of a trained model: distillation under pressure on what makes the sink.

Plain further training leaves gates that start at the identity open, and the sink where it is (the authors, in
https://github.com/qiuzh20/gated_attention/issues/10): nothing in the loss asks for either to change. Here the loss is

    kl_weight * KL(source || model) + lm_weight * cross entropy + peak_weight * peaks + sink_weight * F-Attn

- KL, over the vocabulary at each position, keeps the function of the source, the model before it had gates.
- `peaks` pushes down the massive activations that feed the sink: of u = x / rms(x), x the output of each layer,
  sum over the channels of relu(|u| - peak_threshold)^2, averaged over layers and positions, where the first position
  has the weight `first_token_weight` (Bondarenko et al., arXiv 2306.12929, appendix B.6,
  regularise the outliers of OPT alike).
- F-Attn is the attention on the first token (arXiv 2505.06708), averaged over heads, layers and later queries.

The gates learn at a rate of their own, far above that of the other weights.
"""

from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch.nn import functional
from transformers import Trainer, TrainingArguments

from ..diagnostics import measure
from .gates import gates_at_start, is_gate, parameter_groups


@dataclass
class HealingArguments(TrainingArguments):
    """[`TrainingArguments`], and the terms of the loss (see `gated_qwen.training.healing`)."""

    gate_learning_rate: float = field(default=1e-2, metadata={"help": "Peak learning rate of the gates."})
    kl_weight: float = field(default=1.0, metadata={"help": "Weight of KL(source || model)."})
    lm_weight: float = field(default=0.0, metadata={"help": "Weight of the cross entropy of the next token."})
    peak_weight: float = field(default=0.01, metadata={"help": "Weight of the penalty on residual peaks."})
    peak_threshold: float = field(default=4.0, metadata={"help": "Peaks begin at this |x| / rms(x)."})
    first_token_weight: float = field(
        default=256.0, metadata={"help": "Weight of the first position in that penalty; each other has 1."}
    )
    sink_weight: float = field(default=1.0, metadata={"help": "Weight of the attention on the first token."})
    temperature: float = field(default=1.0, metadata={"help": "Both sides' logits are divided by it in KL."})
    penalty_warmup_ratio: float = field(
        default=0.1, metadata={"help": "Share of the steps over which the two penalties rise from 0, linearly."}
    )


def distillation_loss(logits: torch.Tensor, teacher_logits: torch.Tensor, mask, temperature: float = 1.0):
    """KL(teacher || student) in nats for each token, times temperature^2: logits (batch, tokens, vocabulary)."""
    student = functional.log_softmax(logits.float() / temperature, -1)
    teacher = functional.log_softmax(teacher_logits.float() / temperature, -1)
    per_token = functional.kl_div(student, teacher, reduction="none", log_target=True).sum(-1)
    return (per_token * mask).sum() / mask.sum() * temperature**2


def peak_penalty(hidden_states, mask: torch.Tensor, threshold: float, first_token_weight: float) -> torch.Tensor:
    """The mean over layers and positions of sum(relu(|u| - threshold)^2) over channels, u = x / rms(x).

    Args:
        hidden_states: of each layer, (batch, tokens, channels)
        mask: (batch, tokens), 1 where there is a token
    """
    weights = mask.float()
    first = first_positions(mask)
    weights = torch.where(first, weights * first_token_weight, weights)
    total = 0
    for x in hidden_states:
        u = x.float() * x.float().square().mean(-1, keepdim=True).add(1e-12).rsqrt()
        peaks = functional.relu(u.abs() - threshold).square().sum(-1)
        total = total + (peaks * weights).sum() / weights.sum()
    return total / len(hidden_states)


def sink_penalty(attentions, mask: torch.Tensor) -> torch.Tensor:
    """The attention of later queries on the first token, averaged: of each layer, (batch, heads, tokens, tokens)."""
    first = first_positions(mask)
    later = mask.bool() & ~first
    total = 0
    for attention in attentions:
        on_first = (attention * first[:, None, None, :]).sum(-1)  # (batch, heads, queries)
        total = total + (on_first * later[:, None]).sum() / (later.sum() * attention.shape[1])
    return total / len(attentions)


def first_positions(mask: torch.Tensor) -> torch.Tensor:
    """Where the first token of each row is, whichever side is padded."""
    return (mask.cumsum(-1) == 1) & mask.bool()


class HealingTrainer(Trainer):
    """
    [`Trainer`] with the loss of `gated_qwen.training.healing`; evaluation gives the ordinary loss.

    Args:
        teacher ([`PreTrainedModel`], *optional*): the model whose function is kept: the source before it had gates, or
            a copy of the model as it stands. Without one its logits come from the model itself with the gates held at
            their start and adapters disabled; then nothing else in it may be trained.
        figures_ids (`torch.Tensor`, *optional*): (sequences, tokens) on which sink, activation, gate and perplexity
            figures are measured (`gated_qwen.diagnostics.measure`) and logged with each evaluation.

    Raises:
        ValueError: the loss needs what the model or the arguments do not give; the message says what.
    """

    def __init__(self, *args, teacher=None, figures_ids: torch.Tensor | None = None, **kwargs):
        super().__init__(*args, **kwargs)
        given = self.args
        if not any((given.kl_weight, given.lm_weight)):
            raise ValueError("kl_weight and lm_weight are both 0: nothing would keep the model's function.")
        if given.gradient_checkpointing and (given.gradient_checkpointing_kwargs or {}).get("use_reentrant"):
            raise ValueError("the penalties need gradient_checkpointing_kwargs={'use_reentrant': False}.")
        if teacher is not None:
            teacher = teacher.eval().requires_grad_(False).to(given.device)
        elif given.kl_weight:
            check_own_teacher(self.model)
        if given.sink_weight:
            self.model.set_attn_implementation("eager")  # which alone returns its probabilities
        self.model_accepts_loss_kwargs = False  # the loss is a mean over each batch
        self.teacher, self.figures_ids = teacher, figures_ids
        self.terms: dict[str, list[torch.Tensor]] = {}

    def create_optimizer(self, model=None):
        if self.optimizer is None and any(p.requires_grad and is_gate(n) for n, p in self.model.named_parameters()):
            chosen, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            self.optimizer = chosen(
                parameter_groups(self.model, self.args.gate_learning_rate, self.args.weight_decay), **options
            )
        return super().create_optimizer() if model is None else super().create_optimizer(model)

    def penalty_factor(self) -> float:
        """Of both penalties: rises from 0 to 1 over the first `penalty_warmup_ratio` of the steps."""
        steps = self.args.penalty_warmup_ratio * self.state.max_steps
        return min(1.0, self.state.global_step / steps) if steps else 1.0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if not model.training:
            return super().compute_loss(model, inputs, return_outputs)
        args, ids, mask = self.args, inputs["input_ids"], inputs.get("attention_mask")
        outputs = model(
            input_ids=ids,
            attention_mask=mask,
            labels=inputs["labels"] if args.lm_weight else None,
            use_cache=False,
            output_hidden_states=bool(args.peak_weight),
            output_attentions=bool(args.sink_weight),
        )
        mask = torch.ones_like(ids) if mask is None else mask
        factor, loss = self.penalty_factor(), 0.0
        terms = {}
        if args.kl_weight:
            terms["kl"] = distillation_loss(outputs.logits, self.teacher_logits(inputs), mask, args.temperature)
            loss = loss + args.kl_weight * terms["kl"]
        if args.lm_weight:
            terms["lm"] = outputs.loss
            loss = loss + args.lm_weight * terms["lm"]
        if args.peak_weight:
            # The first are the embeddings; the last have been through the final norm.
            states = outputs.hidden_states[1:-1]
            terms["peak"] = peak_penalty(states, mask, args.peak_threshold, args.first_token_weight)
            loss = loss + factor * args.peak_weight * terms["peak"]
        if args.sink_weight:
            terms["sink"] = sink_penalty(outputs.attentions, mask)
            loss = loss + factor * args.sink_weight * terms["sink"]
        for name, term in terms.items():
            self.terms.setdefault(f"{name}_loss", []).append(term.detach())
        return (loss, outputs) if return_outputs else loss

    @torch.no_grad()
    def teacher_logits(self, inputs) -> torch.Tensor:
        given = {"input_ids": inputs["input_ids"], "attention_mask": inputs.get("attention_mask"), "use_cache": False}
        if self.teacher is not None:
            return self.teacher(**given).logits
        model = self.accelerator.unwrap_model(self.model)
        model.eval()
        try:
            with gates_at_start(model), getattr(model, "disable_adapter", nullcontext)():
                return model(**given).logits
        finally:
            model.train()

    def log(self, logs: dict[str, float], *args, **kwargs) -> None:
        if "loss" in logs:
            logs |= {name: torch.stack(values).mean().item() for name, values in self.terms.items()}
            self.terms.clear()
        if self.figures_ids is not None and "eval_loss" in logs:
            logs |= measure(self.accelerator.unwrap_model(self.model), self.figures_ids).figures
        super().log(logs, *args, **kwargs)


def check_own_teacher(model) -> None:
    """Refuse a model that, with its gates at their start and adapters disabled, would not stay what it was."""
    gates = {name: parameter for name, parameter in model.named_parameters() if is_gate(name)}
    adapted = hasattr(model, "disable_adapter")
    trained = [n for n, p in model.named_parameters() if p.requires_grad and not is_gate(n) and ".lora_" not in n]
    if trained or not gates:
        why = f"{trained[0]} is trained too" if trained else "the model has no gates"
        raise ValueError(
            f"{why}, so the model cannot be its own teacher: pass `teacher`, or freeze all but the gates."
        )
    moved = [name for name, p in gates.items() if ".lora_" not in name and not p.is_meta and p.any()]
    if moved and not adapted:
        raise ValueError(
            f"{moved[0]} is not at its start, so the source's function is not in the model: pass `teacher`."
        )
