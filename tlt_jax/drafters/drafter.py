"""The protocol of a drafter, and what it is given. A drafter is a frozen, hashable description; its parameters and its state are pytrees."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax

from tlt_jax.models.kv_cache import KVCache
from tlt_jax.records import Tree
from tlt_jax.strategies import Strategy

# pick(logits_BUV, level, count, ids_V=None) → (ids_BUE, score_BUE): the `count` best children of nodes at `level` under the policy's own noise, and the
# log-probability that each is the policy's pick. `ids_V` are the global ids of a reduced vocabulary.
Pick = Callable[..., tuple[jax.Array, jax.Array]]


class PolicyView(NamedTuple):
    """The policy as drafters see it: shared and traced, never copied."""

    params: dict
    cache: KVCache


class Root(NamedTuple):
    """Where a tree starts: the last token of each row, which is not in the policy's cache yet, and the text up to it."""

    token_B: jax.Array
    position_B: jax.Array
    tokens_BS: jax.Array  # the row's text by position; past `position_B` unspecified
    peers_BKS: jax.Array | None = None  # other texts of the same prompt, −1 past their ends, for a drafter that asks for `segments`


class Window(NamedTuple):
    """Committed positions that a drafter has not seen: column j is about position start + j and holds its feature and the token one further on."""

    next_tokens_BT: jax.Array
    features_BTF: jax.Array
    start_B: jax.Array
    count_B: jax.Array  # columns that are real


class Drafter(Protocol):
    """What proposes trees."""

    features: int  # width F of the policy's features that it reads; 0 = none
    capture_layers: tuple[int, ...]  # where they are taken; empty = the final ones
    segments: int  # texts that a slice keeps for it beside those of the rows; 0 = it looks into no other text

    def init_params(self, rng: jax.Array, policy_params: dict) -> dict:
        """Parameters before any training."""

    def prepare(self, params: dict, policy_params: dict) -> dict:
        """What `propose` and `extend` work with: parameters and what follows from the policy's, made once for each published version."""

    def init_state(self, rows: int, length: int, dtype, block: int):
        """State of rows that have seen nothing."""

    def forget(self, state, rows_B: jax.Array):
        """The state with the given rows as new."""

    def extend(self, params: dict, policy_params: dict, state, window: Window):
        """Take in committed positions with their true features."""

    def propose(self, params: dict, policy: PolicyView, state, root: Root, pick: Pick, strategy: Strategy) -> Tree:
        """A tree of `strategy.budget` nodes below each row's last token."""

    def gather_rows(self, state, index_B: jax.Array):
        """Rows in a new order or number."""

    def put_rows(self, state, slots_A: jax.Array, source):
        """The rows of another state in slots of this one; a slot past the end is none."""


class Stateless:
    """What a drafter without weights, features and state answers to everything but `propose`."""

    features = 0
    capture_layers = ()
    segments = 0

    def init_params(self, rng: jax.Array, policy_params: dict) -> dict:
        """Nothing."""
        return {}

    def prepare(self, params: dict, policy_params: dict) -> dict:
        """Nothing."""
        return {}

    def init_state(self, rows: int, length: int, dtype, block: int):
        """None."""
        return None

    def forget(self, state, rows_B: jax.Array):
        """Still none."""
        return state

    def extend(self, params: dict, policy_params: dict, state, window: Window):
        """Still none."""
        return state

    def gather_rows(self, state, index_B: jax.Array):
        """Still none."""
        return state

    def put_rows(self, state, slots_A: jax.Array, source):
        """Still none."""
        return state
