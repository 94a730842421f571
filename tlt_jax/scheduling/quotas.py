"""Updates that are owed to the drafter: so many come due with each RL step, idle slices repay them, and what is left may be repaid after the rollout. Pure."""

from typing import NamedTuple

STEPS_KEPT = 4  # a drafter that got no time for longer is not owed more: older texts would teach it an older policy


class Quota(NamedTuple):
    """Quanta that come due with each step, and what is owed now."""

    per_step: int
    owed: int = 0


def come_due(quota: Quota) -> Quota:
    """A step begins."""
    return quota._replace(owed=min(quota.owed + quota.per_step, STEPS_KEPT * quota.per_step))


def repaid(quota: Quota, quanta: int) -> Quota:
    """`quanta` were trained; more than was owed is no credit for later steps."""
    return quota._replace(owed=max(quota.owed - quanta, 0))


def left_for_the_end(quota: Quota, train_when: str) -> int:
    """Quanta to train when the rollout is over and everything waits: what is owed when `train_when` is always, none when it is idle."""
    return quota.owed if train_when == "always" else 0
