"""A model's verdicts on a task: pass@k, avg@n and maj@n by data source, and how long right and wrong answers are, as a table and as JSON.

It trains nothing. The numbers of one prompt are those of `evaluation`; the rows of each source are averaged over its prompts.
"""

import collections
import dataclasses
import json
import math
import sys
from collections.abc import Sequence

import numpy as np
from etils import epath

from tlt_jax.rewards.items import Scored
from tlt_jax.rewards.pool import RewardPool
from tlt_jax.strategies import Completion
from tlt_jax.tasks.prompts import Prompt
from tlt_jax.training import build
from tlt_jax.training.evaluation import majority_right, pass_at_k
from tlt_jax.training.generation import GENERATE_STEP, Display, open_engine
from tlt_jax.training.rollout_phase import Phase, check_lengths
from tlt_jax.training.scoring import StepScorer
from tlt_jax.training.settings import Config

RIGHT = 1.0  # a reward of at least this much is a right answer


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The n judged completions of one prompt."""

    source: str
    right: tuple[bool, ...]
    rewards: tuple[float, ...]
    predictions: tuple[str | None, ...]
    lengths: tuple[int, ...]
    cut: tuple[bool, ...]  # ended by the length limit


def evaluate(config: Config) -> dict:
    """The whole report of `config.model.path` on the task's held-out rows (file tasks without data.eval_path: on data.path)."""
    settings = config.evaluation
    n = settings.num_generations
    if n > 1 and settings.temperature == 0:
        raise ValueError(f"evaluation.num_generations={n} at evaluation.temperature=0 gives {n} equal completions; set evaluation.temperature above 0")
    model = build.open_checkpoint(config)
    if model.tokenizer is None:
        raise ValueError(f"{model.source.path} has no tokenizer files; a task cannot be read without them")
    task, held_out = build.make_tasks(config, model.tokenizer)
    task = held_out or task
    prompts = list(task.prompts())[: settings.limit or None]
    check_lengths(model.spec, prompts, config.rollout.max_new_tokens, lambda prompt: f"{prompt.source}, row {prompt.row}")
    with RewardPool(build.pool_settings(config), build.make_scorer(config, task)) as pool:
        engine, weights = open_engine(config, model, prompts)
        scorer = StepScorer(pool, model.tokenizer, prompts, n, GENERATE_STEP, at_once=config.reward.scope == "step")
        display = Display("evaluate", len(prompts) * n, engine)

        def finish(completion: Completion) -> None:
            display.add(completion)
            scorer.add(completion)

        def turn() -> None:
            scorer.poll()
            display.turn()

        try:
            engine.run(weights, prompts, Phase("evaluate", n, settings.temperature, GENERATE_STEP), finish, turn)
        finally:
            display.stop()
        print(f"{display.finished} completions: {display.rate()}", file=sys.stderr)
        rollouts = scorer.finish()
    return report(verdicts(prompts, rollouts.completions, rollouts.scores), n) | {
        "model": config.model.path, "task": task.name, "data": config.data.eval_path or config.data.path or config.data.task, "n": n,
        "temperature": settings.temperature, "top_k": config.rollout.top_k, "top_p": config.rollout.top_p, "min_p": config.rollout.min_p,
        "max_new_tokens": config.rollout.max_new_tokens, "seed": config.seed}


def verdicts(prompts: Sequence[Prompt], completions: Sequence[Completion], scores: Sequence[Scored]) -> list[Verdict | None]:
    """One verdict a prompt; None where a reward failed, since that says nothing about the answer."""
    n = len(completions) // len(prompts)
    judged = []
    for number, prompt in enumerate(prompts):
        own, scored = completions[number * n : (number + 1) * n], scores[number * n : (number + 1) * n]
        rewards = [score.score for score in scored]
        judged.append(None if None in rewards or None in [score.judged for score in scored] else Verdict(
            prompt.source, tuple(score.judged >= RIGHT for score in scored), tuple(rewards), tuple(score.pred for score in scored),
            tuple(len(completion.token_ids) for completion in own), tuple(completion.finish_reason == "length" for completion in own)))
    return judged


