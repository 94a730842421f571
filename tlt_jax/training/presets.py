"""Named algorithms as people know them: dictionaries of settings, put over a config by name. Formulas: docs/algorithms.md."""

import difflib
from collections.abc import Mapping

from ml_collections import ConfigDict

from tlt_jax.training.settings import SettingsError

_CLASSIC_CLIP = {"algorithm.policy_loss": "clip", "algorithm.epsilon": 0.2, "algorithm.epsilon_high": 0.2}
_CLIP_HIGHER = _CLASSIC_CLIP | {"algorithm.epsilon_high": 0.28}
_NO_KL = {"algorithm.beta": 0.0}

PRESETS: Mapping[str, Mapping[str, object]] = {
    "grpo": {"algorithm.name": "grpo", "algorithm.scale_rewards": True, "algorithm.loss_agg_mode": "token-mean"} | _CLIP_HIGHER | _NO_KL,
    "dr_grpo": {"algorithm.name": "dr_grpo", "algorithm.loss_agg_mode": "constant"} | _CLASSIC_CLIP | _NO_KL,
    "rloo": {"algorithm.name": "rloo", "algorithm.loss_agg_mode": "token-mean"} | _CLASSIC_CLIP | _NO_KL,
    "reinforce_plus_plus": {
        "algorithm.name": "reinforce_plus_plus", "algorithm.loss_agg_mode": "token-mean", "algorithm.beta": 0.001, "algorithm.kl_kind": "k1",
        "algorithm.kl_placement": "reward"} | _CLASSIC_CLIP,
    "gspo": {
        "algorithm.name": "grpo", "algorithm.policy_loss": "gspo", "algorithm.epsilon": 3e-4, "algorithm.epsilon_high": 4e-4,
        "algorithm.loss_agg_mode": "seq-mean-token-mean"} | _NO_KL,
    "cispo": {"algorithm.name": "grpo", "algorithm.policy_loss": "cispo", "algorithm.cispo_cap": 5.0, "algorithm.loss_agg_mode": "token-mean"} | _NO_KL,
    "dapo": {
        "algorithm.name": "grpo", "algorithm.loss_agg_mode": "token-mean", "algorithm.dynamic_sampling": True,
        "reward.overlong_share": 0.2} | _CLIP_HIGHER | _NO_KL,
    "ppo": {
        "algorithm.name": "gae", "algorithm.critic": "separate", "algorithm.critic_warmup_steps": 10, "algorithm.whiten_advantages": True,
        "algorithm.loss_agg_mode": "token-mean", "algorithm.beta": 0.001, "algorithm.kl_kind": "k1", "algorithm.kl_placement": "reward"} | _CLASSIC_CLIP,
}


def apply_preset(config: ConfigDict, name: str) -> None:
    """Puts the settings of a preset over those of the config, in place. Raises SettingsError for a name that is none."""
    if name not in PRESETS:
        nearest = difflib.get_close_matches(name, PRESETS, n=1, cutoff=0.0)
        raise SettingsError([f"--preset={name}: there is no such preset; the nearest is {nearest[0]}, all are {', '.join(PRESETS)}"])
    for key, value in PRESETS[name].items():
        *groups, last = key.split(".")
        group = config
        for part in groups:
            group = group[part]
        group[last] = value
