"""What the commands that convert do with their arguments."""

import sys

from huggingface_hub.errors import HfHubHTTPError

from .export import export_checkpoint, plan_export
from .importing import import_checkpoint, plan_import
from .push import check_folder, contents, push_checkpoint
from .report import describe_plan, describe_result, size
from .retrofit import plan_retrofit, retrofit_checkpoint
from .strip import plan_strip, strip_checkpoint


def run(args) -> int:
    """Carry out a parsed command line. Returns the exit status."""
    try:
        return push(args) if args.command == "push" else convert(args)
    except (ValueError, OSError, HfHubHTTPError) as error:
        print(f"gated-qwen {args.command}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1


def push(args) -> int:
    if args.dry_run:
        checkpoint = check_folder(args.folder, args.repo_id)
        for name, content in sorted(contents(checkpoint, args.repo_id, args.code).items()):
            nbytes = len(content) if isinstance(content, bytes) else content.stat().st_size
            print(f"{size(nbytes):>10}  {name}")
        return 0
    commit = push_checkpoint(
        args.folder,
        args.repo_id,
        code=args.code,
        private=args.private,
        revision=args.revision,
        commit_message=args.message,
    )
    print(f"pushed      {commit.commit_url}")
    return 0


def convert(args) -> int:
    where = {"revision": args.revision, "subfolder": args.subfolder}
    how = {"link": args.link, "verify": args.verify, "restart": args.restart, "progress": not args.quiet}
    if args.command == "retrofit":
        options = {"attn_gate": args.gate, "start": args.start, "seed": args.seed, "layers": args.layers}
        plan, convert = plan_retrofit, retrofit_checkpoint
    elif args.command == "strip":
        options = {"force": args.force}
        plan, convert = plan_strip, strip_checkpoint
    elif args.command == "export":
        options = {"to": args.to, "linear_layer": args.linear_layer}
        plan, convert = plan_export, export_checkpoint
    else:
        options = {}
        plan, convert = plan_import, import_checkpoint
    if args.dry_run:
        print(describe_plan(plan(args.source, **options, **where), args.link))
    else:
        record = convert(args.source, args.target, **options, **where, **how)
        print(describe_result(record, args.target))
    return 0
