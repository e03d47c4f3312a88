"""The command line: `gated-qwen COMMAND`."""

import argparse
import re
import sys

from . import __version__

RETROFIT_EXAMPLES = """\
examples:
  gated-qwen retrofit HuggingFaceTB/SmolLM2-135M-Instruct smollm2-gated
  gated-qwen retrofit ./Qwen3-8B ./Qwen3-8B-gated --gate elementwise --link
  gated-qwen retrofit ./Llama-70B ./gated --dry-run
  gated-qwen retrofit ./Qwen3-8B ./gated --layers 0-11,35 --start fold

exit status: 0 done, 1 refused or failed (one line says why), 2 wrong usage, 130 interrupted; the same command goes on
from where it was interrupted.
"""

STRIP_EXAMPLES = """\
examples:
  gated-qwen strip ./Qwen3-8B-gated ./Qwen3-8B-again
  gated-qwen strip ./trained ./plain --dry-run

Without training, the result is the source of the retrofit, bit for bit. Gates that have moved are refused, with a
figure of what removing them would change, unless --force is given.
"""

EXPORT_EXAMPLES = """\
examples:
  gated-qwen export ./Qwen3-8B-gated ./as-qwen3_5 --to qwen3_5
  gated-qwen export ./Qwen3-8B-gated ./for-llama.cpp --to qwen3_5 --linear-layer
  gated-qwen export ./Qwen3-8B-gated ./for-the-authors-code --to released

qwen3_5 and qwen3_next take models with query and key norms (such as Qwen3's) and without sliding windows.
"""

IMPORT_EXAMPLES = """\
examples:
  gated-qwen import ./as-qwen3_5 ./native
  gated-qwen import QwQZh/gated_attention ./native --subfolder 1B_gate_headwise
"""

PUSH_EXAMPLES = """\
examples:
  gated-qwen push ./smollm2-gated user/smollm2-gated
  gated-qwen push ./smollm2-gated user/smollm2-gated --private --revision dev

The token is that of `hf auth login`, or HF_TOKEN. With the family's code in it (--no-code leaves it out), the
repository loads without this package, by trust_remote_code=True.
"""


HEAL_EXAMPLES = """\
examples:
  gated-qwen heal ./smollm2-gated ./smollm2-healed --text books.txt --max-steps 500
  gated-qwen heal ./Qwen3-8B-gated ./healed --text part1.parquet part2.parquet --bf16 --gradient-checkpointing \\
    --save-steps 200

The function that is kept is that of MODEL as it stands, or of --teacher. Interrupted, the same command goes on from
the last of --save-steps. On several GPUs: torchrun --nproc-per-node N -m gated_qwen heal ...
"""


