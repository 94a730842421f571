"""Times rollouts on this machine, plain and speculative side by side: rows × strategies, compilation and prefill apart.

It never tunes to its inputs: every row decodes exactly `new_tokens` tokens (stop ids are ignored), each repeat takes the next prompts of the task, and no
answers are kept. The strategies of one number of rows take turns on the same prompts, forward and backward (ABBA), so that a slow spell of the machine falls
on all of them.
"""

import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from etils import epath
from matplotlib.figure import Figure

from tlt_jax.runtime.programs import compile_counter
from tlt_jax.runtime.rollout_driver import RolloutDriver
from tlt_jax.scheduling import selector_replay
from tlt_jax.scheduling.strategy_selector import SelectorSettings
from tlt_jax.strategies import OFF, Strategy, parse_strategies, strategy_name
from tlt_jax.tasks.prompts import Prompt
from tlt_jax.training import build, roofline
from tlt_jax.training.curves import write_png
from tlt_jax.training.generation import GENERATE_STEP, open_engine
from tlt_jax.training.progress import Progress
from tlt_jax.training.rollout_phase import Engine, Phase, Weights
from tlt_jax.training.settings import Config
from tlt_jax.training.settings_rules import copy_with

EVERY_NUMBER = 2**30  # of rows: a bench speculates with all that it is asked for
RESAMPLES, INTERVAL = 2000, (2.5, 97.5)  # bootstrap of the ratio to plain decoding, in percent


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is measured."""

    rows: tuple[int, ...]
    new_tokens: int
    repeats: int


class Run(NamedTuple):
    """One rollout. The prefill lasts until every row's first token has been read; tokens and rounds (a round of each row counts) are what came after it."""

    prefill_seconds: float
    decode_seconds: float
    tokens: int
    rounds: int


@dataclasses.dataclass
class Arm:
    """One strategy's engine and its seconds."""

    strategy: Strategy
    engine: Engine
    warm_up: float = 0.0
    compiles: int = 0
    runs: list[Run] = dataclasses.field(default_factory=list)

    def seconds(self) -> list[float]:
        """Decoding alone, of each repeat."""
        return [run.decode_seconds for run in self.runs]

    def rounds(self) -> int:
        """Forwards of the policy after the prefill, of each row, added up."""
        return sum(run.rounds for run in self.runs)


def rollout(config: Config, plan: Plan) -> list[dict]:
    """One record for each number of rows and strategy: decode tokens/s (median, min, max over repeats), accept length, ratio to plain, compile seconds."""
    model = build.open_checkpoint(config)
    task, _ = build.make_tasks(config, model.tokenizer)
    prompts = list(task.prompts())
    if max(plan.rows) > len(prompts):
        raise ValueError(f"{max(plan.rows)} rows need as many prompts, and {task.name} has {len(prompts)}: lower --rows")
    model = dataclasses.replace(model, stop_ids=())
    taken = prompts[: max(plan.rows) * plan.repeats]
    engine, weights = open_engine(copy_with(config, {"rollout.slots": max(plan.rows), "drafter.lookup_history": 0}), model, taken)
    strategies = [OFF] if config.speculative.method == "off" else [OFF, *parse_strategies(config.speculative.strategies)]
    records = []
    machine = roofline.measure(build.resolve_dtype(config, "rollout"))
    for count in plan.rows:
        arms = [Arm(strategy, _with_strategy(engine, strategy)) for strategy in strategies]
        _measure(arms, weights, [_rotated(taken, repeat * count)[:count] for repeat in range(plan.repeats)], plan)
        for arm in arms:
            records.append(_record(arm, arms[0], count, plan) | dataclasses.asdict(machine) | {
                "roofline_fraction": _roofline_fraction(arm, machine, weights, count),
                "dtype": build.resolve_dtype(config, "rollout"), "temperature": config.rollout.temperature, "drafter": config.speculative.method,
                "jax": jax.__version__, "device": jax.devices()[0].device_kind, "slices": len(engine.drivers)})
            print(table(records[-1:], header=len(records) == 1), flush=True)
    return records


def _rotated(prompts: list[Prompt], start: int) -> list[Prompt]:
    start %= len(prompts)
    return prompts[start:] + prompts[:start]


