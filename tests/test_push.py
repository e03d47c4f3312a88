"""Pushing to the Hub and loading from it, over HTTP, with a local server that checks sizes and hashes."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hub_server import HubServer, client_env, connected, run_command
from huggingface_hub import HfApi, ModelCard
from safetensors.torch import load_file, save_file
from support import RELEASED, build, randomise, tokens
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import gated_qwen
from gated_qwen import demo, retrofit_checkpoint
from gated_qwen.conversion import card as card_module
from gated_qwen.conversion.card import card_of

TINY = dict(
    vocab_size=131, hidden_size=36, intermediate_size=44, num_hidden_layers=2, num_attention_heads=6,
    num_key_value_heads=2,
)  # fmt: skip
CODE = {"configuration_gated_qwen.py", "modeling_gated_qwen.py"}


@pytest.fixture
def server():
    with HubServer() as server:
        yield server


@pytest.fixture(scope="module")
def gated(tmp_path_factory) -> Path:
    """A retrofit of a small Llama with a tokenizer, a licence and a chat template."""
    folder = tmp_path_factory.mktemp("work")
    sizes = dict(vocab_size=2048, hidden_size=36, intermediate_size=44, num_hidden_layers=3, num_attention_heads=6)
    model = randomise(LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, max_position_embeddings=64)))
    model.save_pretrained(folder / "llama", max_shard_size="100KB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / "llama" / name).write_bytes((Path(demo.CHECKPOINT) / name).read_bytes())
    (folder / "llama" / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "llama" / "README.md").write_text("---\nlicense: apache-2.0\nlanguage: [en]\n---\n# Llama\n")
    retrofit_checkpoint(folder / "llama", folder / "gated", start="fold", layers=[0, 2])
    return folder / "gated"


def run(server, home: Path, code: str, with_package: bool = True) -> str:
    start = "import gated_qwen\n" if with_package else "import sys\nsys.modules['gated_qwen'] = None\n"
    done = subprocess.run(
        [sys.executable, "-c", start + code],
        env=client_env(server, home / "hub"), capture_output=True, text=True, cwd=home,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def command(server, home: Path, *words: str, status: int = 0) -> str:
    with connected(server, home / "hub"):
        found, out, err = run_command(words, home)
    assert found == status, err
    if status:
        lines = [line for line in err.splitlines() if line.startswith("gated-qwen")]
        assert len(lines) == 1 and "Traceback" not in err, err
        return lines[0]
    return out


def files_of(server, name: str, revision: str = "main") -> dict[str, bytes]:
    repo = server.repos[name]
    return {path: file.content for path, file in repo.commits[repo.find(revision)].items()}


def test_a_pushed_folder_loads_with_and_without_the_package(server, gated, tmp_path):
    before = {path: path.read_bytes() for path in gated.rglob("*") if path.is_file()}
    out = command(server, tmp_path, "push", str(gated), "user/model", "--message", "First")
    assert "/user/model/commit/" in out
    assert {path: path.read_bytes() for path in gated.rglob("*") if path.is_file()} == before
    there = files_of(server, "user/model")
    ours = {path.relative_to(gated).as_posix() for path in before}
    assert CODE < there.keys() and there.keys() - CODE - {".gitattributes"} == ours
    for path, data in before.items():
        if path.name not in ("README.md", "config.json"):
            assert there[path.name] == data
    assert len(server.repos["user/model"].commits) == 2  # the empty one, and all of it at once

    expected = gated_qwen.GatedQwenForCausalLM.from_pretrained(gated)(tokens()).logits
    for with_package in (True, False):
        trust = "" if with_package else ", trust_remote_code=True"
        code = f"""
import torch
from transformers import AutoModelForCausalLM
for revision in ("main", "main"):
    model = AutoModelForCausalLM.from_pretrained("user/model", revision=revision{trust})
