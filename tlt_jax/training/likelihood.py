"""Log-likelihoods of continuations under a model: rows of similar length side by side, on all devices, in the order in which they were asked for.

Texts are token ids already; how a text is cut into context and continuation is decided in `tasks/continuations.py`.
"""

import collections
import functools
import sys
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from tlt_jax.checkpoints.pretrained import load_policy
from tlt_jax.objectives.continuation_scores import ContinuationBatch, score_continuations
from tlt_jax.runtime.policy_driver import place_batch
from tlt_jax.runtime.programs import score_program
from tlt_jax.scheduling.batching import power_bucket
from tlt_jax.sharding import movement, rules
from tlt_jax.sharding.meshes import Meshes
from tlt_jax.tasks.continuations import Span, fitted
from tlt_jax.training import build
from tlt_jax.training.progress import Progress
from tlt_jax.training.settings import Config

LEAST_LENGTH, LEAST_TARGETS = 32, 8
TARGETS_FACTOR = 4  # few shapes are compiled; a head on padding costs little beside the trunk
IN_FLIGHT = 2  # the device works on one batch while the next is placed
LINE_SECONDS = 15.0


class Score(NamedTuple):
    """Of one continuation: its log-probability in nats, and whether greedy decoding would have written it."""

    logprob: float
    greedy: bool


class Row(NamedTuple):
    """What the model reads, and the continuations that end there: (number of the span, its tokens)."""

    ids: tuple[int, ...]
    asked: tuple[tuple[int, tuple[int, ...]], ...]

    @property
    def targets(self) -> int:
        """Tokens that are scored."""
        return sum(len(tokens) for _, tokens in self.asked)


class Shape(NamedTuple):
    """Rows, tokens a row and targets a row of one batch."""

    rows: int
    length: int
    targets: int


def shared_rows(spans: Sequence[Span]) -> list[Row]:
    """One row for all spans that the model reads the same tokens of: answers A, B, C and D to one question take one forward. Longest first."""
    rows = collections.defaultdict(list)
    for number, span in enumerate(spans):
        rows[(span.context + span.continuation)[:-1]].append((number, span.continuation))
    return [Row(ids, tuple(asked)) for ids, asked in sorted(rows.items(), key=lambda row: -len(row[0]))]


def batches(rows: Sequence[Row], limit: int, tokens: int, multiple: int) -> Iterator[tuple[Shape, list[Row]]]:
    """Rows of one length bucket at a time, at most `tokens` padded tokens together, but at least `multiple` rows, one for each device."""
    by_length = collections.defaultdict(list)
    for row in rows:
        by_length[min(power_bucket(len(row.ids), LEAST_LENGTH), max(limit, 1))].append(row)
    for length, alike in by_length.items():
        most = max(tokens // length // multiple, 1) * multiple
        for start in range(0, len(alike), most):
            own = alike[start : start + most]
            held = min(most, power_bucket(-(-len(own) // multiple), 1) * multiple)
            yield Shape(held, length, power_bucket(max(row.targets for row in own), LEAST_TARGETS, factor=TARGETS_FACTOR)), own


def filled(shape: Shape, rows: Sequence[Row]) -> ContinuationBatch:
    """The rows as arrays of that shape."""
    tokens = np.zeros((shape.rows, shape.length), np.int32)
    columns, targets = np.zeros((2, shape.rows, shape.targets), np.int32)
    for place, row in enumerate(rows):
        tokens[place, : len(row.ids)] = row.ids
        asked = [(len(row.ids) - len(own) + step, token) for _, own in row.asked for step, token in enumerate(own)]
        columns[place, : len(asked)], targets[place, : len(asked)] = zip(*asked, strict=True)
    return ContinuationBatch(tokens, columns, targets)


class Likelihood:
    """Scores spans under `config.model.path`, in the rollout dtype, with weights of its own on the train mesh.

    `limit`: positions that the model reads at once; longer contexts lose their beginning.
    """

    def __init__(self, config: Config, model: build.Model, meshes: Meshes, limit: int):
        self.limit, self.tokens, self.mesh = limit, config.batch.tokens_per_microbatch, meshes.train
        self._program = score_program(meshes.train, functools.partial(score_continuations, model.spec))
        self._params = load_policy(config.model.path, dtype=build.resolve_dtype(config, "rollout"), mesh=meshes.train).params

    def score(self, spans: Sequence[Span], name: str = "loglikelihood") -> list[Score]:
        """One score a span. Raises ValueError for a number that is none: the weights or activations overflowed."""
        scores: list[Score | None] = [None] * len(spans)
        waiting = collections.deque()
        progress, said = Progress(sys.stderr), time.monotonic()
        progress.start(name, len(spans), 0)
        done = 0

        def take() -> int:
            rows, arrays = waiting.popleft()
            logprobs, greedy = movement.to_host(arrays)
            for place, row in enumerate(rows):
                _place_scores(scores, row, logprobs[place], greedy[place])
            return sum(len(row.asked) for row in rows)

        planned = batches(shared_rows([fitted(span, self.limit) for span in spans]), self.limit, self.tokens, rules.batch_rows_multiple(self.mesh))
        try:
            for shape, rows in planned:
                waiting.append((rows, self._program(self._params, place_batch(self.mesh, filled(shape, rows)))))
                done += take() if len(waiting) == IN_FLIGHT else 0
                progress.advance(done)
                if time.monotonic() - said > LINE_SECONDS and not sys.stderr.isatty():
                    said = time.monotonic()
                    progress.line(f"{progress.title(done)} requests{progress.remaining(done)}")
            while waiting:
                take()
        finally:
            progress.stop()
        return scores


def _place_scores(scores: list, row: Row, logprobs: np.ndarray, greedy: np.ndarray) -> None:
    start = 0
    for number, tokens in row.asked:
        own = slice(start, start + len(tokens))
        scores[number], start = Score(float(logprobs[own].sum(dtype=np.float64)), bool(greedy[own].all())), own.stop
        if np.isnan(scores[number].logprob):
            raise ValueError("a log-probability is no number; check the weights, or set precision.rollout=float32")
