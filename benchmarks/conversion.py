"""Time and memory of conversions, against `cp -r` of the same checkpoint in the same run.

    python benchmarks/conversion.py FOLDER [--layers 8] [--rounds 5]

Makes a sharded bf16 checkpoint of a Llama with 7B's layers (8 of them: 3.8 GB) in FOLDER, and needs three times its
size there. In each round every conversion takes its turn, in an order drawn anew, each beside a `cp -r` of the same
source (before it or after it, by turns), after what the last one wrote has reached the disk; the source is in the page
cache. A first round is not counted. Reported are the medians of the rounds' ratios, and peak memory above a process
that only imports torch and transformers. Conversions also sum what they write (CRC-32) and have it reach the disk
before they publish it (fsync), both of which `cp` leaves out.
"""

import argparse
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

SHAPE = dict(
    vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_attention_heads=32, num_key_value_heads=8,
    head_dim=128, rms_norm_eps=1e-5, max_position_embeddings=4096, tie_word_embeddings=False,
)  # fmt: skip
CASES = {
    "scale, headwise": dict(attn_gate="headwise"),
    "scale, elementwise": dict(attn_gate="elementwise"),
    "fold, headwise": dict(attn_gate="headwise", start="fold"),
    "scale, headwise, link": dict(attn_gate="headwise", link=True),
    "scale, elementwise, link": dict(attn_gate="elementwise", link=True),
    "released headwise to elementwise": dict(attn_gate="elementwise", released=True),
    "released headwise (.bin) to elementwise": dict(attn_gate="elementwise", released=True, pickled=True),
}


def make_sources(folder: Path, layers: int) -> None:
    """A stock Llama in shards of about 1 GB, and a released headwise checkpoint of its size in both kinds of file."""
    import torch
    from safetensors.torch import save_file

    from gated_qwen import GatedQwenConfig
    from gated_qwen.conversion.headers import build_index
    from gated_qwen.conversion.layouts import released_config
    from gated_qwen.conversion.plan import expected_shapes, new_tensor

    stock = GatedQwenConfig(
        **SHAPE, num_hidden_layers=layers, attn_gate=None, use_qk_norm=False, architectures=["GatedQwenForCausalLM"]
    )
    fields = {**SHAPE, "num_hidden_layers": layers, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    released = GatedQwenConfig(**{**stock.to_dict(), "attn_gate": "headwise", "dtype": torch.bfloat16})
    noise = torch.randn(1 << 24).mul_(0.02).to(torch.bfloat16)

    def weights(shapes: dict) -> dict:
        sizes = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
        return {
            name: noise.roll(i).repeat(-(-sizes[name] // len(noise)))[: sizes[name]].view(shape).clone()
            for i, (name, shape) in enumerate(shapes.items())
        }

    def save(place: Path, fields: dict, shapes: dict, pickled: bool) -> None:
        if place.is_dir():
            return
        place.mkdir(parents=True)
        groups, size = [{}], 0
        for name, shape in shapes.items():
            nbytes = 2 * torch.Size(shape).numel()
            if groups[-1] and size + nbytes > 10**9:
                groups.append({})
                size = 0
            groups[-1][name] = shape
            size += nbytes
        stem, suffix = ("pytorch_model", "bin") if pickled else ("model", "safetensors")
        files = {f"{stem}-{i:05}-of-{len(groups):05}.{suffix}": group for i, group in enumerate(groups, start=1)}
        for name, group in files.items():
            if pickled:
                torch.save(weights(group), place / name)
            else:
                save_file(weights(group), place / name, metadata={"format": "pt"})
        index = {name: [new_tensor(tensor, "BF16", shape) for tensor, shape in g.items()] for name, g in files.items()}
        (place / f"{stem}.{suffix}.index.json").write_text(build_index(index))
        (place / "config.json").write_text(json.dumps(fields))

    save(folder / "llama", fields, expected_shapes(stock), pickled=False)
    packed = {}
    for name, shape in expected_shapes(released).items():
        rows = SHAPE["num_attention_heads"] if name.endswith("q_proj.weight") else 0
        if ".g_proj." not in name:
            packed[name] = (shape[0] + rows, *shape[1:])
    save(folder / "released", released_config(released), packed, pickled=False)
    save(folder / "released_bin", released_config(released), packed, pickled=True)


def convert(source: str, target: str, options: dict) -> None:
    """In a process of its own: one conversion, or a copy; prints its time and the process's peak memory.

    Copies too wait for the imports: on a virtual machine, memory that has been free for a while is slower to get.
    """
    import torch  # noqa: F401
    import transformers  # noqa: F401

    bare = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    import gated_qwen

    start = time.perf_counter()
    if options.get("copy"):
        subprocess.run(["cp", "-r", source, target], check=True)
    else:
        gated_qwen.retrofit_checkpoint(source, target, verify=False, **options)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"seconds": seconds, "peak": peak * 1024, "bare": bare * 1024}))


def source_of(options: dict) -> str:
    return "llama" if not options.get("released") else "released_bin" if options.get("pickled") else "released"


def run(folder: Path, options: dict) -> dict:
    target = folder / "target"
    given = {name: value for name, value in options.items() if name not in ("released", "pickled")}
    command = [sys.executable, __file__, "--convert", str(folder / source_of(options)), str(target), json.dumps(given)]
    result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
    result["disk"] = sum(
        file.stat().st_blocks * 512 for file in target.iterdir() if file.stat().st_nlink == 1 and file.is_file()
    )
    shutil.rmtree(target)
    os.sync()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=list(CASES), help="cases, by name")
    args = parser.parse_args()
    make_sources(args.folder, args.layers)
    size = sum(file.stat().st_size for file in (args.folder / "llama").iterdir())
    os.sync()
    results = {name: [] for name in args.only}
    ratios = {name: [] for name in args.only}
    copies = []
    draw = random.Random(0)
    for number in range(args.rounds + 1):
        for name in draw.sample(args.only, len(args.only)):
            source = source_of(CASES[name])
            subprocess.run(f"cat {args.folder}/{source}/* > /dev/null", shell=True, check=True)
            both = [CASES[name], {**CASES[name], "copy": True}]
            done = [run(args.folder, case) for case in (both if number % 2 else reversed(both))]
            result, copied = done if number % 2 else reversed(done)
            if number == 0:
                continue
            results[name].append(result)
            ratios[name].append(result["seconds"] / copied["seconds"])
            copies.append(copied["seconds"])
    print(f"{size / 1e9:.1f} GB in shards; cp -r {statistics.median(copies):.2f} s ({min(copies):.2f} to "
          f"{max(copies):.2f}); {os.cpu_count()} cores")  # fmt: skip
    print("| conversion | time, s | against cp -r | lowest, highest | peak memory above import, MB | disk, MB |")
    print("|---|---|---|---|---|---|")
    for name, runs in results.items():
        seconds = statistics.median(run["seconds"] for run in runs)
        memory = max(run["peak"] - run["bare"] for run in runs) / 1e6
        print(
            f"| {name} | {seconds:.2f} | {statistics.median(ratios[name]):.2f} | {min(ratios[name]):.2f}, "
            f"{max(ratios[name]):.2f} | {memory:.0f} | {runs[-1]['disk'] / 1e6:.0f} |"
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--convert"]:
        convert(sys.argv[2], sys.argv[3], json.loads(sys.argv[4]))
    else:
        main()