print(type(model).__module__)
torch.save(model(torch.tensor({tokens().tolist()})).logits, "logits.pt")
"""
        module = run(server, tmp_path, code, with_package)
        assert module.startswith("gated_qwen" if with_package else "transformers_modules")
        assert torch.equal(torch.load(tmp_path / "logits.pt"), expected)


def test_the_card_is_made_of_facts_and_its_usage_works_when_pasted(server, gated, tmp_path):
    (gated / "measurements.json").write_text('{"first-token attention": 0.0531, "text": "Alice"}')
    try:
        command(server, tmp_path, "push", str(gated), "user/model")
    finally:
        (gated / "measurements.json").unlink()
    text = files_of(server, "user/model")["README.md"].decode()
    card, record = ModelCard(text), json.loads((gated / "conversion.json").read_text())
    assert card.data.license == "apache-2.0" and card.data.language == ["en"]
    assert card.data.library_name == "transformers" and {"gated_qwen", "gated-attention"} <= set(card.data.tags)
    weights = {name: value for file in gated.glob("*.safetensors") for name, value in load_file(file).items()}
    facts = [
        "headwise, in layers [0, 2]",
        "`fold`",
        record["command"],
        record["made_by"],
        "float32",
        "0.0531",
        "Alice",
    ]
    facts += [f"{sum(w.numel() for w in weights.values()):,}", f"{record['parameters']['new']:,} new"]
    facts += ["largest difference 0", "`llama`"]
    for fact in facts:
        assert fact in text, fact
    assert "PATH_OR_ID" not in text
    (code,) = re.findall(r"```python\n(.*?)```", text, re.S)
    assert '"user/model"' in code and "import gated_qwen" not in code
    printed = run(server, tmp_path, code, with_package=False)
    assert printed.startswith("Once upon a time") and len(printed) > 40


def test_without_code(server, gated, tmp_path):
    command(server, tmp_path, "push", str(gated), "user/model", "--no-code", "--revision", "dev", "--private")
    there = files_of(server, "user/model", "dev")
    assert not CODE & there.keys() and b"auto_map" not in there["config.json"] and server.repos["user/model"].private
    assert files_of(server, "user/model").keys() <= {".gitattributes"}
    (code,) = re.findall(r"```python\n(.*?)```", there["README.md"].decode(), re.S)
    assert "import gated_qwen" in code and "trust_remote_code" not in code
    assert run(server, tmp_path, code.replace('("user/model"', '("user/model", revision="dev"')).startswith("Once")


def test_a_dry_run_sends_nothing(server, gated, tmp_path):
    out = command(server, tmp_path, "push", str(gated), "user/model", "--dry-run")
    assert "model.safetensors.index.json" in out and "modeling_gated_qwen.py" in out
    assert not server.requests


def test_weights_of_an_earlier_push_do_not_stay_beside_the_new_ones(server, gated, tmp_path):
    build("headwise").save_pretrained(tmp_path / "single")
    (tmp_path / "single" / "notes.txt").write_text("kept")
    command(server, tmp_path, "push", str(tmp_path / "single"), "user/model")
    command(server, tmp_path, "push", str(gated), "user/model")
    there = files_of(server, "user/model")
    assert "model.safetensors" not in there and "model.safetensors.index.json" in there and "notes.txt" in there
    command(server, tmp_path, "push", str(tmp_path / "single"), "user/model")
    assert {name for name in files_of(server, "user/model") if "safetensors" in name} == {"model.safetensors"}


def test_an_interrupted_upload_goes_on_where_it_was(server, gated, tmp_path):
    server.fail_next_put(after_bytes=60_000, times=20)
    command(server, tmp_path, "push", str(gated), "user/model", status=1)
    assert files_of(server, "user/model").keys() <= {".gitattributes"}  # nothing of it, rather than a part
    server._cuts.clear()
    uploaded = set(server.repos["user/model"].objects)
    before = len(server.requests)
    command(server, tmp_path, "push", str(gated), "user/model")
    again = [request for request in server.requests[before:] if request.method == "PUT"]
    assert len(again) == len(list(gated.glob("*.safetensors"))) - len(uploaded)
    there = files_of(server, "user/model")
    assert all(there[path.name] == path.read_bytes() for path in gated.glob("*.safetensors"))


def spoil(folder: Path, how: str, work: Path) -> None:
    if how == "link":
        (work / "outside.txt").write_text("secret")
        (folder / "link.txt").symlink_to(work / "outside.txt")
    elif how == "card":
        (folder / "README.md").write_text("---\nlicense: [mit\n---\n# Mine\n")
    elif how == "bytes":
        (folder / "README.md").write_bytes(b"# Mine \xff\n")
    elif how == "name":
        (folder / os.fsdecode(b"a\xff.txt")).write_text("")
    elif how == "record":
        record = json.loads((folder / "conversion.json").read_text())
        del record["source"]["name"]
        (folder / "conversion.json").write_text(json.dumps(record))
    else:
        shutil.rmtree(folder)
        build("headwise").save_pretrained(work / "native")
        gated_qwen.export_checkpoint(work / "native", folder, "qwen3_5", verify=False)
        weights = load_file(folder / "model.safetensors")
        del weights["model.norm.weight"]
        save_file(weights, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("folder", "repo", "words"),
    [
        ("gated", "other/model", "rights|403"),
        ("gated", "user/mo del", "not a name on the Hub"),
        ("gated", "a/b/c", "not a name on the Hub"),
        ("nowhere", "user/model", "is no folder"),
        ("released", "user/model", "authors' form"),
        ("empty", "user/model", "config.json"),
        ("cut", "user/model", "safetensors"),
        ("stock", "user/model", "a llama model that no conversion made"),
        ("export without a norm", "user/model", r"model\.norm\.weight"),
        ("link", "user/model", "link.txt leads out of the folder"),
        ("card", "user/model", "its metadata cannot be read"),
        ("bytes", "user/model", "its metadata cannot be read"),
        ("name", "user/model", "the name is not UTF-8"),
        ("record", "user/model", r"conversion\.json is damaged"),
        ("~nobody-has-this-name/x", "user/model", "nobody-has-this-name"),
    ],
)
def test_what_cannot_be_pushed_is_one_line_and_nothing_is_sent(server, gated, tmp_path, folder, repo, words):
    (tmp_path / "empty").mkdir()
    build("headwise").save_pretrained(tmp_path / "cut")
    data = (tmp_path / "cut" / "model.safetensors").read_bytes()
    (tmp_path / "cut" / "model.safetensors").write_bytes(data[:-7])
    places = {"gated": gated, "released": RELEASED / "1B_gate_headwise", "stock": gated.parent / "llama"}
    if folder.startswith("~"):
        places[folder] = folder
    elif not (tmp_path / folder).exists() and folder not in ("nowhere", *places):
        spoil(Path(shutil.copytree(gated, tmp_path / folder)), folder, tmp_path)
    line = command(server, tmp_path, "push", str(places.get(folder, tmp_path / folder)), repo, status=1)
    assert re.search(words, line), line
    assert not server.repos


def test_private_and_missing_repositories(server, gated, tmp_path):
    command(server, tmp_path, "push", str(gated), "user/model", "--private")
    code = """
