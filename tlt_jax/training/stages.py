"""A whole run: opens the parts, restores the newest state, runs the stages in order, saves, evaluates and says what came out.

Everything needed to continue is one tree per checkpoint: networks and optimizers as arrays; stage, step, prompt order and counters as plain values.
"""

import dataclasses
import math
import pathlib
import time

import jax

from tlt_jax.checkpoints.run_model import is_workdir, save_run_model
from tlt_jax.checkpoints.run_state import RunStateStore, StepDescription
from tlt_jax.checkpoints.step_manifest import Leaves
from tlt_jax.checkpoints.tensor_layout import nest
from tlt_jax.rewards.pool import RewardPool
from tlt_jax.runtime import hardware_counters
from tlt_jax.runtime.hardware_counters import HardwareCounters
from tlt_jax.runtime.policy_driver import Learner
from tlt_jax.runtime.programs import compile_counter
from tlt_jax.runtime.watchdog import Watchdog
from tlt_jax.sharding import processes
from tlt_jax.sharding.rules import batch_rows_multiple, replicated
from tlt_jax.tasks.prompts import PromptOrder
from tlt_jax.training import build, reward_model, rl, run_checks, supervised
from tlt_jax.training.announcements import StageResult, flat, next_commands, open_reporter, say_finished, say_results, say_start
from tlt_jax.training.curriculum_order import CurriculumOrder
from tlt_jax.training.draft_training import DraftTraining
from tlt_jax.training.dynamic_sampling import SURPLUS
from tlt_jax.training.evaluation import evaluate
from tlt_jax.training.lessons import describe
from tlt_jax.training.preemption import PreemptionSignal
from tlt_jax.training.profiling import StepProfile
from tlt_jax.training.scoring import check_reward
from tlt_jax.training.session import Session
from tlt_jax.training.settings import Config
from tlt_jax.training.supervised import Supervised

BEST_METRIC = "reward/heldout_accuracy"


class Preempted(Exception):
    """The run was asked to stop and has saved; `exit_code` is what the process should end with."""

    def __init__(self, exit_code: int):
        super().__init__(f"stopped on request after saving; run the same command again to continue (exit code {exit_code})")
        self.exit_code = exit_code


@dataclasses.dataclass
class Run:
    """The moving parts around the stages."""

    session: Session
    store: RunStateStore
    signal: PreemptionSignal
    resumed: dict | None  # host values of the restored checkpoint
    params: dict | None = None  # the policy between two stages
    reward_params: dict | None = None  # the reward model, once its stage is over
    offset: int = 0  # steps of the stages before the present one: checkpoints of all stages share one numbering
    heldout: list = dataclasses.field(default_factory=list)
    results: dict[str, StageResult] = dataclasses.field(default_factory=dict)
    started: float = 0.0  # of the present stage, less what earlier processes worked on it

    def clock(self, stage: str) -> StageResult:
        """The stage's result with its seconds up to now; the first call in a process starts the clock."""
        if stage not in self.results or not self.started:
            self.started = time.monotonic() - self.results.setdefault(stage, StageResult()).seconds
        self.results[stage].seconds = time.monotonic() - self.started
        return self.results[stage]

    def take_params(self) -> dict:
        """The policy's parameters, which this object then no longer holds: a stage frees them with its first update."""
        params, self.params = self.params, None
        return params


@dataclasses.dataclass
class Stage:
    """What a checkpoint of a stage holds: networks with their optimizers, the prompt order, and other trees (the reference, a reward model)."""

    name: str
    learners: dict[str, Learner]
    order: PromptOrder | CurriculumOrder
    extra: dict = dataclasses.field(default_factory=dict)
    draft: DraftTraining | None = None  # beside its learner: its counts, and the slices that it serves
    trainer: rl.Trainer | None = None

    def arrays(self) -> dict:
        """Every array of the checkpoint by item."""
        arrays = dict(self.extra)
        for name, learner in self.learners.items():
            arrays |= {name: learner.params, f"{name}_optimizer": learner.opt_state}
        return arrays | self.loose_arrays()

    def loose_arrays(self) -> dict:
        """Those of them whose shapes change from step to step."""
        surplus = {} if self.trainer is None else self.trainer.arrays()
        return surplus if self.draft is None else surplus | self.draft.arrays()


