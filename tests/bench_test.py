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
from tlt_jax.training import benchmark, roofline

ALPHABET = "abcdefghijklmnop"
LOOKUP = ("--config.speculative.method=prompt_lookup", "--config.speculative.strategies=3_1_3")


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """A function that runs `bench rollout` on one device: the records it wrote."""
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

    def run(*options):
        output = tmp_path / "speeds.json"
        assert bench.main(["rollout", f"--model={model}", f"--output={output}", "--config.data.task=prompts", f"--config.data.path={prompts}", *options]) == 0
        return json.loads(output.read_text())

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


def test_a_round_takes_the_longer_of_reading_the_weights_and_multiplying_them():
    machine, weights = roofline.Machine(bytes_per_second=1e9, flops_per_second=1e12), (4_000_000, 1_000_000)
    assert roofline.least_seconds(machine, weights, 1) == 4e-3
    assert roofline.least_seconds(machine, weights, 10_000) == pytest.approx(2e-2)
