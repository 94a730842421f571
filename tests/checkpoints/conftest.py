"""Tiny Hugging Face directories for the loader and export tests, written with safetensors alone."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest
from safetensors.numpy import save_file

QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


@dataclasses.dataclass
class TinyCheckpoint:
    """A checkpoint to change before it is written: config, tensors and, by file name, other JSON files."""

    directory: pathlib.Path
    config: dict
    tensors: dict[str, np.ndarray]
    json_files: dict[str, dict] = dataclasses.field(default_factory=dict)

    def write(self, shards: dict[str, list[str]] | None = None) -> pathlib.Path:
        """One model.safetensors, or with `shards` ({file: tensor names}) those files and their index."""
        self.directory.mkdir(parents=True, exist_ok=True)
        for name, tensors in (shards or {"model.safetensors": list(self.tensors)}).items():
            save_file({tensor: self.tensors[tensor] for tensor in tensors}, self.directory / name)
        if shards:
            self.json_files["model.safetensors.index.json"] = {"weight_map": {tensor: name for name, tensors in shards.items() for tensor in tensors}}
        for name, value in ({"config.json": self.config} | self.json_files).items():
            (self.directory / name).write_text(json.dumps(value))
        return self.directory


@pytest.fixture
def tiny(tmp_path) -> TinyCheckpoint:
    """A 2-layer Qwen2 with an untied head: 16 tokens, width 8, 4 query and 2 key/value heads of 2 channels."""
    random = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (16, 8), "model.norm.weight": (8,), "lm_head.weight": (16, 8)}
    for layer in range(2):
        block = {
            "input_layernorm.weight": (8,),
            "post_attention_layernorm.weight": (8,),
            "self_attn.q_proj.weight": (8, 8),
            "self_attn.k_proj.weight": (4, 8),
            "self_attn.v_proj.weight": (4, 8),
            "self_attn.o_proj.weight": (8, 8),
            "self_attn.q_proj.bias": (8,),
            "self_attn.k_proj.bias": (4,),
            "self_attn.v_proj.bias": (4,),
            "mlp.gate_proj.weight": (12, 8),
            "mlp.up_proj.weight": (12, 8),
            "mlp.down_proj.weight": (8, 12),
        }
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in block.items()}
    tensors = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    return TinyCheckpoint(tmp_path / "model", dict(QWEN2), tensors)
