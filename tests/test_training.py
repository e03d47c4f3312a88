"""Training: losses, gradients, gradient checkpointing, adapters, and transformers' Trainer."""

import peft
import pytest
import torch
from support import max_error, randomise, tiny_config, tokens
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM, Trainer, TrainingArguments

from gated_qwen import (
    GatedQwenForCausalLM,
    GatedQwenForQuestionAnswering,
    GatedQwenForSequenceClassification,
    GatedQwenForTokenClassification,
)
from gated_qwen.modeling.modeling_gated_qwen import CACHE

USUAL_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

# Largest difference allowed between logits, which are of size about 10.
TOLERANCE = 5e-5

gated = pytest.mark.parametrize("gate", ["headwise", "elementwise"])


def build(gate, model_class=GatedQwenForCausalLM, **fields):
    return randomise(model_class(tiny_config(attn_gate=gate, **fields))).train()


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}


# Losses and gradients


LABELS = {
    "language-model": (GatedQwenForCausalLM, {}, {"labels": tokens()}),
    "single-label": (GatedQwenForSequenceClassification, {"num_labels": 4}, {"labels": torch.tensor([3, 0])}),
    "multi-label": (
        GatedQwenForSequenceClassification,
        {"num_labels": 4},
        {"labels": torch.tensor([[1.0, 0.0, 1.0, 1.0], [0.0, 0.0, 1.0, 0.0]])},
    ),
    "regression": (GatedQwenForSequenceClassification, {"num_labels": 1}, {"labels": torch.tensor([0.5, -2.0])}),
    "token-labels": (GatedQwenForTokenClassification, {"num_labels": 4}, {"labels": tokens() % 4}),
    "answers": (
        GatedQwenForQuestionAnswering,
        {},
        {"start_positions": torch.tensor([1, 4]), "end_positions": torch.tensor([3, 9])},
    ),
}
ALL_BIASES = {"attention_bias": True, "mlp_bias": True, "attn_gate_bias": True}


@pytest.mark.parametrize("kind", LABELS)
def test_every_parameter_gets_a_gradient(gate, kind):
    model_class, fields, labels = LABELS[kind]
    model = build(gate, model_class, **fields, **ALL_BIASES)
    outputs = model(tokens(), **labels)
    assert outputs.loss.isfinite() and outputs.loss.shape == ()
    outputs.loss.backward()
    for name, gradient in gradients(model).items():
        assert gradient is not None and gradient.isfinite().all() and gradient.any(), name
        if "g_proj" in name:
            # one row a head, or a channel: all of them learn
            assert gradient.view(len(gradient), -1).any(-1).all(), name
    if model_class is GatedQwenForSequenceClassification:
        kinds = {"single-label": "single_label_classification", "multi-label": "multi_label_classification"}
        assert model.config.problem_type == kinds.get(kind, "regression")


def test_language_model_loss_is_the_mean_over_the_next_tokens(gate):
    model, ids = build(gate), tokens()
    labels = ids.clone()
    labels[0, :6] = -100
    outputs = model(ids, labels=labels)
    expected = torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(outputs.loss, expected)


def test_a_gate_of_one_trains_as_stock_qwen3_bit_for_bit(gate):
    """The loss and all gradients but the gates', attention dropout included."""
    model = build(gate, attn_gate_scale=2.0, attn_gate_bias=True, attention_dropout=0.2)
    config = model.config
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    sizes = {name: getattr(config, name) for name in ("vocab_size", "head_dim", *names)}
    twin = Qwen3ForCausalLM(Qwen3Config(**sizes, attention_dropout=0.2)).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "g_proj" in name:
                parameter.zero_()
    twin.load_state_dict({name: value for name, value in model.state_dict().items() if "g_proj" not in name})

    ids, losses = tokens(), []
    for one in (model, twin):
        torch.manual_seed(0)
        losses.append(one(ids, labels=ids).loss)
        losses[-1].backward()
    assert torch.equal(*losses)
    found = gradients(model)
    assert all(torch.equal(found[name], gradient) for name, gradient in gradients(twin).items())
    assert all(gradient.any() for name, gradient in found.items() if "g_proj" in name)


@gated
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_low_precision_gradients_are_finite(gate, dtype):
    model, ids = build(gate).to(dtype), tokens()
    model(ids, labels=ids).loss.backward()
    assert all(gradient.dtype == dtype and gradient.isfinite().all() for gradient in gradients(model).values())


# Gradient checkpointing


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize(
    ("gate", "frozen"),
    [(None, False), ("headwise", False), ("headwise", True), ("elementwise", False), ("elementwise", True)],
    ids=["ungated", "headwise", "headwise-gates-only", "elementwise", "elementwise-gates-only"],
)
def test_gradient_checkpointing_gives_the_same_gradients(gate, frozen, use_reentrant):
    ids, results, runs = tokens(), [], []
    for checkpointing in (False, True):
        model = build(gate, attention_dropout=0.2)
        if frozen:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_("g_proj" in name)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
            if frozen:
                model.enable_input_require_grads()
        calls = []
        for index, layer in enumerate(model.model.layers):
            layer.self_attn.register_forward_hook(lambda *_, index=index, calls=calls: calls.append(index))
        torch.manual_seed(0)
        outputs = model(ids, labels=ids, use_cache=checkpointing)
        assert outputs.get(CACHE) is None
        outputs.loss.backward()
        results.append(gradients(model))
        runs.append(calls)
    without, with_checkpoints = results
    assert runs == [[0, 1, 2], [0, 1, 2, 2, 1, 0]], "each layer runs again in the backward pass"
    assert without.keys() == with_checkpoints.keys()
    assert all(torch.equal(gradient, with_checkpoints[name]) for name, gradient in without.items())


