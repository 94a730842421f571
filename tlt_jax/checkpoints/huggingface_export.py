"""Writing a model as a Hugging Face directory: sharded safetensors, config, generation config, tokenizer and chat template.

The directory appears under its name only when it is complete. The source's config.json is kept; only what changed is edited (dtype, tie flag, head).
It gathers nothing across processes and trains nothing.
"""

import copy
import dataclasses
import json
import math
import os
import pathlib
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from tlt_jax.checkpoints.export_directory import export_directory
from tlt_jax.checkpoints.model_source import ModelSource, read_chat_template
from tlt_jax.checkpoints.safetensors_files import INDEX_NAME, SINGLE_NAME
from tlt_jax.checkpoints.tensor_layout import FILE_DTYPES, file_tensor, flatten, tensor_places
from tlt_jax.models.specs import PolicySpec, architecture_fields, config_from_spec, spec_from_config

MAX_SHARD_BYTES = 5_000_000_000


@dataclasses.dataclass(frozen=True)
class _Export:
    """A checked model on its way to a directory: parameters by path, and the dtype of each tensor in the files."""

    spec: PolicySpec
    leaves: dict[tuple[str, ...], Any]
    dtypes: dict[str, str]
    config: dict[str, Any]
    source: ModelSource | None
    max_shard_bytes: int


