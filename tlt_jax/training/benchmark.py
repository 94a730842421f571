"""Times plain rollouts on this machine: rows × tokens, compilation and prefill apart.

It never tunes to its inputs: every row decodes exactly `new_tokens` tokens (stop ids are ignored), the same prompts for every repeat.
"""

import dataclasses
import json
import statistics
import time
from collections.abc import Sequence

import jax
from etils import epath

from tlt_jax.runtime.programs import compile_counter
from tlt_jax.training import build
from tlt_jax.training.generation import GENERATE_STEP, open_engine
from tlt_jax.training.rollout_phase import Engine, Phase, Weights
from tlt_jax.training.settings import Config
from tlt_jax.training.settings_rules import copy_with


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is measured."""

    rows: tuple[int, ...]
    new_tokens: int
    repeats: int


def rollout(config: Config, plan: Plan) -> list[dict]:
    """One record for each number of rows: decode tokens/s (median, min, max over repeats), prefill and compile seconds."""
    model = build.open_checkpoint(config)
    task, _ = build.make_tasks(config, model.tokenizer)
    prompts = list(task.prompts())
    if max(plan.rows) > len(prompts):
        raise ValueError(f"{max(plan.rows)} rows need as many prompts, and {task.name} has {len(prompts)}: lower --rows")
    model = dataclasses.replace(model, stop_ids=())
    engine, weights = open_engine(copy_with(config, {"rollout.slots": max(plan.rows)}), model, prompts[: max(plan.rows)])
    records = []
    for count in plan.rows:
        chosen, compiles, started = prompts[:count], compile_counter().count, time.monotonic()
        _seconds(engine, weights, chosen, plan.new_tokens)
        _seconds(engine, weights, chosen, 1)
        warm, compiles = time.monotonic() - started, compile_counter().count - compiles
        prefills = [_seconds(engine, weights, chosen, 1) for _ in range(plan.repeats)]
        totals = [_seconds(engine, weights, chosen, plan.new_tokens) for _ in range(plan.repeats)]
        prefill = statistics.median(prefills)
        rates = [count * (plan.new_tokens - 1) / (total - prefill) for total in totals]
        records.append({
            "rows": count, "new_tokens": plan.new_tokens, "repeats": plan.repeats, "tokens_per_second": statistics.median(rates), "lowest": min(rates),
            "highest": max(rates), "prefill_seconds": prefill, "warm_up_seconds": warm, "compiles": compiles, "dtype": build.resolve_dtype(config, "rollout"),
            "jax": jax.__version__, "device": jax.devices()[0].device_kind, "slices": len(engine.drivers)})
        print(table(records[-1:], header=len(records) == 1), flush=True)
    return records


def _seconds(engine: Engine, weights: Weights, prompts: Sequence, new_tokens: int) -> float:
    engine = dataclasses.replace(engine, config=copy_with(engine.config, {"rollout.max_new_tokens": new_tokens}))
    started = time.monotonic()
    engine.run(weights, prompts, Phase("bench", 1, engine.config.rollout.temperature, GENERATE_STEP), lambda completion: None)
    return time.monotonic() - started


def table(records: Sequence[dict], *, header: bool) -> str:
    """Records as people read them."""
    lines = [f"{'rows':>5} {'tokens/s':>9} {'lowest':>8} {'highest':>8} {'prefill s':>9} {'warm-up s':>9} {'compiles':>8}"] if header else []
    for one in records:
        lines.append(
            f"{one['rows']:>5} {one['tokens_per_second']:>9.1f} {one['lowest']:>8.1f} {one['highest']:>8.1f} {one['prefill_seconds']:>9.2f} "
            f"{one['warm_up_seconds']:>9.1f} {one['compiles']:>8}")
    return "\n".join(lines)


def write(path: str, records: Sequence[dict]) -> None:
    """The records as JSON."""
    epath.Path(path).write_text(json.dumps(list(records), indent=2) + "\n")
