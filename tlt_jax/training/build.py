"""From a config to the parts of a run: model, tokenizer, task, meshes, slices, reward pool. Config words become values here and nowhere else.

Everything that can be wrong with files is found before a device is touched.
"""

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp

from tlt_jax.checkpoints.model_source import ModelSource
from tlt_jax.checkpoints.pretrained import check_tensors, load_policy, read_source
from tlt_jax.checkpoints.run_model import SpecialIds, find_networks, is_workdir, load_network, read_run_model, scratch_source
from tlt_jax.decoding.rounds import Ring
from tlt_jax.models import decoder
from tlt_jax.models.specs import PolicySpec, RopeSpec
from tlt_jax.objectives.losses import LossSettings
from tlt_jax.objectives.policy_update import Pass
from tlt_jax.optimizers import OptimizerSettings
from tlt_jax.rewards.components import parse_components
from tlt_jax.rewards.items import Component, PoolSettings, Scorer
from tlt_jax.runtime.programs import SlicePrograms, init_program
from tlt_jax.runtime.rollout_driver import RolloutDriver, RolloutSettings
from tlt_jax.scheduling.peer_texts import AnswerHistory
from tlt_jax.scheduling.strategy_selector import SelectorSettings
from tlt_jax.sharding.meshes import Meshes, build_meshes
from tlt_jax.strategies import parse_strategies
from tlt_jax.tasks.arithmetic import ArithmeticSettings, ArithmeticTask
from tlt_jax.tasks.character_tokenizer import character_tokenizer
from tlt_jax.tasks.file_task import FileTask
from tlt_jax.tasks.gsm8k import gsm8k_task
from tlt_jax.tasks.prompts import PromptSettings, Task
from tlt_jax.tasks.reasoning_gym_tasks import ReasoningGymTask
from tlt_jax.tasks.tokenizer import Tokenizer, load_tokenizer
from tlt_jax.training.algorithm_rules import shares_trunk
from tlt_jax.training.drafting import load_params, make_drafter
from tlt_jax.training.scoring import TaskScorer
from tlt_jax.training.settings import Config
from tlt_jax.training.settings_rules import resolve_mesh, resolve_slices

CACHE_BLOCK, OTHER_CACHE_BLOCK = {"cpu": 128}, 512  # slots read at a time by cached attention; off the CPU loops are dear and blocks larger
PREFILL_TOKENS, OTHER_PREFILL_TOKENS = {"cpu": 192}, 1024  # enough rows for matrix products to be bound by arithmetic
HELD_OUT_SEED_OFFSET = 1  # generated held-out rows of reasoning_gym use seed + 1


@dataclasses.dataclass(frozen=True)
class Model:
    """What is known of a model before any tensor is read. `source` is None for a model made from scratch, `tokenizer` None where prompts are ids alone."""

    spec: PolicySpec
    source: ModelSource | None
    tokenizer: Tokenizer | None
    stop_ids: tuple[int, ...]

    @property
    def vocabulary(self) -> int:
        """Ids from here on are padding rows of the embedding and never drawn."""
        return self.spec.vocab_size if self.tokenizer is None else min(self.tokenizer.size, self.spec.vocab_size)


def resolve_dtype(config: Config, name: str) -> str:
    """float32 or bfloat16 for `precision.<name>`; auto is float32 on CPU (its bfloat16 products are slow) and bfloat16 elsewhere."""
    word = config.precision[name]
    word = config.model.dtype if word == "auto" else word
    return ("float32" if jax.default_backend() == "cpu" else "bfloat16") if word == "auto" else word


def open_model(config: Config, workdir: str) -> Model:
    """The model of a run: from files, or a new one whose tokenizer is made in the workdir."""
    if config.model.path == "scratch":
        tokenizer = character_tokenizer(config.model.scratch.alphabet, str(pathlib.Path(workdir) / "tokenizer"))
        return Model(_scratch_spec(config, tokenizer.size), None, tokenizer, tokenizer.stop_ids)
    model = open_checkpoint(config)
    if model.tokenizer is None:
        raise ValueError(f"{model.source.path} has no tokenizer files; copy the model's tokenizer.json and tokenizer_config.json beside its weights")
    return model


