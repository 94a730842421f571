"""Says what `distill` would do, and does none of it: devices, prompts and answers, batches and updates, memory.

Reads the config, headers of model and drafter, and the data; no array is placed and nothing is compiled. Lengths are those of the answers that are kept; where
they have yet to be sampled every answer counts with rollout.max_new_tokens.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from etils import epath

from tlt_jax.checkpoints.drafter_files import abstract_drafter
from tlt_jax.drafters.feature_drafter import FeatureDrafter
from tlt_jax.models import decoder
from tlt_jax.runtime.programs import frozen_program
from tlt_jax.scheduling import batching
from tlt_jax.sharding.meshes import Meshes
from tlt_jax.sharding.rules import batch_rows_multiple
from tlt_jax.training import build, dry_run, memory_estimate
from tlt_jax.training.answering import Answer, answer_packing, chosen_prompts, held_out_batches, kept_answers, read_rollouts
from tlt_jax.training.distilling import ANSWERS, check_method
from tlt_jax.training.draft_training import draft_optimizer
from tlt_jax.training.drafting import files_of, make_drafter
from tlt_jax.training.settings import Config


def say(config: Config, workdir: str | None, rollouts: str | None = None) -> None:
    """Print the plan. Raises what opening model, drafter and data raises, and ValueError for answers that do not fit the batches."""
    check_method(config)
    model = build.open_checkpoint(config)
    drafter, meshes = make_drafter(config, model.spec), build.make_meshes(config)
    described, lengths, exact = _answers(config, model, workdir, rollouts)
    packing = answer_packing(config, max(lengths), batch_rows_multiple(meshes.train))
    batches = batching.microbatches(lengths, packing.tokens_per_microbatch, row_length=packing.row_length, row_multiple=packing.row_multiple).microbatches
    held_out = held_out_batches(config, len(batches))
    updates = config.distill.epochs * (len(batches) - held_out)
    most = "" if exact else "at most "
    sections = (
        ("config", dry_run.config_lines(config)),
        ("devices", dry_run.device_lines(config, meshes)),
        ("answers", described),
        ("training", [
            f"{most}{len(batches)} batches of {len(batches[0])} rows of {packing.row_length} tokens (distill.tokens_per_update="
            f"{config.distill.tokens_per_update}), {held_out} of them held back",
            f"{config.distill.epochs} epochs: {most}{updates} updates of one batch each" + (
                f", ended after {config.distill.minutes} minutes" if config.distill.minutes else "")]),
        ("memory of one device, in MiB (estimate, without activations)", _memory(config, drafter, meshes, updates)),
        ("memory of the host", [_features(drafter, len(batches) * len(batches[0]) * packing.row_length)]))
    for title, lines in sections:
        print(f"{title}\n" + "\n".join(f"  {line}" for line in lines))


def _answers(config: Config, model: build.Model, workdir: str | None, rollouts: str | None) -> tuple[list[str], list[int], bool]:
    """(lines, tokens of each prompt with its answer, whether they are known)."""
    if rollouts:
        return _known(read_rollouts(rollouts, model.spec), rollouts)
    prompts, each = chosen_prompts(config, model), config.distill.num_generations
    wanted, longest = len(prompts) * each, config.rollout.max_new_tokens
    path = None if workdir is None else epath.Path(workdir) / ANSWERS
    kept = None if path is None else kept_answers(path, wanted)
    if kept is not None:
        return _known(kept, path)
    lengths = [len(prompt.prompt_ids) for prompt in prompts]
    lines = [f"{len(prompts)} prompts of {min(lengths)} to {max(lengths)} tokens × {each} = {wanted} answers to sample, each of at most {longest} tokens"]
    return lines, [length + longest for length in lengths for _ in range(each)], False


def _known(answers: Sequence[Answer], path) -> tuple[list[str], list[int], bool]:
    tokens = sum(len(answer) for _, answer in answers)
    return [f"{len(answers)} answers from {path}, {tokens:,} tokens"], [len(prompt) + len(answer) for prompt, answer in answers], True


def _memory(config: Config, drafter: FeatureDrafter, meshes: Meshes, updates: int) -> list[str]:
    spec, files = drafter.spec, files_of(config, drafter)
    params, policy = abstract_drafter(files, spec), decoder.abstract_params(spec, "float32")
    ids = jax.ShapeDtypeStruct((files.vocabulary,), jnp.int32) if files.vocabulary else None
    frozen = jax.tree.leaves(jax.eval_shape(frozen_program(drafter), policy, ids))
    held = memory_estimate.on_train_mesh(meshes, params)
    parts = {
        "policy": memory_estimate.on_train_mesh(meshes, policy), "policy's embedding and head": sum(leaf.size * leaf.dtype.itemsize for leaf in frozen),
        "drafter": held, "its optimizer": memory_estimate.on_train_mesh(meshes, jax.eval_shape(draft_optimizer(config, "cosine", updates).init, params)),
        "its gradients": 2 * held}
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    limit = memory_estimate.device_limit()
    there = "unknown on this backend" if limit is None else dry_run.mebibytes(limit)
    return [
        f"{files.kind} drafter of {count:,} parameters, {files.vocabulary or spec.vocab_size} draft tokens",
        *(f"{name:<28}{dry_run.mebibytes(size):>12}" for name, size in parts.items()),
        f"together {dry_run.mebibytes(sum(parts.values()))}; the device has {there}"]


def _features(drafter: FeatureDrafter, tokens: int) -> str:
    return f"features of all batches: {dry_run.mebibytes(tokens * (drafter.features + drafter.spec.hidden_size) * 4)} MiB"
