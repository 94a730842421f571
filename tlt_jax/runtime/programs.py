"""Every compiled program of a run: what is traced, how it is placed, what it donates. The only file with `jax.jit`.

Programs are built once per shape and kept; `compile_counter` counts what XLA really compiled, so that a run can show
that nothing recompiles after warm-up.
"""

import functools
import math
import threading
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tlt_jax.decoding import rollout
from tlt_jax.decoding.rollout import Slots
from tlt_jax.decoding.rounds import RING, Decoding, Ring, RowState, Weights
from tlt_jax.distillation import pairs
from tlt_jax.distillation.acceptance import Rules, acceptance
from tlt_jax.drafters.drafter import Drafter
from tlt_jax.drafters.feature_drafter import FeatureDrafter
from tlt_jax.models import decoder
from tlt_jax.models.specs import PolicySpec
from tlt_jax.objectives import policy_update
from tlt_jax.sharding import movement, rules
from tlt_jax.strategies import OFF, Strategy

UNSTACKED_BYTES = 2**31  # layers of at most this size are copied to decode faster on a CPU; more would not fit beside the rest on a small machine
COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Number and seconds of XLA compilations in this process."""

    def __init__(self):
        self.count = 0
        self.seconds = 0.0
        self._lock = threading.Lock()
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration: float, **_) -> None:
        if event == COMPILE_EVENT:
            with self._lock:
                self.count += 1
                self.seconds += duration


@functools.cache
def compile_counter() -> CompileCounter:
    """The process-wide counter, listening from the first call on."""
    return CompileCounter()


class SlicePrograms:
    """The programs of one rollout slice. State is donated by every program that returns a new one; parameters never are."""

    def __init__(self, spec: PolicySpec, mesh: Mesh, dtype: str, *, block: int, drafter: Drafter | None = None, ring: Ring = RING):
        self.spec, self.mesh, self.dtype, self.drafter = spec, mesh, jnp.dtype(dtype), drafter
        self._decoding, self._slots = Decoding(spec, drafter, streams=ring.streams), functools.partial(Slots, ring=ring.columns, block=block)
        self.replicated = rules.replicated(mesh)
        self._built = {}

    def _program(self, key: tuple, build):
        if key not in self._built:
            self._built[key] = build()
        return self._built[key]

    def _placement(self, rows: int, length: int):
        return rules.state_shardings(self.mesh, jax.eval_shape(lambda: rollout.init_state(self._decoding, self._slots(rows, length), self.dtype)))

    def row_bytes(self, length: int) -> int:
        """Bytes that one row of `length` cache slots takes on each device of the slice."""
        rows = self.mesh.shape["data"]
        abstract = jax.eval_shape(lambda: rollout.init_state(self._decoding, self._slots(rows, length), self.dtype))
        placement = rules.state_shardings(self.mesh, abstract)
        sizes = jax.tree.map(lambda leaf, place: math.prod(place.shard_shape(leaf.shape)) * leaf.dtype.itemsize, abstract, placement)
        return sum(jax.tree.leaves(sizes)) // rows

    def serve(self, params: dict, drafter_params: dict | None) -> Weights:
        """The published parameters as this slice decodes with them: on one CPU device a copy that is not stacked, when it is small enough."""
        layers = params["layers"]
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(layers))
        prepared = None
        if self.drafter is not None:
            prepared = self._program(("prepare",), lambda: prepare_program(self.drafter))(drafter_params, params)
        if jax.default_backend() == "cpu" and self.mesh.size == 1 and size <= UNSTACKED_BYTES:
            params = params | {"layers": self._program(("unstack",), lambda: jax.jit(decoder.unstacked))(layers)}
        return Weights(params, prepared)

    def init_state(self, rows: int, length: int) -> RowState:
        """Empty slots of `rows` × `length`, created in place."""

        def build():
            return jax.jit(
                lambda: rollout.init_state(self._decoding, self._slots(rows, length), self.dtype), out_shardings=self._placement(rows, length))

        return self._program(("init", rows, length), build)()

    def admit(self, weights: Weights, state: RowState, admission: rollout.Admission, sampling, stop_ids_Z):
        """Prefill and fill slots: (state, sampled, finish_A)."""
        rows, length = state.active_B.shape[0], state.cache.slots

        def build():
            return jax.jit(
                functools.partial(rollout.admit, self._decoding), donate_argnums=(1,),
                out_shardings=(self._placement(rows, length), self.replicated, self.replicated))

        return self._program(("admit", rows, length), build)(weights, state, admission, sampling, stop_ids_Z)

    def advance(self, weights: Weights, state: RowState, sampling, stop_ids_Z, *, rounds: int, strategy: Strategy = OFF):
        """One dispatch of rounds of a strategy: (state, emitted)."""
        rows, length = state.active_B.shape[0], state.cache.slots

        def build():
            return jax.jit(
                functools.partial(rollout.advance, self._decoding._replace(strategy=strategy, rounds=rounds)), donate_argnums=(1,),
                out_shardings=(self._placement(rows, length), self.replicated))

        return self._program(("advance", rows, length, rounds, strategy), build)(weights, state, sampling, stop_ids_Z)

    def gather(self, state: RowState, index_B, keep_B) -> RowState:
        """Rows in a new order or number. The old state stays valid until dropped: its buffers have other shapes."""
        rows, length = len(index_B), state.cache.slots

        def build():
            return jax.jit(functools.partial(rollout.gather_rows, self._decoding), out_shardings=self._placement(rows, length))

        return self._program(("gather", state.active_B.shape[0], rows, length), build)(state, index_B, keep_B)

    def put_rows(self, state: RowState, source: RowState, slots_A, texts) -> RowState:
        """Rows that come from another slice in slots of this one's state."""
        rows, length = state.active_B.shape[0], state.cache.slots

        def build():
            return jax.jit(functools.partial(rollout.put_rows, self._decoding), donate_argnums=(0,), out_shardings=self._placement(rows, length))

        return self._program(("put_rows", rows, len(slots_A), length), build)(state, source, slots_A, texts)


