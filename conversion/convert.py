"""Carrying out any plan: check, write, verify, publish."""

import errno
import os
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME

from .. import demo
from .card import CARD_NAME, card_of
from .errors import CheckpointError
from .plan import Plan
from .record import RECORD_NAME, build_record, write_record
from .verify import SMALL, same_token_ids, verify
from .write import Staging, check_target, partial_folder, write_files, write_text, write_weights

OTHER_TOKEN_IDS = (
    "AutoTokenizer gives other token ids for the result than for the source, though the files are the same: "
    "transformers overrules the `tokenizer_class` in tokenizer_config.json for the source's model_type. Name the "
    "class there that it takes for the source."
)


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
    check_names(plan)
    target = check_target(plan, target, link)
    if verify_outputs is None:
        verify_outputs = plan.total_parameters <= SMALL
    with says_where_space_is_short(target), Staging(plan, target, restart) as staging:
        files = write_weights(plan, staging, link, progress)
        write_files(plan, staging)
        text = demo.PASSAGE.read_text(encoding="utf-8")
        same_ids = same_token_ids(plan, staging.checkpoint, text)
        if same_ids is False:
            plan = replace(plan, notes=(*plan.notes, OTHER_TOKEN_IDS))
        verification = None
        if verify_outputs:
            verification = verify(plan, staging.checkpoint, text, progress)
        record = build_record(plan, files, verification, same_ids)
        finish(plan, record, staging.checkpoint)
        staging.publish()
    return record


def check_names(plan: Plan) -> None:
    """Refuse folders of the source under the names of files that are written."""
    written = {CONFIG_NAME, CARD_NAME, RECORD_NAME, SAFE_WEIGHTS_INDEX_NAME, *(shard.name for shard in plan.shards)}
    for name in plan.files:
        if name.partition("/")[0] in written and "/" in name:
            raise CheckpointError(f"{plan.source.where(name)} is in a folder named like a file: move it away.")


@contextmanager
def says_where_space_is_short(target: Path):
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            what = (
                f"{os.strerror(error.errno)} in {partial_folder(target)}: make room; the same call goes on from there"
            )
            raise OSError(error.errno, what) from error
        raise


def finish_with_card(plan: Plan, record: dict, folder: Path) -> None:
    write_record(record, folder)
    write_text(folder / CARD_NAME, card_of(folder))
