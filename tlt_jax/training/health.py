"""Says in plain English how a step went: one line of numbers, and one line of what is wrong, each with its cause and a remedy.

Pure functions over a step's metrics (plain numbers by name); a metric that is absent is not talked about. Nothing here writes or draws.
"""

import math
from collections.abc import Mapping, Sequence

Metrics = Mapping[str, float | int | str | None]

# Alarm levels. Mismatch: mean absolute difference of token log-probabilities, sampler against trainer (healthy float32 < 1e-3, bfloat16 < 2e-2).
_MISMATCH, _TRUNCATED, _KL, _EQUAL_GROUPS, _CLIPPED = 0.05, 0.3, 1.0, 0.8, 0.4
_ENTROPY_WINDOW, _ENTROPY_FALL, _WARMUP_STEPS = 10, 0.5, 2
_NUMBERS = (
    ("reward/mean", "reward {:.3f}", 1),
    ("reward/accuracy", "right {:.0f} %", 100),
    ("reward/heldout_accuracy", "held-out {:.1f} %", 100),
    ("policy/loss", "loss {:.4f}", 1),
    ("completions/length_mean", "length {:.0f}", 1),
    ("policy/entropy", "entropy {:.3f}", 1),
    ("policy/kl", "KL {:.4f}", 1),
    ("perf/tokens_per_second", "{:,.0f} tok/s", 1),
    ("timing/step_seconds", "{:.1f} s", 1),
)
_PARTS = (("timing/rollout_seconds", "rollout"), ("timing/reward_seconds", "reward"), ("timing/update_seconds", "update"))


def numbers_line(metrics: Metrics) -> str:
    """The few numbers that people watch, in a fixed order; the loss only where there is no reward (its value says nothing about RL progress)."""
    shown = [(name, text, scale) for name, text, scale in _NUMBERS if _known(metrics, name) and not (name == "policy/loss" and "reward/mean" in metrics)]
    words = [text.format(metrics[name] * scale) for name, text, scale in shown]
    parts = [f"{word} {metrics[name]:.1f}" for name, word in _PARTS if _known(metrics, name)]
    return "  ".join(words) + (f" ({', '.join(parts)})" if parts else "")


def health_line(metrics: Metrics, earlier: Sequence[Metrics] = ()) -> str:
    """One line: "healthy: …", or every named trouble of this step; `earlier` holds the metrics of the steps before, oldest first."""
    troubles = (
        [text for found, text in _troubles(metrics, warm=len(earlier) >= _WARMUP_STEPS) if found] + _entropy_trouble(metrics, earlier) + _not_finite(metrics)
    )
    if troubles:
        return "look: " + "; ".join(troubles)
    equal = metrics.get("reward/groups_equal_fraction")
    return "healthy" if equal is None else f"healthy: {100 * (1 - equal):.0f} % of the groups teach something"


def _troubles(metrics: Metrics, *, warm: bool) -> list[tuple[bool, str]]:
    value = {name: number for name, number in metrics.items() if _known(metrics, name)}
    read = value.get
    equal, side = read("reward/groups_equal_fraction", 0.0), _side(read("reward/groups_all_right_fraction"), read("reward/groups_all_wrong_fraction"))
    cut, mismatch, kl = read("completions/truncated_fraction", 0.0), read("sampler/logprob_difference_mean", 0.0), read("policy/kl", 0.0)
    errors, timeouts = read("reward/errors", 0), read("reward/timeouts", 0)
    skipped, compiles, clipped = read("policy/skipped_updates", 0), read("perf/compiles", 0), read("policy/clip_fraction", 0.0)
    return [
        (equal >= 1.0, f"all groups have equal rewards, no gradient this step{side}"),
        (_EQUAL_GROUPS <= equal < 1.0, f"{100 * equal:.0f} % of the groups have equal rewards{side}"),
        (cut > _TRUNCATED, f"{100 * cut:.0f} % of the completions were cut at the length limit (raise rollout.max_new_tokens)"),
        (mismatch > _MISMATCH, f"sampler and trainer disagree by {mismatch:.3f} in log-probability (use precision.rollout=float32, or an importance cap)"),
        (errors + timeouts > 0, f"{errors:.0f} reward errors and {timeouts:.0f} time-outs (see samples.jsonl and reward.on_error)"),
        (kl > _KL, f"KL to the reference is {kl:.2f} (lower optimizer.lr or raise algorithm.beta)"),
        (clipped > _CLIPPED, f"{100 * clipped:.0f} % of the tokens are clipped (lower optimizer.lr or algorithm.num_iterations)"),
        (read("drafter/faults", 0) > 0, f"{read('drafter/faults', 0):.0f} faults of the drafter's training (see the log)"),
        (skipped > 0, f"{skipped:.0f} updates skipped for non-finite gradients"),
        (compiles > 0 and warm, f"{compiles:.0f} programs compiled after the warm-up"),
    ]


def _side(right: float | None, wrong: float | None) -> str:
    if right is None or wrong is None:
        return ""
    return " (mostly all right: the prompts are too easy)" if right > wrong else " (mostly all wrong: the prompts are too hard, or the answers do not parse)"


def _entropy_trouble(metrics: Metrics, earlier: Sequence[Metrics]) -> list[str]:
    past = [step["policy/entropy"] for step in earlier[-_ENTROPY_WINDOW:] if _known(step, "policy/entropy")]
    if len(past) < _ENTROPY_WINDOW or not _known(metrics, "policy/entropy") or metrics["policy/entropy"] >= _ENTROPY_FALL * past[0]:
        return []
    return [
        f"entropy fell from {past[0]:.3f} to {metrics['policy/entropy']:.3f} in {_ENTROPY_WINDOW} steps (lower optimizer.lr or raise algorithm.entropy_coef)"
    ]


def _not_finite(metrics: Metrics) -> list[str]:
    names = [name for name, value in metrics.items() if isinstance(value, float) and not math.isfinite(value)]
    return [f"not a finite number: {', '.join(names)}"] if names else []


def _known(metrics: Metrics, name: str) -> bool:
    value = metrics.get(name)
    return isinstance(value, int | float) and math.isfinite(value)
