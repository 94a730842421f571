import os
import pathlib
import signal
import socket
import subprocess
import sys
import textwrap
import threading

import pytest

from tlt_jax.training.preemption import PreemptionSignal

ROOT = pathlib.Path(__file__).parents[2]


def _send(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_first_signal_only_sets_the_flag(number, code, capfd):
    with PreemptionSignal() as preemption:
        assert not preemption.requested and not preemption.requested_anywhere()
        _send(number)
        assert preemption.requested and preemption.requested_anywhere() and preemption.exit_code == code
    assert f"{signal.Signals(number).name}: saving" in capfd.readouterr().err


def test_the_second_interrupt_stops_at_once():
    with PreemptionSignal() as preemption, pytest.raises(KeyboardInterrupt):
        _send(signal.SIGINT)
        assert preemption.requested
        _send(signal.SIGINT)


def test_repeated_terms_and_a_first_interrupt_after_one_do_not_break_the_save():
    with PreemptionSignal() as preemption:
        _send(signal.SIGTERM)
        _send(signal.SIGTERM)
        _send(signal.SIGINT)
        assert preemption.exit_code == 143
        with pytest.raises(KeyboardInterrupt):
            _send(signal.SIGINT)


def test_the_old_handlers_come_back_also_after_an_error():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with pytest.raises(ZeroDivisionError), PreemptionSignal():
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) != before
        raise ZeroDivisionError
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_another_thread_is_refused():
    errors = []

    def enter():
        try:
            with PreemptionSignal():
                errors.append("entered")
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert "main thread" in errors[0]


LOOP = """
    import sys, time
    from tlt_jax.training.preemption import PreemptionSignal

    with PreemptionSignal() as preemption:
        print("running", flush=True)
        while not preemption.requested_anywhere():
            time.sleep(0.01)
        print("saved", flush=True)
        sys.exit(preemption.exit_code)
"""


TWO_PROCESSES = """
    import os, signal, sys
    import jax
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
    from tlt_jax.training.preemption import PreemptionSignal

    with PreemptionSignal() as preemption:
        assert not preemption.requested_anywhere()
        if jax.process_index() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        assert preemption.requested == (jax.process_index() == 1)
        assert preemption.requested_anywhere()
        print("exit", preemption.exit_code)
"""


@pytest.mark.slow
def test_a_signal_to_one_process_stops_all_at_the_same_step():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        command = [sys.executable, "-c", textwrap.dedent(TWO_PROCESSES), f"localhost:{free.getsockname()[1]}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([*command, str(rank)], env=environment, **pipes) for rank in range(2)]
    try:
        results = [process.communicate(timeout=60) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for output, errors in results:
        assert "exit 143" in output, errors[-3000:]


def test_a_terminated_process_finishes_its_step_and_exits_with_143():
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(LOOP)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "running\n"
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=60)
    assert output == "saved\n" and process.returncode == 143 and "SIGTERM" in errors
