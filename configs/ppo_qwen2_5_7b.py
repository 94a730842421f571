"""Qwen2.5-7B-Instruct on GSM8K with PPO and a separate critic of the same size.

Launch:    python -m tlt_jax.train --config=configs/ppo_qwen2_5_7b.py --workdir=DIR
Hardware:  one host with 8 accelerators of 80 GB or more
Time:      not measured here
Result:    not measured here
"""

from ml_collections import ConfigDict

from configs import fragments
from tlt_jax.training.settings import default_config


def get_config() -> ConfigDict:
    """512 prompts x 1 completion a step in 4 minibatches of 128; the first 10 steps train only the critic."""
    config = default_config()
    fragments.qwen2_5_7b_on_gsm8k(config)
    fragments.ppo(config)
    config.batch.prompts_per_step = 512
    config.batch.sequences_per_minibatch = 128
    config.optimizer.critic_lr = 1e-5
    return config
