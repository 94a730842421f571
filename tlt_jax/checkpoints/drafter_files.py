"""EAGLE and EAGLE-3 directories in the published layout: config.json and one model.safetensors (or an index), tensors named as SGLang and vLLM read them.

Written for both engines: `midlayer.` names, an explicit head_dim, d2t and t2d always there, an fc bias even when it is zero. The embedding is never written
(engines share the policy's) and never read: a drafter that trained its own is refused. See the tables in SafeAILab/EAGLE and SpecForge's exporter.
"""

import dataclasses
import json
import os
import pathlib
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from tlt_jax.checkpoints.export_directory import export_directory
from tlt_jax.checkpoints.safetensors_files import SafetensorsFiles, read_json
from tlt_jax.checkpoints.tensor_layout import FILE_DTYPES, TensorPlace, file_tensor, flatten, nest, read_parameter
from tlt_jax.models.specs import PolicySpec, config_from_spec, spec_from_config

Kind = Literal["eagle", "eagle3"]
_CAPTURE = "eagle_aux_hidden_state_layer_ids"
_FILE_OF = {"eagle": "layers.0.", "eagle3": "midlayer."}


@dataclasses.dataclass(frozen=True)
class DrafterFiles:
    """A drafter as its directory describes it. `capture_layers` None: the published default. `vocabulary` 0: every token of the policy."""

    kind: Kind
    layer_spec: PolicySpec
    vocabulary: int
    capture_layers: tuple[int, ...] | None


@dataclasses.dataclass(frozen=True)
class LoadedDrafter:
    """Description and parameters of a drafter, parameters in the form of `drafters/eagle.py` or `drafters/eagle3.py`."""

    files: DrafterFiles
    params: dict[str, Any]


def drafter_kind(path: str | os.PathLike[str]) -> Kind:
    """eagle or eagle3, from config.json and tensor names. Raises FileNotFoundError without them."""
    return _kind(*_open(path))


def read_drafter(path: str | os.PathLike[str], policy: PolicySpec) -> DrafterFiles:
    """What kind of drafter lies at `path`, after checking that it fits the policy and that every tensor is there with its shape; no tensor is read.

    Raises FileNotFoundError without config.json or weights, ValueError for what does not fit, naming each tensor.
    """
    config, reader = _open(path)
    files = _describe(config, reader, pathlib.Path(path), policy)
    _check(files, policy, reader, pathlib.Path(path))
    return files


def load_drafter(path: str | os.PathLike[str], policy: PolicySpec, *, dtype: str = "float32") -> LoadedDrafter:
    """The drafter at `path` for `policy`. Raises what `read_drafter` raises, and ValueError for draft ids outside the policy's vocabulary."""
    files, reader = read_drafter(path, policy), SafetensorsFiles(str(path))
    leaves = {
        place.path: jnp.asarray(read_parameter(place, reader.read, tuple(slice(0, size) for size in place.shape), dtype))
        for place in _places(files, policy.hidden_size) if place.name in reader.entries}
    params = nest(leaves)
    if files.kind == "eagle" and "bias" not in params["layer"]["fc"]:
        params["layer"]["fc"]["bias"] = jnp.zeros((policy.hidden_size,), dtype)
    if files.vocabulary:
        params["ids"] = jnp.asarray(_draft_ids(reader, files.vocabulary, policy.vocab_size, path))
    return LoadedDrafter(files, params)


def abstract_drafter(files: DrafterFiles, policy: PolicySpec, dtype: str = "float32") -> dict[str, Any]:
    """The parameters of a drafter as shapes and dtypes, without its draft ids."""
    return nest({place.path: jax.ShapeDtypeStruct(place.shape, dtype) for place in _places(files, policy.hidden_size)})


def save_drafter(path: str | os.PathLike[str], policy: PolicySpec, drafter: LoadedDrafter, *, dtype: str = "float32") -> None:
    """Write a drafter that SGLang, vLLM and `load_drafter` read, with its tensors in `dtype`.

    An earlier drafter at `path` is replaced. Raises ValueError for parameters of another form, FileExistsError for a directory with other files.
    """
    files = drafter.files
    leaves = flatten(jax.tree.map(np.asarray, {key: value for key, value in drafter.params.items() if key != "ids"}))
    places = {place.path: place for place in _places(files, policy.hidden_size)}
    wrong = [path for path in places | leaves if path not in places or path not in leaves or leaves[path].shape != places[path].shape]
    if wrong:
        raise ValueError(f"these parameters are not those of the {files.kind} drafter that is described: {', '.join(map('.'.join, wrong))}")
    tensors = {place.name: file_tensor(place, leaves[path]).astype(dtype) for path, place in places.items()}
    if files.kind == "eagle3":
        ids = np.asarray(drafter.params["ids"], np.int64)
        tensors["d2t"], tensors["t2d"] = ids - np.arange(len(ids)), np.isin(np.arange(policy.vocab_size), ids)
    elif files.vocabulary:
        tensors["d2t"] = np.asarray(drafter.params["ids"], np.int64) - np.arange(files.vocabulary)
    with export_directory(path) as directory:
        safetensors.numpy.save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        (directory / "config.json").write_text(json.dumps(_config(files, policy, dtype), indent=2) + "\n")