def layers_argument(text: str) -> list[int]:
    """`0-3,7` to [0, 1, 2, 3, 7]."""
    layers = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last or last >= 10_000:
            raise argparse.ArgumentTypeError(f"expected layers such as 0-3,7 (counted from 0), got {text!r}")
        layers.update(range(first, last + 1))
    return sorted(layers)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gated-qwen", description="Gated softmax attention as a transformers model family."
    )
    parser.add_argument("--version", action="version", version=f"gated_qwen {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser(
        "demo",
        help="load a small model in the authors' released form, check it, generate, show its gates, retrofit it",
        description="Loads a small model that comes with the package, in the authors' released form; checks it "
        "against recorded logits, generates, shows its gate scores and first-token attention, and retrofits it. Needs "
        "no network.",
    )

    retrofit = commands.add_parser(
        "retrofit",
        help="put gates onto a Llama, Mistral or Qwen checkpoint without changing what it computes",
        description="Puts output gates onto a Llama, Mistral, Qwen2, Qwen3 or gated_qwen checkpoint, and saves it as "
        "a gated_qwen one. The source is only read.",
        epilog=RETROFIT_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    strip = commands.add_parser(
        "strip",
        help="take the gates off again",
        description="Takes the gates off a gated_qwen checkpoint, and saves it as one of the family it came from.",
        epilog=STRIP_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    export = commands.add_parser(
        "export",
        help="write it in the form of Qwen3.5 or Qwen3-Next, for engines that know these, or in the authors' own",
        description="Saves a gated_qwen checkpoint in the form of another family, which computes the same.",
        epilog=EXPORT_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    importing = commands.add_parser(
        "import",
        help="the inverse: from Qwen3.5's or Qwen3-Next's form, or the authors', to the native layout",
        description="Saves a checkpoint of the authors' form, or of Qwen3.5's or Qwen3-Next's (where all layers are "
        "full attention), as a gated_qwen one.",
        epilog=IMPORT_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    conversions = (retrofit, strip, export, importing)
    for command in conversions:
        command.add_argument("source", metavar="SOURCE", help="checkpoint folder or Hub id")
        command.add_argument("target", metavar="TARGET", help="folder to write, which must not exist yet")
    retrofit.add_argument(
        "--gate", choices=("headwise", "elementwise"), default="headwise",
        help="one gate score per token and head (the default), or per channel too",
    )  # fmt: skip
    retrofit.add_argument(
        "--start", choices=("scale", "fold", "random"), default="scale",
        help="scale (default): exact in every dtype, no tensor changes; fold: for a plain sigmoid, o_proj doubled, "
        "exact in fp32 and bf16; random: as in an untrained model, not exact",
    )  # fmt: skip
    retrofit.add_argument("--seed", type=int, default=0, help="of --start random (default 0)")
    retrofit.add_argument(
        "--layers",
        type=layers_argument,
        metavar="LIST",
        help="all layers that have a gate in the result, such as 0-3,7 (default: all)",
    )
    export.add_argument(
        "--to", choices=("qwen3_5", "qwen3_next", "released", "native"), required=True, help="the form to write"
    )
    export.add_argument(
        "--linear-layer", action="store_true",
        help="of qwen3_5 and qwen3_next: add a layer of linear attention that adds zero, for engines that need one "
        "(llama.cpp)",
    )  # fmt: skip
    strip.add_argument("--force", action="store_true", help="strip gates that have moved, which changes the function")
    for command in conversions:
        command.add_argument("--revision", help="branch, tag or commit of a Hub id")
        command.add_argument("--subfolder", help="folder of the checkpoint within SOURCE")
        command.add_argument(
            "--link", action="store_true",
            help="share unchanged files with the source, by reflink or else hard link: editing such a file in place "
            "then changes both checkpoints",
        )  # fmt: skip
        command.add_argument(
            "--verify", action=argparse.BooleanOptionalAction,
            help="load source and target, and compare their outputs (default: for models of up to 1e9 parameters)",
        )  # fmt: skip
        command.add_argument("--dry-run", action="store_true", help="print the plan and the sizes, write nothing")
        command.add_argument("--restart", action="store_true", help="discard what an interrupted run left")
        command.add_argument("--quiet", action="store_true", help="no progress bars")
    push = commands.add_parser(
        "push",
        help="push a checkpoint to the Hub, with a card of facts and the family's code",
        description="Pushes a checkpoint folder to the Hub in one commit: weights, tokenizer, configs, a model card "
        "made from facts, and the code by which it loads without this package. The folder is only read.",
        epilog=PUSH_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    push.add_argument("folder", metavar="FOLDER", help="checkpoint to push")
    push.add_argument("repo_id", metavar="REPO", help="user/name, made if it is not there")
    push.add_argument("--private", action="store_true", default=None, help="make a private repository")
    push.add_argument("--revision", help="branch, made if it is not there")
    push.add_argument("--message", help="of the commit")
    push.add_argument("--no-code", dest="code", action="store_false", help="leave the family's code out")
    push.add_argument("--dry-run", action="store_true", help="print what would go up, send nothing")
    heal = commands.add_parser(
        "heal",
        help="train the attention sink of a gated model away, by distillation from what it computes now",
        description="Trains a gated_qwen checkpoint so that its attention sink and massive activations go away while "
        "it computes what it did (see gated_qwen.training.healing), and prints figures of before and after.",
        epilog=HEAL_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    heal.add_argument("model", metavar="MODEL", help="checkpoint folder or Hub id, such as a retrofit")
    heal.add_argument("target", metavar="TARGET", help="folder to write, which must not exist yet")
    heal.add_argument("--text", nargs="+", required=True, metavar="FILE", help="text, or .jsonl, .csv, .parquet files")
    heal.add_argument("--eval-text", nargs="+", metavar="FILE", help="to measure on (default: the end of the text)")
    heal.add_argument("--teacher", help="whose function is kept (default: MODEL's own)")
    heal.add_argument("--length", type=int, default=512, help="tokens a sequence (default 512)")
    heal.add_argument("--max-steps", type=int, default=500, help="default 500")
    heal.add_argument("--batch-size", dest="per_device_train_batch_size", type=int, default=8, help="default 8")
    heal.add_argument("--gradient-accumulation-steps", type=int)
    heal.add_argument("--learning-rate", type=float, default=1e-4, help="of all but the gates (default 1e-4)")
    heal.add_argument("--gate-learning-rate", type=float, help="default 1e-2")
    for name, what in (
        ("kl", "KL from the model as it was (default 1)"),
        ("lm", "the next token's cross entropy (default 0)"),
        ("peak", "residual peaks (default 0.01)"),
        ("sink", "attention on the first token (default 1)"),
    ):
        heal.add_argument(f"--{name}-weight", type=float, help=f"weight of {what}")
    heal.add_argument("--temperature", type=float, help="of the distillation (default 1)")
    heal.add_argument("--penalty-warmup-ratio", type=float, help="share of steps to full penalties (default 0.1)")
    heal.add_argument("--gates-only", action="store_true", help="train nothing but the gates")
    heal.add_argument("--bf16", action="store_true", help="compute in bfloat16, with weights in float32")
    heal.add_argument("--gradient-checkpointing", action="store_true", help="less memory, more time")
    heal.add_argument("--save-steps", type=int, help="save a checkpoint every so many steps, to go on from")
    heal.add_argument("--logging-steps", type=int)
    heal.add_argument("--seed", type=int)
    heal.add_argument("--cpu", action="store_true", help="leave a GPU alone")
    heal.add_argument("--quiet", action="store_true", help="no progress bars")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    if args.command == "demo":
        from . import demo

        return demo.run()
    try:
        if args.command == "heal":
            from .training.command import run
        else:
            from .conversion.command import run

        return run(args)
    except KeyboardInterrupt:
        print("\ninterrupted: the same command goes on from here", file=sys.stderr)
        return 130
