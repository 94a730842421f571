"""The main job: runs the stages that the config lists.

python -m tlt_jax.train --config=configs/quickstart.py --workdir=runs/quickstart
"""

import sys

from absl import logging

from tlt_jax.rewards.items import RewardError
from tlt_jax.training.command_line import load_config


def main(argv: list[str]) -> int:
    """Parse, check, train; the exit code (0 done, 2 bad input, 1 given up, 143 or 130 stopped on request after saving)."""
    config, args = load_config(argv, command="train", description="Train a reasoning model: supervised warm-up and reinforcement learning.")
    from tlt_jax.checkpoints.run_state import SaveFailed  # after the config is known to be good: importing jax takes seconds
    from tlt_jax.runtime.policy_driver import NonFiniteUpdates
    from tlt_jax.training import dry_run, stages

    logging.set_verbosity(logging.WARNING)
    try:
        if args.dry_run:
            return dry_run.run(config)
        stages.run(config, args.workdir)
    except stages.Preempted as stop:
        print(stop)
        return stop.exit_code
    except (OSError, ValueError, RewardError, SaveFailed, NonFiniteUpdates) as error:
        print(f"python -m tlt_jax.train: error: {error}", file=sys.stderr)
        return 1 if isinstance(error, (SaveFailed, NonFiniteUpdates)) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
