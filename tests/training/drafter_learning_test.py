"""A drafter that learns during RL: it changes no token, no reward and no parameter of the policy, it gets better, and a resumed run is the straight one."""

import re

import numpy as np
import pytest

from tests.training.resume_test import Place
from tlt_jax import export
from tlt_jax.checkpoints.drafter_files import load_drafter
from tlt_jax.checkpoints.run_model import load_run_drafter, read_run_model
from tlt_jax.checkpoints.tensor_layout import flatten
from tlt_jax.training.draft_training import fingerprint

OPTIONS = (
    "stages.order=rl", "stages.rl.steps=6", "checkpoint.every_steps=3", "speculative.method=eagle", "speculative.strategies=2_1_2",
    "distill.tokens_per_update=128", "distill.lr=0.01", "distill.unroll=2", "evaluation.every_steps=0", "evaluation.before=false")
SCORED = (*OPTIONS, "algorithm.importance_sampling_cap=2")
LEARNING = (*SCORED, "drafter.quanta_per_step=4", "drafter.features=old_logprobs")


SLICED = (
    "stages.rl.steps=4", "checkpoint.every_steps=2", "checkpoint.keep=5", "mesh.train.fsdp=1", "mesh.train.data=-1", "mesh.rollout_slices=4",
    "batch.tokens_per_microbatch=768", "distill.tokens_per_update=768", "rollout.max_new_tokens=64",
    "rollout.rounds_per_dispatch=1")  # answers with a tail, in which some slices are idle

# Before the runs of one process: a job may be stopped by SIGTERM when its nth quantum has begun (each slice runs two to be
# compiled and timed), mergers keep half back as residuals, and every phase says with
# which residuals it starts.
IN_A_QUANTUM = '''
import collections, os, signal
from tlt_jax.distillation import aggregation
from tlt_jax.runtime.draft_driver import BorrowedSlice
from tlt_jax.training.draft_training import DraftTraining, fingerprint

begin, start_phase, begun = BorrowedSlice.begin, DraftTraining.start_phase, collections.Counter()
def stopping_begin(self, batch):
    begin(self, batch)
    begun[str(arguments)] += 1
    if stop == ["quantum", begun[str(arguments)]]:
        os.kill(os.getpid(), signal.SIGTERM)
def telling_start(self, policies, step, answers):
    print("RESIDUALS", step, *sorted(f"{number}:{fingerprint(tree)}" for number, tree in self.residuals.items()), flush=True)
    return start_phase(self, policies, step, answers)
BorrowedSlice.begin, DraftTraining.start_phase, aggregation.alpha_from = stopping_begin, telling_start, lambda merged, best: 0.5
'''


@pytest.fixture(scope="module")
def sliced(tmp_path_factory, request):
    """The run on 8 devices and 4 slices, with a drafter that learns on idle slices only, or is only used; with --full is frozen, too, stopped and
    continued, and on one and on two slices."""
    place = Place(tmp_path_factory.mktemp("sliced"))
    place.environment["XLA_FLAGS"] += " --xla_force_host_platform_device_count=8"
    (place.folder / "driver.py").write_text(IN_A_QUANTUM + (place.folder / "driver.py").read_text())
    idle = ("drafter.quanta_per_step=4", "drafter.train_when=idle", "drafter.sync_every=1", "logging.timeline_every_steps=3")
    parts = place.arguments("parts", *OPTIONS, *SLICED, *idle)
    place.full = request.config.getoption("full")
    more = [] if not place.full else [
        (place.arguments("frozen", *OPTIONS, *SLICED, *idle, "drafter.freeze=true"), None), (parts, ["quantum", 2 * 4 + 5]), (parts, None),
        *((place.arguments(f"slices{count}", *OPTIONS, *SLICED, *idle, f"mesh.rollout_slices={count}"), None) for count in (1, 2))]
    place.said = place.jobs((place.arguments("idle", *OPTIONS, *SLICED, *idle), None), (place.arguments("used", *OPTIONS, *SLICED), None), *more)
    return place


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The same RL run with a drafter that learns from the features of the scoring pass, is frozen, or is only used; and one that learns, stopped after step 3
    and continued."""
    place = Place(tmp_path_factory.mktemp("drafter"))
    parts = place.arguments("parts", *LEARNING)
    place.said = place.jobs(
        (place.arguments("straight", *LEARNING), None),
        (place.arguments("frozen", *LEARNING, "drafter.features=recompute", "drafter.freeze=true"), None),
        (place.arguments("used", *SCORED), None), (parts, ["rl", 3]), (place.arguments("parts", *SCORED), None), (parts, None),
        (place.arguments("worse", *LEARNING, "distill.lr=1000"), None))
    return place


def measured(place, workdir, name):
    return [record[f"drafter/{name}"] for record in place.records(workdir) if f"drafter/{name}" in record]


def drafter_of(arrays) -> dict:
    """The bytes of the drafter's weights in a checkpoint."""
    return {name: array.tobytes() for name, array in arrays.items() if name.startswith("drafter[")}


def test_every_run_ends_as_it_should(runs):
    assert [code for code, *_ in runs.said] == ["0", "0", "0", "143", "2", "0", "0"]


def test_learning_changes_no_token_no_reward_and_no_parameter_of_the_policy(runs):
    policies = {}
    for workdir in ("straight", "frozen", "used"):
        arrays, _ = runs.checkpoint(workdir)
        policies[workdir] = {name: array for name, array in arrays.items() if name.startswith("policy[")}
        assert runs.records(workdir, "samples") == runs.records("straight", "samples")
    for name, array in policies["used"].items():
        assert policies["frozen"][name].tobytes() == array.tobytes()
        # A forward that hands on its features is another program, which may round the log-probs differently.
        np.testing.assert_allclose(policies["straight"][name], array, atol=1e-5)


