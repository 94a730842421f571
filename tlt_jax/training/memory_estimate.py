"""What a run needs of one device's memory, from shapes alone: nothing is placed.

All figures are bytes on the fullest device. Exact for what is an array of the run (shard shapes under the real placement rules); an estimate for activations,
since the compiler decides what it keeps:

    parameters      policy, with its optimizer's state, in precision.params
    gradients       float32 totals of the micro-batches, and one micro-batch's own gradients in precision.params
    other networks  reference model when algorithm.beta > 0; separate critic with its optimizer's state for ppo; with reward.kind=model a reward
                    model of the policy's size, or the policy while the stage reward_model trains one
    compute copy    the parameters in precision.compute when that differs from precision.params
    activations     N · (L · layer + 2 · D · b) + head, N = tokens_per_microbatch / (data · fsdp), b = bytes of precision.compute
                    layer = b · (4 D + (2 H C + 2 K C + 3 F) / tensor) + 8 · H / tensor · min(T, 1024), where the last term is the float32 scores
                    and weights of attention in rows of T tokens; with precision.remat: b · D a layer, and one whole layer
                    head = 3 · 256 · V / tensor · 4 for the log-probs of 256 positions
    rollout weights the slice's copy in precision.rollout
    KV cache        `slots` rows of the longest sequence's bucket: 2 · L · K · C numbers a position, and the drafter's
                    own cache and ring of features; the short-lived cache of a prefill is not counted

Training needs parameters, gradients, other networks, compute copy and activations at once; a rollout needs parameters, other networks, weights and cache.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from tlt_jax.decoding import rollout
from tlt_jax.decoding.rollout import Slots
from tlt_jax.decoding.rounds import Decoding
from tlt_jax.logprobs import DEFAULT_CHUNK
from tlt_jax.models import decoder
from tlt_jax.models.attention import QUERY_BLOCK
from tlt_jax.models.specs import PolicySpec
from tlt_jax.optimizers import make_optimizer
from tlt_jax.sharding import movement, rules
from tlt_jax.sharding.meshes import Meshes
from tlt_jax.training import build
from tlt_jax.training.algorithm_rules import has_critic, shares_trunk
from tlt_jax.training.drafting import make_drafter
from tlt_jax.training.settings import Config


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one device, by purpose; see the module."""

    parameters: int
    optimizer: int
    gradients: int
    other_networks: int
    compute_copy: int
    activations: int
    rollout_weights: int
    kv_cache: int
    kv_row: int

    @property
    def training(self) -> int:
        """During an update."""
        return self.parameters + self.optimizer + self.gradients + self.other_networks + self.compute_copy + self.activations

    @property
    def rollout(self) -> int:
        """During a rollout."""
        return self.parameters + self.optimizer + self.other_networks + self.rollout_weights + self.kv_cache

    @property
    def smallest_slice(self) -> int:
        """What a slice cannot do without: its weights and one row of cache."""
        return self.rollout_weights + self.kv_row


def estimate(config: Config, spec: PolicySpec, meshes: Meshes, *, row_length: int, cache_length: int) -> MemoryEstimate:
    """The estimate for rows of `row_length` tokens in training and `cache_length` cache positions in rollouts."""
    dtype, compute = config.precision.params, build.resolve_dtype(config, "compute")
    params = decoder.abstract_params(spec, dtype)
    optimizer = make_optimizer(build.optimizer_settings(config, config.optimizer.lr, max(config.stages.rl.steps, 1)))
    held = on_train_mesh(meshes, params)
    state = on_train_mesh(meshes, jax.eval_shape(optimizer.init, params))
    reinforced = "rl" in config.stages.order
    trains_critic = reinforced and has_critic(config) and not shares_trunk(config)
    waits = "reward_model" in config.stages.order or (reinforced and config.reward.kind == "model")
    others = held * (reinforced and config.algorithm.beta > 0) + held * waits + (held + state) * trains_critic
    totals = on_train_mesh(meshes, decoder.abstract_params(spec, "float32"))
    copy = on_train_mesh(meshes, decoder.abstract_params(spec, compute)) if compute != dtype else 0
    served = build.resolve_dtype(config, "rollout")
    on_slice = decoder.abstract_params(spec, served)
    return MemoryEstimate(
        parameters=held, optimizer=state, gradients=totals + held, other_networks=others, compute_copy=copy,
        activations=_activations(config, spec, meshes, row_length, jnp.dtype(compute).itemsize),
        rollout_weights=_device_bytes(on_slice, movement.publish_shardings(meshes, on_slice)),
        kv_cache=_cache_bytes(config, spec, meshes, config.rollout.slots, cache_length), kv_row=_cache_bytes(config, spec, meshes, 1, cache_length))


def device_limit() -> int | None:
    """Bytes that the smallest device of this process has for arrays; None where the backend does not say (a CPU)."""
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in jax.local_devices()]
    return None if None in limits else min(limits)


def on_train_mesh(meshes: Meshes, tree) -> int:
    """Bytes of a tree of shapes and dtypes on the fullest device of the train mesh."""
    return _device_bytes(tree, rules.param_shardings(meshes.train, tree))


def _device_bytes(tree, shardings) -> int:
    sizes = jax.tree.map(lambda leaf, sharding: math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize, tree, shardings)
    return sum(jax.tree.leaves(sizes))


def _cache_bytes(config: Config, spec: PolicySpec, meshes: Meshes, rows: int, length: int) -> int:
    dtype = jnp.dtype(build.resolve_dtype(config, "rollout"))
    decoding = Decoding(spec, make_drafter(config, spec), streams=config.drafter.features == "rollout")
    slots = Slots(rows, length, config.drafter.catchup_window, build.cache_block())
    state = jax.eval_shape(lambda: rollout.init_state(decoding, slots, dtype))
    return _device_bytes(state, rules.state_shardings(meshes.slices[0], state))


def _activations(config: Config, spec: PolicySpec, meshes: Meshes, row_length: int, size: int) -> int:
    data, fsdp, tensor = (meshes.train.shape[axis] for axis in meshes.train.axis_names)
    D, H, K, C, F = spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.intermediate_size
    tokens = -(-config.batch.tokens_per_microbatch // (data * fsdp))
    layer = size * (4 * D + (2 * H * C + 2 * K * C + 3 * F) // tensor) + 8 * H // tensor * min(row_length, QUERY_BLOCK)
    layers = spec.num_layers * size * D + layer if config.precision.remat else spec.num_layers * layer
    return tokens * (layers + 2 * D * size) + 3 * DEFAULT_CHUNK * spec.vocab_size // tensor * 4
