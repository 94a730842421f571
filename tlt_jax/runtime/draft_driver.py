"""Distilling the policy into a drafter on the train mesh: the policy's features of packed text once, then updates of the drafter's own weights.

The policy's arrays are read and never donated; its parameters are not in the tree that is trained.
"""

from collections.abc import Sequence

import optax

from tlt_jax.distillation.draft_losses import DraftLoss, draft_objective
from tlt_jax.distillation.pairs import DraftBatch, Frozen
from tlt_jax.drafters.feature_drafter import FeatureDrafter
from tlt_jax.runtime.policy_driver import Learner, place_batch
from tlt_jax.runtime.programs import LearnerPrograms, evaluate_program, teach_program
from tlt_jax.sharding import movement


class DraftLearner(Learner):
    """A drafter in training: its weights without the draft ids, its optimizer, and what it reads of the policy, which may be replaced between updates."""

    rate = "distill.lr"

    def __init__(self, mesh, drafter: FeatureDrafter, loss: DraftLoss, optimizer: optax.GradientTransformation, params: dict, frozen: Frozen | None):
        self.frozen, self.ids = frozen, params.get("ids")

        def objective(params, data):
            return draft_objective(drafter, loss, params, data)

        trained = {name: leaf for name, leaf in params.items() if name != "ids"}
        programs = LearnerPrograms(mesh, objective, optimizer, trained)
        super().__init__(programs, movement.to_device(movement.to_host(trained), programs.params_placement))
        self._evaluate = evaluate_program(objective)

    @property
    def drafter_params(self) -> dict:
        """All parameters of the drafter."""
        return self.params if self.ids is None else self.params | {"ids": self.ids}

    def placed(self, batch: DraftBatch):
        """The frozen part of the policy beside the micro-batch."""
        return self.frozen, super().placed(batch)

    def evaluate(self, batches: Sequence[DraftBatch]) -> dict[str, float]:
        """The objective's metrics over batches, without an update."""
        totals = None
        for batch in batches:
            _, metrics = self._evaluate(self.params, self.placed(batch))
            totals = metrics if totals is None else {name: totals[name] + metrics[name] for name in metrics}
        return {name: float(movement.to_host(mean.value)) for name, mean in totals.items()}


class Teacher:
    """The policy as the source of features."""

    def __init__(self, mesh, drafter: FeatureDrafter, params: dict | None):
        self.mesh, self.params = mesh, params
        self._program = teach_program(mesh, drafter.spec, drafter.capture_layers)

    def fill(self, batch: DraftBatch) -> DraftBatch:
        """The batch with the policy's features, on the host."""
        features, final = movement.to_host(self._program(self.params, place_batch(self.mesh, batch)))
        return batch.replace(features_BTF=features, final_BTD=final)