import os
from transformers import AutoModelForCausalLM
for name in ("user/model", "user/nothing"):
    try:
        AutoModelForCausalLM.from_pretrained(name, token=False)
    except OSError as error:
        print(name in str(error))
"""
    env = {k: v for k, v in client_env(server, tmp_path / "other").items() if k != "HF_TOKEN"}
    done = subprocess.run(
        [sys.executable, "-c", "import gated_qwen" + code], env=env, capture_output=True, text=True, cwd=tmp_path
    )
    assert done.stdout.split() == ["True", "True"], done.stderr


def test_a_card_of_the_user_stays(server, gated, tmp_path):
    build("headwise").save_pretrained(tmp_path / "model")
    own = '---\nlicense: mit\n---\n# My model\n\nload("PATH_OR_ID")\n'
    (tmp_path / "model" / "README.md").write_text(own)
    command(server, tmp_path, "push", str(tmp_path / "model"), "user/model")
    assert files_of(server, "user/model")["README.md"].decode() == own.replace("PATH_OR_ID", "user/model")
    (tmp_path / "model" / "README.md").unlink()
    command(server, tmp_path, "push", str(tmp_path / "model"), "user/model")
    assert files_of(server, "user/model")["README.md"].decode().startswith("---\nlicense: mit\n")


def test_a_card_that_was_edited_on_the_hub_stays(server, gated, tmp_path):
    command(server, tmp_path, "push", str(gated), "user/model")
    with connected(server, tmp_path / "hub"):
        api, (generated) = HfApi(), files_of(server, "user/model")["README.md"]
        api.upload_file(path_or_fileobj=generated + b"Mine.\n", path_in_repo="README.md", repo_id="user/model")
        command(server, tmp_path, "push", str(gated), "user/model")
        assert files_of(server, "user/model")["README.md"] == generated + b"Mine.\n"
        # transformers' empty template, which a tokenizer's push leaves, is nobody's
        AutoTokenizer.from_pretrained(gated).push_to_hub("user/other")
        assert b"More Information Needed" in files_of(server, "user/other")["README.md"]
        model = gated_qwen.GatedQwenForCausalLM.from_pretrained(gated)
        model.push_to_hub("user/other")
    card = files_of(server, "user/other")["README.md"].decode()
    assert "More Information Needed" not in card and "trust_remote_code" in card and card_module.is_as_generated(card)


def test_other_files_of_the_repository_stay_and_hidden_ones_stay_at_home(server, gated, tmp_path):
    names = ["models/unet.safetensors", "model_v1/model.safetensors", "pytorch_models/a.bin", "model.fp16.safetensors"]
    for name in names:
        (tmp_path / "theirs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "theirs" / name).write_bytes(b"theirs")
    server.add_repo("user/model", tmp_path / "theirs")
    ours = Path(shutil.copytree(gated, tmp_path / "ours"))
    for name in (".env", "sub/.env", "sub/.ssh/id", "sub/kept.txt"):
        (ours / name).parent.mkdir(parents=True, exist_ok=True)
        (ours / name).write_text("x")
    command(server, tmp_path, "push", str(ours), "user/model")
    there = files_of(server, "user/model")
    assert all(there[name] == b"theirs" for name in names)
    assert "sub/kept.txt" in there and not any(name.endswith((".env", "id")) for name in there)


@pytest.mark.parametrize("revision", ["", "..", "a b", "-x"])
def test_a_revision_that_is_no_branch_is_refused_before_anything_is_sent(server, gated, tmp_path, revision):
    line = command(server, tmp_path, "push", str(gated), "user/model", f"--revision={revision}", status=1)
    assert "is not a name for a branch" in line and not server.repos


def test_a_card_is_not_written_into(tmp_path):
    name = "a\n---\n# heading|`code`"
    model = randomise(LlamaForCausalLM(LlamaConfig(**TINY)))
    model.save_pretrained(tmp_path / name)
    (tmp_path / name / "README.md").write_text(
        "---\nlanguage: no\nlicense: {a: b}\nlicense_name: &x [1, *x]\n---\n# Llama\n"
    )
    retrofit_checkpoint(tmp_path / name, tmp_path / "gated", verify=False)
    text = (tmp_path / "gated" / "README.md").read_text()
    assert [line for line in text.splitlines() if line.startswith("# ")] == [
        "# a --- # heading__code_ with headwise attention gates"
    ]
    card = ModelCard(text)
    assert card.data.language == "no" and card.data.license is None


def test_a_card_tells_of_weights_that_were_trained_since(gated, tmp_path):
    model = gated_qwen.GatedQwenForCausalLM.from_pretrained(gated)
    assert "change nothing yet" in card_of(gated)
    text = card_of(gated, trained=True)
    assert "trained, or otherwise changed, since" in text and "change nothing yet" not in text
    assert model.config.attn_gate_layers == [0, 2]


def test_a_model_pushes_itself(server, gated, tmp_path):
    code = f"""
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained({str(gated)!r})
AutoTokenizer.from_pretrained({str(gated)!r}).push_to_hub("user/same")
print(model.push_to_hub("user/same", tags=["mine"]).commit_url)
with torch.no_grad():
    model.model.layers[0].self_attn.g_proj.weight.add_(0.1)