def run(config: Config, workdir: str) -> None:
    """Train. Raises Preempted after a requested stop, and what the parts raise."""
    compile_counter()
    model = build.open_model(config, workdir)
    task, held_out = build.make_tasks(config, model.tokenizer)
    lines = [f"{name} data: {one.name}; {one.describe()}" for one, name in ((task, "training"), (held_out, "held-out")) if one is not None]
    lessons = run_checks.check_data(config, model, task, held_out)
    lines += [describe(config, stage, one) for stage, one in lessons.items()]
    meshes = build.make_meshes(config)
    run_checks.check_budget(config, task, lessons, batch_rows_multiple(meshes.train))
    store = RunStateStore(
        pathlib.Path(workdir) / "checkpoints", keep=config.checkpoint.keep, async_save=config.checkpoint.async_save,
        best_metric=BEST_METRIC if held_out is not None else None)
    step = _resume_step(config, store)
    resumed = None if step is None else _check_stages(config, store, store.describe(step))
    if jax.process_index() == 0 and (resumed is None or not is_workdir(workdir)):
        save_run_model(workdir, build.run_source(config, model, workdir))
    reporter = open_reporter(config, workdir, resumed)
    if resumed is not None and _is_finished(config, resumed):
        say_finished(config, reporter, workdir, step, resumed)
        store.close()
        return
    several = jax.process_count() > 1
    watchdog = Watchdog(60 * config.watchdog_minutes, f"process {jax.process_index()} of {jax.process_count()}") if several else Watchdog.asleep()
    counters = HardwareCounters(hardware_counters.reader())
    with RewardPool(build.pool_settings(config), build.make_scorer(config, task)) as pool, PreemptionSignal() as signal, watchdog, counters:
        drivers = build.make_drivers(config, model.spec, meshes, compile_ahead="rl" in config.stages.order)
        session = Session(config, workdir, model, task, held_out, meshes, drivers, pool, reporter, watchdog, counters, lessons=lessons)
        try:
            say_start(session, lines, step, resumed)
            if config.reward.kind == "user":
                reporter.say(check_reward(pool, task.prompts()[0]))
            with processes.LeaveAtOnce(Preempted):
                _run_stages(Run(session, store, signal, resumed), step)
        finally:
            reporter.close()
            store.close()


def _check_stages(config: Config, store: RunStateStore, described: StepDescription) -> dict:
    """The host values of a checkpoint; ValueError unless the stages up to its own are those of the config."""
    stage, saved, now = described.host["stage"], described.host["config"]["stages.order"], list(config.stages.order)
    reached = saved[: saved.index(stage) + 1]
    if now[: len(reached)] != reached:
        raise ValueError(
            f"checkpoint {described.step} in {store.directory} was saved in stage {stage} of stages.order={','.join(saved)}, which "
            f"stages.order={','.join(now)} does not continue: keep {','.join(reached)} in front, or use another --workdir")
    return described.host


def _is_finished(config: Config, resumed: dict) -> bool:
    stage = config.stages.order[-1]
    return resumed["stage"] == stage and resumed["stage_step"] >= config.stages[stage].steps


def _resume_step(config: Config, store: RunStateStore) -> int | None:
    newest = store.latest_valid_step()
    if config.checkpoint.resume == "never":
        if newest is not None:
            raise ValueError(f"{store.directory} holds checkpoints up to step {newest} and checkpoint.resume=never: use another --workdir or resume=auto")
        return None
    return newest if config.checkpoint.resume == "auto" else int(config.checkpoint.resume)


def _run_stages(whole: Run, step: int | None) -> None:
    session, config = whole.session, whole.session.config
    stages, done = list(config.stages.order), 0
    if whole.resumed:
        # From the checkpoint and not from the config: an earlier stage may have had another number of steps.
        done = whole.resumed["stage_step"]
        stages, whole.offset = stages[stages.index(whole.resumed["stage"]) :], step - done
    whole.params = build.make_params(config, session.model, session.meshes)
    for stage in stages:
        whole.started = 0.0
        whole.clock(stage)
        _run_rl(whole, step) if stage == "rl" else _run_supervised(whole, stage, step)
        whole.clock(stage)
        whole.offset += max(config.stages[stage].steps, done)
        step, done = None, 0
    say_results(session.reporter, whole.results, whole.heldout)
    session.reporter.finish(next_commands(config, session.workdir))


