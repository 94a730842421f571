"""Networks of a run to directories that other engines load: policy and critic in the Hugging Face layout, the drafter in EAGLE's.

What a directory holds is decided in `checkpoints/huggingface_export.py` and `checkpoints/drafter_files.py`.
"""

from collections.abc import Iterator, Sequence

from etils import epath

from tlt_jax.checkpoints import run_model
from tlt_jax.checkpoints.drafter_files import LoadedDrafter, save_drafter
from tlt_jax.checkpoints.huggingface_export import save_policy
from tlt_jax.models.specs import PolicySpec
from tlt_jax.training import build
from tlt_jax.training.drafting import draft_ids, files_of, make_drafter
from tlt_jax.training.settings import Config
from tlt_jax.training.settings_rules import copy_with

DRAFTER_KEYS = ("speculative.method", "drafter.path", "drafter.draft_vocab_size", "drafter.capture_layers")


def networks(what: str) -> tuple[str, ...]:
    """The names in a comma-separated text; ValueError for others and for none."""
    names = tuple(dict.fromkeys(name.strip() for name in what.split(",") if name.strip()))
    for name in names:
        if name not in run_model.NETWORKS:
            raise ValueError(f"--what={name} must be of {', '.join(run_model.NETWORKS)}")
    if not names:
        raise ValueError(f"--what= names nothing; it takes {', '.join(run_model.NETWORKS)}")
    return names


def export(config: Config, workdir: str, output: str, names: Sequence[str], step: int | None) -> Iterator[str]:
    """Write each network (one name: at `output`; several: below it, under their names); a line about each when it is written."""
    step = run_model.find_networks(workdir, names, step)
    spec, source = run_model.read_run_model(workdir)
    mesh = build.make_meshes(config).train
    drafter = run_drafter(config, workdir, spec, step) if "drafter" in names else None
    for name in names:
        place = output if len(names) == 1 else str(epath.Path(output) / name)
        if name == "drafter":
            save_drafter(place, spec, drafter, dtype=source.file_dtype)
        else:
            network = run_model.load_network(workdir, name, step=step, mesh=mesh)
            save_policy(place, network.spec, network.params, source=source)
        yield f"{name} of step {step}, {source.file_dtype}: {place}"


def run_drafter(config: Config, workdir: str, spec: PolicySpec, step: int) -> LoadedDrafter:
    """The drafter of a checkpoint, with the form and draft ids that the run's own config leads to; a drafter.path of `config` is where the run's lies now.

    Raises FileNotFoundError where the directory that the run started its drafter from is gone.
    """
    learned = run_model.load_run_drafter(workdir, step)
    said = {name: learned.config[name] for name in DRAFTER_KEYS if name in learned.config}  # a run of an earlier version has fewer keys
    said = {name: tuple(value) if isinstance(value, list) else value for name, value in said.items()}
    if said["drafter.path"] and config.drafter.path:
        said["drafter.path"] = config.drafter.path
    config = copy_with(config, said)
    try:
        drafter = make_drafter(config, spec)
        ids = draft_ids(config, drafter)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{error}; the run's drafter started from there and keeps its form and draft tokens: say where it lies now with "
            f"--config.speculative.method={config.speculative.method} --config.drafter.path=DIR") from error
    return LoadedDrafter(files_of(config, drafter), learned.params if ids is None else learned.params | {"ids": ids})
