"""A reward model in RL: a frozen network on the train mesh that scores whole answers, beside the verdict that says whether they are right."""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax

from tlt_jax.models import decoder
from tlt_jax.models.specs import PolicySpec
from tlt_jax.objectives import preference
from tlt_jax.objectives.policy_update import Pass
from tlt_jax.rewards.items import Scored
from tlt_jax.runtime import policy_driver
from tlt_jax.runtime.programs import score_program
from tlt_jax.sharding.rules import batch_rows_multiple, param_shardings
from tlt_jax.strategies import Completion
from tlt_jax.training import build
from tlt_jax.training.experience import Packing, of_completion, pack, packing_for, unpack
from tlt_jax.training.scoring import Rollouts
from tlt_jax.training.settings import Config


class RewardModel:
    """Its score of an answer is that of prompt and answer up to the answer's last token, stop token included."""

    def __init__(self, run: Pass, mesh: jax.sharding.Mesh, params: dict, packing: Packing):
        self.mesh, self.params, self.packing = mesh, params, packing
        self._program = score_program(mesh, functools.partial(preference.score_columns, run))

    def scores(self, completions: Sequence[Completion]) -> list[float]:
        """The score of each answer. Collective."""
        trajectories = [of_completion(completion) for completion in completions]
        packed = pack(trajectories, self.packing)
        scored = policy_driver.score(self._program, self.mesh, self.params, packed.batches)
        return [float(columns[-1]) for columns in unpack(packed, scored, trajectories)]


def judged(model: RewardModel | None, rollouts: Rollouts) -> Rollouts:
    """The rollouts with the scores that the policy learns from: with a model its own, and the scores that they had become the verdict. Collective."""
    if model is None:
        return rollouts
    return dataclasses.replace(rollouts, scores=tuple(map(_with_score, rollouts.scores, model.scores(rollouts.completions))))


def _with_score(scored: Scored, value: float) -> Scored:
    """A verdict that failed is no number, and not the model's score; where the task has none, the model's score stands for it."""
    verdict = math.nan if scored.error is not None else scored.judged
    components = {"model": value} | ({} if scored.judged is None else {"verdict": scored.judged})
    return dataclasses.replace(scored, score=value, verdict=verdict, components=components)


def open_model(config: Config, policy: PolicySpec, mesh: jax.sharding.Mesh, own: dict | None, *, longest_prompt: int) -> RewardModel | None:
    """The one that scores RL, if any: with the `own` parameters of this run, or what reward.path names."""
    if config.reward.kind != "model":
        return None
    spec, params = (build.reward_spec(policy), own) if own is not None else build.load_reward_model(config, mesh)
    packing = packing_for([longest_prompt], config.rollout.max_new_tokens, config.batch.tokens_per_microbatch, batch_rows_multiple(mesh))
    return RewardModel(build.training_pass(config, spec), mesh, params, packing)


def placed_shapes(policy: PolicySpec, dtype: str, mesh: jax.sharding.Mesh) -> dict:
    """Shapes, dtypes and places of the parameters of a reward model on the policy's trunk."""
    tree = decoder.abstract_params(build.reward_spec(policy), dtype)
    return jax.tree.map(lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), tree, param_shardings(mesh, tree))
