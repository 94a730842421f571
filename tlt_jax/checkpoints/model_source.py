"""Where a model came from: its config, stop ids, tokenizer files and file dtypes, kept so that an export gives them back.

Reads small text files only; tensors are read elsewhere.
"""

import collections
import dataclasses
import math
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from absl import logging

from tlt_jax.checkpoints.safetensors_files import read_json
from tlt_jax.checkpoints.tensor_layout import TensorEntry

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")


@dataclasses.dataclass(frozen=True)
class ModelSource:
    """What a loaded model's files said beside its tensors.

    `path`: local directory or file. `file_dtype`: dtype of most bytes; `tensor_dtypes` names the tensors that differ from it. `stop_ids`: union of
    the eos ids of tokenizer, generation config and config, sorted. `tokenizer_dir`: directory that AutoTokenizer reads, or None.
    """

    path: str
    file_dtype: str
    stop_ids: tuple[int, ...]
    pad_id: int | None
    generation_config: dict[str, Any] | None
    config: dict[str, Any]
    tokenizer_files: tuple[str, ...]
    chat_template: str | None
    tokenizer_dir: str | None
    tensor_dtypes: tuple[tuple[str, str], ...] = ()


def source_from_files(path: str, config: dict[str, Any], side_files: pathlib.Path | None, entries: Mapping[str, TensorEntry]) -> ModelSource:
    """The source of a model at `path` whose generation config and tokenizer files, if any, lie in the directory `side_files`."""
    directory = side_files or pathlib.Path()
    present = {file.name for file in side_files.iterdir()} if side_files else set()
    files = tuple(name for name in TOKENIZER_FILES if name in present)
    generation = read_json(directory / "generation_config.json") if "generation_config.json" in present else None
    settings = read_json(directory / "tokenizer_config.json") if "tokenizer_config.json" in files else {}
    ids = [_special_id(directory, files, settings, "eos_token"), (generation or {}).get("eos_token_id"), config.get("eos_token_id")]
    pads = [_special_id(directory, files, settings, "pad_token"), (generation or {}).get("pad_token_id"), config.get("pad_token_id")]
    file_dtype, tensor_dtypes = file_dtypes(entries)
    return ModelSource(
        path=path,
        file_dtype=file_dtype,
        stop_ids=tuple(sorted({one for value in ids for one in _ids(value)})),
        pad_id=next((one for value in pads for one in _ids(value)), None),
        generation_config=generation,
        config=config,
        tokenizer_files=files,
        chat_template=read_chat_template(side_files) if side_files else None,
        tokenizer_dir=str(directory) if any(name in files for name in _VOCABULARIES) else None,
        tensor_dtypes=tensor_dtypes,
    )


def file_dtypes(entries: Mapping[str, TensorEntry]) -> tuple[str, tuple[tuple[str, str], ...]]:
    """The dtype that holds most elements, and (name, dtype) of the tensors that differ from it."""
    sizes: collections.Counter[str] = collections.Counter()
    for entry in entries.values():
        sizes[entry.dtype] += math.prod(entry.shape)
    if not sizes:
        return "float32", ()
    main = sizes.most_common(1)[0][0]
    return main, tuple((name, entry.dtype) for name, entry in entries.items() if entry.dtype != main)


def _ids(value: Any) -> Iterable[int]:
    """Token ids of a config value: an int, a list of ints or null. Negative ids mean "none" in old Llama configs."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(one) is not int for one in values):
        raise ValueError(f"Token id {value!r} is neither an integer nor a list of integers.")
    return [one for one in values if one >= 0]


def _special_id(directory: pathlib.Path, files: tuple[str, ...], settings: dict[str, Any], role: str) -> int | None:
    """The id of the tokenizer's `role` token, looked up in the added tokens first, then in the vocabulary."""
    special = settings.get(role)
    if special is None and "special_tokens_map.json" in files:
        special = read_json(directory / "special_tokens_map.json").get(role)
    if special is None:
        return None
    text = special["content"] if isinstance(special, dict) else special
    for token_id, token in settings.get("added_tokens_decoder", {}).items():
        if token["content"] == text:
            return int(token_id)
    tokenizer = read_json(directory / "tokenizer.json") if "tokenizer.json" in files else {}
    for token in tokenizer.get("added_tokens", ()):
        if token["content"] == text:
            return token["id"]
    vocabulary = tokenizer.get("model", {}).get("vocab", {})
    if not vocabulary and "vocab.json" in files:
        vocabulary = read_json(directory / "vocab.json")
    if isinstance(vocabulary, list):  # Unigram: [piece, score] pairs, the id is the place
        vocabulary = {piece: index for index, (piece, _) in enumerate(vocabulary)}
    if text in vocabulary:
        return vocabulary[text]
    logging.warning("%s: the tokenizer's %s %r has no id in its JSON files; only the ids of the config files are used.", directory, role, text)
    return None


def read_chat_template(directory: pathlib.Path) -> str | None:
    """The chat template in transformers' order: the .jinja file, the .json file, the tokenizer config (one text or a list of named ones)."""
    if (directory / "chat_template.jinja").exists():
        return (directory / "chat_template.jinja").read_text(encoding="utf-8")
    for name in ("chat_template.json", "tokenizer_config.json"):
        template = read_json(directory / name).get("chat_template") if (directory / name).exists() else None
        if isinstance(template, list):
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        if template is not None:
            return template
    return None
