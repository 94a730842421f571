"""The main job: runs the stages that the config lists.

python -m tlt_jax.train --config=configs/quickstart.py --workdir=runs/quickstart
"""

import sys

from absl import logging

from tlt_jax.rewards.items import RewardError
from tlt_jax.training.command_line import load_config

DESCRIPTION = """Train a reasoning model: supervised warm-up and reinforcement learning. Processes that a cluster starts find each other; others have to be
told which of how many they are (launch/processes.sh does it on one machine)."""


def _flags(parser) -> None:
    parser.add_argument("--coordinator_address", metavar="HOST:PORT", help="several processes without a cluster: where process 0 listens")
    parser.add_argument("--num_processes", type=int, metavar="N", help="how many they are")
    parser.add_argument("--process_id", type=int, metavar="I", help="which of them this is, from 0")


def main(argv: list[str]) -> int:
    """Parse, check, train; the exit code (0 done, 2 bad input, 1 given up, 75 another process is gone, 143 or 130 stopped on request after saving)."""
    config, args = load_config(argv, command="train", description=DESCRIPTION, extra_flags=_flags)
    told = (args.coordinator_address, args.num_processes, args.process_id)
    if any(one is not None for one in told) and (None in told or not 0 <= args.process_id < args.num_processes):
        print("python -m tlt_jax.train: error: --coordinator_address=HOST:PORT, --num_processes=N and --process_id=0 … N-1 go together", file=sys.stderr)
        return 2
    from tlt_jax.sharding import processes  # after the config is known to be good: importing jax takes seconds

    processes.join(None if told[0] is None else processes.Member(*told))
    with processes.LeaveAtOnce():
        return processes.ended(_run(config, args))


def _run(config, args) -> int:
    from tlt_jax.checkpoints.run_state import SaveFailed
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
