"""A tiny random policy and the parts of a run around it: meshes, slices, drivers, published weights."""

import dataclasses
import functools
import gc
import itertools

import jax
import numpy as np
import pytest

from tlt_jax.decoding.rounds import Ring
from tlt_jax.decoding.sampling import make_sampling
from tlt_jax.drafters.drafter import Drafter
from tlt_jax.models.decoder import abstract_params
from tlt_jax.models.specs import PolicySpec, RopeSpec
from tlt_jax.runtime.event_loop import roll_out
from tlt_jax.runtime.policy_driver import Publisher
from tlt_jax.runtime.programs import SlicePrograms, new_drafter
from tlt_jax.runtime.rollout_driver import Lengths, RolloutDriver, RolloutSettings
from tlt_jax.sharding import movement, rules
from tlt_jax.sharding.meshes import build_meshes
from tlt_jax.strategies import Request

SPEC = PolicySpec(
    family="qwen2", vocab_size=30, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4, rope=RopeSpec("default", 100.0),
    rms_norm_eps=1e-5, max_position_embeddings=256, tied=True, qkv_bias=True, output_bias=False, mlp_bias=False, qk_norm=False, windows=(None, 20))
VOCABULARY = 28  # two padding rows
SETTINGS = RolloutSettings(slots=4, rounds_per_dispatch=3, prefill_tokens=64)


def random_params(seed: int = 0, spec: PolicySpec = SPEC) -> dict:
    """Weights large enough that the next token depends on the text and no token is certain."""
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: (random.normal(size=leaf.shape) * 0.45).astype(np.float32), abstract_params(spec))


def requests_of(prompts, samples=1, *, max_new=24, step=3) -> list[Request]:
    """`samples` requests of every prompt; index counts them."""
    return [
        Request(
            prompt=1000 + number, sample=sample, draw=0, index=number * samples + sample, prompt_ids=tuple(prompt), max_new_tokens=max_new, seed=11, step=step)
        for number, prompt in enumerate(prompts) for sample in range(samples)]


def random_prompts(count: int = 6, longest: int = 20) -> list[tuple[int, ...]]:
    """Prompts of 1 to `longest` tokens."""
    random = np.random.default_rng(4)
    lengths = [1, longest, *random.integers(1, longest + 1, max(count - 2, 0))][:count]
    return [tuple(random.integers(0, VOCABULARY, length).tolist()) for length in lengths]


@dataclasses.dataclass(frozen=True)
class Layout:
    """`devices` cut into `slices` of `tensor` devices a group, with a drafter or none."""

    devices: int = 1
    slices: int = 1
    tensor: int = 1
    drafter: Drafter | None = None
    ring: int = 512


class Engine:
    """Compiled programs of one layout, kept over the whole session, and the way to run requests on them."""

    def __init__(self, layout: Layout):
        self.meshes = build_meshes((layout.devices, 1, 1), layout.slices, layout.tensor)
        self.programs = [SlicePrograms(SPEC, mesh, "float32", block=16, drafter=layout.drafter, ring=Ring(layout.ring)) for mesh in self.meshes.slices]
        params = random_params()
        self.params = movement.to_device(params, rules.param_shardings(self.meshes.train, params))
        self.publisher = Publisher(self.meshes, self.params, "float32")

    def new_drafter(self):
        """First parameters of the layout's drafter, from the random policy."""
        return new_drafter(self.programs[0].drafter, random_params())

    def drivers(self, settings=SETTINGS, *, drafter_params=None, history=None, **options) -> list[RolloutDriver]:
        """Started drivers with freshly published weights."""
        drivers = [RolloutDriver(programs, settings, drafter_params, history) for programs in self.programs]
        self.start(drivers, **options)
        return drivers

    def start(self, drivers, *, params=None, temperature=1.0, stop_ids=(), length=100, longest_prompt=20, **truncation) -> None:
        """A new phase of drivers, with freshly published weights."""
        views = self.publisher.publish(self.params if params is None else params)
        for driver, view in zip(drivers, views, strict=True):
            sampling = make_sampling(temperature, **truncation, vocabulary=VOCABULARY)
            driver.start(view, self.publisher.version, sampling, stop_ids, Lengths(longest_prompt, length))

    def run(self, requests, settings=SETTINGS, **options) -> dict:
        """{index: Completion}; every request must come back once."""
        done, turns = [], itertools.count()

        def watch() -> None:
            assert next(turns) < 100_000, "a lost row never ends"

        drivers = self.drivers(settings, **options)
        roll_out(drivers, requests, done.append, watch)
        for driver in drivers:
            driver.release()
        assert sorted(completion.request.index for completion in done) == sorted(request.index for request in requests)
        return {completion.request.index: completion for completion in done}


@functools.cache
def engine(layout: Layout) -> Engine:
    return Engine(layout)


@pytest.fixture(scope="session")
def forget_engines():
    """Frees all compiled programs: a process can map about 65,000 pieces of memory, and each program of the CPU backend takes some hundred."""

    def forget():
        engine.cache_clear()
        gc.collect()
        jax.clear_caches()

    return forget


@pytest.fixture(autouse=True, scope="module")
def engines_of_one_module(forget_engines):
    yield
    forget_engines()


@pytest.fixture(scope="session")
def engine_of():
    """engine_of(devices=…, slices=…, tensor=…)."""
    return lambda **layout: engine(Layout(**layout))


@pytest.fixture(scope="session")
def tiny():
    """The spec, random parameters and request makers."""
    return TinyWorld()


@dataclasses.dataclass(frozen=True)
class TinyWorld:
    spec: PolicySpec = SPEC
    vocabulary: int = VOCABULARY
    settings: RolloutSettings = SETTINGS

    def params(self, seed=0, spec=SPEC):
        return random_params(seed, spec)

    def requests(self, *arguments, **options):
        return requests_of(*arguments, **options)

    def prompts(self, *arguments, **options):
        return random_prompts(*arguments, **options)
