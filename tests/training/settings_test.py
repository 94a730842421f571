"""Declared keys, the rules between them, the mesh shape and the batch equation."""

import pytest

from tlt_jax.training.settings import SettingsError, declared_keys, default_config, read_key
from tlt_jax.training.settings_rules import batch_equation, resolve_mesh, resolve_slices, unknown_key, validate


def changed(**values):
    """The default config with `group__key=value` changes, set without the lock's type check so that bad values get through."""
    config = default_config()
    for name, value in values.items():
        *groups, last = name.split("__")
        target = config
        for group in groups:
            target = target[group]
        target[last] = value
    return config


def problems_of(config, command="train"):
    with pytest.raises(SettingsError) as caught:
        validate(config, command=command)
    return caught.value.problems


def test_the_defaults_are_complete_locked_and_valid():
    config = default_config()
    validate(config)
    for name, key in declared_keys().items():
        assert read_key(config, name) == key.default
        assert key.meaning
    with pytest.raises(AttributeError):
        config.rollout.temprature = 0.7


def test_every_number_has_a_range_or_a_rule_of_its_own():
    free = {name for name, key in declared_keys().items() if type(key.default) in (int, float) and not key.allowed}
    own_rule = {"reward.timeout_seconds", "algorithm.dual_clip", "algorithm.entropy_coef", "mesh.train.data", "mesh.train.fsdp", "mesh.train.tensor"}
    assert free == own_rule


def test_every_default_is_among_its_own_choices():
    assert all(key.default in key.allowed for key in declared_keys().values() if key.allowed and isinstance(key.default, str))


