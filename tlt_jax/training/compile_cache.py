"""Where XLA's compiled programs are kept between runs. JAX reads its environment when it is imported, so this comes before that."""

import hashlib
import os
import pathlib
import platform

from tlt_jax.training.settings import Config

VARIABLE = "JAX_COMPILATION_CACHE_DIR"


def keep_programs(config: Config) -> None:
    """Name `compile_cache` to JAX, unless the environment names a directory. Raises OSError when the directory named in the config cannot be made."""
    if VARIABLE in os.environ or not config.compile_cache:
        return
    if config.compile_cache == "auto":
        folder = pathlib.Path.home() / ".cache" / "tlt_jax" / f"programs-{processor()}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:  # a home that cannot be written, as in some containers: nobody asked for the cache
            return
        os.environ[VARIABLE] = str(folder)
        return
    if "://" not in config.compile_cache:
        pathlib.Path(config.compile_cache).mkdir(parents=True, exist_ok=True)
    os.environ[VARIABLE] = config.compile_cache


def processor() -> str:
    """A name of this kind of processor: a home may be shared by machines, and a program for one CPU need not run on another."""
    try:
        described = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:  # not Linux
        described = platform.processor()
    features = next((line for line in described.splitlines() if line.startswith(("flags", "Features"))), described)
    return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:8]}"
