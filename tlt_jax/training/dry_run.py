"""Says what `train` would do, and does none of it: resolved config, mesh and slices, data, batch equation, memory, programs.

Reads the config, the model's headers and the data, and starts the backend; no array is placed and nothing is compiled. How memory is estimated stands in
`memory_estimate.py`.
"""

import dataclasses
import tempfile
from collections.abc import Mapping, Sequence

import jax

from tlt_jax.decoding.rollout import PREFILL_ROWS
from tlt_jax.models import decoder
from tlt_jax.runtime.rollout_driver import CACHE_BUCKETS, ROW_BUCKETS, Lengths, row_bucket
from tlt_jax.scheduling.batching import length_bucket
from tlt_jax.scheduling.compile_plan import compile_plan
from tlt_jax.sharding.meshes import Meshes
from tlt_jax.sharding.rules import batch_rows_multiple
from tlt_jax.tasks.prompts import Prompt
from tlt_jax.training import build, memory_estimate, run_checks
from tlt_jax.training.algorithm_rules import has_critic, needs_old_logprobs, shares_trunk
from tlt_jax.training.experience import packing_for
from tlt_jax.training.lessons import describe
from tlt_jax.training.memory_estimate import MemoryEstimate
from tlt_jax.training.rollout_phase import longest_prompt
from tlt_jax.training.settings import Config, declared_keys, read_key
from tlt_jax.training.settings_rules import batch_equation

ROW_COUNTS = 8  # rows of a micro-batch come in eighths of the budget
TARGET_WIDTHS = 4  # response columns of a micro-batch come in quarters of a row


@dataclasses.dataclass(frozen=True)
class Shapes:
    """The shapes that a run's lengths lead to: slots of one slice, cache positions of each, pieces of a prompt and tokens of a piece."""

    rows: tuple[int, ...]
    cache: int
    pieces: tuple[int, int]


def run(config: Config) -> int:
    """Print the plan; 0, or 2 when a slice cannot hold the weights and one row. Raises what opening model and data raises."""
    with tempfile.TemporaryDirectory() as scratch:
        model = build.open_model(config, scratch)
        task, held_out = build.make_tasks(config, model.tokenizer)
        prompts = [*task.prompts(), *(held_out.prompts() if held_out is not None else ())]
        lessons = run_checks.check_data(config, model, task, held_out)
    meshes = build.make_meshes(config)
    shapes = possible_shapes(config, prompts, len(meshes.slices))
    lengths = [len(prompt.prompt_ids) for prompt in prompts]
    packing = packing_for(lengths, config.rollout.max_new_tokens, config.batch.tokens_per_microbatch, batch_rows_multiple(meshes.train))
    rows = {stage: one.packing(config, packing.row_multiple).row_length for stage, one in lessons.items()}
    rows |= {"rl": packing.row_length} if "rl" in config.stages.order else {}
    memory = memory_estimate.estimate(config, model.spec, meshes, row_length=max(rows.values()), cache_length=shapes.cache)
    limit = memory_estimate.device_limit()
    data = f"{len(task.prompts())} training and {len(held_out.prompts()) if held_out is not None else 0} held-out prompts of {task.name}"
    sections = (
        ("config", config_lines(config)),
        ("devices", device_lines(config, meshes)),
        ("model and data", [
            f"{model.spec.family}, {_count_parameters(model):,} parameters, {model.spec.num_layers} layers, {model.spec.vocab_size} tokens, stop ids "
            f"{', '.join(map(str, model.stop_ids))}", f"{data}, {min(lengths)} to {max(lengths)} tokens",
            *(describe(config, stage, one) for stage, one in lessons.items())]),
        ("batch", [batch_equation(config)] if "rl" in config.stages.order else ["no RL stage"]),
        ("memory of one device, in MiB (estimate)", memory_lines(memory, limit)),
        ("programs (at most)", program_lines(config, shapes, rows, len(meshes.slices))))
    for title, lines in sections:
        print(f"{title}\n" + "\n".join(f"  {line}" for line in lines))
    if limit is not None and memory.smallest_slice > limit:
        print(
            f"a rollout slice does not fit: its weights and one row of cache need {memory.smallest_slice:,} bytes on each device, and there are {limit:,}; "
            "raise mesh.rollout_tensor, or lower rollout.max_new_tokens or precision.rollout")
        return 2
    return 0


def config_lines(config: Config) -> list[str]:
    """Every key with its value; what differs from the default is marked."""
    return [
        f"{name}={','.join(value) if isinstance(value, tuple) else value!r}{'' if value == key.default else '   (changed)'}"
        for name, key in declared_keys().items() for value in [read_key(config, name)]]


