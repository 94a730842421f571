"""Settings of the whole suite: eight CPU devices, no implicit rank promotion, a compile cache kept between runs, and the paths of outside files.

The environment is set before jax is imported for the first time, which is why the imports stand below it.
"""

import gc
import importlib.metadata
import os
import pathlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

# For the commands that tests start, too.
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(pathlib.Path(__file__).parents[1] / ".cache" / "jax-tests")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"
# Tiny models compile far longer than they compute: without optimisation, and in old versions with XLA's simple emitters, a third of the time.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
if tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2])) < (0, 11):
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"

import jax
import pytest

ROOT = pathlib.Path(__file__).parents[1]
# Files with few, long tests. They go first, so that at the end of the suite no worker waits for one of them.
LONG = ("drafter_learning", "several_processes", "resume", "speculative_rollout", "speculation_law", "generate", "rl", "distill", "smollm2", "bench")

jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="run the full product of the speculative cases, not only a pairwise-covering set")


def pytest_collection_modifyitems(items):
    names = [f"{name}_test.py" for name in LONG]
    items.sort(key=lambda item: names.index(item.path.name) if item.path.name in names else len(names))


@pytest.fixture(autouse=True, scope="module")
def programs_of_one_module():
    """Frees the compiled programs of a module: a process can map about 65,000 pieces of memory, and a program of the CPU backend takes some hundred."""
    yield
    gc.collect()
    jax.clear_caches()


@pytest.fixture(scope="session")
def shared() -> pathlib.Path:
    """The folder of golden checkpoints and data beside the checkout."""
    path = ROOT.parent / "shared"
    if not path.is_dir():
        pytest.skip("needs the folder of golden files beside the checkout")
    return path


@pytest.fixture(scope="session")
def smollm2_gguf() -> pathlib.Path:
    """The GGUF file of SmolLM2-135M-Instruct that launch/test.sh fetches."""
    path = os.environ.get("SMOLLM2_GGUF", "")
    if not path:
        pytest.skip("needs SMOLLM2_GGUF=FILE, which launch/test.sh sets")
    if not pathlib.Path(path).is_file():
        pytest.fail(f"SMOLLM2_GGUF={path}: there is no such file")
    return pathlib.Path(path)
