"""What the tests share: tiny configs with grouped heads and odd sizes, random weights, and the released checkpoints.

`tests/data/released` holds three small checkpoints in the exact form of the authors' release, each with results of
their own code (see its README).
"""

from pathlib import Path

import torch

import gated_qwen

RELEASED = Path(__file__).parent / "data" / "released"
RELEASED_NAMES = ("1B_baseline", "1B_gate_headwise", "1B_gate_elementwise")
GATES = (None, "headwise", "elementwise")


VOCABULARY = 131


def tiny_config(**fields) -> gated_qwen.GatedQwenConfig:
    """2 query heads per key/value head, heads * head_dim != hidden_size, no two sizes alike."""
    defaults = dict(
        vocab_size=VOCABULARY,
        hidden_size=40,
        intermediate_size=72,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=10,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.2,
    )
    return gated_qwen.GatedQwenConfig(**{**defaults, **fields})


def randomise(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Random values in every parameter, norms and biases too, so that a wrong one shows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if "norm" in name else 0.25 * noise)
    return model.eval()


def build(gate, model_class=gated_qwen.GatedQwenForCausalLM, **fields) -> torch.nn.Module:
    return randomise(model_class(tiny_config(attn_gate=gate, **fields)))


def tokens(batch=2, length=11, seed=0) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def max_error(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape
    return (a.float() - b.float()).abs().max().item()