def device_lines(config: Config, meshes: Meshes) -> list[str]:
    """Devices, train mesh, slices and the dtypes that auto means here."""
    devices, train, one = jax.devices(), meshes.train.shape, meshes.slices[0].shape
    return [
        f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform}) in {jax.process_count()} process{'es' if jax.process_count() > 1 else ''}",
        f"train mesh: {' x '.join(f'{name}={size}' for name, size in train.items())}",
        f"{meshes.publish.shape['slice']} rollout slices of {' x '.join(f'{name}={size}' for name, size in one.items())}, {config.rollout.slots} slots each",
        f"weights {config.precision.params}, training {build.resolve_dtype(config, 'compute')}, rollout {build.resolve_dtype(config, 'rollout')}"]


def possible_shapes(config: Config, prompts: Sequence[Prompt], slices: int) -> Shapes:
    """Rows up to what a phase can give one slice; lengths of the longest prompt."""
    rollout = config.rollout
    lengths = Lengths(longest_prompt(prompts), longest_prompt(prompts) + rollout.max_new_tokens)
    trained = config.batch.prompts_per_step * config.algorithm.num_generations
    evaluated = min(len(prompts), config.evaluation.limit or len(prompts)) * config.evaluation.num_generations
    most = min(rollout.slots, -(-max(trained, evaluated) // slices))
    return Shapes(
        rows=tuple(sorted({row_bucket(rows, rollout.slots) for rows in (most, *ROW_BUCKETS) if rows <= max(most, 1)})),
        cache=length_bucket(lengths.total, CACHE_BUCKETS), pieces=lengths.pieces(build.prefill_tokens(config) // PREFILL_ROWS))


def program_lines(config: Config, shapes: Shapes, row_lengths: Mapping[str, int], slices: int) -> list[str]:
    """What can be compiled, of which a run meets a part; `row_lengths` of each stage."""
    rows, plan = len(shapes.rows), compile_plan(shapes.rows, build.selector_settings(config), config.rollout.max_programs)
    drafted = sum(map(len, plan.values()))
    kinds = {"init": rows, "advance": rows + drafted, "admit of one prompt or of several": 2 * rows, "gather": rows * (rows - 1)}
    lines = [
        f"row buckets {_listed(shapes.rows)}; cache of {shapes.cache} positions; prompts in {shapes.pieces[0]} pieces of {shapes.pieces[1]} tokens",
        f"one slice: {', '.join(f'{count} {name}' for name, count in kinds.items())} = {sum(kinds.values())}; "
        f"x {slices} slices = {sum(kinds.values()) * slices}"]
    for stage, row_length in row_lengths.items():
        passes = _passes(config, stage)
        lines.append(
            f"{stage}: rows of {row_length} tokens, at most {ROW_COUNTS} row counts x {TARGET_WIDTHS} target widths for {', '.join(passes)} = "
            f"{ROW_COUNTS * TARGET_WIDTHS * len(passes)}; and one apply for each network{', one publication' if stage == 'rl' else ''}")
    return lines


def _passes(config: Config, stage: str) -> list[str]:
    if stage != "rl":
        return ["update"] + (["held-out measure"] if config.stages[stage].held_out else [])
    passes = ["policy update"] + (["critic update"] if has_critic(config) and not shares_trunk(config) else [])
    passes += ["log-probs"] if needs_old_logprobs(config) or config.algorithm.beta > 0 else []
    passes += ["values"] if has_critic(config) else []
    return passes + (["reward model"] if config.reward.kind == "model" else [])


def memory_lines(memory: MemoryEstimate, limit: int | None) -> list[str]:
    """The parts, the two phases, and what there is."""
    parts = {field.name: vars(memory)[field.name] for field in dataclasses.fields(memory) if field.name != "kv_row"}
    lines = [f"{name.replace('_', ' '):<16}{mebibytes(size):>12}" for name, size in parts.items() if size]
    there = "unknown on this backend" if limit is None else mebibytes(limit)
    lines.append(f"an update needs {mebibytes(memory.training)}, a rollout {mebibytes(memory.rollout)}; the device has {there}")
    if limit is not None and max(memory.training, memory.rollout) > limit:
        lines.append("this is more than there is: more fsdp or tensor, smaller batch.tokens_per_microbatch, precision.remat=True or fewer rollout.slots")
    return lines


def _count_parameters(model: build.Model) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(decoder.abstract_params(model.spec)))


def mebibytes(size: int) -> str:
    """A number of bytes in MiB."""
    return f"{size / 2**20:,.1f}"


def _listed(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))
