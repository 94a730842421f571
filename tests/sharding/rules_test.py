"""Placement by name: what is cut on which axis, what stays whole, and that optimizer moments follow their parameters."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

from tlt_jax.decoding.rollout import Slots, init_state
from tlt_jax.decoding.rounds import Decoding
from tlt_jax.models.decoder import abstract_params
from tlt_jax.models.specs import PolicySpec, RopeSpec
from tlt_jax.sharding import rules
from tlt_jax.sharding.meshes import build_meshes


def spec_of(**changes):
    fields = dict(
        family="llama", vocab_size=32, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=6,
        rope=RopeSpec("default", 1e4),
        rms_norm_eps=1e-5, max_position_embeddings=64, tied=False, qkv_bias=True, output_bias=True, mlp_bias=True, qk_norm=True, windows=(None, None))
    return PolicySpec(**(fields | changes))


def placed(mesh, tree):
    leaves = jax.tree_util.tree_leaves_with_path(rules.param_shardings(mesh, tree))
    return {"/".join(str(entry.key) for entry in path): tuple(sharding.spec) for path, sharding in leaves}


def test_every_parameter_is_cut_by_fsdp_on_its_width_and_by_tensor_on_heads_hidden_and_vocabulary():
    expected = {
        "embed/embedding": ("tensor", "fsdp"), "head/kernel": ("fsdp", "tensor"), "final_norm/scale": (),
        "layers/attention/query/kernel": (None, "fsdp", "tensor", None), "layers/attention/key/kernel": (None, "fsdp", "tensor", None),
        "layers/attention/value/kernel": (None, "fsdp", "tensor", None), "layers/attention/output/kernel": (None, "tensor", None, "fsdp"),
        "layers/attention/query/bias": (None, "tensor", None), "layers/attention/key/bias": (None, "tensor", None),
        "layers/attention/value/bias": (None, "tensor", None), "layers/attention/output/bias": (), "layers/attention/query_norm/scale": (),
        "layers/attention/key_norm/scale": (), "layers/attention_norm/scale": (), "layers/mlp_norm/scale": (),
        "layers/mlp/gate/kernel": (None, "fsdp", "tensor"), "layers/mlp/up/kernel": (None, "fsdp", "tensor"),
        "layers/mlp/down/kernel": (None, "tensor", "fsdp"),
        "layers/mlp/gate/bias": (None, "tensor"), "layers/mlp/up/bias": (None, "tensor"), "layers/mlp/down/bias": ()}
    assert placed(build_meshes((2, 2, 2), 1, 1).train, abstract_params(spec_of())) == expected
    on_slice = placed(build_meshes((2, 2, 2), 2, 2).slices[0], abstract_params(spec_of()))
    assert on_slice == {name: tuple(None if axis == "fsdp" else axis for axis in axes) for name, axes in expected.items()}


def test_a_dimension_that_the_axis_does_not_divide_stays_whole_and_the_others_are_still_cut():
    mesh = build_meshes((1, 2, 4), 1, 1).train
    placement = placed(mesh, abstract_params(spec_of(vocab_size=30, hidden_size=16)))
    assert placement["embed/embedding"] == (None, "fsdp") and placement["head/kernel"] == ("fsdp", None)
    assert placement["layers/attention/query/kernel"] == (None, "fsdp", "tensor", None)
    assert placement["layers/attention/key/kernel"] == (None, "fsdp", None, None)
    assert placed(mesh, abstract_params(spec_of(hidden_size=15)))["layers/mlp/gate/kernel"] == (None, None, "tensor")


@pytest.mark.parametrize("head", ["policy", "value"])
def test_a_tied_policy_has_one_matrix_and_a_value_head_one_column(head):
    tree = abstract_params(spec_of(tied=True, head=head))
    assert ("head" in tree) == (head == "value")
    placement = placed(build_meshes((2, 2, 2), 1, 1).train, tree)
    assert placement.get("head/kernel", ("fsdp", None)) == ("fsdp", None)


def test_optimizer_moments_and_gradients_lie_where_their_parameters_do():
    mesh, params = build_meshes((2, 2, 2), 1, 1).train, abstract_params(spec_of())
    state = jax.eval_shape(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)).init, params)
    placement = rules.param_shardings(mesh, state)
    adam = placement[1][0]
    assert adam.mu == adam.nu == rules.param_shardings(mesh, params)
    assert adam.count.is_fully_replicated


def test_row_state_is_cut_by_rows_over_data_and_by_key_value_heads_over_tensor():
    mesh = build_meshes((8, 1, 1), 2, 2).slices[0]
    state = jax.eval_shape(lambda: init_state(Decoding(spec_of()), Slots(4, 64, block=16), jnp.float32))
    placement = rules.state_shardings(mesh, state)
    assert placement.cache.keys_LBKSC.spec == placement.cache.values_LBKSC.spec == P(None, "data", "tensor", None, None)
    assert placement.cache.lengths_B.spec == placement.active_B.spec == P("data")
    assert placement.key_B2.spec == P("data", None)
    odd = rules.state_shardings(mesh, jax.eval_shape(lambda: init_state(Decoding(spec_of(num_kv_heads=1)), Slots(3, 64, block=16), jnp.float32)))
    assert odd.cache.keys_LBKSC.spec == P(None, None, None, None, None) and odd.active_B.spec == P(None)


@pytest.mark.parametrize(("shape", "multiple"), [((2, 2, 2), 4), ((8, 1, 1), 8), ((1, 4, 2), 4), ((1, 1, 8), 1)])
def test_rows_of_a_batch_are_shared_by_data_and_fsdp_together(shape, multiple):
    mesh = build_meshes(shape, 1, 1).train
    assert rules.batch_rows_multiple(mesh) == multiple
    placement = rules.batch_shardings(mesh, {"rows": jax.ShapeDtypeStruct((8, 5), jnp.float32), "number": jax.ShapeDtypeStruct((), jnp.float32)})
    assert placement["rows"].shard_shape((8, 5)) == (8 // multiple, 5)
    assert placement["number"].is_fully_replicated
