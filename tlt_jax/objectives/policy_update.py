"""What one micro-batch contributes to an optimizer step: objectives of policy, critic and supervised warm-up, and the apply step.

An objective maps (params, batch) to a summed loss with its weight and metrics as WeightedMeans; sums of micro-batches are added and divided once, so
splitting changes nothing. Passes that only score (old, reference, values) share the same code. Placement and compilation live in `runtime/`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from tlt_jax.logprobs import chunked_token_logprobs, linear_head
from tlt_jax.masked import WeightedMean
from tlt_jax.models import decoder
from tlt_jax.models.decoder import DecoderOutput
from tlt_jax.models.specs import PolicySpec
from tlt_jax.objectives import losses
from tlt_jax.objectives.losses import LossSettings
from tlt_jax.records import PackedBatch, PairBatch

VALUE_HEAD = "value_head"  # beside the policy's parameters when the critic shares the trunk


def without_value_head(params: dict) -> dict:
    """The policy alone."""
    return {name: leaf for name, leaf in params.items() if name != VALUE_HEAD}


@dataclasses.dataclass(frozen=True)
class Pass:
    """How a training forward runs: everything static about it."""

    spec: PolicySpec
    temperature: float = 1.0
    compute_dtype: str = "float32"
    remat: bool = False


@dataclasses.dataclass(frozen=True)
class PolicyObjective:
    """The policy's objective; `on_policy`: old log-probs are those of this very pass (one update a step), so no separate pass is needed."""

    forward: Pass
    loss: LossSettings
    on_policy: bool
    shared_critic: bool = False
    with_entropy: bool = False

    def __post_init__(self):
        if self.shared_critic and self.loss.loss_agg_mode != "token-mean":
            raise ValueError(
                f"a critic on the policy's trunk has a token-mean loss, which cannot be added to a {self.loss.loss_agg_mode} one: use token-mean, or a critic "
                "of its own")


def trunk(run: Pass, params: dict, batch: PackedBatch | PairBatch, capture_layers: tuple[int, ...] = ()) -> DecoderOutput:
    """The forward of packed rows up to the head."""
    compute = jax.tree.map(lambda leaf: leaf.astype(run.compute_dtype), {name: params[name] for name in ("embed", "layers", "final_norm")})
    return decoder.forward(
        run.spec, compute, batch.tokens_BT, positions_BT=batch.positions_BT, segments_BT=batch.segments_BT, capture_layers=capture_layers,
        compute_logits=False, remat=run.remat)


def _before_targets(features_BTD: jax.Array, batch: PackedBatch) -> jax.Array:
    before_BM = jnp.clip(batch.targets_BM - 1, 0, batch.tokens_BT.shape[1] - 1)
    return jnp.take_along_axis(features_BTD, before_BM[..., None], axis=1)


def response_features(run: Pass, params: dict, batch: PackedBatch) -> jax.Array:
    """Features [B, M, D] that predict the response tokens at columns `batch.targets_BM` (the column before each)."""
    return _before_targets(trunk(run, params, batch).features_BTD, batch)


def on_columns(values_BM: jax.Array, batch: PackedBatch) -> jax.Array:
    """[B, T] with each value at its token's column and 0 elsewhere; padding targets (column T) are dropped."""
    row_BM = jnp.arange(values_BM.shape[0])[:, None]
    return jnp.zeros(batch.tokens_BT.shape, jnp.float32).at[row_BM, batch.targets_BM].set(values_BM, mode="drop")


def features_logprobs(run: Pass, params: dict, features_BMD: jax.Array, batch: PackedBatch, *, with_entropy: bool) -> tuple[jax.Array, jax.Array | None]:
    """Log-probabilities (and entropies) of the response tokens, on their columns [B, T]."""
    rows, targets, width = features_BMD.shape
    matrix, tied = decoder.head_matrix(run.spec, params)
    tokens_BM = jnp.take_along_axis(batch.tokens_BT, jnp.clip(batch.targets_BM, 0, batch.tokens_BT.shape[1] - 1), axis=1)
    logprobs_N, entropy_N = chunked_token_logprobs(
        features_BMD.reshape(rows * targets, width), linear_head(matrix.astype(features_BMD.dtype), tied=tied), tokens_BM.reshape(-1), run.temperature,
        with_entropy=with_entropy)
    entropy_BT = None if entropy_N is None else on_columns(entropy_N.reshape(rows, targets), batch)
    return on_columns(logprobs_N.reshape(rows, targets), batch), entropy_BT


def score_logprobs(run: Pass, params: dict, batch: PackedBatch) -> jax.Array:
    """Log-probabilities of the response tokens [B, T] under `params` (old and reference passes)."""
    return features_logprobs(run, params, response_features(run, params, batch), batch, with_entropy=False)[0]


def score_and_features(run: Pass, capture_layers: tuple[int, ...], params: dict, batch: PackedBatch) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """(`score_logprobs`, what enters `capture_layers` [B, T, F], None without layers, features [B, T, D] before the head) of one forward."""
    out = trunk(run, params, batch, capture_layers)
    logprobs_BT, _ = features_logprobs(run, params, _before_targets(out.features_BTD, batch), batch, with_entropy=False)
    return logprobs_BT, out.aux_features_BTF, out.features_BTD


