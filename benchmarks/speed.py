"""Speed and memory of GatedQwen against stock Qwen3 of the same shape, as ratios from one run.

    python benchmarks/speed.py [--rounds 15] [--threads 2] [--shapes released small]

In each round every model is timed once, one after the other, so that a slow moment of the machine hits all of them; a
ratio is the median over the rounds of (gated / stock). Before anything is timed, the gated models, their gates opened
to exactly 1, must give stock Qwen3's logits bit for bit; where they do not, no table is printed.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

import gated_qwen
from gated_qwen.conversion import released_config, released_state_dict
from gated_qwen.modeling.modeling_gated_qwen import CACHE

SHAPES = {
    # The layer of the released checkpoints; 2 of 28 layers, and the vocabulary cut alike.
    "released": dict(
        hidden_size=2048, intermediate_size=6144, num_hidden_layers=2, num_attention_heads=16, num_key_value_heads=8,
        head_dim=128, vocab_size=152064 * 2 // 28,
    ),
    # So small that decoding is spent on launching operations, not in them.
    "small": dict(
        hidden_size=256, intermediate_size=704, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4,
        head_dim=32, vocab_size=2048,
    ),
}  # fmt: skip
GATES = ("headwise", "elementwise")
TOKENS = 512
DECODED = 24


def matrix_work(config, tokens: int) -> float:
    """Multiply-adds of the matrix products a token takes, forward, with `tokens` keys before it on average."""
    heads = config.num_attention_heads * config.head_dim
    keys_and_values = 2 * config.num_key_value_heads * config.head_dim
    layer = config.hidden_size * (2 * heads + keys_and_values + 3 * config.intermediate_size) + 2 * tokens * heads
    gate = getattr(config, "attn_gate", None)
    layer += {None: 0, "headwise": config.num_attention_heads, "elementwise": heads}[gate] * config.hidden_size
    return config.num_hidden_layers * layer + config.hidden_size * config.vocab_size


def build(shape: dict) -> dict:
    torch.manual_seed(0)
    models = {"stock": Qwen3ForCausalLM(Qwen3Config(**shape)).eval()}
    for gate in GATES:
        config = gated_qwen.GatedQwenConfig(**shape, attn_gate=gate)
        models[gate] = gated_qwen.GatedQwenForCausalLM(config).eval()
        models[gate].load_state_dict(models["stock"].state_dict(), strict=False)
    return models


@torch.no_grad()
def refuse_if_wrong(models: dict) -> None:
    """Exit unless each gated model, its gates at exactly 1 (2 * sigmoid(0)), equals stock Qwen3 bit for bit."""
    input_ids = torch.randint(models["stock"].config.vocab_size, (1, 33), generator=torch.Generator().manual_seed(1))
    expected = models["stock"](input_ids).logits
    for gate in GATES:
        layers = models[gate].model.layers
        kept = [layer.self_attn.g_proj.weight.clone() for layer in layers]
        for layer in layers:
            layer.self_attn.g_proj.weight.zero_()
            layer.self_attn.output_gate.scale = 2.0
        equal = torch.equal(models[gate](input_ids).logits, expected)
        for layer, weight in zip(layers, kept, strict=True):
            layer.self_attn.g_proj.weight.copy_(weight)
            layer.self_attn.output_gate.scale = 1.0
        if not equal:
            sys.exit(f"{gate}: with open gates the logits are not stock Qwen3's; no figure would mean anything.")


def timed(function) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def prefill(model):
    input_ids = torch.randint(model.config.vocab_size, (1, TOKENS))
    with torch.no_grad():
        return timed(lambda: model(input_ids))


def training_step(model):
    input_ids = torch.randint(model.config.vocab_size, (1, TOKENS))
    model.train()

    def step():
        model(input_ids, labels=input_ids).loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=1e-9)
                parameter.grad = None

    seconds = timed(step)
    model.eval()
    return seconds


def decoding(model):
    input_ids = torch.randint(model.config.vocab_size, (1, 64))
    with torch.no_grad():
        cache = DynamicCache(config=model.config)
        model(input_ids, **{CACHE: cache})

        def decode():
            for position in range(DECODED):
                token = input_ids[:, position : position + 1]
                model(token, **{CACHE: cache})

        return timed(decode)


TASKS = {"prefill": prefill, "training step": training_step, "decoding": decoding}


def loading(rounds: int, dtype: str, kinds: dict[str, Path]) -> dict[str, list[tuple[float, float]]]:
    """Seconds and peak memory above the imports (MiB) of loading each checkpoint, each in a process of its own.

    Every weight is read once after loading: transformers maps the file, and weights that nobody reads cost nothing.
    """
    program = (
        "import resource, sys, threading, time, torch, transformers, gated_qwen\n"
        "transformers.utils.logging.disable_progress_bar()\n"
        "path, dtype = sys.argv[1:]\n"
        "import transformers.models.qwen3.modeling_qwen3\n"
        "def resident():\n"
        "    lines = open('/proc/self/status').read().splitlines()\n"
        "    return sum(int(l.split()[1]) for l in lines if l.startswith(('RssAnon', 'RssFile'))) / 1024\n"
        "before = resident(); peak = before; done = False\n"
        "def watch():\n"
        "    global peak\n"
        "    while not done:\n"
        "        peak = max(peak, resident()); time.sleep(0.002)\n"
        "thread = threading.Thread(target=watch); thread.start()\n"
        "start = time.perf_counter()\n"
        "model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)\n"
        "for parameter in model.parameters(): parameter.detach().view(torch.uint8).max()\n"
        "seconds = time.perf_counter() - start\n"
        "done = True; thread.join()\n"
        "print(seconds, peak - before)\n"
    )
    results = {name: [] for name in kinds}
    for _ in range(rounds):
        for name, path in kinds.items():
            output = subprocess.run(
                [sys.executable, "-c", program, path, dtype], capture_output=True, text=True, check=True
            )
            seconds, memory = map(float, output.stdout.split()[-2:])
            results[name].append((seconds, memory))
    return results


def write_checkpoints(folder: Path) -> dict[str, Path]:
    """Stock Qwen3 and released-form checkpoints of one shape, all pickled bf16 files of the same form."""
    released = dict(SHAPES["released"], num_hidden_layers=8, vocab_size=152064 * 8 // 28, tie_word_embeddings=True)
    paths = {}
    for name in ("stock", *GATES):
        paths[name] = folder / name
        paths[name].mkdir()
        # The elementwise release has a narrower MLP, so that all three have about one size.
        shape = dict(released, intermediate_size=5504) if name == "elementwise" else released
        if name == "stock":
            model = Qwen3ForCausalLM(Qwen3Config(**shape, dtype="bfloat16")).to(torch.bfloat16)
            model.config.save_pretrained(paths[name])
            state = model.state_dict()
        else:
            config = gated_qwen.GatedQwenConfig(**shape, attn_gate=name, dtype="bfloat16")
            model = gated_qwen.GatedQwenForCausalLM(config).to(torch.bfloat16)
            (paths[name] / "config.json").write_text(json.dumps(released_config(config)))
            state = released_state_dict(model.state_dict(), config)
        torch.save(state, paths[name] / "pytorch_model.bin")
    return paths


def ratio(gated: list[float], stock: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(gated, stock, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--shapes", nargs="*", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--no-loading", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    rows = []
    for shape_name in args.shapes:
        models = build(SHAPES[shape_name])
        refuse_if_wrong(models)
        for task_name, task in TASKS.items():
            times = {name: [] for name in models}
            rounds = args.rounds * (4 if shape_name == "small" else 1)
            for round_index in range(rounds + 1):
                for name, model in models.items():
                    torch.manual_seed(round_index)
                    seconds = task(model)
                    if round_index:  # the first round warms up
                        times[name].append(seconds)
            for gate in GATES:
                keys = {"decoding": 64 + DECODED // 2}.get(task_name, TOKENS // 2)
                work = matrix_work(models[gate].config, keys) / matrix_work(models["stock"].config, keys)
                stock = times["stock"]
                rows.append((shape_name, task_name, gate, statistics.median(stock), ratio(times[gate], stock), work))
        del models

    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {args.threads} threads, fp32")
    print("| shape | task | gate | stock, ms | gated / stock | matrix work predicts |\n|---|---|---|---|---|---|")
    for shape_name, task_name, gate, seconds, measured, work in rows:
        print(f"| {shape_name} | {task_name} | {gate} | {seconds * 1000:.1f} | {measured:.3f} | {work:.3f} |")

    if args.no_loading:
        return
    with tempfile.TemporaryDirectory() as folder:
        paths = write_checkpoints(Path(folder))
        results = {dtype: loading(max(args.rounds // 2, 3), dtype, paths) for dtype in ("bfloat16", "float32")}
    print(
        "\n| loading, released form | as | seconds | / stock | peak memory, MiB | / stock |\n|---|---|---|---|---|---|"
    )
    for dtype, of_dtype in results.items():
        stock_seconds, stock_memory = zip(*of_dtype["stock"], strict=True)
        for name, measured in of_dtype.items():
            seconds, memory = zip(*measured, strict=True)
            print(
                f"| {name} | {dtype} | {statistics.median(seconds):.2f} | {ratio(seconds, stock_seconds):.3f} "
                f"| {statistics.median(memory):.0f} | {ratio(memory, stock_memory):.3f} |"
            )


if __name__ == "__main__":
    main()