def _open(path: str | os.PathLike[str]) -> tuple[dict[str, Any], SafetensorsFiles]:
    directory = pathlib.Path(path)
    if not (directory / "config.json").exists():
        raise FileNotFoundError(f"{directory} has no config.json; a drafter is an EAGLE or EAGLE-3 directory with config.json and model.safetensors")
    return read_json(directory / "config.json"), SafetensorsFiles(str(directory))


def _kind(config: dict[str, Any], reader: SafetensorsFiles) -> Kind:
    names = config.get("architectures") or [""]
    return "eagle3" if "eagle3" in names[0].lower() or "midlayer.hidden_norm.weight" in reader.entries else "eagle"


def _describe(config: dict[str, Any], reader: SafetensorsFiles, directory: pathlib.Path, policy: PolicySpec) -> DrafterFiles:
    kind = _kind(config, reader)
    if config.get("norm_before_residual"):
        raise ValueError(f"{directory / 'config.json'}: norm_before_residual is true; only the published form, false, is built")
    if config.get("num_hidden_layers", 1) != 1:
        raise ValueError(f"{directory / 'config.json'}: num_hidden_layers = {config['num_hidden_layers']}; a drafter of one layer is needed")
    family = config.get("model_type", policy.family)
    plain = {key: value for key, value in config.items() if key not in _FOREIGN and not key.startswith("eagle")}
    layer = spec_from_config(plain | {"architectures": [_ARCHITECTURES[family]], "model_type": family, "num_hidden_layers": 1, "tie_word_embeddings": False})
    layer = dataclasses.replace(layer, windows=(None,), qk_norm=False)
    if layer.hidden_size != policy.hidden_size:
        raise ValueError(f"{directory}: hidden_size {layer.hidden_size}, the policy has {policy.hidden_size}; the drafter was made for another model")
    vocabulary = int(config.get("draft_vocab_size") or 0) if "d2t" in reader.entries else 0
    if kind == "eagle3":
        vocabulary = int(config.get("draft_vocab_size") or config.get("vocab_size") or 0)
    # At the top level the ids are layers whose input is read, inside eagle_config layers whose output is: one less for the same stream.
    nested = (config.get("eagle_config") or {}).get(_CAPTURE)
    capture = config.get(_CAPTURE) or (nested and [output + 1 for output in nested])
    return DrafterFiles(kind, layer, vocabulary, tuple(capture) if capture else None)


_FOREIGN = ("draft_vocab_size", "target_hidden_size", "norm_before_residual", "torch_dtype", "dtype", "bias", "target_model_type", "fc_norm", "norm_output")
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "mistral": "MistralForCausalLM"}


def _places(files: DrafterFiles, width: int) -> tuple[TensorPlace, ...]:
    """Every parameter and its tensor."""
    spec, eagle3 = files.layer_spec, files.kind == "eagle3"
    D, H, K, C, F = width, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.intermediate_size
    read = 2 * D if eagle3 else D
    captured = len(files.capture_layers) if files.capture_layers else 3
    heads, back, dense, vector = ((1, 2), (0,)), ((2,), (0, 1)), ((1,), (0,)), ((0,),)
    layer = _FILE_OF[files.kind]
    rows = [
        ("fc.kernel", "fc.weight", (captured * D if eagle3 else 2 * D, D), dense, True),
        ("fc.bias", "fc.bias", (D,), vector, not eagle3),
        ("input_norm.scale", layer + "input_layernorm.weight", (D,), vector, eagle3),
        ("hidden_norm.scale", layer + "hidden_norm.weight", (D,), vector, eagle3),
        ("attention.query.kernel", layer + "self_attn.q_proj.weight", (read, H, C), heads, True),
        ("attention.key.kernel", layer + "self_attn.k_proj.weight", (read, K, C), heads, True),
        ("attention.value.kernel", layer + "self_attn.v_proj.weight", (read, K, C), heads, True),
        ("attention.output.kernel", layer + "self_attn.o_proj.weight", (H, C, D), back, True),
        ("attention.query.bias", layer + "self_attn.q_proj.bias", (H, C), ((0, 1),), spec.qkv_bias),
        ("attention.key.bias", layer + "self_attn.k_proj.bias", (K, C), ((0, 1),), spec.qkv_bias),
        ("attention.value.bias", layer + "self_attn.v_proj.bias", (K, C), ((0, 1),), spec.qkv_bias),
        ("attention.output.bias", layer + "self_attn.o_proj.bias", (D,), vector, spec.output_bias),
        ("mlp_norm.scale", layer + "post_attention_layernorm.weight", (D,), vector, True),
        ("mlp.gate.kernel", layer + "mlp.gate_proj.weight", (D, F), dense, True),
        ("mlp.up.kernel", layer + "mlp.up_proj.weight", (D, F), dense, True),
        ("mlp.down.kernel", layer + "mlp.down_proj.weight", (F, D), dense, True),
        ("norm.scale", "norm.weight", (D,), vector, eagle3),
    ]
    places = [TensorPlace(("layer", *path.split(".")), name, shape, axes, None) for path, name, shape, axes, present in rows if present]
    if eagle3:
        places.append(TensorPlace(("head", "kernel"), "lm_head.weight", (D, files.vocabulary), dense, None))
    return tuple(places)


