"""Networks of a run to Hugging Face directories. What a directory holds is decided in `checkpoints/huggingface_export.py`."""

from collections.abc import Iterator, Sequence

from etils import epath

from tlt_jax.checkpoints import run_model
from tlt_jax.checkpoints.huggingface_export import save_policy
from tlt_jax.training import build
from tlt_jax.training.settings import Config

NOT_BUILT = ("drafter",)


def networks(what: str) -> tuple[str, ...]:
    """The names in a comma-separated text; ValueError for others, for none and for what is not built."""
    names = tuple(dict.fromkeys(name.strip() for name in what.split(",") if name.strip()))
    for name in names:
        if name in NOT_BUILT:
            raise ValueError(f"--what={name} is not built in this version; built: {', '.join(run_model.NETWORKS)}")
        if name not in run_model.NETWORKS:
            raise ValueError(f"--what={name} must be of {', '.join(run_model.NETWORKS)}")
    if not names:
        raise ValueError(f"--what= names nothing; it takes {', '.join(run_model.NETWORKS)}")
    return names


def export(config: Config, workdir: str, output: str, names: Sequence[str], step: int | None) -> Iterator[str]:
    """Write each network (one name: at `output`; several: below it, under their names); a line about each when it is written."""
    step = run_model.find_networks(workdir, names, step)
    mesh = build.make_meshes(config).train
    for name in names:
        network = run_model.load_network(workdir, name, step=step, mesh=mesh)
        place = output if len(names) == 1 else str(epath.Path(output) / name)
        save_policy(place, network.spec, network.params, source=network.source)
        yield f"{name} of step {step}, {network.source.file_dtype}: {place}"