def _run_supervised(whole: Run, name: str, checkpoint: int | None) -> None:
    session, steps = whole.session, whole.session.config.stages[name].steps
    keeps_policy = name == "reward_model"  # it is trained beside the policy, which its checkpoints hold, too
    one = supervised.open_stage(session, name, whole.params if keeps_policy else whole.take_params())
    extra = {"policy": whole.params} if keeps_policy else {}
    stage = Stage(name, {name if keeps_policy else "policy": one.learner}, one.order(session.config), extra)
    done = _restore(whole, checkpoint, stage)
    whole.params = stage.extra.get("policy")
    session.reporter.start_stage(name, steps)
    if checkpoint is None and one.held_out:
        session.reporter.record(0, _measured(whole, one, 0))
    for number in range(done + 1, steps + 1):
        session.watchdog.hear(f"{name} step {number}")
        metrics = one.step(stage.order, session.config.stages[name].batch)
        metrics |= _measured(whole, one, number) if one.held_out and number == steps else {}
        session.reporter.record(number, metrics)
        _save_if_due(whole, stage, number, metrics)
    if keeps_policy:
        whole.reward_params = one.learner.params
    else:
        whole.params = one.learner.params


def _measured(whole: Run, one: Supervised, number: int) -> dict[str, float]:
    metrics = one.measured()
    whole.clock(one.name).measures.append((number, metrics))
    return metrics


def _run_rl(whole: Run, checkpoint: int | None) -> None:
    session, config = whole.session, whole.session.config
    steps, every = config.stages.rl.steps, config.evaluation.every_steps
    trainer = rl.make_trainer(session, whole.take_params(), _order(session))
    learners = {"policy": trainer.policy, "critic": trainer.critic, "drafter": trainer.draft.learner if trainer.draft else None}
    learners = {name: learner for name, learner in learners.items() if learner is not None}
    extra = {"reference": trainer.reference, "reward_model": _own_reward_model(whole)}
    stage = Stage("rl", learners, trainer.order, {name: tree for name, tree in extra.items() if tree is not None}, trainer.draft, trainer)
    done = _restore(whole, checkpoint, stage)
    trainer.reference = stage.extra.get("reference")
    session.reward_model = reward_model.open_model(
        config, session.model.spec, session.meshes.train, stage.extra.get("reward_model"), longest_prompt=session.longest_prompt)
    session.reporter.start_stage("rl", steps)
    if checkpoint is None and session.held_out is not None and config.evaluation.before:
        metrics = evaluate(session, trainer.policy.params, 0)
        whole.heldout.append((0, metrics[BEST_METRIC]))
        session.reporter.record(0, metrics)
    profiler = config.profiler
    with StepProfile(f"{session.workdir}/profile", profiler.start_step, profiler.steps) as profile:
        for number in range(done + 1, steps + 1):
            profile.before(number)
            metrics = rl.run_step(session, trainer, number)
            profile.after(number)
            if session.held_out is not None and (number == steps or (every and number % every == 0)):
                heldout = evaluate(session, trainer.policy.params, number)
                whole.heldout.append((number, heldout[BEST_METRIC]))
                metrics |= heldout
            session.reporter.record(number, metrics)
            _save_if_due(whole, stage, number, metrics)
    whole.params = trainer.policy.params


def _order(session: Session) -> PromptOrder | CurriculumOrder:
    config, prompts = session.config, session.task.prompts()
    if config.curriculum.advance == "off":
        return PromptOrder(len(prompts), config.seed, shuffle=config.data.shuffle)
    order = CurriculumOrder(config, prompts)
    session.reporter.say(order.describe())
    return order


def _own_reward_model(whole: Run) -> dict | None:
    """The parameters of the run's own reward model, or their shapes and places where a checkpoint holds them; None where RL does without one."""
    config, session = whole.session.config, whole.session
    if config.reward.kind != "model" or config.reward.path or whole.reward_params is not None:
        return whole.reward_params if config.reward.kind == "model" else None
    return reward_model.placed_shapes(session.model.spec, config.precision.params, session.meshes.train)