def open_checkpoint(config: Config) -> Model:
    """Spec, tokenizer (None without its files) and stop ids; checks every tensor's name, shape and file length, and a drafter's, without reading one."""
    spec, source = check_tensors(config.model.path), read_source(config.model.path)
    if spec.head != "policy":
        raise ValueError(f"{source.path} is a {spec.head} model (sequence classification); a causal language model is needed")
    make_drafter(config, spec)
    if source.tokenizer_dir is None:
        return Model(spec, source, None, source.stop_ids)
    tokenizer = load_tokenizer(source.tokenizer_dir, chat_template=config.model.chat_template or None, embedding_rows=spec.vocab_size)
    return Model(spec, source, tokenizer, tuple(sorted({*source.stop_ids, *tokenizer.stop_ids})))


def reward_spec(spec: PolicySpec) -> PolicySpec:
    """A reward model on the trunk of a policy."""
    return dataclasses.replace(spec, head="reward")


def check_reward_model(path: str, policy: PolicySpec) -> PolicySpec:
    """The spec of the reward model that reward.path names, read from headers alone. Raises ValueError for another kind of model, or another vocabulary."""
    if is_workdir(path):
        spec = reward_spec(read_run_model(path)[0])
        find_networks(path, ("reward_model",))
    else:
        spec = check_tensors(path)
    if spec.head != "reward":
        raise ValueError(f"reward.path={path} is a {spec.head} model; a reward model (sequence classification with one label) is needed")
    if spec.vocab_size != policy.vocab_size:
        raise ValueError(
            f"reward.path={path} has a vocabulary of {spec.vocab_size} tokens and the policy one of {policy.vocab_size}: it reads the policy's token ids, so "
            "it has to be trained with the same tokenizer")
    return spec


def load_reward_model(config: Config, mesh: jax.sharding.Mesh) -> tuple[PolicySpec, dict]:
    """Spec and parameters of the model that reward.path names, on the train mesh."""
    load = functools.partial(load_network, config.reward.path, "reward_model") if is_workdir(config.reward.path) else functools.partial(
        load_policy, config.reward.path)
    loaded = load(dtype=config.precision.params, mesh=mesh)
    return loaded.spec, loaded.params


def run_source(config: Config, model: Model, workdir: str) -> ModelSource:
    """The model's source as the run's workdir keeps it: with the chat template in use, and with a config where there was none."""
    tokenizer = model.tokenizer
    if model.source is None:
        ids = SpecialIds(model.stop_ids, tokenizer.pad_id, tokenizer.bos_id)
        return scratch_source(model.spec, str(pathlib.Path(workdir) / "tokenizer"), ids, dtype=config.precision.params)
    return dataclasses.replace(model.source, chat_template=tokenizer.backend.chat_template) if config.model.chat_template else model.source


def _scratch_spec(config: Config, vocabulary: int) -> PolicySpec:
    scratch = config.model.scratch
    return PolicySpec(
        family="llama", vocab_size=vocabulary, hidden_size=scratch.hidden_size, intermediate_size=scratch.mlp, num_layers=scratch.layers,
        num_heads=scratch.heads, num_kv_heads=scratch.kv_heads, head_dim=scratch.head_dim, rope=RopeSpec(kind="default", theta=10000.0), rms_norm_eps=1e-5,
        max_position_embeddings=config.data.max_prompt_tokens + config.rollout.max_new_tokens, tied=True, qkv_bias=False, output_bias=False, mlp_bias=False,
        qk_norm=False, windows=(None,) * scratch.layers)


def make_meshes(config: Config) -> Meshes:
    """Train mesh and slices over all devices."""
    devices = len(jax.devices())
    shape = resolve_mesh(config.mesh.train.to_dict(), devices)
    slices = resolve_slices(config.mesh.rollout_slices, config.mesh.rollout_tensor, devices)
    return build_meshes((shape["data"], shape["fsdp"], shape["tensor"]), slices, config.mesh.rollout_tensor)


def make_params(config: Config, model: Model, meshes: Meshes) -> dict:
    """Initial policy parameters on the train mesh."""
    dtype = config.precision.params
    if model.source is not None:
        return load_policy(config.model.path, dtype=dtype, mesh=meshes.train).params
    return new_params(model.spec, config.seed, dtype, meshes)


def new_params(spec: PolicySpec, seed: int, dtype: str, meshes: Meshes) -> dict:
    """Fresh parameters on the train mesh, the same for every mesh."""

    def make():
        return jax.tree.map(lambda leaf: leaf.astype(dtype), decoder.init_params(spec, jax.random.key(seed)))

    return init_program(meshes.train, make, decoder.abstract_params(spec, dtype))()


