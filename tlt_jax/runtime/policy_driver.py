"""Training of one network on the global mesh: micro-batches in, one optimizer step out; scoring passes; publication to slices."""

import jax
import numpy as np

from tlt_jax.records import PackedBatch
from tlt_jax.runtime.programs import LearnerPrograms, publish_program
from tlt_jax.sharding import movement, rules
from tlt_jax.sharding.meshes import Meshes


class NonFiniteUpdates(RuntimeError):
    """Too many updates in a row were skipped for non-finite gradients."""


class Learner:
    """Parameters and optimizer state of one network, and the count of its updates."""

    rate = "optimizer.lr"  # the config key of its learning rate

    def __init__(self, programs: LearnerPrograms, params, opt_state=None, *, max_skips: int = 5):
        self.programs, self.params, self.max_skips = programs, params, max_skips
        self.opt_state = programs.init(params) if opt_state is None else opt_state
        self.updates = self.skipped = self.skips_in_a_row = 0

    def placed(self, batch: PackedBatch):
        """What the objective reads of a micro-batch of numpy arrays, on the train mesh."""
        return place_batch(self.programs.mesh, batch)

    def update(self, batches: list[PackedBatch]) -> dict[str, float]:
        """One optimizer step over micro-batches (numpy arrays); its statistics as plain numbers. Raises NonFiniteUpdates."""
        totals = self.programs.gradients(self.params, [self.placed(batch) for batch in batches])
        self.params, self.opt_state, stats = self.programs.apply(self.params, self.opt_state, totals)
        numbers = {name: float(value) for name, value in movement.to_host(stats).items()}
        self.updates += 1
        skipped = int(numbers["skipped"])
        self.skipped += skipped
        self.skips_in_a_row = self.skips_in_a_row + 1 if skipped else 0
        if self.skips_in_a_row >= self.max_skips:
            raise NonFiniteUpdates(
                f"{self.skips_in_a_row} updates in a row had non-finite gradients (optimizer.max_skips={self.max_skips}). Lower {self.rate}, or resume from "
                "an earlier checkpoint with checkpoint.resume=STEP.")
        return numbers


def place_batch(mesh, batch: PackedBatch) -> PackedBatch:
    """A numpy batch on the train mesh, rows over the data-like axes."""
    return movement.to_device(batch, rules.batch_shardings(mesh, batch))


def score(program, mesh, params, batches: list[PackedBatch]) -> list[np.ndarray]:
    """The [B, T] result of a scoring pass for each micro-batch, on the host."""
    pending = [program(params, place_batch(mesh, batch)) for batch in batches]
    return [np.asarray(array) for array in movement.to_host(pending)]


class Publisher:
    """Weights to the slices: one reshard of what does not lie there already, then a view for every local slice; versions count up."""

    def __init__(self, meshes: Meshes, params, dtype: str):
        self.meshes, self.version = meshes, 0
        leaves, self._tree = jax.tree.flatten(params)
        self._targets = jax.tree.leaves(movement.publish_shardings(meshes, params))
        self._stays = [movement.lies_there(leaf, target, dtype) for leaf, target in zip(leaves, self._targets, strict=True)]
        self._program = publish_program([target for target, stays in zip(self._targets, self._stays, strict=True) if not stays], dtype)

    def publish(self, params) -> list:
        """One parameter tree per local slice, all of the next version."""
        leaves = jax.tree.leaves(params)
        moved = iter(self._program([leaf for leaf, stays in zip(leaves, self._stays, strict=True) if not stays]))
        layout = zip(leaves, self._targets, self._stays, strict=True)
        published = jax.tree.unflatten(self._tree, [movement.relabel(leaf, target) if stays else next(moved) for leaf, target, stays in layout])
        self.version += 1
        return [movement.wrap_for_slice(published, mesh) for mesh in self.meshes.slices]
