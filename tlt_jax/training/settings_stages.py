"""Declares the keys of the stages of a run, of the curriculum and of the evaluation; see settings.py for the form of a declaration."""

from math import inf

FROM_0, FROM_1, SHARE, BELOW_1 = (0, inf), (1, inf), (0, 1), (0, 0.9999999)


def stages() -> dict:
    """The stages in the order in which they can run; the supervised ones have 5 % warm-up and cosine decay."""
    return {
        "order": (("rl",), "stages to run, in this order: pretrain, sft, reward_model, rl"),
        "pretrain": {
            "steps": (1000, "updates on plain text, in which every token counts", FROM_0),
            "path": ("", "text files, or JSONL or parquet rows with a text column; '' = the task's prompts with their worked answers"),
            "length": (512, "tokens of a piece; longer texts are cut into several", (2, inf)),
            "batch": (64, "pieces of one update", FROM_1),
            "lr": (3e-4, "peak learning rate", FROM_0),
            "held_out": (0.02, "share of the pieces that is only measured on, before the first update and after the last; 0 = none", BELOW_1),
        },
        "sft": {
            "steps": (300, "supervised updates on worked answers", FROM_0),
            "path": ("", "JSONL or parquet file of conversations, or of prompts and completions; '' = the task's worked answers"),
            "batch": (64, "sequences of one supervised update", FROM_1),
            "lr": (1e-3, "peak learning rate; 5 % warm-up, cosine decay", FROM_0),
            "held_out": (0.0, "share of the sequences that is only measured on, before the first update and after the last; 0 = none", BELOW_1),
        },
        "reward_model": {
            "steps": (300, "updates of a reward model, made from the policy of that moment, on pairs of a better and a worse answer", FROM_0),
            "path": ("", "JSONL or parquet file with columns chosen and rejected; '' = pairs that the task makes (arithmetic)"),
            "batch": (32, "pairs of one update", FROM_1),
            "lr": (1e-4, "peak learning rate", FROM_0),
            "margin": (0.0, "by how much the better answer's score should be higher, in the loss", FROM_0),
            "held_out": (0.1, "share of the pairs that is only measured on, before the first update and after the last; 0 = none", BELOW_1),
        },
        "rl": {"steps": (100, "RL steps in the whole run, resumed ones included", FROM_0)},
    }


def curriculum() -> dict:
    """Which prompts RL draws when."""
    return {
        "advance": (
            "off", "when RL goes on to harder prompts: off (all from the start), success (enough right answers) or step (after a number of steps)",
            ("off", "success", "step")),
        "stages": (5, "stages from easy to hard; prompts are split by their difficulty into parts of about one size, equal difficulties together", (2, inf)),
        "success_rate": (0.7, "success: share of right answers at which the next stage begins", SHARE),
        "window": (5, "success: steps over which that share is a mean, all of them in the stage", FROM_1),
        "steps_per_stage": (20, "step: RL steps of each stage", FROM_1),
        "review": (0.2, "share of the prompts of a step that come from easier stages", BELOW_1),
    }


def evaluation() -> dict:
    """Held-out accuracy in RL."""
    return {
        "every_steps": (0, "RL steps between evaluations on held-out rows; 0 = only before and at the end", FROM_0),
        "before": (True, "evaluate before the first step"),
        "limit": (0, "held-out prompts used; 0 = all", FROM_0),
        "num_generations": (1, "completions of one prompt (n of pass@k and maj@k)", FROM_1),
        "temperature": (0.0, "sampling temperature of evaluation", FROM_0),
        "samples": (8, "completions of an evaluation written to samples.jsonl", FROM_0),
    }
