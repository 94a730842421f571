"""Scoring in worker processes, overlapped with the rollout: submit as rows finish, poll between dispatches, drain at the end of the step.

A hung or crashed worker is killed and replaced; its item becomes a counted error, never a silent 0, and what waited behind it is scored by another worker.
Single-threaded: nothing happens between calls. Workers are fresh interpreters: never forks, and unlike multiprocessing's spawn they do not import the caller's
main module, which would bring jax into every worker.
"""

import json
import os
import pickle
import socket
import subprocess
import sys
import time
import traceback
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait

from tlt_jax.rewards.items import Outcome, PoolSettings, RewardError, RewardFailureError, RewardGroup, RewardItem, Scored, Scorer
from tlt_jax.rewards.scorers import build_scorer

_IN_FLIGHT_BYTES = 32_768  # queued ahead in a worker's socket, so that it never waits for a poll; well below any socket buffer, so that sending never blocks
_IN_FLIGHT_UNITS = 32
_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from tlt_jax.rewards.worker import main; main(int(sys.argv[2]))"


@dataclass
class _Unit:
    """What one worker scores at once: one item, or a whole group. (ticket, index) name its first item."""

    ticket: int
    index: int
    items: RewardGroup

    def results(self, outcomes: Sequence[Outcome] | None, error: str | None, seconds: float) -> list[Scored]:
        """One result per item; all of them carry the error when there is one."""
        rows = outcomes if outcomes is not None else [Outcome(None)] * len(self.items)
        each = seconds / len(self.items)
        return [Scored(self.ticket, self.index + row, one.score, one.components, one.pred, error, each, one.verdict) for row, one in enumerate(rows)]


def _units(ticket: int, items: RewardGroup, grouped: bool) -> list[_Unit]:
    return [_Unit(ticket, 0, items)] if grouped else [_Unit(ticket, index, (item,)) for index, item in enumerate(items)]


class _Worker:
    """One process, the units it holds in order, and when the first of them began."""

    def __init__(self, pickled_scorer: bytes, settings: PoolSettings) -> None:
        here, there = socket.socketpair()
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}  # should a user's reward import jax, it must not take the accelerator
        with there:
            command = [sys.executable, "-c", _START, json.dumps(sys.path), str(there.fileno())]
            self.process = subprocess.Popen(command, pass_fds=(there.fileno(),), stdin=subprocess.DEVNULL, env=environment)
        self.connection = Connection(here.detach())
        self.connection.send((pickled_scorer, settings.time_limit, settings.memory_limit_mb, settings.recycle_mb))
        self.ready = False
        self.units: deque[tuple[_Unit, int]] = deque()
        self.since = time.monotonic()

    def room(self, size: int) -> bool:
        """Whether another message fits: always when idle (it is waiting for one), else while little is queued ahead."""
        return self.ready and (not self.units or (len(self.units) < _IN_FLIGHT_UNITS and sum(held for _, held in self.units) + size <= _IN_FLIGHT_BYTES))

    def send(self, unit: _Unit, message: bytes) -> None:
        """Queue a unit; the clock starts when it is the only one."""
        if not self.units:
            self.since = time.monotonic()
        self.units.append((unit, len(message)))
        self.connection.send_bytes(message)

    def finished(self) -> _Unit:
        """The unit at the head, taken off; the clock starts for the next."""
        self.since = time.monotonic()
        return self.units.popleft()[0]

    def overdue(self, settings: PoolSettings) -> bool:
        """Whether the head unit, or the start, has had its time."""
        return time.monotonic() - self.since > (settings.time_limit if self.ready else settings.start_limit) and (not self.ready or bool(self.units))

    def end(self) -> int:
        """Kill and reap; the exit status (negative: the signal)."""
        self.process.kill()
        self.connection.close()
        return self.process.wait()


