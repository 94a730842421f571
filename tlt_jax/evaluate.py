"""How well a model does on a task: pass@1, pass@k, avg@n and maj@n, or the metrics of lm-evaluation-harness.

python -m tlt_jax.evaluate --model=runs/quickstart --config=configs/quickstart.py --output=evaluation.json
"""

import sys

from absl import logging

from tlt_jax.rewards.items import RewardError
from tlt_jax.training.command_line import load_config

DESCRIPTION = """Sample evaluation.num_generations completions of a task's held-out rows (data.eval_path, else data.path; generated tasks bring their own) at
evaluation.temperature, judge them, and print pass@1, pass@k (unbiased), avg@n, maj@n and the lengths of right and wrong answers.
With --harness run tasks of lm-evaluation-harness instead."""
EXAMPLE = "python -m tlt_jax.evaluate --model=runs/quickstart --config=configs/quickstart.py --config.evaluation.limit=100"


def _flags(parser) -> None:
    parser.add_argument("--model", metavar="DIR", help="Hugging Face directory, .gguf file, workdir of a run or hub id (default: model.path of the config)")
    parser.add_argument("--output", metavar="FILE.json", help="also write the report as JSON")
    parser.add_argument("--harness", metavar="TASK[,TASK]", help="tasks of lm-evaluation-harness instead (package lm_eval, installed by hand)")
    parser.add_argument("--harness_tasks", metavar="DIR", help="own tasks as YAML files; one with the name of a shipped task replaces it")
    parser.add_argument("--harness_shots", metavar="N", type=int, help="examples before each question (default: what the task says)")
    parser.add_argument("--harness_chat", action="store_true", help="ask through the chat template")
    parser.add_argument("--harness_context", metavar="N", type=int, help="tokens that are read at once (default: the model's positions)")


def main(argv: list[str]) -> int:
    """Parse, check, evaluate; the exit code (0 done, 2 bad input, 130 interrupted)."""
    config, args = load_config(argv, extra_flags=_flags, command="evaluate", description=DESCRIPTION, example=EXAMPLE)
    from tlt_jax.training import generation, harness, model_evaluation  # after the config is known to be good: importing jax takes seconds

    logging.set_verbosity(logging.WARNING)
    config.model.path = args.model or config.model.path
    try:
        tasks = tuple(filter(None, (args.harness or "").split(",")))
        wanted = harness.Wanted(tasks, args.harness_tasks, args.harness_shots, args.harness_chat, args.harness_context)
        if config.model.path == "scratch":
            raise ValueError("--model=DIR is needed: a Hugging Face directory, a .gguf file, the workdir of a run or a hub id")
        if args.output:
            generation.refuse_output(args.output)
        if wanted.tasks:
            found = harness.evaluate(config, wanted)
            print(harness.table(found))
        else:
            found = model_evaluation.evaluate(config)
            print(model_evaluation.table(found))
        if args.output:
            model_evaluation.write_report(args.output, found)
    except (OSError, ValueError, RewardError) as error:
        print(f"python -m tlt_jax.evaluate: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
