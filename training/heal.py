"""`gated-qwen heal`: a checkpoint of the family, with its sink taken out, as another checkpoint."""

import json
import shutil
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, set_seed
from transformers.trainer_utils import get_last_checkpoint

from ..conversion.card import CARD_NAME, MEASURED, card_of
from ..conversion.checkpoint import expanded
from ..conversion.errors import CheckpointError
from ..conversion.record import RECORD_NAME
from ..diagnostics import measure
from .gates import freeze_all_but_gates
from .healing import HealingArguments, HealingTrainer

TABLES = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
SHOWN = {
    "f_attn": "F-Attn", "sink_ratio": "sink ratio", "m_act": "M-Act", "gate_mean": "mean gate",
    "perplexity": "perplexity",
}  # fmt: skip


def read_text(files) -> str:
    """The text of plain files, and of the column `text` of JSON lines, CSV and Parquet ones (by `datasets`)."""
    texts = []
    for file in map(expanded, files):
        if not file.is_file():
            raise FileNotFoundError(f"{file} is no file: name a text, or a .jsonl, .csv or .parquet file.")
        if file.suffix not in TABLES:
            try:
                texts.append(file.read_text(encoding="utf-8"))
            except UnicodeDecodeError as error:
                raise CheckpointError(f"{file} is not text in UTF-8 ({error.reason}).") from error
            continue
        try:
            from datasets import load_dataset
        except ImportError:
            raise CheckpointError(f"{file} is read by the package datasets: pip install datasets.") from None
        try:
            rows = load_dataset(TABLES[file.suffix], data_files=str(file), split="train")
        except Exception as error:
            raise CheckpointError(f"{file} cannot be read: {' '.join(str(error).split())[:300]}") from error
        if "text" not in rows.column_names:
            raise CheckpointError(f"{file} has no column `text`, but {', '.join(rows.column_names)}.")
        texts.append("\n".join(map(str, rows["text"])))
    return "\n".join(texts)


def sequences(tokenizer, text: str, length: int, what: str, least: int) -> torch.Tensor:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) < least * length:
        raise CheckpointError(f"{what} has {len(ids)} tokens: {least} sequences of {length} are needed at least.")
    return torch.tensor(ids[: len(ids) // length * length]).view(-1, length)


def heal_checkpoint(
    model,
    target,
    text,
    *,
    teacher=None,
    eval_text=None,
    length: int = 512,
    gates_only: bool = False,
    dtype: str | torch.dtype = torch.float32,
    **arguments,
) -> dict[str, dict[str, float]]:
    """Train a checkpoint of the family so that its attention sink goes away, and save the result.

    Args:
        model (`str` or `Path`): a checkpoint or Hub id with gates: an identity retrofit, or any other
        target (`str` or `Path`): a folder that does not exist yet. Until the end the work lies in `TARGET.partial`;
            where checkpoints are saved there (`save_steps`), another call goes on from the last
        text (`list`): files, see [`read_text`]
        teacher (`str` or `Path`): whose function is kept; by default that of `model` as it stands
        eval_text (`list`): files on which figures are measured; by default the last twentieth of `text`
        length: of the sequences, in tokens
        gates_only: train nothing but the gates
        arguments: of [`HealingArguments`], such as `max_steps`

    Returns:
        `dict`: figures (see [`measure`]) `"before"` and `"after"`.

    Raises:
        CheckpointError: the model has no gates, or the text does not do; nothing was written.
        OSError: a file is missing, or writing failed.
    """
    target = expanded(target)
    if target.exists():
        raise CheckpointError(f"{target} exists: name a folder that does not.")
    written = read_text(text)
    held_out = read_text(eval_text) if eval_text else None
    model_id = str(expanded(model)) if expanded(model).is_dir() else str(model)
    config = AutoConfig.from_pretrained(model_id)
    if getattr(config, "attn_gate", None) is None:
        raise CheckpointError(f"{model} has no gates: put some onto it first (gated-qwen retrofit).")
    tokenizer = AutoTokenizer.from_pretrained(model_id)
    rows = sequences(tokenizer, written, length, "the text", 2)
    if held_out is None:
        cut = max(1, len(rows) // 20)
        rows, evaluation = rows[:-cut], rows[-cut:]
    else:
        evaluation = sequences(tokenizer, held_out, length, "the text to measure on", 1)

    healed = AutoModelForCausalLM.from_pretrained(model_id, dtype=dtype)
    teacher_model = AutoModelForCausalLM.from_pretrained(str(teacher or model_id), dtype=dtype)
    if teacher_model.config.vocab_size != healed.config.vocab_size:
        raise CheckpointError(f"{teacher} has another vocabulary than {model}: name the model that it came from.")
    if gates_only:
        freeze_all_but_gates(healed)
    work = target.with_name(target.name + ".partial")
    options = {"seed": 0, "report_to": "none", "save_strategy": "no", **arguments}
    if "save_steps" in arguments:
        options["save_strategy"] = "steps"
    training = HealingArguments(output_dir=str(work / "trainer"), **options)
    set_seed(training.seed)
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = HealingTrainer(healed, training, train_dataset=data, teacher=teacher_model)
    sample = evaluation[:16].to(training.device)
    figures = {"before": measure(healed, sample).figures}
    last = get_last_checkpoint(training.output_dir) if Path(training.output_dir).is_dir() else None
    trainer.train(resume_from_checkpoint=last)
    figures["after"] = measure(healed, sample).figures

    finished = work / "checkpoint"
    if trainer.is_world_process_zero():
        shutil.rmtree(finished, ignore_errors=True)
    healed.config.use_cache = True  # which Trainer turns off
    trainer.accelerator.wait_for_everyone()
    trainer.save_model(str(finished))  # gathers what is sharded
    if trainer.is_world_process_zero():
        publish(finished, target, tokenizer, figures, model_id)
        shutil.rmtree(work)
    trainer.accelerator.wait_for_everyone()
    return figures


def publish(finished: Path, target: Path, tokenizer, figures: dict, model_id: str) -> None:
    """Add to the saved model what it came with and what was found, and rename it."""
    (finished / "training_args.bin").unlink(missing_ok=True)
    tokenizer.save_pretrained(finished)
    named = {
        f"{SHOWN[key]}, {when}": value
        for when, found in figures.items()
        for key, value in found.items()
        if key in SHOWN
    }
    (finished / MEASURED).write_text(json.dumps(named, indent=2) + "\n")
    if (record := Path(model_id) / RECORD_NAME).is_file():
        shutil.copy(record, finished)
    (finished / CARD_NAME).write_text(card_of(finished, trained=True), encoding="utf-8")
    finished.rename(target)
