"""GGUF files as a model source: metadata to a Hugging Face config, tensors dequantised to float32 under their Hugging Face names.

The `gguf` package parses and dequantises; what is ours is the naming, the undoing of llama.cpp's row order, and the rebuilt config. Architectures:
llama, qwen2, qwen3. It writes no GGUF.
"""

import math
import os
import pathlib
from typing import Any

import gguf
import numpy as np

from tlt_jax.checkpoints.locations import cached_directory
from tlt_jax.checkpoints.model_source import ModelSource, source_from_files
from tlt_jax.checkpoints.tensor_layout import Slices, TensorEntry
from tlt_jax.models.specs import architecture_fields
from tlt_jax.tasks.gguf_tokenizer import FORMAT_VERSION, write_tokenizer

_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_TOP_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight", "output.weight": "lm_head.weight"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"
# llama.cpp stores Llama 3's rope scaling as a table of factors; these are the constants of every released Llama 3.1 to 3.3.
_LLAMA3_ROPE = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# Quantised values are products of scales and integers: only float32 holds them all.
_PLAIN_DTYPES = {gguf.GGMLQuantizationType.F16: "float16", gguf.GGMLQuantizationType.BF16: "bfloat16"}


class GgufTensors:
    """The tensors of a GGUF file under Hugging Face names: `entries` from the header, `read` dequantises the rows asked for."""

    def __init__(self, path: pathlib.Path, tensors: dict[str, gguf.ReaderTensor], head_dim: int | None):
        self._tensors = {_hugging_face_name(name): tensor for name, tensor in tensors.items()}
        self._head_dim = head_dim
        self.entries = {
            name: TensorEntry(_PLAIN_DTYPES.get(tensor.tensor_type, "float32"), tuple(int(size) for size in reversed(tensor.shape)), str(path))
            for name, tensor in self._tensors.items()
        }

    def read(self, name: str, slices: Slices) -> np.ndarray:
        """Part of one tensor in the dtype of its entry. q and k rows must start and end at heads."""
        tensor = self._tensors[name]
        # Rows are whole blocks of a quantised tensor, so they can be cut before dequantising; columns cannot. A vector is a single row.
        rows = tensor.data[slices[0]] if len(slices) == 2 else tensor.data
        values = gguf.quants.dequantize(rows, tensor.tensor_type)
        values = values[:, slices[1]] if len(slices) == 2 else values[slices[0]]
        if self._head_dim is not None and name.split(".")[-2] in ("q_proj", "k_proj"):
            values = _half_split_rows(values, self._head_dim)
        return values.astype(np.dtype(self.entries[name].dtype))


def open_gguf(path: pathlib.Path) -> tuple[dict[str, Any], ModelSource, GgufTensors]:
    """Config, source and tensors of a GGUF file. The tokenizer is rebuilt from the metadata into the user's cache, keyed by path, time and size.

    Raises ValueError naming the file when it is cut or damaged, and naming the field for what is not supported.
    """
    try:
        reader = gguf.GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is cut short or no GGUF file ({error}). Download or copy it again.") from error
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    factors = tensors.pop(_ROPE_FACTORS, None)
    try:
        config = config_from_metadata(fields, tensors, None if factors is None else np.asarray(factors.data, np.float32).reshape(-1))
        directory = _tokenizer_directory(path, fields)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    # llama.cpp turns adjacent channels, Hugging Face turns the two halves: only its llama converter reorders rows.
    permuted = config["head_dim"] if fields["general.architecture"] == "llama" else None
    store = GgufTensors(path, tensors, permuted)
    return config, source_from_files(str(path), config, directory, store.entries), store


