"""Acceptance by verification rule and draft level, on the policy's own answers to prompts of a task."""

from collections.abc import Sequence

from tlt_jax.checkpoints.pretrained import load_policy
from tlt_jax.distillation.acceptance import Rules
from tlt_jax.masked import WeightedMean
from tlt_jax.runtime.draft_driver import Teacher
from tlt_jax.runtime.policy_driver import place_batch
from tlt_jax.runtime.programs import acceptance_program, new_drafter, prepare_program
from tlt_jax.sharding import movement
from tlt_jax.sharding.rules import batch_rows_multiple
from tlt_jax.training import build
from tlt_jax.training.answering import packed_answers, sample_answers
from tlt_jax.training.benchmark import Plan
from tlt_jax.training.drafting import load_params, make_drafter
from tlt_jax.training.settings import Config
from tlt_jax.training.settings_rules import copy_with

RULES = ("coupled_1", "coupled_m", "greedy_m", "rejection")


def verify(config: Config, plan: Plan, rules: Rules) -> list[dict]:
    """One record a level with the four rates. Raises ValueError for a drafter that reads no features."""
    if config.speculative.method not in ("eagle", "eagle3"):
        raise ValueError(
            f"speculative.method={config.speculative.method} gives no distribution over tokens to compare: use --drafter, or set it to eagle or eagle3")
    model = build.open_checkpoint(config)
    task, _ = build.make_tasks(config, model.tokenizer)
    prompts = list(task.prompts())[: max(plan.rows)]
    answers = sample_answers(copy_with(config, {"rollout.max_new_tokens": plan.new_tokens}), model, prompts, 1)
    meshes, drafter = build.make_meshes(config), make_drafter(config, model.spec)
    policy = load_policy(config.model.path, dtype="float32", mesh=meshes.train).params
    params = load_params(config, model.spec, "float32") or new_drafter(drafter, policy, config.seed)
    prepared, program = prepare_program(drafter)(params, policy), acceptance_program(drafter, rules)
    teacher, totals = Teacher(meshes.train, drafter, policy), {}
    for batch in packed_answers(config, answers, batch_rows_multiple(meshes.train)):
        found = program(prepared, policy, place_batch(meshes.train, teacher.fill(batch)))
        totals = {name: totals.get(name, WeightedMean(0.0, 0.0)) + mean for name, mean in found.items()}
    rates = {name: float(movement.to_host(mean.value)) for name, mean in totals.items()}
    slots = [int(movement.to_host(totals[f"coupled_1_{level}"].weight)) for level in range(rules.levels)]
    return [{"level": level + 1, "slots": slots[level]} | {rule: rates[f"{rule}_{level}"] for rule in RULES} for level in range(rules.levels)]


def table(records: Sequence[dict], candidates: int) -> str:
    """Records as people read them."""
    titles = [rule.replace("_m", f"-{candidates}").replace("_", "-") for rule in RULES]
    lines = [f"{'level':>5} {'slots':>7} " + " ".join(f"{title:>10}" for title in titles)]
    return "\n".join([*lines, *(f"{one['level']:>5} {one['slots']:>7} " + " ".join(f"{one[rule]:>10.3f}" for rule in RULES) for one in records)])
