"""Features that come with the texts are those that a quantum would have made: through the ring, a checkpoint and other rows the same gradients, and bounded."""

import dataclasses
import json
import types

import jax
import numpy as np
import optax
import pytest

from tests.distillation.draft_losses_test import DRAFTERS, PROMPT, SPEC, params_of, policy, texts, trained
from tlt_jax.decoding.rounds import Ring
from tlt_jax.decoding.sampling import make_sampling
from tlt_jax.distillation.aggregation import State
from tlt_jax.distillation.draft_losses import DraftLoss
from tlt_jax.drafters.feature_drafter import layer_like, policy_head
from tlt_jax.runtime.draft_driver import BorrowedSlice
from tlt_jax.runtime.event_loop import roll_out
from tlt_jax.runtime.programs import SlicePrograms
from tlt_jax.runtime.rollout_driver import Lengths, RolloutDriver, RolloutSettings
from tlt_jax.scheduling.strategy_selector import SelectorSettings
from tlt_jax.sharding.meshes import build_meshes
from tlt_jax.strategies import Completion, Request, Strategy
from tlt_jax.training.draft_texts import POLICIES, DraftTexts
from tlt_jax.training.draft_training import ScoringPass, check_window
from tlt_jax.training.experience import Packing, Trajectory, pack
from tlt_jax.training.settings import default_config

LENGTHS = (9, 12, 7, 10, 8)
PACKING = Packing(tokens_per_microbatch=64, row_multiple=1, row_length=32)
SCORED_AS = Packing(tokens_per_microbatch=20, row_multiple=1, row_length=20)


def answers(step=1):
    """The answers of a step as their rollout hands them over, the last one first."""
    for index, tokens in reversed(list(enumerate(texts(LENGTHS)))):
        prompt, response = (tuple(((part + step) % 24).tolist()) for part in (tokens[:PROMPT], tokens[PROMPT:]))
        request = Request(prompt=index, sample=0, draw=0, index=index, prompt_ids=prompt, max_new_tokens=20, seed=0, step=step)
        zeros = (0.0,) * len(response)
        yield Completion(request, response, zeros, zeros, "length", policy_version=1, forwards=1)


def rolled_out(source, step=1, head=None, said=None):
    """The trajectories of a step in order, after its answers, or those of `said` with what their rounds saw, went into a source."""
    source.start(step, len(LENGTHS), head)
    done = said or [(completion, None) for completion in answers(step)]
    for completion, seen in done:
        source.add(completion, seen if head is not None else None)
    source.end()
    done = sorted((completion for completion, _ in done), key=lambda completion: completion.request.index)
    return [Trajectory(np.array([*one.request.prompt_ids, *one.token_ids], np.int32), PROMPT, np.array(one.logprobs)) for one in done]


@pytest.fixture(scope="module")
def meshes():
    return build_meshes((1, 1, 1), 1, 1)


