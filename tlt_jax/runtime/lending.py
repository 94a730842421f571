"""Lends slices that have no rows left to the drafter's training, and takes them back, while the other slices decode; where it costs nothing, rows move
together so that more have none.

A loan is a run of quanta on one slice. The master of the drafter lies on the host: a loan starts from it, and what loans brought is mixed into it every
`sync_every` quanta and at the end of the phase. Which slice is lent when: `scheduling/slices.py`.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax

from tlt_jax.distillation import aggregation
from tlt_jax.distillation.aggregation import State, Trained
from tlt_jax.distillation.pairs import DraftBatch, Lesson
from tlt_jax.runtime.consolidation import Consolidation
from tlt_jax.runtime.draft_driver import BorrowedSlice
from tlt_jax.runtime.rollout_driver import RolloutDriver
from tlt_jax.scheduling.slices import Commands, LoanSettings, Observation, Owner, Reading, all_rolling_out, decide
from tlt_jax.scheduling.tail_estimate import remaining_tokens
from tlt_jax.scheduling.timeline import Span
from tlt_jax.sharding import processes

NEWEST = 0.3  # weight of the newest quantum in the mean of their seconds


class LendingSettings(NamedTuple):
    """When slices are lent, and how what they trained is brought together."""

    loans: LoanSettings
    sync_every: int  # quanta of a slice between two mergers
    adaptive: bool  # mix less than the whole where the merged drafter is worse than the best slice's; the rest stays with the slices as a residual
    consolidate: bool = False  # move rows to fewer slices where that makes none slower


class Drafter(NamedTuple):
    """The drafter that loans train: the master, and what each slice keeps beside it."""

    master: State
    residuals: Mapping[int, dict]


class Work(NamedTuple):
    """What the loans of a phase train with."""

    policies: Sequence[dict]  # as they lie on the slices
    next_lesson: Callable[[], Lesson | None]  # None: there is nothing to learn from yet
    held_out: DraftBatch | None  # without features
    earlier_lengths: Sequence[int]  # of answers, sorted


@dataclasses.dataclass
class LoanReport:
    """What a phase's loans were."""

    loans: int = 0
    lent_seconds: float = 0.0  # over all slices
    spans: list[Span] = dataclasses.field(default_factory=list)  # distilling: a quantum; compile: before the first phase
    trained: int = 0  # updates that the master holds now
    skipped: int = 0  # updates with a gradient that was not finite
    mergers: int = 0
    recall_seconds: float = 0.0  # the longest time from a recall until the slice was back
    added_seconds: float = 0.0  # in which no row decoded: compiling before the first one, taking slices back and merging after the last one
    moved_rows: int = 0  # that went to another slice


@dataclasses.dataclass
class _Loan:
    lent: float
    recalled: float | None = None
    began: float | None = None  # the quantum that runs


class Mixture:
    """The drafter of a phase, and what loans brought that ended before a merger."""

    def __init__(self, drafter: Drafter, adaptive: bool, held_out: DraftBatch | None):
        self.drafter, self.kept = drafter, {}
        self._adaptive, self._held_out = adaptive, held_out

    def start_of_loan(self, number: int) -> Trained:
        """With what a slice goes on: its own last loan, else the master and its residual."""
        master = self.drafter.master
        new = Trained(State(aggregation.start_of_loan(master.params, self.drafter.residuals.get(number)), master.opt_state), 0)
        return self.kept.pop(number, new)

    def merge(self, trained: Mapping[int, Trained], slices: Sequence[BorrowedSlice]) -> int:
        """Bring loans into the master, measured on the slices that trained them; the number of mixed ones."""
        trained, self.kept = {number: one for number, one in (self.kept | trained).items() if one.quanta}, {}
        if not trained:
            return 0
        mixed, alpha = aggregation.mixed(self.drafter.master, trained, 1.0), 1.0
        if len(trained) > 1 and self._adaptive and self._held_out is not None:
            best = max(slices[number].measure(one.state.params, self._held_out) for number, one in trained.items())
            alpha = aggregation.alpha_from(slices[min(trained)].measure(mixed[0].params, self._held_out), best)
            mixed = aggregation.mixed(self.drafter.master, trained, alpha) if alpha < 1 else mixed
        others = {number: residual for number, residual in self.drafter.residuals.items() if number not in trained}
        self.drafter = Drafter(mixed[0], others | (mixed[1] if alpha < 1 else {}))
        return len(trained)


