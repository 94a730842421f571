"""Writes what a run says about itself: metrics.jsonl, samples.jsonl, the timeline, TensorBoard, console lines, curves.png and the closing message.

Takes plain numbers and text only: whoever owns a device array fetches it first, on the main thread, so that no report hides a transfer or a collective.
One step axis for every series: the step of the stage. Which process reports is the caller's choice; checkpoints are not written here.
"""

import collections
import dataclasses
import math
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TextIO

import numpy as np
from etils import epath
from tensorboardX import SummaryWriter

from tlt_jax.scheduling.timeline import Span
from tlt_jax.training.curves import draw_curves
from tlt_jax.training.health import health_line, numbers_line
from tlt_jax.training.json_lines import JsonLines
from tlt_jax.training.progress import Progress
from tlt_jax.training.timeline_files import TimelineFile, draw

NAMESPACES = ("reward", "completions", "policy", "value", "sampler", "spec", "drafter", "scheduler", "timing", "perf", "data")
_REMEMBERED_STEPS = 20


@dataclasses.dataclass(frozen=True)
class ReportSettings:
    """What is written and how often; `stages` is the order of the stages, `run_name` what Weights & Biases calls the run."""

    stages: tuple[str, ...] = ("rl",)
    every_steps: int = 1
    samples_per_step: int = 8
    timeline_every_steps: int = 10  # 0: no picture
    tensorboard: bool = True
    wandb: bool = False
    run_name: str = "tlt_jax"


@dataclasses.dataclass(frozen=True)
class Sample:
    """One completion as people read it. `parsed` is what the reward understood as the answer; `reward` None = not scored; `length` in tokens."""

    prompt: str
    response: str
    answer: str
    parsed: str | None
    reward: float | None
    components: Mapping[str, float]
    advantage: float | None
    length: int
    finish_reason: str
    policy_version: int
    id: str = ""


class Reporter:
    """The reports of one run directory. `resumed` = (stage, step) of the restored checkpoint: records after it are cut off, so no step is there twice.

    A new run in a used directory sets the old files aside.
    """

    def __init__(self, workdir: str, settings: ReportSettings, *, resumed: tuple[str, int] | None = None, stream: TextIO | None = None):
        self._directory = epath.Path(workdir)
        self._directory.mkdir(parents=True, exist_ok=True)
        self._settings = settings
        self._metrics = JsonLines(self._directory / "metrics.jsonl")
        self._samples = JsonLines(self._directory / "samples.jsonl")
        self._timeline = TimelineFile(self._directory / "timeline.json.gz")
        number_of = settings.stages.index
        for journal in (self._metrics, self._samples, self._timeline):
            if resumed:
                journal.keep(lambda record: (number_of(record["stage"]), record["step"]) <= (number_of(resumed[0]), resumed[1]))
            else:
                journal.set_aside()
        self._progress = Progress(stream or sys.stdout)
        self._resumed = resumed
        self._wandb = _start_wandb(settings) if settings.wandb else None
        self._events: SummaryWriter | None = None
        self._earlier: collections.deque[dict] = collections.deque(maxlen=_REMEMBERED_STEPS)
        self._stage, self._step = settings.stages[0], -1

    def start_stage(self, stage: str, steps: int) -> None:
        """A new step axis for `stage`, of `steps` steps in all (those done before a resume included)."""
        self._stage = stage
        self._step = self._resumed[1] if self._resumed and self._resumed[0] == stage else -1
        self._earlier.clear()
        self._progress.start(stage, steps, max(self._step, 0))
        self._close_events()
        if self._settings.tensorboard:
            self._events = SummaryWriter(str(self._directory / "tensorboard" / stage), purge_step=self._step + 1, flush_secs=10)

    def phase(self, name: str, **numbers: int | float) -> None:
        """What is being done now and how far it is, for the live display only: phase("rollout", rows_active=12, tokens_per_second=900.0)."""
        self._progress.phase(name, numbers)

    def say(self, text: str) -> None:
        """A line for the reader, such as the batch equation or the matched data columns."""
        self._progress.line(text)

    def record(self, step: int, metrics: Mapping[str, object]) -> None:
        """The one record of a step: metrics.jsonl, TensorBoard, the numbers and health lines. Step 0 is before the first update.

        Raises TypeError for a value that is no plain number or text, ValueError for an unknown namespace or a step that is already recorded.
        """
        plain = plain_metrics(metrics)
        if step <= self._step:
            raise ValueError(f"step {step} of stage {self._stage} comes after step {self._step} was recorded: merge all metrics of a step into one record")
        self._step = step
        self._metrics.write({"stage": self._stage, "step": step, "time": round(time.time(), 3)} | {name: _json_value(value) for name, value in plain.items()})
        numbers = {name: value for name, value in plain.items() if not isinstance(value, str)}
        for name, value in numbers.items() if self._events else ():
            self._events.add_scalar(name, value, step)
        if self._wandb:
            self._wandb.log({f"{self._stage}/{name}": value for name, value in numbers.items()} | {f"{self._stage}/step": step})
        self._progress.advance(step)
        if step % self._settings.every_steps == 0 or step == self._progress.steps:
            self._progress.line(f"{self._progress.title(step)}  {numbers_line(plain)}{self._progress.remaining(step)}")
            self._progress.line(f"    {health_line(plain, list(self._earlier))}")
        self._earlier.append(plain)

    def record_samples(self, step: int, samples: Sequence[Sample], *, kind: str = "train", limit: int | None = None) -> None:
        """The first `limit` (logging.samples_per_step) completions of a step to samples.jsonl; `kind` says train or evaluation."""
        for sample in samples[: self._settings.samples_per_step if limit is None else limit]:
            row = dataclasses.asdict(sample)
            for name in ("reward", "advantage"):
                row[name] = None if row[name] is None else _json_value(_plain(name, row[name]))
            row["components"] = {name: _json_value(_plain(name, value)) for name, value in sample.components.items()}
            self._samples.write({"stage": self._stage, "step": step, "kind": kind} | row)

    def record_timeline(self, step: int, spans: Sequence[Span]) -> None:
        """What every slice did in a step to timeline.json.gz; each logging.timeline_every_steps-th step also as timeline.png."""
        self._timeline.write(self._stage, step, spans)
        every = self._settings.timeline_every_steps
        if every and step % every == 0:
            draw(spans, self._directory / "timeline.png", f"{self._stage} step {step}")

    def finish(self, next_commands: Sequence[str] = ()) -> None:
        """Draws the curves and says where the files are and what to type next."""
        self._progress.stop()
        draw_curves(self._metrics.read(), self._directory / "curves.png")
        self.close()
        names = ["metrics.jsonl", "samples.jsonl", "timeline.json.gz", "curves.png", "timeline.png", "tensorboard", "checkpoints"]
        self.say(f"files in {self._directory}: {', '.join(name for name in names if (self._directory / name).exists())}")
        for command in next_commands:
            self.say(f"next: {command}")

    def close(self) -> None:
        """Ends the display and closes the files; safe to call twice."""
        self._progress.stop()
        self._metrics.close()
        self._samples.close()
        self._timeline.close()
        self._close_events()
        if self._wandb:
            self._wandb.finish()
            self._wandb = None

    def _close_events(self) -> None:
        if self._events:
            self._events.close()
            self._events = None


