"""The server that stands in for the Hub, as huggingface_hub's own client sees it (LFS path, not Xet)."""

import hashlib
import json
import random
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
import torch
from hub_server import REGULAR_LIMIT, HubServer, client_env
from safetensors.torch import save_file


@pytest.fixture
def server():
    with HubServer() as server:
        yield server


@pytest.fixture
def client(server, tmp_path):
    """Runs code in a process of its own, since the client reads its settings on import. Returns what it prints."""

    def run(code: str, token: bool = True) -> str:
        env = client_env(server, tmp_path / f"home-{token}")  # what one has fetched, the other may not have
        if not token:
            del env["HF_TOKEN"]
        start = f"import huggingface_hub as hub\nfolder, down = {str(tmp_path / 'up')!r}, {str(tmp_path / 'down')!r}\n"
        command = [sys.executable, "-c", start + code]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run


@pytest.fixture
def folder(tmp_path):
    """A text file, one that is in LFS for its name, and one that is for its size alone."""
    folder = tmp_path / "up"
    (folder / "sub").mkdir(parents=True)
    (folder / "README.md").write_text("---\nlicense: mit\n---\nA model — with a text.\n")
    (folder / "sub" / "config.json").write_text("{}\n")
    (folder / "large.txt").write_bytes(random.Random(0).randbytes(REGULAR_LIMIT // 2 + 1).hex().encode())
    save_file({"weight": torch.arange(60_000.0).reshape(300, 200)}, folder / "sub" / "model.safetensors")
    return folder


def contents(folder) -> dict[str, bytes]:
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in files.items() if not name.startswith((".cache", ".git"))}


def error_of(expression: str) -> str:
    """Code that prints the class of the error that the expression raises."""
    return f"try:\n    {expression}\n    print(None)\nexcept Exception as error:\n    print(type(error).__name__)\n"


def send(server, path: str, body: str, method: str = "POST"):
    """What no client sends, by hand. Returns the status and the answer."""
    headers = {"Authorization": f"Bearer {server.token}"}
    request = urllib.request.Request(server.url + path, body.encode(), headers, method=method)
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


PUSH = """
hub.create_repo("user/model", exist_ok=True)
print(hub.upload_folder(repo_id="user/model", folder_path=folder).oid)
"""


def test_round_trip(server, client, folder, tmp_path):
    commit = client(PUSH)
    repo = server.repos["user/model"]
    assert commit == repo.branches["main"] and len(repo.commits) == 2
    large = [r for r in server.requests if r.method == "PUT" and r.status == 200]
    assert sorted(r.received for r in large) == sorted(len(content) for content in repo.objects.values())
    in_lfs = {path for path, file in repo.commits[commit].items() if file.lfs}
    assert in_lfs == {"large.txt", "sub/model.safetensors"}

    client("hub.snapshot_download('user/model', local_dir=down)", token=False)
    assert contents(tmp_path / "down") == contents(folder)
    assert (tmp_path / "down" / ".gitattributes").is_file()  # the Hub's own

    # What has not changed is neither sent nor committed again.
    server.requests.clear()
    assert client(PUSH) == commit
    assert not [r for r in server.requests if r.method == "PUT" or "/commit/" in r.path]


def test_listings(server, client, folder):
    commit = server.add_repo("other/model", folder)
    found = json.loads(
        client(
            """
import json
api, name = hub.HfApi(), "other/model"
info = api.model_info(name, files_metadata=True)
print(json.dumps({
    "user": api.whoami()["name"],
    "sha": info.sha,
    "sizes": {f.rfilename: f.size for f in info.siblings},
    "lfs": {f.rfilename: f.lfs.sha256 for f in info.siblings if f.lfs},
    "tree": [f.path for f in api.list_repo_tree(name)],
    "sub": [f.path for f in api.list_repo_tree(name, "sub")],
    "all": [f.path for f in api.list_repo_tree(name, recursive=True)],
    "paths": {f.path: type(f).__name__ for f in api.get_paths_info(name, ["sub", "sub/config.json", "absent"])},
    "files": api.list_repo_files(name),
    "exists": [api.file_exists(name, "large.txt"), api.file_exists(name, "absent"), api.revision_exists(name, "v")],
    "verified": len(api.verify_repo_checksums(name, local_dir=folder).mismatches),
}))
"""
        )
    )
    sizes = {path: len(content) for path, content in contents(folder).items()}
    assert {path: size for path, size in found["sizes"].items() if path != ".gitattributes"} == sizes
    assert found["user"] == "user" and found["sha"] == commit
    content = contents(folder)
    lfs = {path: hashlib.sha256(content[path]).hexdigest() for path in ("large.txt", "sub/model.safetensors")}
    assert found["lfs"] == lfs
    assert found["tree"] == [".gitattributes", "README.md", "large.txt", "sub"]
    assert found["sub"] == ["sub/config.json", "sub/model.safetensors"]
    assert sorted(found["all"]) == sorted([*sizes, ".gitattributes", "sub"])
    assert found["paths"] == {"sub": "RepoFolder", "sub/config.json": "RepoFile"}
    assert sorted(found["files"]) == sorted([*sizes, ".gitattributes"])
    assert found["exists"] == [True, False, False] and found["verified"] == 0


def test_revisions(server, client, folder):
    """A branch with a slash in its name, a tag and a commit's id; a push to one branch leaves the others."""
    server.add_repo("user/model", folder)
    first = server.repos["user/model"].branches["main"]
    second = client(
        """
api, name = hub.HfApi(), "user/model"
api.create_branch(name, branch="feature/x")
api.create_branch(name, branch="feature/x", exist_ok=True)
api.create_tag(name, tag="v1", revision="feature/x")
api.upload_file(path_or_fileobj=b"changed", path_in_repo="sub/config.json", repo_id=name, revision="feature/x")
print(api.delete_file("README.md", name, revision="feature/x").oid)
"""
    )
    repo = server.repos["user/model"]
    assert repo.branches == {"main": first, "feature/x": second} and repo.tags == {"v1": first}
    assert "README.md" in repo.commits[first] and "README.md" not in repo.commits[second]

    read = "print(*[open(hub.hf_hub_download('user/model', 'config.json', subfolder='sub', revision=r)).read().strip()"
    read += f" for r in ('main', 'v1', {first!r}, 'feature/x', {second!r})])"
    assert client(read, token=False) == "{} {} {} changed changed"


def test_errors_have_the_clients_own_classes(server, client, folder):
    server.add_repo("other/model", folder)
    stranger = [
        ("hub.hf_hub_download('other/absent', 'README.md')", "RepositoryNotFoundError"),
        ("hub.hf_hub_download('absent', 'README.md')", "RepositoryNotFoundError"),
        ("hub.model_info('other/absent')", "RepositoryNotFoundError"),
        ("hub.hf_hub_download('other/model', 'README.md', revision='v2')", "RevisionNotFoundError"),
        ("hub.model_info('other/model', revision='v2')", "RevisionNotFoundError"),
        ("hub.hf_hub_download('other/model', 'absent')", "RemoteEntryNotFoundError"),
        ("hub.hf_hub_download('other/model', 'sub')", "RemoteEntryNotFoundError"),
        ("list(hub.list_repo_tree('other/model', 'absent'))", "RemoteEntryNotFoundError"),
        ("hub.create_repo('user/new')", "HfHubHTTPError"),
    ]
    user = [
        ("hub.model_info('other/absent')", "RepositoryNotFoundError"),
        ("hub.create_repo('other/new')", "HfHubHTTPError"),
        ("hub.create_repo('other/model', exist_ok=True)", "None"),
        ("hub.upload_folder(repo_id='other/model', folder_path=folder + '/sub')", "HfHubHTTPError"),
        ("hub.upload_file(path_or_fileobj=b'', path_in_repo='a', repo_id='user/absent')", "RepositoryNotFoundError"),
        ("hub.create_repo('user/new')", "None"),
        ("hub.create_repo('user/new')", "HfHubHTTPError"),
        (
            "hub.upload_file(path_or_fileobj=b'', path_in_repo='a', repo_id='user/new', revision='v2')",
            "RevisionNotFoundError",
        ),
        ("hub.HfApi().delete_file('absent', 'user/new')", "RemoteEntryNotFoundError"),
        (
            "hub.upload_file(path_or_fileobj=b'---\\n- a\\n---\\n', path_in_repo='README.md', repo_id='user/new')",
            "ValueError",
        ),
        ("hub.create_commit('user/new', [hub.CommitOperationAdd('a', b'a')], commit_message='a')", "None"),
        (
            "hub.create_commit('user/new', [hub.CommitOperationAdd('a', b'b')], commit_message='b', "
            "parent_commit='0' * 40)",
            "HfHubHTTPError",
        ),
    ]
    for calls, token in ((stranger, False), (user, True)):
        lines = client("".join(error_of(call) for call, _ in calls), token=token).splitlines()
        assert lines == [expected for _, expected in calls]


def test_private_repo(server, client, folder):
    info = "hub.model_info('user/model').private"
    load = "open(hub.hf_hub_download('user/model', 'README.md')).read().split()[-1]"
    client("hub.create_repo('user/model', private=True)\n" + PUSH)
    assert client(f"print({info}, {load})") == "True text."
    assert client(error_of(info) + error_of(load), token=False).split() == ["RepositoryNotFoundError"] * 2
    server.add_repo("user/public", folder)
    assert client(error_of("hub.model_info('user/public', token='hf_wrong')"), token=False) == "HfHubHTTPError"


def test_the_client_resends_what_was_cut_off(server, client, folder):
    server.fail_next_put(after_bytes=2**20)
    commit = client(PUSH)
    cut, whole = [r for r in server.requests if r.method == "PUT" and r.received > 2**20]
    assert cut.status is None and cut.received < 2**21
    assert whole.status == 200 and whole.received == (folder / "large.txt").stat().st_size
    assert server.repos["user/model"].commits[commit]["large.txt"].content == (folder / "large.txt").read_bytes()


def test_a_second_upload_sends_only_what_is_missing(server, client, folder):
    server.fail_next_put(after_bytes=2**20)
    # One after the other and without retries: the small file has arrived when the large one fails.
    push = """
import functools, huggingface_hub.lfs as lfs
lfs.http_backoff = functools.partial(lfs.http_backoff, max_retries=0)
hub.create_repo("user/model")
files = [hub.CommitOperationAdd(path, f"{folder}/{path}") for path in ("sub/model.safetensors", "large.txt")]
"""
    push += error_of("hub.create_commit('user/model', files, commit_message='push', num_threads=1)")
    assert client(push) == "RuntimeError"
    repo = server.repos["user/model"]
    assert len(repo.commits) == 1 and len(repo.objects) == 1

    server.requests.clear()
    client(PUSH)
    (again,) = [r for r in server.requests if r.method == "PUT"]
    assert again.received == (folder / "large.txt").stat().st_size
    files = {path: file.content for path, file in repo.commits[repo.branches["main"]].items()}
    assert {path: content for path, content in files.items() if path != ".gitattributes"} == contents(folder)


def test_tampered_objects_are_refused(server, client, folder):
    """The file changes, its size does not, after the client has hashed it."""
    code = """
def push(path, content):
    open(path, "wb").write(b"honest")
    operation = hub.CommitOperationAdd("weights.bin", path)
    operation.upload_info.sha256, operation.upload_info.size
    open(path, "wb").write(content)
    return hub.create_commit("user/model", [operation], commit_message="push")

hub.create_repo("user/model")
"""
    code += "".join(
        error_of(f"push(folder + '/weights.bin', {content!r})") for content in (b"forged", b"short", b"honest")
    )
    assert client(code).split() == ["RuntimeError", "RuntimeError", "None"]
    puts = [r.status for r in server.requests if r.method == "PUT"]
    assert puts == [400, 400, 200]
    assert list(server.repos["user/model"].objects.values()) == [b"honest"]


@pytest.mark.parametrize(
    "operation",
    [
        {"key": "lfsFile", "value": {"path": "a.bin", "algo": "sha256", "oid": "0" * 64, "size": 1}},
        {
            "key": "lfsFile",
            "value": {"path": "a.bin", "algo": "sha256", "oid": hashlib.sha256(b"a").hexdigest(), "size": 2},
        },
        {"key": "file", "value": {"path": "a", "encoding": "base64", "content": "YQ"}},
        {"key": "file", "value": {"path": "a", "encoding": "base64", "content": "Y Q = ="}},
        {"key": "file", "value": {"path": "../a", "encoding": "base64", "content": "YQ=="}},
        {"key": "file", "value": {"path": "a", "content": "YQ=="}},
        {"key": "unheard-of", "value": {"path": "a"}},
    ],
    ids=["absent object", "wrong size", "no padding", "spaces", "outside", "no encoding", "unknown"],
)
def test_wrong_commits_are_refused(server, tmp_path, operation):
    (tmp_path / "up").mkdir()
    (tmp_path / "up" / "a.bin").write_bytes(b"a")
    first = server.add_repo("user/model", tmp_path / "up")

    def commit(operation) -> int:
        lines = [{"key": "header", "value": {"summary": "by hand"}}, operation]
        return send(server, "/api/models/user/model/commit/main", "\n".join(json.dumps(line) for line in lines))[0]

    assert commit(operation) == 400
    assert server.repos["user/model"].branches["main"] == first
    assert commit({"key": "file", "value": {"path": "a", "encoding": "base64", "content": "YQ=="}}) == 200


def test_wrong_sizes_of_objects_are_refused(server, tmp_path):
    (tmp_path / "up").mkdir()
    server.add_repo("user/model", tmp_path / "up")
    for content, size, statuses in ((b"a", 2, [400, 404]), (b"a", 1, [200, 200])):
        item = {"oid": hashlib.sha256(content).hexdigest(), "size": size}
        batch = {"operation": "upload", "transfers": ["basic"], "hash_algo": "sha256", "objects": [item]}
        _, found = send(server, "/user/model.git/info/lfs/objects/batch", json.dumps(batch))
        actions = {
            name: action["href"].removeprefix(server.url) for name, action in found["objects"][0]["actions"].items()
        }
        put = send(server, actions["upload"], content.decode(), "PUT")
        assert [put[0], send(server, actions["verify"], json.dumps(item))[0]] == statuses
    assert send(server, "/objects/unasked", "a", "PUT")[0] == 403


def test_ranges(server, client, folder):
    """Names and shapes of weights cost their header, and the record of requests shows it."""
    server.add_repo("other/model", folder)
    code = "meta = hub.parse_safetensors_file_metadata('other/model', 'sub/model.safetensors')\n"
    code += "print({name: tensor.shape for name, tensor in meta.tensors.items()})"
    assert client(code) == "{'weight': [300, 200]}"
    (get,) = [r for r in server.requests if r.path.endswith("/sub/model.safetensors")]
    assert (get.method, get.range, get.status, get.sent) == ("GET", "bytes=0-100000", 206, 100_001)

    code = """
url = hub.hf_hub_url("other/model", "README.md")
for wanted in ("bytes=4-10", "bytes=-6", "bytes=33-1000", "bytes=1000-"):
    answer = hub.get_session().get(url, headers={"Range": wanted})
    print(answer.status_code, answer.headers["Content-Range"], repr(answer.text) if answer.status_code == 206 else "")
"""
    text = (folder / "README.md").read_bytes()
    size = len(text)
    expected = [
        f"206 bytes 4-10/{size} {text[4:11].decode()!r}",
        f"206 bytes {size - 6}-{size - 1}/{size} {text[-6:].decode()!r}",
        f"206 bytes 33-{size - 1}/{size} {text[33:].decode()!r}",
        f"416 bytes */{size}",
    ]
    assert [line.strip() for line in client(code).splitlines()] == expected


def test_environment_of_the_client(server, tmp_path, monkeypatch):
    """Nothing of the caller's own set-up reaches the client."""
    settings = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_CACHE", "http_proxy")
    for name in settings:
        monkeypatch.setenv(name, "1")
    env = client_env(server, tmp_path)
    assert not set(settings) & set(env)
    assert (env["HF_ENDPOINT"], env["HF_HOME"], env["HF_HUB_DISABLE_XET"]) == (server.url, str(tmp_path), "1")
