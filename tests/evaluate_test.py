"""The evaluate command: its numbers on scripted answers, the report of a whole run, and what it refuses."""

import json

import jax
import pytest

from tlt_jax import evaluate
from tlt_jax.checkpoints.huggingface_export import save_policy
from tlt_jax.models import decoder
from tlt_jax.models.specs import PolicySpec, RopeSpec
from tlt_jax.rewards.items import Scored
from tlt_jax.strategies import Completion, Request
from tlt_jax.tasks.arithmetic import ALPHABET
from tlt_jax.tasks.character_tokenizer import character_tokenizer
from tlt_jax.tasks.prompts import Prompt
from tlt_jax.training import model_evaluation


def prompt(number, source):
    return Prompt(number, source, number, "q", (1, 5), "a")


def completion(length, reason="stop"):
    return Completion(Request(0, 0, 0, 0, (1, 5), 8, 0, 0), (5,) * length, (0.0,) * length, (0.0,) * length, reason, 0, length)


def scored(score, pred):
    return Scored(0, 0, score, {}, pred, None if score is not None else "crashed", 0.0)


@pytest.fixture
def judged():
    """Three prompts of two sources with four answers each, and one whose reward failed: c = 1, 2 and 4 right."""
    prompts = [prompt(0, "x"), prompt(1, "x"), prompt(2, "y"), prompt(3, "y")]
    scores = [scored(1, "7"), scored(0, "8"), scored(0, "8"), scored(0, None)]  # the majority is wrong
    scores += [scored(0, "1"), scored(1, "3"), scored(1, "3"), scored(0, "2")]  # the majority is right
    scores += [scored(1, "5")] * 4
    scores += [scored(1, "5"), scored(None, None), scored(1, "5"), scored(1, "5")]
    lengths = [10, 20, 30, 40, 2, 4, 6, 8, 1, 1, 1, 1, 99, 99, 99, 99]
    completions = [completion(length, "length" if length == 40 else "stop") for length in lengths]
    return model_evaluation.verdicts(prompts, completions, scores)


def test_pass_at_k_is_unbiased_and_averaged_over_prompts_by_source(judged):
    found = model_evaluation.report(judged, 4)
    assert found["k"] == [1, 2, 4]
    x, y, overall = found["sources"]["x"], found["sources"]["y"], found["overall"]
    assert [x[f"pass@{k}"] for k in (1, 2, 4)] == pytest.approx([0.375, 0.666667, 1.0], abs=1e-6)
    assert [y[f"pass@{k}"] for k in (1, 2, 4)] == [1.0, 1.0, 1.0]
    assert overall["pass@1"] == overall["avg@4"] == pytest.approx((0.25 + 0.5 + 1) / 3)
    assert (x["maj@4"], y["maj@4"], overall["maj@4"]) == pytest.approx((0.5, 1.0, 2 / 3))
    assert x["cut_share"] == pytest.approx(1 / 8)


def test_a_majority_of_nothing_is_not_a_wrong_answer():
    judged = model_evaluation.verdicts([prompt(0, "x")], [completion(3), completion(4)], [scored(1, None), scored(1, None)])
    found = model_evaluation.report(judged, 2)
    assert found["overall"]["maj@2"] is None
    assert "-" in model_evaluation.table(found | {"n": 2, "temperature": 1.0}).splitlines()[1].split()


def test_a_prompt_whose_reward_failed_is_left_out_and_counted(judged):
    found = model_evaluation.report(judged, 4)
    assert (found["prompts"], found["prompts_not_judged"], found["sources"]["y"]["prompts"]) == (3, 1, 1)
    assert "1 prompts are left out" in model_evaluation.table(found | {"n": 4, "temperature": 1.0})
    with pytest.raises(ValueError, match="none of the 1 prompts could be judged"):
        model_evaluation.report(judged[3:], 4)


def test_lengths_are_those_of_right_and_of_wrong_answers(judged):
    lengths = model_evaluation.report(judged, 4)["lengths"]
    assert (lengths["right"]["count"], lengths["right"]["mean"], lengths["right"]["max"]) == (7, pytest.approx((10 + 4 + 6 + 4) / 7), 10)
    assert (lengths["wrong"]["count"], lengths["wrong"]["median"], lengths["wrong"]["max"]) == (5, 20.0, 40)


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A fresh decoder with the arithmetic alphabet, and one device."""
    every = jax.devices()
    monkeypatch.setattr(jax, "devices", lambda *_: every[:1])
    directory = tmp_path / "model"
    tokens = character_tokenizer(ALPHABET, str(tmp_path / "tokenizer")).size
    spec = PolicySpec(
        family="llama", vocab_size=tokens, hidden_size=16, intermediate_size=8, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4,
        rope=RopeSpec("default", 10000.0), rms_norm_eps=1e-5, max_position_embeddings=64, tied=True, qkv_bias=False, output_bias=False, mlp_bias=False,
        qk_norm=False, windows=(None,))
    save_policy(directory, spec, decoder.init_params(spec, jax.random.key(0)))
    character_tokenizer(ALPHABET, str(directory))
    (tmp_path / "reward.py").write_text("def score(prompt, response, answer, metadata):\n    return float(len(response) % 2)\n")
    return directory


def options(tmp_path, model):
    return [
        f"--model={model}", "--config.reward.kind=user", f"--config.reward.path={tmp_path / 'reward.py'}", "--config.evaluation.limit=3",
        "--config.evaluation.num_generations=4", "--config.evaluation.temperature=0.8", "--config.rollout.max_new_tokens=6", "--config.reward.workers=1"]


def test_a_run_prints_a_table_and_writes_the_report(tmp_path, model, capsys):
    output = tmp_path / "reports" / "evaluation.json"
    assert evaluate.main([*options(tmp_path, model), f"--output={output}"]) == 0
    found = json.loads(output.read_text())
    assert (found["n"], found["k"], found["temperature"], found["prompts"], found["task"]) == (4, [1, 2, 4], 0.8, 3, "arithmetic")
    counts = found["lengths"]
    assert counts["right"]["count"] + counts["wrong"]["count"] == 12
    assert found["overall"]["pass@1"] == pytest.approx(counts["right"]["count"] / 12)
    printed = capsys.readouterr().out
    assert "pass@1" in printed and "maj@4" in printed and f"{found['overall']['pass@4']:.4f}" in printed


def test_what_cannot_be_evaluated_is_refused(tmp_path, model, capsys):
    given = options(tmp_path, model)
    for more, words in (
        (["--config.evaluation.temperature=0"], "gives 4 equal completions"),
        ([f"--output={tmp_path}"], "is a directory"),
        (["--model="], "--model=DIR is needed"),
        (["--config.rollout.max_new_tokens=60"], "max_position_embeddings=64"),
        (["--config.data.task=prompts", "--config.data.eval_path=nowhere.jsonl"], "nowhere.jsonl"),
    ):
        assert evaluate.main([*given, *more]) == 2
        assert words in capsys.readouterr().err
    (model / "tokenizer.json").unlink()
    assert evaluate.main(given) == 2
    assert "has no tokenizer files" in capsys.readouterr().err
