"""Sections that several configs share. Each function changes a config in place; what a run is about stays in its own file."""

from ml_collections import ConfigDict

from tlt_jax.training.presets import apply_preset


def boxed_mathematics(config: ConfigDict) -> None:
    """Word problems with a final answer in a box, judged by math-verify."""
    config.data.instruction = "Let's think step by step and put the final answer in \\boxed{}."
    config.reward.kind = "math"
    config.reward.workers = 8


def grpo(config: ConfigDict, *, generations: int = 8) -> None:
    """The preset of that name: no reference model, clip .2/.28, token mean over the whole step."""
    apply_preset(config, "grpo")
    config.algorithm.num_generations = generations


def lookup_speculation(config: ConfigDict) -> None:
    """Drafts from the texts at hand, with no weights to train: used where few rows are left, and only while it is measured to pay."""
    config.speculative.method = "prompt_lookup"
    config.speculative.strategies = "7_1_7,3_1_3"
    config.speculative.selector = "beg"


def ppo(config: ConfigDict) -> None:
    """The preset of that name, with one completion a prompt: its own critic, lambda .95 for the policy and 1 for the critic, KL in the reward."""
    apply_preset(config, "ppo")
    config.algorithm.num_generations = 1


def qwen2_5_7b_on_gsm8k(config: ConfigDict) -> None:
    """Qwen2.5-7B-Instruct on GSM8K for one host of 8 accelerators with 80 GB or more each."""
    config.model.path = "Qwen/Qwen2.5-7B-Instruct"
    config.data.task = "gsm8k"
    config.data.path = "openai/gsm8k:main:train"
    config.data.eval_path = "openai/gsm8k:main:test"
    config.data.max_prompt_tokens = 512
    config.data.over_long = "drop"
    boxed_mathematics(config)
    config.rollout.max_new_tokens = 1024
    config.rollout.slots = 128
    config.batch.tokens_per_microbatch = 16384
    config.mesh.train.update({"data": 1, "fsdp": -1, "tensor": 1})
    config.optimizer.lr = 1e-6
    config.optimizer.warmup_ratio = 0.05
    config.checkpoint.every_steps = 20
    config.evaluation.update({"every_steps": 20, "limit": 500})
    config.stages.rl.steps = 200
