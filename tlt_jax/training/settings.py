"""Declares every config key once, with its default and its meaning, and builds the locked ConfigDict from them.

A declaration is `name: (default, meaning)` or `name: (default, meaning, allowed)`. The type of the default is the type of the key; `allowed` is the choices
of a text or the (lowest, highest) value of a number. "" and 0 stand for "not set" where the meaning says so.
The groups stages, curriculum and evaluation are in settings_stages.py, cross-field rules in settings_rules.py and the command line in
command_line.py; nothing here reads a file or knows a device.
"""

import dataclasses
from math import inf

from ml_collections import ConfigDict

from tlt_jax.training import settings_stages
from tlt_jax.training.settings_stages import BELOW_1, FROM_0, FROM_1, SHARE

ALPHABET = "0123456789+-*/=<>()?:;,.#'\n abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
FLOAT, AUTO_OR_FLOAT = ("float32", "bfloat16"), ("auto", "float32", "bfloat16")


Config = ConfigDict  # the checked config as the rest of `training/` sees it: read, never changed


class SettingsError(ValueError):
    """A config that cannot be run; the message holds every problem found, one a line."""

    def __init__(self, problems: list[str]):
        super().__init__("\n".join(problems))
        self.problems = problems


def found(*checks: tuple[bool, str]) -> list[str]:
    """The messages of the checks that are true."""
    return [message for wrong, message in checks if wrong]


@dataclasses.dataclass(frozen=True)
class Key:
    """One declared key: its default value (whose type it keeps), what it means, and the choices or the (lowest, highest) it accepts."""

    default: bool | int | float | str | tuple
    meaning: str
    allowed: tuple = ()


def default_config() -> ConfigDict:
    """The complete config with every default, locked: unknown names and other types are refused on assignment."""
    return ConfigDict(_defaults(_declarations())).lock()


def declared_keys() -> dict[str, Key]:
    """Every key by its dotted name, in the order of declaration."""
    return dict(_flatten(_declarations(), ""))


def read_key(config: ConfigDict, name: str):
    """The value at a dotted name."""
    value = config
    for part in name.split("."):
        value = value[part]
    return value


def _defaults(declared: dict) -> dict:
    return {name: _defaults(entry) if isinstance(entry, dict) else entry[0] for name, entry in declared.items()}


