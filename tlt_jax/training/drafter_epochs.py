"""Epochs of a drafter over batches of answers, measured after each, and saved so that an interrupted training goes on and ends with the same bits.

The batches of an epoch come in an order of (seed, epoch), so the number of updates says where the training stands.
"""

import dataclasses
import hashlib
import time
from collections.abc import Sequence

import jax
import numpy as np
from etils import epath

from tlt_jax.checkpoints.run_state import RunStateStore
from tlt_jax.distillation.acceptance import expected_accept_length
from tlt_jax.distillation.pairs import DraftBatch
from tlt_jax.runtime.draft_driver import DraftLearner
from tlt_jax.training.answering import Answer
from tlt_jax.training.json_lines import JsonLines
from tlt_jax.training.preemption import PreemptionSignal
from tlt_jax.training.settings import Config, read_key
from tlt_jax.training.stages import Preempted

LINE_SECONDS, SAVE_SECONDS = 15.0, 300.0
TRAINED_WITH = (
    "seed", "model.path", "speculative.method", "drafter.path", "drafter.draft_vocab_size", "drafter.capture_layers", "rollout.temperature",
    "distill.epochs", "distill.lr", "distill.tokens_per_update", "distill.unroll", "distill.decay", "distill.feature_weight", "distill.held_out")


@dataclasses.dataclass(frozen=True)
class Lessons:
    """What is trained on and what is only measured on, features included; `digest` names the answers that they were made of."""

    trained: Sequence[DraftBatch]
    held_out: Sequence[DraftBatch]
    digest: str


def digest_of(answers: Sequence[Answer]) -> str:
    """The same for the same answers in the same order."""
    return hashlib.sha256(repr([(tuple(prompt), tuple(response)) for prompt, response in answers]).encode()).hexdigest()


class DrafterEpochs:
    """The training of one workdir: its checkpoints, its metrics and the seconds it took in earlier processes."""

    def __init__(self, config: Config, directory: epath.Path):
        """Raises ValueError where the checkpoints are of a training with other settings."""
        self.config, self.metrics, self.seconds = config, JsonLines(directory / "metrics.jsonl"), 0.0
        self.store = RunStateStore(directory / "checkpoints", keep=1, async_save=False)
        self.step = self.store.latest_valid_step()
        self._refuse_changes(_trained_with(config))

    def run(self, learner: DraftLearner, lessons: Lessons) -> None:
        """All epochs, or as many as fit into distill.minutes. Raises Preempted after a requested stop, when the state is saved."""
        batches, config = lessons.trained, self.config
        if self.step is None:
            self.metrics.set_aside()
            before = learner.evaluate(lessons.held_out)
            print(f"before: {described(before)}", flush=True)
            self.metrics.write({"update": 0} | before)
        else:
            self._restore(learner, lessons)
        clock, in_time = _Clock(self.seconds), True
        with PreemptionSignal() as signal:
            for epoch in range(learner.updates // len(batches), config.distill.epochs):
                order = np.random.default_rng((config.seed, epoch)).permutation(len(batches))
                for index in order[learner.updates % len(batches) :]:
                    stats = learner.update([batches[index]])
                    if clock.due("line", LINE_SECONDS):
                        print(f"update {learner.updates}/{config.distill.epochs * len(batches)}: {described(stats)}", flush=True)
                    in_time = not config.distill.minutes or clock.seconds <= 60 * config.distill.minutes
                    if not in_time:
                        print(f"stopped after distill.minutes={config.distill.minutes}", flush=True)
                        break
                    if index != order[-1] and (signal.requested or clock.due("save", SAVE_SECONDS)):
                        self._save(learner, lessons, clock, signal)
                if not in_time:
                    break
                measured = learner.evaluate(lessons.held_out)
                print(f"epoch {epoch + 1}: held out {described(measured)}", flush=True)
                self.metrics.write({"update": learner.updates, "seconds": clock.seconds} | measured)
                self._save(learner, lessons, clock, signal)
        self.metrics.write({"update": learner.updates, "final": True} | learner.evaluate(lessons.held_out))
        self.metrics.close()

    def finish(self) -> None:
        """Remove the checkpoints: the drafter is written, and the same command trains anew."""
        self.store.close()
        self.store.directory.rmtree()

    def _refuse_changes(self, now: dict) -> None:
        saved = {} if self.step is None else self.store.describe(self.step).host["trained_with"]
        changed = [f"{name}={saved[name]}, now {value}" for name, value in now.items() if saved and saved.get(name, value) != value]
        if changed:
            raise ValueError(
                f"{self.store.directory} holds an interrupted training with {'; '.join(changed)}: go on with the old values, or remove the directory to train "
                "anew")

    def _facts(self, lessons: Lessons) -> dict:
        return _trained_with(self.config) | {"answers": lessons.digest, "batches": len(lessons.trained)}

    def _save(self, learner: DraftLearner, lessons: Lessons, clock: "_Clock", signal: PreemptionSignal) -> None:
        arrays = {"drafter": learner.params, "drafter_optimizer": learner.opt_state}
        counters = [learner.updates, learner.skipped, learner.skips_in_a_row]
        self.store.save(learner.updates, arrays, {"trained_with": self._facts(lessons), "counters": counters, "seconds": clock.seconds})
        failed = self.store.wait()
        if failed is not None and signal.requested:
            raise failed
        if failed is not None:
            print(f"warning: {failed}", flush=True)
        if signal.requested:
            self.metrics.close()
            raise Preempted(signal.exit_code)

    def _restore(self, learner: DraftLearner, lessons: Lessons) -> None:
        self._refuse_changes(self._facts(lessons))
        arrays = {"drafter": learner.params, "drafter_optimizer": learner.opt_state}
        like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), arrays)
        arrays, host = self.store.restore(self.step, like)
        learner.params, learner.opt_state = arrays["drafter"], arrays["drafter_optimizer"]
        learner.updates, learner.skipped, learner.skips_in_a_row = host["counters"]
        self.seconds = host["seconds"]
        self.metrics.keep(lambda record: record["update"] <= learner.updates and not record.get("final"))
        print(f"continuing after update {learner.updates}", flush=True)


class _Clock:
    """Seconds of the whole training, and what is due."""

    def __init__(self, before: float):
        self._started = time.monotonic() - before
        self._last = {}

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def due(self, name: str, every: float) -> bool:
        """True when `every` seconds have passed since it last was, or since it was first asked."""
        now = self.seconds
        if now - self._last.setdefault(name, now) <= every:
            return False
        self._last[name] = now
        return True


def _trained_with(config: Config) -> dict:
    """What the training depends on, as JSON has it."""
    return {name: list(value) if isinstance(value := read_key(config, name), tuple) else value for name in TRAINED_WITH}


def described(stats: dict[str, float]) -> str:
    """Loss and acceptance by level as people read them."""
    levels = [stats[name] for name in sorted(stats) if name.startswith("drafter/acceptance_")]
    by_level = ", ".join(f"{value:.3f}" for value in levels)
    return f"loss {stats['drafter/loss']:.3f}, acceptance by level {by_level}, expected accept length {expected_accept_length(stats):.2f}"
