"""The one log-probability: float32 log_softmax(logits / temperature) over the full vocabulary, and its entropy.

Rollout, old and reference passes, losses and drafter targets all use it. Truncation (top-k, top-p, min-p) is not applied here:
it only decides which token is drawn. `chunked_token_logprobs` gives the same numbers from features and head without ever
holding the logits of all positions.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

# Positions whose logits exist at once. Measured on 2 CPU cores, float32, V = 49152, D = 576, N = 2048.
DEFAULT_CHUNK = 256
# In the entropy an excluded token (logit −inf) counts 0 · _FLOOR = 0 instead of 0 · −inf = NaN.
_FLOOR = -1e30


def scale_logits(logits, temperature) -> jax.Array:
    """float32 logits / temperature. Temperature (a number or a traced scalar) 0 means greedy decoding, whose log-probs are those of temperature 1."""
    temperature = jnp.asarray(temperature, jnp.float32)
    return jnp.asarray(logits, jnp.float32) / jnp.where(temperature == 0, 1.0, temperature)


def token_logprobs(logits_BTV, targets_BT, temperature, *, with_entropy: bool = True) -> tuple[jax.Array, jax.Array | None]:
    """Log-probability of each target and entropy of each distribution, in nats, both shaped like `targets_BT`; entropy is None unless asked for.

    Any leading dimensions. A target outside 0..V−1 gives NaN; a token excluded by a logit of −inf has log-probability −inf and adds no entropy.
    """
    targets_BT = jnp.asarray(targets_BT)
    vocabulary = logits_BTV.shape[-1]
    scaled_BTV = scale_logits(logits_BTV, temperature)
    shifted_BTV = scaled_BTV - jax.lax.stop_gradient(scaled_BTV.max(-1, keepdims=True))
    exponentials_BTV = jnp.exp(shifted_BTV)
    total_BT = exponentials_BTV.sum(-1)
    # Compare and sum instead of a gather: its gradient is no scatter, and a vocabulary split over devices is never gathered.
    is_target_BTV = jax.lax.broadcasted_iota(targets_BT.dtype, logits_BTV.shape, logits_BTV.ndim - 1) == targets_BT[..., None]
    logprobs_BT = jnp.where(is_target_BTV, shifted_BTV, 0.0).sum(-1) - jnp.log(total_BT)
    logprobs_BT = jnp.where((targets_BT >= 0) & (targets_BT < vocabulary), logprobs_BT, jnp.nan)
    if not with_entropy:
        return logprobs_BT, None
    weighted_BT = (exponentials_BTV * jnp.maximum(shifted_BTV, _FLOOR)).sum(-1)
    return logprobs_BT, jnp.log(total_BT) - weighted_BT / total_BT


def linear_head(weight, *, tied: bool) -> Callable[[jax.Array], jax.Array]:
    """The head as a function features [N, D] → float32 logits [N, V]; `weight` is the kernel [D, V], or the embedding [V, D] when tied."""
    equation = "ND,VD->NV" if tied else "ND,DV->NV"
    return lambda features_ND: jnp.einsum(equation, features_ND, weight, preferred_element_type=jnp.float32)


def chunked_token_logprobs(
    features_ND, head: Callable[[jax.Array], jax.Array], targets_N, temperature, *, chunk: int = DEFAULT_CHUNK, with_entropy: bool = True
) -> tuple[jax.Array, jax.Array | None]:
    """`token_logprobs` of head(features), both [N], with the logits of at most `chunk` positions alive, forward and backward.

    `features_ND` are the features after the final norm, `head` a function like `linear_head` gives; gradients reach the arrays it closes over.
    The backward pass recomputes each chunk's logits: one more product with the head than keeping them all would take.
    """
    def score(features_ND, targets_N):
        return token_logprobs(head(features_ND), targets_N, temperature, with_entropy=with_entropy)

    return _in_chunks(score, features_ND, targets_N, chunk)


def chunked_greedy_logprobs(
    features_ND, head: Callable[[jax.Array], jax.Array], targets_N, *, chunk: int = DEFAULT_CHUNK
) -> tuple[jax.Array, jax.Array]:
    """Log-probability of each target at temperature 1, and whether greedy decoding would choose it; both [N], chunked as in `chunked_token_logprobs`."""

    def score(features_ND, targets_N):
        logits_NV = head(features_ND)
        return token_logprobs(logits_NV, targets_N, 1.0, with_entropy=False)[0], jnp.argmax(logits_NV, axis=-1) == targets_N

    return _in_chunks(score, features_ND, targets_N, chunk)


def _in_chunks(score: Callable, features_ND, targets_N, chunk: int):
    """What `score` (features [n, D], targets [n]) → arrays [n] gives for all N positions, at most `chunk` of them at a time."""
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1 position, got {chunk}")
    positions, width = features_ND.shape
    chunks = -(-positions // chunk)
    if chunks <= 1:
        return score(features_ND, targets_N)
    rows = -(-positions // chunks)
    padding = rows * chunks - positions
    # Strided: chunk i holds positions i, i + chunks, … so that positions split over devices stay split inside every chunk.
    features_ND = jnp.pad(features_ND, ((0, padding), (0, 0))).reshape(rows, chunks, width).swapaxes(0, 1)
    targets_N = jnp.pad(targets_N, (0, padding)).reshape(rows, chunks).T
    # The scan already keeps forward and backward apart, so the barrier against common subexpressions would only slow it.
    remat = jax.checkpoint(score, prevent_cse=False)
    scores = jax.lax.map(lambda part: remat(*part), (features_ND, targets_N))
    return jax.tree.map(lambda parts: parts.T.reshape(-1)[:positions], scores)
