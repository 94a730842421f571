"""Speculative rollouts through the drivers: the tokens of plain ones, whatever the drafter, the slices, the order and the moment of switching."""

import dataclasses
import functools
import itertools
import random

import jax
import numpy as np
import pytest

from tests.runtime.rollout_driver_test import assert_same, drive
from tlt_jax.drafters.eagle import Eagle
from tlt_jax.drafters.eagle3 import Eagle3
from tlt_jax.drafters.feature_drafter import layer_like
from tlt_jax.drafters.prompt_lookup import PromptLookup
from tlt_jax.drafters.truncated import Truncated
from tlt_jax.runtime import measured_choice
from tlt_jax.runtime.programs import compile_counter
from tlt_jax.scheduling.peer_texts import AnswerHistory
from tlt_jax.scheduling.strategy_selector import SelectorSettings
from tlt_jax.strategies import OFF, Strategy

SAMPLINGS = {
    "greedy": dict(temperature=0.0), "cool": dict(temperature=0.7), "plain": dict(temperature=1.0), "hot": dict(temperature=1.5),
    "top_k": dict(temperature=1.0, top_k=5), "top_p": dict(temperature=0.9, top_p=0.8), "min_p": dict(temperature=1.2, min_p=0.1)}
AXES = {
    "sampling": tuple(SAMPLINGS), "drafter": ("eagle", "eagle3", "truncated", "prompt_lookup", "adversary"), "strategy": ("chain", "tree", "random"),
    "slices": (1, 2, 4), "order": ("given", "shuffled")}
CHAIN, TREE = Strategy(3, 1, 3), Strategy(3, 2, 6)
SHALLOW_CHAIN, SHALLOW_TREE = Strategy(2, 1, 2), Strategy(2, 2, 4)  # a third of the compilation less, which is what these tests spend their time on


@pytest.fixture(scope="module")
def drafters(tiny):
    layer = layer_like(tiny.spec)
    return {
        "truncated": Truncated(tiny.spec, 1), "oracle": Truncated(tiny.spec, tiny.spec.num_layers), "prompt_lookup": PromptLookup(segments=8),
        "eagle": Eagle(tiny.spec, layer, 17), "eagle3": Eagle3(tiny.spec, layer, 17, (0, 1))}


@pytest.fixture(scope="module")
def requests(tiny):
    return tiny.requests(tiny.prompts(), 2)


@pytest.fixture(scope="module")
def reference(engine_of, requests):
    return engine_of().run(requests)


def speculating(tiny, *strategies, kind="fixed", max_rows=32, **changes):
    return dataclasses.replace(tiny.settings, selector=SelectorSettings(kind, strategies, max_rows=max_rows), **changes)


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        cases = list(itertools.product(*AXES.values())) if metafunc.config.getoption("--full") else pairwise()
        cases.sort(key=lambda case: (case[1], case[3], case[2]))  # what shares compiled programs side by side
        metafunc.parametrize("case", cases, ids=lambda case: "-".join(map(str, case)))