class SilentReporter:
    """Stands in for Reporter on every process but the first: checks the metrics alike and writes nothing."""

    def start_stage(self, stage: str, steps: int) -> None:
        """Nothing to show."""

    def phase(self, name: str, **numbers: int | float) -> None:
        """Nothing to show."""

    def say(self, text: str) -> None:
        """Nothing to say."""

    def record(self, step: int, metrics: Mapping[str, object]) -> None:
        """Raises as Reporter.record does for a value or a name that cannot be reported."""
        plain_metrics(metrics)

    def record_samples(self, step: int, samples: Sequence[Sample], *, kind: str = "train", limit: int | None = None) -> None:
        """Nothing to write."""

    def record_timeline(self, step: int, spans: Sequence[Span]) -> None:
        """Nothing to write."""

    def finish(self, next_commands: Sequence[str] = ()) -> None:
        """Nothing to end."""

    def close(self) -> None:
        """Nothing to close."""


def plain_metrics(metrics: Mapping[str, object]) -> dict[str, bool | int | float | str]:
    """The metrics with numpy scalars as Python numbers; raises TypeError for arrays, ValueError for a name outside NAMESPACES."""
    unknown = [name for name in metrics if name.partition("/")[0] not in NAMESPACES or not name.partition("/")[2]]
    if unknown:
        raise ValueError(f"metric {', '.join(unknown)}: a name is NAMESPACE/name with a namespace of {', '.join(NAMESPACES)}")
    return {name: _plain(name, value) for name, value in metrics.items()}


def _plain(name: str, value: object) -> bool | int | float | str:
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0):
        value = value.item()
    if not isinstance(value, bool | int | float | str):
        raise TypeError(
            f"metric {name} is a {type(value).__module__}.{type(value).__name__}; reports take plain numbers and text: fetch it on the main thread first"
        )
    return value


def _json_value(value: bool | int | float | str) -> bool | int | float | str | None:
    """JSON has no NaN and no infinity: they are written as null (and the health line names the metric)."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _start_wandb(settings: ReportSettings):
    try:
        import wandb
    except ImportError as error:
        raise RuntimeError("logging.wandb=True needs the wandb package: pip install wandb, or set logging.wandb=False") from error
    return wandb.init(project="tlt_jax", name=settings.run_name)
