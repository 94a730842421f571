"""EAGLE and EAGLE-3 directories: what is written is read back, in the published names and shapes, and what does not fit is refused by name."""

import json

import jax
import numpy as np
import pytest
import safetensors.numpy

from tlt_jax.checkpoints.drafter_files import DrafterFiles, LoadedDrafter, drafter_kind, load_drafter, read_drafter, save_drafter
from tlt_jax.checkpoints.tensor_layout import flatten
from tlt_jax.drafters.eagle import Eagle
from tlt_jax.drafters.eagle3 import Eagle3
from tlt_jax.drafters.feature_drafter import layer_like
from tlt_jax.models import decoder
from tlt_jax.models.specs import PolicySpec, RopeSpec

SPEC = PolicySpec(
    family="llama", vocab_size=20, hidden_size=16, intermediate_size=24, num_layers=8, num_heads=4, num_kv_heads=2, head_dim=6, rope=RopeSpec("default", 100.0),
    rms_norm_eps=1e-5, max_position_embeddings=64, tied=True, qkv_bias=False, output_bias=False, mlp_bias=False, qk_norm=False, windows=(None,) * 8)
IDS = np.array([0, 3, 7, 9, 12, 19], np.int32)
# The tables of names and shapes of the published form: [out, in], H·C = 24, K·C = 12.
EAGLE = {
    "fc.weight": (16, 32), "fc.bias": (16,), "layers.0.self_attn.q_proj.weight": (24, 16), "layers.0.self_attn.k_proj.weight": (12, 16),
    "layers.0.self_attn.v_proj.weight": (12, 16), "layers.0.self_attn.o_proj.weight": (16, 24), "layers.0.mlp.gate_proj.weight": (24, 16),
    "layers.0.mlp.up_proj.weight": (24, 16), "layers.0.mlp.down_proj.weight": (16, 24), "layers.0.post_attention_layernorm.weight": (16,)}
EAGLE3 = {
    "fc.weight": (16, 48), "midlayer.hidden_norm.weight": (16,), "midlayer.input_layernorm.weight": (16,), "midlayer.self_attn.q_proj.weight": (24, 32),
    "midlayer.self_attn.k_proj.weight": (12, 32), "midlayer.self_attn.v_proj.weight": (12, 32), "midlayer.self_attn.o_proj.weight": (16, 24),
    "midlayer.post_attention_layernorm.weight": (16,), "midlayer.mlp.gate_proj.weight": (24, 16), "midlayer.mlp.up_proj.weight": (24, 16),
    "midlayer.mlp.down_proj.weight": (16, 24), "norm.weight": (16,), "lm_head.weight": (6, 16), "d2t": (6,), "t2d": (20,)}
TABLES = {"eagle": EAGLE, "eagle3": EAGLE3}


def made(kind) -> LoadedDrafter:
    policy = decoder.init_params(SPEC, jax.random.key(0))
    if kind == "eagle":
        files, drafter = DrafterFiles("eagle", layer_like(SPEC), 0, None), Eagle(SPEC, layer_like(SPEC))
    else:
        files, drafter = DrafterFiles("eagle3", layer_like(SPEC), len(IDS), None), Eagle3(SPEC, layer_like(SPEC), len(IDS), (2, 4, 5))
    params = drafter.init_params(jax.random.key(1), policy)
    random = np.random.default_rng(2)
    params = jax.tree.map(lambda leaf: random.normal(size=leaf.shape).astype(np.float32), params)
    return LoadedDrafter(files, params | ({"ids": IDS} if kind == "eagle3" else {}))


@pytest.fixture(params=["eagle", "eagle3"])
def kind(request):
    return request.param


@pytest.fixture
def directory(tmp_path, kind):
    save_drafter(tmp_path, SPEC, made(kind))
    return tmp_path


def tensors_of(directory):
    return safetensors.numpy.load_file(directory / "model.safetensors")


def rewrite(directory, tensors=None, **config):
    if tensors is not None:
        safetensors.numpy.save_file(tensors, directory / "model.safetensors")
    path = directory / "config.json"
    path.write_text(json.dumps({key: value for key, value in (json.loads(path.read_text()) | config).items() if value is not None}))