def prompt_settings(config: Config, *, limited: bool = True) -> PromptSettings:
    """How rows become prompts; `limited` False leaves the length to the model's own limit."""
    data = config.data
    return PromptSettings(
        max_prompt_tokens=data.max_prompt_tokens if limited else None, over_long=data.over_long, system_prompt=data.system_prompt or None,
        instruction=data.instruction)


def verdict_kind(config: Config) -> str:
    """What the answers of a file are for: the first of a composite reward's components that compares with them, else the reward itself.

    Beside a reward model rows need no answers, as with a user's function.
    """
    if config.reward.kind == "model":
        return "user"
    if config.reward.kind != "composite":
        return config.reward.kind
    kinds = [one.kind for one in parse_components(config.reward.components)]
    return next((kind for kind in kinds if kind in ("math", "exact")), "user")


def make_tasks(config: Config, tokenizer: Tokenizer) -> tuple[Task, Task | None]:
    """The training task and the held-out one (None without held-out rows); reading and checking happens in `prompts()`."""
    data, settings = config.data, prompt_settings(config)
    columns = {name: value for name, value in data.columns.to_dict().items() if value}

    def arithmetic(size: int, split: str):
        problems = ArithmeticSettings(max_steps=data.arithmetic.max_steps, start_max=data.arithmetic.start_max, tail_exponent=data.arithmetic.tail_exponent)
        return ArithmeticTask(tokenizer, size, config.seed, split, problems, settings, data.arithmetic.worked_share)

    def reasoning_gym(seed: int):
        gym = data.reasoning_gym
        return ReasoningGymTask(gym.name, tokenizer, gym.size, seed, json.loads(gym.kwargs), settings)

    def from_file(path: str):
        if data.task == "gsm8k":
            return gsm8k_task(path, tokenizer, settings, columns)
        return FileTask(path, tokenizer, settings, columns, reward_kind=verdict_kind(config))

    if data.task == "arithmetic":
        held_out = arithmetic(data.arithmetic.eval_size, "held_out") if data.arithmetic.eval_size else None
        return arithmetic(data.arithmetic.train_size, "train"), held_out
    if data.task == "reasoning_gym":
        return reasoning_gym(config.seed), reasoning_gym(config.seed + HELD_OUT_SEED_OFFSET)
    return from_file(data.path), from_file(data.eval_path) if data.eval_path else None


def make_scorer(config: Config, task: Task) -> Scorer:
    """How responses are scored, as a picklable value for the reward workers. Raises FileNotFoundError for a user's file that is not there."""
    reward = config.reward
    if reward.kind == "model":
        return _verdict(config, task)
    if reward.kind != "composite":
        return _scorer(config, task, reward.kind, f"{reward.path}:{reward.function}")
    parts = [Component(one.name, one.weight, _scorer(config, task, one.kind, one.argument)) for one in parse_components(reward.components)]
    return Scorer("composite", components=tuple(parts))


def _verdict(config: Config, task: Task) -> Scorer:
    """What says whether an answer is right where a reward model gives the score; where rows have no answers nothing does."""
    if config.data.task != "prompts":
        return _scorer(config, task, "task", "")
    return Scorer("math") if all(prompt.answer for prompt in task.prompts()) else Scorer("callable", {"function": no_verdict})


def no_verdict(item) -> None:
    """For prompts without an answer to compare with."""
    return None


def _scorer(config: Config, task: Task, kind: str, argument: str) -> Scorer:
    kind = task.reward_kind if kind == "task" else kind
    if kind == "task":
        return Scorer("callable", {"function": TaskScorer(task.scorer)})
    if kind == "user":
        path, _, function = argument.rpartition(":")
        if not pathlib.Path(path).expanduser().is_file():
            key = "reward.components" if config.reward.kind == "composite" else "reward.path"
            raise FileNotFoundError(f"{key}={path}: there is no such file")
        return Scorer("user", {"path": path, "function": function})
    parameters = {"speed": {"limit": config.rollout.max_new_tokens}, "format": {"name": argument}}
    return Scorer(kind, parameters.get(kind, {}))


def pool_settings(config: Config) -> PoolSettings:
    """Workers, time limit and what an error does."""
    return PoolSettings(workers=config.reward.workers, time_limit=config.reward.timeout_seconds, on_error=config.reward.on_error)


