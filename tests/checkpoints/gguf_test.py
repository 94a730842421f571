"""GGUF files: the same parameters and config as the Hugging Face directory that they were made from."""

import json
import math
import os

import gguf
import numpy as np
import pytest

from tlt_jax.checkpoints.gguf import config_from_metadata
from tlt_jax.checkpoints.huggingface_export import save_policy
from tlt_jax.checkpoints.pretrained import check_tensors, load_policy
from tlt_jax.checkpoints.tensor_layout import flatten
from tlt_jax.sharding.meshes import build_meshes

D, H, K, C, F, V, L = 64, 4, 2, 16, 32, 40, 2
SIZES = {"block_count": L, "context_length": 128, "embedding_length": D, "feed_forward_length": F}
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def hugging_face_tensors(family, tied):
    random = np.random.default_rng(1)
    shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)} | ({} if tied else {"lm_head.weight": (V, D)})
    for layer in range(L):
        block = {"input_layernorm.weight": (D,), "post_attention_layernorm.weight": (D,)}
        block |= {f"self_attn.{name}_proj.weight": (heads * C, D) for name, heads in (("q", H), ("k", K), ("v", K))}
        block |= {"self_attn.o_proj.weight": (D, H * C), "mlp.gate_proj.weight": (F, D), "mlp.up_proj.weight": (F, D), "mlp.down_proj.weight": (D, F)}
        if family == "qwen2":
            block |= {f"self_attn.{name}_proj.bias": (heads * C,) for name, heads in (("q", H), ("k", K), ("v", K))}
        if family == "qwen3":
            block |= {"self_attn.q_norm.weight": (C,), "self_attn.k_norm.weight": (C,)}
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in block.items()}
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def write_gguf(path, family, tensors, *, kind=gguf.GGMLQuantizationType.F32, extra=None):
    writer = gguf.GGUFWriter(path, family)
    for name, value in SIZES.items():
        writer.add_uint32(f"{family}.{name}", value)
    writer.add_uint32(f"{family}.attention.head_count", H)
    writer.add_uint32(f"{family}.attention.head_count_kv", K)
    writer.add_float32(f"{family}.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32(f"{family}.rope.freq_base", 1e6)
    writer.add_uint32("tokenizer.ggml.eos_token_id", 3)
    writer.add_uint32("tokenizer.ggml.eot_token_id", 7)
    top = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}
    for name, value in tensors.items():
        if name in top:
            stored = top[name]
        else:
            _, _, layer, middle = name.split(".", 3)
            middle, ending = middle.rsplit(".", 1)
            stored = f"blk.{layer}.{NAMES[middle]}.{ending}"
            if family == "llama" and middle in ("self_attn.q_proj", "self_attn.k_proj"):
                # llama.cpp's convert_hf_to_gguf: channels j and j + C/2 of a head become neighbours
                value = value.reshape(-1, 2, C // 2, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
        quantised = kind if value.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(stored, gguf.quants.quantize(value, quantised), raw_dtype=quantised)
    for name, value in (extra or {}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stack(tensors, name):
    return np.stack([tensors[f"model.layers.{layer}.{name}"] for layer in range(L)])


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_gives_the_tensors_that_it_was_made_from(tmp_path, family, tied):
    tensors = hugging_face_tensors(family, tied)
    loaded = load_policy(write_gguf(tmp_path / "m.gguf", family, tensors))
    attention = loaded.params["layers"]["attention"]
    for ours, theirs, heads in (("query", "q", H), ("key", "k", K), ("value", "v", K)):
        kernels = np.asarray(attention[ours]["kernel"]).reshape(L, D, heads * C).swapaxes(1, 2)
        np.testing.assert_array_equal(kernels, stack(tensors, f"self_attn.{theirs}_proj.weight"), err_msg=ours)
        if family == "qwen2":
            np.testing.assert_array_equal(np.asarray(attention[ours]["bias"]).reshape(L, -1), stack(tensors, f"self_attn.{theirs}_proj.bias"))
    assert (loaded.spec.tied, loaded.spec.family, loaded.spec.rope.theta, loaded.spec.rms_norm_eps) == (tied, family, 1e6, 1e-6)
    assert loaded.source.stop_ids == (3, 7) and loaded.source.tokenizer_dir is None and loaded.source.file_dtype == "float32"
    save_policy(tmp_path / "out", loaded.spec, loaded.params, source=loaded.source)
    again = load_policy(tmp_path / "out")
    assert again.spec == loaded.spec and again.source.stop_ids == (3, 7)
    for path, leaf in flatten(loaded.params).items():
        np.testing.assert_array_equal(flatten(again.params)[path], leaf)


def test_half_precision_files_keep_their_dtype_for_the_export(tmp_path):
    loaded = load_policy(write_gguf(tmp_path / "m.gguf", "llama", hugging_face_tensors("llama", True), kind=gguf.GGMLQuantizationType.F16))
    assert loaded.source.file_dtype == "float16"
    assert all(dtype == "float32" and "norm" in name for name, dtype in loaded.source.tensor_dtypes)


def test_quantised_rows_are_dequantised_and_a_mesh_sees_the_same_values(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", "llama", hugging_face_tensors("llama", False), kind=gguf.GGMLQuantizationType.Q8_0)
    whole = load_policy(path)
    tensors = hugging_face_tensors("llama", False)
    gate = np.asarray(whole.params["layers"]["mlp"]["gate"]["kernel"]).swapaxes(1, 2)
    kind = gguf.GGMLQuantizationType.Q8_0
    expected = gguf.quants.dequantize(gguf.quants.quantize(stack(tensors, "mlp.gate_proj.weight"), kind), kind)
    np.testing.assert_array_equal(gate, expected)
    assert whole.source.file_dtype == "float32"
    sharded = load_policy(path, mesh=build_meshes((1, 2, 2), 1, 1).train)
    for name, leaf in flatten(whole.params).items():
        np.testing.assert_array_equal(flatten(sharded.params)[name], leaf, err_msg=str(name))


def llama3_table(factor):
    """llama.cpp's rope_freqs, as its converter loops over frequencies."""
    table = []
    for channel in range(0, C, 2):
        wave = 2 * math.pi * 1e6 ** (channel / C)
        smooth = (8192 / wave - 1.0) / (4.0 - 1.0)
        table.append(1.0 if wave < 8192 / 4.0 else factor if wave > 8192 / 1.0 else 1 / ((1 - smooth) / factor + smooth))
    return np.array(table, np.float32)


def test_a_table_of_rope_factors_becomes_the_llama3_scaling(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", "llama", hugging_face_tensors("llama", True), extra={"rope_freqs.weight": llama3_table(32.0)})
    rope = check_tensors(path).rope
    assert (rope.kind, rope.factor, rope.low_freq_factor, rope.high_freq_factor, rope.original_max_position_embeddings) == ("llama3", 32.0, 1.0, 4.0, 8192)
    odd = llama3_table(32.0)
    odd[2] *= 1.5
    with pytest.raises(ValueError, match="rope_freqs.weight"):
        check_tensors(write_gguf(tmp_path / "odd.gguf", "llama", hugging_face_tensors("llama", True), extra={"rope_freqs.weight": odd}))


@pytest.mark.parametrize("share", [0.0001, 0.05, 0.5, 0.99])
def test_a_cut_file_is_an_error_that_names_it(tmp_path, share):
    path = write_gguf(tmp_path / "m.gguf", "llama", hugging_face_tensors("llama", True))
    os.truncate(path, int(os.path.getsize(path) * share))
    with pytest.raises(ValueError, match="m.gguf is cut short"):
        check_tensors(path)


def test_missing_and_extra_tensors_come_in_one_error(tmp_path):
    tensors = hugging_face_tensors("llama", True)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    path = write_gguf(tmp_path / "m.gguf", "llama", tensors, extra={"blk.0.ffn_gate_inp.weight": np.zeros((2, 64), np.float32)})
    with pytest.raises(ValueError, match=r"missing tensors: model.layers.1.mlp.up_proj.weight[\s\S]*extra tensors: blk.0.ffn_gate_inp.weight"):
        check_tensors(path)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"general.architecture": "gemma"}, "general.architecture = 'gemma'"),
        ({"qwen2.expert_count": 8}, "expert_count = 8"),
        ({"qwen2.rope.dimension_count": 8}, "rope.dimension_count 8"),
        ({"qwen2.rope.freq_base": None}, "rope.freq_base is missing"),
        ({"qwen2.rope.scaling.type": "longrope", "qwen2.rope.scaling.factor": 2.0}, "longrope"),
        ({"qwen2.rope.scaling.yarn_log_multiplier": 0.1}, "yarn_log_multiplier"),
        ({"qwen2.embedding_length": None}, "embedding_length is missing"),
    ],
)
def test_metadata_that_changes_the_mathematics_is_refused_by_name(tmp_path, fields, words):
    whole = {f"qwen2.{name}": value for name, value in SIZES.items()} | {
        "general.architecture": "qwen2",
        "qwen2.attention.head_count": H,
        "qwen2.attention.layer_norm_rms_epsilon": 1e-6,
        "qwen2.rope.freq_base": 1e6,
    }
    reader = gguf.GGUFReader(write_gguf(tmp_path / "m.gguf", "qwen2", hugging_face_tensors("qwen2", True)))
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert config_from_metadata(whole, tensors, None)["model_type"] == "qwen2"
    changed = {name: value for name, value in (whole | fields).items() if value is not None}
    with pytest.raises(ValueError, match=words):
        config_from_metadata(changed, tensors, None)


