"""What a run says at its start and at its end: devices, data, what changed since the checkpoint; each stage's time and what it brought."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence

import jax

from tlt_jax.training import build
from tlt_jax.training.reporting import Reporter, ReportSettings, SilentReporter
from tlt_jax.training.session import Session
from tlt_jax.training.settings import Config
from tlt_jax.training.settings_rules import batch_equation

_MEASURES = {"policy/heldout_loss": ("held-out loss", "{:.3f}"), "reward/model_heldout_accuracy": ("held-out accuracy", "{:.1%}")}


@dataclasses.dataclass
class StageResult:
    """Seconds of a stage, over all processes that worked on it one after the other, and what it measured: (step, metrics) before and after."""

    seconds: float = 0.0
    measures: list[tuple[int, dict[str, float]]] = dataclasses.field(default_factory=list)


def open_reporter(config: Config, workdir: str, resumed: dict | None) -> Reporter | SilentReporter:
    """The run's reporter on the first process, one that is silent on the others."""
    if jax.process_index() != 0:
        return SilentReporter()
    settings = ReportSettings(
        stages=tuple(config.stages.order), every_steps=config.logging.every_steps, samples_per_step=config.logging.samples_per_step,
        timeline_every_steps=config.logging.timeline_every_steps, tensorboard=config.logging.tensorboard, wandb=config.logging.wandb,
        run_name=pathlib.Path(workdir).name)
    return Reporter(workdir, settings, resumed=None if resumed is None else (resumed["stage"], resumed["stage_step"]))


def say_start(session: Session, lines: Sequence[str], step: int | None, resumed: dict | None) -> None:
    """Devices, data and batch, and how the config differs from that of the checkpoint at `step`."""
    say, config = session.reporter.say, session.config
    devices = jax.devices()
    say(f"{len(devices)} × {devices[0].device_kind} ({devices[0].platform}); {len(session.drivers)} rollout slices; "
        f"rollout in {build.resolve_dtype(config, 'rollout')}, training in {build.resolve_dtype(config, 'compute')}")
    for line in lines:
        say(line)
    if "rl" in config.stages.order:
        say(batch_equation(config))
    if resumed is not None:
        say(f"continuing from checkpoint {step}: stage {resumed['stage']}, step {resumed['stage_step']}")
        changed = sorted(name for name, value in flat(config.to_dict()).items() if resumed["config"].get(name, value) != value)
        if changed:
            say(f"changed since that checkpoint: {', '.join(changed)}")


def flat(values: dict, prefix: str = "") -> dict:
    """Config values by dotted name, as a checkpoint keeps them."""
    named = {}
    for name, value in values.items():
        named |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": list(value) if isinstance(value, tuple) else value}
    return named


def say_finished(config: Config, reporter: Reporter | SilentReporter, workdir: str, step: int, resumed: dict) -> None:
    """A run that has nothing left to do."""
    stage = resumed["stage"]
    reporter.say(f"this run is finished: checkpoint {step} holds step {resumed['stage_step']} of its last stage, {stage}; nothing was done")
    say_accuracy(reporter, resumed["heldout"])
    reporter.say(f"raise stages.{stage}.steps to train on, or export the model: {next_commands(config, workdir)[0]}")
    reporter.close()


def say_results(reporter: Reporter | SilentReporter, results: Mapping[str, StageResult], heldout: list) -> None:
    """Each stage's share of the time, and what the supervised ones brought; then the accuracy of RL."""
    total = sum(result.seconds for result in results.values())
    if len(results) > 1:
        reporter.say("time: " + ", ".join(f"{stage} {result.seconds:.0f} s ({result.seconds / total:.0%})" for stage, result in results.items()))
    for stage, result in results.items():
        for name, (words, form) in _MEASURES.items():
            values = [form.format(metrics[name]) for _, metrics in result.measures if name in metrics]
            if values:
                reporter.say(f"{stage}: {words} {values[0]} before, {values[-1]} after step {result.measures[-1][0]}")
    say_accuracy(reporter, heldout)


def say_accuracy(reporter: Reporter | SilentReporter, heldout: list) -> None:
    """Held-out accuracy before RL and now, from (step, accuracy)."""
    if heldout:
        (_, before), (last, after) = heldout[0], heldout[-1]
        reporter.say(f"held-out accuracy: {100 * before:.1f} % before RL, {100 * after:.1f} % after step {last} ({100 * (after - before):+.1f} points)")


def next_commands(config: Config, workdir: str) -> tuple[str, ...]:
    """What to type after the run."""
    if config.stages.order[-1] == "reward_model":
        return (f"python -m tlt_jax.export --workdir={workdir} --output={workdir}/export --what=reward_model",)
    return (
        f"python -m tlt_jax.export --workdir={workdir} --output={workdir}/export",
        f"python -m tlt_jax.generate --model={workdir}/export --prompts=PROMPTS.jsonl --output=ANSWERS.jsonl")
