"""Which checkpoint tensor holds which parameter: one table for loading, checking and exporting.

Parameters are nested dicts, layers stacked on a leading axis, kernels stored [in, out]; Hugging Face stores one tensor a layer, [out, in]. This module
knows names, shapes and the reordering between the two; it opens no files and computes nothing on a device.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import ml_dtypes  # noqa: F401  registers "bfloat16" with numpy
import numpy as np

from tlt_jax.models.specs import PolicySpec

Slices = tuple[slice, ...]
FILE_DTYPES = ("float32", "float16", "bfloat16")


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """One tensor of a checkpoint as its header describes it: dtype name, shape, and the file it lies in."""

    dtype: str
    shape: tuple[int, ...]
    file: str


@dataclasses.dataclass(frozen=True)
class TensorPlace:
    """A parameter and the checkpoint tensors behind it.

    `shape` is the parameter's, without the layer axis; `file_axes` gives for each axis of the file's tensor the parameter axes merged into it, so a
    query kernel [D, H, C] kept as [H*C, D] has ((1, 2), (0,)). `name` holds "{layer}" when the parameter is stacked over `layers`.
    """

    path: tuple[str, ...]
    name: str
    shape: tuple[int, ...]
    file_axes: tuple[tuple[int, ...], ...]
    layers: int | None

    @property
    def file_shape(self) -> tuple[int, ...]:
        return tuple(math.prod(self.shape[axis] for axis in group) for group in self.file_axes)

    @property
    def stacked_shape(self) -> tuple[int, ...]:
        return self.shape if self.layers is None else (self.layers, *self.shape)

    def names(self) -> list[str]:
        """The checkpoint names in layer order."""
        return [self.name] if self.layers is None else [self.name.format(layer=layer) for layer in range(self.layers)]


def tensor_places(spec: PolicySpec) -> tuple[TensorPlace, ...]:
    """Every parameter of `spec`, in a fixed order."""
    D, H, K, C, F = spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.intermediate_size
    into_heads, from_heads, dense, vector = ((1, 2), (0,)), ((2,), (0, 1)), ((1,), (0,)), ((0,),)
    rows = [
        ("attention_norm.scale", "input_layernorm.weight", (D,), vector, True),
        ("attention.query.kernel", "self_attn.q_proj.weight", (D, H, C), into_heads, True),
        ("attention.key.kernel", "self_attn.k_proj.weight", (D, K, C), into_heads, True),
        ("attention.value.kernel", "self_attn.v_proj.weight", (D, K, C), into_heads, True),
        ("attention.output.kernel", "self_attn.o_proj.weight", (H, C, D), from_heads, True),
        ("attention.query.bias", "self_attn.q_proj.bias", (H, C), ((0, 1),), spec.qkv_bias),
        ("attention.key.bias", "self_attn.k_proj.bias", (K, C), ((0, 1),), spec.qkv_bias),
        ("attention.value.bias", "self_attn.v_proj.bias", (K, C), ((0, 1),), spec.qkv_bias),
        ("attention.output.bias", "self_attn.o_proj.bias", (D,), vector, spec.output_bias),
        ("attention.query_norm.scale", "self_attn.q_norm.weight", (C,), vector, spec.qk_norm),
        ("attention.key_norm.scale", "self_attn.k_norm.weight", (C,), vector, spec.qk_norm),
        ("mlp_norm.scale", "post_attention_layernorm.weight", (D,), vector, True),
        ("mlp.gate.kernel", "mlp.gate_proj.weight", (D, F), dense, True),
        ("mlp.up.kernel", "mlp.up_proj.weight", (D, F), dense, True),
        ("mlp.down.kernel", "mlp.down_proj.weight", (F, D), dense, True),
        ("mlp.gate.bias", "mlp.gate_proj.bias", (F,), vector, spec.mlp_bias),
        ("mlp.up.bias", "mlp.up_proj.bias", (F,), vector, spec.mlp_bias),
        ("mlp.down.bias", "mlp.down_proj.bias", (D,), vector, spec.mlp_bias),
    ]
    layers = [
        TensorPlace(("layers", *path.split(".")), "model.layers.{layer}." + name, shape, axes, spec.num_layers)
        for path, name, shape, axes, present in rows
        if present
    ]
    embedding = TensorPlace(("embed", "embedding"), "model.embed_tokens.weight", (spec.vocab_size, D), ((0,), (1,)), None)
    final_norm = TensorPlace(("final_norm", "scale"), "model.norm.weight", (D,), vector, None)
    places = [embedding, *layers, final_norm]
    if spec.head != "policy":
        places.append(TensorPlace(("head", "kernel"), "score.weight", (D, 1), dense, None))
    elif not spec.tied:
        places.append(TensorPlace(("head", "kernel"), "lm_head.weight", (D, spec.vocab_size), dense, None))
    return tuple(places)


def nest(leaves: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    """A nested dict from {path: leaf}."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return tree