def _with_strategy(engine: Engine, strategy: Strategy) -> Engine:
    """The same programs and weights under another strategy, whatever the number of rows."""

    def driver(one: RolloutDriver) -> RolloutDriver:
        selector = dataclasses.replace(one.settings.selector, kind="fixed", strategies=(strategy,) if strategy.depth else (), max_rows=EVERY_NUMBER)
        settings = dataclasses.replace(one.settings, selector=selector, compile_ahead=True)  # rows that end early leave fewer rows in a timed run
        return RolloutDriver(one.programs, settings, one.drafter_params)

    return dataclasses.replace(engine, drivers=[driver(one) for one in engine.drivers])


def _measure(arms: Sequence[Arm], weights: Weights, batches: Sequence[Sequence[Prompt]], plan: Plan) -> None:
    progress = Progress(sys.stderr)
    progress.start(f"rows {len(batches[0])}", len(batches), 0)
    for arm in arms:
        progress.phase(f"compiling {strategy_name(arm.strategy)}", {})
        compiles, started = compile_counter().count, time.monotonic()
        _run(arm, weights, batches[0], plan.new_tokens)
        arm.warm_up, arm.compiles = time.monotonic() - started, compile_counter().count - compiles
        progress.line(f"rows {len(batches[0])}, {strategy_name(arm.strategy)}: compiled and warm after {arm.warm_up:.0f} s, {plan.repeats} timed runs follow")
    compiles = compile_counter().count
    for repeat, prompts in enumerate(batches):
        for arm in arms if repeat % 2 == 0 else reversed(arms):
            progress.phase(f"timing {strategy_name(arm.strategy)}", {})
            arm.runs.append(_run(arm, weights, prompts, plan.new_tokens))
        progress.advance(repeat + 1)
    progress.stop()
    if compile_counter().count > compiles:
        print(f"warning: {compile_counter().count - compiles} programs compiled in timed runs of {len(batches[0])} rows: their slowest repeats say nothing",
              file=sys.stderr)


def _run(arm: Arm, weights: Weights, prompts: Sequence[Prompt], new_tokens: int) -> Run:
    """Prefill and decoding are told apart within one rollout: the difference of two would be noise where they are short."""
    engine = dataclasses.replace(arm.engine, config=copy_with(arm.engine.config, {"rollout.max_new_tokens": new_tokens}))
    done, prefilled = [], []  # of the second: (when, tokens read by then)

    def on_turn() -> None:
        if not prefilled:
            read = [len(one.token_ids) for one in done] + [len(row.tokens) for driver in engine.drivers for row in driver.rows if row is not None]
            if len(read) == len(prompts) and min(read) > 0:
                prefilled.append((time.monotonic(), sum(read)))

    started = time.monotonic()
    engine.run(weights, prompts, Phase("bench", 1, engine.config.rollout.temperature, GENERATE_STEP), done.append, on_turn)
    ended, (entered, read) = time.monotonic(), prefilled[0]
    for used, kept in zip(engine.drivers, arm.engine.drivers, strict=True):
        kept.drafter_params = used.drafter_params
    return Run(entered - started, ended - entered, sum(len(one.token_ids) for one in done) - read, sum(one.forwards - 1 for one in done))


def _record(arm: Arm, plain: Arm, count: int, plan: Plan) -> dict:
    rates = [run.tokens / run.decode_seconds for run in arm.runs]
    lowest, middle, highest = ratio(plain.seconds(), arm.seconds())
    return {
        "rows": count, "strategy": strategy_name(arm.strategy), "new_tokens": plan.new_tokens, "repeats": plan.repeats,
        "tokens_per_second": statistics.median(rates), "lowest": min(rates), "highest": max(rates), "ratio_to_plain": middle,
        "ratio_interval": [lowest, highest], "accept_length": sum(run.tokens for run in arm.runs) / arm.rounds(),
        "prefill_seconds": statistics.median(run.prefill_seconds for run in arm.runs), "warm_up_seconds": arm.warm_up, "compiles": arm.compiles}


