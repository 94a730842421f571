"""Tasks of lm-evaluation-harness on a model: the adapter that answers its three kinds of requests, and a run of tasks as one report.

The package lm_eval is optional and imported only when tasks are run; it needs no torch for a model that is given as an object, as here. What its tasks are
and how their answers are counted is its business alone.
"""

import contextlib
import dataclasses
import difflib
import math
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from tlt_jax.tasks.continuations import encode_pair, generation, rolling_windows, start_id, text_ids
from tlt_jax.training import build, text_answers
from tlt_jax.training.likelihood import Likelihood
from tlt_jax.training.settings import Config

INSTALL = "pip install 'lm_eval>=0.4.13,<0.5'"
BOOTSTRAP_DRAWS = 1000  # for the errors of metrics that are no mean, such as perplexity


@dataclasses.dataclass(frozen=True)
class Wanted:
    """Which tasks, and how they are asked."""

    tasks: tuple[str, ...]
    directory: str | None = None  # own tasks as YAML files; one with the name of a shipped task replaces it
    shots: int | None = None  # examples before each question; None: what the task says
    chat: bool = False  # through the chat template
    context: int | None = None  # tokens that are read at once; None: the model's positions

    def __post_init__(self):
        if not self.tasks and (self.directory, self.shots, self.chat, self.context) != (None, None, False, None):
            raise ValueError("--harness_tasks, --harness_shots, --harness_chat and --harness_context say how --harness=TASK is run, which is missing")
        if self.shots is not None and self.shots < 0:
            raise ValueError(f"--harness_shots={self.shots} must be at least 0")
        if self.context is not None and self.context < 1:
            raise ValueError(f"--harness_context={self.context} must be at least 1")


class Loaded(NamedTuple):
    """lm_eval's objects of the tasks and groups that were asked for, and of the index that they come from."""

    tasks: list
    manager: object


class Request(Protocol):
    """What the adapter reads of lm_eval's requests: (context, continuation), (text,) or (context, generation options)."""

    args: tuple


class HarnessModel:
    """The model as lm-evaluation-harness sees it. Weights are loaded for the first request of a kind and leave the device with another kind's."""

    def __init__(self, config: Config, model: build.Model, limit: int):
        super().__init__()  # with lm_eval's own class behind this one: rank, world size and cache
        self._config, self._model, self._limit = config, model, limit
        self._likelihood: Likelihood | None = None

    def loglikelihood(self, requests: Sequence[Request]) -> list[tuple[float, bool]]:
        """(log-probability, greedy or not) of each continuation behind its context."""
        spans = [encode_pair(self._model.tokenizer, *request.args) for request in requests]
        return [tuple(score) for score in self._scorer().score(spans, "loglikelihood")]

    def loglikelihood_rolling(self, requests: Sequence[Request]) -> list[float]:
        """The log-probability of each whole text, long ones in windows."""
        start = start_id(self._model.tokenizer)
        windows = [rolling_windows(text_ids(self._model.tokenizer, request.args[0]), start, self._limit) for request in requests]
        scores = iter(self._scorer().score([span for own in windows for span in own], "loglikelihood_rolling"))
        return [math.fsum(next(scores).logprob for _ in own) for own in windows]

    def generate_until(self, requests: Sequence[Request]) -> list[str]:
        """What the model writes behind each context until a stop string, a stop token or the limit."""
        self._likelihood = None
        asked = [text_answers.Asked(context, generation(options)) for context, options in (request.args for request in requests)]
        return text_answers.answers(self._config, self._model, asked, self._limit)

    def apply_chat_template(self, chat_history: list[dict], add_generation_prompt: bool = True) -> str:
        """The conversation as text; without a generation prompt the last message is one that the model goes on with."""
        return self._model.tokenizer.backend.apply_chat_template(
            chat_history, tokenize=False, add_generation_prompt=add_generation_prompt, continue_final_message=not add_generation_prompt)

    @property
    def tokenizer_name(self) -> str:
        """Tells lm_eval's caches of requests apart."""
        return self._config.model.path

    def _scorer(self) -> Likelihood:
        if self._likelihood is None:
            self._likelihood = Likelihood(self._config, self._model, build.make_meshes(self._config), self._limit)
        return self._likelihood


