import logging
import pathlib
import time
import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tlt_jax.checkpoints import step_manifest
from tlt_jax.checkpoints.run_state import RunStateStore, SaveFailed

HOST = {
    "step": 3,
    "prompt_order": {"epoch": 1, "position": 60, "seen": ["gsm8k/1", "gsm8k/7"]},
    "kl_coefficient": 0.1 + 0.2,
    "generator": {"state": 2**127 + 1, "inc": -5},
    "selector": [[1.5, None], [], True],
    "packages": {"jax": jax.__version__},
}


class Counts(typing.NamedTuple):
    skipped: jax.Array
    extra: dict


def _params(value: float) -> dict:
    return {"layers": {"q": jnp.full((4, 8), value, jnp.bfloat16), "norm": jnp.full((8,), value, jnp.float32)}, "embed": jnp.full((16, 8), value, jnp.float32)}


def _state(value: float) -> dict:
    params = _params(value)
    schedule = optax.linear_schedule(0.0, 1e-3, 10)
    transform = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, mask=lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree)))
    optimizer = transform.init(params)
    for _ in range(2):
        _, optimizer = transform.update(jax.tree.map(lambda leaf: leaf * 0.3, params), optimizer, params)
    return {
        "policy": params,
        "optimizer": optimizer,
        "drafter": {"key": jax.random.key_data(jax.random.key(int(value))), "counts": Counts(jnp.int32(value), {}), "ring": (jnp.arange(6), None)},
        "sgd": optax.sgd(1.0).init(params),  # no leaf at all
    }


def _like(tree, sharding=None):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding or leaf.sharding), tree)


