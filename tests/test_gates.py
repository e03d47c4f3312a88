"""Gates among a model's parameters: groups, freezing, saving and loading them alone, and their figures in the logs."""

import peft
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support import build, max_error, tokens
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import gated_qwen
from gated_qwen import CheckpointError, GatedQwenForCausalLM
from gated_qwen.training import (
    GateStatistics,
    freeze_all_but_gates,
    gates_at_start,
    load_gates,
    parameter_groups,
    save_gates,
)

gated = pytest.mark.parametrize("gate", ["headwise", "elementwise"])


@gated
def test_parameter_groups_hold_each_trained_parameter_once(gate):
    model = build(gate, attn_gate_bias=True, attention_bias=True)
    model.model.embed_tokens.requires_grad_(False)
    groups = parameter_groups(model, gate_learning_rate=1e-2, weight_decay=0.1, learning_rate=1e-4)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = [[names[id(parameter)] for parameter in group["params"]] for group in groups]
    assert sorted(sum(found, [])) == sorted(n for n, p in model.named_parameters() if p.requires_grad)
    matrices, vectors, gates = found
    assert all(name.endswith(("proj.weight", "lm_head.weight")) for name in matrices) and all(
        "norm" in n or "bias" in n for n in vectors
    )
    assert len(gates) == 6 and all(".g_proj." in name for name in gates)
    assert [(group["lr"], group["weight_decay"]) for group in groups] == [(1e-4, 0.1), (1e-4, 0.0), (1e-2, 0.0)]
    optimizer = torch.optim.SGD(parameter_groups(model, 0.5), lr=0.0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model(tokens(), labels=tokens()).loss.backward()
    optimizer.step()
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == set(gates)


def test_without_gates_there_is_one_line():
    model = build(None)
    for call in (lambda: parameter_groups(model, 1e-2), lambda: freeze_all_but_gates(model)):
        with pytest.raises(ValueError, match="no gate"):
            call()
    assert all(parameter.requires_grad for parameter in model.parameters())
    with pytest.raises(CheckpointError, match="no gates"):
        save_gates(model, "nowhere")


@gated
def test_freezing_leaves_the_gates(gate):
    model = build(gate, attn_gate_layers=[0, 2])
    count = freeze_all_but_gates(model)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert len(trained) == 2 and all("g_proj" in name for name in trained)
    assert (
        count
        == sum(parameter.numel() for parameter in trained.values())
        == 2 * 6 * (1 if gate == "headwise" else 10) * 40
    )


@gated
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_gates_are_saved_and_loaded_alone(gate, dtype, tmp_path):
    build(gate, attn_gate_bias=True).to(dtype).save_pretrained(tmp_path / "base")
    model = GatedQwenForCausalLM.from_pretrained(tmp_path / "base", dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "g_proj" in name:
                parameter.add_(0.5)
    save_gates(model, tmp_path / "gates.safetensors")
    assert load_file(tmp_path / "gates.safetensors").keys() == {
        n for n, _ in model.named_parameters() if "g_proj" in n
    }
    again = GatedQwenForCausalLM.from_pretrained(tmp_path / "base", dtype=dtype)
    assert not torch.equal(again(tokens()).logits, model(tokens()).logits)
    load_gates(again, tmp_path / "gates.safetensors")
    assert torch.equal(again(tokens()).logits, model(tokens()).logits)
    # the same base in another dtype
    wide = GatedQwenForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    load_gates(wide, tmp_path / "gates.safetensors")
    assert all(torch.equal(p, q.float()) for p, q in zip(wide.parameters(), model.parameters(), strict=True))
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_other_gates_and_other_bases_are_refused_and_nothing_changes(tmp_path):
    file = tmp_path / "gates.safetensors"
    model = build("headwise")
    save_gates(model, file)
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    weights = load_file(file)

    def refused(words, target, weights=weights, **changes):
        other = tmp_path / "other.safetensors"
        save_file(weights, other, metadata={**metadata, **changes})
        before = {name: value.clone() for name, value in target.state_dict().items()}
        with pytest.raises(CheckpointError, match=words) as error:
            load_gates(target, other)
        assert "\n" not in str(error.value)
        assert all(torch.equal(value, before[name]) for name, value in target.state_dict().items())

    name = "model.layers.1.self_attn.g_proj.weight"
    refused("has no model.layers.1", model, {n: w for n, w in weights.items() if n != name})
    refused("also has extra", model, {**weights, "extra": torch.zeros(2)})
    refused(r"is \[5, 40\], and in the model \[6, 40\]", model, {**weights, name: torch.zeros(5, 40)})
    refused("also has model.layers.1", build("headwise", attn_gate_layers=[0, 2]))
    refused(r"is \[6, 40\], and in the model \[60, 40\]", build("elementwise"))
    refused("the gates are .*, and the model's", build("headwise", attn_gate_scale=2.0))
    other = build("headwise")
    with torch.no_grad():
        other.model.norm.weight[3] += 0.1
    refused("other weights than this model's", other)
    refused("does not hold gates that save_gates saved", model, content="")
    file.write_bytes(b"\x07" * 50)
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_gates(model, file)
    with pytest.raises(FileNotFoundError):
        load_gates(model, tmp_path / "nowhere")
    adapted = peft.get_peft_model(build("headwise"), peft.LoraConfig(target_modules=["g_proj"]))
    with pytest.raises(CheckpointError, match="is of an adapter"):
        save_gates(adapted, tmp_path / "adapter.safetensors")
    assert not (tmp_path / "adapter.safetensors").exists()


@gated
@pytest.mark.parametrize("start", ["scale", "fold"])
@torch.no_grad()
def test_gates_at_their_start_give_the_source(gate, start):
    config = LlamaConfig(
        vocab_size=131, hidden_size=36, intermediate_size=44, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2,
    )  # fmt: skip
    stock = LlamaForCausalLM(config).eval()
    model = gated_qwen.retrofit(stock, gate, start=start)
    for name, parameter in model.named_parameters():
        if "g_proj" in name:
            parameter.normal_()
    moved = model(tokens()).logits
    assert max_error(moved, stock(tokens()).logits) > 1e-2 if start == "scale" else True
    with gates_at_start(model):
        outputs = model(tokens(), output_gate_scores=True)
    assert torch.equal(outputs.logits, stock(tokens()).logits)
    assert all((scores == model.config.attn_gate_scale / 2).all() for scores in outputs.gate_scores)
    assert torch.equal(model(tokens()).logits, moved)


@gated
@pytest.mark.parametrize("first", [True, False])
def test_statistics_in_the_trainers_logs(gate, first, tmp_path):
    model = build(gate)
    rows = [{"input_ids": row, "labels": row} for row in tokens(4)]
    arguments = TrainingArguments(
        tmp_path, max_steps=2, per_device_train_batch_size=2, logging_steps=2, learning_rate=0.0, save_strategy="no",
        report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    seen = []
    trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[] if first else [GateStatistics()])
    if first:
        GateStatistics().add_to(trainer)
        trainer.callback_handler.callbacks[1].on_log = lambda *_, logs, **__: seen.append(dict(logs))
    trainer.train()
    logged = next(entry for entry in trainer.state.log_history if "loss" in entry)
    scores = build(gate).train()(tokens(4), output_gate_scores=True).gate_scores
    means = torch.stack([layer.mean() for layer in scores])
    assert logged["gate_mean"] == pytest.approx(means.mean().item(), rel=1e-5)
    assert logged["gate_mean_lowest"] == pytest.approx(means.min().item(), rel=1e-5)
    assert logged["gate_mean_highest"] == pytest.approx(means.max().item(), rel=1e-5)
    below = torch.stack([(layer < 0.1).float().mean() for layer in scores]).mean().item()
    assert logged["gate_below_0.1"] == pytest.approx(below, rel=1e-5) and 0 < below < 1
    assert not first or seen[0]["gate_mean"] == logged["gate_mean"]
    assert not any(module._forward_hooks for module in model.modules())
    with pytest.raises(ValueError, match="no gates"):
        Trainer(build(None), arguments, train_dataset=rows, callbacks=[GateStatistics()]).train()