def report(judged: Sequence[Verdict | None], n: int) -> dict:
    """Overall numbers, the same by source, and length statistics; raises ValueError when no prompt could be judged."""
    known = [verdict for verdict in judged if verdict is not None]
    if not known:
        raise ValueError(f"none of the {len(judged)} prompts could be judged: every reward failed; see reward.kind and reward.timeout_seconds")
    by_source = collections.defaultdict(list)
    for verdict in known:
        by_source[verdict.source].append(verdict)
    return {
        "k": _ks(n), "prompts": len(known), "prompts_not_judged": len(judged) - len(known), "overall": _numbers(known, n),
        "sources": {source: _numbers(own, n) for source, own in sorted(by_source.items())},
        "lengths": {name: _lengths(known, wanted) for name, wanted in (("right", True), ("wrong", False))}}


def _ks(n: int) -> list[int]:
    """Powers of two up to n, and n itself."""
    return sorted({1 << power for power in range(n.bit_length())} | {n})


def _numbers(known: Sequence[Verdict], n: int) -> dict[str, float | None]:
    passed = {k: [pass_at_k(n, sum(verdict.right), k) for verdict in known] for k in _ks(n)}
    spread = float(np.std(passed[1], ddof=1)) / math.sqrt(len(known)) if len(known) > 1 else None
    parsed = any(prediction is not None for verdict in known for prediction in verdict.predictions)
    majority = [majority_right(list(verdict.predictions), list(verdict.right)) for verdict in known]
    return {
        "prompts": len(known),
        **{f"pass@{k}": float(np.mean(values)) for k, values in passed.items()},
        "pass@1_stderr": spread,
        f"avg@{n}": float(np.mean([np.mean(verdict.right) for verdict in known])),
        f"maj@{n}": float(np.mean(majority)) if parsed else None,  # rewards that name no parsed answer leave nothing to vote on
        "reward_mean": float(np.mean([verdict.rewards for verdict in known])),
        "cut_share": float(np.mean([verdict.cut for verdict in known]))}


def _lengths(known: Sequence[Verdict], wanted: bool) -> dict[str, float]:
    lengths = [length for verdict in known for length, right in zip(verdict.lengths, verdict.right, strict=True) if right is wanted]
    if not lengths:
        return {"count": 0}
    middle, high = np.percentile(lengths, (50, 90))
    return {"count": len(lengths), "mean": float(np.mean(lengths)), "median": float(middle), "p90": float(high), "max": max(lengths)}


def table(found: dict) -> str:
    """The report as people read it: a line a source, then the lengths."""
    names = [name for name in found["overall"] if name not in ("prompts", "pass@1_stderr")]
    rows = [("source", "prompts", *names)]
    for source, numbers in [*found["sources"].items(), *([("all", found["overall"])] if len(found["sources"]) > 1 else [])]:
        rows.append((source, str(numbers["prompts"]), *("-" if numbers[name] is None else f"{numbers[name]:.4f}" for name in names)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]) for row in rows]
    error = found["overall"]["pass@1_stderr"]
    spread = "" if error is None else f"; pass@1 ± {error:.4f} (standard error over prompts)"
    lines.append(f"n={found['n']} at temperature {found['temperature']:g}{spread}")
    for name, numbers in found["lengths"].items():
        if numbers["count"]:
            lines.append(
                f"{name}: {numbers['count']} answers, {numbers['mean']:.0f} tokens on average, median {numbers['median']:.0f}, "
                f"90 % below {numbers['p90']:.0f}, longest {numbers['max']}")
    if found["prompts_not_judged"]:
        lines.append(f"{found['prompts_not_judged']} prompts are left out: their reward failed")
    return "\n".join(lines)


def write_report(path: str, found: dict) -> None:
    """The report as JSON; the file appears whole."""
    target = epath.Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    new = target.parent / f"{target.name}.new"
    new.write_text(json.dumps(found, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    new.replace(target)
