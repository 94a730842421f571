"""Distilling the policy into a drafter: on the train mesh, and on a slice that is lent.

The policy's arrays are read and never donated; its parameters are not in the tree that is trained.
"""

import functools
from collections.abc import Sequence

import optax
from jax.sharding import Mesh

from tlt_jax.distillation.aggregation import State, Trained
from tlt_jax.distillation.draft_losses import DraftLoss, draft_objective
from tlt_jax.distillation.pairs import DraftBatch, Frozen, Lesson
from tlt_jax.drafters.feature_drafter import FeatureDrafter
from tlt_jax.runtime.policy_driver import Learner, place_batch
from tlt_jax.runtime.programs import LearnerPrograms, QuantumPrograms, evaluate_program, teach_program
from tlt_jax.sharding import movement, rules

ACCEPTANCE = "drafter/acceptance_0"  # 1 - TV at the first draft level: what decides between two drafters


class DraftLearner(Learner):
    """A drafter in training: its weights without the draft ids, its optimizer, and what it reads of the policy, which may be replaced between updates."""

    rate = "distill.lr"

    def __init__(self, mesh, drafter: FeatureDrafter, loss: DraftLoss, optimizer: optax.GradientTransformation, params: dict, frozen: Frozen | None):
        self.frozen, self.ids = frozen, params.get("ids")

        objective, trained = functools.partial(draft_objective, drafter, loss), without_ids(params)
        programs = LearnerPrograms(mesh, objective, optimizer, trained)
        super().__init__(programs, movement.to_device(movement.to_host(trained), programs.params_placement))
        self._evaluate = evaluate_program(objective)

    def load(self, state: State) -> None:
        """Go on from another state, given as host arrays."""
        self.params = movement.to_device(state.params, self.programs.params_placement)
        self.opt_state = movement.to_device(state.opt_state, self.programs.state_placement)

    def host_state(self) -> State:
        """Copies on the host; collective where the train mesh spans processes."""
        return State(*movement.to_host((self.params, self.opt_state)))

    @property
    def drafter_params(self) -> dict:
        """All parameters of the drafter."""
        return self.params if self.ids is None else self.params | {"ids": self.ids}

    def placed(self, batch: DraftBatch):
        """The frozen part of the policy beside the micro-batch."""
        return self.frozen, super().placed(batch)

    def learn(self, lesson: Lesson, teacher: "Teacher") -> None:
        """One update, on features that the teacher makes where the lesson brings none."""
        if lesson.head_DE is None:
            self.update([teacher.fill(lesson.batch)])
            return
        frozen = self.frozen
        self.frozen = frozen.replace(target_DE=movement.to_device(lesson.head_DE, rules.replicated(self.programs.mesh)))
        self.update([lesson.batch])
        self.frozen = frozen

    def evaluate(self, batches: Sequence[DraftBatch], params: dict | None = None) -> dict[str, float]:
        """The objective's metrics over batches, without an update; of other parameters where `params`, on the train mesh, is given."""
        totals = None
        for batch in batches:
            _, metrics = self._evaluate(self.params if params is None else params, self.placed(batch))
            totals = metrics if totals is None else {name: totals[name] + metrics[name] for name in metrics}
        return {name: float(movement.to_host(mean.value)) for name, mean in totals.items()}


class Teacher:
    """The policy as what makes features."""

    def __init__(self, mesh, drafter: FeatureDrafter, params: dict | None):
        self.mesh, self.params = mesh, params
        self._program = teach_program(mesh, drafter.spec, drafter.capture_layers)

    def fill(self, batch: DraftBatch) -> DraftBatch:
        """The batch with the policy's features, on the host."""
        features, final = movement.to_host(self._program(self.params, place_batch(self.mesh, batch)))
        return batch.replace(features_BTF=features, final_BTD=final)



class BorrowedSlice:
    """A drafter in training on one lent slice, a quantum at a time: an update on one batch of texts, whose features the policy that the slice serves makes
    where the batch comes without.

    Nothing waits for the device but `wait`, `measure` and `trained`.
    """

    def __init__(self, mesh: Mesh, drafter: FeatureDrafter, loss: DraftLoss, optimizer: optax.GradientTransformation, params: dict):
        """`params` of the drafter, on the host: their shapes, and the ids of its tokens."""
        self.programs = QuantumPrograms(mesh, drafter, functools.partial(draft_objective, drafter, loss), optimizer, without_ids(params))
        self._ids = None if "ids" not in params else movement.to_device(params["ids"], rules.replicated(mesh))
        self._running = None  # statistics of the quantum that runs

    def lend(self, policy: dict, state: State, quanta: int = 0) -> None:
        """Begin a loan: the policy as it lies on the slice, and the drafter's state as host arrays, of which `quanta` updates are not in the master yet."""
        self.policy, self.quanta, self.skipped = policy, quanta, 0
        self._params = movement.to_device(state.params, self.programs.params_placement)
        self._opt_state = movement.to_device(state.opt_state, self.programs.state_placement)

    def begin(self, lesson: Lesson) -> None:
        """Start a quantum on numpy arrays."""
        mesh = self.programs.mesh
        head = None if lesson.head_DE is None else movement.to_device(lesson.head_DE, rules.replicated(mesh))
        placed = Lesson(place_batch(mesh, lesson.batch), head)
        self._params, self._opt_state, self._running = self.programs.update(self._params, self._opt_state, self.policy, self._ids, placed)

    @property
    def in_quantum(self) -> bool:
        """Whether a quantum runs."""
        return self._running is not None and not self._running["skipped"].is_ready()

    def wait(self) -> None:
        """Until no quantum runs; counts it, or its update as skipped where the gradient was not finite."""
        if self._running is not None:
            skipped = int(movement.to_host(self._running["skipped"]))
            self.quanta, self.skipped, self._running = self.quanta + 1 - skipped, self.skipped + skipped, None

    def measure(self, params: dict, batch: DraftBatch) -> float:
        """1 - TV at the first draft level over a batch without features, with drafter parameters given as host arrays."""
        placed = movement.to_device(params, self.programs.params_placement)
        metrics = self.programs.measure(placed, self.policy, self._ids, place_batch(self.programs.mesh, batch))
        return float(movement.to_host(metrics[ACCEPTANCE].value))

    def trained(self) -> Trained:
        """What the loan brought, on the host."""
        return Trained(State(*movement.to_host((self._params, self._opt_state))), self.quanta)

    def give_back(self) -> None:
        """The loan is over: the slice's memory is free again."""
        self.policy = self._params = self._opt_state = None


def without_ids(params: dict) -> dict:
    """The trained leaves of a drafter's parameters."""
    return {name: leaf for name, leaf in params.items() if name != "ids"}
