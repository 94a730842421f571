"""Mixing drafters of several slices: nothing that was learned is lost, one slice is exact, idle slices change nothing."""

import jax
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tlt_jax.distillation.aggregation import State, Trained, alpha_from, folded, mixed, start_of_loan

alphas = st.floats(0.25, 1.0)
seeds = st.integers(0, 2**32 - 1)
quanta_of_slices = st.dictionaries(st.integers(0, 9), st.integers(0, 7), max_size=5)
working = quanta_of_slices.filter(lambda quanta: any(quanta.values()))


def some_params(chance):
    return {"layer": {"kernel": chance.normal(size=(3, 2)).astype(np.float32)}, "norm": np.array([-0.0, 0.0, chance.normal()], np.float32)}


def some_state(chance, count=0):
    """Parameters with a negative zero, and an AdamW state of optax that has made `count` updates."""
    params = some_params(chance)
    empty = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(0.1, 0.0, 10))).init(params)
    fill = jax.tree.map(lambda leaf: np.asarray(count if leaf.ndim == 0 else chance.normal(size=leaf.shape), leaf.dtype), empty)
    return State(params, fill)


def drawn(seed, quanta):
    """A master, and slices that ended somewhere else."""
    chance = np.random.default_rng(seed)
    return some_state(chance), {number: Trained(some_state(chance, count), count) for number, count in quanta.items()}


def assert_same(found, expected, exact=False):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert isinstance(one, np.ndarray) and one.dtype == other.dtype
        if exact:
            assert one.tobytes() == other.tobytes()
        else:
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def weighted(weights, trees):
    return jax.tree.map(lambda *leaves: np.tensordot(weights, np.stack(leaves).astype(np.float64), 1).astype(np.float32), *trees)


def shares(trained):
    counts = np.array([one.quanta for one in trained.values()])
    return counts / counts.sum()


@settings(deadline=None)
@given(seeds, working, alphas)
def test_the_next_loans_start_on_the_average_where_the_last_ones_ended(seed, quanta, alpha):
    master, trained = drawn(seed, {number: count for number, count in quanta.items() if count})
    new, residuals = mixed(master, trained, alpha)
    starts = [start_of_loan(new.params, residuals[number]) for number in trained]
    assert_same(weighted(shares(trained), starts), weighted(shares(trained), [one.state.params for one in trained.values()]))


@settings(deadline=None)
@given(seeds, working, alphas)
def test_the_master_moves_alpha_of_the_way_to_the_average_and_a_slice_keeps_the_rest_of_its_own(seed, quanta, alpha):
    master, trained = drawn(seed, quanta)
    new, residuals = mixed(master, trained, alpha)
    average = weighted(shares(trained), [one.state.params for one in trained.values()])
    assert_same(new.params, jax.tree.map(lambda old, mean: old + np.float32(alpha) * (mean - old), master.params, average))
    for number, residual in residuals.items():
        assert_same(residual, jax.tree.map(lambda end, old: np.float32(1 - alpha) * (end - old), trained[number].state.params, master.params))
    if alpha == 1:
        assert_same(new.params, average)


@settings(deadline=None)
@given(seeds, working)
def test_the_optimizer_state_is_averaged_by_updates_and_counts_stay_integers(seed, quanta):
    master, trained = drawn(seed, quanta)
    new, _ = mixed(master, trained, 1.0)
    found, parts = jax.tree.leaves(new.opt_state), [jax.tree.leaves(one.state.opt_state) for one in trained.values()]
    assert jax.tree.structure(new.opt_state) == jax.tree.structure(master.opt_state)
    for leaf, *leaves in zip(found, *parts, strict=True):
        assert leaf.dtype == leaves[0].dtype
        rounding = 0.5 if leaf.dtype == np.int32 else 0
        np.testing.assert_allclose(leaf, np.tensordot(shares(trained), np.stack(leaves), 1), rtol=1e-5, atol=rounding + 1e-5)


@settings(deadline=None)
@given(seeds, st.integers(1, 9))
def test_one_slice_with_alpha_1_becomes_the_master_bit_for_bit(seed, count):
    master, trained = drawn(seed, {3: count, 5: 0})
    new, residuals = mixed(master, trained, 1.0)
    assert_same(new, trained[3].state, exact=True)
    assert list(residuals) == [3] and not any(leaf.any() for leaf in jax.tree.leaves(residuals))


@settings(deadline=None)
@given(seeds, quanta_of_slices, alphas)
def test_a_slice_that_made_no_update_changes_nothing_and_gets_no_new_residual(seed, quanta, alpha):
    master, trained = drawn(seed, quanta)
    found, residuals = mixed(master, trained, alpha)
    expected, others = mixed(master, {number: one for number, one in trained.items() if one.quanta}, alpha)
    assert_same((found, residuals), (expected, others), exact=True)
    assert set(residuals) == {number for number, count in quanta.items() if count}
    if not residuals:
        assert_same(found, master, exact=True)


@settings(deadline=None)
@given(seeds, working, alphas, st.randoms())
def test_neither_the_order_of_the_slices_nor_their_numbers_matter(seed, quanta, alpha, random):
    master, trained = drawn(seed, quanta)
    order = random.sample(list(trained), len(trained))
    found, residuals = mixed(master, trained, alpha)
    assert_same(mixed(master, {number: trained[number] for number in order}, alpha), (found, residuals), exact=True)
    renamed, others = mixed(master, {9 - number: one for number, one in trained.items()}, alpha)
    assert_same(renamed.params, found.params)
    assert_same({9 - number: residual for number, residual in others.items()}, residuals)


@settings(deadline=None)
@given(seeds, working, alphas)
def test_what_goes_in_is_not_written_to(seed, quanta, alpha):
    (master, trained), (master_before, trained_before) = drawn(seed, quanta), drawn(seed, quanta)
    new, residuals = mixed(master, trained, alpha)
    mean = folded(residuals)
    for leaf in jax.tree.leaves((new, start_of_loan(new.params, mean), mean)):
        leaf[...] = 7
    assert_same(master, master_before, exact=True)
    for number, one in trained.items():
        assert_same(one.state, trained_before[number].state, exact=True)


def test_a_changed_topology_folds_the_mean_residual_in():
    params = some_params(np.random.default_rng(0))
    ones, threes = (jax.tree.map(lambda leaf, by=by: np.full_like(leaf, by), params) for by in (1, 3))
    assert_same(start_of_loan(params, folded({4: ones, 1: threes})), jax.tree.map(lambda leaf: leaf + np.float32(2), params))
    assert folded({}) is None and start_of_loan(params, None) is params


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_alpha_stays_in_its_bounds_and_rises_with_what_the_merge_kept(merged, better, best_local):
    low, high = sorted((merged, better))
    assert 0.25 <= alpha_from(low, best_local) <= alpha_from(high, best_local) <= 1
    assert alpha_from(merged, 0.0) == 1
    if best_local:
        assert alpha_from(best_local, best_local) == 1 and alpha_from(0.0, best_local) == 0.25


def test_alpha_is_what_a_relative_drop_of_the_merge_leaves():
    assert alpha_from(0.6, 0.8) == pytest.approx(1 - (0.8 - 0.6) / 0.8)
