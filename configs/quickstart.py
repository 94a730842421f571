"""The first run: a small decoder learns to add from worked answers, then GRPO makes it right; nothing is downloaded.

Launch:    launch/quickstart.sh
           (python -m tlt_jax.train --config=configs/quickstart.py --workdir=runs/quickstart)
Hardware:  2 CPU cores, 2 GB memory
Time:      meant for under 8 minutes on 2 cores; not measured here
Result:    held-out accuracy before and after the RL stage is printed and stands in metrics.jsonl (reward/heldout_accuracy)
"""

from ml_collections import ConfigDict

from tlt_jax.tasks.arithmetic import ALPHABET
from tlt_jax.training.settings import default_config


def get_config() -> ConfigDict:
    """A four-layer decoder of width 128, 300 supervised updates, then 60 GRPO steps of 16 prompts x 8 completions."""
    config = default_config()
    config.model.path = "scratch"
    config.model.scratch.alphabet = ALPHABET
    config.data.task = "arithmetic"
    config.data.max_prompt_tokens = 64
    config.data.arithmetic.update({"max_steps": 6, "tail_exponent": 0.7, "worked_share": 0.4})
    config.reward.kind = "task"

    config.stages.order = ("sft", "rl")
    config.stages.sft.update({"steps": 300, "batch": 64, "lr": 2e-3})
    config.stages.rl.steps = 60

    config.batch.prompts_per_step = 16
    config.batch.tokens_per_microbatch = 4096
    config.algorithm.num_generations = 8
    config.rollout.max_new_tokens = 96
    config.rollout.slots = 64
    config.optimizer.lr = 3e-4
    config.optimizer.warmup_ratio = 0.05
    config.mesh.train.update({"data": 1, "fsdp": -1, "tensor": 1})

    config.checkpoint.every_steps = 20
    config.evaluation.update({"before": True, "every_steps": 20, "limit": 200})
    return config
