"""The command line: `gated-qwen COMMAND`."""

import argparse


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="gated-qwen", description="Gated softmax attention as a transformers model family."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser(
        "demo",
        help="load a small model in the authors' released form, check it, generate, show its gates",
        description="Loads a small model that comes with the package, in the authors' released form; checks it "
        "against recorded logits, generates, and shows its gate scores and first-token attention. Needs no network.",
    )
    args = parser.parse_args(argv)
    if args.command == "demo":
        from . import demo

        return demo.run()
