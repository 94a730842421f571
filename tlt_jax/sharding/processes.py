"""The processes of a run: how one joins the others, what they tell each other, and how one leaves that cannot go on.

Every function that talks to the others is collective: all processes call it, in the same order.
"""

import os
import pickle
import sys
import traceback
from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

HEARTBEAT_SECONDS = 30  # a process that is gone for so long ends the others
GONE = 75  # exit code of a process that lost another one; a scheduler may start the job again
SMALLEST_MESSAGE = 2**12  # bytes; longer ones grow by powers of two, so that few programs are compiled


class Member(NamedTuple):
    """One of `count` processes; number 0 listens on `coordinator` (HOST:PORT)."""

    coordinator: str
    count: int
    index: int


def join(member: Member | None) -> None:
    """Meet the other processes, before jax sees its devices; without a `member` only where a cluster starts several (Slurm, Open MPI, a TPU pod).

    Raises RuntimeError when they do not come within five minutes.
    """
    if member is not None:
        jax.distributed.initialize(member.coordinator, member.count, member.index, heartbeat_timeout_seconds=HEARTBEAT_SECONDS)
    elif in_a_cluster(os.environ):
        jax.distributed.initialize(heartbeat_timeout_seconds=HEARTBEAT_SECONDS)


def in_a_cluster(environment: Mapping[str, str]) -> bool:
    """Whether this process is one of several that a cluster started together, by the variables that jax.distributed.initialize() reads, too."""
    tasks = max(int(environment.get(name, "1")) for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"))
    return tasks > 1 or "," in environment.get("TPU_WORKER_HOSTNAMES", "") or "MEGASCALE_COORDINATOR_ADDRESS" in environment


def exchange(value) -> list:
    """The values of all processes, by their number. Any value that can be pickled; collective."""
    if jax.process_count() == 1:
        return [value]
    message = np.frombuffer(pickle.dumps(value), np.uint8)
    lengths = multihost_utils.process_allgather(np.int32(len(message)))
    padded = np.zeros(max(SMALLEST_MESSAGE, 1 << (int(lengths.max()) - 1).bit_length()), np.uint8)
    padded[: len(message)] = message
    rows = multihost_utils.process_allgather(padded)
    return [pickle.loads(row[:length].tobytes()) for row, length in zip(rows, lengths, strict=True)]


def gathered(array: np.ndarray) -> list[np.ndarray]:
    """The arrays of all processes, all of one shape, by their number; collective."""
    return [array] if jax.process_count() == 1 else list(multihost_utils.process_allgather(np.asarray(array)))


class LeaveAtOnce:
    """Context manager: an error that ends one of several processes ends it at once. A clean exit would wait for the others, who wait for it.

    Errors of an `expected` kind are those that all processes have together.
    """

    def __init__(self, *expected: type[BaseException]):
        self._expected = (SystemExit, *expected)

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind, error, trace) -> None:
        if error is None or issubclass(kind, self._expected) or not _several():
            return
        traceback.print_exception(kind, error, trace)
        if isinstance(error, jax.errors.JaxRuntimeError):
            say_goodbye(f"process {jax.process_index()} of {jax.process_count()} lost the others ({str(error).splitlines()[0][:200]})")
        leave(GONE if isinstance(error, jax.errors.JaxRuntimeError) else 1)


def ended(code: int) -> int:
    """The exit code of a run that is over. One of several processes that failed leaves at once, as after an error."""
    if code in (1, 2) and _several():
        leave(code)
    return code


def _several() -> bool:
    """Whether there are others, without starting a backend where there cannot be any."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def leave(code: int) -> None:
    """End this process now, whatever its threads do."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def say_goodbye(reason: str) -> None:
    """Why the run cannot go on, and what to do."""
    print(f"python -m tlt_jax.train: error: {reason}: start all processes again with the same command, they continue from the newest checkpoint",
          file=sys.stderr)
