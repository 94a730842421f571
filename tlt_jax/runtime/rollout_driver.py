"""One slice's rollout: slots, admission, dispatches queued one ahead, refill and shrink.

`step` never blocks: it reads what is ready, then dispatches. Nothing here decides between slices; the event loop hands
out requests and says how many rows this slice may hold.
"""

import collections
import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from tlt_jax.decoding.rollout import PREFILL_ROWS
from tlt_jax.records import SamplingParams
from tlt_jax.runtime import admissions, resizing
from tlt_jax.runtime.measured_choice import Choice, MeasuredChoice, Queued, queued_now
from tlt_jax.runtime.programs import SlicePrograms, free_bytes, new_drafter, prompt_features_program
from tlt_jax.scheduling import batching
from tlt_jax.scheduling.compile_plan import compile_plan
from tlt_jax.scheduling.peer_texts import AnswerHistory, PeerTexts, Place
from tlt_jax.scheduling.strategy_selector import SelectorSettings
from tlt_jax.sharding import movement
from tlt_jax.sharding.rules import replicated
from tlt_jax.strategies import FINISH_REASONS, FINISH_RUNNING, FINISH_STOP, Completion, Request, Strategy

IN_FLIGHT = 2  # dispatches queued: the next one starts before the last one's flags are read
ROW_BUCKETS = (1, 4, 16, 64, 256, 1024)  # no 2: measured on CPU, two rows cost what four do
CACHE_BUCKETS = (128, 512, 2048, 8192, 32768, 131072)


@dataclasses.dataclass(frozen=True)
class RolloutSettings:
    """What a driver needs to know about a rollout phase."""

    slots: int
    rounds_per_dispatch: int
    prefill_tokens: int
    memory_fraction: float = 1.0  # share of the slice's free memory that the cache may take
    selector: SelectorSettings = SelectorSettings("fixed", ())  # how rounds are drafted; strategies need programs with a drafter
    compile_ahead: bool = False  # compile with the first rows what a phase may shrink to later: for runs of many phases
    max_programs: int = 24  # decode programs, counted over numbers of rows and strategies
    consolidate: bool = False  # what is compiled ahead is timed, and so is compiled what moves rows to another slice