def free_bytes(mesh: Mesh) -> int | None:
    """Free memory of the fullest device; None where the backend does not say (a CPU)."""
    stats = [device.memory_stats() for device in mesh.devices.flat]
    return None if None in stats else min(one["bytes_limit"] - one["bytes_in_use"] for one in stats)


class LearnerPrograms:
    """The programs that train one network on the train mesh: accumulate micro-batches, apply one optimizer step.

    Gradient totals and optimizer state are donated; parameters are not, since the slices' views may share their buffers.
    """

    def __init__(self, mesh: Mesh, objective, optimizer, params):
        self.mesh, self.optimizer, self._objective = mesh, optimizer, objective
        self.params_placement = rules.param_shardings(mesh, params)
        abstract_state = jax.eval_shape(optimizer.init, params)
        self.state_placement = rules.param_shardings(mesh, abstract_state)
        self.init = jax.jit(optimizer.init, out_shardings=self.state_placement)
        self._apply = jax.jit(
            functools.partial(policy_update.apply_update, optimizer), donate_argnums=(1, 2),
            out_shardings=(self.params_placement, self.state_placement, rules.replicated(mesh)))
        self._totals = {}

    def _totals_programs(self, params, batch):
        """(zeros, accumulate); the metrics that an objective returns decide the shape of the totals."""
        key = tuple(leaf.shape for leaf in jax.tree.leaves(batch))
        if key not in self._totals:
            loss, metrics = jax.eval_shape(self._objective, params, batch)
            abstract = (jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), params), loss, metrics)
            whole = rules.replicated(self.mesh)
            placement = (self.params_placement, jax.tree.map(lambda _: whole, loss), jax.tree.map(lambda _: whole, metrics))
            zeros = jax.jit(lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract), out_shardings=placement)
            add = jax.jit(functools.partial(policy_update.accumulate, self._objective), donate_argnums=(1,), out_shardings=placement)
            self._totals[key] = (zeros, add)
        return self._totals[key]

    def gradients(self, params, batches):
        """Totals over the micro-batches of one optimizer step."""
        zeros, _ = self._totals_programs(params, batches[0])
        totals = zeros()
        for batch in batches:
            totals = self._totals_programs(params, batch)[1](params, totals, batch)
        return totals

    def apply(self, params, opt_state, totals):
        """(params, opt_state, stats)."""
        return self._apply(params, opt_state, *totals)


