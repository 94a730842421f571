"""Which algorithm settings belong together, and what follows from them: whether there is a critic, a reference pass, a pass for old log-probs.

Pure Python over a config of settings.py: no jax, no files, no device.
"""

import math

from ml_collections import ConfigDict

from tlt_jax.training.settings import found

GROUPED = ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline")  # the other completions of the prompt are the baseline
WIDEST_GSPO_CLIP = 0.05  # a mean of log-ratios over a sequence hardly ever leaves it


def has_critic(config: ConfigDict) -> bool:
    """Whether a critic estimates values."""
    return config.algorithm.name in ("ppo", "gae")


def shares_trunk(config: ConfigDict) -> bool:
    """Whether the critic is a value head on the policy."""
    return has_critic(config) and config.algorithm.critic == "shared"


def whitens(config: ConfigDict) -> bool:
    """Whether the advantages of a step get mean 0 and deviation 1."""
    return config.algorithm.whiten_advantages or config.algorithm.name.startswith("reinforce_plus_plus")


def updates_per_step(config: ConfigDict) -> int:
    """Optimizer updates of one RL step."""
    sequences = config.batch.prompts_per_step * config.algorithm.num_generations
    return sequences // (config.batch.sequences_per_minibatch or sequences) * config.algorithm.num_iterations


def kl_in_reward(config: ConfigDict) -> bool:
    """Whether the KL to the reference model is taken from the reward."""
    return config.algorithm.beta > 0 and config.algorithm.kl_placement == "reward"


def needs_old_logprobs(config: ConfigDict) -> bool:
    """A separate pass for old log-probs is needed when the policy moves within a step, for importance weights, for KL in the reward, and for answers of earlier
    steps."""
    algorithm = config.algorithm
    return updates_per_step(config) > 1 or algorithm.importance_sampling_cap > 0 or kl_in_reward(config) or algorithm.dynamic_sampling


def algorithm_problems(config: ConfigDict) -> list[str]:
    """What contradicts what."""
    return _estimator_problems(config) + _critic_problems(config) + _loss_problems(config) + _kl_problems(config)


def _estimator_problems(config) -> list[str]:
    algorithm = config.algorithm
    name = algorithm.name
    return found(
        (
            name in GROUPED and algorithm.num_generations < 2,
            f"algorithm.num_generations=1 with algorithm.name={name}: a group of one has no advantage; set at least 2 (8 is usual) or algorithm.name=gae",
        ),
        (
            not algorithm.scale_rewards and name != "grpo",
            f"algorithm.scale_rewards=False is read by algorithm.name=grpo only; {name} {'never divides' if name == 'dr_grpo' else 'has a scale of its own'}",
        ),
        (
            algorithm.whiten_advantages and name.startswith("reinforce_plus_plus"),
            f"algorithm.whiten_advantages=True: algorithm.name={name} whitens by definition; leave it False",
        ),
        (
            algorithm.gamma != 1.0 and name in GROUPED,
            f"algorithm.gamma={algorithm.gamma} is not read by algorithm.name={name}: its advantages are of whole answers",
        ),
        (
            config.reward.whiten and name == "grpo" and algorithm.scale_rewards,
            "reward.whiten=True changes nothing under algorithm.name=grpo, which divides by the group's deviation: leave it False, or set "
            "algorithm.scale_rewards=False",
        ),
        (
            algorithm.dynamic_sampling and algorithm.num_generations < 2,
            "algorithm.dynamic_sampling=True looks for prompts whose completions have different rewards, and algorithm.num_generations=1 gives one: set at "
            "least 2",
        ),
        (
            algorithm.dynamic_sampling and config.drafter.features == "old_logprobs",
            "drafter.features=old_logprobs keeps those of one rollout, and algorithm.dynamic_sampling=True scores groups of several: set "
            "drafter.features=recompute",
        ),
        (
            config.drafter.quanta_per_step > 0 and config.drafter.features == "old_logprobs" and not needs_old_logprobs(config),
            "drafter.features=old_logprobs keeps those of the pass for old log-probs, which this run does not need (one update a step, no "
            "algorithm.importance_sampling_cap, no algorithm.beta with algorithm.kl_placement=reward): set drafter.features=recompute",
        ),
    )


def _critic_problems(config) -> list[str]:
    algorithm, shared = config.algorithm, shares_trunk(config)
    return found(
        (
            shared and algorithm.loss_agg_mode != "token-mean",
            f"algorithm.critic=shared sums policy and value loss, and the value loss is a token mean: set algorithm.loss_agg_mode=token-mean (not "
            f"{algorithm.loss_agg_mode}) or algorithm.critic=separate",
        ),
        (
            shared and algorithm.critic_warmup_steps > 0,
            "algorithm.critic_warmup_steps trains the critic alone, and algorithm.critic=shared has none of its own: set it to 0 or algorithm.critic=separate",
        ),
        (
            not has_critic(config) and algorithm.critic_warmup_steps > 0,
            f"algorithm.critic_warmup_steps needs algorithm.name=gae: {algorithm.name} has no critic",
        ),
    )


def _loss_problems(config) -> list[str]:
    algorithm = config.algorithm
    gspo, cispo = algorithm.policy_loss == "gspo", algorithm.policy_loss == "cispo"
    widest = max(algorithm.epsilon, algorithm.epsilon_high)
    return found(
        (algorithm.dual_clip != 0 and algorithm.dual_clip <= 1, f"algorithm.dual_clip={algorithm.dual_clip} must be above 1, or 0 for off"),
        (not math.isfinite(algorithm.entropy_coef), f"algorithm.entropy_coef={algorithm.entropy_coef} must be a finite number"),
        (
            gspo and algorithm.loss_agg_mode != "seq-mean-token-mean",
            f"algorithm.policy_loss=gspo is a mean over sequences: set algorithm.loss_agg_mode=seq-mean-token-mean (not {algorithm.loss_agg_mode})",
        ),
        (
            gspo and widest > WIDEST_GSPO_CLIP,
            f"algorithm.policy_loss=gspo: a clip of {widest} never binds the ratio of a whole sequence; its authors use algorithm.epsilon=0.0003 and "
            "algorithm.epsilon_high=0.0004 (--preset=gspo)",
        ),
        (cispo and algorithm.dual_clip != 0, "algorithm.dual_clip is not read by algorithm.policy_loss=cispo: no token's loss is bounded there; set it to 0"),
        (cispo and algorithm.cispo_cap <= 0, f"algorithm.cispo_cap={algorithm.cispo_cap} must be above 0 (5 is usual)"),
    )


def _kl_problems(config) -> list[str]:
    algorithm = config.algorithm
    return found(
        (
            algorithm.beta > 0 and algorithm.kl_kind == "k1" and algorithm.kl_placement == "loss",
            "algorithm.kl_kind=k1 has no gradient in the loss; set algorithm.kl_kind=k3 or algorithm.kl_placement=reward",
        ),
        (
            algorithm.kl_target > 0 and algorithm.beta == 0,
            f"algorithm.kl_target={algorithm.kl_target} steers algorithm.beta, which is 0, so there is no reference: set the beta to start from (0.1 is usual)",
        ),
    )