def test_none_and_true_are_no_values_of_a_typed_key():
    problems = problems_of(changed(model__path=None, seed=True))
    assert problems == ["seed must be int, not True", "model.path must be str, not None"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm__num_generations": 1}, "algorithm.num_generations=1 with algorithm.name=grpo"),
        ({"rollout__top_k": 50}, "rollout.top_k=50: truncated sampling"),
        ({"rollout__top_p": 0.9}, "rollout.top_p=0.9: truncated sampling"),
        ({"rollout__min_p": 0.1}, "rollout.min_p=0.1: truncated sampling"),
        ({"rollout__temperature": 0.0}, "rollout.temperature=0 makes"),
        ({"algorithm__beta": 0.1, "algorithm__kl_kind": "k1"}, "algorithm.kl_kind=k1 has no gradient in the loss"),
        ({"algorithm__num_iterations": 0}, "algorithm.num_iterations=0 must be at least 1"),
        ({"algorithm__epsilon": 1.5}, "algorithm.epsilon=1.5 must be between 0 and 1"),
        ({"algorithm__dual_clip": 0.5}, "algorithm.dual_clip=0.5 must be above 1"),
        ({"algorithm__name": "grop"}, "algorithm.name=grop must be one of grpo, dr_grpo, rloo"),
        ({"algorithm__name": "rloo", "algorithm__num_generations": 1}, "algorithm.num_generations=1 with algorithm.name=rloo"),
        ({"algorithm__name": "dr_grpo", "algorithm__scale_rewards": False}, "dr_grpo never divides"),
        ({"algorithm__name": "gae", "algorithm__scale_rewards": False}, "gae has a scale of its own"),
        ({"algorithm__name": "reinforce_plus_plus", "algorithm__whiten_advantages": True}, "reinforce_plus_plus whitens by definition"),
        ({"algorithm__gamma": 0.9}, "algorithm.gamma=0.9 is not read by algorithm.name=grpo"),
        ({"reward__whiten": True}, "reward.whiten=True changes nothing under algorithm.name=grpo"),
        ({"algorithm__dynamic_sampling": True, "algorithm__name": "gae", "algorithm__num_generations": 1}, "algorithm.num_generations=1 gives one"),
        (
            {"algorithm__dynamic_sampling": True, "drafter__features": "old_logprobs", "drafter__quanta_per_step": 1, "speculative__method": "eagle"},
            "algorithm.dynamic_sampling=True scores groups of several",
        ),
        ({"algorithm__policy_loss": "gspo", "algorithm__epsilon": 3e-4, "algorithm__epsilon_high": 4e-4}, "policy_loss=gspo is a mean over sequences"),
        ({"algorithm__policy_loss": "gspo", "algorithm__loss_agg_mode": "seq-mean-token-mean"}, "a clip of 0.28 never binds"),
        ({"algorithm__policy_loss": "cispo", "algorithm__dual_clip": 3.0}, "algorithm.dual_clip is not read by algorithm.policy_loss=cispo"),
        ({"algorithm__policy_loss": "cispo", "algorithm__cispo_cap": 0.0}, "algorithm.cispo_cap=0.0 must be above 0"),
        ({"algorithm__kl_target": 0.1}, "algorithm.kl_target=0.1 steers algorithm.beta, which is 0"),
        ({"reward__kind": "composite"}, "reward.kind=composite needs reward.components"),
        ({"reward__components": ("math=1",)}, "reward.components are not read by reward.kind=task"),
        ({"reward__kind": "composite", "reward__components": ("maths=1",)}, "reward.components: 'maths' is no reward"),
        ({"reward__kind": "composite", "reward__components": ("math",)}, "reward.components: 'math' is not KIND=WEIGHT"),
        ({"reward__kind": "composite", "reward__components": ("math=1", "math=2")}, "reward.components: math stands there twice"),
        ({"reward__kind": "composite", "reward__components": ("speed=1", "math=1")}, "put the verdict first"),
        ({"batch__sequences_per_minibatch": 100}, "nearest that do: 64 and 128"),
        ({"batch__sequences_per_minibatch": 512}, "nearest that do: 256"),
        ({"batch__tokens_per_microbatch": 1000}, "data.max_prompt_tokens + rollout.max_new_tokens = 1024"),
        ({"speculative__method": "cascade"}, "speculative.method=cascade is not built"),
        ({"speculative__strategies": "4_2"}, "strategy '4_2': expected depth_branching_budget"),
        ({"speculative__strategies": "4_2_3"}, "4 levels of 2 candidates have 4 to 14 nodes to verify, not 3"),
        ({"speculative__strategies": "4_1_4,0_1_1"}, "depth, branching and budget are at least 1"),
        ({"speculative__strategies": ""}, "speculative.strategies names no tree"),
        ({"drafter__path": "d"}, "drafter.path is not read by speculative.method=off"),
        ({"drafter__truncated_layers": 2}, "drafter.truncated_layers is not read by speculative.method=off"),
        ({"drafter__quanta_per_step": 2, "speculative__method": "prompt_lookup"}, "has no weights to train"),
        ({"drafter__freeze": True}, "drafter.freeze=True is the control of a drafter that learns"),
        ({"drafter__features": "old_logprobs"}, "drafter.features=old_logprobs is read by a drafter that learns"),
        (
            {"drafter__features": "old_logprobs", "drafter__quanta_per_step": 2, "speculative__method": "eagle"},
            "drafter.features=old_logprobs keeps those of the pass for old log-probs, which this run does not need",
        ),
        ({"rollout__consolidate_tail": True}, "rollout.consolidate_tail=True frees slices for a drafter that learns"),
        ({"drafter__capture_layers": ("1",), "speculative__method": "eagle"}, "drafter.capture_layers is read for a new eagle3 drafter only"),
        ({"drafter__capture_layers": ("3", "1"), "speculative__method": "eagle3"}, "drafter.capture_layers=3,1: layers are whole numbers from 0"),
        ({"drafter__capture_layers": ("low",), "speculative__method": "eagle3"}, "drafter.capture_layers=low: layers are whole numbers from 0"),
        ({"drafter__draft_vocab_size": 8, "speculative__method": "eagle", "drafter__path": "d"}, "a drafter.path brings its own"),
        ({"stages__order": ("pretrain", "rl")}, "stages.order=pretrain is not built"),
        ({"stages__order": ("rl", "sft")}, "each once and in this order"),
        ({"stages__order": ("rl", "rl")}, "each once and in this order"),
        ({"stages__order": ()}, "each once and in this order"),
        ({"data__task": "gsm8k"}, "data.task=gsm8k needs data.path"),
        ({"data__path": "x.jsonl"}, "are not read by data.task=arithmetic"),
        ({"data__task": "reasoning_gym"}, "needs data.reasoning_gym.name"),
        ({"data__reasoning_gym__kwargs": "[1]"}, "must be a JSON object"),
        ({"data__task": "prompts", "data__path": "x"}, "data.task=prompts has no verdict of its own"),
        ({"reward__kind": "user"}, "reward.kind=user needs reward.path"),
        ({"reward__path": "r.py"}, "reward.path is not read by reward.kind=task"),
        ({"mesh__train__data": -1}, "only one axis can be -1"),
        ({"mesh__train__tensor": 0}, "a whole number of at least 1, or -1"),
        ({"model__scratch__kv_heads": 3}, "must divide model.scratch.heads=4"),
        ({"model__scratch__alphabet": "aab"}, "each once"),
        ({"checkpoint__resume": "latest"}, "checkpoint.resume=latest must be"),
        ({"optimizer__lr": float("nan")}, "optimizer.lr=nan must be at least 0"),
        ({"rollout__temperature": float("inf")}, "rollout.temperature=inf must be at least 0"),
        ({"rollout__num_generations": 4}, "read by generate only"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_contradiction_is_named_with_its_keys(changes, message):
    problems = problems_of(changed(**changes))
    assert len(problems) == 1, problems
    assert message in problems[0]


def test_all_problems_come_in_one_message():
    config = changed(algorithm__num_generations=1, rollout__top_k=5, data__task="gsm8k", mesh__train__data=-1)
    assert len(problems_of(config)) == 4


def test_rules_about_updates_do_not_hold_for_generate():
    config = changed(rollout__top_k=50, rollout__temperature=0.0, rollout__num_generations=4)
    validate(config, command="generate")
    assert len(problems_of(config, "train")) == 3


def test_truncation_is_allowed_when_asked_for():
    validate(changed(rollout__top_k=50, rollout__allow_truncation=True))


def test_k1_is_allowed_in_the_reward():
    validate(changed(algorithm__beta=0.1, algorithm__kl_kind="k1", algorithm__kl_placement="reward"))


def test_names_that_are_not_declared_and_names_that_are_missing_are_problems():
    config = default_config().unlock()
    config.rollout.temprature = 1.0
    del config.rollout["slots"]
    assert problems_of(config) == ["rollout.temprature is not a config key; the nearest name is rollout.temperature", "rollout.slots is missing"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rollout.temprature", "the nearest name is rollout.temperature"),
        ("num_iterations", "the nearest name is algorithm.num_iterations"),
        ("optimizer", "is a group of keys"),
        ("rollout.repetition_penalty", "penalties are not built"),
        ("rollout.stop", "stop strings are not built"),
        ("rollout.stop_strings", "stop strings are not built"),
        ("rollout.max_turns", "tools and multi-turn rollouts are not built"),
        ("model.num_experts", "mixture-of-experts models are not built"),
        ("drafter.frozen", "the nearest name is drafter.freeze"),
        ("curriculum.stages", "curricula are not built"),
    ],
)
def test_an_unknown_name_says_what_was_meant_or_what_is_not_built(name, message):
    assert message in unknown_key(name)


@pytest.mark.parametrize(
    ("shape", "resolved"),
    [
        ({"data": -1, "fsdp": 2}, {"data": 4, "fsdp": 2}),
        ({"data": 2, "fsdp": 2, "tensor": 2}, {"data": 2, "fsdp": 2, "tensor": 2}),
        ({"data": 1, "fsdp": -1, "tensor": 1}, {"data": 1, "fsdp": 8, "tensor": 1}),
    ],
)
def test_a_mesh_shape_resolves_to_all_devices(shape, resolved):
    assert resolve_mesh(shape, 8) == resolved


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ({"data": 2, "fsdp": 2}, ("data=2 x fsdp=2", "4 devices", "there are 8")),
        ({"data": 4, "fsdp": 4}, ("data=4 x fsdp=4", "16 devices", "there are 8")),
        ({"data": -1, "fsdp": 3}, ("data=-1 x fsdp=3", "8 devices", "3")),
        ({"data": -1, "fsdp": -1}, ("only one axis can be -1",)),
        ({"data": 2, "fsdp": "a"}, ("fsdp=a", "whole number")),
        ({"data": 0, "fsdp": 8}, ("data=0", "at least 1")),
    ],
)
def test_a_mesh_that_does_not_fit_is_an_error_with_shape_product_and_devices(shape, words):
    with pytest.raises(SettingsError) as caught:
        resolve_mesh(shape, 8)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_rollout_slices_fill_the_devices_or_are_an_error():
    assert [resolve_slices(0, 1, 8), resolve_slices(0, 2, 8), resolve_slices(2, 2, 8), resolve_slices(0, 1, 1)] == [8, 4, 2, 1]
    for slices, tensor in ((3, 1), (0, 3), (8, 2), (0, 16)):
        with pytest.raises(SettingsError, match="must divide the 8 devices"):
            resolve_slices(slices, tensor, 8)


def test_the_batch_equation_names_every_number():
    config = changed(batch__sequences_per_minibatch=64, algorithm__num_iterations=2)
    assert batch_equation(config) == (
        "32 prompts × 8 generations = 256 sequences a step; 4 minibatches of 64 × 2 iterations = 8 updates a step; micro-batches of ≤ 8,192 tokens"
    )
    assert "1 minibatch of 256 × 1 iteration = 1 update a step" in batch_equation(default_config())
