"""Qwen2.5-7B-Instruct on GSM8K with GRPO.

Launch:    python -m tlt_jax.train --config=configs/grpo_qwen2_5_7b.py --workdir=DIR
Hardware:  one host with 8 accelerators of 80 GB or more
Time:      not measured here
Result:    not measured here
"""

from ml_collections import ConfigDict

from configs import fragments
from tlt_jax.training.settings import default_config


def get_config() -> ConfigDict:
    """64 prompts x 8 completions a step, one update a step."""
    config = default_config()
    fragments.qwen2_5_7b_on_gsm8k(config)
    fragments.grpo(config)
    config.batch.prompts_per_step = 64
    return config
