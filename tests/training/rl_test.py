"""One RL step and a few in a row on a tiny policy with scripted rewards: who counts, which tokens carry what, how often is updated, and that it learns."""

import dataclasses
import itertools
import json

import jax
import numpy as np
import pytest

from tlt_jax.objectives.policy_update import VALUE_HEAD
from tlt_jax.rewards.items import PoolSettings, Scorer
from tlt_jax.rewards.pool import RewardPool
from tlt_jax.strategies import Completion, Request
from tlt_jax.tasks.prompts import PromptOrder
from tlt_jax.training import build, rl, rollout_phase
from tlt_jax.training.command_line import load_config
from tlt_jax.training.evaluation import evaluate
from tlt_jax.training.reporting import SilentReporter
from tlt_jax.training.scoring import StepScorer
from tlt_jax.training.session import Session

OPTIONS = {
    "model.scratch.hidden_size": 16, "model.scratch.layers": 1, "model.scratch.heads": 2, "model.scratch.kv_heads": 1, "model.scratch.head_dim": 8,
    "model.scratch.mlp": 16, "model.scratch.alphabet": "0123456789+-*=?#", "data.arithmetic.max_steps": 2, "data.arithmetic.train_size": 30,
    "data.arithmetic.eval_size": 2, "data.max_prompt_tokens": 12, "batch.prompts_per_step": 2, "batch.tokens_per_microbatch": 128,
    "algorithm.num_generations": 4, "rollout.max_new_tokens": 12, "rollout.slots": 4, "rollout.rounds_per_dispatch": 4, "optimizer.lr": 1e-2,
    "optimizer.critic_lr": 1e-2}


class Reporter(SilentReporter):
    """Keeps the samples of every step."""

    def __init__(self):
        self.samples = {}

    def record_samples(self, step, samples, *, kind="train", limit=None):
        self.samples[kind, step] = list(samples)


class Trial:
    """A run without its loop: `step(n)` is one RL step; what went into updates is kept in `updates`, per network."""

    def __init__(self, tmp_path, reward, **options):
        values = OPTIONS | {name.replace("__", "."): value for name, value in options.items()}
        self.config = load_config([f"--workdir={tmp_path}", *(f"--config.{name}={value}" for name, value in values.items())])[0]
        model = build.open_model(self.config, str(tmp_path))
        task, held_out = build.make_tasks(self.config, model.tokenizer)
        meshes = build.make_meshes(self.config)
        pool = RewardPool(PoolSettings(workers=0, failing_share=1.0), Scorer("callable", {"function": reward}))
        drivers = build.make_drivers(self.config, model.spec, meshes)
        self.reporter = Reporter()
        self.session = Session(self.config, str(tmp_path), model, task, held_out, meshes, drivers, pool, self.reporter)
        params = build.make_params(self.config, model, meshes)
        self.trainer = rl.make_trainer(self.session, params, PromptOrder(len(task.prompts()), 0))
        self.updates = {"policy": [], "critic": []}
        for name in ("policy", "critic"):
            if (learner := getattr(self.trainer, name)) is not None:
                learner.update = self._kept(name, learner.update)

    def _kept(self, name, update):
        def keep(batches):
            stats = update(batches)
            self.updates[name].append((batches, stats))
            return stats

        return keep

    def step(self, number=1):
        return rl.run_step(self.session, self.trainer, number)

    def samples(self, step=1):
        return self.reporter.samples["train", step]

    def params(self, network="policy"):
        return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(getattr(self.trainer, network).params)}

    def sequences(self, network="policy", update=0):
        """What an update saw of each sequence, as (tokens, {field: numbers on the columns of the response}); packing undone by segments and targets."""
        found = []
        for batch in self.updates[network][update][0]:
            for row in range(batch.tokens_BT.shape[0]):
                targets = set(batch.targets_BM[row].tolist())
                for segment in range(1, batch.segments_BT[row].max() + 1):
                    columns = np.flatnonzero(batch.segments_BT[row] == segment)
                    answer = [column for column in columns if column in targets]
                    fields = ("mask_BT", "advantages_BT", "old_logprobs_BT", "rollout_logprobs_BT", "reference_logprobs_BT", "old_values_BT", "returns_BT")
                    numbers = {name.removesuffix("_BT"): getattr(batch, name)[row, answer] for name in fields}
                    found.append((tuple(batch.tokens_BT[row, columns].tolist()), len(columns) - len(answer), numbers))
        return found


