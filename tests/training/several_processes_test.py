"""Two processes of two devices each train one policy, with --full one drafter, too: as one process would, also when one of them is killed."""

import signal
import socket
import subprocess
import sys

import numpy as np
import pytest

from tests.training.resume_test import REWARD, Place

# The last process is told at which RL step its reward kills the trainer.
HARM = '''
def harm(step):
    if os.environ.get("KILL_IN_STEP") == str(step):
        os.kill(os.getppid(), signal.SIGKILL)
'''
OPTIONS = (
    "stages.order=rl", "stages.rl.steps=4", "mesh.train.fsdp=1", "mesh.train.data=-1", "mesh.rollout_slices=4", "batch.tokens_per_microbatch=256",
    "algorithm.beta=0.1", "checkpoint.async_save=false")
LEARNING = (  # compiled in every process: with --full
    "speculative.method=eagle", "speculative.strategies=2_1_2", "distill.tokens_per_update=128", "distill.lr=0.01", "distill.unroll=2",
    "drafter.quanta_per_step=4", "drafter.sync_every=1")


@pytest.fixture(scope="module")
def place(tmp_path_factory, pytestconfig):
    place = Place(tmp_path_factory.mktemp("processes"))
    place.options = (*OPTIONS, *LEARNING) if pytestconfig.getoption("full") else OPTIONS
    (place.folder / "reward.py").write_text(HARM + REWARD.replace("answer, metadata, step):\n", "answer, metadata, step):\n    harm(step)\n"))
    return place


def train(place, workdir, *, processes, devices, harm=None):
    """(exit code, output, errors) of every process; `harm` is an environment variable with its value, for the last one."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    started = []
    for number in range(processes):
        flags = f"{place.environment['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
        environment = place.environment | {"XLA_FLAGS": flags} | (dict([harm]) if harm and number == processes - 1 else {})
        who = [f"--coordinator_address={address}", f"--num_processes={processes}", f"--process_id={number}"] if processes > 1 else []
        command = [sys.executable, "-m", "tlt_jax.train", *place.arguments(workdir, *place.options), *who]
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
    """One process on four devices; two of two devices each, one of which is killed in RL step 3, and both started again."""
    alone = train(place, "alone", processes=1, devices=4)
    killed = train(place, "together", processes=2, devices=2, harm=("KILL_IN_STEP", "3"))
    return {"alone": alone, "killed": killed, "together": train(place, "together", processes=2, devices=2)}


def test_a_killed_process_ends_the_other_one_with_a_reason_and_both_go_on(runs):
    (code, _, errors), (killed, *_) = runs["killed"]
    assert killed == -signal.SIGKILL
    assert code == 75 and "process 0 of 2 lost the others" in errors and "start all processes again with the same command" in errors, (code, errors[-3000:])
    ends = [*runs["alone"], *runs["together"]]
    assert [code for code, *_ in ends] == [0, 0, 0], [errors[-3000:] for _, _, errors in ends]
    assert "continuing from checkpoint 2" in runs["together"][0][1]


def test_two_processes_sample_what_one_does_and_learn_the_same(place, runs):
    assert place.records("together", "samples") == place.records("alone", "samples")
    (alone, _), (together, _) = place.checkpoint("alone"), place.checkpoint("together")
    for name in (name for name in alone if name.startswith("policy[")):
        np.testing.assert_allclose(together[name], alone[name], atol=1e-5)


def test_the_timeline_has_the_slices_of_both_processes(place, runs):
    for workdir in ("alone", "together"):
        for slices in place.timeline(workdir).values():
            kinds = [{kind for kind, *_ in spans} for spans in slices.values()]
            assert sorted(slices) == [f"slice {number}" for number in range(4)]
            assert all("update" in some and some & {"rollout", "speculative", "compile"} for some in kinds)


def test_both_processes_serve_one_drafter_that_all_their_slices_have_trained(place, runs):
    if place.options == OPTIONS:
        pytest.skip("takes a drafter that learns in both processes: --full")
    records = [record for record in place.records("together") if "drafter/quanta" in record]
    assert [record["drafter/faults"] for record in records] == [0] * 4 and records[-1]["drafter/quanta"] >= 16
    assert records[-1]["drafter/texts"] == 4 * 7  # of the 8 answers of a step one is held back, whoever wrote it
    assert "drafter:" not in "".join(errors for _, _, errors in runs["together"])