def _roofline_fraction(arm: Arm, machine: roofline.Machine, weights: Weights, count: int) -> float:
    """The least time of all rounds over the time that decoding took; rows that end early count as if all ran to the end together."""
    driver, slices = arm.engine.drivers[0], len(arm.engine.drivers)
    tokens = -(-count // slices) * (1 + arm.strategy.budget)
    least = roofline.least_seconds(machine, roofline.decoding_weights(driver.programs.spec, weights.views[0]), tokens)
    return least * arm.rounds() / count / sum(arm.seconds())


def ratio(plain: Sequence[float], arm: Sequence[float]) -> tuple[float, float, float]:
    """(low, median, high) of plain seconds / arm seconds, repeat by repeat, from a bootstrap of the median with a fixed seed."""
    ratios = np.array(plain) / np.array(arm)
    draws = np.median(np.random.default_rng(0).choice(ratios, (RESAMPLES, len(ratios))), axis=1)
    low, high = np.percentile(draws, INTERVAL)
    return float(low), float(np.median(ratios)), float(high)


def replay_selector(config: Config, records: Sequence[dict]) -> str:
    """What `speculative.selector` would have lost on the speeds of earlier records, in words. Raises ValueError when they hold no choice."""
    speeds = {}
    for one in records:
        strategy = OFF if one["strategy"] == strategy_name(OFF) else parse_strategies(one["strategy"])[0]
        speeds.setdefault(one["rows"], {})[strategy] = one["tokens_per_second"] / one["rows"]
    if not all(OFF in arms and len(arms) > 1 for arms in speeds.values()) or not speeds:
        raise ValueError("--table needs records of bench rollout with plain decoding and at least one strategy for each number of rows")
    lines = []
    for rows, arms in speeds.items():
        settings = SelectorSettings(
            config.speculative.selector, tuple(arm for arm in arms if arm != OFF), max_rows=EVERY_NUMBER,
            explore_fraction=config.speculative.explore_fraction, seed=config.seed)
        done = selector_replay.replay(settings, {rows: arms})
        lines.append(f"{rows:>5} rows: {100 * (done.spent / done.best - 1):+.1f} % of the time of the best fixed arm, "
                     f"{strategy_name(max(arms, key=arms.get))}; {100 * (done.spent / done.plain - 1):+.1f} % of plain decoding's")
    return "\n".join(lines)


def table(records: Sequence[dict], *, header: bool) -> str:
    """Records as people read them."""
    titles = (f"{'rows':>5} {'strategy':>9} {'tokens/s':>9} {'lowest':>8} {'highest':>8} {'x plain':>8} {'95 % interval':>14} {'accepted':>8} "
              f"{'prefill s':>9} {'warm-up s':>9} {'compiles':>8} {'roofline':>8}")
    lines = [titles] if header else []
    for one in records:
        low, high = one["ratio_interval"]
        lines.append(
            f"{one['rows']:>5} {one['strategy']:>9} {one['tokens_per_second']:>9.1f} {one['lowest']:>8.1f} {one['highest']:>8.1f} "
            f"{one['ratio_to_plain']:>8.2f} {f'{low:.2f} to {high:.2f}':>14} {one['accept_length']:>8.2f} {one['prefill_seconds']:>9.2f} "
            f"{one['warm_up_seconds']:>9.1f} {one['compiles']:>8} {one['roofline_fraction']:>8.2f}")
    return "\n".join(lines)


def write(path: str, records: Sequence[dict], *, drawn: bool) -> str:
    """The records as JSON, and drawn beside them where that is wanted; says where they are."""
    epath.Path(path).write_text(json.dumps(list(records), indent=2) + "\n")
    if not drawn:
        return f"records in {path}"
    picture = epath.Path(path).with_suffix(".png")
    draw(picture, records)
    return f"records in {path}, drawn in {picture}"


def draw(path: epath.Path, records: Sequence[dict]) -> None:
    """Speed, gain over plain decoding and accept length of each strategy against the number of rows, as a PNG."""
    figure = Figure(figsize=(13, 4), layout="constrained")
    panels = (("decode tokens/s", "tokens_per_second"), ("x plain decoding", "ratio_to_plain"), ("tokens a round (bonus token too)", "accept_length"))
    for axes, (title, name) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        for strategy in dict.fromkeys(one["strategy"] for one in records):
            kept = [one for one in records if one["strategy"] == strategy]
            axes.plot([one["rows"] for one in kept], [one[name] for one in kept], marker="o", label=strategy)
        axes.set(title=title, xlabel="rows", xscale="log", ylim=(0, None))
        axes.set_xticks(sorted({one["rows"] for one in records}), labels=sorted({one["rows"] for one in records}), minor=False)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    axes.legend()
    write_png(figure, path)


def read(path: str | None) -> list[dict]:
    """Records that `write` wrote. Raises ValueError without a path."""
    if not path:
        raise ValueError("replay needs --table=FILE.json, which bench rollout --output wrote")
    return json.loads(epath.Path(path).read_text())