def _restore(whole: Run, checkpoint: int | None, stage: Stage) -> int:
    """Fill the stage's networks, order and trees from its checkpoint; returns the steps that are done."""
    if checkpoint is None:
        return 0
    known = _with_its_drafter(whole, stage, checkpoint)
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), known.arrays())
    items = whole.store.describe(checkpoint).items
    loose = [*known.loose_arrays(), *([SURPLUS] if known.trainer is not None else [])]
    like |= {name: _as_saved(items[name], whole.session.meshes.train) for name in loose if name in items}
    arrays, host = whole.store.restore(checkpoint, like)
    for name, learner in known.learners.items():
        learner.params, learner.opt_state = arrays[name], arrays[f"{name}_optimizer"]
        learner.updates, learner.skipped, learner.skips_in_a_row = host["counters"][name]
    stage.extra = {name: arrays[name] for name in stage.extra}
    stage.order.restore(host["order"])
    whole.heldout += [tuple(pair) for pair in host["heldout"]]
    for name, (seconds, measures) in host.get("results", {}).items():  # a checkpoint of an earlier version has none
        whole.results[name] = StageResult(seconds, [tuple(measure) for measure in measures])
    whole.started = 0.0
    whole.session.published = host["policy_version"]
    if known.draft is not None:
        known.draft.restore(host["drafter"], arrays)
    if stage.trainer is not None and "trainer" in host:  # not in a checkpoint of an earlier version
        stage.trainer.restore(host["trainer"], arrays.get(SURPLUS, {}), steered=whole.session.config.algorithm.kl_target > 0)
    whole.session.restore_selectors(host.get("selectors", []))  # a checkpoint of an earlier version has none
    return host["stage_step"]


def _as_saved(leaves: Leaves, mesh) -> dict:
    """An item whose shapes only the checkpoint knows, whole on every device."""
    tree = nest({tuple(path.split("/")): leaf for path, leaf in leaves.items()})
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=replicated(mesh)), tree)


def _with_its_drafter(whole: Run, stage: Stage, checkpoint: int) -> Stage:
    """The stage without the drafter where it began to learn after the checkpoint. Raises ValueError where what it has learned would be dropped."""
    saved = "drafter" in whole.store.describe(checkpoint).items
    if saved and stage.draft is None:
        raise ValueError(
            f"checkpoint {checkpoint} holds a drafter that has learned, and with drafter.quanta_per_step=0 it would be lost: keep drafter.quanta_per_step, and "
            "set drafter.freeze=True to train it no further")
    if saved or stage.draft is None:
        return stage
    whole.session.reporter.say(f"checkpoint {checkpoint} holds no drafter that learns: it starts now")
    return dataclasses.replace(stage, learners={name: one for name, one in stage.learners.items() if name != "drafter"}, draft=None)


def _save_if_due(whole: Run, stage: Stage, number: int, metrics: dict) -> None:
    """Save on the interval, at a stage's end and on a requested stop; raises Preempted after the last."""
    config, session = whole.session.config, whole.session
    failed = whole.store.check()
    if failed is not None:
        session.reporter.say(f"warning: {failed}; saving again now")
    stop = whole.signal.requested_anywhere()
    last = number == config.stages[stage.name].steps
    every = config.checkpoint.every_steps
    if not (failed or stop or last or (every and number % every == 0)):
        return
    whole.clock(stage.name)
    host = {
        "stage": stage.name, "stage_step": number, "policy_version": session.policy_version, "order": stage.order.state(),
        "config": flat(config.to_dict()), "heldout": [list(pair) for pair in whole.heldout], "selectors": session.selector_states(),
        "counters": {name: [learner.updates, learner.skipped, learner.skips_in_a_row] for name, learner in stage.learners.items()},
        "drafter": stage.draft.state() if stage.draft else {}, "trainer": stage.trainer.state() if stage.trainer else {},
        "results": {name: [result.seconds, [list(measure) for measure in result.measures]] for name, result in whole.results.items()}}
    # NaN ranks last: a step that was not evaluated is never the best one.
    best = None if session.held_out is None else {BEST_METRIC: metrics.get(BEST_METRIC, math.nan)}
    whole.store.save(whole.offset + number, stage.arrays(), host, best)
    if stop or (last and stage.name == config.stages.order[-1]):
        failed = whole.store.wait()
        if failed is not None:
            raise failed
    if stop:
        raise Preempted(whole.signal.exit_code)
