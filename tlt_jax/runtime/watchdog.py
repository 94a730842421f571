"""Ends a process that has stopped getting on, or whose others are gone, so that a scheduler can start the job again: one that hangs holds all of them up."""

import threading
import time

import jax

from tlt_jax.sharding import processes

CHECK_SECONDS = 1.0


class Watchdog:
    """Context manager with a thread: when nothing was heard for `seconds`, it says what was going on and ends the process with exit code 75. 0: never.

    So it does when one of several processes is gone that had entered its own one and had not left it.
    """

    def __init__(self, seconds: float, name: str):
        self._seconds, self._name = seconds, name
        self._heard, self._doing = time.monotonic(), "starting"
        self._over, self._pulse = threading.Event(), processes.Pulse()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    @classmethod
    def asleep(cls) -> "Watchdog":
        """One that never ends anything."""
        return cls(0.0, "")

    def __enter__(self) -> "Watchdog":
        if self._seconds:
            self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._over.set()
        if self._seconds:
            self._thread.join()
            self._pulse.stop()

    def hear(self, doing: str) -> None:
        """The process gets on; `doing` says with what."""
        self._heard, self._doing = time.monotonic(), doing

    def _watch(self) -> None:
        while not self._over.wait(CHECK_SECONDS):
            silence = time.monotonic() - self._heard
            if silence > self._seconds:
                self._leave(f"{self._name} has not got on for {silence:.0f} s while {self._doing}, or waits for another process that has not")
            try:
                gone = self._pulse.beat()
            except jax.errors.JaxRuntimeError as error:
                self._leave(f"{self._name} lost the others ({str(error).splitlines()[0][:200]})")
            if gone:
                self._leave(f"{self._name} lost the others (process {gone[0]} says nothing any more)")

    @staticmethod
    def _leave(reason: str) -> None:
        processes.say_goodbye(reason)
        processes.leave(processes.GONE)