def save_policy(
    path: str | os.PathLike[str],
    spec: PolicySpec,
    params: Mapping[str, Any],
    *,
    source: ModelSource | None = None,
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write `params` (jax or numpy arrays in our layout) as a Hugging Face directory at `path`.

    `source` is where the model was loaded from: its config, generation config, tokenizer files and chat template go along. `dtype` None keeps every
    tensor's dtype in the source's files (without a source, the parameters'), so loading in float32 and saving gives equal bits. An earlier export at
    `path` is replaced. Raises ValueError for parameters that do not fit `spec` (all listed), for a spec that is not the source's, for values that
    float16 cannot hold and for arrays that this process holds only in part; FileExistsError for a directory with other files.
    """
    leaves = flatten(params)
    _check_leaves(spec, leaves)
    main, dtypes = _file_dtypes(spec, leaves, source, dtype)
    export = _Export(spec, leaves, dtypes, _config(spec, source, main), source, max_shard_bytes)
    with export_directory(path) as made:
        _write(export, made)


def _write(export: _Export, directory: pathlib.Path) -> None:
    shards = _shards(export)
    names = [SINGLE_NAME] if len(shards) == 1 else [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    tensors = _tensors(export)
    sizes = 0
    for name, shard in zip(names, shards, strict=True):
        held = dict(next(tensors) for _ in shard)
        sizes += sum(tensor.nbytes for tensor in held.values())
        save_file(held, directory / name, metadata={"format": "pt"})  # transformers reads no file without this mark
    if len(shards) > 1:
        weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        _write_json(directory / INDEX_NAME, {"metadata": {"total_size": sizes}, "weight_map": dict(sorted(weight_map.items()))})
    _write_json(directory / "config.json", export.config)
    if export.source is not None:
        _write_side_files(export.source, directory)


def _write_side_files(source: ModelSource, directory: pathlib.Path) -> None:
    if source.generation_config is not None:
        _write_json(directory / "generation_config.json", source.generation_config)
    for name in source.tokenizer_files:
        shutil.copyfile(pathlib.Path(source.tokenizer_dir or source.path) / name, directory / name)
    if source.chat_template is not None and read_chat_template(directory) != source.chat_template:
        (directory / "chat_template.jinja").write_text(source.chat_template, encoding="utf-8")


def _shards(export: _Export) -> list[list[str]]:
    """Tensor names by shard, in writing order; a shard holds at least one tensor and at most `max_shard_bytes` when it holds more."""
    shards: list[list[str]] = [[]]
    held = 0
    for place in tensor_places(export.spec):
        for name in place.names():
            size = math.prod(place.shape) * np.dtype(export.dtypes[name]).itemsize
            if shards[-1] and held + size > export.max_shard_bytes:
                shards.append([])
                held = 0
            shards[-1].append(name)
            held += size
    return shards


def _tensors(export: _Export) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor in the file's layout and dtype; one parameter at a time is copied to the host."""
    for place in tensor_places(export.spec):
        parameter = np.asarray(export.leaves[place.path])
        layers = [parameter] if place.layers is None else parameter
        for name, layer in zip(place.names(), layers, strict=True):
            with np.errstate(over="ignore"):
                tensor = file_tensor(place, layer).astype(np.dtype(export.dtypes[name]))
            if export.dtypes[name] == "float16" and np.isinf(tensor).sum() > np.isinf(layer.astype(np.float32)).sum():
                raise ValueError(f"{name} holds values beyond float16 (65504). Save with dtype='bfloat16' or 'float32'.")
            yield name, tensor


def _check_leaves(spec: PolicySpec, leaves: Mapping[tuple[str, ...], Any]) -> None:
    expected = {place.path: place.stacked_shape for place in tensor_places(spec)}
    problems = [f"missing {'.'.join(path)}" for path in expected if path not in leaves]
    problems += [f"extra {'.'.join(path)}" for path in leaves if path not in expected]
    problems += [
        f"{'.'.join(path)}: parameter {list(leaves[path].shape)}, spec {list(shape)}"
        for path, shape in expected.items()
        if path in leaves and leaves[path].shape != shape
    ]
    if problems:
        raise ValueError(f"Parameters do not fit the spec: {'; '.join(problems)}.")
    for path, leaf in leaves.items():
        if isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated):
            raise ValueError(f"{'.'.join(path)} lies partly on other processes. Gather the parameters to this process before saving.")


def _file_dtypes(
    spec: PolicySpec, leaves: Mapping[tuple[str, ...], Any], source: ModelSource | None, dtype: str | None
) -> tuple[str, dict[str, str]]:
    """The config's dtype and the dtype of each tensor."""
    names = {name: place.path for place in tensor_places(spec) for name in place.names()}
    if dtype is not None:
        main, dtypes = np.dtype(dtype).name, {}
    elif source is not None:
        main, dtypes = source.file_dtype, {name: kind for name, kind in source.tensor_dtypes if name in names}
    else:
        main, dtypes = leaves["embed", "embedding"].dtype.name, {name: leaves[path].dtype.name for name, path in names.items()}
    if unknown := {main, *dtypes.values()} - set(FILE_DTYPES):
        raise ValueError(f"Cannot save dtype {', '.join(sorted(unknown))}; one of {', '.join(FILE_DTYPES)} is needed.")
    return main, {name: main for name in names} | dtypes


def _config(spec: PolicySpec, source: ModelSource | None, dtype: str) -> dict[str, Any]:
    if source is None:
        return config_from_spec(spec, dtype=dtype)
    config = copy.deepcopy(source.config)
    was = spec_from_config(config)
    free = {"tied": spec.tied, "head": spec.head}
    if dataclasses.replace(was, **free) != spec:
        changed = [f"{name}: source {vars(was)[name]!r}, spec {value!r}" for name, value in vars(spec).items() if name not in free and vars(was)[name] != value]
        raise ValueError(f"The spec is not that of the source {source.path}: {'; '.join(changed)}. Save without a source to write a config from the spec.")
    if spec.head != was.head:
        for field in ("id2label", "label2id", "num_labels", "head_role"):
            config.pop(field, None)
        config |= architecture_fields(spec.family, spec.head)
    if spec.tied != was.tied:
        config["tie_word_embeddings"] = spec.tied
    for field in [field for field in ("dtype", "torch_dtype") if field in config] or ["dtype"]:
        config[field] = dtype
    return config


def _write_json(path: pathlib.Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
