"""Batch generation with the rollout engine: prompts in a JSONL file, completions in another.

python -m tlt_jax.generate --model=DIR --prompts=PROMPTS.jsonl --output=COMPLETIONS.jsonl --config.rollout.temperature=0.7
"""

import sys

from absl import logging

from tlt_jax.training.command_line import load_config

DESCRIPTION = """Complete the prompts of a file. A row holds prompt (text; the chat template is applied where the model has one), messages (a conversation; an
assistant turn at its end is its answer and no part of the prompt) or prompt_ids (token ids, no tokenizer needed), and may hold an id. The output has, in the
same order, rollout.num_generations rows a prompt: id, sample, prompt, prompt_ids, token_ids, logprobs, text, finish_reason, accept_length; and
sampling_logprobs when top_k, top_p or min_p is on. Read from the config: seed, model, rollout, mesh, precision, data.system_prompt and data.instruction."""
EXAMPLE = "python -m tlt_jax.generate --model=runs/quickstart --prompts=prompts.jsonl --output=completions.jsonl --config.rollout.num_generations=4"


def _flags(parser) -> None:
    parser.add_argument("--model", metavar="DIR", help="Hugging Face directory, .gguf file, workdir of a run or hub id (default: model.path of the config)")
    parser.add_argument("--prompts", metavar="FILE", help="JSONL, JSON or parquet file of prompts")
    parser.add_argument("--output", metavar="FILE.jsonl", help="file of the completions; OUTPUT.partial until it is complete")
    parser.add_argument("--drafter", metavar="DIR", help="EAGLE or EAGLE-3 directory: decoding is speculative, with the same tokens")


def main(argv: list[str]) -> int:
    """Parse, check, generate; the exit code (0 done, 2 bad input, 130 interrupted)."""
    config, args = load_config(argv, extra_flags=_flags, command="generate", description=DESCRIPTION, example=EXAMPLE)
    from tlt_jax.training import drafting, generation  # after the config is known to be good: importing jax takes seconds

    logging.set_verbosity(logging.WARNING)
    config.model.path = args.model or config.model.path
    try:
        if args.drafter:
            drafting.use_files(config, args.drafter)
        if config.model.path == "scratch":
            raise ValueError("--model=DIR is needed: a Hugging Face directory, a .gguf file, the workdir of a run or a hub id")
        if not args.prompts or not args.output:
            raise ValueError("--prompts=FILE.jsonl and --output=FILE.jsonl are needed")
        generation.generate(config, args.prompts, args.output)
    except (OSError, ValueError) as error:
        print(f"python -m tlt_jax.generate: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
