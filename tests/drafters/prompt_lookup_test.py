"""Prompt lookup: the latest of the longest matches comes first, and a match near the end goes on periodically."""

import jax.numpy as jnp
import numpy as np
import pytest

from tlt_jax.drafters.drafter import PolicyView, Root
from tlt_jax.drafters.prompt_lookup import PromptLookup, chain_lengths, matches
from tlt_jax.strategies import Strategy


def root_of(text, slots=24):
    tokens = np.zeros((1, slots), np.int32)
    tokens[0, : len(text)] = text
    return Root(jnp.array([text[-1]]), jnp.array([len(text) - 1]), jnp.asarray(tokens))


def proposed(text, strategy, peers=(), slots=24):
    """What a row proposes that can read the texts `peers`."""
    peers_BKS = None
    if peers:
        peers_BKS = jnp.array([[[*one, *[-1] * (slots - len(one))] for one in peers]])
    return PromptLookup(longest=3).propose({}, PolicyView({}, None), None, root_of(text, slots)._replace(peers_BKS=peers_BKS), None, strategy)


@pytest.mark.parametrize(("text", "chain"), [
    ([1, 2, 3, 4, 9, 1, 2], [3, 4, 9]),  # after 1 2 came 3 4 9
    ([1, 2, 3, 5, 2, 8, 8, 1, 2], [3, 5, 2]),  # two tokens alike beat the later place with one
    ([7, 2, 3, 6, 2, 4, 5, 2], [4, 5, 2]),  # equal lengths: the latest
    ([1, 2, 1, 2, 1, 2], [1, 2, 1]),  # a period of 2 goes on past the end of the text
    ([3, 3], [3, 3, 3])])
def test_what_followed_the_longest_and_latest_match_is_proposed(text, chain):
    assert proposed(text, Strategy(3, 1, 3)).tokens_BN.tolist() == [chain]


def test_a_budget_of_two_chains_takes_the_two_best_places():
    tree = proposed([1, 2, 3, 5, 2, 8, 8, 1, 2], Strategy(3, 2, 5))
    assert tree.tokens_BN.tolist() == [[3, 5, 2, 8, 8]] and tree.parents_BN.tolist() == [[0, 1, 2, 0, 4]] and tree.depth_BN.tolist() == [[1, 2, 3, 1, 2]]


def test_tokens_behind_the_text_never_match():
    tokens = np.full((1, 16), 4, np.int32)
    tokens[0, :3] = [1, 2, 4]
    root = Root(jnp.array([4]), jnp.array([2]), jnp.asarray(tokens))
    assert matches(root.tokens_BS[:, None], root, 3, 1)[1].tolist() == [[-1]]


@pytest.mark.parametrize(("text", "peers", "chain"), [
    ([1, 2], ([5, 1, 2, 8, 9, 3],), [8, 9, 3]),  # only a peer knows
    ([1, 2, 6, 1, 2], ([5, 1, 2, 8, 9, 3],), [6, 1, 2]),  # equal matches: the row's own text
    ([1, 2, 6, 4, 2], ([6, 4, 2, 8, 9],), [8, 9, 0]),  # a longer one in a peer, which ends before the chain does
    ([1, 2], ([5, 1, 2],), [1, 2, 1])])  # the peer has nothing after the match: no match at all
def test_texts_of_the_same_prompt_are_looked_into(text, peers, chain):
    assert proposed(text, Strategy(3, 1, 3), peers).tokens_BN.tolist() == [chain]


@pytest.mark.parametrize("strategy", [Strategy(4, 2, 8), Strategy(4, 2, 14), Strategy(3, 1, 3), Strategy(5, 3, 7)])
def test_the_chains_use_the_budget_and_are_no_deeper_than_the_depth(strategy):
    lengths = chain_lengths(strategy)
    assert sum(lengths) == strategy.budget and max(lengths) <= strategy.depth
