"""How often a draft token would be accepted, by the way it is proposed and verified, measured on the policy's own text.

Four rules on the same pair of distributions, p of the policy over all tokens and q of the drafter over its own, at every counted slot and draft level:

    coupled_1     the drafter's best token under the policy's noise is the policy's draw
    coupled_m     the policy's draw is among the drafter's m best under that noise
    greedy_m      the policy's draw is among the drafter's m most probable tokens: Σ p over them
    rejection     one token drawn from q, accepted by rejection sampling: Σ min(p, q), the most that one candidate can reach
"""

import dataclasses
import itertools
import operator
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from tlt_jax import noise
from tlt_jax.distillation.pairs import DraftBatch, counted, shifted
from tlt_jax.drafters.feature_drafter import FeatureDrafter, policy_head
from tlt_jax.logprobs import scale_logits
from tlt_jax.masked import WeightedMean

SLOTS_AT_ONCE = 64  # full-vocabulary arrays alive at a time


@dataclasses.dataclass(frozen=True)
class Rules:
    """`candidates` m; `draws` noise draws a slot; draft `levels`."""

    temperature: float
    candidates: int = 4
    draws: int = 4
    levels: int = 3


def expected_accept_length(metrics: Mapping[str, float]) -> float:
    """Tokens a round of a chain as deep as there are drafter/acceptance_s, the policy's own token counted: 1 + a0 + a0·a1 + …; a level's rate is taken for
    that of the level once those before it were accepted.
    """
    levels = itertools.takewhile(metrics.__contains__, (f"drafter/acceptance_{level}" for level in itertools.count()))
    return 1 + sum(itertools.accumulate((metrics[name] for name in levels), operator.mul))


def acceptance(drafter: FeatureDrafter, rules: Rules, prepared: dict, policy_params: dict, batch: DraftBatch) -> dict[str, WeightedMean]:
    """{rule_level: mean over counted slots}; `prepared` from `drafter.prepare`. A level is conditional on the levels before it being right."""
    embedded_BTD = policy_params["embed"]["embedding"][batch.tokens_BT]
    outputs = drafter.unroll(prepared, embedded_BTD, batch.features_BTF, (batch.positions_BT, batch.segments_BT), rules.levels)
    head_DV, found = policy_head(drafter.spec, policy_params, None), {}
    for level, hidden_BTD in enumerate(outputs):
        mask_BT, target_BTD = counted(batch, level), shifted(batch.final_BTD, 1 + level)
        slots = (hidden_BTD.reshape(-1, hidden_BTD.shape[-1]), target_BTD.reshape(-1, target_BTD.shape[-1]), jnp.arange(mask_BT.size, dtype=jnp.uint32))
        rates = jax.lax.map(lambda slot: _rates(drafter, rules, prepared, (policy_params, head_DV), slot), slots, batch_size=SLOTS_AT_ONCE)
        found |= {f"{name}_{level}": WeightedMean.over(rate.reshape(mask_BT.shape), mask_BT) for name, rate in rates.items()}
    return found


def _rates(drafter: FeatureDrafter, rules: Rules, prepared: dict, policy: tuple[dict, jax.Array], slot: tuple) -> dict[str, jax.Array]:
    """The four rates of one slot."""
    policy_params, head_DV = policy
    hidden_D, target_D, number = slot
    logits, ids = drafter.logits(prepared, policy_params, hidden_D[None, None])
    p_V = jax.nn.softmax(scale_logits(target_D @ head_DV, rules.temperature))
    q_E = jax.nn.softmax(scale_logits(logits[0, 0], rules.temperature))
    ids_E = jnp.arange(len(q_E)) if ids is None else ids
    keys = jnp.stack([jnp.broadcast_to(number, (rules.draws,)), jnp.arange(rules.draws, dtype=jnp.uint32)], axis=1)
    race = noise.exponentials(keys, jnp.zeros((rules.draws,), jnp.int32), jnp.arange(len(p_V)))
    drawn = jnp.argmax(p_V[None] / race, axis=1)
    _, coupled = jax.lax.top_k(q_E[None] / race[:, ids_E], rules.candidates)
    _, greedy = jax.lax.top_k(q_E, rules.candidates)
    hit = ids_E[coupled] == drawn[:, None]
    return {
        "coupled_1": jnp.mean(hit[:, 0].astype(jnp.float32)), "coupled_m": jnp.mean(jnp.any(hit, axis=1).astype(jnp.float32)),
        "greedy_m": jnp.sum(p_V[ids_E[greedy]]), "rejection": jnp.sum(jnp.minimum(p_V[ids_E], q_E))}
