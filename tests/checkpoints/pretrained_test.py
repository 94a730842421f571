"""Loading Hugging Face directories: what is read, what is refused, and where it lands."""

import json
import os
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from tlt_jax.checkpoints import pretrained
from tlt_jax.checkpoints.pretrained import check_tensors, load_policy, read_source
from tlt_jax.checkpoints.tensor_layout import flatten
from tlt_jax.sharding.meshes import build_meshes

GOLDEN = ("llama", "llama3_rope_tied", "qwen2_tied", "qwen3", "mistral_window", "qwen2_yarn", "llama_sharded_fp16")


def hugging_face_tensors(params, tied):
    """Our tree back under Hugging Face names, written out a second time so that the loader's table is checked, not repeated."""
    result = {"model.embed_tokens.weight": params["embed"]["embedding"], "model.norm.weight": params["final_norm"]["scale"]}
    if not tied:
        result["lm_head.weight"] = np.asarray(params["head"]["kernel"]).T
    layers = params["layers"]
    for layer in range(layers["attention_norm"]["scale"].shape[0]):
        prefix = f"model.layers.{layer}."
        result[prefix + "input_layernorm.weight"] = layers["attention_norm"]["scale"][layer]
        result[prefix + "post_attention_layernorm.weight"] = layers["mlp_norm"]["scale"][layer]
        for ours, theirs in (("query", "q"), ("key", "k"), ("value", "v")):
            kernel = np.asarray(layers["attention"][ours]["kernel"][layer])
            result[f"{prefix}self_attn.{theirs}_proj.weight"] = kernel.reshape(kernel.shape[0], -1).T
            if "bias" in layers["attention"][ours]:
                result[f"{prefix}self_attn.{theirs}_proj.bias"] = np.asarray(layers["attention"][ours]["bias"][layer]).reshape(-1)
        output = np.asarray(layers["attention"]["output"]["kernel"][layer])
        result[prefix + "self_attn.o_proj.weight"] = output.reshape(-1, output.shape[-1]).T
        for ours, theirs in (("query_norm", "q_norm"), ("key_norm", "k_norm")):
            if ours in layers["attention"]:
                result[f"{prefix}self_attn.{theirs}.weight"] = layers["attention"][ours]["scale"][layer]
        for name in ("gate", "up", "down"):
            result[f"{prefix}mlp.{name}_proj.weight"] = np.asarray(layers["mlp"][name]["kernel"][layer]).T
    return {name: np.asarray(value) for name, value in result.items()}


def assert_same(loaded, tensors):
    found = hugging_face_tensors(loaded.params, loaded.spec.tied)
    assert found.keys() == tensors.keys()
    for name, value in tensors.items():
        np.testing.assert_array_equal(found[name], value.astype(np.float32), err_msg=name)


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_directories_load_with_every_value_in_place(shared, name):
    directory = shared / "golden" / name
    files = [file for file in directory.glob("*.safetensors") if file.name != "expected.safetensors"]
    tensors = {}
    for file in files:
        tensors |= load_file(file)
    loaded = load_policy(directory)
    assert_same(loaded, tensors)
    assert loaded.source.stop_ids == (2,) and loaded.source.pad_id == 0
    assert loaded.source.file_dtype == json.loads((directory / "config.json").read_text())["dtype"]


def test_missing_extra_and_wrong_shaped_tensors_come_in_one_error(tiny):
    tiny.tensors["language_model.model.norm.weight"] = tiny.tensors.pop("model.norm.weight")
    tiny.tensors["model.layers.0.self_attn.q_proj.lora_a"] = np.zeros((2, 2), np.float32)
    tiny.tensors["model.layers.1.mlp.up_proj.weight"] = np.zeros((12, 9), np.float32)
    del tiny.tensors["model.layers.1.self_attn.k_proj.bias"]
    with pytest.raises(ValueError) as error:
        check_tensors(tiny.write())
    message = str(error.value)
    for part in ("missing tensors: ", "model.norm.weight", "model.layers.1.self_attn.k_proj.bias", "language_model.model.norm.weight", "q_proj.lora_a"):
        assert part in message
    assert "model.layers.1.mlp.up_proj.weight: file [12, 9], config [12, 8]" in message