def features_values(head: dict, features_BMD: jax.Array, batch: PackedBatch) -> jax.Array:
    """Values of the states before each response token, on the token's column [B, T], float32."""
    values_BM = jnp.einsum("bmd,dv->bmv", features_BMD, head["kernel"].astype(features_BMD.dtype), preferred_element_type=jnp.float32)[..., 0]
    return on_columns(values_BM, batch)


def score_values(run: Pass, params: dict, batch: PackedBatch, *, head: str) -> jax.Array:
    """Values [B, T]; `head` is "head" for a critic of its own and VALUE_HEAD for a shared trunk."""
    return features_values(params[head], response_features(run, params, batch), batch)


def policy_objective(objective: PolicyObjective, params: dict, batch: PackedBatch) -> tuple[WeightedMean, dict]:
    """Clipped policy loss, plus KL, entropy and (shared trunk) value terms as configured."""
    run, settings = objective.forward, objective.loss
    features_BMD = response_features(run, params, batch)
    logprobs_BT, entropy_BT = features_logprobs(run, params, features_BMD, batch, with_entropy=objective.with_entropy)
    old_BT = jax.lax.stop_gradient(logprobs_BT) if objective.on_policy else batch.old_logprobs_BT
    loss, metrics = losses.clipped_policy_loss(
        logprobs_BT, old_BT, batch.advantages_BT, batch.mask_BT, settings, segments_BT=batch.segments_BT, rollout_logprobs_BT=batch.rollout_logprobs_BT)
    total = loss.sum
    metrics["policy/loss"] = loss
    if entropy_BT is not None:
        extra, more = losses.entropy_loss(entropy_BT, batch.mask_BT, settings, segments_BT=batch.segments_BT)
        total, metrics = total + extra.sum, metrics | more
    if settings.beta:
        extra, more = losses.kl_loss(
            logprobs_BT, batch.reference_logprobs_BT, batch.mask_BT, settings, segments_BT=batch.segments_BT, beta=batch.beta)
        total, metrics = total + extra.sum, metrics | more
    if objective.shared_critic:
        value, more = losses.value_loss(
            features_values(params[VALUE_HEAD], features_BMD, batch), batch.old_values_BT, batch.returns_BT, batch.mask_BT, settings)
        # The value loss is a token mean; brought to the policy loss's weight so that one division serves both.
        total, metrics = total + value.sum * loss.weight / jnp.maximum(value.weight, 1.0), metrics | more | {"value/loss": value}
    return WeightedMean(total, loss.weight), metrics


def value_objective(run: Pass, settings: LossSettings, params: dict, batch: PackedBatch) -> tuple[WeightedMean, dict]:
    """Clipped value loss of a critic of its own."""
    loss, metrics = losses.value_loss(score_values(run, params, batch, head="head"), batch.old_values_BT, batch.returns_BT, batch.mask_BT, settings)
    return loss, metrics | {"value/loss": loss}


def language_objective(run: Pass, params: dict, batch: PackedBatch) -> tuple[WeightedMean, dict]:
    """Mean negative log-likelihood of the masked-in tokens (supervised warm-up)."""
    loss = WeightedMean.over(-score_logprobs(run, params, batch), batch.mask_BT)
    return loss, {"policy/loss": loss}


def gradients(objective, params: dict, batch) -> tuple:
    """(gradients of the summed loss in float32, loss, metrics) of one micro-batch; `objective` maps (params, batch) to (WeightedMean, metrics)."""

    def summed(params):
        loss, metrics = objective(params, batch)
        return loss.sum, (loss, metrics)

    gradients, (loss, metrics) = jax.grad(summed, has_aux=True)(params)
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), gradients), loss, metrics


def accumulate(objective, params: dict, totals: tuple, batch) -> tuple:
    """Add the `gradients` of one micro-batch to those of the micro-batches before it."""
    return jax.tree.map(jnp.add, totals, gradients(objective, params, batch))


def apply_update(optimizer: optax.GradientTransformation, params: dict, opt_state, gradients: dict, loss: WeightedMean, metrics: dict) -> tuple:
    """One optimizer step from the totals of all micro-batches (see `accumulate`): (params, opt_state, stats).

    An update with a non-finite gradient, or with no token at all, changes nothing; `stats["skipped"]` is 1 for the former.
    """
    gradients = jax.tree.map(lambda leaf: leaf / jnp.maximum(loss.weight, 1e-8), gradients)
    norm = optax.global_norm(gradients)
    finite = jnp.isfinite(norm) & jnp.isfinite(loss.sum)
    take = finite & (loss.weight > 0)
    updates, new_state = optimizer.update(gradients, opt_state, params)
    new_params = optax.apply_updates(params, updates)

    def choose(new, old):
        return jax.tree.map(lambda a, b: jnp.where(take, a, b), new, old)

    stats = {"grad_norm": norm, "skipped": 1.0 - finite, "total_loss": loss.value} | {name: mean.value for name, mean in metrics.items()}
    return choose(new_params, params), choose(new_state, opt_state), stats
