"""Weights from the train layout to the slices: right values, on the right devices, without a second copy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tlt_jax.models.decoder import abstract_params
from tlt_jax.models.specs import PolicySpec, RopeSpec
from tlt_jax.sharding import movement, rules
from tlt_jax.sharding.meshes import build_meshes

SPEC = PolicySpec(
    family="qwen2", vocab_size=30, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4, rope=RopeSpec("default", 1e4),
    rms_norm_eps=1e-5, max_position_embeddings=64, tied=True, qkv_bias=True, output_bias=False, mlp_bias=False, qk_norm=False, windows=(None, None))


def host_params():
    random = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: random.normal(size=leaf.shape).astype(np.float32), abstract_params(SPEC))


def published(meshes, params, dtype="float32"):
    program = jax.jit(functools.partial(movement.reshard, dtype=jnp.dtype(dtype)), out_shardings=movement.publish_shardings(meshes, params))
    return program(movement.to_device(params, rules.param_shardings(meshes.train, params)))


LAYOUTS = [((8, 1, 1), 4, 2), ((2, 2, 2), 2, 2), ((1, 8, 1), 8, 1), ((2, 2, 2), 1, 4)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_slice_gets_all_weights_on_its_own_devices_in_the_layout_of_its_rules(layout):
    meshes, params = build_meshes(*layout), host_params()
    out = published(meshes, params)
    for mesh in meshes.slices:
        view = movement.wrap_for_slice(out, mesh)
        jax.tree.map(np.testing.assert_array_equal, movement.to_host(view), params)
        for leaf, expected in zip(jax.tree.leaves(view), jax.tree.leaves(rules.param_shardings(mesh, params)), strict=True):
            assert leaf.sharding.is_equivalent_to(expected, leaf.ndim) and leaf.sharding.device_set == set(mesh.devices.flat)
            for shard in leaf.addressable_shards:
                np.testing.assert_array_equal(shard.data, np.asarray(leaf)[shard.index])


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_slices_view_is_the_published_buffer_itself(layout):
    meshes = build_meshes(*layout)
    out = published(meshes, host_params())
    for mesh in meshes.slices:
        for whole, view in zip(jax.tree.leaves(out), jax.tree.leaves(movement.wrap_for_slice(out, mesh)), strict=True):
            pointers = {shard.device: shard.data.unsafe_buffer_pointer() for shard in whole.addressable_shards}
            assert len(view.addressable_shards) == mesh.size
            assert all(shard.data.unsafe_buffer_pointer() == pointers[shard.device] for shard in view.addressable_shards)


def shard_bytes(arrays):
    """Bytes of distinct device buffers."""
    return sum({shard.data.unsafe_buffer_pointer(): shard.data.nbytes for array in arrays for shard in array.addressable_shards}.values())


@pytest.mark.parametrize("layout", LAYOUTS[:2], ids=str)
def test_all_views_together_hold_each_slices_weights_once(layout):
    """Every leaf but the norms and output biases is cut by tensor; nothing is kept for two slices or two layouts at a time."""
    meshes, params = build_meshes(*layout), host_params()
    out = published(meshes, params)
    views = [movement.wrap_for_slice(out, mesh) for mesh in meshes.slices]
    whole = sum(leaf.nbytes for path, leaf in jax.tree_util.tree_leaves_with_path(params) if path[-1].key == "scale")
    cut = sum(leaf.nbytes for leaf in jax.tree.leaves(params)) - whole
    assert shard_bytes(jax.tree.leaves((out, views))) == meshes.train.size * (whole + cut // layout[2])


def test_a_tied_embedding_stays_one_array_and_dimensions_that_tensor_does_not_divide_stay_whole():
    meshes, params = build_meshes((2, 2, 2), 2, 4), host_params()
    view = movement.wrap_for_slice(published(meshes, params), meshes.slices[1])
    assert set(view) == {"embed", "layers", "final_norm"}
    assert view["embed"]["embedding"].is_fully_replicated  # 30 tokens on 4 devices
    assert view["layers"]["attention"]["key"]["kernel"].is_fully_replicated  # 2 key/value heads on 4 devices
    assert {shard.data.shape for shard in view["layers"]["mlp"]["gate"]["kernel"].addressable_shards} == {(2, 16, 6)}


def test_publication_casts_to_the_rollout_dtype():
    meshes, params = build_meshes((2, 2, 1), 2, 1), host_params()
    view = movement.wrap_for_slice(published(meshes, params, "bfloat16"), meshes.slices[0])
    jax.tree.map(lambda leaf, source: np.testing.assert_array_equal(leaf, jnp.asarray(source, jnp.bfloat16)), movement.to_host(view), params)


def test_host_arrays_come_back_from_any_layout_as_they_went():
    mesh, params = build_meshes((2, 2, 2), 1, 1).train, host_params()
    placed = movement.to_device(params, rules.param_shardings(mesh, params))
    jax.tree.map(np.testing.assert_array_equal, movement.to_host(placed), params)
    assert movement.to_host({"plain": 3, "array": np.arange(2)})["plain"] == 3


def test_arrays_of_a_slice_go_to_another_one_device_by_device_in_the_same_layout():
    meshes, params = build_meshes((8, 1, 1), 2, 2), host_params()
    here, there = meshes.slices
    placed = movement.to_device(params, rules.param_shardings(here, params))
    arrived = movement.to_slice(placed, here, there)
    jax.tree.map(np.testing.assert_array_equal, movement.to_host(arrived), params)
    counterpart = dict(zip(here.devices.flat, there.devices.flat, strict=True))
    for leaf, source in zip(jax.tree.leaves(arrived), jax.tree.leaves(placed), strict=True):
        assert leaf.sharding.mesh == there and leaf.sharding.spec == source.sharding.spec
        parts = {shard.device: np.asarray(shard.data) for shard in leaf.addressable_shards}
        for shard in source.addressable_shards:
            np.testing.assert_array_equal(parts[counterpart[shard.device]], shard.data)
