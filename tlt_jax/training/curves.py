"""Draws the curves that people look at first, from the records of metrics.jsonl, as one PNG without a display.

Reads no file and no config.
"""

import io
from collections.abc import Sequence

from etils import epath
from matplotlib.figure import Figure

_PANELS = (
    ("reward", ("reward/mean",)),
    ("completion length (tokens)", ("completions/length_mean", "completions/length_max")),
    ("entropy (nats)", ("policy/entropy",)),
    ("accuracy", ("reward/accuracy", "reward/heldout_accuracy")),
)


def draw_curves(records: Sequence[dict], path: epath.Path) -> None:
    """Reward, length, entropy and accuracy against the RL step; a stage without these metrics is left out, and no record at all draws nothing."""
    panels = [(title, [(name, *points(records, name)) for name in names]) for title, names in _PANELS]
    if not any(steps for _, series in panels for _, steps, _ in series):
        return
    figure = Figure(figsize=(10, 6), layout="constrained")
    for axes, (title, series) in zip(figure.subplots(2, 2).flat, panels, strict=True):
        axes.set_title(title)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        drawn = [axes.plot(steps, values, marker=".", label=name) for name, steps, values in series if steps]
        if len(drawn) > 1:
            axes.legend()
    write_png(figure, path)


def write_png(figure: Figure, path: epath.Path) -> None:
    """The figure as a file, on any file system."""
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=110)
    path.write_bytes(image.getvalue())


def points(records: Sequence[dict], name: str) -> tuple[list[int], list[float]]:
    """(RL steps, values) of the records that have a metric."""
    found = [(record["step"], record[name]) for record in records if record["stage"] == "rl" and record.get(name) is not None]
    return [step for step, _ in found], [value for _, value in found]
