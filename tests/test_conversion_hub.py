"""Retrofits of a Hub id, over HTTP: what is fetched, by revision and subfolder, and what the record says of it."""

import json
import subprocess
import sys

import pytest
import torch
from hub_server import HubServer, client_env, connected, run_command
from support import randomise
from transformers import LlamaConfig, LlamaForCausalLM

SHAPE = dict(
    vocab_size=2003, hidden_size=48, intermediate_size=72, num_hidden_layers=3, num_attention_heads=6,
    num_key_value_heads=3, head_dim=10, max_position_embeddings=64,
)  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """user/llama: other weights at `main` than at the tag `old`, and a third set in the folder `sub/small`."""
    folder = tmp_path_factory.mktemp("repo")
    with HubServer() as server:
        for seed, revision in ((1, "old"), (2, "main")):
            for place, own in ((folder, seed), (folder / "sub" / "small", seed + 10)):
                model = randomise(LlamaForCausalLM(LlamaConfig(**SHAPE)), own).to(torch.bfloat16)
                model.save_pretrained(place, max_shard_size="30KB")
            (folder / "chat_template.jinja").write_text("{{ messages }}")
            (folder / "modeling_llama.py").write_text("raise RuntimeError")
            (folder / "onnx").mkdir(exist_ok=True)
            (folder / "onnx" / "model.onnx").write_bytes(b"\0" * 4096)
            (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Llama\n")
            server.add_repo("user/llama", folder, revision=revision)
        yield server


def run(server, home, code: str) -> dict:
    """What `code` puts into `result`, in a process that talks to the server."""
    code = f"import json, gated_qwen\nresult = {{}}\n{code}\nprint(json.dumps(result))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=client_env(server, home), capture_output=True, text=True, cwd=home
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_hub_id_is_fetched_converted_and_recorded(server, tmp_path):
    result = run(
        server,
        tmp_path,
        """
from transformers import AutoModelForCausalLM
for name, where in {"main": {}, "old": {"revision": "old"}, "sub": {"subfolder": "sub/small"}}.items():
    record = gated_qwen.retrofit_checkpoint("user/llama", f"out/{name}", "elementwise", **where)
    weight = AutoModelForCausalLM.from_pretrained(f"out/{name}").model.norm.weight.float().tolist()
    theirs = AutoModelForCausalLM.from_pretrained("user/llama", **where).model.norm.weight.float().tolist()
    result[name] = record, weight, theirs
""",
    )
    weights = [weight for _, weight, _ in result.values()]
    assert weights[0] != weights[1] != weights[2] != weights[0]
    repo = server.repos["user/llama"]
    for name, (record, weight, theirs) in result.items():
        assert weight == theirs
        assert record["verification"]["max_difference"] == 0
        assert record["source"]["name"] == "user/llama"
        assert record["source"]["commit"] == repo.find("old" if name == "old" else "main")
        assert f"--revision {record['source']['commit']}" in record["command"]
    assert "--subfolder sub/small" in result["sub"][0]["command"]
    out = tmp_path / "out" / "main"
    assert (out / "chat_template.jinja").read_text() == "{{ messages }}"
    assert (out / "README.source.md").read_text().endswith("# Llama\n")
    card = (out / "README.md").read_text()
    assert "base_model: user/llama\n" in card and "license: apache-2.0\n" in card
    assert not (out / "modeling_llama.py").exists() and not (out / "onnx").exists()
    fetched = {request.path for request in server.requests if request.method == "GET"}
    assert not any(path.endswith((".py", ".onnx")) for path in fetched)


def max_size(server) -> int:
    repo = server.repos["user/llama"]
    return max(len(file.content) for file in repo.commits[repo.find("main")].values())


def test_a_dry_run_fetches_no_weights(server, tmp_path):
    before = len(server.requests)
    result = run(
        server,
        tmp_path,
        """
from gated_qwen import cli
result["status"] = cli.main(["retrofit", "user/llama", "out", "--dry-run", "--subfolder", "sub/small"])
plan = gated_qwen.plan_retrofit("user/llama", subfolder="sub/small")
result["tensors"], result["new"] = len(plan.tensors), plan.new_parameters
""",
    )
    assert result == {"status": 0, "tensors": 3 * 9 + 3 + 3, "new": 3 * 6 * 48}
    assert not (tmp_path / "out").exists()
    weights = [request for request in server.requests[before:] if request.path.endswith(".safetensors")]
    assert weights and all(request.range or request.method == "HEAD" for request in weights)
    # The client reads the first 100 kB of a file, where its header is.
    assert max(request.sent for request in weights) <= 100_001 < max_size(server)
    assert not list((tmp_path / "hub").rglob("*.safetensors"))


@pytest.mark.parametrize(
    ("source", "words"),
    (
        ("user/nothing", "user/nothing"),
        ("user/llama --revision nowhere", "nowhere"),
        ("user/llama --subfolder nowhere", "no folder 'nowhere'"),
    ),
)
def test_what_the_hub_does_not_have_is_one_line(server, tmp_path, source, words):
    for dry in ([], ["--dry-run"]):
        name, *options = source.split()
        with connected(server, tmp_path):
            status, _, err = run_command(["retrofit", name, "out", *options, *dry], tmp_path)
        lines = [line for line in err.splitlines() if line.startswith("gated-qwen")]
        assert status == 1 and len(lines) == 1 and words in lines[0], err
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("offline", [False, True])
@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_without_a_hub_a_mistyped_folder_is_one_line(server, tmp_path, offline, dry):
    with connected(server, tmp_path, ENDPOINT="http://127.0.0.1:9", HF_HUB_OFFLINE=offline):
        status, _, err = run_command(["retrofit", "user/nope", "out", *dry], tmp_path)
    assert status == 1 and "Traceback" not in err, err
    assert "user/nope is no folder here" in err.splitlines()[-1], err
