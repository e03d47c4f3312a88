"""What `gated-qwen heal` does with its arguments."""

import sys

from .heal import SHOWN, heal_checkpoint

ARGUMENTS = (
    "learning_rate", "gate_learning_rate", "kl_weight", "lm_weight", "peak_weight", "sink_weight", "temperature",
    "penalty_warmup_ratio", "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps", "save_steps",
    "logging_steps", "seed",
)  # fmt: skip


def run(args) -> int:
    """Carry out a parsed command line. Returns the exit status."""
    given = {name: getattr(args, name) for name in ARGUMENTS if getattr(args, name) is not None}
    given |= {"disable_tqdm": args.quiet, "lr_scheduler_type": "cosine", "bf16": args.bf16, "use_cpu": args.cpu}
    if args.gradient_checkpointing:
        given |= {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    try:
        figures = heal_checkpoint(
            args.model,
            args.target,
            args.text,
            teacher=args.teacher,
            eval_text=args.eval_text,
            length=args.length,
            gates_only=args.gates_only,
            **given,
        )
    except (ValueError, OSError) as error:
        print(f"gated-qwen heal: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    print(f"wrote       {args.target}")
    print(f"            {'before':>10}  {'after':>10}")
    for key, name in SHOWN.items():
        before, after = (f"{figures[when][key]:,.4g}" for when in ("before", "after"))
        print(f"{name:<12}{before:>10}  {after:>10}")
    print(f"F-Attn of even attention over {args.length} tokens: {figures['after']['f_attn_floor']:.4g}")
    return 0
