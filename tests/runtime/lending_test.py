"""Loans during a rollout with a long tail, in scheduler time: the real event loop and the real lending over slices whose work takes fake seconds.

One CPU's cores are shared by all forced devices, so wall-clock time could not show what a loan costs; here a round costs ROUND and a quantum QUANTUM.
"""

import collections
import dataclasses

import numpy as np
import pytest

from tlt_jax.distillation.aggregation import State, Trained
from tlt_jax.runtime import event_loop
from tlt_jax.runtime.lending import Drafter, Lending, LendingSettings, Work
from tlt_jax.scheduling.slices import LoanSettings
from tlt_jax.scheduling.timeline import Span
from tlt_jax.strategies import Request

ROUND, ROUNDS, QUANTUM, SLOTS = 0.01, 16, 0.2, 8
SETTINGS = LendingSettings(LoanSettings(), sync_every=5, adaptive=True)


class Clock:
    """Seconds that pass only when the event loop sleeps, always as long, so that polling oftener is no gain."""

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += event_loop.LENDING_POLL_SECONDS


@dataclasses.dataclass
class Row:
    request: Request
    tokens: list


class Driver:
    """A slice of the rollout: a dispatch takes ROUNDS rounds and gives every row as many tokens; one is queued ahead as the real driver does."""

    def __init__(self, clock):
        self.clock, self.rows, self.in_flight = clock, [None] * SLOTS, collections.deque()

    @property
    def active(self):
        return sum(row is not None for row in self.rows)

    def step(self, queue, allowance):
        if self.in_flight and self.in_flight[0] > self.clock():
            return []
        finished = []
        if self.in_flight:
            self.in_flight.popleft()
            for slot, row in enumerate(self.rows):
                if row is not None:
                    row.tokens += [0] * ROUNDS
                    if len(row.tokens) >= row.request.max_new_tokens:
                        finished.append(row.request)
                        self.rows[slot] = None
        while queue and self.active < min(SLOTS, allowance):
            self.rows[self.rows.index(None)] = Row(queue.popleft(), [])
        if self.active and not self.in_flight:
            self.in_flight.append(self.clock() + ROUNDS * ROUND)
        return finished


class Slice:
    """The training of a drafter of one number, which every quantum raises by 1; measured, a drafter is the better the larger its number."""

    def __init__(self, clock, driver):
        self.clock, self.driver, self.ends, self.quanta, self.skipped, self.busy = clock, driver, None, 0, 0, []

    def lend(self, policy, state, quanta=0):
        assert not self.driver.active and self.ends is None, "a slice with rows was lent"
        self.value, self.quanta = float(state.params["x"]), quanta

    def begin(self, batch):
        assert self.ends is None and not self.driver.active
        self.ends = self.clock() + QUANTUM
        self.busy.append((self.clock(), self.ends))

    @property
    def in_quantum(self):
        return self.ends is not None and self.clock() < self.ends

    def wait(self):
        if self.ends is not None:
            self.clock.now = max(self.clock.now, self.ends)
            self.ends, self.quanta, self.value = None, self.quanta + 1, self.value + 1

    def measure(self, params, batch):
        return float(params["x"])

    def trained(self):
        return Trained(State({"x": np.float32(self.value)}, {}), self.quanta)

    def give_back(self):
        self.value = None


@dataclasses.dataclass
class Outlook:
    """Of other processes whose last row ends at a known time."""

    clock: Clock
    end: float
    told: list = dataclasses.field(default_factory=list)

    def start(self):
        pass

    def tell(self, seconds):
        self.told.append(seconds)

    def others(self):
        return max(self.end - self.clock(), 0.0)


def phase(monkeypatch, lengths, slices=4, lend=True, texts=True, settings=SETTINGS, others_until=0.0):
    """(seconds that the phase took, lending or None, the drafter after it)."""
    clock = Clock()
    monkeypatch.setattr(event_loop.time, "sleep", clock.sleep)
    drivers = [Driver(clock) for _ in range(slices)]
    lending = Lending(settings, [Slice(clock, driver) for driver in drivers], clock) if lend else None
    requests = [Request(prompt=n, sample=0, draw=0, index=n, prompt_ids=(1,), max_new_tokens=length, seed=0, step=1) for n, length in enumerate(lengths)]
    if lend:
        lending.quantum_seconds, lending.outlook = QUANTUM, Outlook(clock, others_until)
        start = Drafter(State({"x": np.float32(0)}, {}), {})
        lending.start(start, Work([{}] * slices, lambda: object() if texts else None, None, sorted(lengths)))
    done = []
    event_loop.roll_out(drivers, requests, done.append, lending=lending)
    drafter = lending.end() if lend else None
    assert sorted(request.index for request in done) == list(range(len(lengths)))
    return clock.now, lending, drafter


def long_tail(seed: int, count: int = 64, limit: int = 4096) -> list[int]:
    """Lengths of answers: Pareto with exponent 1.1 from 60 tokens on, cut at the limit."""
    return np.minimum(60 * (1 + np.random.default_rng(seed).pareto(1.1, count)), limit).astype(int).tolist()


