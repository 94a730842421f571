"""The model of a training run: what its workdir says about it (model.json, tokenizer/) and its networks, read from a checkpoint onto any topology.

A run writes the description once, at its start, so that export, generate and evaluate need neither the run's config nor the model it started from. It saves no
arrays (`run_state` does) and writes no Hugging Face directory (`huggingface_export` does).
"""

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from absl import logging
from etils import epath

from tlt_jax.checkpoints.model_source import TOKENIZER_FILES, ModelSource, read_chat_template
from tlt_jax.checkpoints.run_state import RunStateStore
from tlt_jax.checkpoints.tensor_layout import abstract_params, flatten, nest
from tlt_jax.models.specs import PolicySpec, config_from_spec, spec_from_config
from tlt_jax.sharding.rules import param_shardings

DESCRIPTION, TOKENIZER, CHECKPOINTS = "model.json", "tokenizer", "checkpoints"
NETWORKS = ("policy", "critic", "drafter", "reward_model")
_TRAINED_BY = {"critic": "algorithm.name=ppo", "drafter": "drafter.quanta_per_step above 0 (eagle and eagle3)", "reward_model": "reward_model in stages.order"}
SHARED_VALUE_HEAD = "value_head"  # beside the policy's parameters when the critic shares its trunk
_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class RunNetwork:
    """One network of a run at one step, and where the run's model came from."""

    step: int
    spec: PolicySpec
    params: dict[str, Any]
    source: ModelSource


@dataclasses.dataclass(frozen=True)
class RunDrafter:
    """What a run's drafter has learned at one step: its trained parameters (draft ids are not among them), and the run's config by dotted name."""

    params: dict[str, Any]
    config: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class SpecialIds:
    """The tokenizer's ids that a model without files has to name in its config."""

    stop: tuple[int, ...]
    pad: int
    begin: int | None


def scratch_source(spec: PolicySpec, tokenizer_dir: str, ids: SpecialIds, *, dtype: str) -> ModelSource:
    """The source of a model that was made from nothing: a config of the spec with the tokenizer's ids in it."""
    special = {"bos_token_id": ids.begin, "eos_token_id": list(ids.stop), "pad_token_id": ids.pad}
    directory = epath.Path(tokenizer_dir)
    return ModelSource(
        path=tokenizer_dir, file_dtype=dtype, stop_ids=ids.stop, pad_id=ids.pad, generation_config=special,
        config=config_from_spec(spec, dtype=dtype) | special,
        tokenizer_files=tuple(name for name in TOKENIZER_FILES if (directory / name).exists()), chat_template=read_chat_template(directory),
        tokenizer_dir=tokenizer_dir)


def save_run_model(workdir: str | os.PathLike[str], source: ModelSource) -> None:
    """Copies the tokenizer files (with the chat template in use) into the workdir and writes model.json, which appears whole or not at all."""
    root = epath.Path(workdir)
    root.mkdir(parents=True, exist_ok=True)
    files = list(source.tokenizer_files)
    if source.tokenizer_dir is not None:
        target, origin = root / TOKENIZER, epath.Path(source.tokenizer_dir)
        target.mkdir(parents=True, exist_ok=True)
        for name in files if os.path.abspath(origin) != os.path.abspath(target) else ():
            (target / name).write_bytes((origin / name).read_bytes())
        if source.chat_template is not None and read_chat_template(target) != source.chat_template:
            (target / "chat_template.jinja").write_text(source.chat_template)
            files = [*dict.fromkeys([*files, "chat_template.jinja"])]
    said = dataclasses.asdict(dataclasses.replace(source, tokenizer_files=tuple(files)))
    new = root / f"{DESCRIPTION}.new"
    new.write_text(json.dumps({"format": _FORMAT, "source": said}, indent=2, ensure_ascii=False))
    new.replace(root / DESCRIPTION)


