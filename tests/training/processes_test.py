"""Two processes of two devices each train one policy and one drafter: as one process would, and when one of them is killed or hangs."""

import signal
import socket
import subprocess
import sys

import pytest

from tests.training.resume_test import REWARD, Place

# Process 1 is told at which RL step its reward kills the trainer, or lets it wait.
HARM = '''
import time

def harm(step):
    if os.environ.get("KILL_IN_STEP") == str(step):
        os.kill(os.getppid(), signal.SIGKILL)
    if os.environ.get("WAIT_IN_STEP") == str(step):
        time.sleep(1000)
'''
OPTIONS = (
    "stages.order=rl", "stages.rl.steps=4", "mesh.train.fsdp=1", "mesh.train.data=-1", "mesh.rollout_slices=4", "batch.tokens_per_microbatch=256",
    "speculative.method=eagle", "speculative.strategies=2_1_2", "distill.tokens_per_update=128", "distill.lr=0.01", "distill.unroll=2",
    "drafter.quanta_per_step=4", "drafter.sync_every=1", "algorithm.beta=0.1", "reward.timeout_seconds=2000")
LIMIT = 90  # seconds after which the other process has to be gone


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = Place(tmp_path_factory.mktemp("processes"))
    (place.folder / "reward.py").write_text(HARM + REWARD.replace("answer, metadata, step):\n", "answer, metadata, step):\n    harm(step)\n"))
    return place


def train(place, workdir, *options, processes, devices, harm=None):
    """(exit code, output, errors) of every process; `harm` is an environment variable with its value, for the last one."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    started = []
    for number in range(processes):
        flags = f"{place.environment['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
        environment = place.environment | {"XLA_FLAGS": flags} | (dict([harm]) if harm and number == processes - 1 else {})
        who = [f"--coordinator_address={address}", f"--num_processes={processes}", f"--process_id={number}"] if processes > 1 else []
        command = [sys.executable, "-m", "tlt_jax.train", *place.arguments(workdir, *OPTIONS, *options), *who]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, cwd=place.folder, env=environment, **pipes))
    try:
        said = [one.communicate(timeout=500) for one in started]
    finally:
        for one in started:
            one.kill()
    return [(one.returncode, *texts) for one, texts in zip(started, said, strict=True)]


@pytest.fixture(scope="module")
def runs(place):
    alone = train(place, "alone", processes=1, devices=4)
    together = train(place, "together", processes=2, devices=2)
    return alone + together


def test_both_processes_end_as_one_does(runs):
    assert [code for code, *_ in runs] == [0, 0, 0], [errors[-3000:] for _, _, errors in runs]


def test_two_processes_sample_what_one_does(place, runs):
    assert place.records("together", "samples") == place.records("alone", "samples")


def test_a_killed_process_ends_the_other_one_with_a_reason_and_both_go_on_from_the_newest_checkpoint(place, runs):
    (code, _, errors), (killed, *_) = train(place, "killed", processes=2, devices=2, harm=("KILL_IN_STEP", "3"))
    assert killed == -signal.SIGKILL
    assert code == 75 and "start all processes again with the same command" in errors, (code, errors[-3000:])
    assert [code for code, *_ in train(place, "killed", processes=2, devices=2)] == [0, 0]
    assert place.records("killed", "samples") == place.records("together", "samples")
