"""When a process looks for others, and what it does without any; two real ones: tests/training/several_processes_test.py."""

import types

import jax
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


class Cluster:
    """Three processes in one: `here` is the one that runs; what they tell lies in one store, and all look at one clock."""

    def __init__(self):
        self.store, self.here, self.now, self.reads = {}, 0, 0.0, 0

    def key_value_set(self, key, value, allow_overwrite):
        assert allow_overwrite
        self.store[key] = value

    def key_value_dir_get(self, directory):
        self.reads += 1
        return [(key, value) for key, value in self.store.items() if key.startswith(directory)]

    def each(self, what):
        """What every process has of `what`, made by it."""
        made = []
        for self.here in range(3):
            made.append(what())
        return made

    def at(self, number, function, *arguments):
        self.here = number
        return function(*arguments)


@pytest.fixture
def cluster(monkeypatch):
    cluster = Cluster()
    monkeypatch.setattr(processes, "_several", lambda: True)
    monkeypatch.setattr(processes.distributed, "global_state", types.SimpleNamespace(client=cluster))
    monkeypatch.setattr(jax, "process_index", lambda: cluster.here)
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    return cluster


def test_a_process_knows_how_long_the_slowest_of_the_others_will_take_and_when_all_are_finished(cluster):
    one, two, three = outlooks = cluster.each(lambda: processes.Outlook(lambda: cluster.now))
    for outlook in outlooks:
        outlook.start()

    def seen_by_one():
        cluster.now += 1.5
        return cluster.at(0, one.others)

    assert seen_by_one() == float("inf")
    cluster.at(1, two.tell, 7.0)
    assert seen_by_one() == float("inf")  # one has said nothing yet
    cluster.at(2, three.tell, 5.0)
    cluster.at(0, one.tell, 90.0)
    assert seen_by_one() == 7.0
    cluster.at(1, two.tell, 0.0)
    assert seen_by_one() == 5.0
    cluster.at(2, three.tell, float("inf"))
    assert seen_by_one() == float("inf")
    cluster.at(2, three.tell, 0.0)  # at once, however lately it told something
    assert seen_by_one() == 0.0
    reads = cluster.reads
    assert seen_by_one() == 0.0 and cluster.reads == reads
    one.start()
    assert seen_by_one() == float("inf")  # what was told of the phase before counts no more


def test_a_process_tells_and_asks_so_seldom_that_the_store_is_not_flooded(cluster):
    one, *_ = outlooks = cluster.each(lambda: processes.Outlook(lambda: cluster.now))
    for outlook in outlooks:
        outlook.start()
    told = []
    cluster.key_value_set = lambda key, value, allow_overwrite: told.append(value)
    for _ in range(1000):  # a turn of the event loop takes a millisecond
        cluster.now += 0.001
        cluster.at(0, one.tell, 5.0)
        one.others()
    one.tell(0.0)
    one.tell(0.0)
    assert len(told) <= 3 and cluster.reads <= 21


def test_a_process_that_says_nothing_any_more_is_gone_and_one_that_said_farewell_is_not(cluster):
    one, two, three = cluster.each(lambda: processes.Pulse(lambda: cluster.now))
    assert cluster.at(0, one.beat) == []
    for second in range(60):
        cluster.now += 1
        if second <= 10:
            cluster.at(1, two.beat)
            cluster.at(2, three.beat)
        if second == 11:
            cluster.at(1, two.stop)
        assert cluster.at(0, one.beat) == ([2] if second > 10 + processes.SILENT_SECONDS else [])


@pytest.mark.parametrize(
    "flags", [["--num_processes=2"], ["--coordinator_address=localhost:1", "--num_processes=2", "--process_id=2"],
              ["--coordinator_address=localhost:1", "--num_processes=2"]])
def test_a_process_has_to_be_told_all_of_who_it_is(flags, tmp_path, capsys):
    assert train.main([f"--workdir={tmp_path}", *flags]) == 2
    assert "--process_id=0 … N-1 go together" in capsys.readouterr().err
