"""The processes of a run: how one joins the others, what they tell each other, and how one leaves that cannot go on.

Every function that talks to the others is collective: all processes call it, in the same order. `Outlook` and `Pulse` are not: what a process tells there
is read whenever the others like.
"""

import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import numpy as np
from jax._src import distributed  # where jax itself, and orbax, find the store of keys and values that all processes share
from jax.experimental import multihost_utils

HEARTBEAT_SECONDS = 60  # a process that is gone for so long ends the others: jax aborts them, code 134, where nothing noticed it before
SILENT_SECONDS = 20  # a process that has not said for so long that it lives is gone
GONE = 75  # exit code of a process that lost another one; a scheduler may start the job again
REMAINING = "tlt_jax/remaining/"  # key of what a process told of its rollout phase, by its number
PULSE, FAREWELL = "tlt_jax/pulse/", "over"  # key of how often a process has said that it lives, by its number; and its last word
TELL_SECONDS, ASK_SECONDS = 1.0, 0.05  # between two tellings, and between two looks at what the others told
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


class Outlook:
    """How long a rollout phase will take, as its processes estimate it while it runs. Nobody waits for an answer."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._phase = clock, 0

    def start(self) -> None:
        """A phase begins, the same one in all processes."""
        self._phase += 1
        self._told = self._asked = float("-inf")
        self._others = float("inf") if _several() else 0.0

    def tell(self, seconds: float) -> None:
        """This process's rows will take so long; 0: they are finished."""
        now = self._clock()
        if _several() and now >= self._told + (TELL_SECONDS if seconds else 0):
            self._told = now if seconds else float("inf")
            _tell(REMAINING, f"{self._phase} {seconds}")

    def others(self) -> float:
        """Seconds that the others' rows will take: 0 when all are finished, infinity while one has said nothing yet."""
        now = self._clock()
        if self._others and now >= self._asked + ASK_SECONDS:
            self._asked = now
            told = [value.split() for number, value in _told(REMAINING).items() if number != jax.process_index()]
            known = [float(seconds) for phase, seconds in told if int(phase) == self._phase]
            self._others = max(known) if len(known) == jax.process_count() - 1 else float("inf")
        return self._others


class Pulse:
    """Whether the others live: each process says so again and again."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._beats, self._heard = clock, 0, {}

    def beat(self) -> list[int]:
        """Say that this process lives; the numbers of those that did and have not said so for `SILENT_SECONDS`."""
        if not _several():
            return []
        self._beats += 1
        _tell(PULSE, str(self._beats))
        now = self._clock()
        for number, said in _told(PULSE).items():
            if said != self._heard.get(number, ("", now))[0]:
                self._heard[number] = (said, now)
        return [number for number, (said, since) in self._heard.items() if said != FAREWELL and now > since + SILENT_SECONDS]

    def stop(self) -> None:
        """This process is done, and says nothing from now on."""
        if _several():
            _tell(PULSE, FAREWELL)


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


def _tell(what: str, value: str) -> None:
    distributed.global_state.client.key_value_set(f"{what}{jax.process_index()}", value, allow_overwrite=True)


def _told(what: str) -> dict[int, str]:
    return {int(key.removeprefix(what)): value for key, value in distributed.global_state.client.key_value_dir_get(what)}


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
