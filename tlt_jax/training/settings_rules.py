"""Cross-field rules of the config: what contradicts what, the mesh shape and the batch equation.

Pure Python over a config of settings.py: no jax, no files, no device. Whether a file exists or a model fits is checked where it is opened.
"""

import difflib
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence

from ml_collections import ConfigDict

from tlt_jax.rewards.components import parse_components
from tlt_jax.strategies import parse_strategies
from tlt_jax.training.algorithm_rules import algorithm_problems
from tlt_jax.training.settings import SettingsError, declared_keys, found, read_key
from tlt_jax.training.stage_rules import STAGES, stage_problems

# What people bring from other trainers and is not built here: part of a name -> the feature.
_NOT_BUILT = {
    "penalty": "repetition, presence and frequency penalties",
    "stop": "stop strings",
    "tool": "tools and multi-turn rollouts",
    "turn": "tools and multi-turn rollouts",
    "expert": "mixture-of-experts models",
    "moe": "mixture-of-experts models",
    "image": "vision inputs",
    "vision": "vision inputs",
    "async": "asynchronous RL updates",
    "staleness": "asynchronous RL updates",
    "lora": "LoRA adapters",
}
_NOT_BUILT_WORDS = {
    "speculative.method": ("separable_conv", "cascade"),
}


def validate(config: ConfigDict, *, command: str = "train") -> None:
    """Raises SettingsError that lists every problem of the config at once; rules about data and updates only for the commands that have them."""
    problems = _name_problems(config) or _type_problems(config)
    if not problems:
        problems = _value_problems(config) + _mesh_problems(config) + _speculative_problems(config)
        if command not in ("generate", "export"):
            problems += _data_problems(config, eval_path_is_enough=command == "evaluate", scored=command in ("train", "evaluate"))
        if command == "train":
            problems += _rollout_problems(config) + algorithm_problems(config) + _batch_problems(config) + stage_problems(config)
    if problems:
        raise SettingsError(problems)


def unknown_key(name: str) -> str:
    """The message for a name that is no config key: what it might have meant, or that the feature is not built."""
    names = list(declared_keys())
    inside = [key for key in names if key.startswith(f"{name}.")]
    if inside:
        return f"{name} is a group of keys, not a key; it holds {', '.join(inside)}"
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.92)
    feature = next((feature for word, feature in _NOT_BUILT.items() if re.search(rf"(^|[._]){word}s?($|[._])", name)), None)
    if feature and not close:
        return f"{name} is not a config key: {feature} are not built in this version"
    same_word = [key for key in names if key.rsplit(".", 1)[-1] == name.rsplit(".", 1)[-1]]
    nearest = close or same_word or difflib.get_close_matches(name, names, n=1, cutoff=0.0)
    return f"{name} is not a config key; the nearest name is {' or '.join(nearest)}"


