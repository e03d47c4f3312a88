"""A local server that speaks enough of the Hugging Face Hub's HTTP API for huggingface_hub to push to it and pull.

    with HubServer() as server:
        server.add_repo("other/model", folder)
        subprocess.run([sys.executable, "-c", code], env=client_env(server, tmp_path))

It covers the Hub's LFS path, not Xet, which the client prefers unless it runs with HF_HUB_DISABLE_XET=1. It holds
models only, in memory, and leaves out pull requests, .gitignore, multipart uploads, pages of long lists, and the
redirect of large files to another host. Its one token reads everything, and writes to the repos of its user.
"""

import base64
import hashlib
import io
import json
import os
import re
import secrets
import socket
import threading
from collections import defaultdict
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from fnmatch import fnmatch
from operator import itemgetter
from pathlib import Path, PurePosixPath
from urllib.parse import parse_qs, unquote

import pytest
import yaml
from huggingface_hub import constants, hf_api
from huggingface_hub.utils import _http
from transformers.utils import hub
from werkzeug import Request, Response
from werkzeug.exceptions import HTTPException
from werkzeug.serving import WSGIRequestHandler, make_server

from gated_qwen import cli

LFS_PATTERNS = ("*.bin", "*.gguf", "*.onnx", "*.pt", "*.pth", "*.safetensors")
REGULAR_LIMIT = 10 * 2**20
CLIENT_SETTINGS = re.compile("(HF|HUGGING_?FACE|TRANSFORMERS)_.*|.*_proxy", re.IGNORECASE)
REPO, REVISION, PATH = "(?P<repo>[^/]+(?:/[^/]+)?)", "(?P<revision>[^/]+)", "(?P<path>.+)"
ROUTES = []


def client_env(server: "HubServer", home: Path) -> dict[str, str]:
    """The environment of a process whose huggingface_hub, which reads it on import, talks to the server."""
    env = {name: value for name, value in os.environ.items() if not CLIENT_SETTINGS.fullmatch(name)}
    env |= {"HF_ENDPOINT": server.url, "HF_TOKEN": server.token, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    return env | {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}


@contextmanager
def connected(server: "HubServer", home: Path, **settings):
    """This process's huggingface_hub talks to the server, as one with `client_env` does that is started for it.

    `settings` are constants of huggingface_hub. It does not wait between attempts.
    """
    settings = {
        "ENDPOINT": server.url, "HF_HUB_OFFLINE": False, "HF_HOME": str(home), "HF_HUB_CACHE": str(home / "hub"),
        "HF_HUB_DISABLE_XET": True, "HF_HUB_DISABLE_PROGRESS_BARS": True, "HF_HUB_DISABLE_TELEMETRY": True, **settings,
    }  # fmt: skip
    settings["HUGGINGFACE_CO_URL_TEMPLATE"] = settings["ENDPOINT"] + "/{repo_id}/resolve/{revision}/{filename}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", server.token)
        for name, value in settings.items():
            patch.setattr(constants, name, value)
        # The clients that the two libraries keep, with the endpoint of when they were made.
        patch.setattr(hf_api.api, "endpoint", settings["ENDPOINT"])
        patch.setattr(hub, "_hf_api", None)
        patch.setattr(_http.time, "sleep", lambda seconds: None)
        yield


def run_command(words, home: Path) -> tuple[int, str, str]:
    """`gated-qwen words` with `home` as its folder, in this process: exit status, stdout, stderr."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(home)
        status = cli.main(list(words))
    return status, out.getvalue(), err.getvalue()


def answer(value, status: int = 200, headers: dict | None = None) -> Response:
    return Response(json.dumps(value), status, headers, mimetype="application/json")


def fail(status: int, message: str, code: str = "", **more):
    """The client's error classes come from the codes."""
    headers = {"X-Error-Message": ascii(message)[1:-1]} | ({"X-Error-Code": code} if code else {})
    body = {"error": message, "errors": [{"message": message}], **more}
    raise HTTPException(response=answer(body, status, headers))


