"""A stopped and resumed run is the straight run, bit for bit: commands killed by SIGTERM, and a process that stops itself at chosen steps.

Every run of a story is made once, in the order of the story, by module fixtures.
"""

import gzip
import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = '''
from tlt_jax.tasks.arithmetic import ALPHABET
from tlt_jax.training.settings import default_config

def get_config():
    config = default_config()
    config.model.scratch.update({"hidden_size": 8, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 4, "mlp": 8, "alphabet": ALPHABET})
    config.data.arithmetic.update({"max_steps": 2, "train_size": 12, "eval_size": 2})
    config.data.max_prompt_tokens = 16
    config.stages.sft.update({"steps": 3, "batch": 4})
    config.stages.rl.steps = 6
    config.batch.update({"prompts_per_step": 4, "tokens_per_microbatch": 64})
    config.algorithm.num_generations = 2
    config.rollout.update({"max_new_tokens": 12, "slots": 2, "rounds_per_dispatch": 4})
    config.optimizer.update({"lr": 1e-2, "critic_lr": 1e-2, "warmup_ratio": 0.5, "weight_decay": 0.01})
    config.reward.update({"kind": "user", "path": "reward.py", "workers": 1})
    config.checkpoint.every_steps = 2
    config.evaluation.every_steps = 2
    config.logging.update({"samples_per_step": 100, "tensorboard": False})
    return config
'''
# The reward moves with every response, scores not every one of step 2, and stops the trainer (its parent) in the middle of a step when it is told to.
REWARD = '''
import os, signal

def score(prompt, response, answer, metadata, step):
    if os.environ.get("STOP_IN_STEP") == str(step):
        os.kill(os.getppid(), signal.SIGTERM)
    if step == 2 and sum(map(ord, response)) % 2:
        return None
    return sum(character in "02468" for character in response) / 12
'''
# Runs train several times in one process; a job is the arguments and the stage and step after whose record the process sends itself SIGTERM.
# Says the exit code and a digest of every file that the runs have written so far.
DRIVER = '''
import hashlib, json, os, pathlib, signal, sys
from tlt_jax import train
from tlt_jax.training.reporting import Reporter

record = Reporter.record
for arguments, stop in json.loads(sys.argv[1]):
    def stopping(self, step, metrics, stop=stop):
        record(self, step, metrics)
        if [self._stage, step] == stop:
            os.kill(os.getpid(), signal.SIGTERM)
    Reporter.record = stopping
    code, digest = train.main(arguments), hashlib.sha256()
    for path in sorted(path for path in pathlib.Path().glob("*/**/*") if path.is_file()):
        digest.update(str(path).encode() + path.read_bytes())
    print("EXIT", code, digest.hexdigest(), flush=True)
'''
COMPARED = ("reward/", "completions/", "policy/", "value/", "data/")


