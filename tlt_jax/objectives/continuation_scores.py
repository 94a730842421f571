"""How likely given texts are: the log-probability of chosen tokens behind what stands before them, and whether greedy decoding would write them.

Rows are right-padded and not packed. Which texts share a batch, and what their numbers mean, is decided in `training/`.
"""

import flax.struct
import jax
import jax.numpy as jnp

from tlt_jax.logprobs import chunked_greedy_logprobs, linear_head
from tlt_jax.models import decoder
from tlt_jax.models.specs import PolicySpec


@flax.struct.dataclass
class ContinuationBatch:
    """Rows of tokens, and what is asked about them. A column may be asked about more than once: answers that share all but their last token share a row."""

    tokens_BT: jax.Array  # int32, padded at the end
    columns_BM: jax.Array  # int32, the column before each token that is scored; padding is column 0
    targets_BM: jax.Array  # int32, the tokens that are scored; padding is token 0


def score_continuations(spec: PolicySpec, params: dict, batch: ContinuationBatch) -> tuple[jax.Array, jax.Array]:
    """(log-probability of each target, whether it is the most probable token), both [B, M]; padding has a number too, which means nothing."""
    features_BTD = decoder.forward(spec, params, batch.tokens_BT, compute_logits=False).features_BTD
    asked_BMD = jnp.take_along_axis(features_BTD, batch.columns_BM[..., None], axis=1)
    rows, targets, width = asked_BMD.shape
    matrix, tied = decoder.head_matrix(spec, params)
    logprobs_N, greedy_N = chunked_greedy_logprobs(asked_BMD.reshape(rows * targets, width), linear_head(matrix, tied=tied), batch.targets_BM.reshape(-1))
    return logprobs_N.reshape(rows, targets), greedy_N.reshape(rows, targets)
