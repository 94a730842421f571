"""A process that does not get on is ended with a reason; one that does, and one whose watchdog sleeps, are not."""

import os
import pathlib
import subprocess
import sys
import textwrap

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PROCESS = """
    import sys, time
    from tlt_jax.runtime import watchdog

    watchdog.CHECK_SECONDS = 0.05
    kind = sys.argv[1]
    with watchdog.Watchdog.asleep() if kind == "asleep" else watchdog.Watchdog(0.4, "process 1 of 2") as dog:
        dog.hear("rollout")
        for _ in range(10 if kind == "busy" else 0):
            time.sleep(0.1)
            dog.hear("rollout")
        time.sleep(20 if kind == "hung" else 0.1 if kind == "busy" else 1)
    time.sleep(0.6)
    print("over")
"""


@pytest.mark.parametrize("kind", ["hung", "busy", "asleep"])
def test_only_a_process_that_hangs_is_ended(kind):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(PROCESS), kind], env=environment, capture_output=True, text=True, timeout=60)
    if kind == "hung":
        assert done.returncode == 75 and "process 1 of 2 has not got on for" in done.stderr and "while rollout" in done.stderr
        assert "start all processes again with the same command" in done.stderr
    else:
        assert (done.returncode, done.stdout) == (0, "over\n"), done.stderr
