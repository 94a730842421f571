"""Every compiled program of a run: what is traced, how it is placed, what it donates. The only file with `jax.jit`.

Programs are built once per shape and kept; `compile_counter` counts what XLA really compiled, so that a run can show
that nothing recompiles after warm-up.
"""

import functools
import math
import threading

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tlt_jax.decoding import rollout
from tlt_jax.decoding.rounds import RowState
from tlt_jax.models import decoder
from tlt_jax.models.specs import PolicySpec
from tlt_jax.objectives import policy_update
from tlt_jax.sharding import movement, rules

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

    def __init__(self, spec: PolicySpec, mesh: Mesh, dtype: str, *, block: int):
        self.spec, self.mesh, self.dtype, self.block = spec, mesh, jnp.dtype(dtype), block
        self.replicated = rules.replicated(mesh)
        self._built = {}

    def _program(self, key: tuple, build):
        if key not in self._built:
            self._built[key] = build()
        return self._built[key]

    def _placement(self, rows: int, length: int):
        abstract = jax.eval_shape(lambda: rollout.init_state(self.spec, rows, length, self.dtype, block=self.block))
        return rules.state_shardings(self.mesh, abstract)

    def row_bytes(self, length: int) -> int:
        """Bytes that one row of `length` cache slots takes on each device of the slice."""
        rows = self.mesh.shape["data"]
        abstract = jax.eval_shape(lambda: rollout.init_state(self.spec, rows, length, self.dtype, block=self.block))
        placement = rules.state_shardings(self.mesh, abstract)
        sizes = jax.tree.map(lambda leaf, place: math.prod(place.shard_shape(leaf.shape)) * leaf.dtype.itemsize, abstract, placement)
        return sum(jax.tree.leaves(sizes)) // rows

    def free_bytes(self) -> int | None:
        """Free memory of the slice's fullest device; None where the backend does not say (a CPU)."""
        stats = [device.memory_stats() for device in self.mesh.devices.flat]
        return None if None in stats else min(one["bytes_limit"] - one["bytes_in_use"] for one in stats)

    def serve(self, params: dict) -> dict:
        """The published parameters as this slice decodes with them: on one CPU device a copy that is not stacked, when it is small enough."""
        layers = params["layers"]
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(layers))
        if jax.default_backend() != "cpu" or self.mesh.size > 1 or size > UNSTACKED_BYTES:
            return params
        return params | {"layers": self._program(("unstack",), lambda: jax.jit(decoder.unstacked))(layers)}

    def init_state(self, rows: int, length: int) -> RowState:
        """Empty slots of `rows` × `length`, created in place."""

        def build():
            return jax.jit(
                lambda: rollout.init_state(self.spec, rows, length, self.dtype, block=self.block), out_shardings=self._placement(rows, length))

        return self._program(("init", rows, length), build)()

    def admit(self, params, state: RowState, admission: rollout.Admission, sampling, stop_ids_Z):
        """Prefill and fill slots: (state, sampled, finish_A)."""
        rows, length = state.active_B.shape[0], state.cache.slots

        def build():
            return jax.jit(
                functools.partial(rollout.admit, self.spec), donate_argnums=(1,),
                out_shardings=(self._placement(rows, length), self.replicated, self.replicated))

        return self._program(("admit", rows, length), build)(params, state, admission, sampling, stop_ids_Z)

    def advance(self, params, state: RowState, sampling, stop_ids_Z, *, rounds: int):
        """One dispatch of plain rounds: (state, emitted)."""
        rows, length = state.active_B.shape[0], state.cache.slots

        def build():
            return jax.jit(
                functools.partial(rollout.advance, self.spec, rounds=rounds), donate_argnums=(1,),
                out_shardings=(self._placement(rows, length), self.replicated))

        return self._program(("advance", rows, length, rounds), build)(params, state, sampling, stop_ids_Z)

    def gather(self, state: RowState, index_B, keep_B) -> RowState:
        """Rows in a new order or number. The old state stays valid until dropped: its buffers have other shapes."""
        rows, length = len(index_B), state.cache.slots

        def build():
            return jax.jit(rollout.gather_rows, out_shardings=self._placement(rows, length))

        return self._program(("gather", state.active_B.shape[0], rows, length), build)(state, index_B, keep_B)


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
        key = tuple(batch.tokens_BT.shape) + tuple(batch.targets_BM.shape)
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


def score_program(mesh: Mesh, score):
    """A jitted scoring pass (params, batch) → [B, T]."""
    return jax.jit(score, out_shardings=rules.batch_shardings(mesh, jax.ShapeDtypeStruct((rules.batch_rows_multiple(mesh), 1), jnp.float32)))


def init_program(mesh: Mesh, make, abstract):
    """A jitted initialiser that creates parameters in place on the train mesh."""
    return jax.jit(make, out_shardings=rules.param_shardings(mesh, abstract))


def publish_program(targets: list, dtype: str):
    """The jitted reshard of a list of arrays from the train layout to the layout of all slices (parameters are not donated)."""
    return jax.jit(functools.partial(movement.reshard, dtype=jnp.dtype(dtype)), out_shardings=targets)