@pytest.mark.parametrize("seed", range(2))
def test_lendable_time_is_spent_distilling_and_the_step_hardly_grows(monkeypatch, seed):
    plain, *_ = phase(monkeypatch, long_tail(seed), lend=False)
    seconds, lending, _ = phase(monkeypatch, long_tail(seed))
    report = lending.report
    assert report.loans and sum(span.end - span.start for span in report.spans) >= 0.8 * report.lent_seconds
    assert seconds <= 1.03 * plain
    assert report.recall_seconds <= QUANTUM + 1e-9


def test_the_time_that_loans_take_before_the_first_row_and_after_the_last_one_is_told():
    clock = Clock()
    drivers = [Driver(clock), Driver(clock)]
    lending = Lending(SETTINGS, [Slice(clock, driver) for driver in drivers], clock)
    lending.start(Drafter(State({"x": np.float32(0)}, {}), {}), Work([{}] * 2, object, None, []))
    lending.prepare(object(), object())
    both = 2 * QUANTUM  # the first one compiles
    assert lending.report.spans == [Span(0, "compile", 0, both), Span(1, "compile", both, 2 * both)]
    assert lending.report.added_seconds == 2 * both and lending.report.trained == 0
    drivers[0].rows[0] = Row(Request(prompt=0, sample=0, draw=0, index=0, prompt_ids=(1,), max_new_tokens=8, seed=0, step=1), [])
    lending.turn(drivers, 0)
    clock.now += QUANTUM / 4
    lending.end()
    assert lending.report.trained == 1 and lending.report.added_seconds == pytest.approx(2 * both + QUANTUM * 3 / 4)


@pytest.mark.parametrize("lengths", [[16, 40] * 4, []], ids=["some rows", "no rows"])
def test_a_process_whose_rows_are_done_trains_on_all_its_slices_until_the_others_are_done(monkeypatch, lengths):
    seconds, lending, drafter = phase(monkeypatch, lengths, others_until=8.0)
    report = lending.report
    assert 8.0 <= seconds <= 8.0 + 2 * event_loop.LENDING_POLL_SECONDS and report.loans == 4
    trained = [[span for span in report.spans if span.slice == number] for number in range(4)]
    for spans in trained:
        assert sum(span.end - span.start for span in spans) >= 0.9 * 7 and spans[-1].end <= 8.0
    assert drafter.master.params["x"] > 20
    assert lending.outlook.told[-1] == 0.0 and (not lengths or lending.outlook.told[0] > 0)


def test_without_texts_or_with_one_slice_nothing_is_trained_and_the_phase_takes_as_long(monkeypatch):
    plain, *_ = phase(monkeypatch, long_tail(0, 24), lend=False)
    seconds, lending, drafter = phase(monkeypatch, long_tail(0, 24), texts=False)
    assert seconds == plain and lending.report.trained == 0 and drafter.master.params["x"] == 0
    plain, *_ = phase(monkeypatch, long_tail(0, 16), slices=1, lend=False)
    seconds, lending, _ = phase(monkeypatch, long_tail(0, 16), slices=1)
    assert seconds == plain and not lending.report.loans


def test_mergers_bring_every_quantum_into_the_master_by_its_share(monkeypatch):
    _, lending, drafter = phase(monkeypatch, [16] * 24 + [3000])
    report = lending.report
    assert report.trained == len(report.spans) and report.mergers > 3
    by_slice = collections.Counter(span.slice for span in report.spans)
    assert len(by_slice) == 3 and max(by_slice.values()) - min(by_slice.values()) <= 1
    # Three slices that train side by side move the master as far as one of them.
    assert drafter.master.params["x"] == pytest.approx(report.trained / 3, rel=0.02) and not drafter.residuals


def test_a_slice_alone_is_not_copied_to_the_host_until_its_loan_ends(monkeypatch):
    _, lending, drafter = phase(monkeypatch, [16] * 8 + [3000], slices=2)
    assert lending.report.mergers == 0 and drafter.master.params["x"] == lending.report.trained == len(lending.report.spans)


def test_a_merged_drafter_that_is_worse_than_the_best_slices_is_mixed_in_by_a_share_and_the_rest_stays_with_the_slices(monkeypatch):
    clock = Clock()
    slices = [Slice(clock, Driver(clock)) for _ in range(2)]
    lending = Lending(SETTINGS, slices, clock)
    lending.start(Drafter(State({"x": np.float32(2)}, {}), {1: {"x": np.float32(8)}}), Work([{}, {}], object, object(), []))
    trained = {0: Trained(State({"x": np.float32(6)}, {}), 1), 1: Trained(State({"x": np.float32(0)}, {}), 1)}
    lending._mixture.kept = trained
    drafter = lending.end()
    # merged with alpha 1: 3, a fall by half from the best slice's 6, so alpha = 1/2: 2 + 1/2 · (4 − 2)/2
    assert drafter.master.params["x"] == 2.5
    assert {number: float(residual["x"]) for number, residual in drafter.residuals.items()} == {0: 2.0, 1: -1.0}
