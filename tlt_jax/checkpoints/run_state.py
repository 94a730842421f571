"""Durable run state: one Orbax step per save, everything needed to resume in it, the newest complete step always on disk.

A step is written in the background into a temporary directory and renamed when every item is complete; older steps are deleted only after that. So a process
killed at any moment leaves a complete newest step, and a failed write leaves the last good one. It does not decide when to save or what belongs to the state,
and it places arrays only where it is asked to.

With several processes every method but `describe` is collective: all processes call it, in the same order, with the same step.
"""

import dataclasses
import logging
import os

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

from tlt_jax.checkpoints import step_manifest

_LOG = logging.getLogger(__name__)
# TensorStore reports a full or broken disk as ValueError, Orbax barriers as RuntimeError, the file system as OSError; anything else is a fault of the program.
_WRITE_ERRORS = (OSError, ValueError, RuntimeError)
_ALREADY_SAVED, _NOTHING_OLDER = -1, -2


class SaveFailed(RuntimeError):
    """A step that could not be written. The last complete step is still there and the next save tries again; raise it to end the run instead."""

    def __init__(self, step: int, directory: str, reason: str):
        advice = "Older steps are untouched; free space or fix the disk, the next save tries again."
        super().__init__(f"step {step} could not be saved in {directory}: {reason}. {advice}")
        self.step = step


@dataclasses.dataclass(frozen=True)
class StepDescription:
    """A complete step without its arrays: item → leaf path → shape and dtype, and the host state."""

    step: int
    items: dict[str, step_manifest.Leaves]
    host: dict


class RunStateStore:
    """Saves and restores the run state under `directory`: the newest `keep` steps, and the one where `best_metric` (larger is better) was highest.

    `async_save=False` makes `save` wait for the commit. `read_only=True` (export, generate) never creates, cleans or deletes anything. A write, or the wait for
    another process's part of it, fails after `timeout_seconds`. Local paths and `gs://…`.
    """

    def __init__(
        self,
        directory,
        *,
        keep: int = 2,
        async_save: bool = True,
        best_metric: str | None = None,
        read_only: bool = False,
        timeout_seconds: int = 600,
    ):
        if keep < 1:
            raise ValueError(f"keep={keep}: at least one step has to be kept")
        path = epath.Path(directory if "://" in str(directory) else os.path.abspath(directory))
        if read_only and not path.exists():
            raise FileNotFoundError(f"{path} does not exist: no run was saved there")
        self.directory = path
        self._async_save = async_save
        self._read_only = read_only
        self._best_metric = best_metric
        self._own_steps: set[int] = set()
        self._writer = _Writer(path, read_only, timeout_seconds, _preservation(keep, best_metric))

    def save(self, step: int, arrays: dict, host: dict, metrics: dict | None = None) -> bool:
        """Starts the write of `arrays` (item name → pytree of jax.Array) and `host` (plain JSON values) as `step`; the arrays may be donated once it returns.

        Returns False when nothing was written: the step is saved already, or the write failed at once. A failure of this or the last write is kept for `check`.
        Steps newer than `step` belong to a future that was given up (an explicit restore of an older step): they are deleted first, with a warning.
        Raises TypeError for a leaf or host value that cannot be saved, ValueError when newer steps exist and no older one to fall back to.
        """
        if self._read_only:
            raise ValueError(f"{self.directory} was opened for reading only")
        reserved = [name for name in arrays if name in step_manifest.RESERVED_ITEMS]
        if reserved:
            raise ValueError(f"item names {reserved} are reserved")
        step_manifest.check_plain_json(host)
        items = {name: step_manifest.describe_leaves(tree) for name, tree in arrays.items()}
        self._writer.settle()
        if not _clear_the_way(self.directory, step, self._own_steps):
            return False
        self._writer.manager.reload()
        self._own_steps.add(step)
        args = {name: ocp.args.StandardSave(tree) for name, tree in arrays.items() if items[name]}
        args[step_manifest.HOST_ITEM] = ocp.args.JsonSave(host)
        started = self._writer.start(step, items, ocp.args.Composite(**args), step_manifest.finite_metric(metrics, self._best_metric))
        return started if self._async_save else self._writer.settle()

    def check(self) -> SaveFailed | None:
        """The oldest failed save not reported yet, once it is known on every process; never waits for a write. Call it once a step."""
        if self._writer.finished():
            self._writer.settle()
        return self._writer.failures.pop(0) if self._writer.failures else None

    def wait(self) -> SaveFailed | None:
        """Waits until the write in progress is committed or has failed, then reports like `check`. Call it before leaving."""
        self._writer.settle()
        return self._writer.failures.pop(0) if self._writer.failures else None

    def close(self) -> None:
        """Waits for the write in progress and frees the writer; a failure is logged."""
        self._writer.settle()
        self._writer.manager.close()

    def latest_valid_step(self) -> int | None:
        """The newest step that is complete, the same on every process; None when there is none. Newer incomplete steps are warned about by name."""
        self._writer.settle()
        found = -1
        for step in reversed(_steps(self.directory)) if jax.process_index() == 0 else ():
            problems = step_manifest.find_problems(self.directory / str(step))
            if not problems:
                found = step
                break
            _LOG.warning("step %d in %s is not complete and is passed over: %s", step, self.directory, "; ".join(problems))
        found = _from_every_process(found)[0]
        return None if found < 0 else found

    def restore(self, step: int, like: dict) -> tuple[dict, dict]:
        """`(arrays, host)` of `step`, each leaf placed on the sharding of its ShapeDtypeStruct in `like` (item name → tree), on any topology.

        Raises FileNotFoundError or ValueError when the step is absent or incomplete, ValueError with a line per leaf
        where items, paths, shapes or dtypes differ.
        """
        described = self.describe(step)
        lines = [f"item {name!r} is saved, not asked for" for name in described.items if name not in like]
        arrays = _read(self._writer, described, like, lines)
        self._own_steps.add(step)
        return arrays, described.host

    def restore_item(self, step: int, name: str, like):
        """One item of `step` (for export and generate), with the placement and errors of `restore`."""
        return _read(self._writer, self.describe(step), {name: like}, [])[name]

    def restore_policy_only(self, step: int, like):
        """The item "policy" of `step`."""
        return self.restore_item(step, "policy", like)

    def describe(self, step: int) -> StepDescription:
        """Items with leaf shapes and dtypes, and the host state; raises FileNotFoundError or ValueError when the step is absent or incomplete."""
        path = self.directory / str(step)
        steps = _steps(self.directory)
        if step not in steps:
            raise FileNotFoundError(f"there is no step {step} in {self.directory}; saved steps: {steps or 'none'}")
        problems = step_manifest.find_problems(path)
        if problems:
            raise ValueError(f"step {step} in {self.directory} is not complete:{step_manifest.join_problems(problems)}\nask for another step of {steps}")
        host = ocp.JsonCheckpointHandler().restore(path / step_manifest.HOST_ITEM)
        return StepDescription(step, step_manifest.read_manifest(path), host)


