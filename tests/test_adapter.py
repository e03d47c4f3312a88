"""LoRA adapters of a Llama on its retrofits: as they are after `scale`, rescaled after `fold`."""

import json

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from support import VOCABULARY, max_error, randomise, tokens

import gated_qwen
from gated_qwen import CheckpointError, retrofit_adapter, retrofit_checkpoint

KINDS = {
    "lora": {},
    "dora": dict(use_dora=True),
    "lora with biases": dict(lora_bias=True),
    "whole o_proj": dict(modules_to_save=["o_proj"], target_modules=["q_proj", "v_proj"]),
}


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(tokens(), use_cache=False).logits


@pytest.fixture
def stock(tmp_path):
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=36, intermediate_size=44, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=64, attention_bias=True,
    )  # fmt: skip
    randomise(transformers.LlamaForCausalLM(config)).save_pretrained(tmp_path / "stock")
    return tmp_path / "stock"


def make_adapter(stock, folder, **fields):
    fields = {"target_modules": ["q_proj", "v_proj", "o_proj", "up_proj"], **fields}
    base = transformers.LlamaForCausalLM.from_pretrained(stock)
    model = get_peft_model(base, LoraConfig(r=3, init_lora_weights=False, **fields))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and ("magnitude" in name or "modules_to_save" in name or "bias" in name):
                parameter.mul_(1.3).add_(0.1)
    model.save_pretrained(folder)
    return logits(model)


def on(checkpoint, adapter):
    return logits(PeftModel.from_pretrained(gated_qwen.GatedQwenForCausalLM.from_pretrained(checkpoint), adapter))


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_of_the_source_on_its_retrofits(stock, tmp_path, kind):
    expected = make_adapter(stock, tmp_path / "adapter", **KINDS[kind])
    assert max_error(expected, logits(transformers.LlamaForCausalLM.from_pretrained(stock))) > 0.1
    for start in ("scale", "fold"):
        retrofit_checkpoint(stock, tmp_path / start, "headwise", start=start, layers=[0, 2])
    assert torch.equal(on(tmp_path / "scale", tmp_path / "adapter"), expected)
    assert max_error(on(tmp_path / "fold", tmp_path / "adapter"), expected) > 1e-3  # half of its o_proj is lost
    scaled = retrofit_adapter(tmp_path / "adapter", tmp_path / "fold", tmp_path / "rescaled")
    assert set(scaled.values()) == {2.0} and not any("layers.1." in name for name in scaled)
    assert max_error(on(tmp_path / "fold", tmp_path / "rescaled"), expected) < 2e-5
    before, after = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("adapter", "rescaled"))
    assert all(torch.equal(after[name], before[name] * scaled.get(name, 1)) for name in before)
    assert retrofit_adapter(tmp_path / "adapter", tmp_path / "scale", tmp_path / "same") == {}
    assert torch.equal(on(tmp_path / "scale", tmp_path / "same"), expected)


@pytest.mark.parametrize("use_dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("pattern", [r".*_proj", r".*self_attn\.\w+_proj"])
def test_a_pattern_of_targets_does_not_take_in_the_gates(stock, tmp_path, pattern, use_dora):
    expected = make_adapter(stock, tmp_path / "adapter", target_modules=pattern, use_dora=use_dora)
    for start in ("scale", "fold"):
        retrofit_checkpoint(stock, tmp_path / start, "headwise", start=start)
        retrofit_adapter(tmp_path / "adapter", tmp_path / start, tmp_path / f"on-{start}")
        assert max_error(on(tmp_path / start, tmp_path / f"on-{start}"), expected) < 2e-5


def test_what_is_refused(stock, tmp_path):
    adapter, fold = tmp_path / "adapter", tmp_path / "fold"
    make_adapter(stock, adapter)
    retrofit_checkpoint(stock, fold, "headwise", start="fold")
    before = sorted(tmp_path.iterdir())

    def refused(words, *arguments):
        with pytest.raises(CheckpointError, match=words) as error:
            retrofit_adapter(*arguments)
        assert "\n" not in str(error.value) and sorted(tmp_path.iterdir()) == before

    refused("exists", adapter, fold, fold)
    refused("has no adapter_config.json", stock, fold, tmp_path / "t")
    refused("conversion.json", adapter, stock, tmp_path / "t")
    fields = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**fields, "peft_type": "LOHA"}))
    refused("LOHA", adapter, fold, tmp_path / "t")
    (adapter / "adapter_config.json").write_text(json.dumps({**fields, "base_model_name_or_path": str(fold)}))
    refused("it is an adapter of .* already", adapter, fold, tmp_path / "t")
    (adapter / "adapter_config.json").write_text(json.dumps(fields))
    refused("is inside", adapter, fold, adapter / "t")
    refused("is inside", adapter, fold, fold / "t")
    weights = load_file(adapter / "adapter_model.safetensors")
    eight_bits = {name: value.to(torch.float8_e4m3fn) for name, value in weights.items()}
    save_file(eight_bits, adapter / "adapter_model.safetensors", {"format": "pt"})
    refused("float8_e4m3fn, which is not scaled", adapter, fold, tmp_path / "t")
    smaller = {name: value[:, :20] if "lora_A" in name else value[:20] for name, value in weights.items()}
    save_file({k: v.contiguous() for k, v in smaller.items()}, adapter / "adapter_model.safetensors", {"format": "pt"})
    refused("does not fit", adapter, fold, tmp_path / "t")
    deeper = {name.replace("layers.2", "layers.4"): value for name, value in weights.items()}
    save_file(deeper, adapter / "adapter_model.safetensors", {"format": "pt"})
    refused("has no model.layers.4", adapter, fold, tmp_path / "t")
    (adapter / "adapter_model.safetensors").write_bytes(b"\x01" * 40)
    refused("cannot be read", adapter, fold, tmp_path / "t")
