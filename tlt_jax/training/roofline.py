"""What this machine could do at best: how fast it reads memory and multiplies, and the time that a round of decoding cannot fall below.

After the roofline model (Williams, Waterman, Patterson 2009): a round reads every weight once and multiplies it with every token, and takes at least the
longer of the two. Caches, attention, sampling and drafting count as nothing, so that the share of it that a rollout reaches says what all of that costs.
"""

import dataclasses
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from tlt_jax.models.specs import PolicySpec
from tlt_jax.runtime.programs import speed_programs

READ_BYTES = 2**28  # past every cache
MATMUL_WIDTH = 2048
TRIES = 5


@dataclasses.dataclass(frozen=True)
class Machine:
    """One device at its best."""

    bytes_per_second: float
    flops_per_second: float


def measure(dtype: str) -> Machine:
    """The first device: the fastest of a few passes over memory, and of a few matrix products in `dtype`. Takes about a second."""
    programs = speed_programs()
    numbers = jnp.ones((READ_BYTES // 4,), jnp.float32)
    square = jnp.ones((MATMUL_WIDTH, MATMUL_WIDTH), dtype)
    read = min(_fastest(programs.total, numbers), _fastest(programs.negative, numbers) / 2)  # the second one writes as much as it reads
    return Machine(READ_BYTES / read, 2 * MATMUL_WIDTH**3 / _fastest(programs.product, square))


def _fastest(program: Callable, argument) -> float:
    jax.block_until_ready(program(argument))
    seconds = []
    for _ in range(TRIES):
        started = time.monotonic()
        jax.block_until_ready(program(argument))
        seconds.append(time.monotonic() - started)
    return min(seconds)


def decoding_weights(spec: PolicySpec, params: dict) -> tuple[int, int]:
    """(bytes, numbers) that one device reads and multiplies in a round; a lookup in an embedding that is not the head too reads next to nothing."""
    used = params if spec.tied else {name: value for name, value in params.items() if name != "embed"}
    parts = [leaf.addressable_shards[0].data for leaf in jax.tree.leaves(used)]
    return sum(part.nbytes for part in parts), sum(part.size for part in parts)


def least_seconds(machine: Machine, weights: tuple[int, int], tokens: int) -> float:
    """The time below which a round of `tokens` on a device cannot fall."""
    size, numbers = weights
    return max(size / machine.bytes_per_second, 2 * numbers * tokens / machine.flops_per_second)
