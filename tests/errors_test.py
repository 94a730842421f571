"""What the train command says about bad input: one line that names what, where and what to do, exit code 2, and nothing done on a device before."""

import json
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tlt_jax import train
from tlt_jax.checkpoints.huggingface_export import save_policy
from tlt_jax.checkpoints.run_state import SaveFailed
from tlt_jax.models import decoder
from tlt_jax.models.specs import PolicySpec, RopeSpec
from tlt_jax.runtime.policy_driver import NonFiniteUpdates
from tlt_jax.tasks.character_tokenizer import character_tokenizer
from tlt_jax.training import build, stages

SPEC = PolicySpec(
    family="llama", vocab_size=24, hidden_size=16, intermediate_size=8, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4, rope=RopeSpec("default", 1e4),
    rms_norm_eps=1e-5, max_position_embeddings=64, tied=False, qkv_bias=False, output_bias=False, mlp_bias=False, qk_norm=False, windows=(None, None))
ROOT = pathlib.Path(__file__).parents[1]
ROW = {"prompt": "ab", "answer": "c"}


@pytest.fixture(scope="module")
def model_files(tmp_path_factory):
    """Name to bytes of a small model in two shards with its tokenizer."""
    directory = tmp_path_factory.mktemp("model")
    save_policy(directory, SPEC, jax.tree.map(np.asarray, decoder.init_params(SPEC, jax.random.key(0))), max_shard_bytes=4000)
    character_tokenizer("abcdefg", str(directory))
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture
def model(tmp_path, model_files):
    """A copy of that model to damage."""
    directory = tmp_path / "model"
    directory.mkdir()
    for name, content in model_files.items():
        (directory / name).write_bytes(content)
    return directory


@pytest.fixture
def rows(tmp_path):
    """rows(lines) writes a file of prompts; a line is a row or text."""

    def write(*lines):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
        return path

    return write


@pytest.fixture
def refused(tmp_path, model, rows, monkeypatch, capsys):
    """refused(*options) is what train says about the options, after checking its form and that it made neither mesh nor parameters nor reward workers."""

    def reached(*_, **__):
        raise AssertionError("device work began")

    for name in ("make_meshes", "make_params", "make_drivers", "pool_settings"):
        monkeypatch.setattr(build, name, reached)

    def run(*options, lines=1):
        standard = [
            f"--workdir={tmp_path / 'run'}", f"--config.model.path={model}", "--config.data.task=prompts", "--config.reward.kind=exact",
            f"--config.data.path={tmp_path / 'rows.jsonl'}", "--config.data.max_prompt_tokens=8", "--config.rollout.max_new_tokens=8",
            "--config.batch.prompts_per_step=2"]
        if not (tmp_path / "rows.jsonl").exists():
            rows(*[ROW] * 4)
        try:
            code = train.main([*standard, *options])
        except SystemExit as exit:
            code = exit.code
        said = capsys.readouterr()
        assert code == 2
        assert said.err.startswith("python -m tlt_jax.train: error: ")
        assert len(said.err.strip().splitlines()) == lines and "Traceback" not in said.err, said.err
        assert not (tmp_path / "run" / "checkpoints").exists()
        return said.err

    return run


def test_the_same_input_undamaged_reaches_the_devices(refused):
    with pytest.raises(AssertionError, match="device work began"):
        refused()


@pytest.mark.parametrize(("option", "words"), [
    ("--config.rollout.temprature=1", ("rollout.temprature", "rollout.temperature")),
    ("--config.rollout.slots=many", ("rollout.slots", "a whole number (int)", "'many'")),
    ("--config.reward.kind=quality", ("reward.kind=quality", "task, math, exact, user")),
    ("--config.speculative.method=cascade", ("speculative.method=cascade is not built",)),
    ("--config.model.path=nowhere", ("nowhere does not exist",)),
    ("--config.data.path=nowhere.jsonl", ("nowhere.jsonl",)),
    ("--config.data.columns.prompt=question", ("columns.prompt=question", "prompt, answer")),
    ("--config.model.chat_template=nowhere.jinja", ("nowhere.jinja",)),
])
def test_a_wrong_setting_is_named(refused, option, words):
    said = refused(option)
    assert all(word in said for word in words), said


def change_tensors(model, change):
    """Rewrite the shards and their index after `change(tensors of all shards)`."""
    index = json.loads((model / "model.safetensors.index.json").read_text())
    tensors = {}
    for name in set(index["weight_map"].values()):
        tensors |= load_file(model / name)
        (model / name).unlink()
    (model / "model.safetensors.index.json").unlink()
    change(tensors)
    save_file(tensors, model / "model.safetensors")


