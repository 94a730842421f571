"""The bench command on a tiny random model: records, picture, progress, and no compilation inside what is timed."""

import itertools
import json
import math
import types

import jax
import numpy as np
import pytest

from tlt_jax import bench
from tlt_jax.checkpoints.huggingface_export import save_policy
from tlt_jax.models.decoder import abstract_params
from tlt_jax.models.specs import PolicySpec, RopeSpec
from tlt_jax.tasks.character_tokenizer import character_tokenizer
from tlt_jax.training import benchmark, distill_benchmark, roofline
from tlt_jax.training.experience import Trajectory

ALPHABET = "abcdefghijklmnop"
LOOKUP = ("--config.speculative.method=prompt_lookup", "--config.speculative.strategies=3_1_3")


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """A function that runs `bench rollout`, or another word, on one device: the records it wrote."""
    first = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: first)
    monkeypatch.setattr(roofline, "READ_BYTES", 2**20)
    monkeypatch.setattr(roofline, "MATMUL_WIDTH", 64)
    model, tokenizer = tmp_path / "model", character_tokenizer(ALPHABET, str(tmp_path))
    spec = PolicySpec(
        family="llama", vocab_size=tokenizer.size, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4,
        rope=RopeSpec("default", 100.0), rms_norm_eps=1e-5, max_position_embeddings=64, tied=True, qkv_bias=False, output_bias=False, mlp_bias=False,
        qk_norm=False, windows=(None,) * 2)
    random, prompts = np.random.default_rng(0), tmp_path / "prompts.jsonl"
    save_policy(model, spec, jax.tree.map(lambda leaf: (random.normal(size=leaf.shape) * 0.2).astype(np.float32), abstract_params(spec)))
    character_tokenizer(ALPHABET, str(model))
    prompts.write_text("".join(json.dumps({"prompt": "abc" if row < 2 else ALPHABET[row % 13 : row % 16 + 3], "answer": "a"}) + "\n" for row in range(20)))

    def run(*options, what="rollout", code=0):
        output = tmp_path / "speeds.json"
        assert bench.main([what, f"--model={model}", f"--output={output}", "--config.data.task=prompts", f"--config.data.path={prompts}", *options]) == code
        return json.loads(output.read_text()) if code == 0 else []

    return run


def test_records_hold_every_strategy_and_number_of_rows_and_a_picture_lies_beside_them(measured, tmp_path, capsys):
    records = measured("--rows=1,3", "--new_tokens=9", "--repeats=2", *LOOKUP)
    assert [(one["rows"], one["strategy"]) for one in records] == [(1, "plain"), (1, "3_1_3"), (3, "plain"), (3, "3_1_3")]
    assert all(one["tokens_per_second"] > 0 and one["roofline_fraction"] > 0 and one["accept_length"] >= 1 for one in records)
    assert [one["accept_length"] for one in records if one["strategy"] == "plain"] == [1.0, 1.0]
    assert (tmp_path / "speeds.png").read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr()
    assert "tokens/s" in said.out and "rows 3, 3_1_3: compiled and warm" in said.err


def test_a_machine_that_gets_faster_while_it_is_timed_gives_no_negative_speed(measured, monkeypatch):
    """Every look at this clock is nearer to the last: prefill and decoding, timed in two rollouts, would give less time to both together than to one."""
    looks = itertools.count(1)
    monkeypatch.setattr(benchmark, "time", types.SimpleNamespace(monotonic=lambda: math.log(next(looks))))
    records = measured("--rows=2", "--new_tokens=4", "--repeats=3")
    assert all(0 < one["lowest"] <= one["tokens_per_second"] and one["prefill_seconds"] > 0 for one in records)


def test_rows_that_end_early_leave_a_number_of_rows_that_was_compiled_before_the_clock_started(measured, capsys):
    """The first two prompts are one, so greedy rows end together in the warm-up; later rows draft with different success."""
    measured("--rows=2", "--new_tokens=40", "--repeats=6", "--config.rollout.rounds_per_dispatch=1", "--config.rollout.temperature=0.0", *LOOKUP)
    assert "compiled in timed runs" not in capsys.readouterr().err