def needs_lfs(path: str, size: int, sample: bytes) -> bool:
    return size > REGULAR_LIMIT or b"\0" in sample or any(fnmatch(path, pattern) for pattern in LFS_PATTERNS)


class File:
    def __init__(self, content: bytes, lfs: bool = False):
        self.content, self.lfs = content, lfs
        self.sha256 = hashlib.sha256(content).hexdigest()
        lines = "version https://git-lfs.github.com/spec/v1", f"oid sha256:{self.sha256}", f"size {len(content)}", ""
        pointer = "\n".join(lines).encode()
        in_git = pointer if lfs else content
        self.blob = hashlib.sha1(b"blob %d\0" % len(in_git) + in_git).hexdigest()
        self.etag = self.sha256 if lfs else self.blob
        self.sizes = {"size": len(content), "pointerSize": len(pointer)}


class Repo:
    def __init__(self, name: str, private: bool = False):
        self.name, self.private = name, private
        self.objects: dict[str, bytes] = {}  # what LFS holds, by sha256
        self.commits: dict[str, dict[str, File]] = {}
        self.branches: dict[str, str] = {}  # ids of commits, as in tags
        self.tags: dict[str, str] = {}
        attributes = "".join(f"{pattern} filter=lfs diff=lfs merge=lfs -text\n" for pattern in LFS_PATTERNS)
        self.commit("main", "initial commit", {".gitattributes": File(attributes.encode())})

    def commit(self, branch: str, message: str, files: dict[str, File]) -> str:
        described = [self.branches.get(branch), message, sorted((path, file.blob) for path, file in files.items())]
        commit = self.branches[branch] = hashlib.sha1(json.dumps(described).encode()).hexdigest()
        self.commits[commit] = files
        return commit

    def find(self, revision: str | None) -> str:
        revision = revision or "main"
        commit = self.branches.get(revision) or self.tags.get(revision) or revision
        return commit if commit in self.commits else fail(404, f"Invalid rev id: {revision}", "RevisionNotFound")

    def entries(self, revision: str) -> dict[str, dict]:
        """Files and folders by path, as the Hub lists them."""
        found, folders = {}, defaultdict(hashlib.sha1)
        for path, file in sorted(self.commits[self.find(revision)].items()):
            found[path] = {"type": "file", "path": path, "oid": file.blob, "size": len(file.content)}
            if file.lfs:
                found[path]["lfs"] = {"oid": file.sha256, **file.sizes}
            for folder in PurePosixPath(path).parents[:-1]:
                folders[str(folder)].update(f"{path} {file.blob}\n".encode())
        for path, digest in folders.items():
            found[path] = {"type": "directory", "path": path, "oid": digest.hexdigest(), "size": 0}
        return found


@dataclass
class Recorded:
    """A request. `received` and `sent` count bytes of bodies; `status` stays None if the connection was cut."""

    method: str
    path: str
    range: str | None
    received: int = 0
    sent: int = 0
    status: int | None = None


class Handler(WSGIRequestHandler):
    def log_request(self, *args):
        pass

    def connection_dropped(self, error, environ=None):
        self.close_connection = True  # or the rest of the body would be taken for the next request


def route(methods: str, pattern: str, write: bool = False):
    def register(function):
        ROUTES.append((methods.split(), re.compile(pattern), write, function))
        return function

    return register