def _check(files: DrafterFiles, policy: PolicySpec, reader: SafetensorsFiles, directory: pathlib.Path) -> None:
    """One ValueError with every missing, extra and wrong tensor. `fc.bias` may be absent; embedding, and EAGLE's unused head and norm, may be there."""
    expected = {place.name: place.file_shape for place in _places(files, policy.hidden_size)}
    if files.kind == "eagle3":
        expected |= {"d2t": (files.vocabulary,), "t2d": (files.layer_spec.vocab_size,)}
    elif files.vocabulary:
        expected |= {"d2t": (files.vocabulary,)}
    optional = {"embed_tokens.weight", "fc.bias", *(() if files.kind == "eagle3" else ("lm_head.weight",))}
    entries = reader.entries
    missing = [name for name in expected if name not in entries and name not in optional]
    extra = [name for name in entries if name not in expected and name not in optional]
    there = {name: entries[name] for name in expected if name in entries}
    shapes = [f"{name}: file {list(entry.shape)}, expected {list(expected[name])}" for name, entry in there.items() if entry.shape != expected[name]]
    kinds = [f"{name}: {entry.dtype}" for name, entry in there.items() if name not in ("d2t", "t2d") and entry.dtype not in FILE_DTYPES]
    problems = [
        f"{len(found)} {title}: {', '.join(found)}"
        for title, found in (("missing tensors", missing), ("extra tensors", extra), ("wrong shapes", shapes), ("unreadable dtypes", kinds)) if found]
    if problems:
        raise ValueError(f"{directory} is no {files.kind} drafter of this policy:\n  " + "\n  ".join(problems))


def _draft_ids(reader: SafetensorsFiles, vocabulary: int, policy_vocabulary: int, path) -> np.ndarray:
    """Global ids of the draft tokens: place + offset (d2t), checked against the mask t2d where there is one."""
    ids = reader.read("d2t", (slice(0, vocabulary),)).astype(np.int64) + np.arange(vocabulary)
    if ids.min() < 0 or ids.max() >= policy_vocabulary or np.any(np.diff(ids) <= 0):
        raise ValueError(
            f"{path}: d2t gives ids {ids.min()} to {ids.max()}; rising ids from 0 to {policy_vocabulary - 1} are needed (d2t holds offsets, not ids)")
    if "t2d" in reader.entries and not np.array_equal(np.flatnonzero(reader.read("t2d", (slice(0, reader.entries["t2d"].shape[0]),))), ids):
        raise ValueError(f"{path}: t2d marks other tokens than d2t names; the file is damaged or of another tokenizer")
    return ids.astype(np.int32)


def _config(files: DrafterFiles, policy: PolicySpec, dtype: str) -> dict[str, Any]:
    """config.json that both engines take."""
    layer = files.layer_spec
    config = config_from_spec(dataclasses.replace(layer, vocab_size=policy.vocab_size, tied=False), dtype=dtype)
    names = {"eagle": {"llama": "LlamaForCausalLMEagle", "qwen2": "Qwen2ForCausalLMEagle"}.get(layer.family, "LlamaForCausalLMEagle")}
    config |= {
        "architectures": [names.get(files.kind, "LlamaForCausalLMEagle3")], "draft_vocab_size": files.vocabulary or policy.vocab_size,
        "max_position_embeddings": policy.max_position_embeddings, "head_dim": layer.head_dim}
    if files.kind == "eagle3" and files.capture_layers:
        config |= {_CAPTURE: list(files.capture_layers), "eagle_config": {_CAPTURE: [captured - 1 for captured in files.capture_layers]}}
    return config
