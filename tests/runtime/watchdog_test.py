"""A process that does not get on, or whose others are gone, is ended with a reason; one that does, and one whose watchdog sleeps, are not."""

import os
import pathlib
import signal
import socket
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


MEMBER = """
    import os, signal, sys, time
    from tlt_jax.runtime import watchdog
    from tlt_jax.sharding import processes

    watchdog.CHECK_SECONDS, processes.SILENT_SECONDS = 0.1, 1
    address, number, kind = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    processes.join(processes.Member(address, 2, number))
    with watchdog.Watchdog(60, f"process {number} of 2"):
        processes.exchange(0)
        time.sleep(0.5 if number else 3)
        if number and kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(3 if number else 0)
    print("over")
"""


@pytest.mark.parametrize("kind", ["killed", "done"])
def test_a_process_that_waits_for_no_answer_of_another_one_notices_when_that_is_killed(kind):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    members = [
        subprocess.Popen([sys.executable, "-c", textwrap.dedent(MEMBER), address, str(number), kind], env=environment, **pipes) for number in range(2)]
    try:
        said = [member.communicate(timeout=100) for member in members]
    finally:
        for member in members:
            member.kill()
    codes = [member.returncode for member in members]
    if kind == "killed":
        assert codes == [75, -signal.SIGKILL], said
        assert "process 0 of 2 lost the others (process 1 says nothing any more)" in said[0][1] and "start all processes again" in said[0][1]
    else:
        assert codes == [0, 0] and all(out.endswith("over\n") for out, _ in said), said