def _assert_bit_equal(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert one.dtype == other.dtype
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def _saved(directory, steps=(1, 2), **options) -> RunStateStore:
    store = RunStateStore(directory, **options)
    for step in steps:
        assert store.save(step, _state(step), HOST | {"step": step})
    assert store.wait() is None
    return store


def _on_disk(directory) -> set:
    return {path.name for path in pathlib.Path(directory).iterdir()}


def _next_report(store) -> SaveFailed | None:
    while not store._writer.finished():
        time.sleep(0.01)
    return store.check()


def _fill_the_disk(monkeypatch):
    """From now on every write of the manifest meets a full disk; returns what makes room again."""
    real = step_manifest.write_manifest

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(step_manifest, "write_manifest", full_disk)
    return lambda: monkeypatch.setattr(step_manifest, "write_manifest", real)


def test_a_restored_state_is_bit_equal_with_its_types(tmp_path):
    state = _state(3)
    store = _saved(tmp_path, (3,))
    store.close()
    reopened = RunStateStore(tmp_path)
    arrays, host = reopened.restore(reopened.latest_valid_step(), _like(state))
    _assert_bit_equal(arrays, state)
    assert host == HOST and type(host["generator"]["state"]) is int
    assert arrays["drafter"]["counts"].skipped.dtype == jnp.int32 and type(arrays["optimizer"]) is type(state["optimizer"])


def test_arrays_may_be_donated_while_they_are_written(tmp_path):
    store = RunStateStore(tmp_path)
    start = jnp.arange(1_000_000, dtype=jnp.float32)
    wanted = np.array(start)
    like = _like({"w": start})
    store.save(1, {"policy": {"w": start}}, {})
    overwrite = jax.jit(lambda x: x * 0 - 7, donate_argnums=0)
    after = overwrite(start)
    for _ in range(5):
        after = overwrite(after)
    assert store.wait() is None
    np.testing.assert_array_equal(store.restore_policy_only(1, like)["w"], wanted)


@pytest.mark.parametrize("active_mesh", [False, True])
@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
def test_a_state_saved_on_one_layout_restores_on_another_inside_and_outside_a_mesh(tmp_path, active_mesh, axis_type):
    devices = np.array(jax.devices()[:4])
    kind = jax.sharding.AxisType[axis_type]
    saved_mesh = Mesh(devices.reshape(2, 2), ("fsdp", "tensor"), axis_types=(kind, kind))
    asked_mesh = Mesh(devices[::-1].reshape(4), ("data",), axis_types=(kind,))
    values = {"sharded": np.arange(64, dtype=np.float32).reshape(8, 8), "replicated": np.arange(6, dtype=np.int32)}
    saved = {"sharded": NamedSharding(saved_mesh, P("tensor", "fsdp")), "replicated": NamedSharding(saved_mesh, P())}
    asked = {"sharded": NamedSharding(asked_mesh, P(None, "data")), "replicated": NamedSharding(asked_mesh, P())}
    arrays = jax.device_put(values, saved)
    like = {"policy": {name: jax.ShapeDtypeStruct(values[name].shape, values[name].dtype, sharding=asked[name]) for name in values}}

    def save_and_restore():
        store = RunStateStore(tmp_path)
        store.save(1, {"policy": arrays}, {"count": 5})
        assert store.wait() is None
        return RunStateStore(tmp_path, read_only=True).restore(1, like)

    if active_mesh:
        with jax.set_mesh(saved_mesh):
            restored, host = save_and_restore()
    else:
        restored, host = save_and_restore()
    assert host == {"count": 5}
    for name, array in restored["policy"].items():
        np.testing.assert_array_equal(array, values[name])
        assert array.sharding == asked[name] and array.sharding.mesh.axis_types == (kind,)


@pytest.mark.parametrize("item", ["policy", "optimizer", "drafter", "host", "manifest.json"])
def test_a_step_that_lost_an_item_is_passed_over_by_name_and_refused_when_asked_for(tmp_path, item, caplog):
    _saved(tmp_path).close()
    lost = tmp_path / "2" / item
    lost.rename(tmp_path / "lost")
    store = RunStateStore(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert store.latest_valid_step() == 1
    name = item.removesuffix(".json")
    assert any("step 2" in line and name in line for line in caplog.messages)
    with pytest.raises(ValueError, match=rf"step 2 .*not complete(.|\n)*{name}"):
        store.restore(2, _like(_state(1)))
    arrays, host = store.restore(1, _like(_state(1)))
    _assert_bit_equal(arrays, _state(1))
    assert host["step"] == 1
    assert store.save(2, _state(9), HOST) and store.wait() is None
    assert store.latest_valid_step() == 2
    _assert_bit_equal(store.restore(2, _like(_state(9)))[0], _state(9))


def test_a_cut_array_file_makes_the_step_incomplete(tmp_path):
    store = _saved(tmp_path)
    largest = max((path for path in (tmp_path / "2" / "policy").rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])
    assert store.latest_valid_step() == 1
    with pytest.raises(ValueError, match=largest.name):
        store.describe(2)


def test_a_full_disk_reaches_the_loop_and_the_last_good_step_stays_until_saving_works_again(tmp_path, monkeypatch):
    store = _saved(tmp_path, (5, 10))
    free_space = _fill_the_disk(monkeypatch)
    assert store.save(20, _state(20), HOST)
    failure = _next_report(store)
    assert isinstance(failure, SaveFailed) and failure.step == 20 and "No space left" in str(failure)
    assert store.check() is None
    assert store.latest_valid_step() == 10 and {"5", "10"} <= _on_disk(tmp_path)
    assert store.save(20, _state(20), HOST)
    assert store.save(21, _state(21), HOST)
    assert [store.wait().step, store.wait().step, store.wait()] == [20, 21, None]
    free_space()
    assert store.save(22, _state(22), HOST) and store.wait() is None
    assert store.latest_valid_step() == 22 and _on_disk(tmp_path) == {"10", "22"}
    _assert_bit_equal(store.restore(22, _like(_state(22)))[0], _state(22))


def test_a_write_that_the_operating_system_cuts_is_reported(tmp_path):
    resource = pytest.importorskip("resource")
    store = RunStateStore(tmp_path, async_save=False)
    noise = {"policy": {"w": jax.random.normal(jax.random.key(0), (100_000,))}}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        assert not store.save(1, noise, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "File too large" in str(store.check())
    assert store.latest_valid_step() is None
    assert store.save(1, noise, {}) and store.latest_valid_step() == 1


def test_a_directory_that_cannot_be_written_is_reported_not_raised(tmp_path, monkeypatch):
    store = _saved(tmp_path, (1,))

    def refuse(*_, **__):
        raise OSError(122, "Disk quota exceeded")

    with monkeypatch.context() as patched:
        patched.setattr(store._writer.manager._checkpointer, "save", refuse)
        assert not store.save(2, _state(2), HOST)
    assert "Disk quota" in str(store.check())
    assert store.save(2, _state(2), HOST) and store.wait() is None
    assert store.latest_valid_step() == 2


def test_the_newest_steps_and_the_best_are_kept(tmp_path):
    store = RunStateStore(tmp_path, keep=2, best_metric="reward/mean", async_save=False)
    rewards = {1: 0.1, 2: 0.9, 3: 0.5, 4: float("nan"), 5: None, 6: 0.2}
    for step, reward in rewards.items():
        assert store.save(step, {"policy": _params(step)}, {}, None if reward is None else {"reward/mean": reward, "other": 1.0})
    assert _on_disk(tmp_path) == {"2", "5", "6"}
    store.close()
    reopened = RunStateStore(tmp_path, keep=2, best_metric="reward/mean", async_save=False)
    assert reopened.save(7, {"policy": _params(7)}, {}, {"reward/mean": 0.95})
    assert _on_disk(tmp_path) == {"6", "7"}


def test_a_step_that_this_run_saved_or_resumed_from_is_not_written_twice(tmp_path):
    store = _saved(tmp_path, (1,))
    assert not store.save(1, _state(8), HOST)
    store.close()
    resumed = RunStateStore(tmp_path)
    resumed.restore(1, _like(_state(1)))
    assert not resumed.save(1, _state(8), HOST)
    _assert_bit_equal(resumed.restore(1, _like(_state(1)))[0], _state(1))


def test_going_back_to_an_older_step_gives_up_the_newer_ones_only_when_an_older_one_is_left(tmp_path, caplog):
    _saved(tmp_path, (10, 20)).close()
    fresh = RunStateStore(tmp_path)
    with pytest.raises(ValueError, match="no older one"):
        fresh.save(5, _state(5), HOST)
    assert _on_disk(tmp_path) == {"10", "20"}
    fresh.restore(10, _like(_state(10)))
    with caplog.at_level(logging.WARNING):
        assert fresh.save(15, _state(15), HOST)
    assert fresh.wait() is None and fresh.latest_valid_step() == 15
    assert any("step 20" in line and "deleted" in line for line in caplog.messages)
    assert _on_disk(tmp_path) == {"10", "15"}


def test_every_mismatch_is_listed_in_one_error_that_names_the_leaves(tmp_path):
    store = _saved(tmp_path, (1,))
    like = _like(_state(1))
    del like["policy"]["layers"]["norm"]
    like["policy"]["head"] = like["policy"]["embed"]
    like["policy"]["embed"] = jax.ShapeDtypeStruct((17, 8), jnp.float32, sharding=like["policy"]["embed"].sharding)
    like["policy"]["layers"]["q"] = jax.ShapeDtypeStruct((4, 8), jnp.float32)
    like["critic"] = like.pop("drafter")
    with pytest.raises(ValueError) as error:
        store.restore(1, like)
    for wanted in (
        "policy/layers/norm: saved float32[8], not asked for",
        "policy/head: asked for float32[16, 8], not saved",
        "policy/embed: saved float32[16, 8], asked for float32[17, 8]",
        "policy/layers/q: saved bfloat16[4, 8], asked for float32[4, 8]",
        "policy/layers/q: no sharding was asked for",
        "item 'critic' is asked for, not saved",
        "item 'drafter' is saved, not asked for",
    ):
        assert wanted in str(error.value)


@pytest.mark.parametrize(
    ("arrays", "host", "message"),
    [
        ({"policy": {"a": {"count": 3}}}, {}, "leaf a/count is int"),
        ({"policy": {"key": "typed"}}, {}, "key_data"),
        ({"host": {}}, {}, "reserved"),
        ({}, {"a": {"b": (1, 2)}}, "host.a.b is tuple"),
        ({}, {"a": [np.float32(1)]}, r"host.a\[0\] is float32"),
        ({}, {"a": {1: 2}}, "host.a has the key 1"),
    ],
)
def test_a_value_that_would_not_come_back_as_it_was_is_refused_by_name(tmp_path, arrays, host, message):
    if arrays == {"policy": {"key": "typed"}}:
        arrays = {"policy": {"key": jax.random.key(0)}}
    with pytest.raises((TypeError, ValueError), match=message):
        RunStateStore(tmp_path).save(1, arrays, host)


def test_a_reader_describes_and_reads_one_item_and_never_cleans_up(tmp_path):
    _saved(tmp_path, (1,)).close()
    (tmp_path / "2.orbax-checkpoint-tmp").mkdir()
    reader = RunStateStore(tmp_path, read_only=True)
    assert reader.latest_valid_step() == 1 and (tmp_path / "2.orbax-checkpoint-tmp").exists()
    described = reader.describe(1)
    assert set(described.items) == {"policy", "optimizer", "drafter", "sgd"} and described.host["kl_coefficient"] == 0.1 + 0.2
    leaf = described.items["policy"]["layers/q"]
    assert leaf.shape == (4, 8) and leaf.dtype == jnp.bfloat16
    _assert_bit_equal(reader.restore_policy_only(1, _like(_params(1))), _params(1))
    with pytest.raises(ValueError, match="reading only"):
        reader.save(2, _state(2), HOST)
    with pytest.raises(FileNotFoundError, match=r"no step 7.*\[1\]"):
        reader.describe(7)
    with pytest.raises(FileNotFoundError, match="no run was saved there"):
        RunStateStore(tmp_path / "nowhere", read_only=True)
    writer = RunStateStore(tmp_path, async_save=False)
    assert writer.save(3, {}, {}) and _on_disk(tmp_path) == {"1", "3"}
