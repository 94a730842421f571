"""Batch generation from a file of prompts to a file of completions, in the order of the input.

Rows are written to OUTPUT.partial as soon as all rows before them are finished, and the file gets its name when it is complete; a run that is interrupted
leaves what was finished there. Sampling values come from the config alone, stop ids from tokenizer and generation config. Nothing is scored.
"""

import dataclasses
import math
import os
import sys
import time
from collections.abc import Sequence

from etils import epath

from tlt_jax.checkpoints.pretrained import load_policy
from tlt_jax.sharding import movement
from tlt_jax.sharding.meshes import Meshes
from tlt_jax.strategies import Completion
from tlt_jax.tasks.prompts import Prompt
from tlt_jax.tasks.request_rows import read_prompt_rows
from tlt_jax.tasks.text_files import Row
from tlt_jax.training import build
from tlt_jax.training.json_lines import JsonLines
from tlt_jax.training.progress import Progress
from tlt_jax.training.rollout_phase import Engine, Phase, Weights, check_lengths, longest_prompt
from tlt_jax.training.scoring import response_text
from tlt_jax.training.settings import Config

REFRESH_SECONDS, LINE_SECONDS = 0.25, 15.0  # a live display; plain lines in a log
GENERATE_STEP = 0  # the step in the noise key


class OrderedFile:
    """JSON rows by number, written in order as soon as all before them are there. A context manager; the file has its name only after a clean end."""

    def __init__(self, path: str, total: int):
        self.path = epath.Path(path)
        self.partial = self.path.parent / f"{self.path.name}.partial"
        self._total, self._next, self._waiting = total, 0, {}

    def __enter__(self) -> "OrderedFile":
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.partial.write_text("")
        self._lines = JsonLines(self.partial)
        return self

    def add(self, number: int, record: dict) -> None:
        """The record with place `number` in the file."""
        self._waiting[number] = record
        while self._next in self._waiting:
            self._lines.write(self._waiting.pop(self._next))
            self._next += 1

    def __exit__(self, kind, error, trace) -> None:
        finished = self._next + len(self._waiting)
        for number in sorted(self._waiting):  # finished before an earlier row: after an interruption they are kept too
            self._lines.write(self._waiting[number])
        self._lines.close()
        if finished == self._total:
            self.partial.replace(self.path)
        elif finished:
            print(f"{finished} of {self._total} completions are kept in {self.partial}", file=sys.stderr)
        else:
            self.partial.unlink()


@dataclasses.dataclass
class Display:
    """What the run says on stderr: a live line on a terminal, a plain line now and then in a log."""

    name: str
    total: int
    engine: Engine
    finished: int = 0
    tokens: int = 0

    def __post_init__(self):
        self._progress = Progress(sys.stderr)
        self._progress.start(self.name, self.total, 0)
        self._started = self._shown = self._said = time.monotonic()

    def add(self, completion: Completion) -> None:
        """A finished completion."""
        self.finished += 1
        self.tokens += len(completion.token_ids)

    def turn(self) -> None:
        """Between dispatches: shows where the run is, seldom enough to cost nothing."""
        now = time.monotonic()
        if now - self._shown > REFRESH_SECONDS:
            self._shown = now
            self._progress.advance(self.finished)
            self._progress.phase("rollout", {"rows_active": self.engine.active, "tokens_per_second": self.tokens / (now - self._started)})
        if now - self._said > LINE_SECONDS and not sys.stderr.isatty():
            self._said = now
            self._progress.line(f"{self._progress.title(self.finished)} completions, {self.rate()}{self._progress.remaining(self.finished)}")

    def rate(self) -> str:
        """Tokens so far and their speed, compilation included."""
        seconds = time.monotonic() - self._started
        return f"{self.tokens:,} tokens in {seconds:.1f} s ({self.tokens / max(seconds, 1e-9):,.0f} tokens/s)"

    def stop(self) -> None:
        """Takes the live line away."""
        self._progress.stop()


