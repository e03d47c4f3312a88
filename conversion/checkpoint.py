"""A checkpoint as it lies on disk or on the Hub: its config, its tensors by header, and its other files.

Nothing here imports or runs a checkpoint's code, and nothing opens one of its files for writing.
"""

import fnmatch
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from huggingface_hub import HfApi, hf_hub_download, parse_safetensors_file_metadata, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id
from transformers.utils import (
    CONFIG_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)

from .errors import CheckpointError, shown
from .headers import BITS, Tensor, read_header, read_index, strict_json
from .pickles import PickledTensors

# What a converted checkpoint does not take over from its source, and why.
LEFT_OUT = {
    "weights, of which the converted ones take the place": (
        "*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt", "*.gguf",
        "*.ggml", "*.h5", "*.msgpack", "*.onnx", "*.onnx_data", "*.tflite", "*.npz", "*.npy", "*.mlmodel", "*.pkl",
        "*.pickle", "*.ot", "original/*",
    ),
    "code, which is never run or passed on": ("*.py", "*.pyc", "*.so"),
    "not part of the checkpoint": (".gitattributes", "*.incomplete", "*.lock"),
}  # fmt: skip


def size_and_time(file: Path) -> tuple[int, int]:
    status = file.stat()
    return status.st_size, status.st_mtime_ns


def expanded(path) -> Path:
    """A path in which `~` is a home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise CheckpointError(f"{path}: {error}") from None


def why_left_out(name: str) -> str | None:
    """Why a file of a source, named relative to it, does not come through, or None where it does."""
    for reason, patterns in LEFT_OUT.items():
        if any(fnmatch.fnmatch(name, pattern) for pattern in patterns):
            return reason
    return None


@dataclass
class Checkpoint:
    """A checkpoint that was found and whose headers were read.

    Args:
        name: the Hub id or the folder's name, for records; never a path of this machine
        folder: where it lies; None if only its headers were fetched
        fields: config.json
        tensors: by name, in the order of the files and of their bytes
        metadata: of each file of weights
        files: all other files, relative to the folder
        commit: of the Hub
        stats: size and time of change of the files of weights
        index_text: of shards
    """

    name: str
    folder: Path | None
    fields: dict
    tensors: dict[str, Tensor]
    metadata: dict[str, dict[str, str]]
    files: list[str]
    commit: str | None = None
    subfolder: str | None = None
    pickles: dict[Path, PickledTensors] = field(default_factory=dict)
    stats: dict[Path, tuple[int, int]] = field(default_factory=dict)
    index_text: str | None = None

    def check_unchanged(self) -> None:
        """Raise a CheckpointError where a file of weights is not what it was when its header was read."""
        for file, found in self.stats.items():
            if not file.is_file() or size_and_time(file) != found:
                raise CheckpointError(f"{file} changed while it was converted: run it again when it is finished.")

    def where(self, file: str = CONFIG_NAME) -> str:
        return str(self.folder / file) if self.folder else f"{self.name}/{file}"


def open_checkpoint(
    source, *, revision: str | None = None, subfolder: str | None = None, headers_only: bool = False, token=None
) -> Checkpoint:
    """Find a checkpoint folder or Hub id, and read its config and headers.

    Args:
        headers_only: of a Hub id, fetch nothing but these

    Raises:
        CheckpointError: what is there is not a checkpoint of weights that can be converted.
        OSError: it is not there, or a file cannot be read.
    """
    if not isinstance(source, str | os.PathLike):
        raise ValueError(f"`source` must be a folder or a Hub id, got a {type(source).__name__}.")
    if subfolder and (PurePosixPath(subfolder).is_absolute() or ".." in PurePosixPath(subfolder).parts):
        raise CheckpointError(f"{subfolder!r} is no folder within {source}: name one, from there on.")
    path = expanded(source)
    if path.is_dir():
        folder = path / subfolder if subfolder else path
        if not folder.is_dir():
            raise CheckpointError(f"{path} has no folder {subfolder!r}.")
        return _from_folder(folder, name=path.resolve().name, subfolder=subfolder, commit=_commit_of(path))
    if path.exists():
        what = "a file" if path.is_file() else "not a folder"
        raise CheckpointError(f"{path} is {what}: name the checkpoint's folder.")
    try:
        validate_repo_id(str(source))
    except HFValidationError:
        raise CheckpointError(f"{source} is neither a folder nor a Hub id such as user/name.") from None
    try:
        if headers_only:
            return _from_hub_headers(str(source), revision, subfolder, token)
        return _from_hub(str(source), revision, subfolder, token)
    except (CheckpointError, RevisionNotFoundError, EntryNotFoundError, GatedRepoError):
        raise
    except OfflineModeIsEnabled as error:
        if headers_only:
            raise FileNotFoundError(f"{source} is no folder here, and the Hub is off (HF_HUB_OFFLINE).") from error
        try:
            snapshot = Path(snapshot_download(source, revision=revision, token=token, local_files_only=True))
        except LocalEntryNotFoundError as error:
            what = "is no folder here, nor in the cache, and the Hub is off (HF_HUB_OFFLINE)"
            raise FileNotFoundError(f"{source} {what}.") from error
        folder = snapshot / subfolder if subfolder else snapshot
        return _from_folder(folder, name=str(source), subfolder=subfolder, commit=snapshot.name)
    except RepositoryNotFoundError as error:
        what = "is no folder here, and no repository on the Hub that you may read"
        raise FileNotFoundError(f"{source} {what}: correct it, or log in (hf auth login).") from error
    except Exception as error:  # the client's own network errors are no OSErrors
        if isinstance(error, OSError) and not isinstance(error, HfHubHTTPError):
            raise
        raise OSError(f"{source} is no folder here, and the Hub cannot be reached: {shown(error)}") from error


def _commit_of(path: Path) -> str | None:
    """Of a snapshot in the Hub's cache."""
    name = path.resolve().name
    return name if path.resolve().parent.name == "snapshots" and len(name) == 40 else None