def test_missing_extra_and_misshapen_tensors_are_listed_in_one_error(refused, model):
    def change(tensors):
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(8, np.float32)
        tensors["model.norm.weight"] = np.zeros(5, np.float32)

    change_tensors(model, change)
    said = refused(lines=4)
    for words in (str(model), "model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias", "model.norm.weight", "file [5], config [16]"):
        assert words in said, said


def test_a_single_missing_tensor_is_one_line_or_an_entry_of_the_list(refused, model):
    change_tensors(model, lambda tensors: tensors.pop("lm_head.weight"))
    assert "lm_head.weight" in refused(lines=2)


@pytest.mark.parametrize("left", [0, 7, 500, -1], ids=["empty", "no header", "cut header", "one byte short"])
def test_a_cut_shard_is_named(refused, model, left):
    shard = sorted(model.glob("model-*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:left])
    said = refused()
    assert str(shard) in said and "cut short" in said and "again" in said


def test_an_absent_shard_is_named(refused, model):
    shard = sorted(model.glob("model-*.safetensors"))[0]
    shard.unlink()
    said = refused()
    assert shard.name in said and "model.safetensors.index.json" in said


def test_a_damaged_header_is_named(refused, model):
    shard = sorted(model.glob("model-*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:8] + b"?" + shard.read_bytes()[9:])
    said = refused()
    assert str(shard) in said and "header" in said


@pytest.mark.parametrize(("changes", "words"), [
    ({"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}, ("MixtralForCausalLM", "LlamaForCausalLM")),
    ({"architectures": ["LlamaForSequenceClassification"], "num_labels": 1}, ("causal language model",)),
    ({"hidden_act": "gelu"}, ("gelu",)),
    ({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, ("spiral",)),
    ({"num_hidden_layers": "two"}, ("num_hidden_layers",)),
    ({"hidden_size": None}, ("hidden_size",)),
])
def test_an_architecture_that_is_not_supported_is_named_with_the_file(refused, model, changes, words):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | changes))
    if "SequenceClassification" in str(changes):
        change_tensors(model, lambda tensors: tensors.update({"score.weight": np.zeros((1, 16), np.float32)}) or tensors.pop("lm_head.weight"))
    said = refused()
    assert all(word in said for word in words), said
    assert str(model) in said


@pytest.mark.parametrize(("content", "words"), [(b"", ()), (b"{", ()), (b"[]", ()), (b"\xff\xfe", ())])
def test_a_broken_model_config_is_named(refused, model, content, words):
    (model / "config.json").write_bytes(content)
    assert f"{model}/config.json" in refused()


def test_a_model_without_a_tokenizer_is_named(refused, model):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).unlink()
    said = refused()
    assert str(model) in said and "tokenizer.json" in said


@pytest.mark.parametrize(("line", "words"), [
    ('{"prompt": "ab", "answer": ', ("rows.jsonl:3",)),
    ("[1]", ("rows.jsonl:3",)),
    ({"prompt": "ab"}, ("rows.jsonl:3", "answer")),
    ({"prompt": 5, "answer": "c"}, ("rows.jsonl:3", "prompt")),
    ({"prompt": "ab", "answer": float("nan")}, ("rows.jsonl:3",)),
    ({"prompt": "xyz", "answer": "c"}, ("rows.jsonl:3", "'x'")),
    ({"prompt": "abcdefgab", "answer": "c"}, ("rows.jsonl:3", "data.max_prompt_tokens=8", "data.over_long")),
])
def test_a_bad_line_is_named_by_file_and_number(refused, rows, line, words):
    rows(ROW, ROW, line, ROW)
    said = refused()
    assert all(word in said for word in words), said


@pytest.mark.parametrize("policy", ["error", "drop"])
def test_a_file_whose_prompts_are_all_too_long_is_an_error_under_every_policy_that_would_leave_none(refused, rows, policy):
    rows(*[{"prompt": "abcdefgab", "answer": "c"}] * 3)
    said = refused(f"--config.data.over_long={policy}")
    assert all(word in said for word in ("3 of 3 prompts", "data.max_prompt_tokens=8", "rows.jsonl:1"))


def test_a_file_without_rows_is_named(refused, rows):
    rows()
    assert "rows.jsonl" in refused()


def test_prompts_and_completions_beyond_the_models_positions_are_refused_with_the_row(refused):
    said = refused("--config.rollout.max_new_tokens=62")
    assert all(word in said for word in ("max_position_embeddings=64", "rollout.max_new_tokens=62", "rows.jsonl", "lower rollout.max_new_tokens")), said


@pytest.mark.parametrize(("options", "words"), [
    (["--config.batch.prompts_per_step=5"], ("batch.prompts_per_step=5", "hold 4")),
    (["--config.stages.order=sft", "--config.stages.sft.batch=5"], ("stages.sft.batch=5", "hold 4")),
])
def test_data_that_cannot_fill_a_step_are_refused_by_key(refused, options, words):
    said = refused(*options)
    assert all(word in said for word in words), said


def test_a_row_without_a_worked_answer_is_refused_when_there_is_a_supervised_stage(refused, rows):
    worked = ROW | {"completion": "bc"}
    rows(worked, worked, ROW, worked)
    said = refused("--config.stages.order=sft", "--config.stages.sft.batch=2", "--config.reward.kind=user", "--config.reward.path=reward.py")
    assert "rows.jsonl" in said and "no column completion" in said


def test_a_reward_file_that_is_not_there_is_refused_before_the_first_worker(tmp_path, model, rows, monkeypatch, capsys):
    rows(*[ROW] * 4)
    monkeypatch.setattr(build, "make_params", lambda *_: pytest.fail("device work began"))
    every = jax.devices()
    monkeypatch.setattr(jax, "devices", lambda *_: every[:1])
    code = train.main([
        f"--workdir={tmp_path / 'run'}", f"--config.model.path={model}", "--config.data.task=prompts", "--config.reward.kind=user",
        "--config.reward.path=nowhere.py", f"--config.data.path={tmp_path / 'rows.jsonl'}", "--config.rollout.max_new_tokens=8",
        "--config.batch.prompts_per_step=2"])
    assert (code, capsys.readouterr().err) == (2, "python -m tlt_jax.train: error: reward.path=nowhere.py: there is no such file\n")


@pytest.mark.parametrize(("name", "more"), [
    ("batch.tokens_per_microbatch", ()), ("distill.tokens_per_update", ("--config.speculative.method=eagle", "--config.drafter.quanta_per_step=1"))])
def test_a_micro_batch_that_cannot_give_each_device_a_sequence_is_refused_before_the_first_step(tmp_path, model, rows, monkeypatch, capsys, name, more):
    rows(*[ROW] * 4)
    monkeypatch.setattr(build, "make_params", lambda *_: pytest.fail("device work began"))
    code = train.main([
        f"--workdir={tmp_path / 'run'}", f"--config.model.path={model}", "--config.data.task=prompts", "--config.reward.kind=exact",
        f"--config.data.path={tmp_path / 'rows.jsonl'}", "--config.rollout.max_new_tokens=8", "--config.data.max_prompt_tokens=8",
        "--config.batch.prompts_per_step=2", f"--config.{name}=80", *more])
    said = capsys.readouterr().err
    assert code == 2 and f"{name}=80 cannot hold one sequence of 11 tokens" in said
    assert "each of the 8 devices" in said and "at least 88" in said


@pytest.mark.parametrize("error", [SaveFailed(3, "checkpoints", "the disk is full"), NonFiniteUpdates("5 updates in a row")])
def test_a_run_that_is_given_up_ends_with_exit_code_1_and_one_line(tmp_path, monkeypatch, capsys, error):
    def give_up(*_):
        raise error

    monkeypatch.setattr(stages, "run", give_up)
    assert train.main([f"--workdir={tmp_path}"]) == 1
    assert capsys.readouterr().err == f"python -m tlt_jax.train: error: {error}\n"


def test_in_a_process_of_its_own_a_cut_shard_starts_no_backend(model, rows, tmp_path):
    shard = sorted(model.glob("model-*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-1])
    code = (
        "import sys; from tlt_jax import train; code = train.main(sys.argv[1:]); from jax._src import xla_bridge; "
        "print(xla_bridge.backends_are_initialized()); sys.exit(code)")
    options = [f"--workdir={tmp_path / 'run'}", f"--config.model.path={model}", "--config.data.task=prompts", "--config.reward.kind=exact"]
    done = subprocess.run(
        [sys.executable, "-c", code, *options, f"--config.data.path={rows(ROW)}"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (2, "False\n"), done.stderr
    assert str(shard) in done.stderr and len(done.stderr.strip().splitlines()) == 1, done.stderr
