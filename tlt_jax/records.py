"""Array structs that cross borders, and the glossary of dimension suffixes.

Arrays of rank ≥ 2 in device code end in their dimension keys, and einsum strings use the same letters:

    B rows              T new tokens        S cache positions    D width           L layers
    H query heads       K key/value heads   C channels per head  F MLP hidden      V vocabulary
    N tree nodes        G group (query heads of one key/value head, or samples of one prompt)
    P prompts of one admission, I pieces    R decode rounds of one dispatch      A slots of one admission
    Q prompts of one prefill                M response tokens of a packed row    Z stop ids
    J tokens of the longest path of a tree (levels + 1)    W positions of a feature ring    X root and nodes of a tree (N + 1)
    E candidates of one node                U nodes that one level expands      Y pairs of a packed row

This module holds arrays only; host-side values live in `strategies.py`.
"""

import flax.struct
import jax


@flax.struct.dataclass
class SamplingParams:
    """Sampling settings as traced scalars, so that changing one recompiles nothing."""

    temperature: jax.Array  # float32; 0 = greedy
    top_k: jax.Array  # int32; 0 = off
    top_p: jax.Array  # float32; 1 = off
    min_p: jax.Array  # float32; 0 = off
    vocabulary: jax.Array  # int32; ids at or above it (padding rows of the embedding) are never drawn


@flax.struct.dataclass
class Tree:
    """Draft tokens of each row below its last token, the root, which is node 0 and not listed. Parents stand before their children."""

    tokens_BN: jax.Array  # int32
    parents_BN: jax.Array  # int32, 0 = the root, n = the nth entry of this list
    depth_BN: jax.Array  # int32, 1 = child of the root


@flax.struct.dataclass
class Emitted:
    """What one dispatch of decode rounds produced; columns past `count_B` are unspecified."""

    tokens_BR: jax.Array  # int32
    logprobs_BR: jax.Array  # float32, log-softmax(logits / temperature) of the drawn token
    sampling_logprobs_BR: jax.Array  # float32, the same over the kept set of top-k / top-p / min-p
    count_B: jax.Array  # int32, columns filled in this dispatch
    forwards_B: jax.Array  # int32, rounds in which the row decoded
    finish_B: jax.Array  # int32, one of the FINISH_* codes of strategies.py
    rounds: jax.Array  # int32 scalar, rounds that ran
    features_BRF: jax.Array | None = None  # where features are streamed: column j is of the position before the jth token


@flax.struct.dataclass
class PackedBatch:
    """Sequences packed into rows; a segment id per position, 0 = padding.

    Per-token numbers sit at the column of the token they are about (it is predicted from the column before, in the same
    segment). `mask_BT` is 1 on response tokens that are trained on.
    """

    tokens_BT: jax.Array  # int32
    positions_BT: jax.Array  # int32, absolute position inside the sequence
    segments_BT: jax.Array  # int32, 1.. per row, 0 = padding
    targets_BM: jax.Array  # int32 columns of the response tokens of each row; T = padding
    mask_BT: jax.Array  # float32
    advantages_BT: jax.Array  # float32
    old_logprobs_BT: jax.Array  # float32
    rollout_logprobs_BT: jax.Array  # float32
    reference_logprobs_BT: jax.Array  # float32, zeros when no reference is used
    old_values_BT: jax.Array  # float32, zeros without a critic
    returns_BT: jax.Array  # float32, zeros without a critic
    beta: jax.Array  # float32 scalar, weight of the KL to the reference in the loss


@flax.struct.dataclass
class PairBatch:
    """Pairs of a better and a worse sequence packed into rows, both of a pair in one row; every sequence is a segment of its own."""

    tokens_BT: jax.Array  # int32
    positions_BT: jax.Array  # int32, absolute position inside the sequence
    segments_BT: jax.Array  # int32, 1.. per row, 0 = padding
    better_BY: jax.Array  # int32 column of the last token of each better sequence; T = no pair
    worse_BY: jax.Array  # int32 column of the last token of the worse one
