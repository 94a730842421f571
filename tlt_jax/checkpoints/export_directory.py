"""A directory that appears under its name only when everything in it is written, and that replaces nothing but an earlier export."""

import contextlib
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Iterator

from etils import epath

from tlt_jax.checkpoints.model_source import TOKENIZER_FILES
from tlt_jax.checkpoints.safetensors_files import INDEX_NAME

_SHARD_NAME = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
_TEXT_FILES = {*TOKENIZER_FILES, "config.json", "generation_config.json", INDEX_NAME}


@contextlib.contextmanager
def export_directory(path: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
    """A local directory to fill, which takes the place of `path` at a clean end. Raises FileExistsError where `path` holds other files than an export's."""
    if "://" in os.fspath(path):
        with tempfile.TemporaryDirectory() as scratch:
            yield pathlib.Path(scratch)
            _copy_to_bucket(pathlib.Path(scratch), epath.Path(path))
        return
    target = pathlib.Path(path)
    refuse_foreign(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as scratch:
        made, replaced = pathlib.Path(scratch) / "made", pathlib.Path(scratch) / "replaced"
        made.mkdir()
        yield made
        if target.exists():
            target.rename(replaced)
        made.rename(target)


def refuse_foreign(target: pathlib.Path) -> None:
    """Raises FileExistsError unless `target` is absent, empty or an earlier export."""
    if not target.exists():
        return
    if not target.is_dir():
        raise FileExistsError(f"{target} is a file. Choose another directory to export to.")
    names = sorted(entry.name for entry in target.iterdir())
    foreign = [name for name in names if name not in _TEXT_FILES and not _SHARD_NAME.fullmatch(name)]
    if foreign or (names and "config.json" not in names):
        raise FileExistsError(f"{target} holds files that are not an earlier export ({', '.join((foreign or names)[:5])}). Choose another directory.")


def _copy_to_bucket(made: pathlib.Path, target: epath.Path) -> None:
    """Buckets have no rename: config.json, without which nothing loads, goes last."""
    target.mkdir(parents=True, exist_ok=True)
    for file in sorted(made.iterdir(), key=lambda file: file.name == "config.json"):
        with open(file, "rb") as source, (target / file.name).open("wb") as sink:
            shutil.copyfileobj(source, sink)
