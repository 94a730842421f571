"""Which decode programs a slice compiles: plain decoding for every number of rows, strategies where rows are few, as far as a budget goes. Pure."""

from collections.abc import Sequence

from tlt_jax.scheduling.strategy_selector import SelectorSettings
from tlt_jax.strategies import Strategy


def compile_plan(sizes: Sequence[int], settings: SelectorSettings, most: int) -> dict[int, tuple[Strategy, ...]]:
    """The strategies of each number of rows beside plain decoding, so that all programs together are at most `most`.

    Plain decoding is never left out. The budget goes to few rows first, where speculation pays most, and to all strategies of one number of rows or to the
    first of them. Under `fixed` only the first strategy is ever used.
    """
    arms = settings.strategies[:1] if settings.kind == "fixed" else settings.strategies
    left, plan = most - len(sizes), {}
    for size in sorted(sizes):
        plan[size] = arms[: max(left, 0)] if size <= settings.max_rows else ()
        left -= len(plan[size])
    return plan
