"""A second implementation of the decoder in float64 numpy, one sequence at a time, and random tiny models to compare on."""

import math

import numpy as np
import pytest

from tlt_jax.models.decoder import abstract_params
from tlt_jax.models.specs import PolicySpec, RopeSpec


def tiny_spec(**changes) -> PolicySpec:
    """Two layers of width 16, 4 query heads on 2 key/value heads of 6 channels, 29 tokens; `changes` as in PolicySpec."""
    fields = dict(
        family="llama", vocab_size=29, hidden_size=16, intermediate_size=20, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=6,
        rope=RopeSpec("default", 100.0), rms_norm_eps=1e-5, max_position_embeddings=64, tied=False, qkv_bias=False, output_bias=False, mlp_bias=False,
        qk_norm=False, windows=(None, None))
    return PolicySpec(**(fields | changes))


def random_params(spec: PolicySpec, seed: int = 0) -> dict:
    """Every leaf moved well off its default, biases and norms too, so that leaving one out shows.

    The output bias lives where the spec says; value heads get what the decoder declares.
    """
    random = np.random.default_rng(seed)

    def draw(tree):
        if isinstance(tree, dict):
            return {name: draw(tree[name]) for name in sorted(tree)}
        return (random.normal(size=tree.shape) * (1.0 if min(tree.shape) == 1 else 0.4)).astype(np.float32)

    return draw(abstract_params(spec))


def reference_frequencies(rope: RopeSpec, channels: int, length: int) -> tuple[np.ndarray, float]:
    """Inverse frequencies one by one from the papers' formulas, and the factor on cos and sin."""
    frequencies, original = [], rope.original_max_position_embeddings
    theta = rope.theta
    if rope.kind == "dynamic" and length > original:
        theta *= (rope.factor * length / original - rope.factor + 1) ** (channels / (channels - 2))
    for pair in range(channels // 2):
        frequency = theta ** (-2 * pair / channels)
        if rope.kind == "linear":
            frequency /= rope.factor
        if rope.kind == "llama3":
            turns = original * frequency / (2 * math.pi)  # full turns within the original length
            kept = min(max((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0), 1)
            frequency = kept * frequency + (1 - kept) * frequency / rope.factor
        if rope.kind == "yarn":
            low, high = (channels * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta)) for turns in (rope.beta_fast, rope.beta_slow))
            if rope.truncate:
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, channels - 1)
            scaled = min(max((pair - low) / (high - low or 0.001), 0), 1)
            frequency = scaled * frequency / rope.factor + (1 - scaled) * frequency
        frequencies.append(frequency)
    return np.array(frequencies), rope.attention_factor if rope.kind == "yarn" else 1.0


def _norm(x, scale, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale


def _linear(x, layer, index, equation):
    y = np.einsum(equation, x, layer["kernel"][index])
    return y + layer["bias"][index] if "bias" in layer else y


def _turn(x, angles, factor):
    z = (x[..., : x.shape[-1] // 2] + 1j * x[..., x.shape[-1] // 2 :]) * np.exp(1j * angles)[:, None, :] * factor
    return np.concatenate([z.real, z.imag], -1)


def reference_logits(spec: PolicySpec, params: dict, tokens) -> np.ndarray:
    """[T, V] in float64 for one sequence: every query loops over the keys it may see."""
    layers, length = params["layers"], len(tokens)
    frequencies, factor = reference_frequencies(spec.rope, spec.head_dim, length)
    angles = np.arange(length)[:, None] * frequencies[None, :]
    x = params["embed"]["embedding"].astype(np.float64)[np.asarray(tokens)]
    for index in range(spec.num_layers):
        part = layers["attention"]
        normed = _norm(x, layers["attention_norm"]["scale"][index], spec.rms_norm_eps)
        query, key, value = (_linear(normed, part[name], index, "td,dhc->thc") for name in ("query", "key", "value"))
        if spec.qk_norm:
            query, key = (_norm(y, part[f"{name}_norm"]["scale"][index], spec.rms_norm_eps) for y, name in ((query, "query"), (key, "key")))
        query, key = _turn(query, angles, factor), _turn(key, angles, factor)
        attended = np.zeros_like(query)
        for t in range(length):
            first = 0 if spec.windows[index] is None else max(0, t - spec.windows[index] + 1)
            for head in range(spec.num_heads):
                shared = head // (spec.num_heads // spec.num_kv_heads)
                scores = key[first : t + 1, shared] @ query[t, head] / math.sqrt(spec.head_dim)
                weights = np.exp(scores - scores.max())
                attended[t, head] = weights @ value[first : t + 1, shared] / weights.sum()
        x = x + _linear(attended, part["output"], index, "thc,hcd->td")
        normed = _norm(x, layers["mlp_norm"]["scale"][index], spec.rms_norm_eps)
        gate, up = (_linear(normed, layers["mlp"][name], index, "td,df->tf") for name in ("gate", "up"))
        x = x + _linear(gate / (1 + np.exp(-gate)) * up, layers["mlp"]["down"], index, "tf,fd->td")
    features = _norm(x, params["final_norm"]["scale"], spec.rms_norm_eps)
    return features @ (params["embed"]["embedding"].T if spec.tied and spec.head == "policy" else params["head"]["kernel"])


@pytest.fixture(scope="session")
def make_spec():
    return tiny_spec


@pytest.fixture(scope="session")
def make_params():
    return random_params


@pytest.fixture(scope="session")
def frequencies_by_formula():
    return reference_frequencies


@pytest.fixture(scope="session")
def logits_by_formula():
    return reference_logits
