"""A run's networks as directories that transformers, vLLM and SGLang load.

python -m tlt_jax.export --workdir=runs/quickstart --output=exported
"""

import sys

from absl import logging

from tlt_jax.training.command_line import load_config

DESCRIPTION = """Write the policy of a run (sharded safetensors, config, generation config, tokenizer and chat template of the model that it started from) as a
Hugging Face directory; --what=critic writes the critic as a sequence-classification model with one label, --what=drafter the EAGLE or EAGLE-3 drafter that
learned in the run (drafter.quanta_per_step), for generate --drafter, vLLM and SGLang. With several names each gets a directory of its own in the output
directory. The arrays are read over mesh.train of the config, whatever the run's devices were; what the drafter is stands in the checkpoint."""
EXAMPLE = "python -m tlt_jax.export --workdir=runs/quickstart --output=exported --step=60"


def _flags(parser) -> None:
    parser.add_argument("--output", metavar="DIR", help="directory to write; an earlier export there is replaced")
    parser.add_argument("--step", metavar="N", type=int, help="number of the checkpoint (default: the newest complete one)")
    parser.add_argument("--what", metavar="NAMES", default="policy", help="policy, critic, drafter, or several with commas (default: policy)")


def main(argv: list[str]) -> int:
    """Parse, check, export; the exit code (0 done, 2 bad input)."""
    config, args = load_config(argv, extra_flags=_flags, command="export", description=DESCRIPTION, example=EXAMPLE)
    from tlt_jax.training import exporting  # after the config is known to be good: importing jax takes seconds

    logging.set_verbosity(logging.WARNING)
    try:
        if not args.output:
            raise ValueError("--output=DIR is needed: the directory to write")
        names = exporting.networks(args.what)
        for line in exporting.export(config, args.workdir, args.output, names, args.step):
            print(line)
    except (OSError, ValueError) as error:
        print(f"python -m tlt_jax.export: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