def test_packed_and_padded_training_read_the_same_texts_and_a_selective_checkpoint_leaves_the_policy_out(measured, tmp_path, capsys):
    options = ("--config.speculative.method=eagle", "--config.drafter.draft_vocab_size=6", "--config.distill.tokens_per_update=128")
    padded, packed, full, selective = measured("--rows=8", "--new_tokens=12", "--repeats=2", *options, what="distill")
    assert [(one["layout"], one["texts"]) for one in (padded, packed)] == [("padded", 8), ("packed", 8)]
    assert padded["response_tokens"] == packed["response_tokens"] and padded["ratio_to_padded"] == 1
    assert all(one["rows"] * one["row_length"] <= 128 and one["compiles"] > 0 and one["tokens_per_second"] > 0 for one in (padded, packed))
    assert padded["filled"] * padded["batches"] * padded["rows"] * padded["row_length"] == pytest.approx(
        packed["filled"] * packed["batches"] * packed["rows"] * packed["row_length"])
    embedding = 4 * 16 * character_tokenizer(ALPHABET, str(tmp_path)).size
    assert [one["kind"] for one in (full, selective)] == ["full", "selective"]
    assert full["array_bytes"] == selective["array_bytes"] + 3 * embedding and selective["file_bytes"] > 0
    said = capsys.readouterr()
    assert "samples/s" in said.out and "selective" in said.out and "compiled in timed passes" not in said.err


def test_padded_batches_hold_one_text_a_row_and_fill_the_last_batch_with_empty_rows():
    texts = [Trajectory(np.arange(1, length + 1, dtype=np.int32), 2, np.zeros(length - 2, np.float32)) for length in (5, 9, 4)]
    first, second = distill_benchmark.padded_batches(texts, budget=19, row_multiple=1)
    assert first.tokens_BT.shape == second.tokens_BT.shape == (2, 9)
    np.testing.assert_array_equal(first.tokens_BT, [[1, 2, 3, 4, 5, 0, 0, 0, 0], [1, 2, 3, 4, 5, 6, 7, 8, 9]])
    np.testing.assert_array_equal(second.segments_BT, [[1, 1, 1, 1, 0, 0, 0, 0, 0], [0] * 9])
    np.testing.assert_array_equal(second.mask_BT.sum(axis=1), [2, 0])


def test_bench_distill_refuses_what_it_cannot_train(measured, capsys):
    for options, words in (
        (LOOKUP, "speculative.method=prompt_lookup has no weights to train"),
        (("--config.speculative.method=eagle", "--config.distill.tokens_per_update=8"), "distill.tokens_per_update=8 cannot hold one text of up to")):
        measured("--rows=4", "--new_tokens=12", *options, what="distill", code=2)
        assert words in capsys.readouterr().err


def test_a_round_takes_the_longer_of_reading_the_weights_and_multiplying_them():
    machine, weights = roofline.Machine(bytes_per_second=1e9, flops_per_second=1e12), (4_000_000, 1_000_000)
    assert roofline.least_seconds(machine, weights, 1) == 4e-3
    assert roofline.least_seconds(machine, weights, 10_000) == pytest.approx(2e-2)


def run_directory(tmp_path, name, values):
    """A work directory whose RL steps from 1 on have these values of a metric."""
    (tmp_path / name).mkdir()
    records = [{"stage": "sft", "step": 1, "spec/accept_length_drafted": 9.0}] + [
        {"stage": "rl", "step": step, "spec/accept_length_drafted": value} for step, value in enumerate(values, start=1)]
    (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(tmp_path / name)


def test_runs_are_compared_by_how_they_began_and_ended_and_drawn(tmp_path, capsys):
    runs = run_directory(tmp_path, "adapted", [1, 1, 2, 2, 2, 2, 3, 4]), run_directory(tmp_path, "frozen", [1.0])
    picture = tmp_path / "both.png"
    assert bench.main(["compare", f"--runs={','.join(runs)}", "--metrics=spec/accept_length_drafted", f"--output={picture}"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[-3:] for line in lines[1:]] == [["8", "1.000", "3.500"], ["1", "1.000", "1.000"]]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "message"),
    [((), "compare needs --runs"), (("--runs=nowhere",), "nowhere/metrics.jsonl: there is no such file"), (("--metrics=spec/nothing",), "has spec/nothing")])
def test_a_comparison_without_runs_or_numbers_says_what_is_missing(flags, message, tmp_path, capsys):
    runs = () if not flags or "--runs" in flags[0] else (f"--runs={run_directory(tmp_path, 'one', [1.0])}",)
    assert bench.main(["compare", *runs, *flags]) == 2
    assert message in capsys.readouterr().err
