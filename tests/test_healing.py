"""The loss that takes a sink out of a trained model: its terms by hand, its gradients, its teachers, its logs."""

import copy
import json
import math

import peft
import pytest
import torch
from safetensors.torch import load_file
from support import build, max_error, tokens
from transformers import AutoModelForCausalLM

import gated_qwen
from gated_qwen import CheckpointError, cli, demo
from gated_qwen.conversion.card import is_as_generated
from gated_qwen.training import HealingArguments, HealingTrainer, freeze_all_but_gates, gates_at_start
from gated_qwen.training.heal import heal_checkpoint, read_text
from gated_qwen.training.healing import distillation_loss, first_positions, peak_penalty, sink_penalty

MASK = torch.tensor([[1, 1, 1], [0, 1, 1]])


def test_the_first_token_is_found_on_either_side_of_the_padding():
    masks = torch.tensor([[1, 1, 0], [0, 1, 1], [1, 1, 1]])
    assert first_positions(masks).tolist() == [[True, False, False], [False, True, False], [True, False, False]]


def test_distillation_by_hand():
    student = torch.log(torch.tensor([[[0.5, 0.5], [0.2, 0.8], [0.9, 0.1]]]))
    teacher = torch.log(torch.tensor([[[0.25, 0.75], [0.2, 0.8], [0.1, 0.9]]]))
    first = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)
    third = 0.1 * math.log(0.1 / 0.9) + 0.9 * math.log(0.9 / 0.1)
    found = distillation_loss(student, teacher, torch.tensor([[1, 1, 1]]))
    assert found.item() == pytest.approx((first + third) / 3)
    assert distillation_loss(student, teacher, torch.tensor([[1, 1, 0]])).item() == pytest.approx(first / 2)
    # softened: probabilities to the power 1/T, and T^2
    soft = [p**0.5 / (p**0.5 + (1 - p) ** 0.5) for p in (0.25, 0.1, 0.5, 0.9)]
    one = soft[0] * math.log(soft[0] / soft[2]) + (1 - soft[0]) * math.log((1 - soft[0]) / (1 - soft[2]))
    found = distillation_loss(student, teacher, torch.tensor([[1, 0, 0]]), temperature=2.0)
    assert found.item() == pytest.approx(4 * one, rel=1e-5)


def test_peaks_by_hand():
    # of 16 channels, one is 8 and the others 1: rms is sqrt(79 / 16), and the peak 8 / rms is over 3
    x = torch.ones(1, 3, 16)
    x[0, :, 5] = -8.0
    x[0, 2] = 1.0  # no peak
    peak = (8 / math.sqrt(79 / 16) - 3) ** 2
    layers = [x, torch.ones(1, 3, 16)]
    mask = torch.tensor([[1, 1, 1]])
    assert peak_penalty(layers, mask, 3.0, 1.0).item() == pytest.approx(peak * 2 / 3 / 2, rel=1e-5)
    assert peak_penalty(layers, mask, 3.0, 10.0).item() == pytest.approx(peak * 11 / 12 / 2, rel=1e-5)
    # the first token is the second one where the row is padded on the left
    found = peak_penalty([x], torch.tensor([[0, 1, 1]]), 3.0, 10.0).item()
    assert found == pytest.approx(peak * 10 / 11, rel=1e-5)


def test_attention_on_the_first_token_by_hand():
    attention = torch.tensor([[1.0, 0.0, 0.0], [0.7, 0.3, 0.0], [0.5, 0.2, 0.3]])
    both = torch.stack([torch.stack([attention, attention])] * 2)  # (batch 2, heads 2, 3, 3)
    assert sink_penalty([both], torch.ones(2, 3)).item() == pytest.approx(0.6)
    # second row: the first token is at position 1, and position 2 the only later query
    assert sink_penalty([both], MASK).item() == pytest.approx((0.7 + 0.5 + 0.2) / 3)


def arguments(folder, **fields):
    return HealingArguments(
        folder, **{
            "max_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 1e-3, "logging_steps": 1,
            "save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True, "max_grad_norm": 0.0,
            "penalty_warmup_ratio": 0.0, **fields,
        },
    )  # fmt: skip


