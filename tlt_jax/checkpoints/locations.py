"""Turning what a user calls a model (directory, .gguf file, bucket path, hub id) into a local path, and caching what had to be fetched.

It decides nothing about the contents.
"""

import hashlib
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Callable

import huggingface_hub
from etils import epath

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "merges.txt")
FORMS = "A model is a Hugging Face directory, a .gguf file, a run's workdir, a bucket path (gs://…) or a hub id (org/name)."


def local_model_path(path: str | os.PathLike[str]) -> pathlib.Path:
    """The local directory or file behind `path`. Only a path that is not on disk and looks like org/name goes to the hub; else FileNotFoundError."""
    text = os.fspath(path)
    if "://" in text:
        return _fetch_bucket(text)
    local = pathlib.Path(text).expanduser()
    if local.exists():
        return local
    if _HUB_ID.fullmatch(text) and not text.endswith(".gguf"):
        return pathlib.Path(huggingface_hub.snapshot_download(text, allow_patterns=list(_MODEL_FILES)))
    raise FileNotFoundError(f"{text} does not exist and is no hub id. {FORMS}")


def cached_directory(kind: str, key: str, fill: Callable[[pathlib.Path], None]) -> pathlib.Path:
    """A directory under the user's cache that `fill` wrote once for `key`. Filled beside its place and renamed, so a killed run leaves no half."""
    root = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tlt_jax" / kind
    place = root / hashlib.sha256(key.encode()).hexdigest()[:20]
    if place.exists():
        return place
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root) as scratch:
        made = pathlib.Path(scratch) / "made"
        made.mkdir()
        fill(made)
        try:
            made.rename(place)
        except OSError:
            if not place.exists():  # another process was first: its directory holds the same
                raise
    return place


def _fetch_bucket(text: str) -> pathlib.Path:
    remote = epath.Path(text)
    if not remote.exists():
        raise FileNotFoundError(f"{text} does not exist. {FORMS}")
    files = [remote] if not remote.is_dir() else [file for pattern in _MODEL_FILES for file in sorted(remote.glob(pattern))]
    stamps = [(file.name, file.stat().length, file.stat().mtime) for file in files]

    def copy(directory: pathlib.Path) -> None:
        for file in files:
            with file.open("rb") as source, open(directory / file.name, "wb") as target:
                shutil.copyfileobj(source, target)

    directory = cached_directory("models", f"{text} {stamps}", copy)
    return directory if remote.is_dir() else directory / remote.name
