"""`gated-qwen demo`: what the package does, shown on a small model that comes with it.

The model, a headwise one of 4.2M parameters, lies in `checkpoint/` in the authors' released form; `train.py` made it.
"""

import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

CHECKPOINT = Path(__file__).parent / "checkpoint"
PASSAGE = Path(__file__).parent / "passage.txt"
PROMPTS = ("And the king said unto", "So she sat", "ship: a")

# The largest difference from the recorded logits that other machines' arithmetic may make.
TOLERANCE = 1e-4


def retrofit(folder: Path) -> None:
    """Print what the conversions make of the demo's model."""
    from .. import retrofit_checkpoint, strip_checkpoint

    def difference(record: dict) -> str:
        return f"largest difference in logits {record['verification']['max_difference']:.2g}"

    record = retrofit_checkpoint(CHECKPOINT, folder / "elementwise", "elementwise")
    print(
        f"   its gates as elementwise ones          {record['parameters']['all']:,} parameters, {difference(record)}"
    )
    record = strip_checkpoint(CHECKPOINT, folder / "stock", force=True)
    model_type = json.loads((folder / "stock" / "config.json").read_text())["model_type"]
    print(f"   without its gates                      a stock {model_type} model, {difference(record)}")
    record = retrofit_checkpoint(folder / "stock", folder / "gated", "headwise")
    print(f"   that with new gates at their start     {record['parameters']['new']:,} new ones, {difference(record)}")
    strip_checkpoint(folder / "gated", folder / "again")
    same = all(
        (folder / "again" / file.name).read_bytes() == file.read_bytes() for file in (folder / "stock").iterdir()
    )
    print(f"   stripped again                         {'the same files, byte for byte' if same else 'OTHER FILES'}")


def run() -> int:
    """Print the demo. Returns 0, or 1 where the logits are not the recorded ones."""
    logging.disable_progress_bar()
    print(f"1. Load a checkpoint in the authors' released form\n   {CHECKPOINT}")
    fields = json.loads((CHECKPOINT / "config.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    config, attention = model.config, model.model.layers[0].self_attn
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    query, gate = attention.q_proj.weight, attention.g_proj.weight
    packed = [len(query) + len(gate), config.hidden_size]
    print(
        f"   its config.json says       model_type {fields['model_type']!r}, whose stock class cannot load it\n"
        f"   recognised as              {type(model).__name__}, {config.attn_gate} gate\n"
        f"   size                       {model.num_parameters():,} parameters, {config.num_hidden_layers} layers, "
        f"{heads} heads over {groups} key/value heads\n"
        f"   q_proj {packed} held     q_proj {list(query.shape)} and g_proj {list(gate.shape)}"
    )

    print("\n2. Compare with the recorded logits")
    expected = load_file(CHECKPOINT / "expected.safetensors")
    with torch.no_grad():
        logits = model(expected["input_ids"]).logits
    difference = (logits - expected["logits"]).abs().max().item()
    tokens, vocabulary = logits.shape[1:]
    agrees = difference <= TOLERANCE
    print(f"   largest difference         {difference:.1e} in {tokens} x {vocabulary} logits, allowed {TOLERANCE:.0e}")
    if not agrees:
        print("   The model is not computed as it was recorded: please report this, with your versions.")
        return 1

    print("\n3. Generate")
    torch.manual_seed(0)
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt")
        output = model.generate(**inputs, max_new_tokens=40, do_sample=True, temperature=0.6, top_p=0.9)
        text = tokenizer.decode(output[0], skip_special_tokens=True)
        print("   > " + " ".join(text.split()))

    inputs = tokenizer(PASSAGE.read_text(), return_tensors="pt", truncation=True, max_length=256)
    length = inputs.input_ids.shape[1]
    print(f"\n4. Gates and first-token attention, on {length} tokens of Alice in Wonderland held out in training")
    model.set_attn_implementation("eager")
    with torch.no_grad():
        outputs = model(**inputs, output_gate_scores=True, output_attentions=True)
    floor = sum(1 / n for n in range(1, length + 1)) / length
    print("   layer   mean gate   gates < 0.1   attention to the first token")
    for layer, (scores, weights) in enumerate(zip(outputs.gate_scores, outputs.attentions, strict=True)):
        closed = (scores < 0.1).float().mean()
        print(f"   {layer:5}   {scores.mean():9.3f}   {closed:11.1%}   {weights[..., 0].mean():.3f}")
    print(f"   Attention spread evenly would give the first token {floor:.3f}; a sink takes far more.")

    print("\n5. Retrofit, in a temporary folder")
    with tempfile.TemporaryDirectory() as folder:
        retrofit(Path(folder))

    print(
        "\nNext: README.md. In a script of your own:\n"
        "   import gated_qwen\n"
        "   from transformers import AutoModelForCausalLM\n"
        '   model = AutoModelForCausalLM.from_pretrained("QwQZh/gated_attention", subfolder="1B_gate_headwise")'
    )
    return 0
