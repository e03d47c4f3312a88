"""A checkpoint folder to the Hub: weights, tokenizer, configs, a card made from facts, and the family's code.

All goes up in one commit, so that a repository never holds a part of it. The folder is only read: what is added (the
card with the repository's name, the code, its names in config.json) exists in the commit alone.
"""

import json
import re
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME

from ..configuration.released import is_released
from .card import CARD_NAME, PLACEHOLDER, card_of, is_as_generated
from .checkpoint import Checkpoint, expanded, open_checkpoint
from .errors import CheckpointError, shown
from .head_major import HEAD_MAJOR
from .importing import plan_import
from .plan import other_files
from .reader import Reader
from .record import read_record
from .remote_code import AUTO_MAP, remote_code
from .source import open_source
from .write import is_as_recorded

# Of the repository's own folder, by transformers' names; variants (model.fp16.safetensors) are left.
WEIGHT_FILE = re.compile(r"(model|pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?")


def push_checkpoint(
    folder,
    repo_id: str,
    *,
    code: bool = True,
    private: bool | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    commit_message: str | None = None,
    commit_description: str | None = None,
    create_pr: bool = False,
    tags: list[str] | None = None,
    record: dict | None = None,
    trained: bool | None = None,
) -> CommitInfo:
    """Push a checkpoint folder to the Hub, in one commit.

    Args:
        folder (`str` or `Path`): a checkpoint, native or exported; it is only read
        repo_id (`str`): `user/name`; made if it is not there
        code (`bool`, defaults to `True`): with the family's code, by which it loads without this package
            (`trust_remote_code=True`)
        private, revision, token, commit_message, commit_description, create_pr, tags: as in
            [`~PreTrainedModel.push_to_hub`]; `revision` is a branch, made if it is not there
        record, trained: of a model that was saved for this, what it was loaded from

    Returns:
        `CommitInfo`: of the commit that was made.

    Raises:
        CheckpointError: the folder is not a whole checkpoint; nothing was sent.
        HfHubHTTPError, OSError: the Hub refused it or cannot be reached. Files that went up are not sent again by
            another call.
    """
    checkpoint = check_folder(folder, repo_id)
    check_revision(revision)
    api = HfApi(token=token)
    with says_what_the_network_did(repo_id):
        own = f"{api.whoami()['name']}/{repo_id}" if "/" not in repo_id else repo_id
    files = contents(checkpoint, own, code, record, trained, tags)
    commit = {
        "commit_message": commit_message or f"Upload {own.rpartition('/')[2]}",
        "commit_description": commit_description,
        "create_pr": create_pr,
    }
    with says_what_the_network_did(repo_id):
        return send(files, own, api, private, revision, commit)


def send(files: dict, repo_id: str, api: HfApi, private: bool | None, revision: str | None, commit: dict):
    operations = {
        name: CommitOperationAdd(path_in_repo=name, path_or_fileobj=content) for name, content in files.items()
    }
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if revision is not None and not revision.startswith("refs/pr/"):
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    there = set(api.list_repo_files(repo_id, revision=revision))
    if CARD_NAME in there and isinstance(files[CARD_NAME], bytes) and is_as_generated(files[CARD_NAME].decode()):
        theirs = Path(api.hf_hub_download(repo_id, CARD_NAME, revision=revision)).read_bytes()
        if not is_as_generated(theirs.decode(errors="replace")):
            del operations[CARD_NAME]  # the card of whoever wrote it stays
    deletions = [CommitOperationDelete(path_in_repo=name) for name in sorted(in_the_way(there, set(files)))]
    return api.create_commit(
        repo_id,
        [*operations.values(), *deletions],
        revision=revision,
        **commit,
    )


def check_revision(revision: str | None) -> None:
    if revision is not None and (
        not re.fullmatch(r"[\w][\w./-]*", revision) or ".." in revision or revision.endswith(("/", ".", ".lock"))
    ):
        raise CheckpointError(f"{revision!r} is not a name for a branch.")


@contextmanager
def says_what_the_network_did(repo_id: str):
    try:
        yield
    except (ValueError, OSError, HfHubHTTPError):
        raise
    except Exception as error:  # the client's network errors are of a library of its own
        raise OSError(
            f"{repo_id}: the Hub cannot be reached, or broke off ({shown(error)}). Nothing was published; the same "
            "call sends what is missing."
        ) from error


