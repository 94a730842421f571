"""Turns SIGTERM (preemption, `scancel`, a spot machine going away) and Ctrl-C into a flag that the loop reads, so that it can save and leave at a clean point.

It saves nothing and never exits by itself. Exit codes after the clean save are those a shell gives to the signals, never 0: a scheduler must see an unfinished
job and requeue it, 75 is the watchdog's. The same command with `resume="auto"` continues.
"""

import os
import signal
import threading

import jax
import numpy as np
from jax.experimental import multihost_utils

EXIT_CODES = {signal.SIGTERM: 128 + signal.SIGTERM, signal.SIGINT: 128 + signal.SIGINT}  # 143 and 130


class PreemptionSignal:
    """Context manager: within it the first SIGTERM or SIGINT sets `requested`, a second SIGINT raises KeyboardInterrupt, further SIGTERMs change nothing.

    Enter it in the main thread and after `jax.distributed.initialize`, whose own SIGTERM handler would replace this one. The old handlers come back at the end.
    """

    def __init__(self):
        self._first: signal.Signals | None = None
        self._interrupted = False
        self._old_handlers: dict = {}

    def __enter__(self) -> "PreemptionSignal":
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("signals can only be caught in the main thread: enter PreemptionSignal there")
        for caught in EXIT_CODES:
            self._old_handlers[caught] = signal.signal(caught, self._on_signal)
        return self

    def __exit__(self, *_) -> None:
        for caught, handler in self._old_handlers.items():
            # None stands for a handler that was not installed from Python (jax's own preemption notifier): it cannot be put back, the default can.
            signal.signal(caught, signal.SIG_DFL if handler is None else handler)
        self._old_handlers.clear()

    @property
    def requested(self) -> bool:
        """True once this process was asked to stop. Read it between dispatches; with several processes decide by `requested_anywhere`."""
        return self._first is not None

    def requested_anywhere(self) -> bool:
        """True when any process was asked to stop. Collective with several processes: all call it, at the same step end, and all save the same step."""
        if jax.process_count() == 1:
            return self.requested
        return bool(np.any(multihost_utils.process_allgather(np.int32(self.requested))))

    @property
    def exit_code(self) -> int:
        """What to exit with after the clean save: 130 after Ctrl-C, otherwise 143, also where another process got the signal."""
        return EXIT_CODES[self._first or signal.SIGTERM]

    def _on_signal(self, number: int, frame) -> None:
        again = self._interrupted and number == signal.SIGINT
        self._interrupted = self._interrupted or number == signal.SIGINT
        if again:
            raise KeyboardInterrupt
        if self._first is None:
            self._first = signal.Signals(number)
            # os.write because print is not reentrant: the signal may arrive inside one.
            end = f"stopping with exit code {self.exit_code}; Ctrl-C again stops at once"
            os.write(2, f"\n{self._first.name}: saving at the end of this step, then {end}.\n".encode())