def pairwise() -> list[tuple]:
    """35 of the product's cases, in which every two values of different axes meet; few combinations of what is compiled."""
    samplings, drafters, strategies, slices, orders = AXES.values()
    places = [(j, i, (i + j) % 3, (2 * i + j) % 3, (i + j // 3) % 2) for i in range(len(drafters)) for j in range(len(samplings))]
    return [(samplings[a], drafters[b], strategies[c], slices[d], orders[e]) for a, b, c, d, e in places]


def test_the_small_set_of_cases_covers_every_pair():
    for one, other in itertools.combinations(range(len(AXES)), 2):
        values = list(AXES.values())
        assert {(case[one], case[other]) for case in pairwise()} == set(itertools.product(values[one], values[other]))
    assert len(pairwise()) <= 40


@pytest.fixture(scope="module")
def plain_runs(engine_of, requests):
    """Plain completions for each way of sampling."""
    return functools.cache(lambda sampling: engine_of().run(requests, **SAMPLINGS[sampling]))


@pytest.fixture
def one_drafter(case, forget_engines, last_drafter):
    """Compiled programs of one drafter at a time."""
    if last_drafter != [case[1]]:
        forget_engines()
        last_drafter[:] = [case[1]]


@pytest.fixture(scope="module")
def last_drafter():
    return []


@pytest.fixture(scope="module")
def size(pytestconfig):
    """(chain, tree, slots) of the cases: the full product has deep trees and more numbers of rows, each of which is compiled."""
    return (CHAIN, TREE, 4) if pytestconfig.getoption("--full") else (SHALLOW_CHAIN, SHALLOW_TREE, 2)


@pytest.mark.usefixtures("one_drafter")
def test_a_speculative_rollout_returns_the_tokens_of_a_plain_one(engine_of, tiny, drafters, requests, plain_runs, case, size, monkeypatch):
    sampling, name, strategy, slices, order = case
    expected, (chain, tree, slots) = plain_runs(sampling), size
    if strategy == "random":
        generator = random.Random(str(case))
        monkeypatch.setattr(measured_choice, "choose", lambda settings, state, seen: (state, generator.choice((OFF, tree))))
    rows = requests if order == "given" else random.Random(3).sample(requests, len(requests))
    engine = engine_of(devices=slices, slices=slices, drafter=drafters["eagle" if name == "adversary" else name])
    params = jax.tree.map(lambda leaf: leaf * -5 if leaf.dtype == np.float32 else leaf, engine.new_drafter()) if name == "adversary" else None
    settings = speculating(tiny, chain if strategy == "chain" else tree, rounds_per_dispatch=1 if strategy == "random" else 3, slots=slots)
    done = engine.run(rows, settings, drafter_params=params, **SAMPLINGS[sampling])
    assert_same(tiny, expected, done, **SAMPLINGS[sampling])
    for index, completion in done.items():
        if completion.token_ids == expected[index].token_ids:
            np.testing.assert_allclose(completion.logprobs, expected[index].logprobs, atol=1e-4)


def test_answers_of_an_earlier_step_are_found_again(engine_of, tiny, drafters, requests, reference):
    """The same requests a second time, as if a step had sampled the same answers: every round but the last accepts a whole chain; tokens stay."""
    engine, history = engine_of(drafter=drafters["prompt_lookup"]), AnswerHistory(2)
    done = [engine.run(requests, speculating(tiny, CHAIN), history=history) for _ in range(2)]
    for one in done:
        assert_same(tiny, reference, one, temperature=1.0)
    assert sum(one.forwards for one in done[1].values()) < 0.6 * sum(one.forwards for one in done[0].values())


def test_slices_that_share_the_weights_of_a_drafter_change_no_token(engine_of, tiny, drafters, requests, reference):
    done = engine_of(devices=2, tensor=2, drafter=drafters["eagle"]).run(requests, speculating(tiny, TREE))
    assert_same(tiny, reference, done, temperature=1.0)


def test_speculation_that_starts_with_few_rows_left_changes_no_token(engine_of, tiny, drafters, requests, reference):
    """Rows of different limits shrink from 4 to 1; speculation is on for one row only, and by then the ring of 16 positions has been overrun."""
    limits = [8] * 11 + [24]
    uneven = [dataclasses.replace(request, max_new_tokens=limit) for request, limit in zip(requests, limits, strict=True)]
    settings = speculating(tiny, TREE, max_rows=1)
    done = engine_of(drafter=drafters["eagle"], ring=16).run(uneven, settings)
    assert done[11].forwards < 24 or done[11].accept_length >= 1
    assert {index: one.token_ids for index, one in done.items()} == {index: one.token_ids[: limits[index]] for index, one in reference.items()}


def test_an_oracle_emits_its_depth_and_one_more_in_every_round(engine_of, tiny, drafters, requests):
    done = engine_of(drafter=drafters["oracle"]).run(requests, speculating(tiny, CHAIN))
    assert {completion.forwards for completion in done.values()} == {1 + -(-23 // 4)}  # the first token comes from the prefill


@pytest.mark.parametrize(("drafter", "strategy"), [("oracle", CHAIN), ("eagle", TREE), ("truncated", Strategy(1, 8, 8))])
def test_rows_that_fill_the_models_positions_end_there_and_leave_their_neighbours_alone(engine_of, tiny, drafters, drafter, strategy):
    """Three rows decode to the last position that the model has, trees reaching past it, beside rows with other limits."""
    positions, prompts = tiny.spec.max_position_embeddings, tiny.prompts()
    limits = [positions - len(prompt) if number % 2 else 5 + 40 * number for number, prompt in enumerate(prompts)]
    rows = [dataclasses.replace(request, max_new_tokens=limit) for request, limit in zip(tiny.requests(prompts), limits, strict=True)]
    rows += [dataclasses.replace(row, index=row.index + len(rows), sample=1) for row in rows]
    expected = engine_of().run(rows, length=positions)
    done = engine_of(drafter=drafters[drafter]).run(rows, speculating(tiny, strategy), length=positions)
    assert_same(tiny, expected, done, temperature=1.0)
    for index, completion in done.items():
        np.testing.assert_allclose(completion.logprobs, expected[index].logprobs, atol=1e-4)
    assert [(len(done[index].token_ids), done[index].finish_reason) for index in range(len(rows))] == [(row.max_new_tokens, "length") for row in rows]


def test_a_second_phase_with_speculation_compiles_nothing(engine_of, tiny, drafters, requests):
    engine = engine_of(drafter=drafters["eagle"])
    settings = speculating(tiny, SHALLOW_TREE, slots=8, compile_ahead=True)
    engine.run(requests, settings)
    before = compile_counter().count
    engine.run([dataclasses.replace(request, max_new_tokens=4 + 5 * (request.index % 4)) for request in requests], settings)
    assert compile_counter().count == before


@pytest.mark.parametrize("name", ["eagle", "prompt_lookup"])
def test_a_bandit_whose_programs_were_compiled_ahead_knows_their_costs_and_compiles_nothing_later(engine_of, tiny, drafters, requests, reference, name):
    engine = engine_of(drafter=PromptLookup(segments=32) if name == "prompt_lookup" else drafters[name])
    settings = speculating(tiny, SHALLOW_CHAIN, SHALLOW_TREE, kind="beg", slots=16, compile_ahead=True, rounds_per_dispatch=2)
    driver = engine.drivers(settings)[0]
    done = []
    drive(driver, requests, lambda driver, queue, finished: done.extend(finished))
    assert_same(tiny, reference, {one.request.index: one for one in done}, temperature=1.0)
    costs = driver.choice.state.costs
    assert {bucket.rows for bucket, _ in costs} == {1, 4, 16} and {arm for _, arm in costs} == {OFF, SHALLOW_CHAIN, SHALLOW_TREE} and min(costs.values()) > 0
    engine.start([driver])  # as a step does: how many rows were left when the last phase ended, which the bandit decides, is forgotten
    before = compile_counter().count
    drive(driver, [dataclasses.replace(request, max_new_tokens=4 + 5 * (request.index % 4)) for request in requests], lambda *_: None)
    assert compile_counter().count == before


def test_off_with_a_drafter_is_plain(engine_of, tiny, drafters, requests, reference):
    done = engine_of(drafter=drafters["eagle"]).run(requests, speculating(tiny))
    assert {index: one.token_ids for index, one in done.items()} == {index: one.token_ids for index, one in reference.items()}
    assert {one.accept_length for one in done.values()} == {1.0}


@pytest.mark.parametrize("kind", ["beg", "ucb1"])
def test_a_bandit_that_switches_as_the_clock_says_changes_no_token(engine_of, tiny, drafters, requests, reference, kind):
    engine, settings = engine_of(drafter=drafters["eagle"]), speculating(tiny, CHAIN, TREE, kind=kind, rounds_per_dispatch=1)
    assert_same(tiny, reference, engine.run(requests, settings), temperature=1.0)
    driver = engine.drivers(settings)[0]
    drive(driver, requests, lambda *_: None)
    arms = {strategy for _, strategy in driver.choice.state.tried}
    assert arms == {OFF, CHAIN, TREE} and driver.choice.state.dispatches > 20