def is_workdir(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is the workdir of a run that described its model."""
    return (epath.Path(path).expanduser() / DESCRIPTION).exists()


def read_run_model(workdir: str | os.PathLike[str]) -> tuple[PolicySpec, ModelSource]:
    """Spec and source of the run's policy. Raises FileNotFoundError when `workdir` is no workdir, ValueError for a description that cannot be read."""
    root = epath.Path(workdir).expanduser()
    if not is_workdir(root):
        raise FileNotFoundError(f"{root} is not the workdir of a run: it has no {DESCRIPTION}")
    try:
        written = json.loads((root / DESCRIPTION).read_text())
        if written["format"] != _FORMAT:
            raise ValueError(f"format {written['format']}, this version reads {_FORMAT}")
        said = written["source"]
        said |= {"path": str(root), "tokenizer_dir": None if said["tokenizer_dir"] is None else str(root / TOKENIZER)}
        said |= {name: tuple(said[name]) for name in ("stop_ids", "tokenizer_files")} | {"tensor_dtypes": tuple(map(tuple, said["tensor_dtypes"]))}
        return spec_from_config(said["config"]), ModelSource(**said)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{root / DESCRIPTION} cannot be read ({error}); run the training command again to write it anew") from error


def check_run(workdir: str | os.PathLike[str]) -> PolicySpec:
    """The spec of the run's policy, after checking that a complete checkpoint holds it; reads no array."""
    spec, _ = read_run_model(workdir)
    with _opened(workdir) as store:
        step = _chosen_step(store, None)
        _check_leaves(spec, flatten(_saved(store, step, "policy")[1]), f"step {step} in {store.directory}")
    return spec


def find_networks(workdir: str | os.PathLike[str], networks: Sequence[str], step: int | None = None) -> int:
    """The step (None = the newest complete one) that holds all `networks`; raises as `load_network` does and reads no array."""
    read_run_model(workdir)
    with _opened(workdir) as store:
        step = _chosen_step(store, step)
        for network in networks:
            _saved(store, step, network)
    return step


def load_network(
    workdir: str | os.PathLike[str], network: str = "policy", *, step: int | None = None, dtype: str | None = None, mesh: jax.sharding.Mesh | None = None
) -> RunNetwork:
    """"policy", "critic" or "reward_model" of the run at `step` (None = the newest complete one), in `dtype` (None = as saved), sharded over `mesh` or on one
    device.

    A critic that shares the policy's trunk becomes a network of its own: that trunk with the value head. Raises FileNotFoundError for an absent step or
    critic, ValueError for an incomplete step or parameters that are not those of the run's model.
    """
    spec, source = read_run_model(workdir)
    with _opened(workdir) as store:
        step = _chosen_step(store, step)
        item, tree = _saved(store, step, network)
        params = dict(store.restore_item(step, item, _placed(tree, mesh)))
        where = f"step {step} in {store.directory}"
    value_head = params.pop(SHARED_VALUE_HEAD, None)
    if network != "policy":
        spec = dataclasses.replace(spec, head={"critic": "value", "reward_model": "reward"}[network])
    if network == "critic" and item == "policy":
        params["head"] = value_head
    _check_leaves(spec, flatten(params), where)
    if dtype is not None:
        params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    return RunNetwork(step, spec, params, source)


def load_run_drafter(workdir: str | os.PathLike[str], step: int) -> RunDrafter:
    """The drafter of the run at `step`, on one device. Raises FileNotFoundError for an absent step or drafter, ValueError for an incomplete step."""
    with _opened(workdir) as store:
        item, tree = _saved(store, step, "drafter")
        return RunDrafter(store.restore_item(step, item, _placed(tree, None)), store.describe(step).host["config"])


@contextlib.contextmanager
def _opened(workdir: str | os.PathLike[str]) -> Iterator[RunStateStore]:
    root = epath.Path(workdir).expanduser() / CHECKPOINTS
    if not root.exists():
        raise FileNotFoundError(f"{root.parent} has no checkpoint yet: the run has not saved")
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)  # Orbax warns that what is opened for reading is opened for reading
    try:
        store = RunStateStore(root, read_only=True)
    finally:
        logging.set_verbosity(verbosity)
    try:
        yield store
    finally:
        store.close()


def _chosen_step(store: RunStateStore, step: int | None) -> int:
    chosen = store.latest_valid_step() if step is None else step
    if chosen is None:
        raise FileNotFoundError(f"{store.directory} holds no complete checkpoint yet")
    return chosen


def _saved(store: RunStateStore, step: int, network: str) -> tuple[str, dict[str, Any]]:
    """The item that holds a network, and its saved tree as shapes and dtypes."""
    items = store.describe(step).items
    item = "policy" if network == "critic" and network not in items else network
    tree = nest({tuple(path.split("/")): leaf for path, leaf in items.get(item, {}).items()})
    if not tree or (item != network and SHARED_VALUE_HEAD not in tree):
        why = f": a run trains one with {_TRAINED_BY[network]}" if network in _TRAINED_BY else ""
        raise FileNotFoundError(f"step {step} in {store.directory} holds no {network} (it holds {', '.join(items)}){why}")
    return item, tree


def _placed(tree: dict[str, Any], mesh: jax.sharding.Mesh | None) -> dict[str, Any]:
    """Shapes and dtypes with where they go: sharded over the mesh, or on one device."""
    one = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    shardings = param_shardings(mesh, tree) if mesh is not None else jax.tree.map(lambda _: one, tree)
    return jax.tree.map(lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree, shardings)


def _check_leaves(spec: PolicySpec, leaves: Mapping[tuple[str, ...], Any], where: str) -> None:
    expected = {path: leaf.shape for path, leaf in flatten(abstract_params(spec)).items()}
    found = {path: leaf.shape for path, leaf in leaves.items() if path[0] != SHARED_VALUE_HEAD}
    wrong = sorted("/".join(path) for path in expected.keys() | found.keys() if expected.get(path) != found.get(path))
    if wrong:
        raise ValueError(f"{where} does not hold the model that {DESCRIPTION} describes; these differ: {', '.join(wrong)}")
