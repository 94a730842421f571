"""Held-out accuracy with the rollout engine, and the unbiased pass@k, avg@k and maj@k of samples.

pass@k = 1 − C(n − c, k) / C(n, k) (Chen et al. 2021): unbiased, unlike a bootstrap with replacement.
"""

import collections
import math

import numpy as np

from tlt_jax.training.reporting import Sample
from tlt_jax.training.reward_model import judged
from tlt_jax.training.scoring import Rollouts, response_text
from tlt_jax.training.session import Phase, Session


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Probability that at least one of k of the n samples, drawn without replacement, is right."""
    if not 1 <= k <= samples:
        raise ValueError(f"pass@k needs 1 <= k <= samples, got k={k} and {samples} samples")
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def majority_right(predictions: list[str | None], right: list[bool]) -> float:
    """1 when the most frequent parsed answer is right (ties: the one seen first); 0 when nothing was parsed."""
    votes = collections.Counter(prediction for prediction in predictions if prediction is not None)
    if not votes:
        return 0.0
    winner = votes.most_common(1)[0][0]
    return float(any(ok for prediction, ok in zip(predictions, right, strict=True) if prediction == winner))


def evaluate(session: Session, params, step: int) -> dict[str, float]:
    """Metrics reward/heldout_* on the held-out prompts; writes a few samples."""
    settings = session.config.evaluation
    prompts = list(session.held_out.prompts())[: settings.limit or None]
    phase = Phase("evaluation", settings.num_generations, settings.temperature, step)
    scorer = session.generate(session.publish(params), prompts, phase)
    rollouts = judged(session.reward_model, scorer.finish())
    session.reporter.record_samples(step, samples_of(session, rollouts, None), kind="evaluation", limit=settings.samples)
    return heldout_metrics(rollouts, settings.num_generations)


def heldout_metrics(rollouts: Rollouts, n: int) -> dict[str, float]:
    """Accuracy (a reward of 1 is right), pass@k for powers of two up to n, maj@n, and response lengths of right and wrong answers."""
    rewards = np.array([score.score or 0.0 for score in rollouts.scores])
    right = np.array([(score.judged or 0.0) >= 1.0 for score in rollouts.scores]).reshape(-1, n)
    lengths = np.array([len(completion.token_ids) for completion in rollouts.completions])
    metrics = {
        "reward/heldout_accuracy": float(right.mean()), "reward/heldout_mean": float(rewards.mean()),
        "completions/heldout_length_mean": float(lengths.mean())}
    for k in [1 << power for power in range(1, n.bit_length()) if 1 << power <= n]:
        metrics[f"reward/heldout_pass_at_{k}"] = float(np.mean([pass_at_k(n, int(row.sum()), k) for row in right]))
    if n > 1:
        predictions = np.array([score.pred for score in rollouts.scores], dtype=object).reshape(-1, n)
        metrics[f"reward/heldout_maj_at_{n}"] = float(np.mean([majority_right(list(p), list(r)) for p, r in zip(predictions, right, strict=True)]))
    for name, chosen in (("right", right.reshape(-1)), ("wrong", ~right.reshape(-1))):
        if chosen.any():
            metrics[f"completions/heldout_length_{name}"] = float(lengths[chosen].mean())
    return metrics


def samples_of(session: Session, rollouts: Rollouts, advantages) -> list[Sample]:
    """Every completion as people read it."""
    samples = []
    for index, (completion, score) in enumerate(zip(rollouts.completions, rollouts.scores, strict=True)):
        prompt = rollouts.prompts[index // rollouts.generations]
        samples.append(Sample(
            prompt=prompt.text, response=response_text(session.model.tokenizer, completion), answer=prompt.answer, parsed=score.pred, reward=score.score,
            components=score.components, advantage=None if advantages is None else float(advantages[index]), length=len(completion.token_ids),
            finish_reason=completion.finish_reason, policy_version=completion.policy_version, id=f"{prompt.key:016x}/{completion.request.sample}"))
    return samples