class _InProcess:
    """The stand-in for workers=0: the same work here, one unit after the other, with no protection."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = build_scorer(scorer)
        self._waiting: deque[_Unit] = deque()

    def add(self, ticket: int, items: RewardGroup) -> None:
        """Queue the items of one ticket."""
        self._waiting.extend(_units(ticket, items, self._scorer.grouped))

    def collect(self, counts: Counter[str]) -> list[Scored]:
        """Score everything queued."""
        results: list[Scored] = []
        while self._waiting:
            unit, started, outcomes, error = self._waiting.popleft(), time.perf_counter(), None, None
            try:
                outcomes = self._scorer.score(unit.items)
            except Exception:  # listed in the architecture test: a user's function may raise anything; it becomes a counted error
                error = traceback.format_exc()
            results += unit.results(outcomes, error, time.perf_counter() - started)
        return results

    def wait(self, seconds: float) -> None:
        """Nothing happens elsewhere."""

    def end(self) -> None:
        """Forget what is queued."""
        self._waiting.clear()


class _Crew:
    """The worker processes and what waits for them."""

    def __init__(self, settings: PoolSettings, scorer: Scorer) -> None:
        try:
            self._pickled = pickle.dumps(scorer)
        except (pickle.PicklingError, AttributeError, TypeError) as wrong:
            raise RewardError(
                f"the scorer cannot be sent to reward workers ({wrong}): use functions defined at the top level of an importable module"
            ) from wrong
        self._settings = settings
        self._grouped: bool | None = None  # known when the first worker has built the scorer
        self._submitted: deque[tuple[int, RewardGroup]] = deque()
        self._waiting: deque[_Unit] = deque()
        self._unsendable: list[Scored] = []
        self._workers = [_Worker(self._pickled, settings) for _ in range(settings.workers)]

    def add(self, ticket: int, items: RewardGroup) -> None:
        """Queue the items of one ticket and send what fits."""
        self._submitted.append((ticket, items))
        self._dispatch()

    def collect(self, counts: Counter[str]) -> list[Scored]:
        """Results that have arrived; replaces workers that are overdue, dead or too large."""
        results: list[Scored] = []
        for place, worker in enumerate(self._workers):
            arrived, ended, leaving = self._receive(worker)
            results += arrived
            if ended or leaving or worker.overdue(self._settings):
                results += self._replace(place, "" if leaving else "crashes" if ended else "timeouts", counts)
        self._dispatch()
        results += self._unsendable
        self._unsendable = []
        return results

    def wait(self, seconds: float) -> None:
        """Until a worker says something, at most `seconds`."""
        wait([worker.connection for worker in self._workers], seconds)

    def end(self) -> None:
        """Kill and reap the workers."""
        for worker in self._workers:
            worker.end()
        self._workers = []

    def _receive(self, worker: _Worker) -> tuple[list[Scored], bool, bool]:
        """(results, whether the process is gone, whether it says that it leaves)."""
        results: list[Scored] = []
        try:
            while worker.connection.poll():
                message = worker.connection.recv()
                if isinstance(message, str):
                    raise RewardError(f"the reward could not be set up:\n{message}")
                if isinstance(message, bool):
                    self._grouped, worker.ready = message, True
                    continue
                outcomes, error, seconds, leaving = message
                results += worker.finished().results(outcomes, error, seconds)
                if leaving:
                    return results, False, True
        except (EOFError, OSError):
            return results, True, False
        return results, False, False

    def _replace(self, place: int, fault: str, counts: Counter[str]) -> list[Scored]:
        worker, results = self._workers[place], []
        status = worker.end()
        if not worker.ready:
            raise RewardError(f"a reward worker did not start (exit status {status}, {self._settings.start_limit:g} s allowed): see its messages above")
        counts["restarts"] += 1
        if fault and worker.units:
            counts[fault] += 1
            seconds = time.monotonic() - worker.since
            what = f"no reward after {self._settings.time_limit:g} s" if fault == "timeouts" else f"the reward worker ended with status {status}"
            unit = worker.finished()
            results = unit.results(None, f"{what}, scoring the response {unit.items[0].response[:200]!r}", seconds)
        self._waiting.extendleft(unit for unit, _ in reversed(worker.units))
        self._workers[place] = _Worker(self._pickled, self._settings)
        return results

    def _dispatch(self) -> None:
        while self._submitted and self._grouped is not None:
            self._waiting.extend(_units(*self._submitted.popleft(), self._grouped))
        while self._waiting:
            unit = self._waiting[0]
            try:
                message = pickle.dumps(unit.items)
            except (pickle.PicklingError, AttributeError, TypeError) as wrong:
                self._unsendable += self._waiting.popleft().results(None, f"the row cannot be sent to reward workers: {wrong}", 0.0)
                continue
            free = [worker for worker in self._workers if worker.room(len(message))]
            if not free:
                return
            try:
                min(free, key=lambda worker: len(worker.units)).send(self._waiting.popleft(), message)
            except OSError:  # it died just now: the unit is in its queue, and the next collect replaces it
                return


@dataclass(frozen=True)
class SelfCheck:
    """The rewards of a right and of an empty response at start-up, each with its time: show them before training."""

    right: Scored
    empty: Scored


@dataclass
class RewardPool:
    """Scores RewardItems and groups of them with `scorer`. A context manager.

    `counts` has scored, unscored (None by choice), errors, timeouts, crashes, restarts.
    """

    settings: PoolSettings
    scorer: Scorer
    counts: Counter[str] = field(default_factory=Counter)
    open: int = 0  # submitted items without a result

    def __post_init__(self) -> None:
        self._crew = _Crew(self.settings, self.scorer) if self.settings.workers else _InProcess(self.scorer)
        self._ticket = 0
        self._tracebacks: list[str] = []

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()

    def submit(self, item: RewardItem | RewardGroup) -> int:
        """Queue one response, or all responses of a prompt (what group rewards need). Returns the ticket that its results carry; never waits."""
        items = (item,) if isinstance(item, RewardItem) else tuple(item)
        if not items:
            raise ValueError("an empty group has nothing to score")
        ticket, self._ticket = self._ticket, self._ticket + 1
        self.open += len(items)
        self._crew.add(ticket, items)
        return ticket

    def poll(self) -> list[Scored]:
        """What has been scored since the last call, without waiting (with workers=0: scores everything queued, here and now).

        Raises RewardFailureError by `on_error` and when more than `failing_share` of the scored items failed; RewardError when the scorer cannot be set up.
        """
        results = self._crew.collect(self.counts)
        self.open -= len(results)
        return [self._judged(result) for result in results]

    def drain(self, timeout: float) -> list[Scored]:
        """Everything submitted, by ticket and index; at most `timeout` seconds, after which `open` says how many are missing."""
        limit, results = time.monotonic() + timeout, self.poll()
        while self.open and time.monotonic() < limit:
            self._crew.wait(min(0.1, max(0.0, limit - time.monotonic())))
            results += self.poll()
        return sorted(results, key=lambda result: (result.ticket, result.index))

    def self_check(self, example: RewardItem, timeout: float = 180.0) -> SelfCheck:
        r"""Scores the example's response (or its answer in a `\boxed{}` when it has none) and an empty response. Call it before anything is submitted."""
        if self.open:
            raise ValueError(f"self_check comes before the first submit; {self.open} items are open")
        right = example.response or rf"The answer is $\boxed{{{example.answer}}}$."
        self.submit((replace(example, response=right), replace(example, response="", response_ids=())))
        results = self.drain(timeout)
        if len(results) != 2:
            raise RewardError(f"the start-up check of the reward had no result after {timeout:g} s")
        self.counts.clear()
        self._tracebacks.clear()
        return SelfCheck(*results)

    def close(self) -> None:
        """End the workers; results that were not collected are lost."""
        self._crew.end()
        self.open = 0

    def _judged(self, result: Scored) -> Scored:
        self.counts["scored"] += 1
        if result.error is None:
            self.counts["unscored"] += result.score is None
            return result
        self.counts["errors"] += 1
        self._tracebacks = [*self._tracebacks, result.error][:3]
        share = self.counts["errors"] / self.counts["scored"]
        too_many = self.counts["scored"] >= self.settings.failing_after and share > self.settings.failing_share
        if self.settings.on_error == "raise" or too_many:
            raise RewardFailureError(f"{self.counts['errors']} of {self.counts['scored']} rewards failed. First errors:\n\n" + "\n".join(self._tracebacks))
        return replace(result, score=0.0) if self.settings.on_error == "zero" else result
