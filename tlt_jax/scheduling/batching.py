"""Which sequences share a row, which rows share a micro-batch. Host-pure: lengths in, lists of indices out.

Everything is deterministic and depends on the lengths alone. No tokens are moved here, and nothing is dropped: what cannot fit is an error.
"""

import bisect
from collections.abc import Sequence
from typing import NamedTuple

_SHAPES = 8  # row counts of a micro-batch that may occur


class MicrobatchPlan(NamedTuple):
    """Micro-batches of one shape [rows, row_length], so that one compiled program serves all of them; a row is a list of sequence indices."""

    row_length: int
    microbatches: list[list[list[int]]]


def length_bucket(length: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds `length`; ValueError when none does."""
    fitting = [bucket for bucket in buckets if bucket >= length]
    if not fitting:
        raise ValueError(f"length {length} fits in no bucket of {sorted(buckets)}")
    return min(fitting)


def power_bucket(length: int, minimum: int, *, factor: int = 2) -> int:
    """The smallest of minimum, minimum · factor, minimum · factor², … that holds `length`."""
    if minimum < 1 or factor < 2:
        raise ValueError(f"power_bucket needs minimum >= 1 and factor >= 2, got {minimum} and {factor}")
    bucket = minimum
    while bucket < length:
        bucket *= factor
    return bucket


def pack(lengths: Sequence[int], capacity: int, *, row_multiple: int = 1) -> list[list[int]]:
    """Rows of indices whose lengths add up to at most `capacity` tokens: longest first, each into the fullest row that still holds it.

    Indices ascend inside a row and rows are ordered by their first index; empty rows at the end make their number a multiple of `row_multiple`.
    """
    _check_lengths(lengths, capacity, "row capacity")
    rows: list[list[int]] = []
    space: list[tuple[int, int]] = []  # (free tokens, row), ascending
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        fit = bisect.bisect_left(space, (lengths[index], -1))
        if fit == len(space):
            rows.append([])
            space.append((capacity, len(rows) - 1))
        free, row = space.pop(fit)
        rows[row].append(index)
        bisect.insort(space, (free - lengths[index], row))
    rows = sorted(sorted(row) for row in rows)
    return rows + [[] for _ in range(-len(rows) % row_multiple)]


def microbatches(lengths: Sequence[int], tokens_per_microbatch: int, *, row_length: int | None = None, row_multiple: int = 1) -> MicrobatchPlan:
    """Pack sequences into micro-batches of at most `tokens_per_microbatch` tokens, padding included, all of one shape.

    `row_length` defaults to the longest sequence's power-of-two bucket, or the longest itself when the bucket is above the budget. Rows per micro-batch
    are a multiple of `row_multiple` (the devices that share the batch) and at most what the budget holds; fewer, in eighths of that, when there are not
    enough sequences to fill it, so that little is padding and few shapes are compiled. The last micro-batch may end in empty rows.
    """
    longest = max(lengths, default=1)
    if row_length is None:
        row_length = power_bucket(longest, 16)
        if row_length * row_multiple > tokens_per_microbatch:
            row_length = longest
    most = tokens_per_microbatch // row_length // row_multiple * row_multiple
    if most == 0:
        raise ValueError(
            f"tokens_per_microbatch {tokens_per_microbatch} holds no micro-batch of {row_multiple} rows of {row_length} tokens (the longest sequence has"
            f" {longest}): raise batch.tokens_per_microbatch to at least {row_multiple * row_length}"
        )
    needed = len(pack(lengths, row_length))
    share = -(-needed // max(1, -(-needed // most)))  # rows a micro-batch would hold when all are alike
    eighth = -(-most // (_SHAPES * row_multiple)) * row_multiple
    rows_each = min(most, max(1, -(-share // eighth)) * eighth)
    rows = pack(lengths, row_length, row_multiple=rows_each)
    return MicrobatchPlan(row_length, [rows[start : start + rows_each] for start in range(0, len(rows), rows_each)])


def _check_lengths(lengths: Sequence[int], limit: float = float("inf"), limit_name: str = "") -> None:
    for index, length in enumerate(lengths):
        if length < 1:
            raise ValueError(f"sequence {index} has length {length}: every sequence needs at least one token")
        if length > limit:
            raise ValueError(f"sequence {index} has {length} tokens, more than the {limit_name} of {limit}")