def generate(config: Config, prompts_path: str, output_path: str) -> None:
    """Completions of every row of `prompts_path` by `config.model.path`, as rows of `output_path`; all that can be wrong with files is found first."""
    refuse_output(output_path, prompts_path)
    model = build.open_checkpoint(config)
    rows = read_prompt_rows(prompts_path, model.tokenizer, build.prompt_settings(config, limited=False), embedding_rows=model.spec.vocab_size)
    places = {prompt.key: row.place for row, prompt in rows}
    prompts = [prompt for _, prompt in rows]
    check_lengths(model.spec, prompts, config.rollout.max_new_tokens, lambda prompt: places[prompt.key])
    phase = Phase("generate", config.rollout.num_generations, config.rollout.temperature, GENERATE_STEP)
    engine, weights = open_engine(config, model, prompts)
    display = Display("generate", len(prompts) * phase.generations, engine)
    reasons = {"stop": 0, "length": 0}
    with OrderedFile(output_path, display.total) as output:

        def finish(completion: Completion) -> None:
            display.add(completion)
            reasons[completion.finish_reason] += 1
            index = completion.request.index
            output.add(index, output_row(config, model, rows[index // phase.generations], completion))

        try:
            engine.run(weights, prompts, phase, finish, display.turn)
        finally:
            display.stop()
    ends = ", ".join(f"{count} ended by {reason}" for reason, count in reasons.items() if count)
    print(f"{display.finished} completions of {len(prompts)} prompts, {ends}: {display.rate()}; written to {output_path}", file=sys.stderr)


def open_engine(config: Config, model: build.Model, prompts: Sequence[Prompt]) -> tuple[Engine, Weights]:
    """The slices of all devices, shaped for `prompts`, with the model's weights in the rollout dtype, each device reading only its own part."""
    meshes = build.make_meshes(config)
    engine = Engine(config, model, build.make_drivers(config, model.spec, meshes), longest_prompt(prompts))
    return engine, Weights(slice_weights(config, meshes), 0)


def slice_weights(config: Config, meshes: Meshes) -> Sequence:
    """The parameters read straight into the layout of the slices, with no copy in the layout of training."""
    params = load_policy(config.model.path, dtype=build.resolve_dtype(config, "rollout"), mesh=meshes.publish).params
    return [movement.wrap_for_slice(params, mesh) for mesh in meshes.slices]


def output_row(config: Config, model: build.Model, given: tuple[Row, Prompt], completion: Completion) -> dict:
    """The row of one completion. Raises ValueError for a log-probability that is no number: the weights or activations overflowed."""
    row, prompt = given
    identity = row.columns.get("id")
    identity = row.index if identity is None else identity
    if not all(map(math.isfinite, completion.logprobs)):
        raise ValueError(f"{row.place}: a log-probability is not finite; check the weights, or set precision.rollout=float32")
    has_text = model.tokenizer is not None
    rollout = config.rollout
    truncated = {"sampling_logprobs": completion.sampling_logprobs} if rollout.top_k > 0 or rollout.top_p < 1 or rollout.min_p > 0 else {}
    text = response_text(model.tokenizer, completion) if has_text else None
    return {
        "id": identity, "sample": completion.request.sample, "prompt": prompt.text if has_text else None, "prompt_ids": prompt.prompt_ids,
        "token_ids": completion.token_ids, "logprobs": completion.logprobs, **truncated, "text": text, "finish_reason": completion.finish_reason,
        "accept_length": completion.accept_length}


def refuse_output(output_path: str, prompts_path: str | None = None) -> None:
    """Raises OSError when the output cannot become a file: it is a directory, or the file of prompts itself."""
    if epath.Path(output_path).is_dir():
        raise IsADirectoryError(f"--output={output_path} is a directory; name a file in it")
    if prompts_path is not None and os.path.abspath(output_path) == os.path.abspath(prompts_path):
        raise FileExistsError(f"--output={output_path} is the file of prompts; it would be replaced")