class Lengths(NamedTuple):
    """The longest prompt, and the longest prompt with its response, in tokens."""

    prompt: int
    total: int

    def pieces(self, tokens: int) -> tuple[int, int]:
        """(I, T): the pieces of at most `tokens`, in steps of 8, that hold the longest prompt."""
        count = -(-self.prompt // max(tokens, 8))
        return count, -(-self.prompt // (8 * count)) * 8


@dataclasses.dataclass
class Row:
    """A request in a slot, with what it has emitted so far."""

    request: Request
    place: Place | None = None  # of its text, where rows look into each other's
    tokens: list = dataclasses.field(default_factory=list)
    logprobs: list = dataclasses.field(default_factory=list)
    sampling_logprobs: list = dataclasses.field(default_factory=list)
    forwards: int = 0
    done: bool = False


@dataclasses.dataclass
class InFlight:
    """A dispatch whose results have not been read: arrays, and the row that each result row belongs to."""

    tokens: object  # [A] or [B, R]
    logprobs: object
    sampling_logprobs: object
    finish: object
    rows: list
    origin: Choice | Queued  # Queued: an admission
    counts: tuple | None = None  # (tokens, forwards) of each row; None: one of both (an admission)
    features: object = None  # where they are streamed: [n, F] of each entry's prompt, or [B, R, F]


def row_buckets(slots: int) -> tuple[int, ...]:
    """Numbers of rows that a slice decodes with, rising; `slots` itself is the largest."""
    return (*(bucket for bucket in ROW_BUCKETS if bucket < slots), slots)


def row_bucket(rows: int, slots: int) -> int:
    """Smallest allowed number of rows ≥ `rows`."""
    return batching.length_bucket(rows, row_buckets(slots))


def completion(row: Row, code: int, version: int) -> Completion:
    """The finished request of a row."""
    return Completion(
        request=row.request, token_ids=tuple(row.tokens), logprobs=tuple(row.logprobs), sampling_logprobs=tuple(row.sampling_logprobs),
        finish_reason=FINISH_REASONS[code], policy_version=version, forwards=row.forwards)


def finish_code(code: int, row: Row, ends: Callable[[Row], bool] | None) -> int:
    """What the device says of a row, or FINISH_STOP where `ends` finds that it has written what only the host can see, such as a stop string.

    On the device such a slot goes on until another request takes it or slots are moved; nobody reads what it writes.
    """
    return FINISH_STOP if code == FINISH_RUNNING and ends is not None and ends(row) else code


def check_request(request: Request, lengths: Lengths) -> None:
    """ValueError for a request that has no prompt, asks for no token, or is longer than the lengths that the phase was started with."""
    prompt = len(request.prompt_ids)
    if not 1 <= prompt <= lengths.prompt or request.max_new_tokens < 1 or prompt + request.max_new_tokens > lengths.total:
        raise ValueError(
            f"request {request.index} has a prompt of {prompt} tokens and max_new_tokens={request.max_new_tokens}: both must be at least 1, the prompt "
            f"at most {lengths.prompt} and both together at most {lengths.total}, the lengths that this rollout phase was started with.")


def slots_that_fit(programs: SlicePrograms, settings: RolloutSettings, length: int) -> int:
    """The configured slots, or as many as the cache's share of the free memory holds. Raises MemoryError when not one row fits."""
    free = free_bytes(programs.mesh)
    if free is None:
        return settings.slots
    row, budget = programs.row_bytes(length), int(settings.memory_fraction * free)
    if row > budget:
        raise MemoryError(
            f"one row of {length} cache slots takes {row:,} bytes, and rollout.memory_fraction={settings.memory_fraction} of the free memory is "
            f"{budget:,}: lower rollout.max_new_tokens, or raise rollout.memory_fraction or mesh.rollout_tensor")
    return min(settings.slots, budget // row)


class RolloutDriver:
    """Host side of one slice during a rollout phase."""

    def __init__(self, programs: SlicePrograms, settings: RolloutSettings, drafter_params=None, history: AnswerHistory | None = None):
        """`drafter_params` None: made from the policy at the first start. `history` of earlier answers may be shared by drivers; None: nothing is kept."""
        self.programs, self.settings, self.drafter_params = programs, settings, drafter_params
        self._history = AnswerHistory(0) if history is None else history
        self.state = None
        self.rows: list[Row | None] = []
        self.in_flight: collections.deque[InFlight] = collections.deque()
        self.draining = False  # nothing more is dispatched
        self.choice = MeasuredChoice(settings.selector)
        self._compiled: set[tuple[int, int]] = set()  # (rows, length) whose smaller sizes are compiled
        # Who reads the features of a phase puts a dict here, if the programs stream them: by index, parts [n, F] of all positions but the last.
        self.features: dict[int, list] | None = None
        self.ends: Callable[[Row], bool] | None = None  # see `finish_code`; set anew for each phase

    def start(self, params, version: int, sampling: SamplingParams, stop_ids: tuple[int, ...], lengths: Lengths) -> None:
        """Begin a phase with published parameters. `lengths` bounds every request to come and decides the compiled shapes: keep it the same over a run."""
        whole = replicated(self.programs.mesh)
        if self.programs.drafter is not None and self.drafter_params is None:
            self.drafter_params = new_drafter(self.programs.drafter, params)
        self.params, self.version, self.lengths = self.programs.serve(params, self.drafter_params), version, lengths
        # A cache longer than the model's limit would be refused under dynamic RoPE, and is never needed. A draft tree stands behind the text.
        longest = lengths.total + max((strategy.budget for strategy in self.settings.selector.strategies), default=0)
        self.length = min(batching.length_bucket(longest, CACHE_BUCKETS), max(longest, self.programs.spec.max_position_embeddings))
        stops = np.full((max(8, len(stop_ids)),), -1, np.int32)
        stops[: len(stop_ids)] = stop_ids
        self.sampling = movement.to_device(sampling, SamplingParams(whole, whole, whole, whole, whole))
        self.stop_ids = movement.to_device(stops, whole)
        self.state, self.rows, self.draining = None, [], False
        drafter = self.programs.drafter
        texts = PeerTexts(drafter.segments, self._history) if drafter is not None and drafter.segments else None
        pieces = lengths.pieces(self.settings.prefill_tokens // PREFILL_ROWS)
        self.entrance = admissions.Entrance(self.programs, pieces, texts, self.sampling, self.stop_ids)
        self.slots = slots_that_fit(self.programs, self.settings, self.length)
        self._plan = compile_plan(row_buckets(self.slots), self.settings.selector, self.settings.max_programs)
        self.choice.start()

    def release(self) -> None:
        """Free rollout memory: cache and the view of the parameters."""
        self.state = self.params = self.ends = None
        self.rows, self.features = [], None

    @property
    def active(self) -> int:
        """Rows that are believed to decode (what is in flight may have ended some)."""
        return sum(row is not None for row in self.rows)

    def step(self, queue: collections.deque, allowance: int) -> list[Completion]:
        """One turn: read one dispatch if it is ready, admit up to `allowance` rows in all, keep dispatches queued. Returns finished requests.

        Slots change only after a dispatch was read, never because of how long something took: with one slice the batches are the same in every run.
        """
        finished = []
        if self.in_flight:
            if not self.in_flight[0].finish.is_ready():
                return finished
            finished = self._absorb(self.in_flight.popleft())
        if self.draining:
            return finished
        room = min(self.slots, allowance) - self.active
        if queue and room > 0 and (self.active == 0 or room >= min(len(queue), max(1, self.slots // 8))):
            self._admit([queue.popleft() for _ in range(min(room, len(queue)))])
        elif not queue and self.active:
            self.fit(self.active)
        while self.active and len(self.in_flight) < IN_FLIGHT:
            self._advance()
        return finished

    def _absorb(self, flight: InFlight) -> list[Completion]:
        tokens, logprobs, sampling_logprobs, finish = movement.to_host((flight.tokens, flight.logprobs, flight.sampling_logprobs, flight.finish))
        features = None if self.features is None else movement.to_host(flight.features)
        one = np.ones(len(finish), np.int32)
        counts, forwards = (one, one) if flight.counts is None else movement.to_host(flight.counts)
        finished, emitted, rows, rounds, row_rounds = [], 0, 0, 0, 0
        for index, row in enumerate(flight.rows):
            if row is None or row.done:
                continue
            count = int(counts[index])
            row.tokens += np.atleast_1d(tokens[index])[:count].tolist()
            row.logprobs += np.atleast_1d(logprobs[index])[:count].tolist()
            row.sampling_logprobs += np.atleast_1d(sampling_logprobs[index])[:count].tolist()
            row.forwards += int(forwards[index])
            if features is not None:
                read = count if flight.counts else len(row.request.prompt_ids)
                self.features.setdefault(row.request.index, []).append(features[index][:read].copy())
            emitted, rows, rounds, row_rounds = emitted + count, rows + 1, max(rounds, int(forwards[index])), row_rounds + int(forwards[index])
            code = finish_code(int(finish[index]), row, self.ends)
            if code != FINISH_RUNNING:
                row.done = True
                self.rows = [None if held is row else held for held in self.rows]
                if row.place is not None:
                    self.entrance.texts.leave(row.request, row.place, tuple(row.tokens))
                finished.append(completion(row, code, self.version))
        if isinstance(flight.origin, Queued):
            self.choice.admitted(flight.origin)
        elif rows:
            self.choice.reward(flight.origin, emitted, rows, rounds, row_rounds)
        return finished

    def _admit(self, requests: list[Request]) -> None:
        for request in requests:
            check_request(request, self.lengths)
        queued = queued_now()
        self.fit(max(self.active + len(requests), len(self.rows)))
        capacity = len(self.rows)
        groups = admissions.by_prompt(requests, [slot for slot, row in enumerate(self.rows) if row is None])
        entries = [entry for group in groups for entry in group]
        places, texts = self.entrance.places([entry.request for entry in entries], capacity, self.state)
        rows = [Row(entry.request, place) for entry, place in zip(entries, places, strict=True)]
        for entry, row in zip(entries, rows, strict=True):
            self.rows[entry.slot] = row
        admission = admissions.admission(groups, capacity, self.entrance.pieces, texts)
        self.state, sampled, finish = self.entrance.admit(self.params, self.state, admission)
        rows += [None] * (capacity - len(rows))
        features = None
        if self.features is not None:
            read = prompt_features_program(self.programs.mesh, self.lengths.prompt)
            features = [seen for group in groups for seen in [read(self.state, np.int32(group[0].slot))] * len(group)]
        self.in_flight.append(InFlight(sampled.token_B, sampled.logprob_B, sampled.sampling_logprob_B, finish, rows, queued, features=features))

    def fit(self, needed: int) -> None:
        """Bring the number of slots to the bucket that holds `needed` rows; active rows move to the front."""
        bucket = row_bucket(needed, self.slots)
        if self.state is None:
            self.state, self.rows = self.programs.init_state(bucket, self.length), [None] * bucket
            if self.settings.compile_ahead and (bucket, self.length) not in self._compiled:
                self.state = self.entrance.compile_ahead(self.params, self.state)
                plan = {size: strategies for size, strategies in self._plan.items() if size <= bucket}
                timed, join = self.settings.selector.kind != "fixed" or self.settings.consolidate, self.entrance.join if self.settings.consolidate else None
                self.choice.measured(resizing.compile_ahead(self.programs, self.state, plan, self._run, timed=timed, join=join))
                self._compiled.add((bucket, self.length))
        if bucket == len(self.rows):
            return
        kept = [slot for slot, row in enumerate(self.rows) if row is not None]
        self.state = resizing.moved(self.programs, self.state, kept, bucket)
        self.rows = [self.rows[slot] for slot in kept] + [None] * (bucket - len(kept))

    def _run(self, state, strategy: Strategy):
        return self.programs.advance(self.params, state, self.sampling, self.stop_ids, rounds=self.settings.rounds_per_dispatch, strategy=strategy)

    def _advance(self) -> None:
        longest = max(len(row.request.prompt_ids) + len(row.tokens) for row in self.rows if row is not None)
        choice = self.choice.next(len(self.rows), longest, self._plan[len(self.rows)])
        self.state, emitted = self._run(self.state, choice.strategy)
        self.in_flight.append(
            InFlight(
                emitted.tokens_BR, emitted.logprobs_BR, emitted.sampling_logprobs_BR, emitted.finish_B, list(self.rows), choice,
                (emitted.count_B, emitted.forwards_B), emitted.features_BRF))
