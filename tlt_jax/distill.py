"""Warms a drafter up on answers of the policy itself.

python -m tlt_jax.distill --model=FILE.gguf --workdir=DIR --config.speculative.method=eagle3 --config.data.task=gsm8k --config.data.path=train.jsonl
"""

import sys

from absl import logging

from tlt_jax.training.command_line import load_config

DESCRIPTION = """Let the policy answer prompts of the task at rollout.temperature and train an EAGLE or EAGLE-3 drafter on the answers. Answers, metrics and the
drafter (a directory that generate --drafter, SGLang and vLLM load) go to --workdir; what is there already is used again, and an interrupted training goes on.
--rollouts takes saved answers instead. Read from the config: seed, model, data, rollout, speculative.method, drafter, distill, mesh."""
EXAMPLE = "python -m tlt_jax.distill --model=runs/quickstart --workdir=runs/drafter --config.speculative.method=eagle3"


def _flags(parser) -> None:
    parser.add_argument("--model", metavar="DIR", help="Hugging Face directory, .gguf file, workdir of a run or hub id (default: model.path of the config)")
    parser.add_argument("--rollouts", metavar="FILE", help="learn from these answers: rows with prompt_ids and token_ids, as distill and generate write")


def main(argv: list[str]) -> int:
    """Parse, check, distill; the exit code (0 done, 1 given up, 2 bad input, 130 interrupted, 143 stopped on request after saving)."""
    config, args = load_config(argv, extra_flags=_flags, command="distill", description=DESCRIPTION, example=EXAMPLE)
    from tlt_jax.checkpoints.run_state import SaveFailed  # after the config is known to be good: importing jax takes seconds
    from tlt_jax.runtime.policy_driver import NonFiniteUpdates
    from tlt_jax.training import distill_plan, distilling
    from tlt_jax.training.stages import Preempted

    logging.set_verbosity(logging.WARNING)
    config.model.path = args.model or config.model.path
    try:
        if config.model.path == "scratch":
            raise ValueError("--model=DIR is needed: a Hugging Face directory, a .gguf file, the workdir of a run or a hub id")
        if args.dry_run:
            distill_plan.say(config, args.workdir, args.rollouts)
        else:
            distilling.distill(config, args.workdir, args.rollouts)
    except (OSError, ValueError) as error:
        print(f"python -m tlt_jax.distill: error: {error}", file=sys.stderr)
        return 2
    except Preempted as stop:
        print(stop)
        return stop.exit_code
    except (NonFiniteUpdates, SaveFailed) as error:
        print(f"python -m tlt_jax.distill: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; run the same command again to continue", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
