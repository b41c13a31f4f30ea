"""Models from Hugging Face's hub: fetched whole, compared with what the hub says of them, and those that are here."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import HfApi, constants, scan_cache_dir, snapshot_download
from huggingface_hub.errors import (
    CacheNotFound,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoSibling

from phalanx.errors import ModelError

PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.gguf")
_CHUNK = 2**20


@dataclass(frozen=True)
class Offered:
    """A model as the hub has it now."""

    id: str
    commit: str
    files: list[RepoSibling]

    @property
    def size(self) -> int:
        return sum(file.size or 0 for file in self.files)


@dataclass(frozen=True)
class LocalModel:
    id: str
    folder: Path
    size: int
    model_type: str | None


def offered(model: str, revision: str | None, token: str | None) -> Offered:
    """What there is to fetch. GGUF files only where there are no safetensors: they are other forms of the same."""
    with _told(model):
        info = HfApi(token=token).model_info(model, revision=revision, files_metadata=True)
    files = [file for file in info.siblings or [] if any(fnmatch(file.rfilename, form) for form in PATTERNS)]
    if any(file.rfilename.endswith(".safetensors") for file in files):
        files = [file for file in files if not file.rfilename.endswith(".gguf")]
    if not files or info.sha is None:
        raise ModelError("no_weights", f"{model} has neither safetensors nor GGUF files.", "Choose another repository.")
    return Offered(model, info.sha, files)


def fetch(model: Offered, token: str | None) -> Path:
    """All its files. What was begun before goes on where it was; what is here already is not fetched again."""
    cache = Path(constants.HF_HUB_CACHE)
    cache.mkdir(parents=True, exist_ok=True)
    here = sum(path.stat().st_size for path in _blobs(cache, model.id).glob("*"))
    free = shutil.disk_usage(cache).free
    if model.size - here > free:
        raise ModelError(
            "disk_full",
            f"{model.id} takes {model.size / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free in {cache}.",
            "Free some, or set HF_HOME to a larger disk.",
        )
    with _told(model.id):
        names = [file.rfilename for file in model.files]
        return Path(snapshot_download(model.id, revision=model.commit, allow_patterns=names, token=token))


def check(model: Offered, folder: Path, told: Callable[[int], object]) -> None:
    """Compare every file with its checksum at the hub; `told` hears of bytes read. A wrong one is removed."""
    for file in model.files:
        path = folder / file.rfilename
        size = path.stat().st_size
        digest = hashlib.sha256() if file.lfs is not None else hashlib.sha1(b"blob %d\0" % size)
        with path.open("rb") as stream:
            while piece := stream.read(_CHUNK):
                digest.update(piece)
                told(len(piece))
        expected = file.lfs.sha256 if file.lfs is not None else file.blob_id
        if digest.hexdigest() != expected:
            path.resolve().unlink()
            path.unlink()
            raise ModelError(
                "bad_checksum", f"{file.rfilename} is not what {model.id} has: it is damaged.", "Pull again."
            )


def local_models() -> list[LocalModel]:
    """Those in the cache, by name, with the newest of their revisions."""
    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return []
    found = []
    for repo in sorted(repos, key=lambda repo: repo.repo_id):
        if repo.repo_type == "model" and repo.revisions:
            newest = max(repo.revisions, key=lambda revision: revision.last_modified)
            folder = Path(newest.snapshot_path)
            found.append(LocalModel(repo.repo_id, folder, repo.size_on_disk, _model_type(folder)))
    return found


def _model_type(folder: Path) -> str | None:
    try:
        return str(json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _blobs(cache: Path, model: str) -> Path:
    return cache / f"models--{model.replace('/', '--')}" / "blobs"


class _told:
    """What goes wrong at the hub, in our words."""

    def __init__(self, model: str) -> None:
        self._model = model

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, GatedRepoError):
            found, fix = "is only for those who have accepted its terms", "Accept them, then give a token: HF_TOKEN."
        elif isinstance(error, RepositoryNotFoundError):
            found, fix = (
                "is not at the hub, or not for everyone",
                "Check the name, or give a token: HF_TOKEN.",
            )
        elif isinstance(error, RevisionNotFoundError):
            found, fix = "has no such revision", "Check --revision."
        elif isinstance(error, HFValidationError | ValueError):
            found, fix = "is no name of a repository", "Write it as OWNER/NAME."
        elif isinstance(error, HfHubHTTPError | LocalEntryNotFoundError | OSError):
            found, fix = f"could not be had ({type(error).__name__})", "Check the connection; what is here is kept."
        else:
            return
        raise ModelError("no_model", f"{self._model} {found}.", fix) from None
