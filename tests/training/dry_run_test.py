"""The dry run of train: what it prints, its memory figures, and that it refuses a slice that cannot fit."""

import dataclasses
import gc

import jax
import pytest

from tlt_jax import train
from tlt_jax.runtime import programs
from tlt_jax.training import build, dry_run, memory_estimate
from tlt_jax.training.command_line import load_config

SMALL = ["--config.data.arithmetic.train_size=50", "--config.data.arithmetic.eval_size=10", "--config.rollout.max_new_tokens=100"]


def opened(tmp_path, *options):
    config = load_config(["--dry_run", *SMALL, *options])[0]
    return config, build.open_model(config, str(tmp_path)), build.make_meshes(config)


def estimate(tmp_path, *options):
    config, model, meshes = opened(tmp_path, *options)
    return memory_estimate.estimate(config, model.spec, meshes, row_length=128, cache_length=128)


def test_a_dry_run_prints_the_plan_and_compiles_and_writes_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    gc.collect()
    arrays, compiled = len(jax.live_arrays()), programs.compile_counter().count
    assert train.main(["--dry_run", *SMALL, "--config.seed=3", "--config.mesh.train.tensor=2", "--config.mesh.rollout_slices=4"]) == 0
    assert (len(jax.live_arrays()), programs.compile_counter().count) == (arrays, compiled)
    assert not list(tmp_path.iterdir())
    printed = capsys.readouterr().out
    for words in (
        "seed=3   (changed)", "rollout.max_new_tokens=100   (changed)", "train mesh: data=1 x fsdp=4 x tensor=2", "4 rollout slices of data=2 x tensor=1",
        "50 training and 10 held-out prompts of arithmetic", "32 prompts × 8 generations = 256 sequences a step", "kv cache", "cache of 128 positions",
        "row buckets 1, 4, 16, 64", "x 4 slices =", "policy update"):
        assert words in printed, words


def test_parameters_optimizer_and_weights_are_counted_as_they_are_sharded(tmp_path):
    _, model, meshes = opened(tmp_path)
    whole = sum(leaf.size * 4 for leaf in jax.tree.leaves(build.decoder.abstract_params(model.spec)))
    one = estimate(tmp_path, "--config.mesh.train.data=8", "--config.mesh.train.fsdp=1")
    assert one.parameters == whole == one.rollout_weights
    assert one.optimizer == pytest.approx(2 * whole, rel=1e-3)
    assert one.gradients == 2 * whole
    spread = estimate(tmp_path)
    assert whole / 8 <= spread.parameters < whole / 7
    assert spread.rollout_weights == whole
    assert estimate(tmp_path, "--config.precision.rollout=bfloat16").rollout_weights == whole // 2
    assert meshes.train.shape["fsdp"] == 8


def test_the_cache_and_the_activations_grow_with_what_they_hold(tmp_path):
    small, large = estimate(tmp_path, "--config.rollout.slots=16"), estimate(tmp_path, "--config.rollout.slots=64")
    spec = opened(tmp_path)[1].spec
    assert large.kv_row == pytest.approx(2 * spec.num_layers * 128 * spec.num_kv_heads * spec.head_dim * 4, rel=1e-3)
    assert (small.kv_cache, large.kv_cache) == pytest.approx((16 * large.kv_row, 64 * large.kv_row), rel=1e-3)
    assert estimate(tmp_path, "--config.batch.tokens_per_microbatch=16384").activations > 1.8 * large.activations
    assert estimate(tmp_path, "--config.precision.remat=True").activations < 0.5 * large.activations
    assert large.other_networks == 0
    assert estimate(tmp_path, "--config.algorithm.beta=0.1").other_networks == large.parameters
    assert estimate(tmp_path, "--config.algorithm.name=ppo").other_networks == large.parameters + large.optimizer


def test_a_slice_that_cannot_hold_weights_and_one_row_is_refused_with_both_figures(tmp_path, capsys, monkeypatch):
    needed = estimate(tmp_path).smallest_slice
    monkeypatch.setattr(memory_estimate, "device_limit", lambda: needed - 1)
    assert train.main(["--dry_run", *SMALL]) == 2
    printed = capsys.readouterr().out
    assert f"need {needed:,} bytes on each device, and there are {needed - 1:,}" in printed
    monkeypatch.setattr(memory_estimate, "device_limit", lambda: needed)
    assert train.main(["--dry_run", *SMALL]) == 0
    assert "this is more than there is" in capsys.readouterr().out


def test_the_limit_is_that_of_the_smallest_device_and_unknown_when_one_does_not_say(monkeypatch):
    @dataclasses.dataclass
    class Device:
        stats: dict | None

        def memory_stats(self):
            return self.stats

    for devices, limit in (([Device({"bytes_limit": 5}), Device({"bytes_limit": 3})], 3), ([Device({"bytes_limit": 5}), Device(None)], None)):
        monkeypatch.setattr(jax, "local_devices", lambda devices=devices: devices)
        assert memory_estimate.device_limit() == limit


def test_bad_input_is_an_error_as_in_training(tmp_path, capsys):
    assert train.main(["--dry_run", f"--config.model.path={tmp_path / 'nowhere'}"]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert train.main(["--dry_run", "--config.data.task=prompts", "--config.data.path=nowhere.jsonl", "--config.reward.kind=exact"]) == 2
    assert "nowhere.jsonl" in capsys.readouterr().err


def test_the_shapes_are_those_between_the_shortest_and_the_longest_prompt(tmp_path):
    config, model, _ = opened(tmp_path, "--config.rollout.slots=16")
    task = build.make_tasks(config, model.tokenizer)[0]
    prompts = [dataclasses.replace(task.prompts()[0], prompt_ids=(1,) * length) for length in (10, 100, 30)]
    shapes = dry_run.possible_shapes(config, prompts, 2)
    assert shapes == dry_run.Shapes(rows=(1, 4, 16), cache=512, pieces=(3, 40))
