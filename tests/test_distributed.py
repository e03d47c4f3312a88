"""Released checkpoints over two processes (gloo, CPU), through transformers' own plans.

The packed q_proj is sharded before it is unpacked, so this also shows that the split falls between key/value groups.
"""

import json
import subprocess
import sys

import pytest
import transformers
from packaging.version import Version
from support import RELEASED

WORKER = """
import json
import os
import sys

import torch
import torch.distributed as dist
import gated_qwen
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

folder, parallelism = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(
    folder, dtype=torch.float32, distributed_config=DistributedConfig(**{parallelism: 2}), attn_implementation="eager"
)
expected = load_file(folder + "/expected.safetensors")
mask = expected["attention_mask"].bool()
with torch.no_grad():
    logits = model(**{name: expected[name] for name in ("input_ids", "attention_mask", "position_ids")}).logits
logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
difference = (logits - expected["logits"])[mask].abs().max().item()
gates = [parameter for name, parameter in model.named_parameters() if "g_proj" in name]
rows = [gate.to_local().shape[0] if hasattr(gate, "to_local") else gate.shape[0] for gate in gates]
with open(f"rank{dist.get_rank()}.json", "w") as file:
    json.dump({"difference": difference, "gate rows": rows}, file)
dist.barrier()
# Leaving otherwise, a process may abort in gloo's threads, which have nothing left to do.
os._exit(0)
"""
PIPELINE = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.24"), reason="pipeline parallel loading came with transformers 5.24"
)


@pytest.mark.parametrize(
    ("name", "parallelism", "gate_rows"),
    [
        ("1B_gate_headwise", "tp_size", [[2, 2, 2], [2, 2, 2]]),
        ("1B_gate_elementwise", "tp_size", [[32, 32, 32], [32, 32, 32]]),
        ("1B_gate_headwise", "fsdp_size", [[2, 2, 2], [2, 2, 2]]),
        pytest.param("1B_gate_headwise", "pp_size", [[4, 4], [4]], marks=PIPELINE),
    ],
)
def test_two_processes_give_the_authors_logits(tmp_path, name, parallelism, gate_rows):
    (tmp_path / "worker.py").write_text(WORKER)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "worker.py"]
    arguments = [RELEASED / name, parallelism]
    result = subprocess.run([*command, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert [rank["gate rows"] for rank in ranks] == gate_rows
    assert all(rank["difference"] < 2e-5 for rank in ranks)  # fp32; partial sums are added over the ranks
