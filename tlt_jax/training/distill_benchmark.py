"""Times drafter training and its checkpoints on this machine.

Training: the same answers of the policy, packed as `train` packs them for its drafter, against one text a row padded to the longest, with the same tokens an
update. Their features are made beforehand and not timed, and the learning rate is 0, so that every pass does the same work. Checkpoints: what a resume needs of
the drafter, written in the background, against everything that an engine holds of it, written while training waits. The two sides of a comparison take turns,
forward and backward (ABBA).
"""

import dataclasses
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from tlt_jax.checkpoints.pretrained import load_policy
from tlt_jax.checkpoints.run_state import RunStateStore
from tlt_jax.distillation.pairs import DraftBatch
from tlt_jax.models.specs import PolicySpec
from tlt_jax.optimizers import OptimizerSettings, make_optimizer
from tlt_jax.runtime.draft_driver import DraftLearner, Teacher
from tlt_jax.runtime.programs import compile_counter, frozen_program, new_drafter
from tlt_jax.sharding.rules import batch_rows_multiple
from tlt_jax.training import build
from tlt_jax.training.answering import sample_answers, texts_of
from tlt_jax.training.benchmark import Plan, ratio
from tlt_jax.training.draft_texts import unfilled, whole_batches
from tlt_jax.training.draft_training import draft_loss
from tlt_jax.training.drafting import load_params, make_drafter
from tlt_jax.training.experience import Packing, Trajectory, pack, packing_for
from tlt_jax.training.progress import Progress
from tlt_jax.training.rollout_phase import check_lengths, longest_prompt
from tlt_jax.training.settings import Config
from tlt_jax.training.settings_rules import copy_with

MEBIBYTE = 2**20


@dataclasses.dataclass
class Layout:
    """One way to put the texts into batches, and the seconds of each pass over them."""

    name: str
    batches: list[DraftBatch]
    warm_up: float = 0.0
    compiles: int = 0
    seconds: list[float] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Kind:
    """One way to save a drafter, and of each save the seconds until it returned and until the step was complete."""

    name: str
    arrays: dict
    store: RunStateStore
    waits: list[float] = dataclasses.field(default_factory=list)
    commits: list[float] = dataclasses.field(default_factory=list)


def distill(config: Config, plan: Plan) -> list[dict]:
    """Two records of training, then two of checkpoints, seconds as median, lowest and highest. Raises ValueError for a drafter without weights of its own, or
    for texts that may not fit into the model or an update, and OSError for a checkpoint that could not be written.
    """
    if config.speculative.method not in ("eagle", "eagle3"):
        raise ValueError(f"speculative.method={config.speculative.method} has no weights to train: use --drafter, or set it to eagle or eagle3")
    config = copy_with(config, {"rollout.max_new_tokens": plan.new_tokens})
    model = build.open_checkpoint(config)
    task, _ = build.make_tasks(config, model.tokenizer)
    prompts = list(task.prompts())[: max(plan.rows)]
    check_lengths(model.spec, prompts, plan.new_tokens, lambda prompt: f"{prompt.source}, row {prompt.row}")
    meshes, drafter = build.make_meshes(config), make_drafter(config, model.spec)
    multiple, budget, longest = batch_rows_multiple(meshes.train), config.distill.tokens_per_update, longest_prompt(prompts) + plan.new_tokens
    if longest * multiple > budget:
        raise ValueError(f"distill.tokens_per_update={budget} cannot hold one text of up to {longest} tokens for each of {multiple} devices: raise it")
    texts = texts_of(sample_answers(config, model, prompts, 1))
    policy = load_policy(config.model.path, dtype="float32", mesh=meshes.train).params
    params = load_params(config, model.spec, "float32") or new_drafter(drafter, policy, config.seed)
    learner = DraftLearner(
        meshes.train, drafter, draft_loss(config), make_optimizer(OptimizerSettings(lr=0.0)), params, frozen_program(drafter)(policy, params.get("ids")))
    packing, teacher = packing_for([len(prompt.prompt_ids) for prompt in prompts], plan.new_tokens, budget, multiple), Teacher(meshes.train, drafter, policy)
    layouts = [
        Layout(name, [teacher.fill(batch) for batch in batches])
        for name, batches in (("padded", padded_batches(texts, budget, multiple)), ("packed", whole_batches(texts, packing)))]
    about = {
        "drafter": config.speculative.method, "draft_tokens": drafter.vocabulary or model.spec.vocab_size, "unroll": config.distill.unroll, "dtype": "float32",
        "new_tokens": plan.new_tokens, "repeats": plan.repeats, "jax": jax.__version__, "device": jax.devices()[0].device_kind, "devices": meshes.train.size}
    _time_training(learner, layouts, plan.repeats)
    records = [_training_record(layout, layouts[0], texts) for layout in layouts]
    return [record | about for record in [*records, *_checkpoints(learner, model.spec, policy, plan.repeats)]]