def rows(count=4, length=11):
    return [{"input_ids": row, "labels": row} for row in tokens(count, length)]


def start_of(gate, **fields):
    """A model whose gates are at their start, and its copy."""
    model = build(gate, attn_gate_scale=2.0, **fields)
    model.set_attn_implementation("eager")  # as the trainer does: others round otherwise
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "g_proj" in name:
                parameter.zero_()
    return model.train(), copy.deepcopy(model)


@pytest.mark.parametrize("gate", ["headwise", "elementwise"])
def test_the_loss_and_its_gradients_are_the_sum_of_the_terms(gate, tmp_path):
    model, teacher = start_of(gate)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    weights = {"kl_weight": 0.7, "lm_weight": 0.3, "peak_weight": 0.02, "sink_weight": 1.5, "peak_threshold": 1.5}
    trainer = HealingTrainer(model, arguments(tmp_path, **weights), train_dataset=rows(), teacher=teacher)
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[1, :3] = 0
    inputs = {"input_ids": tokens(2), "labels": tokens(2).masked_fill(mask == 0, -100), "attention_mask": mask}
    loss = trainer.compute_loss(model, inputs)
    loss.backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()

    model.set_attn_implementation("eager")
    states = []
    hooks = [layer.register_forward_hook(lambda m, a, o: states.append(o)) for layer in model.model.layers]
    outputs = model(**inputs, output_attentions=True)
    for hook in hooks:
        hook.remove()
    terms = {
        "kl": distillation_loss(outputs.logits, teacher(tokens(2), attention_mask=mask).logits, mask),
        "lm": outputs.loss,
        "peak": peak_penalty(states[:-1], mask, 1.5, 256.0),
        "sink": sink_penalty(outputs.attentions, mask),
    }
    assert all(term > 0.01 for term in terms.values()), terms
    expected = sum(weights[f"{name}_weight"] * term for name, term in terms.items())
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    expected.backward()
    for name, parameter in model.named_parameters():
        assert max_error(found[name], parameter.grad) <= 2e-5 * max(1, parameter.grad.abs().max().item()), name


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
def test_it_trains_with_the_penalties_under_gradient_checkpointing_alike(checkpointing, tmp_path):
    results = []
    for on in (False, checkpointing):
        model, teacher = start_of("headwise")
        options = {
            "gradient_checkpointing": on,
            "gradient_checkpointing_kwargs": {"use_reentrant": False} if on else None,
        }
        trainer = HealingTrainer(model, arguments(tmp_path, **options), train_dataset=rows(), teacher=teacher)
        trainer.train()
        results.append({name: value.clone() for name, value in model.state_dict().items()})
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())