class Trial:
    """One step of a policy whose head is not its embedding, learned from with features of either source."""

    def __init__(self, name, meshes):
        self.spec = dataclasses.replace(SPEC, tied=False)
        self.drafter = dataclasses.replace(DRAFTERS[name], spec=self.spec, layer_spec=layer_like(self.spec))
        self.config, self.meshes, self.params = default_config(), meshes, params_of(DRAFTERS[name])
        self.policy = policy() | {"head": {"kernel": np.random.default_rng(3).normal(size=(16, 24)).astype(np.float32)}}
        self.optimizer = optax.sgd(1.0)
        self.slice = BorrowedSlice(meshes.slices[0], self.drafter, DraftLoss(0.8, feature_weight=0.3), self.optimizer, self.params)
        session = types.SimpleNamespace(config=self.config, model=types.SimpleNamespace(spec=self.spec), meshes=meshes)
        self.scoring = ScoringPass(session, self.policy, self.drafter, self.params["ids"])

    def source(self, ready=True):
        return DraftTexts(self.config, PACKING, self.scoring.ready if ready else None)

    def decoded(self):
        """(completion, features of its positions but the last) of requests on one slice: two rows decode plainly, the last one speculates."""
        programs = SlicePrograms(self.spec, self.meshes.slices[0], "float32", block=8, drafter=self.drafter, ring=Ring(32, streams=True))
        settings = RolloutSettings(2, 4, 16, selector=SelectorSettings("fixed", (Strategy(2, 2, 3),), max_rows=1))
        driver, done = RolloutDriver(programs, settings, self.params), []
        driver.start(self.policy, 1, make_sampling(0.8, 0, 1.0, 0.0, vocabulary=24), (), Lengths(PROMPT, 24))
        driver.features = {}

        def finish(completion):
            done.append((completion, np.concatenate(driver.features.pop(completion.request.index))))

        requests = [dataclasses.replace(one.request, max_new_tokens=len(one.token_ids) + 8 * (one.request.index == 4)) for one in answers()]
        roll_out([driver], requests, finish)
        assert any(completion.accept_length > 1 for completion, _ in done) and any(completion.accept_length == 1 for completion, _ in done)
        return done

    def scored(self, source, step=1, said=None):
        """A source after the scoring pass of a step."""
        trajectories = rolled_out(source, step, said=said)
        self.scoring.score(source, self.policy, pack(trajectories, SCORED_AS), trajectories)
        return source

    def gradients(self, lesson, serving):
        """What a quantum with learning rate 1 takes from the drafter on a slice that serves a policy."""
        start = jax.device_get(trained(self.params))
        self.slice.lend(serving, State(start, self.optimizer.init(start)))
        self.slice.begin(lesson)
        self.slice.wait()
        return jax.tree.map(np.subtract, start, self.slice.trained().state.params)


def far(one, other):
    """The largest difference between two trees, against the largest value of its leaf."""
    return max(jax.tree.leaves(jax.tree.map(lambda a, b: np.abs(a - b).max() / np.abs(a).max(), one, other)))


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_every_source_of_features_gives_the_same_gradients_for_the_same_weights_and_texts(name, meshes):
    """On a slice, from what was decoded or scored in other rows, lay in the ring and went through a checkpoint."""
    trial = Trial(name, meshes)
    said = trial.decoded()
    recompute, scored, decoded = trial.source(ready=False), trial.scored(trial.source(), said=said), trial.source()
    rolled_out(recompute, said=said)
    rolled_out(decoded, head=policy_head(trial.spec, trial.policy, np.asarray(trial.params["ids"])), said=said)
    gradients = trial.gradients(recompute.next_lesson(), trial.policy)
    assert all(leaf.any() for leaf in jax.tree.leaves(gradients))
    for source in (scored, decoded):
        arrays, described = source.state()
        resumed = trial.source()
        resumed.start(1, len(LENGTHS))
        resumed.restore(arrays, json.loads(json.dumps(described)))
        lesson = resumed.next_lesson()
        assert jax.tree.all(jax.tree.map(lambda one, other: one.tobytes() == other.tobytes(), source.next_lesson(), lesson))
        assert lesson.batch.mask_BT.sum() == 30  # all but the one that is held back
        assert far(gradients, trial.gradients(lesson, trial.policy)) < 1e-4


def test_what_an_older_policy_said_next_is_said_by_its_own_head(meshes):
    """An EAGLE-3 drafter has a head of its own: with features of the older policy, a newer head on the slice is of no account, the lesson's is."""
    trial = Trial("eagle3", meshes)
    lesson = trial.scored(trial.source()).next_lesson()
    moved = trial.policy | {"head": {"kernel": trial.policy["head"]["kernel"] + 1.0 * np.eye(16, 24, dtype=np.float32)}}
    gradients = trial.gradients(lesson, trial.policy)
    assert far(gradients, trial.gradients(lesson, moved)) == 0.0
    assert far(gradients, trial.gradients(lesson._replace(head_DE=lesson.head_DE + 0.1), moved)) > 0.0


