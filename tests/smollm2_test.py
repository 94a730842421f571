"""Real weights: the training passes and the rollout engine on SmolLM2-135M against the reference of another implementation, and against each other."""

import functools
import json

import jax
import numpy as np
import pytest

from tlt_jax.objectives import policy_update
from tlt_jax.runtime import policy_driver
from tlt_jax.runtime.policy_driver import Publisher
from tlt_jax.runtime.programs import score_program
from tlt_jax.tasks.prompts import Prompt
from tlt_jax.training import build
from tlt_jax.training.command_line import load_config
from tlt_jax.training.experience import Packing, Trajectory, pack, unpack
from tlt_jax.training.rollout_phase import Engine, Phase, Weights

pytestmark = pytest.mark.slow


class Opened:
    """The model as train opens it, on one device in float32."""

    def __init__(self, path):
        self.config = load_config([
            "--workdir=unused", f"--config.model.path={path}", "--config.rollout.max_new_tokens=64", "--config.rollout.slots=8",
            "--config.data.max_prompt_tokens=128"])[0]
        self.model = build.open_checkpoint(self.config)
        self.meshes = build.make_meshes(self.config)
        self.params = build.make_params(self.config, self.model, self.meshes)
        self.engine = Engine(self.config, self.model, build.make_drivers(self.config, self.model.spec, self.meshes), 128)
        self.publisher = Publisher(self.meshes, self.params, "float32")

    def roll_out(self, prompts, generations, temperature):
        """Completions in the order (prompt, sample)."""
        done = {}
        weights = Weights(self.publisher.publish(self.params), self.publisher.version)
        given = [Prompt(number, "reference", number, "", tuple(ids), "") for number, ids in enumerate(prompts)]
        self.engine.run(weights, given, Phase("test", generations, temperature, 1), lambda one: done.update({one.request.index: one}))
        return [done[index] for index in range(len(prompts) * generations)]

    def score(self, sequences, temperature):
        """Log-probs of the training pass for (prompt ids, response ids), packed."""
        self.config.rollout.temperature = temperature
        run = build.training_pass(self.config, self.model.spec)
        program = score_program(self.meshes.train, functools.partial(policy_update.score_logprobs, run))
        trajectories = [
            Trajectory(np.array([*prompt, *answer], np.int32), len(prompt), np.zeros(len(answer), np.float32)) for prompt, answer in sequences]
        packed = pack(trajectories, Packing(512, 1, max(len(one.tokens) for one in trajectories)))
        return unpack(packed, policy_driver.score(program, self.meshes.train, self.params, packed.batches), trajectories)


@pytest.fixture(scope="module")
def opened(smollm2_gguf):
    every = jax.devices()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "devices", lambda *_: every[:1])
        yield Opened(smollm2_gguf)


@pytest.fixture(scope="module")
def reference(shared):
    return json.loads((shared / "golden" / "smollm2_reference.json").read_text())["prompts"]


def test_the_training_pass_gives_the_reference_log_probabilities_of_prompts_and_continuations(opened, reference):
    scores = opened.score([(row["prompt_ids"][:1], row["prompt_ids"][1:] + row["token_ids"]) for row in reference], 1.0)
    for row, found in zip(reference, scores, strict=True):
        np.testing.assert_allclose(found, row["prompt_logprobs"] + row["logprobs"], atol=2e-3)


def test_greedy_rollout_is_the_reference_up_to_its_first_near_tie(opened, reference):
    for completion, row in zip(opened.roll_out([row["prompt_ids"] for row in reference], 1, 0.0), reference, strict=True):
        until = next((place for place, margin in enumerate(row["margin"]) if margin < 0.01), len(row["token_ids"]))
        assert until > 0 and list(completion.token_ids[:until]) == row["token_ids"][:until]
        np.testing.assert_allclose(completion.logprobs[:until], row["logprobs"][:until], atol=2e-3)


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_sampler_and_trainer_agree_on_every_token_at_other_temperatures(opened, reference, temperature):
    completions = opened.roll_out([row["prompt_ids"] for row in reference[:2]], 2, temperature)
    assert len({completion.token_ids for completion in completions}) == 4
    scores = opened.score([(completion.request.prompt_ids, completion.token_ids) for completion in completions], temperature)
    difference = np.concatenate([found - np.array(completion.logprobs) for found, completion in zip(scores, completions, strict=True)])
    assert np.abs(difference).mean() < 1e-3
    np.testing.assert_allclose(np.exp(difference), 1, atol=1e-3)