@gated
@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_gate_scores_under_gradient_checkpointing(gate, use_reentrant):
    model, ids = build(gate), tokens()
    expected = model(ids, output_gate_scores=True).gate_scores
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    outputs = model(ids, labels=ids, output_gate_scores=True)
    outputs.loss.backward()
    assert len(outputs.gate_scores) == 3 and all(map(torch.equal, outputs.gate_scores, expected))


# Adapters


def add_lora(model, **fields):
    """LoRA that is not the identity at first, as PEFT makes it by default."""
    torch.manual_seed(1)
    config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, lora_alpha=4, **{"r": 8, **fields})
    return peft.get_peft_model(model, config).eval()


def adapted(model) -> set[str]:
    """The last names of the modules that have an adapter."""
    return {
        name.split(".")[-1] for name, module in model.named_modules() if isinstance(module, peft.tuners.lora.LoraLayer)
    }


def test_the_usual_lora_targets_leave_the_gates_alone(gate):
    model = add_lora(build(gate), target_modules=USUAL_TARGETS)
    assert adapted(model) == set(USUAL_TARGETS)
    assert not any("g_proj" in name for name, parameter in model.named_parameters() if parameter.requires_grad)
    mlp_only = add_lora(build(gate), target_modules=["gate_proj"])
    assert all(".mlp." in name for name, parameter in mlp_only.named_parameters() if parameter.requires_grad)


def test_without_targets_peft_takes_those_of_qwen3(gate, monkeypatch):
    targets = peft.utils.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    monkeypatch.delitem(targets, "gated_qwen", raising=False)  # as where PEFT is imported last
    model = add_lora(build(gate), target_modules=None)
    assert adapted(model) == set(targets["qwen3"]) == {"q_proj", "v_proj"}


@gated
def test_dora_on_the_gates_merges(gate):
    model, ids = add_lora(build(gate), target_modules=["g_proj", "o_proj"], use_dora=True), tokens()
    with torch.no_grad():
        unmerged = model(ids).logits
        assert max_error(model.merge_and_unload()(ids).logits, unmerged) <= TOLERANCE


def test_all_linear_takes_the_gates_but_not_the_head(gate):
    model = add_lora(build(gate), target_modules="all-linear")
    assert adapted(model) == {*USUAL_TARGETS, *([] if gate is None else ["g_proj"])}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@torch.no_grad()
def test_merged_lora_equals_unmerged(gate, tied, tmp_path):
    # r is over the 6 rows of a headwise gate
    model, ids = add_lora(build(gate, tie_word_embeddings=tied), target_modules="all-linear"), tokens()
    unmerged = model(ids).logits
    with model.disable_adapter():
        assert max_error(model(ids).logits, unmerged) > 0.1
    merged = model.merge_and_unload()
    assert type(merged) is GatedQwenForCausalLM
    assert max_error(merged(ids).logits, unmerged) <= TOLERANCE
    merged.save_pretrained(tmp_path)
    assert torch.equal(GatedQwenForCausalLM.from_pretrained(tmp_path)(ids).logits, merged(ids).logits)


@gated
def test_lora_on_the_gates_trains_them_alone(gate):
    model, ids = add_lora(build(gate), target_modules=["g_proj"]), tokens()
    assert adapted(model) == {"g_proj"}
    model(ids, labels=ids).loss.backward()
    trained = gradients(model)
    assert len(trained) == 6 and all("g_proj.lora_" in name and value.any() for name, value in trained.items())


@gated
@pytest.mark.parametrize("modules_to_save", [None, ["g_proj"]], ids=["lora", "lora-and-whole-gates"])
@torch.no_grad()
def test_saved_adapter_gives_the_same_logits(gate, modules_to_save, tmp_path):
    base, ids = tmp_path / "base", tokens()
    build(gate).save_pretrained(base)
    targets = USUAL_TARGETS if modules_to_save else [*USUAL_TARGETS, "g_proj"]
    model = add_lora(
        GatedQwenForCausalLM.from_pretrained(base), target_modules=targets, modules_to_save=modules_to_save
    )
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(0.05)
    expected = model(ids).logits
    model.save_pretrained(tmp_path / "adapter")

    loaded = peft.PeftModel.from_pretrained(GatedQwenForCausalLM.from_pretrained(base), tmp_path / "adapter")
    assert torch.equal(loaded.eval()(ids).logits, expected)
    alone = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    assert torch.equal(alone.eval()(ids).logits, expected)


# Trainer


@pytest.mark.parametrize("gradient_checkpointing", [False, True], ids=["plain", "checkpointed"])
def test_trainer_trains_and_saves(gate, gradient_checkpointing, tmp_path):
    model = build(gate)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    data = [{"input_ids": row, "labels": row} for row in tokens(8)]
    arguments = TrainingArguments(
        tmp_path,
        max_steps=2,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_steps=2,
        gradient_checkpointing=gradient_checkpointing,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 2 and torch.tensor(losses).isfinite().all()
    assert not any(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    trainer.save_model(tmp_path / "final")
    ids = tokens(seed=1)
    expected = model.eval()(ids).logits
    for folder in ("final", "checkpoint-2"):
        assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / folder)(ids).logits, expected)


@gated
def test_trainer_with_frozen_weights_changes_the_gates_only(gate, tmp_path):
    model = build(gate)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("g_proj" in name)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    data = [{"input_ids": row, "labels": row} for row in tokens(4)]
    arguments = TrainingArguments(
        tmp_path, max_steps=1, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True
    )
    Trainer(model, arguments, train_dataset=data).train()
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if "g_proj" in name}
