"""Drawing a token: one processor for temperature, top-k, top-p and min-p, and the exponential race.

The token at position t is argmax(exp(l − max) / E) over the kept tokens, E the exponential noise of (row key, t, id):
the same law as argmax(l + Gumbel), cheaper because its exponentials are those of the log-softmax. Temperature 0 is a
plain argmax. Log-probabilities are log_softmax(logits / temperature) over the full vocabulary, whatever is kept.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from tlt_jax import noise
from tlt_jax.records import SamplingParams

CHUNK = 128
LEAST_SCORE = -60.0  # a candidate that is not kept: finite, so that sums of scores keep their order


class Sampled(NamedTuple):
    """One token per row."""

    token_B: jax.Array  # int32
    logprob_B: jax.Array  # over the full vocabulary
    sampling_logprob_B: jax.Array  # over the kept tokens


def make_sampling(temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, *, vocabulary: int) -> SamplingParams:
    """Traced sampling settings; ids ≥ `vocabulary` (padding rows of the embedding) are never drawn."""
    return SamplingParams(
        temperature=jnp.float32(temperature), top_k=jnp.int32(top_k), top_p=jnp.float32(top_p), min_p=jnp.float32(min_p), vocabulary=jnp.int32(vocabulary))


def scaled(logits_BV: jax.Array, sampling: SamplingParams) -> jax.Array:
    """float32 logits / temperature; temperature 0 counts as 1."""
    temperature = jnp.where(sampling.temperature == 0, 1.0, sampling.temperature)
    return logits_BV.astype(jnp.float32) / temperature


def truncates(sampling: SamplingParams) -> jax.Array:
    """Whether top-k, top-p or min-p is on."""
    return (sampling.top_k > 0) | (sampling.top_p < 1) | (sampling.min_p > 0)


def kept_threshold(scaled_BV: jax.Array, sampling: SamplingParams) -> jax.Array:
    """[B, 1]: the smallest scaled logit that top-k, then top-p, then min-p keep (Hugging Face's order; ties are kept)."""
    vocabulary = scaled_BV.shape[-1]
    ordered = jnp.sort(scaled_BV, axis=-1, descending=True)
    rank = jnp.arange(vocabulary)[None, :]
    last = jnp.where(sampling.top_k > 0, jnp.minimum(sampling.top_k, vocabulary), vocabulary) - 1
    threshold = jax.lax.dynamic_slice_in_dim(ordered, last, 1, axis=-1)
    probabilities = jax.nn.softmax(jnp.where(ordered >= threshold, ordered, -jnp.inf), axis=-1)
    above = jnp.cumsum(probabilities, axis=-1) - probabilities
    inside = (ordered >= threshold) & ((above < sampling.top_p) | (rank == 0) | (sampling.top_p >= 1))  # the sum may round to 1 early
    threshold = jnp.min(jnp.where(inside, ordered, jnp.inf), axis=-1, keepdims=True)
    floor = jnp.where(sampling.min_p > 0, ordered[:, :1] + jnp.log(jnp.maximum(sampling.min_p, 1e-30)), -jnp.inf)
    return jnp.maximum(threshold, floor)


def kept_tokens(scaled_BV: jax.Array, sampling: SamplingParams, ids_V: jax.Array | None = None) -> jax.Array:
    """[B, V] booleans: tokens that may be drawn; `ids_V` are the ids of the columns (default 0…V−1). The sort runs only when a truncation is on."""
    ids_V = jnp.arange(scaled_BV.shape[-1]) if ids_V is None else ids_V
    real = jnp.broadcast_to(ids_V[None, :] < sampling.vocabulary, scaled_BV.shape)
    masked = jnp.where(real, scaled_BV, -jnp.inf)
    return jax.lax.cond(truncates(sampling), lambda: real & (masked >= kept_threshold(masked, sampling)), lambda: real)


def race_noise(key_B2: jax.Array, first_B: jax.Array, positions: int, vocabulary: int, sampling: SamplingParams) -> jax.Array:
    """float32 [B, J, V]: the noise of J positions in a row from `first_B` on; ones at temperature 0, where none is used."""
    rows = key_B2.shape[0]

    def draw():
        key_X2 = jnp.repeat(key_B2, positions, axis=0)
        position_X = (first_B[:, None] + jnp.arange(positions)[None, :]).reshape(-1)
        return noise.exponentials(key_X2, position_X, jnp.arange(vocabulary)).reshape(rows, positions, vocabulary)

    return jax.lax.cond(sampling.temperature == 0, lambda: jnp.ones((rows, positions, vocabulary), jnp.float32), draw)


def best_in_chunks(scores_BV: jax.Array, count: int) -> jax.Array:
    """The `count` best entries of each row, int32 [B, count], best first; the first of equal scores.

    In two steps, by chunks and inside the best ones: XLA on CPU runs a whole-row argmax with all that is fused into it element by element (measured with
    64 rows: 10.6 ms, and 4.8 ms this way).
    """
    rows, vocabulary = scores_BV.shape
    padded = jnp.pad(scores_BV, ((0, 0), (0, -vocabulary % CHUNK)), constant_values=-jnp.inf)
    chunks = padded.reshape(rows, -1, CHUNK)
    maxima = jnp.max(chunks, axis=-1)
    if count == 1:
        chunk_BE = jnp.argmax(maxima, axis=-1)[:, None]
        inside = jnp.take_along_axis(chunks, chunk_BE[:, :, None], axis=1)[:, 0]
        place_BE = jnp.argmax(inside, axis=-1)[:, None]
        return (chunk_BE * CHUNK + place_BE).astype(jnp.int32)
    chunk_BE = jnp.sort(jax.lax.top_k(maxima, min(count, maxima.shape[1]))[1], axis=-1)  # in order, so that the first of equal scores stays first
    inside = jnp.take_along_axis(chunks, chunk_BE[:, :, None], axis=1).reshape(rows, -1)
    place_BE = jax.lax.top_k(inside, count)[1]
    return (jnp.take_along_axis(chunk_BE, place_BE // CHUNK, axis=1) * CHUNK + place_BE % CHUNK).astype(jnp.int32)


def best_token(scores_BV: jax.Array) -> jax.Array:
    """argmax over the vocabulary, int32; the first of equal scores."""
    return best_in_chunks(scores_BV, 1)[:, 0]


def sample(logits_BV: jax.Array, key_B2: jax.Array, position_B: jax.Array, sampling: SamplingParams) -> Sampled:
    """Draw the token of each row that stands at absolute position `position_B`."""
    return draw(logits_BV, lambda: noise.exponentials(key_B2, position_B, jnp.arange(logits_BV.shape[-1])), sampling)


def draw(logits_BV: jax.Array, noise_BV: Callable[[], jax.Array], sampling: SamplingParams) -> Sampled:
    """Draw a token a row with the exponentials that `noise_BV` gives; it is not called at temperature 0."""
    scaled_BV = scaled(logits_BV, sampling)
    maximum_B1 = jnp.max(scaled_BV, axis=-1, keepdims=True)
    weights_BV = jnp.exp(scaled_BV - maximum_B1)
    total_B = jnp.sum(weights_BV, axis=-1)
    kept_BV = kept_tokens(scaled_BV, sampling)
    scores_BV = jax.lax.cond(
        sampling.temperature == 0,
        lambda: jnp.where(kept_BV, scaled_BV, -jnp.inf),
        lambda: race_scores(weights_BV, kept_BV, noise_BV()))
    token_B = best_token(scores_BV)
    centred_B = jnp.take_along_axis(scaled_BV, token_B[:, None], axis=-1)[:, 0] - maximum_B1[:, 0]
    kept_total_B = jax.lax.cond(truncates(sampling), lambda: jnp.sum(jnp.where(kept_BV, weights_BV, 0.0), axis=-1), lambda: total_B)
    return Sampled(token_B, centred_B - jnp.log(total_B), centred_B - jnp.log(kept_total_B))


def race_scores(weights_BV: jax.Array, kept_BV: jax.Array, noise_BV: jax.Array) -> jax.Array:
    """[B, V] scores whose argmax is the drawn token, from weights exp(l − max); −1 (never NaN) for tokens that are not kept."""
    return jnp.where(kept_BV, weights_BV / noise_BV, -1.0)


def candidates(logits_BV: jax.Array, noise_BV: jax.Array, ids_V: jax.Array, count: int, sampling: SamplingParams) -> tuple[jax.Array, jax.Array]:
    """The `count` best of a drafter's perturbed scores: (columns [B, count], log-probability [B, count] that each is the policy's pick).

    `ids_V` are the global ids of the columns and `noise_BV` the policy's noise of these ids. The probability is the softmax of the log-scores over the
    candidates, since how far they lie apart tells how safely the policy, with the same noise, picks the same; at temperature 0 the drafter's own.
    """
    scaled_BV = scaled(logits_BV, sampling)
    kept_BV = kept_tokens(scaled_BV, sampling, ids_V)
    greedy = sampling.temperature == 0
    perturbed_BV = jnp.where(kept_BV, scaled_BV - jax.lax.cond(greedy, lambda: jnp.zeros_like(noise_BV), lambda: jnp.log(noise_BV)), -jnp.inf)
    column_BE = best_in_chunks(perturbed_BV, count)
    score_BE = jnp.take_along_axis(perturbed_BV, column_BE, axis=-1)
    total_B1 = jax.lax.cond(greedy, lambda: jax.nn.logsumexp(scaled_BV, axis=-1, keepdims=True), lambda: jax.nn.logsumexp(score_BE, axis=-1, keepdims=True))
    return column_BE, jnp.maximum(score_BE - total_B1, LEAST_SCORE)