def _from_folder(folder: Path, name: str, subfolder: str | None, commit: str | None) -> Checkpoint:
    files = sorted(_relative_files(folder))
    for file in files:
        if not (folder / file).is_file() and not (folder / file).is_dir():
            raise CheckpointError(
                f"{shown(folder / file, 4000)} is not a file, or a link to nothing: remove it, or get the whole "
                "checkpoint."
            )
    fields = _read_fields(folder, folder / CONFIG_NAME, files)
    checkpoint = Checkpoint(name, folder, fields, {}, {}, [], commit, subfolder)
    weights, index = find_weights(files, str(folder))
    weight_map = read_index(folder / index, Path(weights).suffix) if index else None
    for file in [weights] if index is None else sorted(set(weight_map.values())):
        if file not in files:
            raise CheckpointError(f"{folder / index} names {file}, which is missing: get the whole checkpoint.")
        path = folder / file
        checkpoint.stats[path] = size_and_time(path)
        if path.suffix == ".bin":
            checkpoint.pickles[path] = PickledTensors(path)
            tensors, metadata = checkpoint.pickles[path].tensors, {}
        else:
            tensors, metadata = read_header(path)
        _add(checkpoint, tensors, metadata, path, weight_map)
    _check_index(checkpoint, weight_map, index)
    checkpoint.index_text = (folder / index).read_bytes().decode() if index else None
    used = {file.name for file in {tensor.file for tensor in checkpoint.tensors.values()}}
    checkpoint.files = [file for file in files if file not in {CONFIG_NAME, index, *used}]
    return checkpoint


def _relative_files(folder: Path) -> Iterator[str]:
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in (".git", ".cache", "__pycache__")]
        linked = [name for name in folders if (Path(parent) / name).is_symlink()]  # os.walk stays out of these
        for name in names + linked:
            yield (Path(parent) / name).relative_to(folder).as_posix()


def _read_fields(folder, config_file: Path, files: list[str]) -> dict:
    if CONFIG_NAME not in files:
        if "adapter_config.json" in files:
            raise CheckpointError(
                f"{folder} is a PEFT adapter: merge it into its base model (merge_and_unload), save that, and "
                "convert it."
            )
        raise CheckpointError(f"{folder} has no {CONFIG_NAME}: name the folder of a whole checkpoint.")
    if "adapter_config.json" in files:
        raise CheckpointError(
            f"{folder} has an adapter (adapter_config.json) beside the model, which transformers would load with it: "
            "merge it (merge_and_unload) and save that, or move it away."
        )
    fields = strict_json(config_file.read_bytes(), str(config_file))
    if not isinstance(fields, dict):
        raise CheckpointError(f"{config_file} is not a JSON object: get the file again.")
    return fields


def find_weights(files: list[str], folder: str) -> tuple[str, str | None]:
    """The file of weights that transformers would load and its index (None where it is one file), by name.

    With an index, the first name only tells the kind of its files.
    """
    for weights, index in ((SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME), (WEIGHTS_NAME, WEIGHTS_INDEX_NAME)):
        if weights in files and index in files:
            raise CheckpointError(
                f"{folder} has both {weights} and {index}, two sets of weights: remove the one that is not meant."
            )
        if weights in files or index in files:
            return weights, index if index in files else None
    others = [file for file in files if file.endswith((".safetensors", ".bin", ".gguf", ".pth", ".pt", ".h5"))]
    raise CheckpointError(
        f"{folder} has no {SAFE_WEIGHTS_NAME}, {WEIGHTS_NAME} or index of shards"
        + (f", only {', '.join(others[:3])}" if others else "")
        + ": load it in transformers, save_pretrained() it, and convert that."
    )


