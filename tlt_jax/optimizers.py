"""optax chains and learning-rate schedules from plain settings."""

import dataclasses

import jax
import optax


@dataclasses.dataclass(frozen=True)
class OptimizerSettings:
    """AdamW behind a global-norm clip; `warmup` and `total` count optimizer updates."""

    lr: float
    schedule: str = "constant"  # after the warm-up: constant, linear (to 0) or cosine (to 0)
    warmup: int = 0
    total: int = 1
    weight_decay: float = 0.0
    b1: float = 0.9
    b2: float = 0.999
    grad_clip: float = 1.0  # 0 = off


def learning_rate(settings: OptimizerSettings) -> optax.Schedule:
    """Learning rate of update n (from 0): linear warm-up from lr / warmup, then the chosen decay."""
    rest = max(settings.total - settings.warmup, 1)
    after = {
        "constant": optax.constant_schedule(settings.lr),
        "linear": optax.linear_schedule(settings.lr, 0.0, rest),
        "cosine": optax.cosine_decay_schedule(settings.lr, rest),
    }[settings.schedule]
    if settings.warmup == 0:
        return after
    warm = optax.linear_schedule(settings.lr / settings.warmup, settings.lr, max(settings.warmup - 1, 1))
    return optax.join_schedules([warm, after], [settings.warmup])


def make_optimizer(settings: OptimizerSettings) -> optax.GradientTransformation:
    """The chain; weight decay leaves norms and biases alone."""

    def decays(params):
        return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key == "kernel" or path[-1].key == "embedding", params)

    steps = [optax.clip_by_global_norm(settings.grad_clip)] if settings.grad_clip else []
    adamw = optax.adamw(learning_rate(settings), b1=settings.b1, b2=settings.b2, weight_decay=settings.weight_decay, mask=decays)
    return optax.chain(*steps, adamw)