def check_folder(folder, repo_id: str) -> Checkpoint:
    """Refuse what is not a checkpoint folder, or not a name on the Hub."""
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise CheckpointError(f"{repo_id!r} is not a name on the Hub such as user/name: {error}") from None
    if not expanded(folder).is_dir():
        raise CheckpointError(f"{folder} is no folder: name the checkpoint to push.")
    checkpoint = open_checkpoint(folder)
    if is_released(checkpoint.fields):
        raise CheckpointError(
            f"{checkpoint.where()}: it is in the authors' form, which other people's transformers takes for another "
            "model: import it (gated-qwen import), and push that."
        )
    model_type = checkpoint.fields.get("model_type")
    if model_type != "gated_qwen" and read_record(checkpoint.folder) is None:
        raise CheckpointError(
            f"{checkpoint.where()}: a {shown(model_type)} model that no conversion made, and this pushes gated_qwen "
            "models and what conversions make of them: use transformers' own push_to_hub, or `hf upload`."
        )
    if model_type in HEAD_MAJOR:
        plan_import(folder)
    else:
        open_source(folder, headers_only=True)
    return checkpoint


def contents(
    checkpoint: Checkpoint,
    repo_id: str,
    code: bool,
    record: dict | None = None,
    trained: bool | None = None,
    tags: list[str] | None = None,
) -> dict[str, Path | bytes]:
    """What goes up, by name in the repository: files of the folder, or bytes."""
    folder = checkpoint.folder
    names = [name for name in sorted(other_files(checkpoint)[0]) if not re.search(r"(^|/)\.", name)]
    files = {name: folder / name for name in names}
    for name in names:
        check_file(folder, name)
    weights = [path.name for path in checkpoint.stats]
    index = SAFE_WEIGHTS_INDEX_NAME if Path(weights[0]).suffix == ".safetensors" else WEIGHTS_INDEX_NAME
    names = weights + ([index] if checkpoint.index_text else [])
    files |= {name: folder / name for name in names}
    fields = {name: value for name, value in checkpoint.fields.items() if name != "auto_map"}
    own_code = code and fields.get("model_type") == "gated_qwen"
    if own_code:
        fields["auto_map"] = AUTO_MAP
        files |= {name: text.encode() for name, text in remote_code().items()}
    same = fields == checkpoint.fields
    text = (json.dumps(fields, indent=2, ensure_ascii=False) + "\n").encode()
    files[CONFIG_NAME] = folder / CONFIG_NAME if same else text
    files[CARD_NAME] = card(folder, repo_id, own_code, record, trained, tags)
    return files


def check_file(folder: Path, name: str) -> None:
    """Names are UTF-8. A link may lead to a file of the folder, or of the Hub's cache that it is in."""
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(f"{folder}: {shown(name)}: the name is not UTF-8: change it.") from error
    folder = folder.resolve()
    inside = (folder, folder.parent.parent / "blobs")
    if not any((folder / name).resolve().is_relative_to(place) for place in inside):
        raise CheckpointError(f"{folder / name} leads out of the folder: put the file there, or remove the link.")


def card(folder: Path, repo_id: str, code: bool, record: dict | None, trained: bool | None, tags) -> bytes | Path:
    """The folder's own card, or one made from facts.

    Raises:
        CheckpointError: the metadata of the folder's own cannot be read.
    """
    recorded = read_record(folder)
    if trained is None:
        trained = recorded is not None and not is_as_recorded(folder, recorded["files"])
    own = folder / CARD_NAME
    text = None
    if own.is_file():
        try:
            text = own.read_bytes().decode()
            data = ModelCard(text).data
        except Exception as error:
            raise CheckpointError(f"{own}: its metadata cannot be read ({shown(error)}): correct it.") from error
    # One that a conversion wrote is written anew, with all that is known by now; one that was edited is not.
    if text is None or is_as_generated(text):
        return card_of(folder, repo_id, trained=trained, with_code=code, record=record, tags=tags).encode()
    if tags and (added := [tag for tag in tags if tag not in (data.tags or [])]):
        read = ModelCard(text)
        read.data.tags = [*(data.tags or []), *added]
        text = str(read)
    elif PLACEHOLDER not in text:
        return own
    return text.replace(PLACEHOLDER, repo_id).encode()


def in_the_way(there: set[str], new: set[str]) -> set[str]:
    """Weights of an earlier push that transformers would load in place of the new ones or beside them."""
    return {name for name in there - new if WEIGHT_FILE.fullmatch(name)}


def record_of(origin: str, folder: Path) -> tuple[dict | None, bool]:
    """The record beside what a model was loaded from, and whether the weights in `folder` differ from that."""
    place = Path(origin or "")
    if not origin or not place.is_dir():
        return None, False
    record = read_record(place)
    if record is None:
        return None, False
    return record, not (is_as_recorded(place, record["files"]) and same_weights(place, folder))


def same_weights(a: Path, b: Path) -> bool:
    one, other = open_checkpoint(a), open_checkpoint(b)
    if one.tensors.keys() != other.tensors.keys():
        return False
    with Reader(one) as reader, Reader(other) as second:
        for name, tensor in one.tensors.items():
            twin = other.tensors[name]
            if (tensor.dtype, tensor.shape) != (twin.dtype, twin.shape):
                return False
            pairs = zip(reader.blocks(tensor), second.blocks(twin), strict=True)
            if any(left != right for left, right in pairs):
                return False
    return True