def test_what_is_written_has_the_published_names_and_shapes_and_is_read_back_bit_for_bit(directory, kind):
    assert {name: tensor.shape for name, tensor in tensors_of(directory).items()} == TABLES[kind]
    loaded = load_drafter(directory, SPEC)
    expected, actual = flatten(made(kind).params), flatten(loaded.params)
    assert expected.keys() == actual.keys() and drafter_kind(directory) == kind
    for path, leaf in expected.items():
        np.testing.assert_array_equal(leaf, actual[path])
    assert loaded.files == made(kind).files


def test_every_tensor_that_is_taken_away_is_named_and_so_is_one_too_many(directory, kind):
    tensors = tensors_of(directory)
    for name in TABLES[kind]:
        if name == "fc.bias":
            continue  # some published files have none: it is zero then
        rewrite(directory, {key: value for key, value in tensors.items() if key != name})
        with pytest.raises(ValueError, match=name.replace(".", r"\.")):
            read_drafter(directory, SPEC)
    rewrite(directory, tensors | {"layers.1.mlp.up_proj.weight": np.zeros((2, 2), np.float32)})
    with pytest.raises(ValueError, match=r"extra tensors: layers\.1\.mlp"):
        read_drafter(directory, SPEC)


def test_a_wrong_shape_is_refused_with_both_shapes(directory):
    tensors = tensors_of(directory)
    rewrite(directory, tensors | {"fc.weight": tensors["fc.weight"][:, :-1]})
    with pytest.raises(ValueError, match=r"fc\.weight: file \[16, (31|47)\], expected \[16, (32|48)\]"):
        read_drafter(directory, SPEC)


def test_an_absent_fc_bias_is_zero(tmp_path):
    save_drafter(tmp_path, SPEC, made("eagle"))
    rewrite(tmp_path, {name: tensor for name, tensor in tensors_of(tmp_path).items() if name != "fc.bias"})
    assert not np.any(load_drafter(tmp_path, SPEC).params["layer"]["fc"]["bias"])


@pytest.mark.parametrize("change", [lambda d2t: d2t + 1, lambda d2t: d2t + np.arange(6), lambda d2t: d2t * 0], ids=["shifted", "ids for offsets", "zeros"])
def test_a_map_of_draft_tokens_that_is_off_is_refused(tmp_path, change):
    save_drafter(tmp_path, SPEC, made("eagle3"))
    tensors = tensors_of(tmp_path)
    assert tensors["d2t"].tolist() == [0, 2, 5, 6, 8, 14] and np.flatnonzero(tensors["t2d"]).tolist() == IDS.tolist()
    rewrite(tmp_path, tensors | {"d2t": change(tensors["d2t"])})
    with pytest.raises(ValueError, match="d2t"):
        load_drafter(tmp_path, SPEC)


@pytest.mark.parametrize(("config", "captured"), [
    ({}, None), ({"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}, (1, 3, 6)), ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 5]}}, (1, 3, 6))])
def test_captured_layers_are_named_by_input_at_the_top_and_by_output_inside_eagle_config(tmp_path, config, captured):
    save_drafter(tmp_path, SPEC, made("eagle3"))
    rewrite(tmp_path, **config)
    assert read_drafter(tmp_path, SPEC).capture_layers == captured


def test_captured_layers_survive_a_round_trip(tmp_path):
    drafter = made("eagle3")
    files = DrafterFiles("eagle3", drafter.files.layer_spec, len(IDS), (1, 3, 6))
    save_drafter(tmp_path, SPEC, LoadedDrafter(files, drafter.params))
    assert read_drafter(tmp_path, SPEC).capture_layers == (1, 3, 6)


@pytest.mark.parametrize(("config", "words"), [
    ({"hidden_size": 18}, "18"), ({"norm_before_residual": True}, "norm_before_residual"), ({"num_hidden_layers": 2}, "one layer")])
def test_a_drafter_of_another_form_or_model_is_refused(directory, config, words):
    rewrite(directory, **config)
    with pytest.raises(ValueError, match=words):
        read_drafter(directory, SPEC)


def test_a_directory_without_config_or_weights_says_what_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        read_drafter(tmp_path, SPEC)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        read_drafter(tmp_path, SPEC)
