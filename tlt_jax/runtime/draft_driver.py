"""Distilling the policy into a drafter on the train mesh: the policy's features of packed text once, then updates of the drafter's own weights.

The policy's arrays are read and never donated; its parameters are not in the tree that is trained.
"""

from collections.abc import Sequence

import optax

from tlt_jax.distillation.draft_losses import DraftLoss, draft_objective
from tlt_jax.distillation.pairs import DraftBatch, Frozen
from tlt_jax.drafters.feature_drafter import FeatureDrafter
from tlt_jax.runtime.policy_driver import place_batch
from tlt_jax.runtime.programs import LearnerPrograms, evaluate_program, teach_program
from tlt_jax.sharding import movement


class DraftLearner:
    """A drafter in training: its weights (all but the draft ids) and its optimizer."""

    def __init__(self, mesh, drafter: FeatureDrafter, loss: DraftLoss, optimizer: optax.GradientTransformation, params: dict, frozen: Frozen):
        self.mesh, self.frozen, self.ids = mesh, frozen, params.get("ids")

        def objective(params, data):
            return draft_objective(drafter, loss, params, data)

        trained = {name: leaf for name, leaf in params.items() if name != "ids"}
        self.programs = LearnerPrograms(mesh, objective, optimizer, trained)
        self.trained = movement.to_device(movement.to_host(trained), self.programs.params_placement)
        self.opt_state = self.programs.init(self.trained)
        self._evaluate = evaluate_program(objective)

    @property
    def params(self) -> dict:
        """All parameters of the drafter."""
        return self.trained if self.ids is None else self.trained | {"ids": self.ids}

    def update(self, batches: Sequence[DraftBatch]) -> dict[str, float]:
        """One optimizer step over micro-batches of numpy arrays; its statistics."""
        data = [(self.frozen, place_batch(self.mesh, batch)) for batch in batches]
        totals = self.programs.gradients(self.trained, data)
        self.trained, self.opt_state, stats = self.programs.apply(self.trained, self.opt_state, totals)
        return {name: float(value) for name, value in movement.to_host(stats).items()}

    def evaluate(self, batches: Sequence[DraftBatch]) -> dict[str, float]:
        """The objective's metrics over batches, without an update."""
        totals = None
        for batch in batches:
            _, metrics = self._evaluate(self.trained, (self.frozen, place_batch(self.mesh, batch)))
            totals = metrics if totals is None else {name: totals[name] + metrics[name] for name in metrics}
        return {name: float(movement.to_host(mean.value)) for name, mean in totals.items()}


class Teacher:
    """The policy as the source of features."""

    def __init__(self, mesh, drafter: FeatureDrafter, params: dict):
        self.mesh, self.params = mesh, params
        self._program = teach_program(mesh, drafter.spec, drafter.capture_layers)

    def fill(self, batch: DraftBatch) -> DraftBatch:
        """The batch with the policy's features, on the host."""
        features, final = movement.to_host(self._program(self.params, place_batch(self.mesh, batch)))
        return batch.replace(features_BTF=features, final_BTD=final)

