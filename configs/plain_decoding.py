"""The baseline of every speed comparison: configs/grpo_qwen2_5_7b.py with plain decoding, whatever that file turns on.

Launch:    python -m tlt_jax.train --config=configs/plain_decoding.py --workdir=DIR
Hardware:  one host with 8 accelerators of 80 GB or more
Time:      not measured here
Result:    the same tokens as with speculation, by design; not measured here
"""

from ml_collections import ConfigDict

from configs import grpo_qwen2_5_7b


def get_config() -> ConfigDict:
    """GRPO on Qwen2.5-7B with speculation off."""
    config = grpo_qwen2_5_7b.get_config()
    config.speculative.method = "off"
    return config
