"""Ends a process that has stopped getting on, so that a scheduler can start the job again: with several processes one that hangs holds all of them up."""

import threading
import time

from tlt_jax.sharding import processes

CHECK_SECONDS = 1.0


class Watchdog:
    """Context manager with a thread: when nothing was heard for `seconds`, it says what was going on and ends the process with exit code 75. 0: never."""

    def __init__(self, seconds: float, name: str):
        self._seconds, self._name = seconds, name
        self._heard, self._doing = time.monotonic(), "starting"
        self._over = threading.Event()

    @classmethod
    def asleep(cls) -> "Watchdog":
        """One that never ends anything."""
        return cls(0.0, "")

    def __enter__(self) -> "Watchdog":
        if self._seconds:
            threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self._over.set()

    def hear(self, doing: str) -> None:
        """The process gets on; `doing` says with what."""
        self._heard, self._doing = time.monotonic(), doing

    def _watch(self) -> None:
        while not self._over.wait(CHECK_SECONDS):
            silence = time.monotonic() - self._heard
            if silence > self._seconds:
                processes.say_goodbye(f"{self._name} has not got on for {silence:.0f} s while {self._doing}, or waits for another process that has not")
                processes.leave(processes.GONE)