def test_the_sink_and_the_peaks_go_down_and_the_gates_have_their_own_rate(tmp_path):
    model, teacher = start_of("headwise")
    with torch.no_grad():  # a token 0 that all look at
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight.mul_(3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer = HealingTrainer(
        model,
        arguments(
            tmp_path, max_steps=30, sink_weight=5.0, gate_learning_rate=0.05, penalty_warmup_ratio=0.5,
            eval_strategy="steps", eval_steps=15, logging_steps=5,
        ),
        train_dataset=rows(8),
        eval_dataset=rows(2),
        teacher=teacher,
        figures_ids=tokens(8),
    )  # fmt: skip
    rates = {id(p): group["lr"] for group in trainer.create_optimizer().param_groups for p in group["params"]}
    assert all(
        rates[id(parameter)] == (0.05 if "g_proj" in name else 1e-3) for name, parameter in model.named_parameters()
    )
    start = trainer.evaluate()
    trainer.train()
    logs = trainer.state.log_history
    training = [entry for entry in logs if "loss" in entry]
    assert all({"kl_loss", "peak_loss", "sink_loss"} <= entry.keys() for entry in training)
    assert training[-1]["sink_loss"] < 0.9 * training[0]["sink_loss"]
    evaluations = [entry for entry in logs if "eval_loss" in entry]
    assert len(evaluations) == 2
    assert {"f_attn", "f_attn_floor", "sink_ratio", "m_act", "perplexity", "gate_mean"} <= evaluations[-1].keys()
    assert evaluations[-1]["f_attn"] < evaluations[0]["f_attn"] < start["f_attn"]
    assert evaluations[-1]["gate_mean"] != 1.0
    assert not any(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_penalties_rise_with_the_steps(tmp_path):
    model, teacher = start_of("headwise")
    trainer = HealingTrainer(
        model, arguments(tmp_path, max_steps=10, penalty_warmup_ratio=0.4), train_dataset=rows(), teacher=teacher
    )
    trainer.state.max_steps = 10
    factors = []
    for step in (0, 1, 2, 4, 9):
        trainer.state.global_step = step
        factors.append(trainer.penalty_factor())
    assert factors == [0.0, 0.25, 0.5, 1.0, 1.0]


def test_a_model_whose_gates_alone_are_trained_is_its_own_teacher(tmp_path):
    model, teacher = start_of("elementwise")
    freeze_all_but_gates(model)
    with_teacher = copy.deepcopy(model)
    for one, of in ((model, None), (with_teacher, teacher)):
        HealingTrainer(one, arguments(tmp_path, max_steps=3), train_dataset=rows(), teacher=of).train()
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, dict(teacher.named_parameters())[n])}
    assert changed == {n for n, _ in model.named_parameters() if "g_proj" in n}
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), with_teacher.parameters(), strict=True))
    with torch.no_grad(), gates_at_start(model):
        assert max_error(model.eval()(tokens()).logits, teacher.eval()(tokens()).logits) <= 1e-5


def test_an_adapted_model_is_its_own_teacher(tmp_path):
    model, teacher = start_of("headwise")
    config = peft.LoraConfig(target_modules=["q_proj", "o_proj"], modules_to_save=["g_proj"], r=3)
    model = peft.get_peft_model(model, config)
    trainer = HealingTrainer(model, arguments(tmp_path, max_steps=3), train_dataset=rows())
    expected = teacher.eval()(tokens()).logits
    trainer.train()
    assert torch.equal(trainer.teacher_logits({"input_ids": tokens()}), expected)
    assert max_error(model.eval()(tokens()).logits, expected) > 1e-3


def test_what_cannot_work_is_one_line(tmp_path):
    model, teacher = start_of("headwise")

    def refused(words, model, **fields):
        with pytest.raises(ValueError, match=words) as error:
            HealingTrainer(model, arguments(tmp_path, **fields), train_dataset=rows(), teacher=None)
        assert "\n" not in str(error.value)

    refused("embed_tokens.weight is trained too", model)
    freeze_all_but_gates(model)
    with torch.no_grad():
        model.model.layers[1].self_attn.g_proj.weight[0, 0] = 0.1
    refused("layers.1.self_attn.g_proj.weight is not at its start", model)
    refused("nothing would keep the model's function", model, kl_weight=0.0)
    reentrant = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    refused("use_reentrant", model, **reentrant)
    plain = build(None).requires_grad_(False)
    refused("the model has no gates", plain)
    HealingTrainer(build(None), arguments(tmp_path), train_dataset=rows(), teacher=teacher).train()


# The command.

SENTENCE = "And the king said unto him, What shall I do? And he answered and said unto the king, Let us go up. "


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A retrofit of the demo's model without its gates: gates at their start, and a tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    gated_qwen.strip_checkpoint(demo.CHECKPOINT, folder / "stock", force=True, verify=False)
    gated_qwen.retrofit_checkpoint(folder / "stock", folder / "gated", verify=False)
    (folder / "text.txt").write_text(SENTENCE * 40)
    return folder


def weights_of(folder) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


COMMAND = ["--max-steps", "3", "--batch-size", "2", "--length", "32", "--cpu", "--quiet", "--logging-steps", "1"]


