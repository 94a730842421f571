"""Reading safetensors checkpoints: which files belong to a model directory, what their headers promise, and parts of their tensors.

It knows nothing of models: names and shapes are checked against a spec elsewhere.
"""

import json
import os
import pathlib
from typing import Any

import ml_dtypes  # noqa: F401  registers "bfloat16" with numpy
import numpy as np
import safetensors
from absl import logging

from tlt_jax.checkpoints.tensor_layout import Slices, TensorEntry

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_DTYPE_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class SafetensorsFiles:
    """The tensors of a model directory: `entries` from the headers alone, `read` for parts of one.

    With an index, its weight_map decides which files are read, whatever their names; else `model.safetensors` is. Other safetensors files are left
    alone with a warning. Raises FileNotFoundError for absent files and ValueError for cut files, a tensor in two files, or an index at odds with them.
    """

    def __init__(self, directory: str):
        self._directory = pathlib.Path(directory)
        weight_map = _weight_map(self._directory)
        self.entries: dict[str, TensorEntry] = {}
        for file in sorted(set(weight_map.values())):
            for name, entry in read_header(str(self._directory / file)).items():
                if name in self.entries:
                    raise ValueError(f"{directory}: tensor {name} is in two files, {os.path.basename(self.entries[name].file)} and {file}.")
                self.entries[name] = entry
        astray = [
            f"{name} (said to be in {file})" for name, file in weight_map.items() if name and (name not in self.entries or self._file_of(name) != file)
        ]
        if astray:
            raise ValueError(f"{self._directory / INDEX_NAME} names tensors that are not where it says: {', '.join(astray)}.")

    def _file_of(self, name: str) -> str:
        return os.path.relpath(self.entries[name].file, self._directory)

    def read(self, name: str, slices: Slices) -> np.ndarray:
        """Part of one tensor in the file's dtype; only the pages under the slices are touched."""
        with safetensors.safe_open(self.entries[name].file, framework="numpy") as file:
            return file.get_slice(name)[slices]


def read_header(path: str) -> dict[str, TensorEntry]:
    """Names, dtypes and shapes of one safetensors file, without reading tensors. Raises ValueError naming the file when it is cut or no such file."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(f"{path} is cut short or no safetensors file: {size} bytes, shorter than its header. Download or copy it again.")
        try:
            header = json.loads(file.read(length), object_pairs_hook=_unique_keys)
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} has no readable safetensors header: {error}. Download or copy it again.") from error
    header.pop("__metadata__", None)
    promised = 8 + length + max((fields["data_offsets"][1] for fields in header.values()), default=0)
    if size != promised:
        raise ValueError(f"{path} is cut short or damaged: it holds {size} bytes, its header promises {promised}. Download or copy it again.")
    return {name: TensorEntry(_DTYPE_NAMES.get(fields["dtype"], fields["dtype"]), tuple(fields["shape"]), path) for name, fields in header.items()}


def _weight_map(directory: pathlib.Path) -> dict[str, str]:
    """{tensor name: file name}; a single file stands under the empty name, since only its header knows its tensors."""
    present = sorted(path.name for path in directory.glob("*.safetensors"))
    index = directory / INDEX_NAME
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not weight_map:
            raise ValueError(f"{index} has no weight_map.")
        if absent := sorted(set(weight_map.values()) - set(present)):
            raise FileNotFoundError(f"{index} names files that are not in the directory: {', '.join(absent)}. Present: {', '.join(present) or 'none'}.")
    elif SINGLE_NAME in present:
        weight_map = {"": SINGLE_NAME}
    else:
        others = sorted(path.name for pattern in ("*.safetensors", "*.bin", "*.pth") for path in directory.glob(pattern))
        raise FileNotFoundError(
            f"{directory} holds neither {SINGLE_NAME} nor {INDEX_NAME}. Present: {', '.join(others) or 'no weights'}. "
            "Save the model as safetensors under these names."
        )
    if strays := sorted(set(present) - set(weight_map.values())):
        logging.warning("%s: not read, since %s does not name them: %s", directory, INDEX_NAME if index.exists() else SINGLE_NAME, ", ".join(strays))
    return weight_map


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ValueError that names the file when it is broken, no object, or gives one key twice."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique_keys)
    except ValueError as error:
        raise ValueError(f"{path} is no valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds {type(value).__name__}, not an object.")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"given twice: {', '.join(sorted({name for name in names if names.count(name) > 1}))}")
    return result
