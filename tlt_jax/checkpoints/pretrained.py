"""Loading a model: config to spec, tensors to parameters, with every device reading only its own part.

Hugging Face directories with safetensors, GGUF files and workdirs of runs (the newest complete checkpoint). It runs no model, and converts no pickled weights.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from tlt_jax.checkpoints import run_model
from tlt_jax.checkpoints.gguf import open_gguf
from tlt_jax.checkpoints.locations import FORMS, local_model_path
from tlt_jax.checkpoints.model_source import ModelSource, source_from_files
from tlt_jax.checkpoints.safetensors_files import SafetensorsFiles, read_json
from tlt_jax.checkpoints.tensor_layout import (
    FILE_DTYPES,
    Slices,
    TensorEntry,
    TensorPlace,
    abstract_params,
    check_entries,
    flatten,
    nest,
    read_parameter,
    tensor_places,
)
from tlt_jax.models.specs import PolicySpec, spec_from_config
from tlt_jax.sharding.rules import param_shardings

_COMPARED_ROWS = 8192


@dataclasses.dataclass(frozen=True)
class LoadedPolicy:
    """A model in memory: its spec, its parameters (nested dict, layers stacked) and where it came from."""

    spec: PolicySpec
    params: dict[str, Any]
    source: ModelSource


class TensorReader(Protocol):
    """A checkpoint opened for reading: headers in `entries`, parts of tensors through `read`."""

    entries: Mapping[str, TensorEntry]

    def read(self, name: str, slices: Slices) -> np.ndarray: ...


def load_policy(path: str | os.PathLike[str], *, dtype: str = "float32", mesh: jax.sharding.Mesh | None = None) -> LoadedPolicy:
    """The policy (or value or reward model) at `path`: Hugging Face directory, .gguf file, a run's workdir, bucket path or hub id.

    `dtype` is the parameters' ("float32", "bfloat16", "float16"). Without a mesh they lie on the default device; with one they are sharded by
    `param_shardings`, and only the slices that this process's devices hold are read. Raises what `check_tensors` raises, before any tensor is read.
    """
    if np.dtype(dtype).name not in FILE_DTYPES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(FILE_DTYPES)}.")
    if run_model.is_workdir(path):
        run = run_model.load_network(path, dtype=dtype, mesh=mesh)
        return LoadedPolicy(run.spec, run.params, run.source)
    spec, source, reader = _open_checked(path)
    _report_second_head(spec, reader, source.path)
    places = tensor_places(spec)
    if mesh is None:
        leaves = {place.path: jnp.asarray(read_parameter(place, reader.read, _everything(place), dtype)) for place in places}
        return LoadedPolicy(spec, nest(leaves), source)
    shardings = flatten(param_shardings(mesh, abstract_params(spec, dtype)))
    leaves = {
        place.path: jax.make_array_from_callback(place.stacked_shape, shardings[place.path], _part_reader(place, reader, dtype)) for place in places
    }
    return LoadedPolicy(spec, nest(leaves), source)


def read_source(path: str | os.PathLike[str]) -> ModelSource:
    """Where the model at `path` comes from, from its text files and tensor headers alone."""
    return run_model.read_run_model(path)[1] if run_model.is_workdir(path) else _open(path)[1]


def check_tensors(path: str | os.PathLike[str]) -> PolicySpec:
    """The spec of the model at `path`, after checking names, shapes and file lengths from headers only: no tensor is read, no device touched.

    Raises FileNotFoundError for absent files, ValueError for an unsupported config, a cut file, and (one error, all listed) missing, extra or
    wrong-shaped tensors.
    """
    return run_model.check_run(path) if run_model.is_workdir(path) else _open_checked(path)[0]


def _open_checked(path: str | os.PathLike[str]) -> tuple[PolicySpec, ModelSource, TensorReader]:
    spec, source, reader = _open(path)
    check_entries(spec, reader.entries, source.path)
    return spec, source, reader


def _open(path: str | os.PathLike[str]) -> tuple[PolicySpec, ModelSource, TensorReader]:
    local = local_model_path(path)
    if local.suffix == ".gguf":
        config, source, reader = open_gguf(local)
        return _spec(config, local), source, reader
    if not (local / "config.json").exists():
        raise FileNotFoundError(f"{local} has no config.json. {FORMS}")
    config = read_json(local / "config.json")
    spec = _spec(config, local / "config.json")
    reader = SafetensorsFiles(str(local))
    return spec, source_from_files(str(local), config, local, reader.entries), reader


def _spec(config: dict[str, Any], where: os.PathLike[str]) -> PolicySpec:
    try:
        return spec_from_config(config)
    except ValueError as error:
        raise ValueError(f"{os.fspath(where)}: {error}") from error


def _everything(place: TensorPlace) -> Slices:
    return (slice(None),) * len(place.stacked_shape)


def _part_reader(place: TensorPlace, reader: TensorReader, dtype: str) -> Callable[[Slices | None], np.ndarray]:
    """A callback for make_array_from_callback. Devices that hold the same part (replicas) share one read."""
    parts: dict[tuple[tuple[int, int, int], ...], np.ndarray] = {}

    def part(index: Slices) -> np.ndarray:
        key = tuple(one.indices(size) for one, size in zip(index, place.stacked_shape, strict=True))
        if key not in parts:
            parts[key] = read_parameter(place, reader.read, index, dtype)
        return parts[key]

    return part


def _report_second_head(spec: PolicySpec, reader: TensorReader, where: str) -> None:
    """A tied policy whose files hold another head than the embedding: say so, the tied weight wins (as in transformers)."""
    if spec.head != "policy" or not spec.tied or "lm_head.weight" not in reader.entries:
        return
    for start in range(0, spec.vocab_size, _COMPARED_ROWS):
        rows = (slice(start, min(start + _COMPARED_ROWS, spec.vocab_size)), slice(0, spec.hidden_size))
        head, embedding = (reader.read(name, rows).astype(np.float32) for name in ("lm_head.weight", "model.embed_tokens.weight"))
        if not np.array_equal(head, embedding, equal_nan=True):
            logging.warning(
                "%s: config says tie_word_embeddings, but lm_head.weight differs from model.embed_tokens.weight (rows %d…); the embedding is used as head, "
                "lm_head.weight is dropped. Set tie_word_embeddings to false to keep it.",
                where,
                start,
            )
            return
