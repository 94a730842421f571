"""Draft trees: their form for any scores, and which nodes are kept."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as draws

from tlt_jax.decoding.verification import ancestors, cut, walk
from tlt_jax.drafters.tree_growth import grow
from tlt_jax.records import Tree
from tlt_jax.strategies import FINISH_LENGTH, FINISH_RUNNING, FINISH_STOP, Strategy, parse_strategies

VOCABULARY = 12


def grown(strategy, seed, rows=3, spread=1.0):
    """(tree, log-probability of each node's token under its parent): every level has random scores of its own."""
    random = np.random.default_rng(seed)

    def pick(logits_BUV, level, count):
        order = np.argsort(-np.asarray(logits_BUV), axis=-1)[..., :count]
        return jnp.asarray(order), jnp.take_along_axis(jnp.asarray(logits_BUV), jnp.asarray(order), axis=-1)

    def scores(nodes):
        return jnp.asarray(np.log(random.dirichlet(np.full(VOCABULARY, spread), (rows, nodes)) + 1e-12).astype(np.float32))

    def expand(carry, level, beam):
        return scores(beam.tokens_BU.shape[1]), carry

    return grow(scores(1)[:, 0], expand, None, pick, strategy)


TREES = [Strategy(1, 1, 1), Strategy(1, 4, 3), Strategy(3, 1, 3), Strategy(2, 3, 9), Strategy(4, 2, 8), Strategy(3, 4, 20), Strategy(5, 2, 5)]


@settings(max_examples=40, deadline=None)
@given(draws.sampled_from(TREES), draws.integers(0, 10**6))
def test_a_tree_has_its_budget_of_nodes_parents_before_children_distinct_siblings_and_no_more_levels_than_its_depth(strategy, seed):
    tree = grown(strategy, seed)
    tokens, parents, depth = (np.asarray(leaf) for leaf in (tree.tokens_BN, tree.parents_BN, tree.depth_BN))
    assert tokens.shape == (3, strategy.budget) and depth.min() == 1 and depth.max() <= strategy.depth
    for row in range(3):
        levels = np.append(0, depth[row])
        for node, parent in enumerate(parents[row], start=1):
            assert 0 <= parent < node and levels[node] == levels[parent] + 1
        children = list(zip(parents[row], tokens[row], strict=True))
        assert len(set(children)) == len(children)


@settings(max_examples=20, deadline=None)
@given(draws.sampled_from(TREES), draws.integers(0, 10**6))
def test_the_ancestor_matrix_is_the_closure_of_the_parents(strategy, seed):
    tree = grown(strategy, seed, rows=1)
    seen = np.asarray(ancestors(tree.parents_BN, strategy.depth))[0]
    for node in range(strategy.budget + 1):
        line, at = {node}, node
        while at:
            at = int(tree.parents_BN[0, at - 1])
            line.add(at)
        assert set(np.flatnonzero(seen[node])) == line


def test_a_chain_of_improbable_tokens_keeps_its_order():
    """Twelve levels of 1e-4 and less: sums of logarithms do not underflow."""
    tree = grown(Strategy(12, 2, 16), 5, spread=0.01)
    assert np.asarray(tree.depth_BN).max() > 1 and np.isfinite(np.asarray(tree.tokens_BN)).all()


TREE = Tree(jnp.array([[5, 7, 5, 9]]), jnp.array([[0, 0, 1, 3]]), jnp.array([[1, 1, 2, 3]]))  # root → 5 → 5 → 9, root → 7


@pytest.mark.parametrize(("drawn", "path", "accepted"), [
    ([5, 5, 0, 9, 3], [0, 1, 3, 4], 3), ([7, 5, 2, 9, 3], [0, 2, 2, 2], 1), ([1, 5, 5, 9, 3], [0, 0, 0, 0], 0), ([5, 4, 0, 9, 3], [0, 1, 1, 1], 1)])
def test_the_walk_follows_the_drawn_tokens_while_they_are_children(drawn, path, accepted):
    found, count = walk(TREE, jnp.array([drawn]), 3)
    assert found.tolist() == [path] and count.tolist() == [accepted]


@pytest.mark.parametrize(("remaining", "stops", "count", "finish"), [
    (9, [-1], 4, FINISH_RUNNING), (4, [-1], 4, FINISH_LENGTH), (2, [-1], 2, FINISH_LENGTH), (9, [6], 2, FINISH_STOP), (2, [6], 2, FINISH_STOP),
    (1, [6], 1, FINISH_LENGTH), (9, [8], 4, FINISH_STOP), (9, [99, 4], 1, FINISH_STOP)])
def test_a_row_ends_at_the_first_stop_id_or_at_its_limit_and_stop_wins_at_the_same_token(remaining, stops, count, finish):
    kept = cut(jnp.array([[4, 6, 5, 8, 6]]), jnp.array([3]), jnp.array([remaining]), jnp.array(stops))
    assert kept.count_B.tolist() == [count] and kept.finish_B.tolist() == [finish]


def test_strategies_are_read_from_text():
    assert parse_strategies("4_2_8, 6_1_6") == (Strategy(4, 2, 8), Strategy(6, 1, 6))