@pytest.fixture
def trial(tmp_path, monkeypatch):
    every = jax.devices()
    monkeypatch.setattr(jax, "devices", lambda *_: every[:1])
    limit = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    yield lambda reward, **options: Trial(tmp_path, reward, **options)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", limit)


def script(*groups):
    """A reward that gives the samples of the n-th group that it meets the n-th list, in order."""
    lists, known = iter(groups), {}

    def reward(item):
        if item.prompt not in known:
            known[item.prompt] = iter(next(lists))
        return next(known[item.prompt])

    return reward


def by_digits(item):
    return len(set(item.response)) / 16


def by_prompt(samples, generations=4):
    return [samples[first : first + generations] for first in range(0, len(samples), generations)]


def assert_unchanged(before, after):
    assert [path for path in before if before[path].tobytes() != after[path].tobytes()] == []


def text_of(run, answer):
    ended = answer[-1] in run.session.model.stop_ids
    return run.session.model.tokenizer.decode(answer[:-1] if ended else answer, skip_special_tokens=False)


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_sample_without_a_score_takes_no_part_in_statistics_or_update(trial, algorithm):
    run = trial(script([1, None, 0, 1], [None] * 4), algorithm__name=algorithm)
    metrics = run.step()
    assert metrics["reward/mean"] == pytest.approx(2 / 3) and metrics["reward/unscored"] == 5
    assert metrics["reward/errors"] == 0
    scored, empty = sorted(by_prompt(run.samples()), key=lambda group: group[0].reward is None)
    assert [sample.reward for sample in scored] == [1, None, 0, 1] and all(sample.reward is None for sample in empty)
    if algorithm == "grpo":
        deviation = np.std([1, 0, 1], ddof=1)
        assert [sample.advantage for sample in scored] == pytest.approx([1 / 3 / deviation, 0, -2 / 3 / deviation, 1 / 3 / deviation], rel=1e-4)
        assert [sample.advantage for sample in empty] == [0] * 4
    trained = [numbers["mask"].min() for _, _, numbers in run.sequences()]
    assert sorted(trained) == [0] * 5 + [1] * 3 and all(numbers["mask"].min() == numbers["mask"].max() for _, _, numbers in run.sequences())
    assert all(np.isfinite(value) for value in metrics.values())


def test_groups_of_equal_rewards_or_without_scores_change_no_parameter(trial):
    run = trial(script([0.35] * 4, [0.2] * 4, [None] * 4, [None] * 4))
    before = run.params()
    for number in (1, 2):
        metrics = run.step(number)
        assert metrics["policy/grad_norm"] == 0 and metrics["policy/skipped_updates"] == 0
        assert metrics["reward/unscored"] == (0, 8)[number - 1]
        assert_unchanged(before, run.params())


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_the_first_update_is_on_policy_and_sampler_and_trainer_agree_at_every_temperature(trial, temperature):
    run = trial(by_digits, rollout__temperature=temperature, algorithm__num_iterations=2)
    run.step()
    first, second = (stats for _, stats in run.updates["policy"])
    assert first["policy/ratio_mean"] == pytest.approx(1, abs=1e-3) and first["policy/clip_fraction"] == 0
    assert second["policy/ratio_mean"] != first["policy/ratio_mean"]
    for _, _, numbers in run.sequences():
        assert np.abs(numbers["old_logprobs"] - numbers["rollout_logprobs"]).max() < 1e-4
        assert (numbers["rollout_logprobs"] < 0).all()


