"""The JAX profile of a few RL steps, for TensorBoard or Perfetto. It starts and stops the trace; it measures and shows nothing."""

import jax


class StepProfile:
    """Context manager that traces the steps `first` to `first + steps - 1` into `directory`; steps 0 = off. A stop in between keeps what was traced."""

    def __init__(self, directory: str, first: int, steps: int):
        self._directory, self._first, self._last = directory, first, first + steps - 1
        self._running = False

    def __enter__(self) -> "StepProfile":
        return self

    def __exit__(self, *_) -> None:
        self._stop()

    def before(self, step: int) -> None:
        """Call at the start of every step."""
        if not self._running and self._first <= step <= self._last:
            jax.profiler.start_trace(self._directory)
            self._running = True

    def after(self, step: int) -> None:
        """Call at the end of every step."""
        if step >= self._last:
            self._stop()

    def _stop(self) -> None:
        if self._running:
            self._running = False
            jax.profiler.stop_trace()
