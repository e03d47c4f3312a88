"""`gated-qwen demo`, the command line around it, and the README's examples."""

import io
import re
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch

from gated_qwen import cli, demo

README = Path(__file__).parents[1] / "README.md"


@pytest.fixture(scope="module")
def output():
    out = io.StringIO()
    with redirect_stdout(out):
        assert cli.main(["demo"]) == 0
    return out.getvalue()


def test_demo_recognises_checks_generates_and_measures(output):
    assert "GatedQwenForCausalLM, headwise gate" in output
    assert "q_proj [264, 256] held     q_proj [256, 256] and g_proj [8, 256]" in output
    difference = float(re.search(r"largest difference +(\S+) in", output)[1])
    assert difference <= demo.TOLERANCE
    table = re.findall(r"^ +(\d) +(0\.\d{3}) +(\d+\.\d)% +(0\.\d{3})$", output, re.MULTILINE)
    assert [int(row[0]) for row in table] == [0, 1, 2, 3, 4]
    assert "Next: README.md" in output


def test_demo_says_so_and_fails_where_the_logits_differ(tmp_path, monkeypatch, capsys):
    folder = Path(shutil.copytree(demo.CHECKPOINT, tmp_path / "checkpoint"))
    weights = torch.load(folder / "pytorch_model.bin", weights_only=True)
    weights["model.layers.0.self_attn.q_proj.weight"][64] += 0.01  # one gate row of the first group
    torch.save(weights, folder / "pytorch_model.bin")
    monkeypatch.setattr(demo, "CHECKPOINT", folder)
    assert cli.main(["demo"]) == 1
    assert "please report this" in capsys.readouterr().out


def test_command_line_without_a_command_shows_what_there_is(capsys):
    with pytest.raises(SystemExit) as exit_info:
        cli.main([])
    assert exit_info.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


def test_python_m_runs_the_same_command_line(tmp_path):
    command = [sys.executable, "-m", "gated_qwen", "demo", "--help"]
    assert "Needs no network" in subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout


def test_the_readme_shows_what_the_demo_prints(output):
    shown = re.search(r"```text\n(.*?)```", README.read_text(), re.DOTALL)[1]
    # All but the place of the package, and what another machine's arithmetic may change.
    differs = re.compile(r"^ +/.*|^   > .*|\d\.\de-\d\d", re.MULTILINE)
    assert differs.sub("", shown).strip() == differs.sub("", output).strip()


def test_the_readmes_python_examples_run_in_order():
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    offline = [block for block in blocks if "QwQZh/" not in block]
    assert len(offline) == len(blocks) - 1  # only the one that names the Hub needs it
    exec("\n".join(offline), {})
