"""Rotary tables against closed forms, a second implementation and, where torch is there, transformers; and the rotation itself."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from tlt_jax.models import rope
from tlt_jax.models.specs import RopeSpec, spec_from_config

CONFIG = dict(
    model_type="llama", architectures=["LlamaForCausalLM"], vocab_size=16, hidden_size=64, intermediate_size=8, num_hidden_layers=1, num_attention_heads=4,
    max_position_embeddings=128)
SCALINGS = [
    dict(rope_type="default"), dict(rope_type="linear", factor=4.0), dict(rope_type="dynamic", factor=2.0),
    dict(rope_type="llama3", factor=8.0, original_max_position_embeddings=64, low_freq_factor=1.0, high_freq_factor=4.0),
    dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32),
    dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32, attention_factor=0.7),
    dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32, beta_fast=8.0, beta_slow=2.0),
    dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32, truncate=False),
    dict(rope_type="yarn", factor=40.0, original_max_position_embeddings=32, mscale=1.0, mscale_all_dim=0.8)]


def spec_of(scaling):
    return spec_from_config(CONFIG | {"rope_parameters": {"rope_theta": 10000.0} | scaling})


def test_llama3_scaling_gives_the_four_known_frequencies():
    scaled = RopeSpec("llama3", 10000.0, factor=8.0, original_max_position_embeddings=64, low_freq_factor=1.0, high_freq_factor=4.0)
    frequencies, factor = rope.inverse_frequencies(scaled, 8)
    np.testing.assert_allclose(frequencies, [1, 0.0130423, 0.00125, 0.000125], rtol=1e-5)
    assert factor == 1
    np.testing.assert_allclose(rope.inverse_frequencies(RopeSpec("default", 10000.0), 8)[0], [1, 0.1, 0.01, 0.001], rtol=1e-6)


def test_linear_scaling_divides_every_frequency_by_the_factor():
    frequencies, _ = rope.inverse_frequencies(RopeSpec("linear", 10000.0, factor=4.0), 8)
    np.testing.assert_allclose(frequencies, [0.25, 0.025, 0.0025, 0.00025], rtol=1e-6)


def test_dynamic_scaling_leaves_short_texts_alone_and_stretches_the_base_of_long_ones():
    dynamic = RopeSpec("dynamic", 10000.0, factor=2.0, original_max_position_embeddings=16)
    for length in (0, 5, 16):
        np.testing.assert_allclose(rope.inverse_frequencies(dynamic, 8, length)[0], [1, 0.1, 0.01, 0.001], rtol=1e-6)
    base = 10000.0 * (2 * 32 / 16 - 1) ** (8 / 6)
    np.testing.assert_allclose(rope.inverse_frequencies(dynamic, 8, 32)[0], base ** -(np.arange(4) / 4), rtol=1e-5)


def test_yarn_keeps_fast_turns_divides_slow_ones_and_blends_between():
    """Ramp from pair 1 to pair 3 of 8: original 2π · 100 makes dimension_of(turns) = 8 · log₁₀(100 / turns) / 8 with theta 10⁴."""
    yarn = RopeSpec("yarn", 1e4, factor=4.0, original_max_position_embeddings=200 * math.pi, attention_factor=1.0, beta_fast=10.0, beta_slow=0.1, truncate=True)
    frequencies, _ = rope.inverse_frequencies(yarn, 8)
    np.testing.assert_allclose(frequencies, [1, 0.1, 0.01 * (0.5 + 0.5 / 4), 0.001 / 4], rtol=1e-5)


@pytest.mark.parametrize(("scaling", "expected"), [
    (SCALINGS[4], 0.1 * math.log(4) + 1), (SCALINGS[5], 0.7), (SCALINGS[8], (0.1 * math.log(40) + 1) / (0.08 * math.log(40) + 1)),
    (SCALINGS[4] | {"factor": 1.0}, 1.0)], ids=str)
def test_the_yarn_factor_on_cos_and_sin_is_the_given_one_or_follows_the_scale(scaling, expected):
    spec = spec_of(scaling)
    assert rope.inverse_frequencies(spec.rope, 16)[1] == pytest.approx(expected)
    cos, sin = rope.rotation(spec, jnp.arange(5)[None, :], length=5)
    np.testing.assert_allclose(cos**2 + sin**2, expected**2, rtol=1e-5)


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
@pytest.mark.parametrize("length", [20, 300])
def test_every_rule_agrees_with_the_second_implementation(frequencies_by_formula, scaling, length):
    spec = spec_of(scaling)
    frequencies, factor = rope.inverse_frequencies(spec.rope, spec.head_dim, length)
    expected, expected_factor = frequencies_by_formula(spec.rope, spec.head_dim, length)
    np.testing.assert_allclose(frequencies, expected, rtol=1e-5)
    assert factor == pytest.approx(expected_factor)
    positions = np.array([[0, 1, length - 1]])
    cos, sin = rope.rotation(spec, jnp.asarray(positions), length=length)
    angles = positions[..., None] * expected
    np.testing.assert_allclose(cos, np.cos(angles) * factor, atol=1e-4)
    np.testing.assert_allclose(sin, np.sin(angles) * factor, atol=1e-4)


@pytest.mark.parametrize("scaling", SCALINGS[1:], ids=str)
def test_every_rule_agrees_with_transformers(scaling):
    pytest.importorskip("torch", reason="transformers computes its rotary tables with torch")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(**{name: CONFIG[name] for name in CONFIG if name != "architectures"} | {"rope_parameters": {"rope_theta": 10000.0} | scaling})
    expected, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, "cpu", seq_len=300)
    frequencies, own_factor = rope.inverse_frequencies(spec_of(scaling).rope, 16, 300)
    np.testing.assert_allclose(frequencies, expected.numpy(), rtol=1e-5)
    assert own_factor == pytest.approx(factor)


def test_rotating_turns_the_two_halves_of_a_head_as_one_complex_number():
    spec = spec_of(SCALINGS[0])
    random = np.random.default_rng(0)
    x = random.normal(size=(2, 5, 3, 16)).astype(np.float32)
    positions = random.integers(0, 90, (2, 5))
    turned = np.asarray(rope.rotate(jnp.asarray(x), *rope.rotation(spec, jnp.asarray(positions), length=0)))
    angles = positions[:, :, None, None] * 10000.0 ** (-np.arange(8) / 8)
    np.testing.assert_allclose(turned[..., :8] + 1j * turned[..., 8:], (x[..., :8] + 1j * x[..., 8:]) * np.exp(1j * angles), atol=1e-4)


def test_scores_depend_on_the_distance_alone():
    spec = spec_of(SCALINGS[3])
    random = np.random.default_rng(0)
    query, key = (jnp.asarray(np.broadcast_to(random.normal(size=(1, 1, 1, 16)), (1, 4, 1, 16)), jnp.float32) for _ in range(2))
    turned_query = rope.rotate(query, *rope.rotation(spec, jnp.array([[7, 20, 57, 100]]), length=0))
    turned_key = rope.rotate(key, *rope.rotation(spec, jnp.array([[2, 15, 52, 95]]), length=0))
    scores = np.asarray((turned_query * turned_key).sum(-1))[0, :, 0]
    np.testing.assert_allclose(scores, scores[0], atol=1e-4)


def test_half_precision_is_turned_in_float32_and_comes_back_as_it_was():
    spec = spec_of(SCALINGS[0])
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 3, 2, 16)), jnp.bfloat16)
    rotation = rope.rotation(spec, jnp.array([[0, 300, 4001]]), length=0)
    turned = rope.rotate(x, *rotation)
    assert turned.dtype == jnp.bfloat16
    np.testing.assert_array_equal(turned, rope.rotate(x.astype(jnp.float32), *rotation).astype(jnp.bfloat16))
