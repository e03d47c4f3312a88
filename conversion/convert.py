"""Carrying out any plan: check, write, verify, publish."""

from collections.abc import Callable
from pathlib import Path

from .. import demo
from .plan import Plan
from .record import build_record, write_card, write_record
from .verify import SMALL, verify
from .write import Staging, check_target, write_files, write_weights


def carry_out(
    plan: Plan,
    target,
    *,
    link: bool,
    verify_outputs: bool | None,
    restart: bool,
    progress: bool,
    finish: Callable[[Plan, dict, Path], None],
) -> dict:
    """Write what a plan says into a new folder, and return the record of it.

    Args:
        verify_outputs: None: where the model is small
        finish: writes what a command adds to the staged folder

    Raises:
        CheckpointError: nothing was written, or (a failed verification) nothing was published.
        OSError: reading or writing failed; another run with the same arguments goes on from there.
    """
    target = Path(target).expanduser()
    check_target(plan, target, link)
    if verify_outputs is None:
        verify_outputs = plan.total_parameters <= SMALL
    with Staging(plan, target.absolute(), restart) as staging:
        files = write_weights(plan, staging, link, progress)
        write_files(plan, staging)
        verification = None
        if verify_outputs:
            verification = verify(plan, staging.checkpoint, demo.PASSAGE.read_text(), progress)
        record = build_record(plan, files, verification)
        finish(plan, record, staging.checkpoint)
        staging.publish()
    return record


def finish_retrofit(plan: Plan, record: dict, folder: Path) -> None:
    write_card(plan, record, folder)
    write_record(record, folder)