def test_without_a_pass_of_its_own_the_same_step_gives_the_same_update(trial):
    """One update a step takes the log-probs of the update itself as the old ones; a cap that never binds forces the separate pass."""
    run, other = trial(by_digits), trial(by_digits, algorithm__importance_sampling_cap=100.0)
    assert not rl.needs_old_logprobs(run.config) and rl.needs_old_logprobs(other.config)
    for one in (run, other):
        one.step()
    for path, leaf in run.params().items():
        np.testing.assert_allclose(leaf, other.params()[path], atol=2e-5)


def test_the_ids_of_a_cut_prompt_are_the_same_for_rollout_and_loss(trial, monkeypatch):
    asked = []
    roll_out = rollout_phase.roll_out
    monkeypatch.setattr(rollout_phase, "roll_out", lambda drivers, requests, *rest: (asked.extend(requests), roll_out(drivers, requests, *rest)))
    run = trial(by_digits, data__max_prompt_tokens=4, data__over_long="truncate_left")
    run.step()
    assert {len(request.prompt_ids) for request in asked} == {4}
    encoded = run.session.model.tokenizer.encode("=?", add_special_tokens=False)
    assert all(list(request.prompt_ids[-2:]) == encoded for request in asked)
    trained = sorted(tokens[:length] for tokens, length, _ in run.sequences())
    assert trained == sorted(request.prompt_ids for request in asked)


def test_minibatches_and_iterations_are_counted_and_each_update_sees_its_sequences(trial):
    """Also where a micro-batch holds just one sequence of the longest kind; and no reference is kept without a weight of the KL."""
    run = trial(by_digits, batch__sequences_per_minibatch=4, algorithm__num_iterations=3, batch__tokens_per_microbatch=24)
    metrics = run.step()
    assert run.trainer.reference is None and "policy/kl" not in metrics and metrics["policy/grad_norm"] > 0
    assert run.trainer.policy.updates == 6 == rl.updates_per_step(run.config)
    seen = [sorted(tokens for tokens, _, _ in run.sequences(update=update)) for update in range(6)]
    assert [len(tokens) for tokens in seen] == [4] * 6
    assert seen[0] == seen[2] == seen[4] and seen[1] == seen[3] == seen[5] and seen[0] != seen[1]


