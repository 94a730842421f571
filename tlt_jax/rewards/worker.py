"""A reward worker: a process of its own that scores what comes over a socket. Never imports jax; ends when the other side is gone.

Messages in: first (scorer, time limit, memory limit, recycle size), then one tuple of items each. Messages out: first whether the scorer wants whole groups, or
the start-up error as text; then, in order, (outcomes or None, error or None, seconds, leaving). Scorer and items come pickled on their own, so that what cannot
be read is reported.
"""

import os
import pathlib
import pickle
import resource
import signal
import time
import traceback
from multiprocessing.connection import Connection

from tlt_jax.rewards.items import Outcome
from tlt_jax.rewards.scorers import BuiltScorer, build_scorer

_MAX_TEXT = 4_000  # characters of a traceback or an extracted answer that travel back
_GRACE = 10.0  # seconds beyond the limit before the worker ends itself, should its parent be gone


def main(descriptor: int) -> None:
    """Serve until the connection closes. `descriptor`: the inherited socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C and preemption are for the trainer, which closes the pool
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection = Connection(descriptor)
    pickled, time_limit, memory_limit_mb, recycle_mb = connection.recv()
    if memory_limit_mb:
        resource.setrlimit(resource.RLIMIT_AS, (memory_limit_mb << 20, memory_limit_mb << 20))
    scorer = _built(connection, pickled)
    while scorer is not None:
        try:
            message = connection.recv_bytes()
        except (EOFError, ConnectionResetError):  # the trainer closed the pool, or is gone
            return
        signal.setitimer(signal.ITIMER_REAL, time_limit + _GRACE)  # unhandled SIGALRM ends the process
        started = time.perf_counter()
        outcomes, error = _scored(scorer, message)
        signal.setitimer(signal.ITIMER_REAL, 0)
        leaving = bool(recycle_mb) and _resident_mb() > recycle_mb
        connection.send((outcomes, error, time.perf_counter() - started, leaving))
        if leaving:
            return


def _built(connection: Connection, pickled: bytes) -> BuiltScorer | None:
    try:
        scorer = build_scorer(pickle.loads(pickled))
    except BaseException:  # listed in the architecture test: whatever a user's file raises at import must reach the trainer as a message
        connection.send(traceback.format_exc()[-_MAX_TEXT:])
        return None
    connection.send(scorer.grouped)
    return scorer


def _scored(scorer: BuiltScorer, message: bytes) -> tuple[list[Outcome] | None, str | None]:
    try:
        outcomes = scorer.score(pickle.loads(message))
        return [Outcome(one.score, dict(one.components), one.pred and one.pred[:_MAX_TEXT], one.verdict) for one in outcomes], None
    except BaseException:  # listed in the architecture test: a user's function may raise anything, SystemExit too; it becomes a counted error
        return None, traceback.format_exc()[-_MAX_TEXT:]


def _resident_mb() -> float:
    """Resident memory now (not the peak, which a new process may inherit); 0 where /proc does not exist."""
    status = pathlib.Path("/proc/self/statm")
    return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20 if status.exists() else 0.0
