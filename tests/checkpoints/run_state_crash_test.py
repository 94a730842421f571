import os
import pathlib
import signal
import socket
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tlt_jax.checkpoints.run_state import RunStateStore

ROOT = pathlib.Path(__file__).parents[2]

KILLED = """
    import os, signal, sys
    import jax.numpy as jnp
    from tlt_jax.checkpoints.run_state import RunStateStore

    directory, event, part = sys.argv[1:]
    state = lambda step: {"policy": {"w": jnp.full((64, 64), step, jnp.float32)}, "optimizer": {"count": jnp.int32(step)}}
    store = RunStateStore(directory, keep=2)
    for step in (1, 2, 3):
        assert store.save(step, state(step), {"step": step}) and store.wait() is None
    def kill_at(name, args):
        if name == event and (str(args[1]).endswith(part) if name == "os.rename" else part in str(args[0])):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(kill_at)
    store.save(4, state(4), {"step": 4})
    store.wait()
    sys.exit("the kill point was never reached")
"""

# (moment, audit event, part of its path, newest step afterwards)
KILL_POINTS = [
    ("as the staging directory is made", "os.mkdir", "/4.", 3),
    ("as the metadata of an item is written", "open", "_METADATA", 3),
    ("as the manifest is written", "open", "manifest.json", 3),
    ("just before the commit", "os.rename", "/4", 3),
    ("as the oldest step is being deleted", "os.rmdir", "", 4),
]


@pytest.mark.parametrize(("event", "part", "newest"), [point[1:] for point in KILL_POINTS], ids=[point[0] for point in KILL_POINTS])
def test_a_kill_at_any_point_of_a_save_leaves_a_complete_newest_step(tmp_path, event, part, newest):
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path), event, part]
    killed = subprocess.run(command, env=_environment(1), capture_output=True, text=True, timeout=120)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    store = RunStateStore(tmp_path)
    assert store.latest_valid_step() == newest
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    w, count = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=device), jax.ShapeDtypeStruct((), jnp.int32, sharding=device)
    arrays, host = store.restore(newest, {"policy": {"w": w}, "optimizer": {"count": count}})
    assert host == {"step": newest} and int(arrays["optimizer"]["count"]) == newest
    np.testing.assert_array_equal(arrays["policy"]["w"], np.full((64, 64), newest))
    assert store.save(5, arrays, host) and store.wait() is None
    assert store.latest_valid_step() == 5 and all(path.name.isdigit() for path in tmp_path.iterdir())


def _environment(devices: int) -> dict:
    flags = f"--xla_force_host_platform_device_count={devices}"
    return os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"}


TWO_PROCESSES = """
    import sys
    import jax
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    address, rank, directory = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    jax.distributed.initialize(address, 2, rank)
    import jax.numpy as jnp, numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    from tlt_jax.checkpoints import run_state, step_manifest

    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), P("data"))
    values = np.arange(8, dtype=np.float32)
    state = lambda step: {"policy": {"w": jax.make_array_from_callback((8,), sharding, lambda index: values[index] + step)}}
    store = run_state.RunStateStore(directory, timeout_seconds=2)
    assert store.save(1, state(1), {"step": 1}) and store.wait() is None

    def fail_on_primary(*args):
        raise OSError(28, "No space left on device")
    real_manifest, step_manifest.write_manifest = step_manifest.write_manifest, fail_on_primary
    store.save(2, state(2), {"step": 2})
    failure = store.wait()
    assert failure.step == 2, failure
    step_manifest.write_manifest = real_manifest
    assert store.latest_valid_step() == 1
    assert store.save(2, state(2), {"step": 2}), store.wait()
    failure = store.wait()
    assert failure is None, failure

    if rank == 1:  # what another process sees on its disk must not change the choice
        step_manifest.find_problems = lambda path: ["damaged"]
    assert store.latest_valid_step() == 2
    assert not store.save(2, state(2), {"step": 2})
    step_manifest.find_problems = lambda path: []
    like = {"policy": {"w": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding)}}
    arrays, host = store.restore(2, like)
    mine = arrays["policy"]["w"].addressable_shards
    assert host == {"step": 2} and all(np.array_equal(shard.data, values[shard.index] + 2) for shard in mine)
    store.close()
    print("rank", rank, "done")
"""


@pytest.mark.slow
def test_two_processes_save_fail_and_choose_the_same_step_together(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    command = [sys.executable, "-c", textwrap.dedent(TWO_PROCESSES), address]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([*command, str(rank), str(tmp_path)], env=_environment(2), **pipes) for rank in range(2)]
    try:
        results = [process.communicate(timeout=60) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for rank, (output, errors) in enumerate(results):
        assert f"rank {rank} done" in output, errors[-3000:]
