"""The distill command on a tiny model: what it writes is used by generate, answers are kept, and mistakes are found before any work."""

import gc
import json
import os
import shutil
import signal

import jax
import numpy as np
import pytest

from tlt_jax import distill, generate
from tlt_jax.checkpoints.drafter_files import load_drafter
from tlt_jax.checkpoints.huggingface_export import save_policy
from tlt_jax.models.decoder import abstract_params
from tlt_jax.models.specs import PolicySpec, RopeSpec
from tlt_jax.runtime import programs
from tlt_jax.runtime.draft_driver import DraftLearner
from tlt_jax.tasks.character_tokenizer import character_tokenizer
from tlt_jax.training.json_lines import JsonLines

ALPHABET = "abcdefghijklmnop"
OPTIONS = ("--config.rollout.max_new_tokens=12", "--config.distill.prompts=24", "--config.distill.epochs=6", "--config.distill.tokens_per_update=128",
           "--config.distill.lr=0.01", "--config.distill.held_out=0.2", "--config.rollout.slots=8")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random policy of 8 layers whose next token depends on the text."""
    directory = tmp_path_factory.mktemp("model")
    tokenizer = character_tokenizer(ALPHABET, str(tmp_path_factory.mktemp("tokenizer")))
    spec = PolicySpec(
        family="llama", vocab_size=tokenizer.size, hidden_size=16, intermediate_size=24, num_layers=8, num_heads=4, num_kv_heads=2, head_dim=4,
        rope=RopeSpec("default", 100.0), rms_norm_eps=1e-5, max_position_embeddings=64, tied=True, qkv_bias=False, output_bias=False, mlp_bias=False,
        qk_norm=False, windows=(None,) * 8)
    random = np.random.default_rng(0)
    save_policy(directory, spec, jax.tree.map(lambda leaf: (random.normal(size=leaf.shape) * 0.4).astype(np.float32), abstract_params(spec)))
    character_tokenizer(ALPHABET, str(directory))
    return directory, spec


@pytest.fixture
def one_device(monkeypatch):
    first = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: first)


@pytest.fixture
def prompts(tmp_path):
    random, path = np.random.default_rng(1), tmp_path / "prompts.jsonl"
    rows = [{"prompt": "".join(random.choice(list(ALPHABET), random.integers(2, 8))), "answer": "a"} for _ in range(30)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(model, prompts, workdir, *options):
    return distill.main([f"--model={model}", f"--workdir={workdir}", "--config.data.task=prompts", f"--config.data.path={prompts}", *OPTIONS, *options])


def test_a_distilled_drafter_accepts_more_and_generate_uses_it_without_changing_a_token(model, prompts, tmp_path, one_device):
    directory, spec = model
    assert run(directory, prompts, tmp_path / "drafting", "--config.speculative.method=eagle3", "--config.drafter.draft_vocab_size=12") == 0
    lines = [json.loads(line) for line in (tmp_path / "drafting" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["final"] and lines[-1]["drafter/acceptance_0"] > lines[0]["drafter/acceptance_0"] and lines[-1]["drafter/loss"] < lines[0]["drafter/loss"]
    drafter = tmp_path / "drafting" / "drafter"
    assert load_drafter(drafter, spec).files.kind == "eagle3"
    answers = []
    for extra in ((), (f"--drafter={drafter}",)):
        output = tmp_path / f"out{len(extra)}.jsonl"
        assert generate.main([f"--model={directory}", f"--prompts={prompts}", f"--output={output}", "--config.rollout.max_new_tokens=12", *extra]) == 0
        answers.append([json.loads(line)["token_ids"] for line in output.read_text().splitlines()])
    assert answers[0] == answers[1]


def test_answers_that_are_there_are_used_again_and_an_interrupted_sampling_gives_those_of_a_straight_one(
        model, prompts, tmp_path, one_device, capsys, monkeypatch):
    short = ("--config.speculative.method=eagle", "--config.distill.epochs=1", "--config.distill.prompts=12", "--config.distill.num_generations=2")
    answers = tmp_path / "w" / "answers.jsonl"
    assert run(model[0], prompts, tmp_path / "w", *short) == 0
    straight, write = answers.read_text(), JsonLines.write
    capsys.readouterr()
    assert run(model[0], prompts, tmp_path / "w", *short) == 0
    assert "24 answers from" in capsys.readouterr().out and answers.read_text() == straight
    answers.unlink()

    def interrupted(self, record):
        write(self, record)
        if len(self.read()) == 1 + 9:
            raise KeyboardInterrupt

    monkeypatch.setattr(JsonLines, "write", interrupted)
    assert run(model[0], prompts, tmp_path / "w", *short) == 130 and not answers.exists()
    monkeypatch.setattr(JsonLines, "write", write)
    partial = tmp_path / "w" / "answers.jsonl.partial"
    partial.write_text(partial.read_text() + '{"prompt_ids": [1, ')  # killed while it wrote
    assert run(model[0], prompts, tmp_path / "w", *short, "--config.rollout.temperature=0.5") == 2
    assert "was begun with rollout.temperature=1.0, now 0.5" in capsys.readouterr().err
    assert run(model[0], prompts, tmp_path / "w", *short) == 0
    said = capsys.readouterr().out
    assert "9 of 24 answers are in" in said and "15 answers: " in said and answers.read_text() == straight and not partial.exists()


def test_a_dry_run_says_batches_updates_and_memory_and_starts_nothing(model, prompts, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    gc.collect()
    arrays, compiled = len(jax.live_arrays()), programs.compile_counter().count
    options = ["--config.speculative.method=eagle3", "--config.drafter.draft_vocab_size=12", "--config.mesh.train.fsdp=1", "--config.mesh.train.data=-1"]
    plan = [f"--model={model[0]}", "--config.data.task=prompts", f"--config.data.path={prompts}", *OPTIONS, *options, "--dry_run"]
    assert distill.main([*plan, "--config.distill.tokens_per_update=320"]) == 0
    assert (len(jax.live_arrays()), programs.compile_counter().count, sorted(tmp_path.iterdir())) == (arrays, compiled, before)
    printed = capsys.readouterr().out
    parameters = 16 * 48 + 16 * 2 + 32 * 16 + 2 * 32 * 8 + 16 * 16 + 16 + 3 * 16 * 24 + 16 + 16 * 12  # fc, norms, q, k and v, o, norm, mlp, norm, head
    for words in (
        "seed=0", "train mesh: data=8 x fsdp=1 x tensor=1", "24 prompts of 3 to 8 tokens × 1 = 24 answers to sample, each of at most 12 tokens",
        "at most 2 batches of 8 rows of 40 tokens (distill.tokens_per_update=320), 1 of them held back", "6 epochs: at most 6 updates of one batch each",
        f"eagle3 drafter of {parameters:,} parameters, 12 draft tokens", "its optimizer", "features of all batches: 0.2 MiB"):
        assert words in printed, words
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "answers.jsonl").write_text('{"prompt_ids": [1, 5], "token_ids": [6, 2]}\n' * 24)
    assert distill.main([*plan, f"--workdir={tmp_path / 'w'}", "--config.distill.tokens_per_update=32"]) == 0
    assert "24 answers from" in (printed := capsys.readouterr().out) and "48 tokens" in printed and "3 batches of 8 rows of 4 tokens" in printed
    assert distill.main([*plan, "--config.distill.tokens_per_update=100"]) == 2
    assert "cannot hold one answer of 20 tokens for each of 8 devices" in capsys.readouterr().err


def test_a_training_that_was_stopped_twice_ends_with_the_bits_of_a_straight_one(model, prompts, tmp_path, one_device, capsys, monkeypatch):
    options = ("--config.speculative.method=eagle3", "--config.drafter.draft_vocab_size=12", "--config.distill.epochs=3")
    places, update = {name: tmp_path / name for name in ("straight", "parts")}, DraftLearner.update
    assert run(model[0], prompts, places["straight"], *options) == 0
    places["parts"].mkdir()
    shutil.copy(places["straight"] / "answers.jsonl", places["parts"])
    records = [json.loads(line) for line in (places["straight"] / "metrics.jsonl").read_text().splitlines()]
    epoch = records[1]["update"]
    assert epoch > 2
    for last in (epoch + 1, 2 * epoch):  # within an epoch, and with the last update of one

        def stopping(self, batches, last=last):
            stats = update(self, batches)
            if self.updates == last:
                os.kill(os.getpid(), signal.SIGTERM)
            return stats

        monkeypatch.setattr(DraftLearner, "update", stopping)
        assert run(model[0], prompts, places["parts"], *options) == 143
        assert not (places["parts"] / "drafter").exists()
    monkeypatch.setattr(DraftLearner, "update", update)
    assert run(model[0], prompts, places["parts"], *options, "--config.distill.lr=0.1") == 2
    assert "holds an interrupted training with distill.lr=0.01, now 0.1" in capsys.readouterr().err
    assert run(model[0], prompts, places["parts"], *options) == 0
    assert f"continuing after update {2 * epoch}" in capsys.readouterr().out
    straight, parts = ((place / "drafter" / "model.safetensors").read_bytes() for place in places.values())
    assert straight == parts
    continued = [json.loads(line) for line in (places["parts"] / "metrics.jsonl").read_text().splitlines()]
    assert [one | {"seconds": 0} for one in records] == [one | {"seconds": 0} for one in continued] and len(records) == 5
    assert not (places["parts"] / "checkpoints").exists()


def test_saved_rollouts_train_the_drafter_that_sampling_them_would(model, prompts, tmp_path, one_device, capsys):
    options = ("--config.speculative.method=eagle", "--config.drafter.draft_vocab_size=12", "--config.distill.epochs=1")
    assert run(model[0], prompts, tmp_path / "one", *options) == 0
    elsewhere = [f"--model={model[0]}", f"--workdir={tmp_path / 'two'}", *OPTIONS, *options]
    assert distill.main([*elsewhere, f"--rollouts={tmp_path / 'one' / 'answers.jsonl'}"]) == 0
    one, two = ((tmp_path / name / "drafter" / "model.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two and not (tmp_path / "two" / "answers.jsonl").exists()
    output = tmp_path / "completions.jsonl"
    assert generate.main([f"--model={model[0]}", f"--prompts={prompts}", f"--output={output}", "--config.rollout.max_new_tokens=12"]) == 0
    tokens = sum(len(json.loads(line)["token_ids"]) for line in output.read_text().splitlines())
    capsys.readouterr()
    assert distill.main([*elsewhere, f"--rollouts={output}", "--dry_run"]) == 0
    assert f"30 answers from {output}, {tokens} tokens" in capsys.readouterr().out


@pytest.mark.parametrize(("row", "words"), [
    ({"token_ids": [4]}, "has no prompt_ids"), ({"prompt": "ab", "response": "c"}, "samples.jsonl of a run holds texts"),
    ({"prompt_ids": [4], "token_ids": []}, "token_ids must be a list"), ({"prompt_ids": [4.5], "token_ids": [4]}, "prompt_ids must be a list"),
    ({"prompt_ids": [4], "token_ids": [21]}, "token_ids: token id 21 is outside the 21"), ({"prompt_ids": [4] * 60, "token_ids": [4] * 5}, "65 tokens")])
def test_a_rollout_that_cannot_be_used_is_named_by_file_row_and_field(model, tmp_path, capsys, row, words):
    path = tmp_path / "rollouts.jsonl"
    path.write_text(json.dumps({"prompt_ids": [4, 5], "token_ids": [6, 2]}) + "\n" + json.dumps(row) + "\n")
    assert distill.main([f"--model={model[0]}", f"--workdir={tmp_path / 'w'}", f"--rollouts={path}", "--config.speculative.method=eagle"]) == 2
    said = capsys.readouterr().err
    assert f"{path}:2" in said and words in said


def test_a_drafter_without_weights_and_a_missing_model_are_refused(model, prompts, tmp_path, capsys):
    assert run(model[0], prompts, tmp_path / "w", "--config.speculative.method=prompt_lookup") == 2
    assert "speculative.method=prompt_lookup has no weights to train" in capsys.readouterr().err
    assert run("", prompts, tmp_path / "w", "--config.speculative.method=eagle") == 2
    assert "--model=DIR is needed" in capsys.readouterr().err
    assert not (tmp_path / "w").exists()