def _add(checkpoint: Checkpoint, tensors: list[Tensor], metadata: dict, path, weight_map: dict | None) -> None:
    checkpoint.metadata[path.name] = metadata
    for tensor in tensors:
        if tensor.name in checkpoint.tensors:
            other = checkpoint.tensors[tensor.name].file.name
            name = shown(tensor.name)
            raise CheckpointError(f"{path} holds {name}, and so does {other}: get the whole checkpoint again.")
        if weight_map is not None and weight_map.get(tensor.name) != path.name:
            raise CheckpointError(
                f"{path} holds {shown(tensor.name)}, which the index does not put there: the index belongs to other "
                "files. Get the whole checkpoint again."
            )
        checkpoint.tensors[tensor.name] = tensor


def _check_index(checkpoint: Checkpoint, weight_map: dict | None, index: str | None) -> None:
    absent = sorted(set(weight_map or ()) - set(checkpoint.tensors))
    if absent:
        raise CheckpointError(
            f"{checkpoint.where(index)} puts {shown(absent[0])} into {weight_map[absent[0]]}, which does not hold it"
            + (f" (nor {len(absent) - 1} more)" if len(absent) > 1 else "")
            + ": get the whole checkpoint again."
        )


def _from_hub(repo: str, revision: str | None, subfolder: str | None, token) -> Checkpoint:
    info = HfApi(token=token).model_info(repo, revision=revision)
    prefix = f"{subfolder}/" if subfolder else ""
    here = _names_below(info, prefix)
    weights, index = find_weights(here, f"{repo}/{subfolder or ''}".rstrip("/"))
    suffix = PurePosixPath(weights).suffix
    shards = [name for name in here if "/" not in name and name.endswith(suffix)] if index else [weights]
    wanted = [name for name in here if why_left_out(name) is None] + shards + ([index] if index else [])
    snapshot = snapshot_download(
        repo, revision=info.sha, token=token, allow_patterns=[_literal(prefix + name) for name in wanted]
    )
    return _from_folder(Path(snapshot, subfolder or ""), name=repo, subfolder=subfolder, commit=info.sha)


def _names_below(info, prefix: str) -> list[str]:
    names = [file.rfilename.removeprefix(prefix) for file in info.siblings if file.rfilename.startswith(prefix)]
    if prefix and not names:
        raise CheckpointError(f"{info.id} has no folder {prefix.rstrip('/')!r}.")
    return names


def _literal(name: str) -> str:
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)


def _from_hub_headers(repo: str, revision: str | None, subfolder: str | None, token) -> Checkpoint:
    info = HfApi(token=token).model_info(repo, revision=revision)
    prefix = f"{subfolder}/" if subfolder else ""
    here = _names_below(info, prefix)

    def fetch(name: str) -> Path:
        return Path(hf_hub_download(repo, prefix + name, revision=info.sha, token=token))

    config_file = fetch(CONFIG_NAME) if CONFIG_NAME in here else Path(CONFIG_NAME)
    fields = _read_fields(repo, config_file, here)
    checkpoint = Checkpoint(repo, None, fields, {}, {}, [], info.sha, subfolder)
    weights, index = find_weights(here, repo)
    if PurePosixPath(weights).suffix == ".bin":
        raise CheckpointError(f"{repo} holds pickles, which have no headers to plan from: download it first.")
    weight_map = read_index(fetch(index), ".safetensors") if index else None
    for file in [weights] if index is None else sorted(set(weight_map.values())):
        header = parse_safetensors_file_metadata(repo, prefix + file, revision=info.sha, token=token)
        tensors = [
            Tensor(name, entry.dtype, tuple(entry.shape), Path(file), entry.data_offsets[0])
            for name, entry in sorted(header.tensors.items(), key=lambda item: item[1].data_offsets)
        ]
        if unknown := [tensor for tensor in tensors if tensor.dtype not in BITS]:
            raise CheckpointError(f"{repo}/{file}: {unknown[0].name} has the unknown dtype {unknown[0].dtype!r}.")
        _add(checkpoint, tensors, header.metadata, Path(file), weight_map)
    _check_index(checkpoint, weight_map, index)
    used = set(checkpoint.metadata)
    checkpoint.files = sorted(file for file in here if file not in {CONFIG_NAME, index, *used})
    return checkpoint
