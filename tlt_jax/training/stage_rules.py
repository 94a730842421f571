"""Rules about the stages of a run, the reward model between them, and the curriculum. Pure Python."""

from tlt_jax.training.settings import Config, declared_keys, found, read_key

STAGES = ("pretrain", "sft", "reward_model", "rl")
_READ_BY = {"success": ("success_rate", "window"), "step": ("steps_per_stage",)}
_READ_BY_BOTH = ("stages", "review")


def stage_problems(config: Config) -> list[str]:
    """What contradicts what; [] where nothing does."""
    order, reward = config.stages.order, config.reward
    modelled, trained = reward.kind == "model", "reward_model" in order
    return found(
        (modelled and not trained and not reward.path, "reward.kind=model needs reward.path, or reward_model in stages.order"),
        (
            modelled and trained and bool(reward.path),
            f"reward.path={reward.path} and the stage reward_model are two reward models: leave one of them out",
        ),
        (modelled and "rl" not in order, "reward.kind=model is read by the stage rl, which stages.order does not hold"),
    ) + _curriculum_problems(config)


def _curriculum_problems(config: Config) -> list[str]:
    advance, keys = config.curriculum.advance, declared_keys()
    read = (*_READ_BY_BOTH, *_READ_BY[advance]) if advance != "off" else ()
    every = (*_READ_BY_BOTH, *(name for names in _READ_BY.values() for name in names))
    names = [f"curriculum.{name}" for name in every if name not in read]
    changed = [name for name in names if read_key(config, name) != keys[name].default]
    return found(
        (bool(changed), f"{', '.join(changed)}: not read by curriculum.advance={advance}"),
        (advance != "off" and "rl" not in config.stages.order, f"curriculum.advance={advance} is read by the stage rl, which stages.order does not hold"),
    )
