"""All stages in one command: a small decoder made from nothing is pretrained, tuned on worked answers, judged by a reward model and reinforced.

Pretraining reads problems with their answers as plain text, where every token counts. SFT learns the answers alone. The reward model, made from the policy of
that moment, learns from pairs of a right and a wrong answer which one is better. RL then follows its scores (RLHF), from easy problems to hard ones: a curriculum
by the number of steps in a problem. That the answers get right, too, is measured beside the reward, which the reward model alone gives.

Launch:    python -m tlt_jax.train --config=configs/three_stages_tiny.py --workdir=runs/three_stages
Hardware:  2 CPU cores, 3 GB memory
Time:      under 15 minutes on 2 cores (docs/verification.md)
Result:    what each stage measured before and after, and its share of the time, are printed at the end; metrics.jsonl holds policy/heldout_loss (pretrain, sft),
           reward/model_heldout_accuracy (reward_model) and reward/heldout_accuracy (rl); the figures seen: docs/verification.md
"""

from ml_collections import ConfigDict

from configs import fragments
from tlt_jax.tasks.arithmetic import ALPHABET
from tlt_jax.training.settings import default_config


def get_config() -> ConfigDict:
    """A four-layer decoder of width 128: 200 updates on text, 200 on answers, 150 on pairs, then 30 GRPO steps of 32 prompts x 8 completions."""
    config = default_config()
    config.model.path = "scratch"
    config.model.scratch.alphabet = ALPHABET
    config.data.task = "arithmetic"
    config.data.max_prompt_tokens = 64
    config.data.arithmetic.update({"max_steps": 4, "tail_exponent": 1.0, "worked_share": 0.5})

    config.stages.order = ("pretrain", "sft", "reward_model", "rl")
    config.stages.pretrain.update({"steps": 250, "batch": 96, "lr": 4e-3})
    config.stages.sft.update({"steps": 200, "batch": 96, "lr": 2e-3, "held_out": 0.02})
    config.stages.reward_model.update({"steps": 150, "batch": 64, "lr": 1e-3})
    config.stages.rl.steps = 30
    config.reward.kind = "model"
    config.curriculum.update({"advance": "step", "stages": 3, "steps_per_stage": 8})

    config.batch.prompts_per_step = 32
    config.batch.tokens_per_microbatch = 8192
    config.algorithm.num_generations = 8
    config.rollout.max_new_tokens = 96
    config.rollout.slots = 64
    fragments.lookup_speculation(config)
    config.optimizer.update({"lr": 3e-4, "warmup_ratio": 0.05, "b2": 0.95})
    config.mesh.train.update({"data": 1, "fsdp": -1, "tensor": 1})

    config.checkpoint.every_steps = 50
    config.evaluation.update({"before": True, "every_steps": 10, "limit": 200, "temperature": 1.0})
    config.logging.every_steps = 5
    return config