def _flatten(declared: dict, prefix: str):
    for name, entry in declared.items():
        if isinstance(entry, dict):
            yield from _flatten(entry, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", Key(*entry)


def _declarations() -> dict:
    return {
        "seed": (0, "seed of everything random: weights, prompt order, sampling noise", (0, 2**32 - 1)),
        "compile_cache": (
            "auto", "directory of compiled programs, kept between runs: auto = in ~/.cache/tlt_jax, '' = none; JAX_COMPILATION_CACHE_DIR goes first"),
        "watchdog_minutes": (
            30.0, "several processes: one that has not got on for so long ends with exit code 75, so that the job can be started again; 0 = never", FROM_0),
        "model": _model(),
        "data": _data(),
        "reward": _reward(),
        "algorithm": _algorithm(),
        "batch": _batch(),
        "rollout": _rollout(),
        "speculative": _speculative(),
        "drafter": _drafter(),
        "scheduler": _scheduler(),
        "distill": _distill(),
        "mesh": _mesh(),
        "optimizer": _optimizer(),
        "precision": _precision(),
        "checkpoint": _checkpoint(),
        "logging": _logging(),
        "profiler": _profiler(),
        "evaluation": settings_stages.evaluation(),
        "curriculum": settings_stages.curriculum(),
        "stages": settings_stages.stages(),
    }


def _model() -> dict:
    return {
        "path": ("scratch", "Hugging Face directory, .gguf file, Orbax workdir or hub id; scratch = a new decoder of model.scratch"),
        "dtype": ("auto", "meaning of 'auto' in precision.*: auto (float32 on CPU, bfloat16 elsewhere), float32 or bfloat16", AUTO_OR_FLOAT),
        "chat_template": ("", "Jinja file that replaces the model's chat template; '' = the model's own"),
        "scratch": {
            "hidden_size": (128, "width of the residual stream", FROM_1),
            "layers": (4, "decoder layers", FROM_1),
            "heads": (4, "query heads", FROM_1),
            "kv_heads": (2, "key and value heads; divides heads", FROM_1),
            "head_dim": (32, "channels of one head; even", (2, inf)),
            "mlp": (384, "hidden width of the MLP", FROM_1),
            "alphabet": (ALPHABET, "characters of the character tokenizer"),
        },
    }


def _data() -> dict:
    return {
        "task": (
            "arithmetic",
            "arithmetic or reasoning_gym (both generated), gsm8k, or prompts (your own file)",
            ("arithmetic", "gsm8k", "reasoning_gym", "prompts"),
        ),
        "path": ("", "JSONL or parquet file, or hub dataset id, for gsm8k and prompts"),
        "eval_path": ("", "held-out rows in the same form; '' = no held-out rows for file tasks"),
        "columns": {
            "prompt": ("", "column of the prompt; '' = found by the known names"),
            "answer": ("", "column of the reference answer; '' = found by the known names"),
            "id": ("", "column of a stable row id; '' = id when there is one, else the row number"),
            "source": ("", "column of the data source name; '' = found by the known names"),
        },
        "max_prompt_tokens": (512, "longest prompt, counted in tokens with chat template and generation prompt", FROM_1),
        "over_long": ("error", "prompts above that: error, drop (counted) or truncate_left", ("error", "drop", "truncate_left")),
        "system_prompt": ("", "system message put before every prompt; '' = none"),
        "instruction": ("", "line added after every question, or a text with {question} in it; '' = none"),
        "shuffle": (True, "new order of the prompts in every epoch, from the seed"),
        "arithmetic": {
            "max_steps": (6, "most operations in one problem", FROM_1),
            "start_max": (9, "the first number is at most this; small = few different short problems, which a model may learn by heart", (1, 99)),
            "tail_exponent": (1.5, "number of steps n is drawn with weight n ** -tail_exponent: smaller = longer tail", FROM_0),
            "worked_share": (1.0, "share of the demonstrations (stage sft) that show the steps; the others give the bare answer", SHARE),
            "train_size": (20000, "training problems", FROM_1),
            "eval_size": (200, "held-out problems, none of them among the training problems", FROM_1),
        },
        "reasoning_gym": {
            "name": ("", "data set name in reasoning-gym"),
            "size": (1000, "problems to generate", FROM_1),
            "kwargs": ("{}", "more arguments of that data set, as a JSON object"),
        },
    }


def _reward() -> dict:
    return {
        "kind": (
            "task",
            "task (the task's own verdict), math (math-verify), exact (equal text), user (your function), composite (a weighted sum) or model (a reward model)",
            ("task", "math", "exact", "user", "composite", "model"),
        ),
        "components": (
            (), "composite: KIND=WEIGHT of each part, the first one says what is right: task, math, exact, speed, diversity, format:NAME or FILE.py:FUNCTION"),
        "path": (
            "", "user: Python file of your reward function; model: Hugging Face sequence-classification directory or workdir of a run with the stage "
            "reward_model, '' = the one of this run"),
        "function": ("score", "name of the function in that file"),
        "scope": (
            "prompt", "what a function with plural names sees at once: the answers of one prompt, or of the whole step (scored after the last one)",
            ("prompt", "step")),
        "workers": (2, "scoring processes", FROM_1),
        "timeout_seconds": (10.0, "time limit of one score"),
        "on_error": ("exclude", "a crash or time-out of the reward: exclude (out of the group, advantage 0), zero or raise", ("exclude", "zero", "raise")),
        "whiten": (False, "give the rewards of a step mean 0 and deviation 1"),
        "overlong_share": (0.0, "last share of rollout.max_new_tokens in which the penalty of long answers rises from 0 to the whole one; 0 = none", SHARE),
        "overlong_penalty": (1.0, "that penalty of an answer that reaches the limit, in units of the reward", FROM_0),
    }


def _algorithm() -> dict:
    return {
        "name": (
            "grpo",
            "advantage estimator: grpo, dr_grpo, rloo, reinforce_plus_plus_baseline (the prompt's other completions are the baseline), "
            "reinforce_plus_plus (none), or gae, also called ppo (a critic)",
            ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae", "ppo"),
        ),
        "policy_loss": (
            "clip",
            "clip (PPO), gspo (the ratio of the whole sequence is clipped) or cispo (the ratio is a weight that is cut, so every token keeps its gradient)",
            ("clip", "gspo", "cispo"),
        ),
        "cispo_cap": (5.0, "cispo: cap on that weight", FROM_0),
        "num_generations": (8, "completions of one prompt in a step (G)", FROM_1),
        "num_iterations": (1, "passes over one step's sequences", FROM_1),
        "beta": (0.0, "weight of the KL to the reference model; 0 = no reference model is kept", FROM_0),
        "kl_kind": ("k3", "estimator of that KL: k1 (kl_placement=reward only), k2 or k3", ("k1", "k2", "k3")),
        "kl_placement": ("loss", "where the KL goes: loss or reward", ("loss", "reward")),
        "kl_target": (0.0, "KL of a token that beta is steered to after every step, from the configured one on; 0 = beta stays", FROM_0),
        "kl_horizon": (10000, "sequences over which beta may change by a fifth (kl_target)", FROM_1),
        "epsilon": (0.2, "the ratio is clipped below 1 - epsilon", SHARE),
        "epsilon_high": (0.28, "the ratio is clipped above 1 + epsilon_high", FROM_0),
        "dual_clip": (0.0, "bound c > 1 on the loss of negative advantages (usually 3); 0 = off"),
        "loss_agg_mode": (
            "token-mean",
            "how token losses become one; -norm divides by sequences x max_new_tokens",
            ("token-mean", "seq-mean-token-mean", "constant"),
        ),
        "scale_rewards": (True, "grpo: divide group advantages by the group's standard deviation"),
        "whiten_advantages": (False, "give the advantages of a step mean 0 and deviation 1 over its tokens; reinforce_plus_plus always does"),
        "gamma": (1.0, "gae and reinforce_plus_plus: discount", SHARE),
        "gae_lambda": (0.95, "gae: lambda of the policy's advantages", SHARE),
        "value_lambda": (1.0, "gae: lambda of the critic's returns", SHARE),
        "value_clip": (0.2, "gae: a value moves at most this far from its old one in the loss; 0 = off", FROM_0),
        "value_coef": (0.5, "gae: weight of the value loss when the critic shares the policy's trunk", FROM_0),
        "critic": ("separate", "gae: separate (own weights, own optimizer) or shared (a value head on the policy)", ("separate", "shared")),
        "critic_warmup_steps": (0, "gae: first RL steps that train only the critic", FROM_0),
        "dynamic_sampling": (False, "draw further prompts in a step until prompts_per_step groups have different rewards; surplus ones wait for the next step"),
        "max_draws": (4, "dynamic_sampling: times that prompts are drawn in a step; then it trains on the groups that there are", FROM_1),
        "entropy_coef": (0.0, "weight of the entropy bonus"),
        "importance_sampling_cap": (0.0, "cap on the trainer / rollout probability ratio of a token (usually 2); 0 = no such weight", FROM_0),
    }


def _batch() -> dict:
    return {
        "prompts_per_step": (32, "prompts drawn for one RL step", FROM_1),
        "sequences_per_minibatch": (0, "sequences of one optimizer update; 0 = the whole step", FROM_0),
        "tokens_per_microbatch": (8192, "most tokens (prompt + completion, packed) in one forward and backward pass; no result depends on it", FROM_1),
    }


def _rollout() -> dict:
    return {
        "temperature": (1.0, "sampling temperature; 0 = argmax", FROM_0),
        "top_k": (0, "sample among the k best tokens; 0 = off", FROM_0),
        "top_p": (1.0, "sample among the smallest set with this probability; 1 = off", SHARE),
        "min_p": (0.0, "sample among tokens with at least this share of the best one's probability; 0 = off", SHARE),
        "allow_truncation": (False, "let train run with top_k, top_p or min_p on"),
        "max_new_tokens": (512, "longest completion, stop token included", FROM_1),
        "num_generations": (1, "completions of one prompt in the generate command (train reads algorithm.num_generations)", FROM_1),
        "slots": (64, "rows decoded at once on one slice", FROM_1),
        "rounds_per_dispatch": (16, "decoding rounds in one device call", FROM_1),
        "prefill_tokens": (0, "prompt tokens in one forward; 0 = 192 on a CPU, 1024 elsewhere", FROM_0),
        "max_programs": (24, "decode programs that a slice compiles, over numbers of rows and strategies; plain decoding is never left out", FROM_1),
        "consolidate_tail": (
            False, "train, slices lent to the drafter's training: move the last rows to fewer slices where measured rounds say that none gets slower"),
        "memory_fraction": (0.6, "share of the free device memory that the KV cache may take", (0.01, 1.0)),
    }


def _speculative() -> dict:
    return {
        "method": ("off", "what drafts: off, eagle, eagle3, prompt_lookup or truncated", ("off", "eagle", "eagle3", "prompt_lookup", "truncated")),
        "strategies": ("2_4_7,2_2_3", "draft trees as depth_branching_budget, comma-separated; branching 1 is a chain, the budget counts no root"),
        "selector": (
            "fixed",
            "which one is used: fixed (the first), beg (a bandit on tokens per second, plain decoding included) or ucb1",
            ("fixed", "beg", "ucb1"),
        ),
        "max_rows": (32, "speculation is considered when a slice decodes at most this many rows", FROM_1),
        "patience": (1, "dispatches in a row with so few rows before it starts", FROM_1),
        "explore_fraction": (0.02, "beg: share of the rollout's time that may be lost on strategies other than the best", (1e-6, 1.0)),
    }


def _drafter() -> dict:
    return {
        "path": ("", "EAGLE or EAGLE-3 directory; '' = made from the policy's last layer"),
        "draft_vocab_size": (0, "tokens a new eagle or eagle3 drafter can propose, the lowest ids; 0 = all", FROM_0),
        "capture_layers": ((), "new eagle3 drafter: rising numbers of the policy's layers (from 0) whose inputs it reads; none = 2, L // 2 and L - 3"),
        "truncated_layers": (0, "method truncated: first layers of the policy that draft; 0 = a quarter of them", FROM_0),
        "lookup_length": (4, "method prompt_lookup: longest suffix that is looked up", FROM_1),
        "lookup_history": (2, "method prompt_lookup: answers of earlier steps that are kept of each prompt", FROM_0),
        "quanta_per_step": (
            0, "updates of an eagle or eagle3 drafter that come due with each RL step (see distill.*); idle slices may train more; 0 = it does not learn",
            FROM_0),
        "train_when": (
            "always", "idle: only on slices that the rollout leaves idle; always: after the update, too, until what is due is trained", ("idle", "always")),
        "sync_every": (5, "quanta of a lent slice between two mergers with the others", FROM_1),
        "aggregation": (
            "residual", "how slices are merged: residual (a share of each slice's change stays there where the merged drafter is worse) or average",
            ("residual", "average")),
        # recompute costs a forward of the policy in every update, and its features are always the newest. rollout costs none, but copies features to the host
        # with every dispatch: better for a large policy, or where each answer is read in several updates. So is old_logprobs, which copies them once and is
        # a step behind, where the algorithm has that pass anyway.
        "features": (
            "recompute",
            "where the policy's features come from: recompute (made in each update), rollout (kept from the decoding) or old_logprobs (kept from that pass)",
            ("recompute", "rollout", "old_logprobs")),
        "buffer_bytes": (2**28, "bytes of answers kept on the host to learn from, with the features and heads of rollout and old_logprobs", FROM_1),
        "long_share": (0.5, "share of those bytes, and of what a quantum reads, that belongs to the longer half of the answers", BELOW_1),
        "alarm_after": (20, "steps in a row without any training after which that is reported as an error", FROM_1),
        "freeze": (False, "measure the drafter in each RL step and do not train it: the control of quanta_per_step"),
        "catchup_window": (512, "positions of features kept of each row, from which a drafter that is switched on late starts", FROM_1),
    }


def _scheduler() -> dict:
    return {
        "idle_utilization": (0.3, "a slice counts as idle while it may still get rows when it had work for less than this share of idle_seconds", SHARE),
        "idle_seconds": (0.5, "that long; a slice that can get no more rows in the phase is lent at once", FROM_0),
        "warmup_steps": (0, "first RL steps in which no slice is lent", FROM_0),
    }


def _distill() -> dict:
    return {
        "prompts": (512, "prompts of the task that the policy answers for the drafter to learn from; 0 = all", FROM_0),
        "num_generations": (1, "answers to each of them", FROM_1),
        "epochs": (4, "passes over the answers", FROM_1),
        "minutes": (0.0, "stop the training (not the answering before it) after this long; 0 = after the epochs", FROM_0),
        "lr": (1e-3, "peak learning rate (AdamW); 5 % warm-up, cosine decay", FROM_0),
        "tokens_per_update": (2048, "most tokens (prompt + answer, packed) of one update", FROM_1),
        "unroll": (3, "draft levels that are trained (training-time test)", FROM_1),
        "decay": (0.8, "weight of each further level", SHARE),
        "feature_weight": (0.0, "eagle: weight of SmoothL1 to the next feature beside the cross-entropy of weight 1", FROM_0),
        "held_out": (0.05, "share of the answers that is only measured on", (0.001, 0.5)),
    }


def _mesh() -> dict:
    return {
        "train": {
            "data": (1, "train mesh: replicas of the batch; one axis may be -1 = the devices that are left"),
            "fsdp": (-1, "train mesh: shards of parameters and batch"),
            "tensor": (1, "train mesh: shards of heads, MLP and vocabulary"),
        },
        "rollout_slices": (0, "independent rollout slices; 0 = as many as devices / rollout_tensor", FROM_0),
        "rollout_tensor": (1, "devices that share the weights of one slice's replica", FROM_1),
    }


def _optimizer() -> dict:
    return {
        "lr": (1e-6, "peak learning rate of the policy (AdamW)", FROM_0),
        "critic_lr": (1e-5, "peak learning rate of a separate critic", FROM_0),
        "schedule": ("constant", "after the warm-up: constant, linear (to 0) or cosine (to 0)", ("constant", "linear", "cosine")),
        "warmup_ratio": (0.0, "share of the updates that warm the learning rate up from 0", SHARE),
        "weight_decay": (0.0, "AdamW weight decay", FROM_0),
        "b1": (0.9, "AdamW first moment", BELOW_1),
        "b2": (0.999, "AdamW second moment", BELOW_1),
        "grad_clip": (1.0, "largest global gradient norm; 0 = off", FROM_0),
        "max_skips": (5, "updates skipped in a row for non-finite gradients that stop the run", FROM_1),
    }


def _precision() -> dict:
    return {
        "params": ("float32", "trained weights and optimizer state: float32 or bfloat16", FLOAT),
        "compute": ("auto", "activations of the training passes: auto (see model.dtype), float32 or bfloat16", AUTO_OR_FLOAT),
        "remat": (False, "recompute each layer in the backward pass: far less memory for about a third more time"),
        "rollout": ("auto", "weights and KV cache of the rollout: auto (see model.dtype), float32 or bfloat16", AUTO_OR_FLOAT),
    }


def _checkpoint() -> dict:
    return {
        "every_steps": (20, "RL steps between checkpoints; 0 = only at the end", FROM_0),
        "keep": (2, "latest checkpoints kept, besides the best", FROM_1),
        "resume": ("auto", "auto (newest valid step, else start), never, or the number of the step"),
        "async_save": (True, "write checkpoints while training goes on"),
    }


def _logging() -> dict:
    return {
        "every_steps": (1, "steps between console lines; metrics.jsonl gets every step", FROM_1),
        "samples_per_step": (8, "completions of a step written to samples.jsonl", FROM_0),
        "timeline_every_steps": (10, "RL steps between pictures of what each slice did, timeline.png; 0 = none; timeline.json.gz gets every step", FROM_0),
        "tensorboard": (True, "write TensorBoard events"),
        "wandb": (False, "send metrics to Weights & Biases (needs pip install wandb)"),
    }


def _profiler() -> dict:
    return {
        "start_step": (2, "first RL step of the JAX profile", FROM_1),
        "steps": (0, "RL steps profiled into WORKDIR/profile; 0 = off", FROM_0),
    }
