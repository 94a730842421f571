"""When a process looks for others, and what it does without any; two real ones: tests/training/several_processes_test.py."""

import numpy as np
import pytest

from tlt_jax import train
from tlt_jax.sharding import processes


@pytest.mark.parametrize(
    ("environment", "several"),
    [
        ({}, False), ({"SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "1"}, False), ({"SLURM_STEP_NUM_TASKS": "4"}, True),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, True), ({"TPU_WORKER_HOSTNAMES": "10.0.0.1"}, False), ({"TPU_WORKER_HOSTNAMES": "10.0.0.1,10.0.0.2"}, True),
        ({"MEGASCALE_COORDINATOR_ADDRESS": "10.0.0.1"}, True)])
def test_a_process_looks_for_others_only_where_a_cluster_started_several(environment, several):
    assert processes.in_a_cluster(environment) is several


def test_a_process_alone_tells_itself():
    assert processes.exchange({"a": (1, None)}) == [{"a": (1, None)}]
    (array,) = processes.gathered(np.arange(3))
    assert array.tolist() == [0, 1, 2] and processes.ended(2) == 2


def test_an_error_of_a_process_alone_goes_its_way():
    with pytest.raises(RuntimeError, match="its way"), processes.LeaveAtOnce():
        raise RuntimeError("its way")


@pytest.mark.parametrize(
    "flags", [["--num_processes=2"], ["--coordinator_address=localhost:1", "--num_processes=2", "--process_id=2"],
              ["--coordinator_address=localhost:1", "--num_processes=2"]])
def test_a_process_has_to_be_told_all_of_who_it_is(flags, tmp_path, capsys):
    assert train.main([f"--workdir={tmp_path}", *flags]) == 2
    assert "--process_id=0 … N-1 go together" in capsys.readouterr().err