def padded_batches(texts: Sequence[Trajectory], budget: int, row_multiple: int) -> list[DraftBatch]:
    """One text a row, rows as long as the longest, as many as `budget` tokens hold; the last batch ends in empty rows. Features are still empty."""
    longest = max(len(text.tokens) for text in texts)
    rows = budget // longest // row_multiple * row_multiple
    alone = [unfilled(pack([text], Packing(longest, 1, longest)).batches[0]) for text in texts]
    alone += [jax.tree.map(np.zeros_like, alone[0])] * (-len(alone) % rows)
    return [jax.tree.map(lambda *arrays: np.concatenate(arrays), *alone[start : start + rows]) for start in range(0, len(alone), rows)]


def _time_training(learner: DraftLearner, layouts: Sequence[Layout], repeats: int) -> None:
    progress = Progress(sys.stderr)
    progress.start("training", repeats, 0)
    for layout in layouts:
        progress.phase(f"compiling {layout.name}", {})
        compiles, started = compile_counter().count, time.monotonic()
        learner.update(layout.batches[:1])
        layout.warm_up, layout.compiles = time.monotonic() - started, compile_counter().count - compiles
        progress.line(f"{layout.name}: compiled and warm after {layout.warm_up:.0f} s, {repeats} passes over {len(layout.batches)} batches follow")
    compiles = compile_counter().count
    for repeat in range(repeats):
        for layout in layouts if repeat % 2 == 0 else reversed(layouts):
            progress.phase(f"timing {layout.name}", {})
            started = time.monotonic()
            for batch in layout.batches:
                learner.update([batch])
            layout.seconds.append(time.monotonic() - started)
        progress.advance(repeat + 1)
    progress.stop()
    if compile_counter().count > compiles:
        print(f"warning: {compile_counter().count - compiles} programs compiled in timed passes: the slowest say nothing", file=sys.stderr)


def _training_record(layout: Layout, padded: Layout, texts: Sequence[Trajectory]) -> dict:
    responses, seconds, (rows, length) = sum(text.response_length for text in texts), statistics.median(layout.seconds), layout.batches[0].tokens_BT.shape
    lowest, middle, highest = ratio(padded.seconds, layout.seconds)
    return {
        "what": "training", "layout": layout.name, "texts": len(texts), "response_tokens": responses, "batches": len(layout.batches), "rows": rows,
        "row_length": length, "filled": sum(len(text.tokens) for text in texts) / (len(layout.batches) * rows * length),
        "tokens_per_second": responses / seconds, "lowest": responses / max(layout.seconds), "highest": responses / min(layout.seconds),
        "samples_per_second": len(texts) / seconds, "ratio_to_padded": middle, "ratio_interval": [lowest, highest], "pass_seconds": layout.seconds,
        "warm_up_seconds": layout.warm_up, "compiles": layout.compiles}


