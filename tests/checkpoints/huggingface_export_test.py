"""Exported directories: bit-equal tensors, honest configs, everything beside the tensors kept, and no half directory."""

import dataclasses
import json
import logging
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from tlt_jax.checkpoints import huggingface_export
from tlt_jax.checkpoints.huggingface_export import save_policy
from tlt_jax.checkpoints.pretrained import load_policy, read_source
from tlt_jax.models.specs import config_from_spec

GOLDEN = ("llama", "llama3_rope_tied", "qwen2_tied", "qwen3", "mistral_window", "qwen2_yarn", "llama_sharded_fp16")


def tensor_bits(directory):
    """{name: (dtype, shape, bytes)} over all shards; a name in two shards fails."""
    found = {}
    for file in directory.glob("model*.safetensors"):
        with safe_open(file, "numpy") as opened:
            for name in sorted(opened.keys()):
                assert name not in found
                tensor = opened.get_tensor(name)
                found[name] = (tensor.dtype.name, tensor.shape, tensor.tobytes())
    return found


@pytest.mark.parametrize("name", GOLDEN)
@pytest.mark.parametrize("limit", [60_000, huggingface_export.MAX_SHARD_BYTES])
def test_golden_directories_come_back_bit_equal_with_their_configs(shared, tmp_path, name, limit):
    directory, out = shared / "golden" / name, tmp_path / "out"
    loaded = load_policy(directory)
    save_policy(out, loaded.spec, loaded.params, source=loaded.source, max_shard_bytes=limit)
    assert tensor_bits(out) == tensor_bits(directory)
    for file in ("config.json", "generation_config.json"):
        assert json.loads((out / file).read_text()) == json.loads((directory / file).read_text())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_every_finite_half_precision_pattern_survives_the_round_trip(tiny, tmp_path, dtype):
    bits = np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16 if dtype is ml_dtypes.bfloat16 else np.float16)
    patterns = np.where(np.isfinite(bits.astype(np.float32)), bits, bits.dtype.type(0)).astype(dtype)
    tiny.config["vocab_size"] = 8192
    tiny.tensors = {name: value.astype(dtype) for name, value in tiny.tensors.items()}
    tiny.tensors |= {"model.embed_tokens.weight": patterns.reshape(8192, 8), "lm_head.weight": patterns[::-1].reshape(8192, 8).copy()}
    loaded = load_policy(tiny.write())
    save_policy(tmp_path / "out", loaded.spec, loaded.params, source=loaded.source)
    assert tensor_bits(tmp_path / "out") == tensor_bits(tiny.directory)


def test_the_dtype_of_each_tensor_is_kept_when_a_file_mixes_them(tiny, tmp_path):
    tiny.tensors["model.embed_tokens.weight"] = tiny.tensors["model.embed_tokens.weight"].astype(np.float16)
    loaded = load_policy(tiny.write())
    save_policy(tmp_path / "out", loaded.spec, loaded.params, source=loaded.source)
    assert tensor_bits(tmp_path / "out") == tensor_bits(tiny.directory)


def test_an_asked_dtype_is_that_of_every_tensor_and_of_the_config(tiny, tmp_path):
    loaded = load_policy(tiny.write())
    save_policy(tmp_path / "out", loaded.spec, loaded.params, source=loaded.source, dtype="bfloat16")
    assert {dtype for dtype, _, _ in tensor_bits(tmp_path / "out").values()} == {"bfloat16"}
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == tiny.config | {"torch_dtype": "bfloat16"}