class Place:
    """A folder with the config, the reward and the workdirs of a story."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        for name, text in (("tiny.py", CONFIG), ("reward.py", REWARD), ("driver.py", DRIVER)):
            (folder / name).write_text(text)
        self.environment = {
            **os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
            "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "jax-tests"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}

    def command(self, workdir, *options, stop_in_step=None) -> subprocess.CompletedProcess:
        """`python -m tlt_jax.train`, stopped by the reward in the middle of an RL step when asked."""
        environment = self.environment | ({} if stop_in_step is None else {"STOP_IN_STEP": str(stop_in_step)})
        return subprocess.run(
            [sys.executable, "-m", "tlt_jax.train", *self.arguments(workdir, *options)], cwd=self.folder, env=environment, capture_output=True, text=True,
            timeout=300)

    def jobs(self, *jobs) -> list[tuple[str, str, str]]:
        """Several runs in one process; (exit code, output, digest of all files) of each. A job is (arguments, [stage, step] or None)."""
        done = subprocess.run(
            [sys.executable, "driver.py", json.dumps(jobs)], cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=600)
        self.errors = done.stderr
        parts = done.stdout.split("EXIT ")
        assert len(parts) == len(jobs) + 1, done.stdout + done.stderr
        return [(*after.split()[:1], before, after.split()[1]) for before, after in zip(parts[:-1], parts[1:], strict=True)]

    def arguments(self, workdir, *options) -> list[str]:
        return ["--config=tiny.py", f"--workdir={workdir}", *(f"--config.{option}" for option in options)]

    def records(self, workdir, name="metrics") -> list[dict]:
        return [json.loads(line) for line in (self.folder / workdir / f"{name}.jsonl").read_text().splitlines()]

    def timeline(self, workdir) -> dict[int, dict[str, list]]:
        """By RL step and slice what the slice did, (kind, start, end) in µs; each step is there once, and slices are filled alike, without overlap."""
        events = json.loads(gzip.decompress((self.folder / workdir / "timeline.json.gz").read_bytes()))
        marks = [event["args"]["step"] for event in events if event["ph"] == "i"]
        assert marks == sorted(set(marks))
        steps = {step: {event["args"]["name"]: [] for event in events if event["name"] == "thread_name"} for step in marks}
        names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
        for event in events:
            if event["ph"] == "X":
                steps[event["args"]["step"]][names[event["tid"]]].append((event["name"], event["ts"], event["ts"] + event["dur"]))
        for slices in steps.values():
            for spans in slices.values():
                assert [end for _, _, end in spans[:-1]] == [start for _, start, _ in spans[1:]]
            assert len({(spans[0][1], spans[-1][2]) for spans in slices.values()}) == 1
        return steps

    def compared(self, workdir) -> list[dict]:
        """The metrics that resuming must not change, by stage and step."""
        return [
            {name: value for name, value in record.items() if name in ("stage", "step") or name.startswith(COMPARED)} for record in self.records(workdir)]

    def checkpoint(self, workdir, step=None) -> tuple[dict, dict]:
        """Every array of a checkpoint (None: the newest) by its path, and its host values."""
        directory = self.folder / workdir / "checkpoints"
        step = max(int(path.name) for path in directory.iterdir()) if step is None else step
        arrays = {}
        for item in (directory / str(step)).iterdir():
            if item.is_dir() and item.name not in ("host", "metrics"):
                reader = ocp.PyTreeCheckpointer()  # as numpy, on whatever devices and by however many processes they were saved
                as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), reader.metadata(item).item_metadata.tree)
                tree = reader.restore(item, restore_args=as_numpy)
                arrays |= {f"{item.name}{jax.tree_util.keystr(path)}": leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
        return arrays, ocp.JsonCheckpointHandler().restore(directory / str(step) / "host")

    def assert_equal(self, one, other, step=None) -> None:
        """Same samples, metrics, parameters, optimizers and host values, bit for bit."""
        assert self.records(one, "samples") == self.records(other, "samples")
        assert self.compared(one) == self.compared(other)
        (arrays, host), (others, other_host) = self.checkpoint(one, step), self.checkpoint(other, step)
        assert arrays.keys() == others.keys()
        different = [path for path, array in arrays.items() if array.tobytes() != others[path].tobytes()]
        assert not different
        own = {"config": None, "selectors": None}  # the run's own, as is what its clock said
        assert host | own == other_host | own
        assert [one["dispatches"] for one in host["selectors"]] == [one["dispatches"] for one in other_host["selectors"]] != [0]


@pytest.fixture(scope="module")
def grpo(tmp_path_factory):
    """Supervised steps and GRPO with a reference: `straight`, and `parts`, stopped after supervised step 2 and in RL step 3, the end of an epoch of 12 rows."""
    place = Place(tmp_path_factory.mktemp("grpo"))
    options = ("stages.order=sft,rl", "algorithm.beta=0.1")
    parts = place.arguments("parts", *options)
    place.straight, place.first = place.jobs((place.arguments("straight", *options, "stages.rl.steps=7"), None), (parts, ["sft", 2]))
    place.second = place.command("parts", *options, stop_in_step=3)
    place.third, place.finished, place.never, place.other, place.longer = place.jobs(
        (parts, None), (parts, None), ([*parts, "--config.checkpoint.resume=never"], None), ([*parts, "--config.stages.order=rl"], None),
        ([*parts, "--config.stages.rl.steps=7", "--config.stages.sft.steps=2"], None))
    return place


def test_a_run_that_is_stopped_exits_with_143_and_has_saved_the_step_it_was_in(grpo):
    assert (grpo.straight[0], grpo.first[0], grpo.second.returncode, grpo.third[0]) == ("0", "143", 143, "0")
    assert "stopped on request after saving; run the same command again" in grpo.second.stdout
    assert "SIGTERM: saving at the end of this step" in grpo.second.stderr
    assert "continuing from checkpoint 2: stage sft, step 2" in grpo.second.stdout
    assert "continuing from checkpoint 6: stage rl, step 3" in grpo.third[1]
    assert "Traceback" not in grpo.second.stderr


def test_grpo_with_a_reference_stopped_twice_is_the_straight_run(grpo):
    grpo.assert_equal("straight", "parts")


@pytest.mark.parametrize("workdir", ["straight", "parts"])
def test_the_timeline_says_of_every_step_once_what_the_slice_did(grpo, workdir):
    steps = grpo.timeline(workdir)
    assert list(steps) == [1, 2, 3, 4, 5, 6, 7]
    for slices in steps.values():
        assert list(slices) == ["slice 0"]
        kinds = [kind for kind, _, _ in slices["slice 0"]]
        assert set(kinds) <= {"publish", "prefill", "rollout", "compile", "update", "idle"}
        assert kinds.index("publish") < min(kinds.index(kind) for kind in ("prefill", "compile") if kind in kinds) < kinds.index("update")
    assert all({"prefill", "rollout"} <= {kind for kind, *_ in steps[step]["slice 0"]} for step in (2, 7))


def test_the_run_that_was_compared_learned_something_and_drew_every_prompt_of_each_epoch(grpo):
    arrays, _ = grpo.checkpoint("straight")
    moved = [path for path, array in arrays.items() if path.startswith("policy[") and not np.array_equal(array, arrays[path.replace("policy", "reference", 1)])]
    assert len(moved) > 5 and any(path.startswith("reference[") for path in arrays)
    records = [record for record in grpo.records("straight") if record["stage"] == "rl" and record["step"] > 0]
    assert all(record["policy/grad_norm"] > 0 and record["policy/kl"] is not None for record in records)
    assert sum(record["reward/unscored"] for record in records) > 0
    assert [record["data/epoch"] for record in records] == [0, 0, 0, 1, 1, 1, 2]
    samples = [sample for sample in grpo.records("straight", "samples") if sample["kind"] == "train"]
    drawn = [[sample["prompt"] for sample in samples if sample["step"] == step] for step in range(1, 8)]
    epochs = [drawn[0] + drawn[1] + drawn[2], drawn[3] + drawn[4] + drawn[5]]
    assert sorted(epochs[0]) == sorted(epochs[1]) and epochs[0] != epochs[1]
    assert all(len(step) == 8 and step[0::2] == step[1::2] for step in drawn)


def test_a_finished_run_says_so_and_changes_nothing(grpo):
    code, said, files = grpo.finished
    assert code == "0" and "this run is finished: checkpoint 9 holds step 6 of its last stage, rl; nothing was done" in said
    assert "raise stages.rl.steps to train on" in said and "held-out accuracy" in said
    assert files == grpo.third[2]


def test_a_used_workdir_is_refused_when_nothing_may_be_resumed(grpo):
    assert (grpo.never[0], grpo.never[2]) == ("2", grpo.third[2])


def test_more_steps_continue_a_finished_run_and_an_earlier_stage_may_have_had_another_number(grpo):
    code, said, _ = grpo.longer
    assert code == "0" and "changed since that checkpoint: stages.rl.steps, stages.sft.steps" in said
    assert max(int(path.name) for path in (grpo.folder / "parts" / "checkpoints").iterdir()) == 10


def test_stages_that_do_not_continue_those_of_the_checkpoint_are_refused(grpo):
    assert (grpo.other[0], grpo.other[2]) == ("2", grpo.third[2])


@pytest.fixture(scope="module", params=["separate", "shared"])
def ppo(request, tmp_path_factory):
    """PPO with two minibatches, two iterations and the KL in the reward: `straight`, and `parts`, stopped after step 2 and gone on."""
    if request.param == "shared" and not request.config.getoption("full"):
        pytest.skip("the same two runs again for the shared trunk: --full")
    place = Place(tmp_path_factory.mktemp("ppo"))
    options = (
        "algorithm.name=ppo", f"algorithm.critic={request.param}", "algorithm.beta=0.1", "algorithm.kl_placement=reward", "algorithm.kl_kind=k1",
        "batch.sequences_per_minibatch=4", "algorithm.num_iterations=2", "stages.rl.steps=4", "algorithm.whiten_advantages=True",
        "algorithm.kl_target=0.01", "algorithm.kl_horizon=100")
    parts = place.arguments("parts", *options)
    place.exits = place.jobs((place.arguments("straight", *options), None), (parts, ["rl", 2]), (parts, None))
    place.critic = request.param
    return place


@pytest.mark.slow
def test_surplus_groups_of_dynamic_sampling_go_on_from_a_checkpoint(tmp_path, pytestconfig):
    if not pytestconfig.getoption("full"):
        pytest.skip("runs of another shape: --full")
    place = Place(tmp_path)
    options = ("stages.order=rl", "algorithm.dynamic_sampling=True", "batch.prompts_per_step=3", "algorithm.max_draws=3")
    parts = place.arguments("parts", *options)
    place.jobs((place.arguments("straight", *options), None), (parts, ["rl", 5]), (parts, None))
    stale = [record["data/stale_share"] for record in place.records("straight") if record["stage"] == "rl" and "data/draws" in record]
    assert len(stale) == 6 and stale[5] > 0  # what the stopped run had to keep
    place.assert_equal("straight", "parts")


@pytest.mark.slow
def test_ppo_stopped_and_resumed_is_the_straight_run(ppo):
    assert [code for code, _, _ in ppo.exits] == ["0", "143", "0"]
    ppo.assert_equal("straight", "parts")
    assert ppo.checkpoint("straight")[1]["trainer"]["beta"] not in (0.0, 0.1)  # steered since the first step


@pytest.mark.slow
def test_the_critic_of_the_run_that_was_compared_learned(ppo):
    arrays, host = ppo.checkpoint("straight")
    head = next(array for path, array in arrays.items() if path.startswith("critic['head']" if ppo.critic == "separate" else "policy['value_head']"))
    assert np.abs(head).max() > 0
    assert all(counts[0] == 16 for counts in host["counters"].values()) and len(host["counters"]) == (2 if ppo.critic == "separate" else 1)
    records = [record for record in ppo.records("straight") if record["step"] > 0]
    assert all(record["value/loss"] > 0 and record["policy/grad_norm"] > 0 for record in records)