def test_a_drafter_that_learns_is_accepted_more_often_and_a_frozen_one_stays_as_it_was(runs):
    learned = measured(runs, "straight", "acceptance_0")
    assert len(learned) == 6 and learned[-1] > learned[0]
    assert measured(runs, "straight", "quanta") == [4, 8, 12, 16, 20, 24] and measured(runs, "straight", "version")[-1] > 0
    assert measured(runs, "frozen", "quanta") == measured(runs, "frozen", "version") == [0] * 6
    start, now = (drafter_of(runs.checkpoint("frozen", step)[0]) for step in (3, 6))
    assert start == now != {}
    assert measured(runs, "used", "acceptance_0") == []


def test_a_stopped_and_resumed_run_has_the_drafter_of_the_straight_one(runs):
    runs.assert_equal("straight", "parts")
    for name in ("acceptance_0", "gain", "version"):
        assert measured(runs, "straight", name) == measured(runs, "parts", name)


def test_what_a_drafter_has_learned_is_not_dropped_silently(runs):
    assert "drafter.freeze=True" in runs.errors


def test_a_drafter_that_got_worse_is_rolled_back_and_counted(runs):
    assert measured(runs, "worse", "rolled_back") == [1, 2, 3, 4, 5, 6] and measured(runs, "worse", "version") == [0] * 6
    kept, frozen = (drafter_of(runs.checkpoint(workdir)[0]) for workdir in ("worse", "frozen"))
    assert kept == frozen != {}


def test_the_drafter_of_a_run_is_exported_as_it_drafted(runs, tmp_path):
    workdir = runs.folder / "straight"
    assert export.main([f"--workdir={workdir}", f"--output={tmp_path / 'out'}", "--what=drafter"]) == 0
    spec, _ = read_run_model(workdir)
    trained, written = flatten(load_run_drafter(workdir, 6).params), flatten(load_drafter(tmp_path / "out", spec).params)
    assert {path: leaf.tobytes() for path, leaf in trained.items()} == {path: leaf.tobytes() for path, leaf in written.items()} != {}


def test_on_four_slices_training_on_idle_ones_changes_no_token_no_reward_and_no_parameter_of_the_policy(sliced):
    assert [code for code, *_ in sliced.said] == ["0", "0", *(["0", "143", *["0"] * 3] if sliced.full else [])]
    policies = {}
    for workdir in ("idle", "used", *(["frozen", "parts", "slices1", "slices2"] if sliced.full else [])):
        arrays, _ = sliced.checkpoint(workdir)
        policies[workdir] = {name: array.tobytes() for name, array in arrays.items() if name.startswith("policy")}
        assert sliced.records(workdir, "samples") == sliced.records("idle", "samples")
    assert all(policy == policies["idle"] != {} for policy in policies.values())


def test_what_idle_slices_train_is_counted_once(sliced):
    records = [record for record in sliced.records("idle") if "scheduler/loans" in record]
    assert len(records) == 4  # how many loans there are is a matter of time
    trained = [record["scheduler/quanta"] for record in records]
    assert records[-1]["drafter/quanta"] == sum(trained) and all(record["drafter/faults"] == 0 for record in records)


def test_the_timeline_shows_what_idle_slices_trained_before_the_update(sliced):
    steps, records = sliced.timeline("idle"), [record for record in sliced.records("idle") if "scheduler/loans" in record]
    for (step, slices), record in zip(steps.items(), records, strict=True):
        assert step == record["step"] and list(slices) == [f"slice {number}" for number in range(4)]
        updated = min(start for kind, start, _ in slices["slice 0"] if kind == "update")
        early = [end - start for spans in slices.values() for kind, start, end in spans if kind == "distilling" and end <= updated]
        assert sum(early) / 1e6 == pytest.approx(record["scheduler/distilling_seconds"], abs=1e-4)
        assert all(spans[-2][0] == "distilling" for spans in slices.values())  # measured on the whole mesh, before the step ends
    assert (sliced.folder / "idle" / "timeline.png").exists() and "timeline.json.gz, curves.png, timeline.png" in sliced.said[0][1]
    for workdir in ("idle", "used", *(["frozen"] if sliced.full else [])):
        kinds = {kind for slices in sliced.timeline(workdir).values() for spans in slices.values() for kind, *_ in spans}
        assert kinds >= {"publish", "compile", "prefill", "speculative", "update", "idle"} and ("distilling" in kinds) == (workdir != "used")


def test_a_run_stopped_within_a_quantum_goes_on_with_the_texts_counts_and_residuals_of_its_checkpoint(sliced):
    if not sliced.full:
        pytest.skip("takes two more runs on four slices: --full")
    first = int(re.findall(r"RESIDUALS (\d+)", sliced.said[4][1])[0])
    arrays, host = sliced.checkpoint("parts", first - 1)
    at_end = sliced.checkpoint("parts", 4)[1]["drafter"]
    assert 1 < first <= 4 and {text[2] for text in host["drafter"]["texts"]["texts"]} == set(range(1, first))
    assert {text[2] for text in at_end["texts"]["texts"]} == {1, 2, 3, 4} and at_end["quanta"] >= host["drafter"]["quanta"] >= 3
    saved = {}
    for path, array in arrays.items():
        if path.startswith("drafter_residuals["):
            saved.setdefault(re.search(r"\['(\d+)'\]", path)[1], []).append(array)
    told = re.findall(rf"RESIDUALS {first}(.*)", sliced.said[4][1])[0].split()
    assert told == sorted(f"{number}:{fingerprint(leaves)}" for number, leaves in saved.items()) != []
