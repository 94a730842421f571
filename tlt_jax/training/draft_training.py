"""The drafter of an RL run learns: at the end of each step it is trained on the step's texts with the updated policy's features, measured on texts held
back, and handed to the slices unless it got worse. The policy's arrays are read only; the drafter changes no token, only how soon it comes.
"""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from tlt_jax.distillation.draft_losses import DraftLoss
from tlt_jax.distillation.pairs import DraftBatch
from tlt_jax.objectives.policy_update import without_value_head
from tlt_jax.optimizers import OptimizerSettings, make_optimizer
from tlt_jax.records import PackedBatch
from tlt_jax.runtime.draft_driver import DraftLearner, Teacher
from tlt_jax.runtime.programs import frozen_program, new_drafter
from tlt_jax.sharding import movement
from tlt_jax.sharding.rules import batch_rows_multiple
from tlt_jax.training.drafting import load_params
from tlt_jax.training.experience import Packing, Trajectory, pack, packing_for
from tlt_jax.training.session import Session
from tlt_jax.training.settings import Config

WARMUP_SHARE = 0.05
WORSE = 0.005  # of 1 - TV, beyond which a trained drafter is not served
MEASURE = "drafter/acceptance_0"


@dataclasses.dataclass
class DraftCounts:
    """Plain values of a checkpoint, over the whole run."""

    version: int = 0  # of the drafter that is served; 0 = as it was made or read
    quanta: int = 0
    rolled_back: int = 0


class DraftTraining:
    """The learner of a run's drafter, its teacher, and the way to the slices."""

    def __init__(self, session: Session, policy: dict):
        """Every slice serves the drafter of this learner from now on. `policy`: its parameters on the train mesh."""
        config, mesh = session.config, session.meshes.train
        self.config, self.drivers = config, session.drivers
        drafter = self.drivers[0].programs.drafter
        params = load_params(config, session.model.spec, "float32") or new_drafter(drafter, without_value_head(policy), config.seed)
        self._freeze = frozen_program(drafter)
        optimizer = draft_optimizer(config, "constant", config.stages.rl.steps * config.drafter.quanta_per_step)
        self.learner = DraftLearner(mesh, drafter, draft_loss(config), optimizer, params, None)
        self.learner.max_skips = config.optimizer.max_skips
        self.teacher, self.packing, self.counts = Teacher(mesh, drafter, None), draft_packing(session), DraftCounts()
        self.serve()

    def serve(self) -> None:
        """Hand the weights to the slices: the next phase starts with them, in programs that are compiled already."""
        params = movement.to_host(self.learner.drafter_params)
        for driver in self.drivers:
            driver.drafter_params = params

    def run(self, policy: dict, trajectories: Sequence[Trajectory], step: int) -> dict[str, float]:
        """Train for `drafter.quanta_per_step` updates on texts of the step, publish or roll back; the drafter/ metrics on texts held back.

        The texts come in an order of (seed, step). Those of the first batch are held back; when there is no other batch it is trained on too.
        """
        self.teacher.params, before = without_value_head(policy), self.learner.params
        self.learner.frozen = self._freeze(self.teacher.params, self.learner.ids)
        order = np.random.default_rng((self.config.seed, step)).permutation(len(trajectories))
        batches = whole_batches([dataclasses.replace(trajectories[index], trained=True) for index in order], self.packing)  # unscored ones, too
        quanta = 0 if self.config.drafter.freeze else self.config.drafter.quanta_per_step
        batches = [self.teacher.fill(batch) for batch in batches[: quanta + 1]]
        held_out, texts = batches[:1], batches[1:] or batches
        measured = self.learner.evaluate(held_out)
        for quantum in range(quanta):
            self.learner.update([texts[quantum % len(texts)]])
        trained = self.learner.evaluate(held_out) if quanta else measured
        self.teacher.params = self.learner.frozen = None  # what the next update replaces is not kept alive
        self.counts.quanta += quanta
        if trained[MEASURE] < measured[MEASURE] - WORSE:
            self.learner.params, trained = before, measured
            self.counts.rolled_back += 1
        elif quanta:
            self.counts.version += 1
            self.serve()
        return trained | {
            "drafter/gain": trained[MEASURE] - measured[MEASURE], "drafter/version": self.counts.version, "drafter/rolled_back": self.counts.rolled_back,
            "drafter/quanta": self.counts.quanta}

    def state(self) -> dict:
        """The counts as plain values."""
        return dataclasses.asdict(self.counts)

    def restore(self, state: dict) -> None:
        """Go on from a checkpoint whose arrays the learner holds already."""
        self.counts = DraftCounts(**state)
        self.serve()


def draft_loss(config: Config) -> DraftLoss:
    """The loss of the config at the rollout temperature."""
    return DraftLoss(config.rollout.temperature, config.distill.unroll, config.distill.decay, config.distill.feature_weight)


def draft_packing(session: Session) -> Packing:
    """The one shape of a quantum's rows, in which any answer of the run fits."""
    config, lengths = session.config, [len(prompt.prompt_ids) for prompt in session.task.prompts()]
    return packing_for(lengths, config.rollout.max_new_tokens, config.distill.tokens_per_update, batch_rows_multiple(session.meshes.train))


def whole_batches(trajectories: list[Trajectory], packing: Packing) -> list[DraftBatch]:
    """The texts packed in rows, features still empty; every batch has all the rows that the budget holds, so that one shape is compiled."""
    rows = packing.tokens_per_microbatch // packing.row_length // packing.row_multiple * packing.row_multiple
    batches = []
    for packed in pack(trajectories, packing).batches:
        padded = jax.tree.map(lambda array: np.pad(array, ((0, rows - len(array)), (0, 0))), packed)
        batches.append(unfilled(padded))
    return batches


def unfilled(packed: PackedBatch) -> DraftBatch:
    """Packed texts whose features are still empty."""
    empty = np.zeros((*packed.tokens_BT.shape, 0), np.float32)
    return DraftBatch(packed.tokens_BT, packed.positions_BT, packed.segments_BT, packed.mask_BT, empty, empty)


def draft_optimizer(config: Config, schedule: str, updates: int):
    """AdamW at distill.lr, warmed up over the first of `updates`."""
    return make_optimizer(OptimizerSettings(lr=config.distill.lr, schedule=schedule, warmup=int(WARMUP_SHARE * updates), total=updates, b2=0.95))