def _checkpoints(learner: DraftLearner, spec: PolicySpec, policy: dict, repeats: int) -> list[dict]:
    own = {"drafter": learner.params, "drafter_optimizer": learner.opt_state}
    shared = {"policy_embed": policy["embed"]} if spec.tied else {"policy_embed": policy["embed"], "policy_head": policy["head"]}
    with tempfile.TemporaryDirectory() as directory:
        kinds = [
            Kind("full", {"drafter": learner.params | shared, "drafter_optimizer": _with_moments(learner, shared)},
                 RunStateStore(f"{directory}/full", async_save=False)),
            Kind("selective", own, RunStateStore(f"{directory}/selective"))]
        for step in range(repeats + 1):  # the first one warms up
            for kind in kinds if step % 2 == 0 else reversed(kinds):
                _save(kind, step)
        records = [_checkpoint_record(kind, pathlib.Path(directory) / kind.name / str(repeats)) for kind in kinds]
        for kind in kinds:
            kind.store.close()
    return records


def _with_moments(learner: DraftLearner, shared: dict):
    """The optimizer state of the drafter and of what it shares with the policy, as if that were trained too; noise, since zeros compress to nothing."""
    random = np.random.default_rng(0)

    def noise(leaf: jax.Array) -> jax.Array:
        return jnp.asarray(random.standard_normal(leaf.shape, np.float32)) if leaf.ndim else leaf

    return jax.tree.map(noise, learner.programs.optimizer.init(learner.params | shared))


def _save(kind: Kind, step: int) -> None:
    started = time.monotonic()
    kind.store.save(step, kind.arrays, {})
    returned = time.monotonic()
    failed = kind.store.wait()
    if failed is not None:
        raise OSError(str(failed))
    kind.waits.append(returned - started)
    kind.commits.append(time.monotonic() - started)


def _checkpoint_record(kind: Kind, written: pathlib.Path) -> dict:
    waits, commits = kind.waits[1:], kind.commits[1:]
    return {
        "what": "checkpoint", "kind": kind.name, "array_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(kind.arrays)),
        "file_bytes": sum(path.stat().st_size for path in written.rglob("*") if path.is_file()),
        "wait_seconds": statistics.median(waits), "wait_interval": [min(waits), max(waits)],
        "commit_seconds": statistics.median(commits), "commit_interval": [min(commits), max(commits)]}


def table(records: Sequence[dict]) -> str:
    """Records as people read them."""
    lines = [f"{'layout':>9} {'texts':>6} {'batches':>8} {'rows':>5} {'length':>7} {'filled':>7} {'tokens/s':>9} {'lowest':>8} {'highest':>8} {'samples/s':>9} "
             f"{'x padded':>8} {'95 % interval':>14} {'warm-up s':>9}"]
    for one in (record for record in records if record["what"] == "training"):
        low, high = one["ratio_interval"]
        lines.append(
            f"{one['layout']:>9} {one['texts']:>6} {one['batches']:>8} {one['rows']:>5} {one['row_length']:>7} {one['filled']:>7.2f} "
            f"{one['tokens_per_second']:>9.1f} {one['lowest']:>8.1f} {one['highest']:>8.1f} {one['samples_per_second']:>9.2f} {one['ratio_to_padded']:>8.2f} "
            f"{f'{low:.2f} to {high:.2f}':>14} {one['warm_up_seconds']:>9.1f}")
    lines.append(f"{'saved':>9} {'arrays MiB':>11} {'files MiB':>10} {'waits s':>8} {'lowest, highest':>16} {'done s':>8} {'lowest, highest':>16}")
    for one in (record for record in records if record["what"] == "checkpoint"):
        waits, commits = (", ".join(f"{seconds:.3f}" for seconds in one[name]) for name in ("wait_interval", "commit_interval"))
        lines.append(
            f"{one['kind']:>9} {one['array_bytes'] / MEBIBYTE:>11.2f} {one['file_bytes'] / MEBIBYTE:>10.2f} {one['wait_seconds']:>8.3f} {waits:>16} "
            f"{one['commit_seconds']:>8.3f} {commits:>16}")
    return "\n".join(lines)