def test_the_command_heals_and_says_what_it_did(checkpoint, tmp_path, capsys):
    text, target = str(checkpoint / "text.txt"), tmp_path / "healed"
    options = ["--text", text, *COMMAND, "--max-steps", "20", "--learning-rate", "1e-3", "--sink-weight", "20"]
    assert cli.main(["heal", str(checkpoint / "gated"), str(target), *options]) == 0
    out = capsys.readouterr().out
    measured = json.loads((target / "measurements.json").read_text())
    assert measured.keys() >= {"F-Attn, before", "F-Attn, after", "perplexity, after", "mean gate, after"}
    assert f"{measured['F-Attn, after']:,.4g}" in out and measured["mean gate, before"] == 1.0
    assert measured["F-Attn, after"] < measured["F-Attn, before"]
    assert [path.name for path in tmp_path.iterdir()] == ["healed"]
    before, after = weights_of(checkpoint / "gated"), weights_of(target)
    assert before.keys() == after.keys() and not any(torch.equal(before[name], after[name]) for name in before)
    card = (target / "README.md").read_text()
    assert is_as_generated(card) and "trained, or otherwise changed" in card and "| F-Attn, after |" in card
    model = AutoModelForCausalLM.from_pretrained(target)
    assert model.config.use_cache and not (target / "training_args.bin").exists()


def test_interrupted_it_goes_on_to_the_same_result(checkpoint, tmp_path):
    given = dict(
        max_steps=4, per_device_train_batch_size=2, length=32, use_cpu=True, save_steps=2, disable_tqdm=True,
        learning_rate=1e-3,
    )  # fmt: skip
    text = [checkpoint / "text.txt"]
    heal_checkpoint(checkpoint / "gated", tmp_path / "whole", text, gates_only=True, **given)

    class Stopped(Exception):
        pass

    def stop(self, *arguments, **options):
        if self.state.global_step == 3:
            raise Stopped
        return training_step(self, *arguments, **options)

    training_step = HealingTrainer.training_step
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(HealingTrainer, "training_step", stop)
        heal_checkpoint(checkpoint / "gated", tmp_path / "again", text, gates_only=True, **given)
    assert not (tmp_path / "again").exists()
    heal_checkpoint(checkpoint / "gated", tmp_path / "again", text, gates_only=True, **given)
    whole, again, source = map(weights_of, (tmp_path / "whole", tmp_path / "again", checkpoint / "gated"))
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    assert {n for n in whole if not torch.equal(whole[n].float(), source[n].float())} == {
        n for n in whole if "g_proj" in n
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "whole"]


def test_text_of_several_kinds(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.jsonl").write_text('{"text": "two"}\n{"text": "three"}\n')
    (tmp_path / "c.csv").write_text("text,n\nfour,4\n")
    assert read_text([tmp_path / name for name in ("a.txt", "b.jsonl", "c.csv")]) == "one\ntwo\nthree\nfour"


def test_what_cannot_be_healed_is_one_line_and_nothing_is_written(checkpoint, tmp_path, capsys):
    text, gated = checkpoint / "text.txt", checkpoint / "gated"
    (tmp_path / "short.txt").write_text("And the king")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe")
    (tmp_path / "other.jsonl").write_text('{"words": "two"}\n')
    (tmp_path / "broken.jsonl").write_text("{")
    (tmp_path / "there").mkdir()
    before = sorted(tmp_path.iterdir())
    for model, target, file, words in (
        (gated, "there", text, "exists"),
        (gated, "t", tmp_path / "nowhere.txt", "is no file"),
        (gated, "t", tmp_path / "short.txt", "2 sequences of 32 are needed"),
        (gated, "t", tmp_path / "bytes.txt", "not text in UTF-8"),
        (gated, "t", tmp_path / "other.jsonl", "no column `text`, but words"),
        (gated, "t", tmp_path / "broken.jsonl", "cannot be read"),
        (checkpoint / "stock", "t", text, "has no gates"),
        (tmp_path / "there", "t", text, "there"),
    ):
        assert cli.main(["heal", str(model), str(tmp_path / target), "--text", str(file), *COMMAND]) == 1
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("gated-qwen heal")]
        assert len(lines) == 1 and words in lines[0], (words, lines)
        assert sorted(tmp_path.iterdir()) == before
    with pytest.raises(CheckpointError, match="another vocabulary"):
        build("headwise").save_pretrained(tmp_path / "other")
        heal_checkpoint(gated, tmp_path / "t", [text], teacher=tmp_path / "other", length=32, use_cpu=True)