def make_drivers(config: Config, spec: PolicySpec, meshes: Meshes, *, compile_ahead: bool = False) -> list[RolloutDriver]:
    """One driver for each slice of this process; `compile_ahead` for runs of many rollout phases."""
    rollout, dtype = config.rollout, resolve_dtype(config, "rollout")
    drafter = make_drafter(config, spec)
    params = None if drafter is None else load_params(config, spec, dtype)
    settings = RolloutSettings(
        slots=rollout.slots, rounds_per_dispatch=rollout.rounds_per_dispatch, memory_fraction=rollout.memory_fraction,
        prefill_tokens=prefill_tokens(config), compile_ahead=compile_ahead or config.speculative.selector != "fixed", selector=selector_settings(config),
        max_programs=rollout.max_programs, consolidate=compile_ahead and rollout.consolidate_tail and lends_slices(config, len(meshes.slices)))

    ring = Ring(config.drafter.catchup_window, config.drafter.features == "rollout")
    programs = [SlicePrograms(spec, mesh, dtype, block=cache_block(), drafter=drafter, ring=ring) for mesh in meshes.slices]
    history = AnswerHistory(config.drafter.lookup_history)
    return [RolloutDriver(one, settings, params, history) for one in programs]


def lends_slices(config: Config, slices: int) -> bool:
    """Whether slices without rows are lent to the drafter's training; one slice alone has rows until the rollout is over."""
    return slices > 1 and config.drafter.quanta_per_step > 0 and not config.drafter.freeze


def selector_settings(config: Config) -> SelectorSettings:
    """How slices choose between plain decoding and the strategies; no strategies when there is no drafter."""
    speculative = config.speculative
    strategies = () if speculative.method == "off" else parse_strategies(speculative.strategies)
    return SelectorSettings(
        speculative.selector, strategies, max_rows=speculative.max_rows, patience=speculative.patience, explore_fraction=speculative.explore_fraction,
        seed=config.seed)


def prefill_tokens(config: Config) -> int:
    """Prompt tokens in one forward: the config's, or what suits this backend."""
    return config.rollout.prefill_tokens or PREFILL_TOKENS.get(jax.default_backend(), OTHER_PREFILL_TOKENS)


def cache_block() -> int:
    """Slots of the KV cache that attention reads at a time on this backend."""
    return CACHE_BLOCK.get(jax.default_backend(), OTHER_CACHE_BLOCK)


def training_pass(config: Config, spec: PolicySpec) -> Pass:
    """How training forwards run: the sampling temperature is part of every log-probability."""
    return Pass(spec, temperature=config.rollout.temperature, compute_dtype=resolve_dtype(config, "compute"), remat=config.precision.remat)


def loss_settings(config: Config) -> LossSettings:
    """The losses' view of the config; 0 means off there."""
    algorithm = config.algorithm
    in_loss = algorithm.beta > 0 and algorithm.kl_placement == "loss"
    level, cap = ("sequence" if algorithm.policy_loss == "gspo" else "token"), (algorithm.cispo_cap if algorithm.policy_loss == "cispo" else None)
    return LossSettings(
        epsilon=algorithm.epsilon, epsilon_high=algorithm.epsilon_high, dual_clip=algorithm.dual_clip or None, loss_agg_mode=algorithm.loss_agg_mode,
        max_length=config.rollout.max_new_tokens, entropy_coef=algorithm.entropy_coef, beta=algorithm.beta if in_loss else 0.0,
        kl_kind=algorithm.kl_kind if in_loss else "k3", importance_sampling_cap=algorithm.importance_sampling_cap or None,
        ratio_level=level, cispo_cap=cap, value_clip=algorithm.value_clip or None, value_coef=algorithm.value_coef if shares_trunk(config) else 1.0)


def optimizer_settings(config: Config, lr: float, total: int) -> OptimizerSettings:
    """AdamW settings for `total` updates at peak `lr`."""
    optimizer = config.optimizer
    return OptimizerSettings(
        lr=lr, schedule=optimizer.schedule, warmup=int(optimizer.warmup_ratio * total), total=total, weight_decay=optimizer.weight_decay, b1=optimizer.b1,
        b2=optimizer.b2, grad_clip=optimizer.grad_clip)


def zero_value_head(spec: PolicySpec, dtype: str = "float32") -> dict:
    """A value head that starts at 0: first values are 0 and not noise."""
    return {"kernel": jnp.zeros((spec.hidden_size, 1), dtype)}
