"""How well a model does on a task: pass@1, pass@k, avg@n and maj@n.

python -m tlt_jax.evaluate --model=runs/quickstart --config=configs/quickstart.py --output=evaluation.json
"""

import sys

from absl import logging

from tlt_jax.rewards.items import RewardError
from tlt_jax.training.command_line import load_config

DESCRIPTION = """Sample evaluation.num_generations completions of a task's held-out rows (data.eval_path, else data.path; generated tasks bring their own) at
evaluation.temperature, judge them, and print pass@1, pass@k (unbiased), avg@n, maj@n and the lengths of right and wrong answers."""
EXAMPLE = "python -m tlt_jax.evaluate --model=runs/quickstart --config=configs/quickstart.py --config.evaluation.limit=100"


def _flags(parser) -> None:
    parser.add_argument("--model", metavar="DIR", help="Hugging Face directory, .gguf file, workdir of a run or hub id (default: model.path of the config)")
    parser.add_argument("--output", metavar="FILE.json", help="also write the report as JSON")
    parser.add_argument("--harness", metavar="TASKS", help="not built in this version: tasks of lm-evaluation-harness")


def main(argv: list[str]) -> int:
    """Parse, check, evaluate; the exit code (0 done, 2 bad input, 130 interrupted)."""
    config, args = load_config(argv, extra_flags=_flags, command="evaluate", description=DESCRIPTION, example=EXAMPLE)
    from tlt_jax.training import generation, model_evaluation  # after the config is known to be good: importing jax takes seconds

    logging.set_verbosity(logging.WARNING)
    config.model.path = args.model or config.model.path
    try:
        if args.harness:
            raise ValueError(f"--harness={args.harness}: lm-evaluation-harness is not built in this version; leave --harness out")
        if config.model.path == "scratch":
            raise ValueError("--model=DIR is needed: a Hugging Face directory, a .gguf file, the workdir of a run or a hub id")
        if args.output:
            generation.refuse_output(args.output)
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
