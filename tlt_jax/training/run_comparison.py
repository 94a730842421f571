"""Metrics of several runs side by side: a table of how they began and ended, and a picture with one panel for each metric."""

import statistics
from collections.abc import Sequence

from etils import epath
from matplotlib.figure import Figure

from tlt_jax.training.curves import points, write_png
from tlt_jax.training.json_lines import JsonLines

PART = 4  # begin and end are means over a quarter of the steps each


def compare(runs: str | None, metrics: str, output: str | None) -> str:
    """The table of metrics of runs, both comma-separated; drawn to `output` (PNG), too, where it is given.

    Raises ValueError without runs or for a metric that none has, FileNotFoundError for a directory without metrics.jsonl.
    """
    if not runs:
        raise ValueError("compare needs --runs=DIR,DIR: work directories of train")
    paths = {run: epath.Path(run) / "metrics.jsonl" for run in runs.split(",")}
    for path in paths.values():
        if not path.exists():
            raise FileNotFoundError(f"{path}: there is no such file; --runs takes work directories of train, separated by commas")
    records = {run: JsonLines(path).read() for run, path in paths.items()}
    text = table(records, metrics.split(","))
    if output:
        draw(records, metrics.split(","), epath.Path(output))
    return text


def table(runs: dict[str, list[dict]], metrics: Sequence[str]) -> str:
    """For each metric and run: RL steps that have it, and its mean over their first and their last quarter. Raises ValueError for one that no run has."""
    lines = [f"{'metric':<34} {'run':<34} {'steps':>5} {'begin':>9} {'end':>9}"]
    for name in metrics:
        found = {run: points(records, name)[1] for run, records in runs.items()}
        if not any(found.values()):
            raise ValueError(f"--metrics: no RL step of any run has {name}; docs/metrics.md lists them")
        for run, values in found.items():
            part = max(1, len(values) // PART)
            ends = (f"{statistics.fmean(some):>9.3f}" for some in (values[:part], values[-part:])) if values else ("-".rjust(9), "-".rjust(9))
            lines.append(f"{name:<34} {run[-34:]:<34} {len(values):>5} {' '.join(ends)}")
    return "\n".join(lines)


def draw(runs: dict[str, list[dict]], metrics: Sequence[str], path: epath.Path) -> None:
    """Each metric against the RL step, a line for each run, as a PNG."""
    figure = Figure(figsize=(5 * len(metrics), 4), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(metrics), squeeze=False)[0], metrics, strict=True):
        for run, records in runs.items():
            axes.plot(*points(records, name), marker=".", label=run)
        axes.set(title=name, xlabel="RL step")
        axes.grid(alpha=0.3)
    axes.legend()
    write_png(figure, path)
