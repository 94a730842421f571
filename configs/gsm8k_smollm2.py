"""Real weights and real data on a CPU: SmolLM2-135M-Instruct on GSM8K with GRPO, a few steps to see every part work.

Launch:    python -m tlt_jax.train --config=configs/gsm8k_smollm2.py --workdir=runs/gsm8k_smollm2
           with files that are on disk: --config.model.path=FILE.gguf --config.data.path=gsm8k_train.jsonl
Hardware:  any CPU with 8 GB memory; float32
Time:      4 minutes on 2 cores (docs/verification.md)
Result:    not measured here; three steps show the plumbing, not learning
"""

from ml_collections import ConfigDict

from configs import fragments
from tlt_jax.training.settings import default_config


def get_config() -> ConfigDict:
    """Three GRPO steps of 4 prompts x 4 completions of at most 128 tokens."""
    config = default_config()
    config.model.path = "HuggingFaceTB/SmolLM2-135M-Instruct"
    config.model.dtype = "float32"
    config.data.task = "gsm8k"
    config.data.path = "openai/gsm8k:main:train"
    config.data.max_prompt_tokens = 384
    config.data.over_long = "drop"
    fragments.boxed_mathematics(config)
    config.reward.workers = 2
    fragments.grpo(config, generations=4)

    config.batch.prompts_per_step = 4
    config.batch.tokens_per_microbatch = 2048
    config.rollout.max_new_tokens = 128
    config.rollout.slots = 16
    fragments.lookup_speculation(config)
    config.optimizer.lr = 5e-6

    config.checkpoint.every_steps = 0
    config.evaluation.update({"before": False, "limit": 20})
    config.stages.rl.steps = 3
    return config