def test_an_untied_model_without_head_names_the_tensor_and_the_tied_flag_loads_it(tiny):
    del tiny.tensors["lm_head.weight"]
    with pytest.raises(ValueError, match="lm_head.weight.*tie_word_embeddings"):
        load_policy(tiny.write())
    tiny.config["tie_word_embeddings"] = True
    loaded = load_policy(tiny.write())
    assert loaded.spec.tied and "head" not in loaded.params
    assert_same(loaded, tiny.tensors)


@pytest.mark.parametrize("equal", [True, False])
def test_a_tied_model_with_a_second_head_has_one_head_and_warns_when_they_differ(tiny, equal, caplog):
    tiny.config["tie_word_embeddings"] = True
    if equal:
        tiny.tensors["lm_head.weight"] = tiny.tensors["model.embed_tokens.weight"].copy()
    with caplog.at_level("WARNING"):
        loaded = load_policy(tiny.write())
    assert "head" not in loaded.params
    del tiny.tensors["lm_head.weight"]
    assert_same(loaded, tiny.tensors)
    assert ("lm_head.weight differs" in caplog.text) == (not equal)


def test_rotary_tables_of_old_files_are_no_extras(tiny):
    tiny.tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(1, np.float32)
    check_tensors(tiny.write())


def test_the_index_decides_which_files_are_read_whatever_their_names(tiny, caplog):
    names = list(tiny.tensors)
    directory = tiny.write({"model.safetensors-00001-of-00002.safetensors": names[:9], "weights_b.safetensors": names[9:]})
    save_file({name: value + 1 for name, value in tiny.tensors.items()}, directory / "model.safetensors")
    with caplog.at_level("WARNING"):
        loaded = load_policy(directory)
    assert_same(loaded, tiny.tensors)
    assert "not read" in caplog.text and "model.safetensors" in caplog.text


def test_an_index_of_another_sharding_names_the_absent_files(tiny):
    names = list(tiny.tensors)
    directory = tiny.write({"model-00001-of-00002.safetensors": names[:9], "model-00002-of-00002.safetensors": names[9:]})
    index = {"weight_map": {name: f"model-0000{1 + place % 4}-of-00004.safetensors" for place, name in enumerate(names)}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FileNotFoundError, match="model-00003-of-00004.*Present: model-00001-of-00002"):
        load_policy(directory)


def test_a_tensor_in_two_shards_is_an_error(tiny):
    names = list(tiny.tensors)
    directory = tiny.write({"a.safetensors": names[:9], "b.safetensors": names[9:]})
    save_file({name: tiny.tensors[name] for name in names[8:]}, directory / "b.safetensors")
    with pytest.raises(ValueError, match=f"{names[8]} is in two files, a.safetensors and b.safetensors"):
        load_policy(directory)


def test_an_index_that_maps_one_name_twice_is_an_error(tiny):
    names = list(tiny.tensors)
    directory = tiny.write({"a.safetensors": names[:9], "b.safetensors": names[9:]})
    text = (directory / "model.safetensors.index.json").read_text().replace('"weight_map": {', f'"weight_map": {{"{names[0]}": "b.safetensors", ')
    (directory / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=f"given twice: {names[0]}"):
        load_policy(directory)


def test_an_index_that_names_the_wrong_shard_is_an_error(tiny):
    names = list(tiny.tensors)
    directory = tiny.write({"a.safetensors": names[:9], "b.safetensors": names[9:]})
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    index["weight_map"][names[0]] = "b.safetensors"
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=f"{names[0]} .said to be in b.safetensors"):
        load_policy(directory)


@pytest.mark.parametrize("kept", [0, 5, 40, -1])
def test_a_cut_shard_is_an_error_that_names_the_file(tiny, kept):
    names = list(tiny.tensors)
    directory = tiny.write({"a.safetensors": names[:9], "b.safetensors": names[9:]})
    size = os.path.getsize(directory / "b.safetensors")
    os.truncate(directory / "b.safetensors", kept % size)
    with pytest.raises(ValueError, match="b.safetensors is cut short"):
        check_tensors(directory)