class HubServer:
    def __init__(self, user: str = "user"):
        self.user, self.token = user, "hf_" + secrets.token_hex(16)
        self.repos: dict[str, Repo] = {}
        self.requests: list[Recorded] = []
        self._uploads: dict[str, tuple[Repo, str, int]] = {}
        self._cuts: list[int] = []
        self._lock = threading.Lock()

    def __enter__(self) -> "HubServer":
        self._server = make_server("127.0.0.1", 0, self, threaded=True, request_handler=Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=[0.05], daemon=True).start()
        return self

    def __exit__(self, *error):
        self._server.shutdown()
        self._server.server_close()

    def add_repo(self, name: str, folder: Path, revision: str = "main", private: bool = False) -> str:
        """Fills a branch from a folder; repo and branch are made if there are none. Returns the commit's id."""
        repo = self.repos.setdefault(name, new := Repo(name, private))
        files = dict(new.commits[new.find("main")])
        for source in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
            path, content = source.relative_to(folder).as_posix(), source.read_bytes()
            file = files[path] = File(content, needs_lfs(path, len(content), content[:512]))
            if file.lfs:
                repo.objects[file.sha256] = content
        return repo.commit(revision, "add a folder", files)

    def fail_next_put(self, after_bytes: int = 0, times: int = 1):
        """Cuts the connection of the next upload of more than `after_bytes`, soon after these."""
        self._cuts += [after_bytes] * times

    def __call__(self, environ, start_response):
        request = Request(environ)
        path = environ["REQUEST_URI"].partition("?")[0]  # as sent: a slash in a revision is still %2F
        record = Recorded(request.method, unquote(path), request.headers.get("Range"))
        self.requests.append(record)
        try:
            body = self._receive(request, record)
            with self._lock:
                response = self._dispatch(request, path, body)
        except HTTPException as error:
            response = error.get_response(environ)
        record.status = response.status_code
        record.sent = 0 if request.method == "HEAD" else response.content_length or 0
        return response(environ, start_response)

    def _receive(self, request: Request, record: Recorded) -> bytes:
        body = bytearray()
        while chunk := request.stream.read(2**16):
            body += chunk
            record.received = len(body)
            with self._lock:
                if request.method == "PUT" and self._cuts and len(body) > self._cuts[0]:
                    self._cuts.pop(0)
                    request.environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
                    raise ConnectionAbortedError
        return bytes(body)

    def _dispatch(self, request: Request, path: str, body: bytes) -> Response:
        token = request.headers.get("Authorization")
        if token not in (None, f"Bearer {self.token}"):
            fail(401, "Invalid credentials in Authorization header")
        matches = ((pattern.fullmatch(path), *rest) for methods, pattern, *rest in ROUTES if request.method in methods)
        match, write, function = next(filter(itemgetter(0), matches), None) or fail(404, "no such route")
        arguments = {name: unquote(text or "") for name, text in match.groupdict().items()}
        if write and not token:
            fail(401, "Invalid username or password.")
        if "repo" in arguments:
            name = arguments["repo"]
            repo = arguments["repo"] = self.repos.get(name)
            if (repo is None or repo.private) and not token:
                # As on the Hub, the two look alike to strangers. There the client needs no code, over https.
                fail(401, "Invalid username or password.", "RepoNotFound")
            if repo is None:
                fail(404, "Repository not found", "RepoNotFound")
            if write:
                self._check_owner(name)
        try:
            return function(self, request, body, **arguments)
        except (KeyError, TypeError, ValueError, yaml.YAMLError) as error:  # ValueError: from json and base64 too
            fail(400, f"malformed request: {error!r}")

    def _check_owner(self, name: str):
        if name.split("/")[0] != self.user:
            fail(403, f"You don't have the rights to write to {name}")

    @route("GET", "/api/whoami-v2", write=True)
    def whoami(self, request, body):
        access = {"type": "access_token", "accessToken": {"displayName": "tests", "role": "write"}}
        return answer({"type": "user", "id": "1", "name": self.user, "orgs": [], "auth": access})

    @route("POST", "/api/validate-yaml")
    def validate_yaml(self, request, body):
        front = re.match(r"---\r?\n(.*?)\r?\n?---(\r?\n|$)", json.loads(body)["content"], re.DOTALL)
        metadata = yaml.safe_load(front[1]) if front else None
        if not isinstance(metadata, dict | None):
            fail(400, "the metadata is not a mapping")
        return answer({"errors": [], "warnings": [] if metadata else [{"message": "empty or missing metadata"}]})

    @route("POST", "/api/repos/create", write=True)
    def create_repo(self, request, body):
        wanted = json.loads(body)
        name = f"{wanted.get('organization') or self.user}/{wanted['name']}"
        self._check_owner(name)
        if wanted.get("type", "model") != "model":
            fail(501, "this server holds models only")
        if name in self.repos:
            fail(409, "You already created this model repo", url=f"{self.url}/{name}")
        self.repos[name] = Repo(name, wanted.get("visibility") == "private" or wanted.get("private") is True)
        return answer({"url": f"{self.url}/{name}", "name": name})

    @route("POST", f"/api/models/{REPO}/preupload/{REVISION}", write=True)
    def preupload(self, request, body, repo, revision):
        present, files = repo.commits[repo.find(revision)], []
        for file in json.loads(body)["files"]:
            path, sample = file["path"], base64.b64decode(file["sample"], validate=True)
            mode = "lfs" if needs_lfs(path, file["size"], sample) else "regular"
            oid = present[path].etag if path in present else None
            files.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return answer({"files": files})

    @route("POST", rf"/{REPO}\.git/info/lfs/objects/batch", write=True)
    def lfs_batch(self, request, body, repo):
        wanted, objects = json.loads(body), []
        if wanted["operation"] != "upload" or wanted["hash_algo"] != "sha256" or "basic" not in wanted["transfers"]:
            fail(501, "this server does basic uploads with sha256 only")
        for item in wanted["objects"]:
            entry = {"oid": item["oid"], "size": item["size"]}
            if item["oid"] not in repo.objects:  # without actions, the client takes it to be there
                ticket = secrets.token_hex(16)  # the client sends its token to the Hub, not to the store of objects
                self._uploads[ticket] = repo, item["oid"], item["size"]
                hrefs = {"upload": f"/objects/{ticket}", "verify": f"/{repo.name}.git/info/lfs/objects/verify"}
                entry["actions"] = {action: {"href": self.url + path} for action, path in hrefs.items()}
            objects.append(entry)
        return answer({"transfer": "basic", "objects": objects})

    @route("PUT", "/objects/(?P<ticket>[^/]+)")
    def put_object(self, request, body, ticket):
        repo, oid, size = self._uploads.get(ticket) or fail(403, "this server asked for no such object")
        if len(body) != size or hashlib.sha256(body).hexdigest() != oid:
            fail(400, f"the object is not the one of {size} bytes with sha256 {oid}")
        repo.objects[oid] = body
        return answer({})

    @route("POST", rf"/{REPO}\.git/info/lfs/objects/verify", write=True)
    def lfs_verify(self, request, body, repo):
        wanted = json.loads(body)
        if wanted["oid"] not in repo.objects or len(repo.objects[wanted["oid"]]) != wanted["size"]:
            fail(404, "the object was not uploaded")
        return answer({})

    @route("POST", f"/api/models/{REPO}/commit/{REVISION}", write=True)
    def commit(self, request, body, repo, revision):
        if revision not in repo.branches:
            fail(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        if request.args.get("create_pr"):
            fail(501, "this server has no pull requests")
        (first, header), *operations = ((line["key"], line["value"]) for line in map(json.loads, body.splitlines()))
        if first != "header" or not header["summary"]:
            fail(400, "a commit starts with a header that has a summary")
        if header.get("parentCommit", repo.branches[revision]) != repo.branches[revision]:
            fail(412, "the branch has moved on from the parent commit")
        files = dict(repo.commits[repo.branches[revision]])
        for key, value in operations:
            self._change(repo, files, key, value)
        oid = repo.commit(revision, header["summary"], files)
        return answer({"success": True, "commitOid": oid, "commitUrl": f"{self.url}/{repo.name}/commit/{oid}"})

    def _change(self, repo: Repo, files: dict[str, File], key: str, value: dict):
        path = value["path"]
        if not path.strip("/") or {"", ".", "..", ".git"} & set(path.removesuffix("/").split("/")):
            fail(400, f"not a path in a repo: {path}")
        if key == "file" and value["encoding"] == "base64":
            files[path] = File(base64.b64decode(value["content"], validate=True))
            if len(files[path].content) > REGULAR_LIMIT:
                fail(400, f"too large for a regular file: {path}")
        elif key == "lfsFile" and value["algo"] == "sha256":
            content = repo.objects.get(value["oid"])
            if content is None or value.get("size", len(content)) != len(content):
                fail(400, f"no object of that sha256 and size was uploaded: {path}")
            files[path] = File(content, lfs=True)
        elif key in ("deletedFile", "deletedFolder"):
            gone = [p for p in files if p == path or (key == "deletedFolder" and p.startswith(path.rstrip("/") + "/"))]
            for name in gone or fail(404, "A file with this name doesn't exist", "EntryNotFound"):
                del files[name]
        else:
            fail(400, f"this server knows no such operation: {key}")

    @route("POST", f"/api/models/{REPO}/(?P<kind>branch|tag)/{REVISION}", write=True)
    def create_ref(self, request, body, repo, kind, revision):
        wanted = json.loads(body)
        if kind == "branch":
            refs, name, start = repo.branches, revision, wanted.get("startingPoint")
        else:
            refs, name, start = repo.tags, wanted["tag"], revision
        if name in refs:
            fail(409, f"there is such a {kind} already: {name}")
        refs[name] = repo.find(start)
        return answer({})

    @route("GET", f"/api/models/{REPO}/tree/{REVISION}(?:/{PATH})?")
    def tree(self, request, body, repo, revision, path):
        entries = repo.entries(revision)
        if path and entries.get(path, {}).get("type") != "directory":
            fail(404, f"{path} is no folder here", "EntryNotFound")
        inside = {p: entry for p, entry in entries.items() if not path or p.startswith(path + "/")}
        if request.args.get("recursive", "").lower() not in ("true", "1"):
            inside = {p: entry for p, entry in inside.items() if "/" not in p[len(path) + bool(path) :]}
        return answer(list(inside.values()))

    @route("POST", f"/api/models/{REPO}/paths-info/{REVISION}")
    def paths_info(self, request, body, repo, revision):
        entries, paths = repo.entries(revision), parse_qs(body.decode()).get("paths", [])
        return answer([entries[path.rstrip("/")] for path in paths if path.rstrip("/") in entries])

    @route("GET HEAD", f"/{REPO}/resolve/{REVISION}/{PATH}")
    def resolve(self, request, body, repo, revision, path):
        commit = repo.find(revision)
        file = repo.commits[commit].get(path) or fail(404, "Entry not found", "EntryNotFound")
        response = Response(file.content, mimetype="application/octet-stream")
        response.set_etag(file.etag)
        response.headers["X-Repo-Commit"] = commit
        if file.lfs:
            response.headers |= {"X-Linked-Etag": f'"{file.etag}"', "X-Linked-Size": str(len(file.content))}
        return response.make_conditional(request, accept_ranges=True, complete_length=len(file.content))

    @route("GET", f"/api/models/{REPO}(?:/revision/{REVISION})?")
    def info(self, request, body, repo, revision):
        commit, siblings = repo.find(revision), []
        for path, file in repo.commits[commit].items():
            siblings.append({"rfilename": path})
            if request.args.get("blobs"):
                siblings[-1] |= {"size": len(file.content), "blobId": file.blob}
                siblings[-1] |= {"lfs": {"sha256": file.sha256, **file.sizes}} if file.lfs else {}
        about = {"id": repo.name, "modelId": repo.name, "sha": commit, "private": repo.private, "tags": []}
        return answer({**about, "gated": False, "disabled": False, "downloads": 0, "likes": 0, "siblings": siblings})