model.push_to_hub("user/trained", private=True, commit_message="Trained")
torch.save(model(torch.tensor({tokens().tolist()})).logits, "expected.pt")
again = AutoModelForCausalLM.from_pretrained("user/trained")
assert torch.equal(again(torch.tensor({tokens().tolist()})).logits, torch.load("expected.pt"))
"""
    assert "/user/same/commit/" in run(server, tmp_path, code)
    for name, words in (("user/same", "change nothing yet"), ("user/trained", "changed, since")):
        there = files_of(server, name)
        assert CODE < there.keys() and {"model.safetensors", "config.json", "generation_config.json"} < there.keys()
        if "README.md" in there and name == "user/trained":
            assert words in there["README.md"].decode()
    assert server.repos["user/trained"].private
    load = """
from transformers import AutoModelForCausalLM
AutoModelForCausalLM.from_pretrained("user/same", trust_remote_code=True)
"""
    run(server, tmp_path, load, with_package=False)


def test_a_trainer_pushes_what_it_trained_with_the_code_if_asked(server, tmp_path):
    model = build("headwise")
    rows = [{"input_ids": row, "labels": row} for row in tokens(4)]
    gated_qwen.GatedQwenForCausalLM.register_for_auto_class()
    try:
        with connected(server, tmp_path / "hub"):
            arguments = TrainingArguments(
                output_dir=str(tmp_path / "out"), max_steps=2, save_steps=1, push_to_hub=True, use_cpu=True,
                hub_model_id="user/trained", hub_strategy="end", report_to=[], disable_tqdm=True,
            )  # fmt: skip
            trainer = Trainer(model, arguments, train_dataset=rows)
            trainer.train()
            trainer.push_to_hub()
            again = gated_qwen.GatedQwenForCausalLM.from_pretrained("user/trained")
    finally:
        gated_qwen.GatedQwenConfig._auto_class = None
    assert {*CODE, "README.md", "model.safetensors"} < files_of(server, "user/trained").keys()
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))