class _Writer:
    """One write at a time through an Orbax manager, and the failures of past writes.

    The outcome of a write is agreed between the processes, so all take the same branch.
    """

    def __init__(self, directory: epath.Path, read_only: bool, timeout_seconds: int, preservation: dict):
        self._directory = directory
        self._read_only = read_only
        self._timeout_seconds = timeout_seconds
        self._preservation = preservation
        self._items: dict[str, step_manifest.Leaves] = {}
        self._step: int | None = None
        self._error: Exception | None = None
        self._managers = 0
        self.failures: list[SaveFailed] = []
        self.manager = self._open_manager()

    def _open_manager(self) -> ocp.CheckpointManager:
        """A manager that knows what is on disk and removes what earlier writes left half done.

        Its barriers have names of their own: after a failed write the processes have passed different barriers of the old one.
        """

        def write_manifest():
            step_manifest.write_manifest(self._directory, self._step, self._items)

        self._managers += 1
        options = ocp.CheckpointManagerOptions(
            create=not self._read_only,
            read_only=self._read_only,
            cleanup_tmp_directories=not self._read_only,
            async_options=ocp.options.AsyncOptions(timeout_secs=self._timeout_seconds, post_finalization_callback=write_manifest),
            multiprocessing_options=ocp.options.MultiprocessingOptions(barrier_sync_key_prefix=f"run_state_{self._managers}"),
            **self._preservation,
        )
        return ocp.CheckpointManager(self._directory, options=options)

    def start(self, step: int, items: dict, args: ocp.args.Composite, metrics: dict | None) -> bool:
        """Copies the arrays to the host and starts the write; an error at once returns False and is recorded like a later one."""
        self._step, self._items, self._error = step, items, None
        try:
            self.manager.save(step, args=args, metrics=metrics, force=True)
        except _WRITE_ERRORS as error:
            self._error = error
        return self._error is None

    def finished(self) -> bool:
        """True when no process is still writing."""
        if self._step is None:
            return True
        return all(_from_every_process(self._error is not None or not self.manager.is_saving_in_progress()))

    def settle(self) -> bool:
        """Waits for the write in progress, True unless it failed; a failure on any process is recorded on all and the next write starts afresh."""
        if self._step is None:
            return True
        step, error = self._step, self._error
        try:
            self.manager.wait_until_finished()
        except _WRITE_ERRORS as late_error:
            error = error or late_error
        self._step, self._error = None, None
        failed = _from_every_process(error is not None)
        if not any(failed):
            return True
        reason = str(error or f"the write failed on process {failed.index(1)}").split("\n")[0]
        self.failures.append(SaveFailed(step, str(self._directory), reason))
        _LOG.error("%s", self.failures[-1])
        self.manager = self._open_manager()
        return False


