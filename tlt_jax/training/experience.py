"""Finished sequences as packed micro-batches, and results of scoring passes back to sequences. numpy only.

Sequences keep the order they are given in (prompt, sample), so what is trained never depends on which row finished first.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from tlt_jax.records import PackedBatch, PairBatch
from tlt_jax.scheduling import batching
from tlt_jax.strategies import Completion

SLACK = 1.05  # room for two sequences that are a little longer than usual


@dataclasses.dataclass
class Trajectory:
    """One sequence: prompt plus response ids, and per-response-token numbers (all of the response's length)."""

    tokens: np.ndarray  # int32
    prompt_length: int
    rollout_logprobs: np.ndarray
    trained: bool = True  # False: not scored; it takes no part in the update
    counts: np.ndarray | None = None  # 1 on the response tokens that are trained on; None: on all
    advantages: np.ndarray | None = None
    old_logprobs: np.ndarray | None = None
    reference_logprobs: np.ndarray | None = None
    old_values: np.ndarray | None = None
    returns: np.ndarray | None = None

    @property
    def response_length(self) -> int:
        """Response tokens, stop id included."""
        return len(self.tokens) - self.prompt_length


def of_completion(completion: Completion) -> Trajectory:
    """Prompt and answer of a rollout."""
    tokens = np.array([*completion.request.prompt_ids, *completion.token_ids], np.int32)
    return Trajectory(tokens, len(completion.request.prompt_ids), np.array(completion.logprobs, np.float32))


@dataclasses.dataclass(frozen=True)
class Packing:
    """Shape of micro-batches."""

    tokens_per_microbatch: int
    row_multiple: int  # rows of a micro-batch are a multiple of this (devices that share the batch)
    row_length: int  # columns; holds the longest sequence


@dataclasses.dataclass(frozen=True)
class Packed:
    """Micro-batches and where each trajectory lies: (micro-batch, row, first column)."""

    batches: list[PackedBatch]
    places: list[tuple[int, int, int]]


def packing_for(prompt_lengths: Sequence[int], max_new_tokens: int, tokens_per_microbatch: int, row_multiple: int) -> Packing:
    """The one packing of a run: rows hold the longest sequence that may occur, better two of mean prompt and longest answer side by side, in steps of 32.

    It depends on nothing that a rollout produced, so a run compiles one row shape and a resumed run packs alike.
    """
    longest, typical = max(prompt_lengths) + max_new_tokens, sum(prompt_lengths) / len(prompt_lengths) + max_new_tokens
    wanted = -(-max(longest, round(2 * SLACK * typical)) // 32) * 32
    return Packing(tokens_per_microbatch, row_multiple, max(longest, min(wanted, tokens_per_microbatch // row_multiple)))


def pack(trajectories: list[Trajectory], packing: Packing, beta: float = 0.0) -> Packed:
    """Pack trajectories into micro-batches of one shape; `beta` weighs the KL to the reference in the loss."""
    lengths = [len(trajectory.tokens) for trajectory in trajectories]
    plan = batching.microbatches(lengths, packing.tokens_per_microbatch, row_length=packing.row_length, row_multiple=packing.row_multiple)
    responses = max(sum(trajectories[index].response_length for index in row) for rows in plan.microbatches for row in rows)
    quarter = max(packing.row_length // 4, 1)
    targets = min(-(-responses // quarter) * quarter, packing.row_length)
    batches, places = [], [(0, 0, 0)] * len(trajectories)
    for number, rows in enumerate(plan.microbatches):
        batch = _empty(len(rows), plan.row_length, targets, beta)
        for row, members in enumerate(rows):
            column = used = 0
            for segment, index in enumerate(members, start=1):
                places[index] = (number, row, column)
                used = _write(batch, row, (column, segment, used), trajectories[index])
                column += lengths[index]
        batches.append(batch)
    return Packed(batches, places)


def pack_pairs(pairs: Sequence[tuple[Sequence[int], Sequence[int]]], packing: Packing) -> list[PairBatch]:
    """Pairs of (better, worse) token ids as micro-batches of one shape; the two of a pair stand side by side."""
    plan = batching.microbatches(
        [len(better) + len(worse) for better, worse in pairs], packing.tokens_per_microbatch, row_length=packing.row_length, row_multiple=packing.row_multiple)
    most, length = batching.power_bucket(max(len(row) for rows in plan.microbatches for row in rows), 1), plan.row_length
    batches = []
    for rows in plan.microbatches:
        tokens_BT, positions_BT, segments_BT = (np.zeros((len(rows), length), np.int32) for _ in range(3))
        ends_YB2 = np.full((most, len(rows), 2), length, np.int32)
        for row, members in enumerate(rows):
            column = 0
            for number, index in enumerate(members):
                for side, ids in enumerate(pairs[index]):
                    whole = slice(column, column + len(ids))
                    tokens_BT[row, whole], positions_BT[row, whole], segments_BT[row, whole] = ids, np.arange(len(ids)), 2 * number + side + 1
                    column += len(ids)
                    ends_YB2[number, row, side] = column - 1
        batches.append(PairBatch(tokens_BT, positions_BT, segments_BT, ends_YB2[..., 0].T, ends_YB2[..., 1].T))
    return batches


def unpack(packed: Packed, results: list[np.ndarray], trajectories: list[Trajectory]) -> list[np.ndarray]:
    """The response part of per-column results [B, T] for every trajectory."""
    responses = []
    for (number, row, column), trajectory in zip(packed.places, trajectories, strict=True):
        responses.append(results[number][row, column + trajectory.prompt_length : column + len(trajectory.tokens)])
    return responses


def _empty(rows: int, length: int, targets: int, beta: float) -> PackedBatch:
    def zeros(dtype):
        return np.zeros((rows, length), dtype)

    return PackedBatch(
        tokens_BT=zeros(np.int32), positions_BT=zeros(np.int32), segments_BT=zeros(np.int32), targets_BM=np.full((rows, targets), length, np.int32),
        mask_BT=zeros(np.float32), advantages_BT=zeros(np.float32), old_logprobs_BT=zeros(np.float32), rollout_logprobs_BT=zeros(np.float32),
        reference_logprobs_BT=zeros(np.float32), old_values_BT=zeros(np.float32), returns_BT=zeros(np.float32), beta=np.float32(beta))


def _write(batch: PackedBatch, row: int, place: tuple[int, int, int], trajectory: Trajectory) -> int:
    """Write one trajectory at (column, segment) of a row with `used` targets before it; returns the targets used after it."""
    column, segment, used = place
    length, response = len(trajectory.tokens), trajectory.response_length
    whole = slice(column, column + length)
    answer = slice(column + trajectory.prompt_length, column + length)
    batch.tokens_BT[row, whole] = trajectory.tokens
    batch.positions_BT[row, whole] = np.arange(length)
    batch.segments_BT[row, whole] = segment
    batch.targets_BM[row, used : used + response] = np.arange(answer.start, answer.stop)
    batch.mask_BT[row, answer] = float(trajectory.trained) if trajectory.counts is None else trajectory.trained * trajectory.counts
    batch.rollout_logprobs_BT[row, answer] = trajectory.rollout_logprobs
    for array, values in (
        (batch.advantages_BT, trajectory.advantages), (batch.old_logprobs_BT, trajectory.old_logprobs),
        (batch.reference_logprobs_BT, trajectory.reference_logprobs), (batch.old_values_BT, trajectory.old_values), (batch.returns_BT, trajectory.returns)):
        if values is not None:
            array[row, answer] = values
    return used + response
