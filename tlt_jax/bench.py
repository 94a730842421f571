"""Measures this machine: rollouts at several numbers of rows, plain and with each strategy of a drafter; training and saving a drafter.

python -m tlt_jax.bench rollout --model=FILE.gguf --rows=1,4,16,64 --config.data.task=gsm8k --config.data.path=test.jsonl
"""

import sys

from absl import logging

from tlt_jax.training.command_line import load_config

DESCRIPTION = """Time rollouts of a model on the prompts of a task: decode tokens per second for each number of rows, prefill and compilation apart. Every row
decodes exactly --new_tokens tokens. With a drafter each of speculative.strategies is measured in turns with plain decoding. Read from the config: model, data,
rollout, speculative, drafter, mesh, precision, seed. `verify` compares how often a draft token is accepted under coupled noise, greedy candidates and rejection
sampling, on the answers of the first --rows prompts. `replay` runs speculative.selector on the speeds that `rollout` wrote with --output, and says what its
choices cost. `distill` trains a drafter on the answers of the first --rows prompts, packed and padded, and times its checkpoints (config: distill, too).
`compare` prints and draws --metrics of --runs side by side."""
EXAMPLE = "python -m tlt_jax.bench rollout --model=runs/quickstart --rows=4,16 --new_tokens=64"


def _flags(parser) -> None:
    parser.add_argument("what", choices=("rollout", "verify", "replay", "distill", "compare"),
                        help="speed, acceptance by verification rule, the selector's choices, drafter training, or runs side by side")
    parser.add_argument("--model", metavar="DIR", help="Hugging Face directory, .gguf file, workdir of a run or hub id")
    parser.add_argument("--drafter", metavar="DIR", help="EAGLE or EAGLE-3 directory; other drafters by speculative.method")
    parser.add_argument("--rows", default="1,4,16,64", help="numbers of rows, comma-separated")
    parser.add_argument("--new_tokens", type=int, default=128, help="tokens that every row decodes")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs after one that compiles")
    parser.add_argument("--candidates", type=int, default=4, help="verify: candidates m of coupled-m and greedy-m")
    parser.add_argument("--table", metavar="FILE.json", help="replay: records of bench rollout")
    parser.add_argument("--runs", metavar="DIR,DIR", help="compare: work directories of train")
    parser.add_argument("--metrics", default="drafter/expected_accept_length,spec/accept_length_drafted", help="compare: names of docs/metrics.md")
    parser.add_argument("--output", metavar="FILE", help="JSON: the records too, and for rollout a picture beside them; compare: PNG of the curves")


def main(argv: list[str]) -> int:
    """Parse, measure; the exit code (0 done, 2 bad input)."""
    config, args = load_config(argv, extra_flags=_flags, command="bench", description=DESCRIPTION, example=EXAMPLE)
    from tlt_jax.training import (  # after the config is known to be good: jax takes seconds
        benchmark,
        distill_benchmark,
        drafting,
        run_comparison,
        verify_benchmark,
    )

    logging.set_verbosity(logging.WARNING)
    config.model.path = args.model or config.model.path
    try:
        if args.what == "compare":
            print(run_comparison.compare(args.runs, args.metrics, args.output))
            return 0
        rows = tuple(int(part) for part in args.rows.split(","))
        if min(rows) < 1 or args.new_tokens < 2 or args.repeats < 1:
            raise ValueError("--rows and --repeats are at least 1, --new_tokens at least 2")
        if args.drafter:
            drafting.use_files(config, args.drafter)
        if args.what == "replay":
            print(benchmark.replay_selector(config, benchmark.read(args.table)))
            return 0
        plan = benchmark.Plan(rows, args.new_tokens, args.repeats)
        if args.what == "rollout":
            records = benchmark.rollout(config, plan)
        elif args.what == "distill":
            records = distill_benchmark.distill(config, plan)
            print(distill_benchmark.table(records))
        else:
            records = verify_benchmark.verify(config, plan, verify_benchmark.Rules(config.rollout.temperature, args.candidates))
            print(verify_benchmark.table(records, args.candidates))
        if args.output:
            print(benchmark.write(args.output, records, drawn=args.what == "rollout"), file=sys.stderr)
    except (OSError, ValueError) as error:
        print(f"python -m tlt_jax.bench: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