def _read(writer: _Writer, described: StepDescription, like: dict, lines: list[str]) -> dict:
    """The items of `like`; `lines` are mismatches found before, and any more raise ValueError with all of them."""
    for name, tree in like.items():
        if name not in described.items:
            lines.append(f"item {name!r} is asked for, not saved (saved: {', '.join(described.items)})")
        else:
            lines += step_manifest.list_mismatches(name, described.items[name], tree)
    if lines:
        raise ValueError(f"step {described.step} does not fit what was asked for:{step_manifest.join_problems(lines)}")
    writer.settle()
    args = {name: ocp.args.StandardRestore(tree) for name, tree in like.items() if described.items[name]}
    restored = writer.manager.restore(described.step, args=ocp.args.Composite(**args)) if args else {}
    return {name: restored[name] if name in args else tree for name, tree in like.items()}


def _preservation(keep: int, best_metric: str | None) -> dict:
    policies = ocp.checkpoint_managers
    newest = policies.LatestN(keep)
    if best_metric is None:
        return {"preservation_policy": newest}

    def rank(metrics):  # a resumed run may rank by another metric than the one stored with older steps: those rank last
        return metrics.get(best_metric, -np.inf)

    best = policies.BestN(get_metric_fn=rank, n=1, keep_checkpoints_without_metrics=False)
    return {"preservation_policy": policies.AnyPreservationPolicy([newest, best]), "best_fn": rank}


def _steps(directory: epath.Path) -> list[int]:
    """Committed steps in ascending order; temporary directories are not among them."""
    if not directory.exists():
        return []
    return sorted(found.step for found in ocp.path.step.standard_name_format().find_all(directory))


def _clear_the_way(directory: epath.Path, step: int, own_steps: set[int]) -> bool:
    """Deletes incomplete steps and those from `step` on, newest first: a kill in between leaves an older complete one. False when `step` is saved already."""
    outcome = _clear_on_this_process(directory, step, own_steps) if jax.process_index() == 0 else 0
    outcome = _from_every_process(outcome)[0]
    if outcome == _NOTHING_OLDER:
        raise ValueError(
            f"step {step} cannot be saved in {directory}: it holds newer steps {_steps(directory)} and no older one. "
            "Resume from there, or give the run another directory."
        )
    return outcome != _ALREADY_SAVED


def _clear_on_this_process(directory: epath.Path, step: int, own_steps: set[int]) -> int:
    steps = _steps(directory)
    complete = {saved for saved in steps if (saved in own_steps and saved < step) or not step_manifest.find_problems(directory / str(saved))}
    if step in own_steps and step in complete:
        return _ALREADY_SAVED
    if any(saved >= step for saved in complete) and not any(saved < step for saved in complete):
        return _NOTHING_OLDER
    for saved in reversed(steps):
        if saved >= step or saved not in complete:
            _LOG.warning("step %d in %s is deleted: %s", saved, directory, "the run continues before it" if saved in complete else "it is not complete")
            (directory / str(saved)).rmtree()
    return 0


def _from_every_process(value: int) -> list[int]:
    """The values of all processes, in process order; collective when there are several."""
    if jax.process_count() == 1:
        return [int(value)]
    return np.asarray(multihost_utils.process_allgather(np.int32(value))).tolist()