def evaluate(config: Config, wanted: Wanted) -> dict:
    """The report of all tasks. Raises ValueError for a missing package, unknown tasks, data that is not there, and a model that cannot be asked."""
    loaded = load_tasks(wanted)
    model = build.open_checkpoint(config)
    if model.tokenizer is None:
        raise ValueError(f"{model.source.path} has no tokenizer files; a task cannot be read without them")
    if wanted.chat and not model.tokenizer.has_chat_template:
        raise ValueError("--harness_chat: the tokenizer has no chat template; set model.chat_template to a Jinja file")
    limit = min(model.spec.max_position_embeddings, wanted.context or model.spec.max_position_embeddings)
    from lm_eval.api.model import LM
    from lm_eval.evaluator import simple_evaluate

    class Adapter(HarnessModel, LM):
        """An LM of lm_eval."""

    with _one_process():
        results = simple_evaluate(
            Adapter(config, model, limit), tasks=loaded.tasks, task_manager=loaded.manager, num_fewshot=wanted.shots, limit=config.evaluation.limit or None,
            bootstrap_iters=BOOTSTRAP_DRAWS, log_samples=False, apply_chat_template=wanted.chat, fewshot_as_multiturn=wanted.chat, random_seed=config.seed)
    return report(results) | {"model": config.model.path, "context": limit, "chat": wanted.chat, "limit": config.evaluation.limit, "seed": config.seed}


def load_tasks(wanted: Wanted) -> Loaded:
    """The tasks with their data read; nothing of the model is touched before."""
    if wanted.directory is not None and not pathlib.Path(wanted.directory).is_dir():
        raise ValueError(f"--harness_tasks={wanted.directory}: there is no such directory")
    try:
        from datasets.exceptions import DatasetsError
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ValueError(f"--harness needs lm-evaluation-harness, which requirements.txt does not install ({error}): {INSTALL}; torch is not needed") from error
    # Reading the thousands of shipped tasks takes seconds; own tasks need none of them, own groups may.
    manager = TaskManager(include_path=wanted.directory, include_defaults=False) if wanted.directory else None
    if manager is None or not set(wanted.tasks) <= set(manager.all_tasks) - set(manager.all_groups):
        manager = TaskManager(include_path=wanted.directory)
    for name in wanted.tasks:
        if name not in manager.all_tasks:
            close = difflib.get_close_matches(name, manager.all_tasks, n=3)
            guess = f"; did you mean {' or '.join(close)}?" if close else ""
            own = f" (files in {wanted.directory} that are no valid YAML are passed over)" if wanted.directory else ""
            raise ValueError(f"--harness={name}: there is no such task{guess}{own}")
    try:
        loaded = manager.load(list(wanted.tasks))
    except (DatasetsError, OSError, ValueError, LookupError, ImportError) as error:
        raise ValueError(
            f"--harness={','.join(wanted.tasks)}: a task cannot be read: {error}. Its data must be in the cache of the datasets package or reachable; local "
            "files are named by a YAML file in --harness_tasks=DIR") from error
    children = {name for names in loaded["group_map"].values() for name in names}
    return Loaded([one for name, one in (loaded["groups"] | loaded["tasks"]).items() if name not in children], manager)


@contextlib.contextmanager
def _one_process() -> Iterator[None]:
    """lm_eval's own switch: it draws bootstrap samples in forked processes, and a fork beside the threads of XLA may hang."""
    before = os.environ.get("DISABLE_MULTIPROC")
    os.environ["DISABLE_MULTIPROC"] = "1"
    try:
        yield
    finally:
        del os.environ["DISABLE_MULTIPROC"]
        if before is not None:
            os.environ["DISABLE_MULTIPROC"] = before


def report(results: Mapping) -> dict:
    """lm_eval's results as JSON: by task and group each metric (and filter, where it is not "none") with its standard error; null is no number."""
    tasks = {}
    for name, numbers in results["results"].items():
        metrics = {}
        for key, value in numbers.items():
            metric, _, chosen = key.partition(",")
            if chosen and not metric.endswith("_stderr"):
                shown = metric if chosen == "none" else f"{metric} ({chosen})"
                metrics[shown] = {"value": _number(value), "stderr": _number(numbers.get(f"{metric}_stderr,{chosen}"))}
        tasks[name] = {
            "metrics": metrics, "shots": results["n-shot"].get(name), "samples": results["n-samples"].get(name, {}).get("effective"),
            "version": results["versions"].get(name)}
    return {"lm_eval": results["lm_eval_version"], "tasks": tasks}


def _number(value) -> float | None:
    """lm_eval writes "N/A" where it has no number."""
    return float(value) if not isinstance(value, str) and value is not None and math.isfinite(value) else None


def table(found: Mapping) -> str:
    """The report as people read it: a line a metric."""
    rows = [("task", "shots", "samples", "metric", "value", "stderr")]
    for name, task in found["tasks"].items():
        for metric, numbers in task["metrics"].items():
            value, stderr = ("-" if number is None else f"{number:.4f}" for number in (numbers["value"], numbers["stderr"]))
            shots, samples = ("-" if count is None else str(count) for count in (task["shots"], task["samples"]))
            rows.append((name, shots, samples, metric, value, stderr))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