def test_a_wrong_head_dim_gives_both_shapes_and_an_explicit_one_loads(tiny):
    """Heads times head_dim need not be the width (Qwen3-4B)."""
    tiny.config |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16}
    for name in list(tiny.tensors):
        if name.endswith(".bias"):
            del tiny.tensors[name]
    shapes = {"q_proj": (64, 8), "k_proj": (32, 8), "v_proj": (32, 8), "o_proj": (8, 64)}
    for layer in range(2):
        prefix = f"model.layers.{layer}.self_attn."
        for number, (name, shape) in enumerate(shapes.items()):
            tiny.tensors[f"{prefix}{name}.weight"] = np.random.default_rng(number).normal(size=shape).astype(np.float32)
        tiny.tensors |= {prefix + name: np.arange(16, dtype=np.float32) for name in ("q_norm.weight", "k_norm.weight")}
    loaded = load_policy(tiny.write())
    assert loaded.params["layers"]["attention"]["query"]["kernel"].shape == (2, 8, 4, 16)
    assert_same(loaded, tiny.tensors)
    tiny.config["head_dim"] = 8
    with pytest.raises(ValueError, match=r"q_proj.weight: file \[64, 8\], config \[32, 8\]"):
        load_policy(tiny.write())


def test_an_embedding_with_more_rows_than_the_config_is_an_error_and_never_trimmed(tiny):
    tiny.config["vocab_size"] = 12
    with pytest.raises(ValueError, match=r"embed_tokens.weight: file \[16, 8\], config \[12, 8\]"):
        load_policy(tiny.write())


def test_an_unsupported_architecture_names_the_file_before_any_tensor_is_opened(tiny):
    tiny.config |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    directory = tiny.write()
    os.truncate(directory / "model.safetensors", 3)
    with pytest.raises(ValueError, match="config.json.*MixtralForCausalLM"):
        load_policy(directory)


def test_integer_and_quantised_tensors_are_refused_by_dtype(tiny):
    tiny.tensors["model.norm.weight"] = np.ones(8, np.int8)
    with pytest.raises(ValueError, match="model.norm.weight: I8"):
        load_policy(tiny.write())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_parameters_have_the_asked_dtype_and_the_source_keeps_the_files(tiny, dtype):
    tiny.tensors = {name: value.astype(ml_dtypes.bfloat16) for name, value in tiny.tensors.items()}
    tiny.tensors["model.norm.weight"] = tiny.tensors["model.norm.weight"].astype(np.float32)
    loaded = load_policy(tiny.write(), dtype=dtype)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(loaded.params)} == {dtype}
    assert loaded.source.file_dtype == "bfloat16" and loaded.source.tensor_dtypes == (("model.norm.weight", "float32"),)


