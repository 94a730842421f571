"""Prompt lookup: the latest of the longest matches comes first, and a match near the end goes on periodically."""

import jax.numpy as jnp
import numpy as np
import pytest

from tlt_jax.drafters.drafter import PolicyView, Root
from tlt_jax.drafters.prompt_lookup import PromptLookup, chain_lengths, matches
from tlt_jax.strategies import Strategy


def proposed(text, strategy, slots=24):
    tokens = np.zeros((1, slots), np.int32)
    tokens[0, : len(text)] = text
    root = Root(jnp.array([text[-1]]), jnp.array([len(text) - 1]), jnp.asarray(tokens))
    return PromptLookup(longest=3).propose({}, PolicyView({}, None), None, root, None, strategy)


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
    assert matches(jnp.asarray(tokens), jnp.array([2]), 3, 1).tolist() == [[-1]]


@pytest.mark.parametrize("strategy", [Strategy(4, 2, 8), Strategy(4, 2, 14), Strategy(3, 1, 3), Strategy(5, 3, 7)])
def test_the_chains_use_the_budget_and_are_no_deeper_than_the_depth(strategy):
    lengths = chain_lengths(strategy)
    assert sum(lengths) == strategy.budget and max(lengths) <= strategy.depth
