"""Rows that move to another slice while they decode: the tokens of rows that stay, a slice that becomes free, and no compilation on the way."""

import dataclasses
import itertools
import time

import numpy as np
import pytest

from tests.runtime.lending_test import Slice
from tests.runtime.rollout_driver_test import assert_same
from tlt_jax.distillation.aggregation import State
from tlt_jax.drafters.eagle import Eagle
from tlt_jax.drafters.feature_drafter import layer_like
from tlt_jax.drafters.prompt_lookup import PromptLookup
from tlt_jax.runtime.event_loop import roll_out
from tlt_jax.runtime.lending import Drafter, Lending, LendingSettings, Work
from tlt_jax.runtime.programs import compile_counter
from tlt_jax.runtime.rollout_driver import row_buckets
from tlt_jax.scheduling.slices import LoanSettings
from tlt_jax.scheduling.strategy_selector import SelectorSettings
from tlt_jax.strategies import OFF, Strategy

CHAIN = Strategy(2, 1, 2)
LIMITS = (60, 4, 8, 24, 60, 4)  # of the samples in turn: most slices are left with a few long rows
SIX = (60, 4, 4, 60, 60, 4)  # of six samples: two slices, three samples each, are left with one long row and with two


@pytest.fixture(scope="module")
def requests(tiny):
    rows = tiny.requests(tiny.prompts(), 4)
    return [dataclasses.replace(row, max_new_tokens=LIMITS[row.index % len(LIMITS)]) for row in rows]


@pytest.fixture(scope="module")
def reference(engine_of, requests):
    return engine_of().run(requests)


@pytest.fixture(scope="module")
def drafters(tiny):
    return {"plain": None, "eagle": Eagle(tiny.spec, layer_like(tiny.spec), 17), "prompt_lookup": PromptLookup(segments=32)}


def settings_of(tiny, drafter, **changes):
    strategies = () if drafter is None else (CHAIN,)
    return dataclasses.replace(tiny.settings, selector=SelectorSettings("fixed", strategies), rounds_per_dispatch=1, consolidate=True, **changes)


def alike(driver):
    """Costs that always allow a move."""
    return {(size, strategy): 1.0 for size in row_buckets(driver.slots) for strategy in (OFF, CHAIN)}


def run(drivers, requests, costs=alike):
    """({index: Completion}, rows that moved, most rows that were left to decode when only one slice had some); what was free was lent and had no rows."""
    for driver in drivers:
        driver.choice.costs = costs(driver)
    lending = Lending(LendingSettings(LoanSettings(), sync_every=5, adaptive=True, consolidate=True), [Slice(time.monotonic, driver) for driver in drivers])
    lending.start(Drafter(State({"x": np.float32(0)}, {}), {}), Work([{}] * len(drivers), lambda: None, None, ()))
    done, turns, together, lent = [], itertools.count(), 0, 0

    def watch():
        nonlocal together, lent
        assert next(turns) < 100_000, "a lost row never ends"
        rows = [driver.active for driver in drivers]
        if sum(map(bool, rows)) == 1:
            together, lent = max(together, sum(rows)), max(lent, len(lending._open))

    roll_out(drivers, requests, done.append, watch, lending)
    lending.end()
    assert sorted(completion.request.index for completion in done) == sorted(request.index for request in requests)
    assert not any(driver.active or driver.in_flight for driver in drivers)
    if lending.report.moved_rows:
        assert lent == len(drivers) - 1
    return {completion.request.index: completion for completion in done}, lending.report.moved_rows, together


@pytest.mark.parametrize(("name", "layout"), [
    ("plain", dict(devices=4, slices=2, tensor=2)), ("eagle", dict(devices=2, slices=2)), ("plain", dict(devices=4, slices=4)),
    ("prompt_lookup", dict(devices=2, slices=2))], ids=str)
def test_rows_that_move_together_draw_the_tokens_of_rows_that_stay(engine_of, tiny, requests, reference, drafters, name, layout, pytestconfig):
    if not pytestconfig.getoption("full") and (name == "prompt_lookup" or layout["slices"] == 4):
        pytest.skip("the rest of the product: --full")
    drivers = engine_of(**layout, drafter=drafters[name]).drivers(settings_of(tiny, drafters[name], slots=16))
    done, moved, together = run(drivers, requests)
    assert moved > 0 and together > 1
    assert_same(tiny, reference, done, temperature=1.0)
    for index, completion in done.items():
        if completion.token_ids == reference[index].token_ids:
            np.testing.assert_allclose(completion.logprobs, reference[index].logprobs, atol=1e-4)


def test_without_measured_rounds_no_row_moves(engine_of, tiny, requests):
    drivers = engine_of(devices=4, slices=4).drivers(settings_of(tiny, None, slots=16))
    _, moved, _ = run(drivers, requests, lambda driver: {})
    assert moved == 0


def test_a_move_waits_for_no_compiler_when_programs_were_compiled_ahead_and_rounds_were_timed(engine_of, tiny, requests, drafters):
    engine = engine_of(devices=2, slices=2, drafter=drafters["eagle"])
    drivers = engine.drivers(settings_of(tiny, drafters["eagle"], slots=4, compile_ahead=True))
    for driver in drivers:
        driver.fit(driver.slots)
        assert set(driver.choice.costs) == set(alike(driver)) and min(driver.choice.costs.values()) > 0
    engine.start(drivers)
    before, moved = compile_counter().count, 0
    for shift in range(3):  # rows end in other orders
        engine.start(drivers)
        rows = [dataclasses.replace(row, max_new_tokens=SIX[(row.index + shift) % len(SIX)]) for row in requests[: len(SIX)]]
        _, rows_moved, _ = run(drivers, rows)
        moved += rows_moved
    assert moved > 0 and compile_counter().count == before