def test_a_reward_model_has_a_kernel_of_one_output_and_no_bias(tiny):
    tiny.config |= {"architectures": ["Qwen2ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    del tiny.tensors["lm_head.weight"]
    tiny.tensors["score.weight"] = np.arange(8, dtype=np.float32).reshape(1, 8)
    loaded = load_policy(tiny.write())
    assert loaded.spec.head == "reward"
    np.testing.assert_array_equal(loaded.params["head"]["kernel"], tiny.tensors["score.weight"].T)
    assert set(loaded.params["head"]) == {"kernel"}
    tiny.tensors["score.bias"] = np.zeros(1, np.float32)
    with pytest.raises(ValueError, match="extra tensors: score.bias"):
        load_policy(tiny.write())


@pytest.mark.parametrize("shape", [(1, 2, 2), (2, 1, 4), (1, 8, 1)])
def test_a_mesh_gets_the_same_values_and_each_device_reads_only_its_part(tiny, shape, monkeypatch):
    if jax.device_count() < 8:
        pytest.skip("needs 8 devices")
    directory = tiny.write()
    whole = load_policy(directory)
    read = []
    real = pretrained.SafetensorsFiles.read
    monkeypatch.setattr(pretrained.SafetensorsFiles, "read", lambda self, name, slices: read.append((name, part := real(self, name, slices))) or part)
    mesh = build_meshes(shape, 1, 1).train
    sharded = load_policy(directory, mesh=mesh)
    for path, leaf in flatten(whole.params).items():
        other = flatten(sharded.params)[path]
        np.testing.assert_array_equal(other, leaf, err_msg=str(path))
        assert other.sharding.mesh == mesh
    gate = flatten(sharded.params)["layers", "mlp", "gate", "kernel"]
    assert not gate.sharding.is_fully_replicated
    largest = max(part.size for name, part in read if name.endswith("gate_proj.weight"))
    assert largest == gate.addressable_shards[0].data.size // 2  # of two layers
    parts = [name for name, _ in read if name == "model.layers.0.mlp.gate_proj.weight"]
    assert len(parts) == len({str(shard.index) for shard in gate.addressable_shards})


def test_stop_ids_are_the_union_of_tokenizer_generation_config_and_config(tiny):
    tiny.config |= {"eos_token_id": 9, "pad_token_id": -1}
    tiny.json_files = {
        "generation_config.json": {"eos_token_id": [7, 9]},
        "tokenizer_config.json": {"eos_token": {"content": "<end>"}, "pad_token": "<pad>"},
        "tokenizer.json": {"added_tokens": [{"id": 5, "content": "<end>"}], "model": {"vocab": {"<pad>": 3}}},
    }
    source = read_source(tiny.write())
    assert source.stop_ids == (5, 7, 9) and source.pad_id == 3
    assert source.generation_config == {"eos_token_id": [7, 9]}
    assert source.tokenizer_dir == str(tiny.directory)


def test_a_negative_id_of_an_old_config_means_none(tiny):
    tiny.config |= {"eos_token_id": [2, -1], "pad_token_id": -1}
    source = read_source(tiny.write())
    assert source.stop_ids == (2,) and source.pad_id is None


def test_a_directory_without_tokenizer_has_no_tokenizer_dir_and_no_stop_ids(tiny):
    source = read_source(tiny.write())
    assert (source.tokenizer_dir, source.tokenizer_files, source.stop_ids, source.pad_id, source.chat_template) == (None, (), (), None, None)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config.json": {}}, None),
        ({"tokenizer_config.json": {"chat_template": "in config"}}, "in config"),
        ({"tokenizer_config.json": {"chat_template": [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]}}, "d"),
        ({"tokenizer_config.json": {"chat_template": "in config"}, "chat_template.json": {"chat_template": "in json"}}, "in json"),
    ],
)
def test_the_chat_template_is_found_in_each_of_its_places(tiny, files, expected):
    tiny.json_files = files
    directory = tiny.write()
    assert read_source(directory).chat_template == expected
    (directory / "chat_template.jinja").write_text("in jinja")
    assert read_source(directory).chat_template == "in jinja"


def test_checking_reads_headers_only(tiny, monkeypatch):
    directory = tiny.write()
    monkeypatch.setattr(pretrained.SafetensorsFiles, "read", lambda *_: pytest.fail("read a tensor"))
    assert check_tensors(directory).num_layers == 2


def test_paths_that_are_no_model_say_what_a_model_is(tmp_path, tiny):
    with pytest.raises(FileNotFoundError, match="does not exist.*gguf.*hub id"):
        load_policy(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="no config.json"):
        load_policy(tmp_path)
    directory = tiny.write()
    shutil.move(directory / "model.safetensors", directory / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match="Present: pytorch_model.bin"):
        load_policy(directory)


def test_only_a_name_that_looks_like_a_hub_id_is_downloaded(tiny, monkeypatch):
    asked = []
    directory = str(tiny.write())
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: asked.append(name) or directory)
    assert load_policy("someone/some-model").spec.vocab_size == 16
    for path in ("/absent/path", "a/b/c", "model", "weights/model.gguf"):
        with pytest.raises(FileNotFoundError):
            load_policy(path)
    assert asked == ["someone/some-model"]


def test_a_broken_config_names_the_file(tiny):
    directory = tiny.write()
    (directory / "config.json").write_text('{"model_type": "qwen2",')
    with pytest.raises(ValueError, match="config.json is no valid JSON"):
        load_policy(directory)


def test_golden_headers_promise_the_lengths_that_safetensors_reads(shared):
    for file in (shared / "golden").glob("*/*.safetensors"):
        entries = pretrained.SafetensorsFiles(str(file.parent)).entries
        with safe_open(file, "numpy") as opened:
            for name in set(opened.keys()) & set(entries):
                assert tuple(opened.get_slice(name).get_shape()) == entries[name].shape