def test_yarn_metadata_becomes_yarn(tmp_path):
    reader = gguf.GGUFReader(write_gguf(tmp_path / "m.gguf", "qwen2", hugging_face_tensors("qwen2", True)))
    fields = {name: field.contents() for name, field in reader.fields.items()}
    fields |= {"qwen2.rope.scaling.type": "yarn", "qwen2.rope.scaling.factor": 4.0, "qwen2.rope.scaling.original_context_length": 32}
    config = config_from_metadata(fields, {tensor.name: tensor for tensor in reader.tensors}, None)
    assert config["rope_scaling"] == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.slow
def test_the_smollm2_file_tokenizes_as_the_reference_and_exports(smollm2_gguf, shared, tmp_path):
    from transformers import AutoTokenizer

    loaded = load_policy(smollm2_gguf)
    assert loaded.spec.tied and loaded.spec.rope.theta == 100000.0 and loaded.source.stop_ids == (2,) and loaded.source.pad_id == 2
    written = os.stat(loaded.source.tokenizer_dir).st_mtime_ns
    reference = json.loads((shared / "golden" / "smollm2_reference.json").read_text())["prompts"]
    tokenizer = AutoTokenizer.from_pretrained(loaded.source.tokenizer_dir)
    for prompt in reference:
        assert tokenizer(prompt["text"])["input_ids"] == prompt["prompt_ids"]
        assert tokenizer.decode(prompt["token_ids"]) == prompt["completion"]
    save_policy(tmp_path / "out", loaded.spec, loaded.params, source=loaded.source, dtype="bfloat16")
    again = load_policy(tmp_path / "out", dtype="bfloat16")
    assert again.spec == loaded.spec and again.source.chat_template == loaded.source.chat_template and again.source.stop_ids == (2,)
    assert AutoTokenizer.from_pretrained(tmp_path / "out")(reference[0]["text"])["input_ids"] == reference[0]["prompt_ids"]
    for path, leaf in flatten(loaded.params).items():
        np.testing.assert_array_equal(flatten(again.params)[path], leaf.astype("bfloat16"))
    check_tensors(smollm2_gguf)
    assert os.stat(loaded.source.tokenizer_dir).st_mtime_ns == written
