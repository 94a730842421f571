"""The first run: a small decoder learns to add from worked answers, then GRPO makes it right; nothing is downloaded.

Half of the demonstrations show their steps and half give the bare answer, so after the supervised stage the model reasons in one answer of two.
GRPO finds out that reasoning pays: accuracy and length rise within some ten steps, then the steps themselves get better.

Launch:    launch/quickstart.sh
           (python -m tlt_jax.train --config=configs/quickstart.py --workdir=runs/quickstart)
Hardware:  2 CPU cores, 2 GB memory
Time:      3.5 minutes on 2 cores (docs/verification.md)
Result:    held-out accuracy (answers sampled at temperature 1, none of the problems seen in training) is printed before and after the RL stage and
           stands in metrics.jsonl (reward/heldout_accuracy); the figures seen: docs/verification.md
"""

from ml_collections import ConfigDict

from configs import fragments
from tlt_jax.tasks.arithmetic import ALPHABET
from tlt_jax.training.settings import default_config


def get_config() -> ConfigDict:
    """A four-layer decoder of width 128, 450 supervised updates, then 40 GRPO steps of 32 prompts x 8 completions."""
    config = default_config()
    config.model.path = "scratch"
    config.model.scratch.alphabet = ALPHABET
    config.data.task = "arithmetic"
    config.data.max_prompt_tokens = 64
    config.data.arithmetic.update({"max_steps": 4, "tail_exponent": 1.0, "worked_share": 0.5})
    config.reward.kind = "task"

    config.stages.order = ("sft", "rl")
    config.stages.sft.update({"steps": 450, "batch": 96, "lr": 4e-3})
    config.stages.rl.steps = 40

    config.batch.prompts_per_step = 32
    config.batch.tokens_per_microbatch = 8192
    config.algorithm.num_generations = 8
    config.rollout.max_new_tokens = 96
    config.rollout.slots = 64
    fragments.lookup_speculation(config)
    config.optimizer.update({"lr": 3e-4, "warmup_ratio": 0.05, "b2": 0.95})
    config.mesh.train.update({"data": 1, "fsdp": -1, "tensor": 1})

    config.checkpoint.every_steps = 20
    config.evaluation.update({"before": True, "every_steps": 10, "limit": 200, "temperature": 1.0})
    config.logging.every_steps = 5
    return config
