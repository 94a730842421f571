"""The step profile: which steps it traces, that a stop in between keeps the trace, and that a real trace is written."""

import jax
import jax.numpy as jnp
import pytest

from tlt_jax.training.profiling import StepProfile


@pytest.fixture
def calls(monkeypatch):
    made = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda directory: made.append(f"start {directory}"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: made.append("stop"))
    return made


def walk(calls, profile, steps):
    with profile:
        for step in steps:
            profile.before(step)
            calls.append(step)
            profile.after(step)
    return calls


@pytest.mark.parametrize(("first", "count", "steps", "expected"), [
    (2, 2, range(1, 6), [1, "start d", 2, 3, "stop", 4, 5]),
    (2, 0, range(1, 4), [1, 2, 3]),
    (1, 1, range(1, 3), ["start d", 1, "stop", 2]),
    (3, 9, range(1, 5), [1, 2, "start d", 3, 4, "stop"]),  # the run ends first
    (2, 3, range(3, 6), ["start d", 3, 4, "stop", 5]),  # resumed in the middle
    (2, 2, range(9, 11), [9, 10]),
])
def test_the_wanted_steps_are_traced_and_no_others(calls, first, count, steps, expected):
    assert walk(calls, StepProfile("d", first, count), steps) == expected


def test_an_error_in_a_traced_step_ends_the_trace(calls):
    with pytest.raises(ZeroDivisionError), StepProfile("d", 1, 5) as profile:
        profile.before(1)
        raise ZeroDivisionError
    assert calls == ["start d", "stop"]


def test_a_trace_is_written(tmp_path):
    with StepProfile(str(tmp_path / "profile"), 1, 1) as profile:
        profile.before(1)
        jnp.ones(3).block_until_ready()
        profile.after(1)
    assert list(tmp_path.rglob("*.xplane.pb"))
