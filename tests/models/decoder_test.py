"""The decoder against stored references and a second implementation, and its promises about caches, masks, packing and windows."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from tlt_jax.checkpoints.pretrained import load_policy
from tlt_jax.models import attention, decoder, kv_cache
from tlt_jax.models.decoder import forward
from tlt_jax.models.specs import RopeSpec

GOLDEN = ("llama", "llama3_rope_tied", "llama_sharded_fp16", "mistral_window", "qwen2_tied", "qwen2_yarn", "qwen3")
ALL_BIASES = dict(qkv_bias=True, output_bias=True, mlp_bias=True)
YARN = RopeSpec("yarn", 50.0, factor=4.0, original_max_position_embeddings=8, attention_factor=1.3, beta_fast=4.0, beta_slow=0.5, truncate=False)


@functools.cache
def program(spec, **options):
    return jax.jit(functools.partial(forward, spec, **options))


def close(actual, expected, tolerance=1e-4):
    np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), rtol=tolerance, atol=tolerance)


def tokens_of(spec, rows, length, seed=0):
    return np.random.default_rng(seed).integers(0, spec.vocab_size, (rows, length)).astype(np.int32)


def cached(spec, params, tokens_BT, chunks, *, capacity=None, **options):
    """Feed `tokens_BT` in pieces through a cache; outputs joined over positions, and the cache."""
    rows, length = tokens_BT.shape
    cache = kv_cache.init_cache(spec, rows, capacity or length, "float32", block=8)
    outputs, start = [], 0
    for chunk in chunks:
        out = program(spec, **options)(params, tokens_BT[:, start : start + chunk], cache=cache)
        start += chunk
        cache = out.cache.replace(lengths_B=out.cache.lengths_B + chunk)
        outputs.append(out.replace(cache=None))
    assert start == length
    return jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *outputs), cache


@pytest.mark.parametrize("name", GOLDEN)
def test_a_golden_checkpoint_gives_its_reference_in_one_forward_and_through_a_cache(shared, name):
    loaded = load_policy(shared / "golden" / name)
    expected = load_file(shared / "golden" / name / "expected.safetensors")
    layers = tuple(range(loaded.spec.num_layers))
    inputs = np.concatenate(list(expected["layer_inputs"]), axis=-1)
    whole = program(loaded.spec, capture_layers=layers)(loaded.params, expected["tokens"])
    stepped, _ = cached(loaded.spec, loaded.params, expected["tokens"], (13, 1, 1, 13, *[1] * 12), capture_layers=layers)
    for out in (whole, stepped):
        assert out.logits_BTV.dtype == jnp.float32
        np.testing.assert_allclose(out.logits_BTV, expected["logits"], atol=1e-4)
        np.testing.assert_allclose(out.features_BTD, expected["features"], atol=1e-4)
        np.testing.assert_allclose(out.aux_features_BTF, inputs, atol=1e-4)


@pytest.mark.parametrize("changes", [
    ALL_BIASES | dict(rope=RopeSpec("linear", 100.0, factor=4.0)),
    dict(rope=YARN, tied=True),
    dict(rope=dataclasses.replace(YARN, truncate=True, beta_fast=32.0, beta_slow=1.0), family="qwen2", qkv_bias=True, windows=(None, 4)),
    dict(rope=RopeSpec("llama3", 100.0, factor=8.0, original_max_position_embeddings=16, low_freq_factor=1.0, high_freq_factor=4.0), windows=(5, None)),
    dict(family="qwen3", qk_norm=True, qkv_bias=True, output_bias=True, windows=(3, 3)),
    dict(num_kv_heads=1, head_dim=4), dict(num_kv_heads=4, num_heads=4, head_dim=2)], ids=str)
def test_every_option_agrees_with_the_second_implementation_with_and_without_a_cache(make_spec, make_params, logits_by_formula, changes):
    spec = make_spec(**changes)
    params, tokens_BT = make_params(spec), tokens_of(spec, 2, 20)
    expected = np.stack([logits_by_formula(spec, params, row) for row in tokens_BT])
    close(program(spec)(params, tokens_BT).logits_BTV, expected)
    close(cached(spec, params, tokens_BT, (10, 10))[0].logits_BTV, expected)


def test_dynamic_rope_follows_the_whole_length_in_a_full_forward_and_refuses_a_longer_cache(make_spec, make_params, logits_by_formula):
    spec = make_spec(rope=RopeSpec("dynamic", 100.0, factor=2.0, original_max_position_embeddings=16))
    params, tokens_BT = make_params(spec), tokens_of(spec, 1, 24)
    for length in (16, 24):
        close(program(spec)(params, tokens_BT[:, :length]).logits_BTV[0], logits_by_formula(spec, params, tokens_BT[0, :length]))
    close(cached(spec, params, tokens_BT[:, :16], (8, 8))[0].logits_BTV[0], logits_by_formula(spec, params, tokens_BT[0, :16]))
    with pytest.raises(ValueError, match="16 tokens"):
        cached(spec, params, tokens_BT, (12, 12))


@pytest.mark.parametrize("changes", [
    ALL_BIASES, dict(windows=(4, None)), dict(rope=RopeSpec("dynamic", 100.0, factor=2.0, original_max_position_embeddings=12))], ids=str)
def test_packed_rows_give_each_sequence_what_it_gets_alone(make_spec, make_params, logits_by_formula, changes):
    spec = make_spec(**changes)
    params, lengths = make_params(spec), (7, 12, 5)
    parts = [tokens_of(spec, 1, length, seed=length) for length in lengths]
    padding = 3
    row = np.concatenate([*parts, np.full((1, padding), 1, np.int32)], axis=1)
    segments = np.repeat([1, 2, 3, 0], [*lengths, padding])[None].astype(np.int32)
    positions = np.concatenate([np.arange(length) for length in (*lengths, padding)])[None].astype(np.int32)
    out = program(spec)(params, row, positions_BT=positions, segments_BT=segments)
    start = 0
    for part in parts:
        close(out.logits_BTV[0, start : start + part.shape[1]], logits_by_formula(spec, params, part[0]))
        start += part.shape[1]


def test_what_comes_later_changes_nothing_before_it(make_spec, make_params):
    spec = make_spec()
    params, tokens_BT = make_params(spec), tokens_of(spec, 2, 20)
    changed = tokens_BT.copy()
    changed[:, 11:] = (changed[:, 11:] + 1) % spec.vocab_size
    before, after = (program(spec, capture_layers=(1,))(params, tokens) for tokens in (tokens_BT, changed))
    np.testing.assert_array_equal(before.logits_BTV[:, :11], after.logits_BTV[:, :11])
    np.testing.assert_array_equal(before.aux_features_BTF[:, :11], after.aux_features_BTF[:, :11])
    assert np.abs(np.asarray(before.logits_BTV - after.logits_BTV)[:, 11:]).max(-1).min() > 1e-3


def test_remat_and_blocks_of_queries_change_neither_value_nor_gradient(make_spec, make_params, monkeypatch):
    spec = make_spec(windows=(None, 6), **ALL_BIASES)
    params, tokens_BT = make_params(spec), tokens_of(spec, 2, 32)
    target = np.random.default_rng(1).normal(size=(2, 32, spec.vocab_size)).astype(np.float32)

    def loss(params, remat):
        return jnp.sum(forward(spec, params, tokens_BT, remat=remat).logits_BTV * target)

    plain = jax.jit(jax.value_and_grad(functools.partial(loss, remat=False)))(params)
    monkeypatch.setattr(attention, "QUERY_BLOCK", 8)
    saving = jax.jit(jax.value_and_grad(functools.partial(loss, remat=True)))(params)
    scale = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(plain))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6 * scale), plain, saving)


def test_nan_in_unused_cache_slots_changes_nothing(make_spec, make_params):
    spec = make_spec(windows=(None, 4))
    params, tokens_BT = make_params(spec), tokens_of(spec, 2, 14)
    clean, _ = cached(spec, params, tokens_BT, (9, 1, 1, 1, 1, 1), capacity=24)
    cache = kv_cache.init_cache(spec, 2, 24, "float32", block=8)
    cache = cache.replace(keys_LBKSC=cache.keys_LBKSC * jnp.nan, values_LBKSC=cache.values_LBKSC * jnp.nan)
    outputs = []
    for start, end in ((0, 9), (9, 10), (10, 11), (11, 12), (12, 13), (13, 14)):
        out = program(spec)(params, tokens_BT[:, start:end], cache=cache)
        cache = out.cache.replace(lengths_B=jnp.full((2,), end))
        outputs.append(out.logits_BTV)
    np.testing.assert_array_equal(np.concatenate(outputs, axis=1), clean.logits_BTV)


@pytest.mark.parametrize("windows", [(None, None), (4, 3)])
def test_rows_of_different_cache_length_in_one_batch_equal_each_alone(make_spec, make_params, logits_by_formula, windows):
    spec = make_spec(windows=windows)
    params, tokens_BT = make_params(spec), tokens_of(spec, 3, 24)
    lengths = np.array([3, 17, 0], np.int32)
    out = program(spec)(params, tokens_BT, cache=kv_cache.init_cache(spec, 3, 32, "float32", block=8))
    cache = out.cache.replace(lengths_B=jnp.asarray(lengths))  # rolling back is moving the length
    new_BT = np.stack([row[length : length + 4] for row, length in zip(tokens_BT, lengths, strict=True)])
    mixed = program(spec)(params, new_BT, cache=cache)
    np.testing.assert_array_equal(mixed.cache.lengths_B, lengths)
    for row, length in enumerate(lengths):
        close(mixed.logits_BTV[row], logits_by_formula(spec, params, tokens_BT[row, : length + 4])[length:])


@pytest.mark.parametrize("windows", [(None, None), (None, 4)])
def test_a_tree_under_its_ancestor_mask_gives_each_node_what_its_path_gets_alone(make_spec, make_params, logits_by_formula, windows):
    spec = make_spec(windows=windows)
    params, lengths = make_params(spec), np.array([6, 9], np.int32)
    prefix = tokens_of(spec, 2, 9)
    parents = [-1, 0, 0, 1, 1, 2, 3]  # node 0 is the root
    nodes = tokens_of(spec, 2, len(parents), seed=3)
    paths = []
    for node in range(len(parents)):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        paths.append(path)
    depth = np.array([len(path) - 1 for path in paths], np.int32)
    mask = np.array([[ancestor in path for ancestor in range(len(parents))] for path in paths])
    out = program(spec)(params, prefix, cache=kv_cache.init_cache(spec, 2, 24, "float32", block=8))
    cache = out.cache.replace(lengths_B=jnp.asarray(lengths))
    tree = program(spec)(params, nodes, cache=cache, positions_BT=lengths[:, None] + depth[None, :], mask=np.broadcast_to(mask, (2, *mask.shape)))
    for row, length in enumerate(lengths):
        for node, path in enumerate(paths):
            close(tree.logits_BTV[row, node], logits_by_formula(spec, params, np.concatenate([prefix[row, :length], nodes[row, path]]))[-1])


def test_appending_past_the_end_of_the_cache_leaves_earlier_entries_as_they_were(make_spec, make_params):
    spec = make_spec()
    params, tokens_BT = make_params(spec), tokens_of(spec, 2, 16)
    _, cache = cached(spec, params, tokens_BT, (16,))
    after = program(spec)(params, tokens_BT, cache=cache.replace(lengths_B=jnp.array([16, 13]))).cache
    for old, new in ((cache.keys_LBKSC, after.keys_LBKSC), (cache.values_LBKSC, after.values_LBKSC)):
        np.testing.assert_array_equal(new[:, 0], old[:, 0])
        np.testing.assert_array_equal(new[:, 1, :, :13], old[:, 1, :, :13])


def test_a_window_narrower_than_the_text_matters_only_on_its_layers(make_spec, make_params):
    full, all_windows, second = make_spec(), make_spec(windows=(4, 4)), make_spec(windows=(None, 4))
    params, tokens_BT = make_params(full), tokens_of(full, 1, 12)
    logits = {spec: np.asarray(program(spec)(params, tokens_BT).logits_BTV)[0] for spec in (full, all_windows, second)}
    close(logits[all_windows][:4], logits[full][:4], 1e-6)
    for one, other in ((full, all_windows), (full, second), (all_windows, second)):
        assert np.abs(logits[one] - logits[other])[5:].max(-1).min() > 1e-4
    inputs = [program(spec, capture_layers=(1,))(params, tokens_BT).aux_features_BTF for spec in (full, second)]
    np.testing.assert_array_equal(*inputs)


@pytest.mark.parametrize("head", ["value", "reward"])
@pytest.mark.parametrize("tied", [True, False])
def test_value_and_reward_heads_give_one_number_a_position(make_spec, make_params, logits_by_formula, head, tied):
    spec = make_spec(head=head, tied=tied)
    params, tokens_BT = make_params(spec), tokens_of(spec, 2, 8)
    assert params["head"]["kernel"].shape == (spec.hidden_size, 1)
    logits = program(spec)(params, tokens_BT).logits_BTV
    assert logits.shape == (2, 8, 1)
    close(logits[1], logits_by_formula(spec, params, tokens_BT[1]))


def test_integer_tokens_of_every_kind_are_read_alike(make_spec, make_params):
    spec = make_spec()
    params, tokens_BT = make_params(spec), tokens_of(spec, 2, 8)
    run = functools.partial(forward, spec, params, compute_logits=False)
    expected = run(tokens_BT).features_BTD
    for tokens in (tokens_BT.astype(np.int64), tokens_BT.astype(np.uint8), jnp.asarray(tokens_BT), tokens_BT.tolist()):
        np.testing.assert_array_equal(run(tokens).features_BTD, expected)


def test_logits_are_left_out_when_not_asked_for_and_come_from_the_features(make_spec, make_params):
    spec = make_spec(tied=True)
    params, tokens_BT = make_params(spec), tokens_of(spec, 1, 8)
    out = program(spec, compute_logits=False)(params, tokens_BT)
    assert out.logits_BTV is None and out.aux_features_BTF is None and out.cache is None
    close(decoder.head_logits(spec, params, out.features_BTD), program(spec)(params, tokens_BT).logits_BTV, 1e-6)


def test_captured_layers_come_in_the_order_asked_for(make_spec, make_params):
    spec = make_spec()
    params, tokens_BT = make_params(spec), tokens_of(spec, 1, 8)
    aux = np.asarray(program(spec, capture_layers=(1, 0))(params, tokens_BT).aux_features_BTF)
    np.testing.assert_array_equal(aux[..., spec.hidden_size :], params["embed"]["embedding"][tokens_BT])
    np.testing.assert_array_equal(aux[..., : spec.hidden_size], program(spec, capture_layers=(1,))(params, tokens_BT).aux_features_BTF)


@pytest.mark.parametrize("layer", [2, -1])
def test_capturing_a_layer_that_does_not_exist_is_an_error_that_names_it(make_spec, make_params, layer):
    spec = make_spec()
    with pytest.raises(ValueError, match=str(layer)):
        forward(spec, make_params(spec), tokens_of(spec, 1, 4), capture_layers=(0, layer))


def test_bfloat16_stays_near_float32_with_float32_logits(make_spec, make_params):
    spec = make_spec()
    params, tokens_BT = make_params(spec), tokens_of(spec, 2, 12)
    half = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), params)
    out = program(spec)(half, tokens_BT)
    assert out.logits_BTV.dtype == jnp.float32 and out.features_BTD.dtype == jnp.bfloat16
    close(out.logits_BTV, program(spec)(params, tokens_BT).logits_BTV, 0.15)


def test_new_parameters_have_the_declared_shapes_unit_norms_and_small_kernels(make_spec):
    spec = make_spec(qk_norm=True, **ALL_BIASES)
    params = jax.jit(functools.partial(decoder.init_params, spec))(jax.random.key(0))
    jax.tree.map(lambda leaf, abstract: np.testing.assert_equal(leaf.shape, abstract.shape), params, decoder.abstract_params(spec))
    fan_in = {"output": spec.num_heads * spec.head_dim, "down": spec.intermediate_size}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        kind, size = path[-1].key, fan_in.get(path[-2].key, spec.hidden_size)
        assert np.std(leaf) * size**0.5 == pytest.approx({"scale": 0, "bias": 0}.get(kind, 1), rel=0.3), path
        assert np.mean(leaf) == pytest.approx({"scale": 1}.get(kind, 0), abs=0.3 * size**-0.5), path
    kernels = params["layers"]["mlp"]["gate"]["kernel"]
    assert not np.array_equal(kernels[0], kernels[1])