def resolve_mesh(shape: Mapping[str, int], devices: int) -> dict[str, int]:
    """The mesh shape with its one -1 replaced so that the product is the device count: {data: -1, fsdp: 2} on 8 devices is {data: 4, fsdp: 2}.

    Raises SettingsError with the shape, its product and the device count.
    """
    problems = _axis_problems(shape)
    if problems:
        raise SettingsError(problems)
    fixed = math.prod(size for size in shape.values() if size != -1)
    text = " x ".join(f"{name}={size}" for name, size in shape.items())
    if -1 in shape.values() and devices % fixed:
        raise SettingsError([f"mesh {text}: {devices} devices cannot be divided by {fixed}, the product of the fixed axes; change one of them"])
    resolved = {name: devices // fixed if size == -1 else size for name, size in shape.items()}
    product = math.prod(resolved.values())
    if product != devices:
        hint = "set one axis to -1 to use all of them" if product < devices else "lower an axis or set one to -1"
        raise SettingsError([f"mesh {text} is {product} devices, but there are {devices}; {hint}"])
    return resolved


def resolve_slices(slices: int, tensor: int, devices: int) -> int:
    """The number of rollout slices on `devices`: 0 = as many as devices / tensor. Raises SettingsError when the slices would not be equal."""
    number = slices or devices // tensor
    if number == 0 or devices % (number * tensor):
        problem = f"mesh.rollout_slices={slices} x mesh.rollout_tensor={tensor} must divide the {devices} devices"
        raise SettingsError([f"{problem}; lower mesh.rollout_tensor or mesh.rollout_slices (0 = as many as fit)"])
    return number


def copy_with(config: ConfigDict, changes: Mapping[str, object]) -> ConfigDict:
    """A copy of the config with other values at dotted names."""
    copy = ConfigDict(config.to_dict())
    for name, value in changes.items():
        *groups, last = name.split(".")
        group = copy
        for part in groups:
            group = group[part]
        group[last] = value
    return copy.lock()


def batch_equation(config: ConfigDict) -> str:
    """One line that says how prompts become sequences, minibatches and micro-batches of one RL step."""
    prompts, generations = config.batch.prompts_per_step, config.algorithm.num_generations
    sequences = prompts * generations
    size = config.batch.sequences_per_minibatch or sequences
    minibatches = sequences // size
    updates = minibatches * config.algorithm.num_iterations
    return (
        f"{_count(prompts, 'prompt')} × {_count(generations, 'generation')} = {_count(sequences, 'sequence')} a step; "
        f"{_count(minibatches, 'minibatch', 'minibatches')} of {size} × {_count(config.algorithm.num_iterations, 'iteration')} = "
        f"{_count(updates, 'update')} a step; "
        f"micro-batches of ≤ {config.batch.tokens_per_microbatch:,} tokens"
    )


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _name_problems(config) -> list[str]:
    present = set(_flat_names(config.to_dict(), ""))
    declared = declared_keys()
    return [unknown_key(name) for name in sorted(present - set(declared))] + [f"{name} is missing" for name in declared if name not in present]


def _flat_names(values: dict, prefix: str):
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat_names(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _type_problems(config) -> list[str]:
    values = {name: (read_key(config, name), type(key.default)) for name, key in declared_keys().items()}
    return [f"{name} must be {kind.__name__}, not {value!r}" for name, (value, kind) in values.items() if type(value) is not kind]


def _value_problems(config) -> list[str]:
    problems = []
    for name, key in declared_keys().items():
        value = read_key(config, name)
        if not key.allowed:
            continue
        if isinstance(value, str):
            problems += [_choice_problem(name, value, key.allowed)] if value not in key.allowed else []
        elif not key.allowed[0] <= value <= key.allowed[1] or math.isinf(value):
            lowest, highest = key.allowed
            problems.append(f"{name}={value} must be {f'at least {lowest}' if highest == math.inf else f'between {lowest} and {highest}'}")
    stages = config.stages.order
    problems += [_choice_problem("stages.order", stage, STAGES) for stage in stages if stage not in STAGES]
    if not stages or [stage for stage in STAGES if stage in stages] != [stage for stage in stages if stage in STAGES]:
        problems.append(f"stages.order={','.join(stages)} must name at least one of {', '.join(STAGES)}, each once and in this order")
    resume = config.checkpoint.resume
    if resume not in ("auto", "never") and not resume.isdecimal():
        problems.append(f"checkpoint.resume={resume} must be auto, never or the number of a step")
    return problems


def _choice_problem(name: str, value: str, choices: tuple) -> str:
    if value in _NOT_BUILT_WORDS.get(name, ()):
        return f"{name}={value} is not built in this version; built: {', '.join(choices)}"
    return f"{name}={value} must be one of {', '.join(choices)}"


def _data_problems(config, *, eval_path_is_enough: bool, scored: bool) -> list[str]:
    data, reward, scratch = config.data, config.reward, config.model.scratch
    from_file = data.task in ("gsm8k", "prompts")
    has_rows = bool(data.path or (eval_path_is_enough and data.eval_path))
    problems = found(
        (from_file and not has_rows, f"data.task={data.task} needs data.path: a JSONL or parquet file, or a hub dataset id"),
        (not from_file and bool(data.path or data.eval_path), f"data.path and data.eval_path are not read by data.task={data.task}: set data.task=prompts"),
        (data.task == "reasoning_gym" and not data.reasoning_gym.name, "data.task=reasoning_gym needs data.reasoning_gym.name"),
        (not _is_json_object(data.reasoning_gym.kwargs), f"data.reasoning_gym.kwargs={data.reasoning_gym.kwargs} must be a JSON object"),
        (
            scored and data.task == "prompts" and reward.kind == "task",
            "data.task=prompts has no verdict of its own: set reward.kind to math, exact, user, model or composite",
        ),
        (reward.kind == "user" and not reward.path, "reward.kind=user needs reward.path, the Python file of the function"),
        (reward.kind not in ("user", "model") and bool(reward.path), f"reward.path is not read by reward.kind={reward.kind}: set it to user or model"),
        (reward.timeout_seconds <= 0, f"reward.timeout_seconds={reward.timeout_seconds} must be above 0"),
    )
    problems += _composite_problems(reward, data.task)
    if config.model.path == "scratch":
        problems += found(
            (scratch.heads % scratch.kv_heads != 0, f"model.scratch.kv_heads={scratch.kv_heads} must divide model.scratch.heads={scratch.heads}"),
            (scratch.head_dim % 2 != 0, f"model.scratch.head_dim={scratch.head_dim} must be even (rotary embedding)"),
            (len(set(scratch.alphabet)) != len(scratch.alphabet) or not scratch.alphabet, "model.scratch.alphabet must hold characters, each once"),
        )
    return problems


def _composite_problems(reward, task: str) -> list[str]:
    try:
        components = parse_components(reward.components)
    except ValueError as error:
        return [f"reward.components: {error}"]
    return found(
        (reward.kind == "composite" and not components, "reward.kind=composite needs reward.components, like math=1.0,speed=0.1"),
        (reward.kind != "composite" and bool(components), f"reward.components are not read by reward.kind={reward.kind}: set reward.kind=composite"),
        (
            task == "prompts" and any(one.kind == "task" for one in components),
            "reward.components: data.task=prompts has no verdict of its own; use math, exact or your own function instead of task",
        ),
        (
            bool(components) and components[0].kind in ("speed", "diversity", "format"),
            f"reward.components: the first one says whether an answer is right, and {reward.components[:1]} does not; put the verdict first",
        ),
    )


def _is_json_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except json.JSONDecodeError:
        return False


def _axis_problems(shape: Mapping[str, int]) -> list[str]:
    text = ", ".join(f"{name}={size}" for name, size in shape.items())
    return found(
        (list(shape.values()).count(-1) > 1, f"mesh {text}: only one axis can be -1"),
        (any(type(size) is not int or (size < 1 and size != -1) for size in shape.values()), f"mesh {text}: an axis is a whole number of at least 1, or -1"),
    )


def _rising(words: Sequence[str]) -> bool:
    if not all(str(word).isdecimal() for word in words):
        return False
    numbers = [int(word) for word in words]
    return all(low < high for low, high in itertools.pairwise(numbers))


def _mesh_problems(config) -> list[str]:
    return _axis_problems(config.mesh.train.to_dict())


def _speculative_problems(config) -> list[str]:
    method, drafter = config.speculative.method, config.drafter
    try:
        problems = [] if parse_strategies(config.speculative.strategies) else ["speculative.strategies names no tree; speculative.method=off decodes plainly"]
    except ValueError as error:
        problems = [f"speculative.strategies: {error}"]
    return problems + found(
        (bool(drafter.path) and method not in ("eagle", "eagle3"), f"drafter.path is not read by speculative.method={method}: set it to eagle or eagle3"),
        (drafter.truncated_layers > 0 and method != "truncated", f"drafter.truncated_layers is not read by speculative.method={method}: set it to truncated"),
        (
            drafter.draft_vocab_size > 0 and (method not in ("eagle", "eagle3") or bool(drafter.path)),
            "drafter.draft_vocab_size is read for a new eagle or eagle3 drafter only; a drafter.path brings its own",
        ),
        (
            bool(drafter.capture_layers) and (method != "eagle3" or bool(drafter.path)),
            "drafter.capture_layers is read for a new eagle3 drafter only; a drafter.path brings its own",
        ),
        (
            not _rising(drafter.capture_layers),
            f"drafter.capture_layers={','.join(map(str, drafter.capture_layers))}: layers are whole numbers from 0, each larger than the one before",
        ),
        (
            drafter.quanta_per_step > 0 and method not in ("eagle", "eagle3"),
            f"drafter.quanta_per_step: a drafter of speculative.method={method} has no weights to train; set it to eagle or eagle3",
        ),
        (
            config.rollout.consolidate_tail and not drafter.quanta_per_step,
            "rollout.consolidate_tail=True frees slices for a drafter that learns: set drafter.quanta_per_step, too",
        ),
        (drafter.freeze and not drafter.quanta_per_step, "drafter.freeze=True is the control of a drafter that learns: set drafter.quanta_per_step, too"),
        (
            drafter.features != "recompute" and not drafter.quanta_per_step,
            f"drafter.features={drafter.features} is read by a drafter that learns: set drafter.quanta_per_step, too",
        ),
    )


def _rollout_problems(config) -> list[str]:
    rollout = config.rollout
    truncating = {"top_k": rollout.top_k != 0, "top_p": rollout.top_p != 1.0, "min_p": rollout.min_p != 0.0}
    names = ", ".join(f"rollout.{name}={rollout[name]}" for name, on in truncating.items() if on)
    return found(
        (
            bool(names) and not rollout.allow_truncation,
            f"{names}: truncated sampling draws from another law than the one that is trained; turn it off or set rollout.allow_truncation=True",
        ),
        (rollout.top_p == 0.0, "rollout.top_p=0.0 keeps no token; 1 turns it off"),
        (rollout.temperature == 0.0, "rollout.temperature=0 makes all completions of a prompt equal, so nothing is learned; set it above 0"),
        (rollout.num_generations != 1, "rollout.num_generations is read by generate only; train reads algorithm.num_generations"),
    )


def _batch_problems(config) -> list[str]:
    sequences = config.batch.prompts_per_step * config.algorithm.num_generations
    size, longest = config.batch.sequences_per_minibatch, config.data.max_prompt_tokens + config.rollout.max_new_tokens
    return found(
        (
            size > 0 and sequences % size != 0,
            f"batch.sequences_per_minibatch={size} does not divide {config.batch.prompts_per_step} prompts x {config.algorithm.num_generations} generations = "
            f"{sequences} sequences; nearest that do: {' and '.join(map(str, _nearest_divisors(sequences, size)))}",
        ),
        (
            config.batch.tokens_per_microbatch < longest,
            f"batch.tokens_per_microbatch={config.batch.tokens_per_microbatch} cannot hold one sequence: "
            f"data.max_prompt_tokens + rollout.max_new_tokens = {longest} tokens",
        ),
    )


def _nearest_divisors(number: int, wanted: int) -> list[int]:
    divisors = [candidate for candidate in range(1, max(number, 1) + 1) if number >= 1 and number % candidate == 0]
    below, above = [d for d in divisors if d < wanted], [d for d in divisors if d > wanted]
    return below[-1:] + above[:1]