class QuantumPrograms:
    """The programs that train a drafter on one slice: an update on a lesson, and a measurement of texts whose features the same program makes.

    The drafter's parameters and optimizer state are donated by an update, what the slice serves never is.
    """

    def __init__(self, mesh: Mesh, drafter: FeatureDrafter, objective, optimizer, params):
        self.mesh = mesh
        self.params_placement = rules.param_shardings(mesh, params)
        self.state_placement = rules.param_shardings(mesh, jax.eval_shape(optimizer.init, params))
        whole = rules.replicated(mesh)

        def update(params, opt_state, policy, ids, lesson):
            totals = policy_update.gradients(objective, params, pairs.taught(drafter, policy, ids, lesson))
            return policy_update.apply_update(optimizer, params, opt_state, *totals)

        def measure(params, policy, ids, batch):
            return objective(params, pairs.taught(drafter, policy, ids, pairs.Lesson(batch)))[1]

        self.update = jax.jit(update, donate_argnums=(0, 1), out_shardings=(self.params_placement, self.state_placement, whole))
        self.measure = jax.jit(measure, out_shardings=whole)


@functools.cache
def prompt_features_program(mesh: Mesh, positions: int):
    """What a slice's ring holds of a prompt that has just been admitted, before the next dispatch takes the state: (state, slot) → [positions, F]."""
    return jax.jit(functools.partial(rollout.prompt_features, positions), out_shardings=rules.replicated(mesh))


def score_program(mesh: Mesh, score):
    """A jitted scoring pass (params, batch) → [B, T], or several arrays with the rows of the batch first."""
    return jax.jit(score, out_shardings=rules.batch_shardings(mesh, jax.ShapeDtypeStruct((rules.batch_rows_multiple(mesh), 1), jnp.float32)))


def score_features_program(mesh: Mesh, score):
    """A jitted scoring pass that hands on the features of its forward: (params, batch) → ([B, T], [B, T, F] or None, [B, T, D])."""
    rows = rules.batch_rows_multiple(mesh)
    placement = [rules.batch_shardings(mesh, jax.ShapeDtypeStruct(shape, jnp.float32)) for shape in ((rows, 1), (rows, 1, 1))]
    return jax.jit(score, out_shardings=(placement[0], placement[1], placement[1]))


def init_program(mesh: Mesh, make, abstract):
    """A jitted initialiser that creates parameters in place on the train mesh."""
    return jax.jit(make, out_shardings=rules.param_shardings(mesh, abstract))


def publish_program(targets: list, dtype: str):
    """The jitted reshard of a list of arrays from the train layout to the layout of all slices (parameters are not donated)."""
    return jax.jit(functools.partial(movement.reshard, dtype=jnp.dtype(dtype)), out_shardings=targets)


def teach_program(mesh: Mesh, spec: PolicySpec, capture_layers: tuple[int, ...]):
    """The jitted forward that makes a drafter's training features: (params, batch) → (features_BTF, final_BTD)."""
    rows = rules.batch_shardings(mesh, jax.ShapeDtypeStruct((rules.batch_rows_multiple(mesh), 1, 1), jnp.float32))
    return jax.jit(functools.partial(pairs.teach, spec, capture_layers), out_shardings=(rows, rows))


def evaluate_program(objective):
    """An objective (params, data) → (loss, metrics) without its gradient."""
    return jax.jit(objective)


def new_drafter(drafter: Drafter, policy_params: dict, seed: int = 0):
    """First parameters of a drafter from those of a policy, the same wherever they are made."""
    return _init_drafter_program(drafter)(jax.random.key(seed), policy_params)


@functools.cache
def _init_drafter_program(drafter: Drafter):
    return jax.jit(drafter.init_params)


def frozen_program(drafter: FeatureDrafter):
    """What a drafter's loss reads of a policy: (policy parameters, draft ids or None) → Frozen."""
    return jax.jit(functools.partial(pairs.frozen_part, drafter))


def acceptance_program(drafter: FeatureDrafter, rules: Rules):
    """Acceptance by rule and level: (prepared drafter, policy parameters, batch) → {name: WeightedMean}."""
    return jax.jit(functools.partial(acceptance, drafter, rules))


class SpeedPrograms(NamedTuple):
    """Programs of one array that show what a device is capable of."""

    total: Callable
    negative: Callable
    product: Callable


def speed_programs() -> SpeedPrograms:
    """Reading, copying, multiplying."""
    return SpeedPrograms(jax.jit(jnp.sum), jax.jit(jnp.negative), jax.jit(lambda square: square @ square))


def prepare_program(drafter: Drafter):
    """What a drafter works with, from its parameters and the policy's."""
    return jax.jit(drafter.prepare)