def config_from_metadata(fields: dict[str, Any], tensors: dict[str, gguf.ReaderTensor], rope_factors: np.ndarray | None) -> dict[str, Any]:
    """A Hugging Face config.json from GGUF metadata; the head is tied when there is no output.weight. Raises ValueError naming what is not supported."""
    family = fields.get("general.architecture")
    if family not in _ARCHITECTURES:
        raise ValueError(f"general.architecture = {family!r} is not supported. Supported: {', '.join(_ARCHITECTURES)}.")

    def field(name: str, default: Any = None) -> Any:
        value = fields.get(f"{family}.{name}", default)
        if value is None:
            raise ValueError(f"GGUF metadata {family}.{name} is missing.")
        return value

    for name in ("expert_count", "attention.sliding_window"):
        if field(name, 0):
            raise ValueError(f"GGUF metadata {family}.{name} = {field(name)!r} is not supported.")
    if "token_embd.weight" not in tensors:
        raise ValueError("tensor token_embd.weight is missing.")
    heads = field("attention.head_count")
    head_dim = field("attention.key_length", field("embedding_length") // heads)
    if (rotated := field("rope.dimension_count", head_dim)) != head_dim or field("attention.value_length", head_dim) != head_dim:
        raise ValueError(f"GGUF metadata {family}: rope.dimension_count {rotated} or attention.value_length differs from the head size {head_dim}.")
    config = architecture_fields(family, "policy") | {
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "hidden_size": field("embedding_length"),
        "intermediate_size": field("feed_forward_length"),
        "num_hidden_layers": field("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": field("context_length"),
        "rms_norm_eps": _shortest(field("attention.layer_norm_rms_epsilon")),
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    if family != "qwen2":
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    if family == "llama":
        config["mlp_bias"] = "blk.0.ffn_up.bias" in tensors
    theta = fields.get(f"{family}.rope.freq_base", 10000.0 if family == "llama" else None)
    if theta is None:
        raise ValueError(f"GGUF metadata {family}.rope.freq_base is missing.")
    config["rope_theta"] = _shortest(theta)
    if scaling := _rope_scaling(fields, family, rope_factors, config):
        config["rope_scaling"] = scaling
    return config | _special_ids(fields)


def _special_ids(fields: dict[str, Any]) -> dict[str, Any]:
    ids = {role: fields.get(f"tokenizer.ggml.{role}_token_id") for role in ("bos", "eos", "eot", "eom", "padding")}
    stops = sorted({ids[role] for role in ("eos", "eot", "eom") if ids[role] is not None})
    eos = stops[0] if len(stops) == 1 else stops or None
    return {"bos_token_id": ids["bos"], "eos_token_id": eos, "pad_token_id": ids["padding"]}


def _rope_scaling(fields: dict[str, Any], family: str, factors: np.ndarray | None, config: dict[str, Any]) -> dict[str, Any] | None:
    kind = fields.get(f"{family}.rope.scaling.type", "none")
    factor = fields.get(f"{family}.rope.scaling.factor")
    known = [f"{family}.rope.scaling.{name}" for name in ("type", "factor", "original_context_length", "finetuned")]
    if foreign := [name for name in fields if name.startswith(f"{family}.rope.scaling.") and name not in known]:
        raise ValueError(f"GGUF metadata { {name: fields[name] for name in foreign} } is not supported.")
    if factors is not None:
        return _llama3_scaling(factors, config)
    if kind == "none" or (kind == "linear" and factor in (None, 0.0, 1.0)):
        return None
    if kind not in ("linear", "yarn") or factor is None:
        raise ValueError(f"GGUF metadata {family}.rope.scaling.type = {kind!r} with factor {factor!r} is not supported.")
    original = fields.get(f"{family}.rope.scaling.original_context_length")
    return {"rope_type": kind, "factor": _shortest(factor)} | ({"original_max_position_embeddings": original} if original and kind == "yarn" else {})


def _llama3_scaling(factors: np.ndarray, config: dict[str, Any]) -> dict[str, Any]:
    """The llama3 scaling whose table of frequency divisors is `factors`; ValueError when none of the known form is."""
    factor = float(factors.max())
    pairs = config["head_dim"] // 2
    turns = _LLAMA3_ROPE["original_max_position_embeddings"] * config["rope_theta"] ** (-np.arange(pairs) / pairs) / (2 * math.pi)
    low, high = _LLAMA3_ROPE["low_freq_factor"], _LLAMA3_ROPE["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    if factors.shape != (pairs,) or not np.allclose(factors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-3):
        raise ValueError(f"{_ROPE_FACTORS} is not the table of a llama3 rope scaling with {_LLAMA3_ROPE}; such scaling is not supported.")
    return {"factor": factor} | _LLAMA3_ROPE


def _hugging_face_name(name: str) -> str:
    """The Hugging Face name; one that has none keeps its own and is reported as extra."""
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
    return name


def _half_split_rows(values: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows (0, C/2, 1, C/2+1, …) of every head back to 0 … C-1."""
    pairs = values.reshape(-1, head_dim // 2, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _shortest(value: float) -> float:
    """The shortest decimal that rounds to the same float32: 9.999999747378752e-06 was 1e-05 before it became a GGUF field."""
    return float(str(np.float32(value)))


def _tokenizer_directory(path: pathlib.Path, fields: dict[str, Any]) -> pathlib.Path | None:
    if "tokenizer.ggml.model" not in fields:
        return None
    stat = path.stat()
    key = f"{FORMAT_VERSION} {os.path.abspath(path)} {stat.st_mtime_ns} {stat.st_size}"
    return cached_directory("tokenizers", key, lambda directory: write_tokenizer(fields, directory))