def flatten(tree: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """{path: leaf} of a nested dict; the inverse of `nest`."""
    leaves: dict[tuple[str, ...], Any] = {}
    for key, node in tree.items():
        leaves |= flatten(node, (*prefix, key)) if isinstance(node, Mapping) else {(*prefix, key): node}
    return leaves


def abstract_params(spec: PolicySpec, dtype: str = "float32") -> dict[str, Any]:
    """The parameter tree of `spec` as `jax.ShapeDtypeStruct` leaves."""
    return nest({place.path: jax.ShapeDtypeStruct(place.stacked_shape, np.dtype(dtype)) for place in tensor_places(spec)})


def check_entries(spec: PolicySpec, entries: Mapping[str, TensorEntry], where: str) -> None:
    """Raise one ValueError that lists every missing, extra and wrong-shaped tensor of a checkpoint (both shapes), and every unreadable dtype.

    No extras: `*.rotary_emb.inv_freq` (old files keep the computed table) and the `lm_head.weight` of a tied policy.
    """
    expected = {name: place.file_shape for place in tensor_places(spec) for name in place.names()}
    allowed = {"lm_head.weight": (spec.vocab_size, spec.hidden_size)} if spec.tied and spec.head == "policy" else {}
    extra = [name for name in entries if name not in expected and name not in allowed and not name.endswith("rotary_emb.inv_freq")]
    missing = [name for name in expected if name not in entries]
    shapes = [
        f"{name}: file {list(entries[name].shape)}, config {list(shape)}"
        for name, shape in (expected | allowed).items()
        if name in entries and entries[name].shape != shape
    ]
    dtypes = [f"{name}: {entries[name].dtype}" for name in expected if name in entries and entries[name].dtype not in FILE_DTYPES]
    hint = " (if the head is tied to the embedding, set tie_word_embeddings: true in config.json)" if "lm_head.weight" in missing else ""
    problems = [
        f"{len(found)} {title}: {', '.join(found)}{note}"
        for title, found, note in (
            ("missing tensors", missing, hint),
            ("extra tensors", extra, ""),
            ("wrong shapes", shapes, ""),
            (f"dtypes other than {', '.join(FILE_DTYPES)}", dtypes, ""),
        )
        if found
    ]
    if problems:
        raise ValueError(f"{where} does not fit its config:\n  " + "\n  ".join(problems))


def read_parameter(place: TensorPlace, read: Callable[[str, Slices], np.ndarray], index: Slices, dtype: str) -> np.ndarray:
    """The part `index` of a (stacked) parameter, cast to `dtype` at the end.

    `read(name, slices)` returns part of one checkpoint tensor; only the rows and columns that the index touches are asked for. `index` has one slice
    an axis, step 1.
    """
    bounds = [range(size)[part] for part, size in zip(index, place.stacked_shape, strict=True)]
    own = bounds if place.layers is None else bounds[1:]
    out = np.empty([len(part) for part in bounds], np.dtype(dtype))
    if place.layers is None:
        out[...] = _read_tensor(place, read, place.name, own)
        return out
    for position, layer in enumerate(bounds[0]):
        out[position] = _read_tensor(place, read, place.name.format(layer=layer), own)
    return out


def _read_tensor(place: TensorPlace, read: Callable[[str, Slices], np.ndarray], name: str, own: list[range]) -> np.ndarray:
    slices, split, inner = [], [], []
    for group in place.file_axes:
        # Of merged axes only the first can be cut in the file; the others are read whole and cut afterwards.
        minor = math.prod(place.shape[axis] for axis in group[1:])
        major = own[group[0]]
        slices.append(slice(major.start * minor, major.stop * minor))
        split += [len(major), *(place.shape[axis] for axis in group[1:])]
        inner += [slice(None), *(slice(own[axis].start, own[axis].stop) for axis in group[1:])]
    order = [axis for group in place.file_axes for axis in group]
    return read(name, tuple(slices)).reshape(split)[tuple(inner)].transpose(np.argsort(order))


def file_tensor(place: TensorPlace, parameter: np.ndarray) -> np.ndarray:
    """One layer of a parameter in the file's layout, contiguous; the inverse of reading it."""
    order = [axis for group in place.file_axes for axis in group]
    return np.ascontiguousarray(parameter.transpose(order).reshape(place.file_shape))
