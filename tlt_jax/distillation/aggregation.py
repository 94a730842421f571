"""One drafter out of those that several borrowed slices have trained: a master on the host, and a residual for each slice of what a merge did not take over.

A loan starts at `local = master + residual_i`. A merge with w_i = slice i's share of the updates since the last merge and delta_i = local_i - master makes

    master' = master + alpha · Σ w_i · delta_i        residual_i' = (1 - alpha) · delta_i

so Σ w_i · (master' + residual_i') = Σ w_i · local_i: on the average, the next loans start where these ended, whatever alpha.
All trees hold numpy arrays, on the host.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

LEAST_ALPHA = 0.25


class State(NamedTuple):
    """A drafter in training: float32 parameters, and the state of their optimizer."""

    params: Any
    opt_state: Any


class Trained(NamedTuple):
    """What a slice made of its loan in so many updates since the last merge."""

    state: State
    quanta: int


def mixed(master: State, trained: Mapping[int, Trained], alpha: float) -> tuple[State, dict[int, Any]]:
    """The next master, and the new residual of every slice that made an update; the others take no part and keep the residual that they have.

    Optimizer states are averaged with w, and integers in them (counts of updates) rounded. With alpha = 1 the master is the average of the locals:
    for one slice its very bits. The order of the mapping is of no account.
    """
    taking_part = [(number, trained[number]) for number in sorted(trained) if trained[number].quanta]
    if not taking_part:
        return master, {}
    quanta = sum(one.quanta for _, one in taking_part)
    weights, states = [one.quanta / quanta for _, one in taking_part], [one.state for _, one in taking_part]

    def moved(old, *leaves):
        mean = average(weights, leaves)
        return mean if alpha == 1 else np.asarray(old + alpha * (mean - old), old.dtype)

    params = jax.tree.map(moved, master.params, *(state.params for state in states))
    opt_state = jax.tree.map(lambda *leaves: average(weights, leaves), *(state.opt_state for state in states))
    residuals = {
        number: jax.tree.map(lambda new, old: np.asarray((1 - alpha) * (new - old), old.dtype), one.state.params, master.params) for number, one in taking_part}
    return State(params, opt_state), residuals


def start_of_loan(master_params, residual):
    """The parameters with which a slice starts; `residual` None for a slice that has none."""
    return master_params if residual is None else jax.tree.map(np.add, master_params, residual)


def alpha_from(merged: float, best_local: float) -> float:
    """How much of what the slices learned the master takes over, from 0.25 to 1: as much as the full merge (alpha = 1) kept of the best local drafter's
    held-out 1 - TV. 1 when there is nothing to lose."""
    return min(max(merged / best_local, LEAST_ALPHA), 1.0) if best_local > 0 else 1.0


def folded(residuals: Mapping[int, Any]):
    """The mean residual, None without any. Where slice ids lose their meaning (another topology), the master takes it over as a loan would."""
    trees = [residuals[number] for number in sorted(residuals)]
    return jax.tree.map(lambda *leaves: average([1 / len(trees)] * len(trees), leaves), *trees) if trees else None


def shared(quanta: Sequence[int], leaves: Sequence[np.ndarray]) -> np.ndarray:
    """One leaf of the drafter that several hosts have trained, each in so many updates: their average with w, the same bits on every host."""
    taking_part = [(count, leaf) for count, leaf in zip(quanta, leaves, strict=True) if count]
    return average([count / sum(quanta) for count, _ in taking_part], [leaf for _, leaf in taking_part])


def average(weights: Sequence[float], leaves: Sequence[np.ndarray]) -> np.ndarray:
    """Σ w · leaf in the leaves' own type. It starts from the first term, not from 0, so that one leaf of weight 1 keeps even the sign of a zero."""
    total = weights[0] * leaves[0]
    for weight, leaf in zip(weights[1:], leaves[1:], strict=True):
        total = total + weight * leaf
    kind = leaves[0].dtype
    return np.asarray(np.rint(total) if np.issubdtype(kind, np.integer) else total, kind)