@pytest.mark.parametrize(("prompt", "rounds", "needed"), [(33, 4, 33), (8, 12, 36)])
def test_a_ring_too_short_for_a_prompt_or_a_dispatch_is_named_before_a_rollout(prompt, rounds, needed):
    config = default_config()
    config.speculative.update({"method": "eagle", "strategies": "2_1_2"})
    config.rollout.rounds_per_dispatch, config.drafter.catchup_window = rounds, needed
    check_window(types.SimpleNamespace(config=config, longest_prompt=prompt))
    config.drafter.catchup_window = needed - 1
    with pytest.raises(ValueError, match=f"drafter.catchup_window={needed - 1} is too short .* raise it to {needed}"):
        check_window(types.SimpleNamespace(config=config, longest_prompt=prompt))


@pytest.mark.parametrize(("name", "widths"), [("eagle", 1), ("eagle3", 1 + 3)])
def test_the_bound_in_bytes_counts_tokens_features_and_heads(name, widths, meshes):
    trial, heads, room = Trial(name, meshes), POLICIES * 16 * 11 * 4, 4000 * widths
    trial.config.drafter.buffer_bytes = heads
    with pytest.raises(ValueError, match=f"drafter.buffer_bytes={heads} .* raise it"):
        trial.source()
    trial.config.drafter.buffer_bytes = heads + room
    source = trial.source()
    for step in range(1, POLICIES + 3):
        trial.scored(source, step)
        held = source.buffer.draw((0,), 10**9)
        assert source.buffer.bytes == sum(len(one.tokens) for one in held) * 4 * (1 + widths * 16) <= room
        assert sum(head.nbytes for head in source.heads.values()) <= heads
    assert 0 < len(held) < len(LENGTHS) * POLICIES


def test_a_text_is_drawn_once_its_features_are_made_and_only_with_those_of_the_same_policy(meshes):
    trial = Trial("eagle", meshes)
    source = trial.source()
    for step in range(1, POLICIES + 2):
        trajectories = rolled_out(source, step)
        assert step not in {one.step for one in source.buffer.draw((0,), 10**9)}
        assert step > 1 or source.next_lesson() is None
        trial.policy["head"] = {"kernel": trial.policy["head"]["kernel"] + 0.1}
        trial.scoring.score(source, trial.policy, pack(trajectories, SCORED_AS), trajectories)
    assert sorted(source.heads) == sorted({one.step for one in source.buffer.draw((0,), 10**9)}) == list(range(2, POLICIES + 2))
    drawn = set()
    for _ in range(40):
        lesson = source.next_lesson()
        tokens = lesson.batch.tokens_BT[lesson.batch.segments_BT > 0].tolist()
        step = next(step for step, head in source.heads.items() if (lesson.head_DE == head).all())
        texts_of_step = {(*one.request.prompt_ids, *one.token_ids) for one in answers(step)}
        assert sum(len(text) for text in texts_of_step if str(list(text))[1:-1] in str(tokens)) == len(tokens)
        drawn.add(step)
    assert drawn == set(source.heads)


def test_a_run_may_change_the_source_between_two_of_its_processes(meshes):
    """Texts without features wait in the ring until they are too old; features that nobody reads any more are no hindrance."""
    trial = Trial("eagle", meshes)
    without, with_them = trial.source(ready=False), trial.scored(trial.source())
    rolled_out(without)
    to_ready, to_texts = trial.source(), trial.source(ready=False)
    for source, state in ((to_ready, without.state()), (to_texts, with_them.state())):
        source.start(2, len(LENGTHS))
        source.restore(*state)
    assert to_ready.next_lesson() is None and to_texts.next_lesson().head_DE is None
    back = trial.source()
    back.start(2, len(LENGTHS))
    back.restore(*to_texts.state())
    assert (back.next_lesson().head_DE == with_them.heads[1]).all()
