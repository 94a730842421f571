"""What is checked of data and files before any device work, beyond the config's own rules."""

from collections.abc import Mapping

from tlt_jax.tasks.prompts import Prompt, Task
from tlt_jax.training import build
from tlt_jax.training.curriculum_order import parts_of
from tlt_jax.training.lessons import Lessons, read_lessons
from tlt_jax.training.rollout_phase import check_lengths
from tlt_jax.training.settings import Config


def check_data(config: Config, model: build.Model, task: Task, held_out: Task | None) -> dict[str, Lessons]:
    """What the supervised stages learn from. Raises ValueError for prompts that the model or the batch cannot take, and for rows of no use."""
    prompts, count = task.prompts(), config.batch.prompts_per_step
    if "rl" in config.stages.order:
        drawn = [*prompts, *(held_out.prompts() if held_out is not None else ())]
        check_lengths(model.spec, drawn, config.rollout.max_new_tokens, _place)
        if count > len(prompts):
            raise ValueError(
                f"batch.prompts_per_step={count} different prompts are drawn for a step and the training data hold {len(prompts)}: lower it, or add rows")
        if config.reward.kind == "model" and config.reward.path:
            check_lengths(build.check_reward_model(config.reward.path, model.spec), drawn, config.rollout.max_new_tokens, _place)
        if config.curriculum.advance != "off":
            parts_of(config, prompts)
    return read_lessons(config, model.tokenizer, task)


def _place(prompt: Prompt) -> str:
    return f"{prompt.source}, row {prompt.row}"


def check_budget(config: Config, task: Task, lessons: Mapping[str, Lessons], rows: int) -> None:
    """`rows` sequences, one for each device that shares the batch, have to fit into a micro-batch and into an update of the drafter, if it learns."""
    for one in lessons.values():
        one.packing(config, rows)
    longest = max(len(prompt.prompt_ids) for prompt in task.prompts()) + config.rollout.max_new_tokens
    budgets = {"batch.tokens_per_microbatch": config.batch.tokens_per_microbatch}
    if config.drafter.quanta_per_step:
        budgets["distill.tokens_per_update"] = config.distill.tokens_per_update
    for name, budget in budgets.items() if "rl" in config.stages.order else ():
        if rows * longest > budget:
            raise ValueError(
                f"{name}={budget} cannot hold one sequence of {longest} tokens (longest prompt + rollout.max_new_tokens) for each of the {rows} devices "
                f"that share the batch: raise it to at least {rows * longest}")