def test_the_index_sums_the_bytes_and_maps_every_tensor(tiny, tmp_path):
    loaded = load_policy(tiny.write())
    save_policy(tmp_path / "out", loaded.spec, loaded.params, source=loaded.source, max_shard_bytes=1000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    assert [shard.name for shard in shards] == [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tiny.tensors.values())
    assert index["weight_map"].keys() == tiny.tensors.keys()
    for shard in shards:
        with safe_open(shard, "numpy") as opened:
            names = set(opened.keys())
            assert opened.metadata() == {"format": "pt"}
            assert names == {name for name, file in index["weight_map"].items() if file == shard.name}
            assert len(names) == 1 or sum(tiny.tensors[name].nbytes for name in names) <= 1000


def test_a_tied_model_stays_tied_and_writes_no_head(tiny, tmp_path):
    tiny.config["tie_word_embeddings"] = True
    loaded = load_policy(tiny.write())
    save_policy(tmp_path / "out", loaded.spec, loaded.params, source=loaded.source)
    assert "lm_head.weight" not in tensor_bits(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is True
    assert load_policy(tmp_path / "out").spec == loaded.spec


def test_tokenizer_generation_config_and_template_go_along(tiny, tmp_path):
    tiny.json_files = {
        "generation_config.json": {"eos_token_id": [7, 9], "temperature": 0.6},
        "tokenizer_config.json": {"eos_token": "<end>", "added_tokens_decoder": {"5": {"content": "<end>"}}},
        "tokenizer.json": {"model": {}},
    }
    directory = tiny.write()
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    loaded = load_policy(directory)
    save_policy(tmp_path / "out", loaded.spec, loaded.params, source=loaded.source)
    for name in ("tokenizer_config.json", "tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (directory / name).read_bytes()
    again = read_source(tmp_path / "out")
    kept = ("stop_ids", "generation_config", "tokenizer_files", "chat_template", "config", "file_dtype", "pad_id")
    assert [vars(again)[field] for field in kept] == [vars(loaded.source)[field] for field in kept]


def test_a_template_set_by_the_user_is_written(tiny, tmp_path):
    tiny.json_files = {"tokenizer_config.json": {"chat_template": "old"}}
    loaded = load_policy(tiny.write())
    save_policy(tmp_path / "out", loaded.spec, loaded.params, source=dataclasses.replace(loaded.source, chat_template="new"))
    assert read_source(tmp_path / "out").chat_template == "new"


def test_a_model_without_source_gets_a_config_from_its_spec(tiny, tmp_path):
    loaded = load_policy(tiny.write(), dtype="bfloat16")
    save_policy(tmp_path / "out", loaded.spec, loaded.params)
    again = load_policy(tmp_path / "out", dtype="bfloat16")
    assert again.spec == loaded.spec and again.source.config == config_from_spec(loaded.spec, dtype="bfloat16")
    for ours, theirs in zip(jax.tree.leaves(again.params), jax.tree.leaves(loaded.params), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("head", ["value", "reward"])
def test_value_and_reward_models_are_sequence_classifiers_with_one_label(tiny, tmp_path, head):
    loaded = load_policy(tiny.write())
    spec = dataclasses.replace(loaded.spec, head=head)
    params = loaded.params | {"head": {"kernel": np.arange(8, dtype=np.float32).reshape(8, 1)}}
    save_policy(tmp_path / "out", spec, params, source=loaded.source)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForSequenceClassification"] and len(config["id2label"]) == 1
    assert tensor_bits(tmp_path / "out")["score.weight"][1] == (1, 8)
    again = load_policy(tmp_path / "out")
    assert again.spec == spec
    np.testing.assert_array_equal(again.params["head"]["kernel"], params["head"]["kernel"])


def test_parameters_that_do_not_fit_are_listed_before_anything_is_written(tiny, tmp_path):
    loaded = load_policy(tiny.write())
    params = dict(loaded.params) | {"embed": {"embedding": np.zeros((12, 8), np.float32)}, "stray": np.zeros(1)}
    del params["final_norm"]
    with pytest.raises(ValueError, match=r"missing final_norm.scale; extra stray; embed.embedding: parameter \[12, 8\], spec \[16, 8\]"):
        save_policy(tmp_path / "out", loaded.spec, params, source=loaded.source)
    assert not (tmp_path / "out").exists()


def test_a_spec_of_another_model_is_refused(tiny, tmp_path):
    loaded = load_policy(tiny.write())
    spec = dataclasses.replace(loaded.spec, rms_norm_eps=1e-5)
    with pytest.raises(ValueError, match="rms_norm_eps: source 1e-06, spec 1e-05"):
        save_policy(tmp_path / "out", spec, loaded.params, source=loaded.source)


def test_values_beyond_float16_are_an_error_and_leave_no_directory(tiny, tmp_path):
    tiny.tensors["model.norm.weight"][3] = 70000.0
    loaded = load_policy(tiny.write())
    with pytest.raises(ValueError, match="model.norm.weight.*float16"):
        save_policy(tmp_path / "out", loaded.spec, loaded.params, source=loaded.source, dtype="float16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_an_earlier_export_is_replaced_and_survives_a_failed_one(tiny, tmp_path, monkeypatch):
    loaded = load_policy(tiny.write())
    out = tmp_path / "out"
    save_policy(out, loaded.spec, loaded.params, source=loaded.source, max_shard_bytes=1000)
    before = tensor_bits(out)
    with monkeypatch.context() as patch:
        patch.setattr(huggingface_export, "save_file", lambda *_, **__: (_ for _ in ()).throw(OSError("No space left on device")))
        with pytest.raises(OSError, match="No space"):
            save_policy(out, loaded.spec, loaded.params, source=loaded.source)
    assert tensor_bits(out) == before
    save_policy(out, loaded.spec, loaded.params, source=loaded.source)
    assert [path.name for path in out.glob("*.safetensors*")] == ["model.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]


def test_a_directory_with_other_files_is_not_touched(tiny, tmp_path):
    loaded = load_policy(tiny.write())
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("precious")
    (tmp_path / "home" / "config.json").write_text("{}")
    with pytest.raises(FileExistsError, match="thesis.txt"):
        save_policy(tmp_path / "home", loaded.spec, loaded.params, source=loaded.source)
    assert (tmp_path / "home" / "thesis.txt").read_text() == "precious"


def test_transformers_reads_the_exported_config_and_its_rope(shared, tmp_path):
    """Its own reading of both rope layouts must be what we meant."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    from transformers import AutoConfig

    for name in ("llama3_rope_tied", "qwen2_yarn", "mistral_window", "qwen3"):
        loaded = load_policy(shared / "golden" / name)
        save_policy(tmp_path / "out", loaded.spec, loaded.params)
        ours, theirs = AutoConfig.from_pretrained(tmp_path / "out"), AutoConfig.from_pretrained(shared / "golden" / name)
        rope = {key: theirs.rope_parameters[key] for key in theirs.rope_parameters}
        assert {key: ours.rope_parameters[key] for key in rope} == rope
        assert (ours.tie_word_embeddings, ours.head_dim if name == "qwen3" else None) == (theirs.tie_word_embeddings, 16 if name == "qwen3" else None)
        shutil.rmtree(tmp_path / "out")