class Lending:
    """The loans of this process's slices, during one rollout phase at a time."""

    def __init__(self, settings: LendingSettings, slices: Sequence[BorrowedSlice], clock: Callable[[], float] = time.monotonic):
        self.settings, self.slices, self._clock = settings, slices, clock
        self.outlook = processes.Outlook(clock)  # how long the other processes roll out
        self.quantum_seconds = 0.0
        self._open: dict[int, _Loan] = {}

    def start(self, drafter: Drafter, work: Work) -> None:
        """A phase begins."""
        self.work, self.state, self.report = work, all_rolling_out(len(self.slices)), LoanReport()
        self._mixture = Mixture(drafter, self.settings.adaptive, work.held_out)
        self._consolidation = Consolidation() if self.settings.consolidate else None
        self._started = self._clock()
        self.outlook.start()

    def prepare(self, lesson: Lesson, measured: DraftBatch) -> None:
        """Compile what loans run, so that none waits for a compiler, and time a quantum; no token counts in either, so nothing is learned."""
        master = self._mixture.drafter.master
        for number, one in enumerate(self.slices):
            lent = self._clock()
            one.lend(self.work.policies[number], master)
            one.measure(master.params, measured)
            for _ in range(2):  # the first one compiles
                started = self._clock()
                one.begin(lesson)
                one.wait()
            self.quantum_seconds = max(self.quantum_seconds, self._clock() - started)
            one.give_back()
            self.report.spans.append(Span(number, "compile", lent, self._clock()))
        now = self._clock()
        self.report.added_seconds, self._started = now - self._started, now

    def turn(self, drivers: Sequence[RolloutDriver], queued: int) -> bool:
        """One turn of the event loop: see what ended, move rows together, lend and recall, start quanta. Whether anything moved."""
        now = self._clock()
        ended = [number for number, loan in self._open.items() if loan.began is not None and not self.slices[number].in_quantum]
        for number in ended:
            self._end_quantum(number, now)
        remaining, elsewhere = remaining_seconds(drivers, queued, self.work.earlier_lengths, now - self._started), self.outlook.others()
        self.outlook.tell(remaining)
        if self._consolidation is not None:
            self._consolidation.turn(drivers, queued, worth_it=remaining >= self.quantum_seconds)
            self.report.moved_rows = self._consolidation.moved_rows
        readings = tuple(
            Reading(driver.active or len(driver.in_flight), bool(driver.in_flight), number in self._open and self._open[number].began is not None)
            for number, driver in enumerate(drivers))
        seen = Observation(now, queued, False, max(remaining, elsewhere), self.quantum_seconds, readings, elsewhere > 0)
        self.state, commands = decide(self.settings.loans, self.state, seen)
        self._obey(commands, now)
        waiting = [self.slices[number].quanta for number in self._open] + [kept.quanta for kept in self._mixture.kept.values()]
        # A slice alone is its own merger.
        merger_is_due = max(waiting, default=0) >= self.settings.sync_every and sum(quanta > 0 for quanta in waiting) > 1
        if not merger_is_due:
            begun = [number for number, loan in self._open.items() if loan.recalled is None and loan.began is None and self._begin(number)]
            return bool(ended or begun)
        if all(loan.began is None for loan in self._open.values()):
            self._merge()
            for number in self._open:
                self.slices[number].lend(self.work.policies[number], self._mixture.start_of_loan(number).state)
        return bool(ended)

    def end(self) -> Drafter:
        """The phase is over: every slice is back after the quantum that runs on it, and the drafter holds what all of them brought."""
        over = self._clock()
        self.outlook.tell(0.0)
        for number in tuple(self._open):
            self._open[number].recalled = self._open[number].recalled or over
            if self._open[number].began is not None:
                self.slices[number].wait()
                self._end_quantum(number, self._clock())
            self._take_back(number, self._clock())
        self._merge()
        for one in self.slices:
            one.give_back()
        self.work = None  # the policy of the phase is freed
        self.report.added_seconds += self._clock() - over
        return self._mixture.drafter

    def _obey(self, commands: Commands, now: float) -> None:
        for number in commands.recall:
            self._open[number].recalled = now
        for number, one in enumerate(self.state.slices):
            if number in self._open and (one.owner is Owner.ROLLOUT or number in commands.lend):
                self._take_back(number, now)
        for number in commands.lend:
            self.slices[number].lend(self.work.policies[number], *self._mixture.start_of_loan(number))
            self._open[number] = _Loan(now)

    def _begin(self, number: int) -> bool:
        lesson = self.work.next_lesson()
        if lesson is not None:
            self.slices[number].begin(lesson)
            self._open[number].began = self._clock()
        return lesson is not None

    def _end_quantum(self, number: int, now: float) -> None:
        loan = self._open[number]
        self.slices[number].wait()
        self.report.spans.append(Span(number, "distilling", loan.began, now))
        self.quantum_seconds += NEWEST * (now - loan.began - self.quantum_seconds)
        loan.began = None

    def _take_back(self, number: int, now: float) -> None:
        loan, one = self._open.pop(number), self.slices[number]
        self._mixture.kept[number] = one.trained()
        self.report.skipped += one.skipped
        self.report.recall_seconds = max(self.report.recall_seconds, now - loan.recalled)
        self.report.loans += 1
        self.report.lent_seconds += now - loan.lent

    def _merge(self) -> None:
        trained = {number: self.slices[number].trained() for number in self._open}
        self.report.trained += sum(one.quanta for one in (trained | self._mixture.kept).values())
        self.report.mergers += self._mixture.merge(trained, self.slices) > 1


def brought_together(before: State, brought: Drafter, quanta: int) -> tuple[int, Drafter]:
    """The updates that the idle slices of all processes made in a phase, and the one drafter of them, on the host of each; collective.

    `before`: all had it at the start; `brought`: what the slices of this process made of it in `quanta` updates, residuals by the run's slice numbers.
    Every process takes part with the share of its updates and nothing is kept back as a residual: the gate is the same for all.
    """
    everywhere = processes.exchange(quanta)
    if not any(everywhere):
        return 0, brought
    state = jax.tree.map(lambda leaf: aggregation.shared(everywhere, processes.gathered(leaf)), brought.master if quanta else before)
    residuals = {number: tree for told in processes.exchange(dict(brought.residuals)) for number, tree in told.items()}
    return sum(everywhere), Drafter(state, residuals)


def remaining_seconds(drivers: Sequence[RolloutDriver], queued: int, earlier_lengths: Sequence[int], passed: float) -> float:
    """Estimate for the last row, at the pace of the `passed` seconds of the phase; infinity while no row has written anything, 0 when no row is left."""
    rows = [row for driver in drivers for row in driver.rows if row is not None]
    longest = max((len(row.tokens) for row in rows), default=0)
    if not longest:
        return float("inf") if queued or rows else 0.0
    return max(remaining_tokens(len(row.tokens), row.request.max_new_tokens, earlier_lengths) for row in rows) * passed / longest