def completion(index, generations=2):
    request = Request(prompt=index // generations, sample=index % generations, draw=0, index=index, prompt_ids=(1,), max_new_tokens=4, seed=0, step=1)
    return Completion(request, (4 + index,), (0.0,), (0.0,), "length", 1, 1)


@pytest.mark.parametrize("arrival", list(itertools.permutations(range(4)))[::5])
def test_completions_and_scores_stand_in_the_order_of_prompt_and_sample_whatever_finishes_first(trial, arrival):
    run = trial(lambda item: float(item.response_ids[0]))
    scorer = StepScorer(run.session.pool, run.session.model.tokenizer, run.session.task.prompts()[:2], 2, 1)
    for index in arrival:
        scorer.add(completion(index))
        scorer.poll()
    scorer.finish()
    assert [one.token_ids[0] for one in scorer.completions] == [score.score for score in scorer.scores] == [4, 5, 6, 7]


@pytest.mark.parametrize("critic", ["separate", "shared"])
def test_the_reward_falls_on_the_last_token_and_returns_lead_up_to_it(trial, critic):
    run = trial(by_digits, algorithm__name="ppo", algorithm__critic=critic, algorithm__gamma=0.5, algorithm__num_generations=8)
    run.step()
    rewards = {sample.response: sample.reward for sample in run.samples()}
    assert {sample.finish_reason for sample in run.samples()} == {"length", "stop"}
    for tokens, length, numbers in run.sequences("critic" if critic == "separate" else "policy"):
        answer = tokens[length:]
        reward = rewards[text_of(run, answer)]
        np.testing.assert_allclose(numbers["returns"], reward * 0.5 ** np.arange(len(answer) - 1, -1, -1), rtol=1e-5)
        assert (numbers["old_values"] == 0).all()  # the head starts at 0
        expected = [sum((0.5 * 0.95) ** (place - start) * (reward if place == len(answer) - 1 else 0) for place in range(start, len(answer)))
                    for start in range(len(answer))]
        np.testing.assert_allclose(numbers["advantages"], expected, rtol=1e-5)


def test_the_first_steps_train_the_critic_alone_and_old_values_are_those_before_the_update(trial):
    run = trial(by_digits, algorithm__name="ppo", algorithm__critic_warmup_steps=1)
    before, critic = run.params(), run.params("critic")
    metrics = run.step(1)
    assert_unchanged(before, run.params())
    assert any(critic[path].tobytes() != leaf.tobytes() for path, leaf in run.params("critic").items())
    assert metrics["value/loss"] > 0 and "policy/loss" not in metrics
    run.step(2)
    assert any(before[path].tobytes() != leaf.tobytes() for path, leaf in run.params().items())
    values = np.concatenate([numbers["old_values"] for _, _, numbers in run.sequences("critic", update=1)])
    assert np.unique(values).size > 10
    assert run.updates["critic"][1][1]["value/mean"] == pytest.approx(values.mean(), rel=1e-4)
    rewards = {sample.response: sample.reward for sample in run.samples(2)}
    for tokens, length, numbers in run.sequences("policy"):
        advantage, later, expected = 0.0, 0.0, []
        for place, value in list(enumerate(numbers["old_values"]))[::-1]:
            reward = rewards[text_of(run, tokens[length:])] if place == len(numbers["old_values"]) - 1 else 0.0
            advantage, later = reward + later - value + 0.95 * advantage, value
            expected.insert(0, advantage)
        np.testing.assert_allclose(numbers["advantages"], expected, rtol=1e-4, atol=1e-6)


def moved(reference):
    return jax.tree.map(lambda leaf: leaf * 1.5, reference)


def test_the_kl_in_the_reward_lowers_rewards_and_the_kl_in_the_loss_does_not(trial):
    runs = {place: trial(by_digits, algorithm__beta=0.5, algorithm__kl_placement=place, algorithm__scale_rewards=False) for place in ("reward", "loss")}
    for run in runs.values():
        run.trainer.reference = moved(run.trainer.reference)
    references = [jax.tree.map(np.asarray, run.trainer.reference) for run in runs.values()]
    metrics = {place: run.step() for place, run in runs.items()}
    for run, before in zip(runs.values(), references, strict=True):
        jax.tree.map(np.testing.assert_array_equal, before, run.trainer.reference)
    assert metrics["reward"]["policy/kl"] == pytest.approx(metrics["loss"]["policy/kl"], rel=1e-3)
    assert metrics["reward"]["policy/kl"] > 1e-4
    assert metrics["reward"]["policy/total_loss"] == pytest.approx(metrics["reward"]["policy/loss"], abs=1e-6)
    assert metrics["loss"]["policy/total_loss"] == pytest.approx(metrics["loss"]["policy/loss"] + 0.5 * metrics["loss"]["policy/kl"], rel=1e-3)
    for place, run in runs.items():
        samples, sequences = run.samples(), run.sequences()
        answers = {}
        for tokens, length, numbers in sequences:
            ratio = numbers["reference_logprobs"] - numbers["old_logprobs"] if place == "reward" else np.zeros(1)
            answers[tokens[length:]] = (np.exp(ratio) - 1 - ratio).sum(), numbers["advantages"]
        for group in by_prompt(samples):
            kept = [next(value for answer, value in answers.items() if text_of(run, answer) == sample.response) for sample in group]
            penalised = np.array([sample.reward - 0.5 * kl for sample, (kl, _) in zip(group, kept, strict=True)])
            for sample, expected, (_, advantages) in zip(group, penalised - penalised.mean(), kept, strict=True):
                assert sample.advantage == pytest.approx(expected, abs=1e-4) and advantages == pytest.approx(expected, abs=1e-4)


def test_errors_are_counted_by_the_step_and_their_samples_left_out(trial):
    def reward(item):
        if item.step == 1 and item.response.count("1"):
            raise KeyError("one")
        return by_digits(item)

    run = trial(reward)
    first, second = run.step(1), run.step(2)
    assert first["reward/errors"] == first["reward/unscored"] > 0
    assert (second["reward/errors"], second["reward/unscored"]) == (0, 0)


def test_evaluation_with_a_value_head_on_the_policy_publishes_the_policy_alone(trial):
    run = trial(by_digits, algorithm__name="ppo", algorithm__critic="shared")
    assert VALUE_HEAD in run.trainer.policy.params
    assert evaluate(run.session, run.trainer.policy.params, 0)["reward/heldout_mean"] > 0
    assert run.session.policy_version == 1
    assert all(VALUE_HEAD not in view for view in run.session.publish(run.trainer.policy.params))


def test_a_second_step_of_the_same_shapes_compiles_nothing(trial):
    run = trial(by_digits, algorithm__name="ppo", algorithm__beta=0.1, algorithm__kl_placement="reward", rollout__max_new_tokens=8)
    for number in range(1, 4):
        run.step(number)
    assert run.step(4)["perf/compiles"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("options", [
    {"algorithm__name": "grpo"}, {"algorithm__name": "ppo", "algorithm__critic": "shared", "algorithm__whiten_advantages": True}], ids=str)
def test_a_trivial_reward_is_learned_in_twenty_steps(trial, options):
    run = trial(lambda item: item.response.count("7") / 12, batch__prompts_per_step=4, batch__tokens_per_microbatch=512, optimizer__lr=2e-2, **options)
    rewards = [run.step(number)["reward/mean"] for number in range(1, 21)]
    assert np.mean(rewards[:2]) < 0.15
    assert np.mean(rewards[-2:]) > 0.5


def draws_of(run):
    """Counts how often prompts are drawn in a step."""
    counts, draw = [], run.trainer.order.draw
    run.trainer.order.draw = lambda count: counts.append(count) or draw(count)
    return counts


def test_dynamic_sampling_draws_until_the_groups_are_informative_and_keeps_the_surplus_for_the_next_step(trial):
    equal, mixed = [0.5] * 4, [1, 0, 0, 1]
    run = trial(script(equal, mixed, equal, equal, mixed, mixed, mixed, equal), algorithm__dynamic_sampling=True)
    drawn = draws_of(run)
    metrics = run.step(1)
    assert drawn == [2, 2, 2] and (metrics["data/draws"], metrics["data/informative_share"], metrics["data/surplus_groups"]) == (3, 0.5, 1)
    assert len(run.samples()) == 8 and {sample.reward for sample in run.samples()} == {0, 1} and metrics["reward/mean"] == 0.5
    waiting = run.trainer.sampler.surplus
    logprobs = {completion.request.prompt_ids + completion.token_ids: completion.logprobs for completion in waiting.completions}
    metrics = run.step(2)
    assert metrics["data/draws"] == 1 and metrics["data/stale_share"] == 0.5 and metrics["data/surplus_groups"] == 0
    stale = [(tokens, numbers) for tokens, _, numbers in run.sequences(update=1) if tokens in logprobs]
    assert len(stale) >= 4  # the old log-probs of an earlier step's answer are those it was sampled with
    for tokens, numbers in stale:
        np.testing.assert_array_equal(numbers["old_logprobs"], np.float32(logprobs[tokens]))


def test_surplus_groups_are_what_they_were_after_a_checkpoint(trial):
    run = trial(script([1, 0, 0, 1], [0, 0, 0, 0], [0, 1, 1, 1], [0, 0, 0, 1]), algorithm__dynamic_sampling=True)
    run.step(1)
    sampler = run.trainer.sampler
    before, arrays, state = sampler.surplus, sampler.arrays(), json.loads(json.dumps(sampler.state()))
    assert len(before.prompts) == 1
    sampler.surplus = before.groups([])
    sampler.restore(state, arrays)
    again = sampler.surplus
    assert again.prompts == before.prompts and [one.score for one in again.scores] == [one.score for one in before.scores]
    for one, other in zip(again.completions, before.completions, strict=True):
        assert one.token_ids == other.token_ids and one.finish_reason == other.finish_reason
        np.testing.assert_array_equal(np.float32(one.logprobs), np.float32(other.logprobs))
        assert dataclasses.replace(one.request, index=0) == dataclasses.replace(other.request, index=0)


def test_a_step_without_any_informative_group_stops_drawing_and_changes_no_parameter(trial):
    run = trial(lambda item: 0.5, algorithm__dynamic_sampling=True, algorithm__max_draws=2)
    before, drawn = run.params(), draws_of(run)
    metrics = run.step(1)
    assert drawn == [2, 2] and metrics["data/informative_share"] == 0 and metrics["policy/grad_norm"] == 0
    assert_unchanged(before, run.params())


def test_a_prompt_that_is_drawn_twice_in_a_step_gets_other_answers(trial):
    run = trial(lambda item: 0.5, algorithm__dynamic_sampling=True, algorithm__max_draws=2, data__arithmetic__train_size=2)
    run.step(1)
    answers = [sample.response for sample in run.samples() if sample.id.split("/")[0] == run.samples()[0].id.split("/")[0]]
    assert len(answers) == 8 and sorted(answers[:4]) != sorted(answers[4:])


def test_a_reward_of_scope_step_sees_all_answers_together_after_the_last_one(trial, tmp_path):
    ranks = "def score(responses):\n    order = sorted(responses)\n    return [order.index(one) / len(order) for one in responses]\n"
    (tmp_path / "ranks.py").write_text(ranks)
    run = trial(None, reward__scope="step")
    pool = RewardPool(PoolSettings(workers=0), Scorer("user", {"path": str(tmp_path / "ranks.py"), "function": "score"}))
    run.session.pool = pool
    run.step(1)
    order = sorted(sample.response for sample in run.samples())
    assert len(order) == 8 and [sample.reward for sample in run.samples()] == [order.index(sample.response) / 8 for sample in run.samples()]


@pytest.mark.parametrize("placement", ["loss", "reward"])
def test_the_weight_of_the_kl_is_steered_to_its_target_after_every_step(trial, placement):
    kind = "k1" if placement == "reward" else "k3"
    options = dict(algorithm__beta=0.1, algorithm__kl_placement=placement, algorithm__kl_kind=kind, algorithm__kl_horizon=8, optimizer__lr=5e-2)
    run = trial(by_digits, algorithm__kl_target=1e-5, **options)
    weights, batches = [], run.updates["policy"]
    for number in range(1, 4):
        weights.append(run.step(number)["policy/kl_weight"])
    assert weights[0] == 0.1 and weights[1] == pytest.approx(0.08)  # the first step's KL is 0
    assert weights[2] > weights[1] or run.trainer.beta > weights[2]
    if placement == "loss":
        assert [float(step[0][0].beta) for step in batches] == pytest.approx(weights)


@pytest.mark.parametrize("options", [
    {"algorithm__policy_loss": "cispo"}, {"algorithm__name": "reinforce_plus_plus"}, {"algorithm__name": "rloo"},
    {"algorithm__policy_loss": "gspo", "algorithm__loss_agg_mode": "seq-mean-token-mean", "algorithm__epsilon": 3e-4, "algorithm__epsilon_high": 4e-4}],
    ids=str)
def test_every_loss_and_estimator_moves_the_policy_towards_the_reward(trial, options):
    run = trial(lambda item: item.response.count("7") / 12, batch__prompts_per_step=4, batch__tokens_per_microbatch=512, optimizer__lr=3e-2, **options)
    rewards = [run.step(number)["reward/mean"] for number in range(1, 9)]
    assert np.mean(rewards[-2:]) > 2 * np.mean(rewards[:2])
