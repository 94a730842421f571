"""Export of a run: a trained policy and critic as Hugging Face directories, and loading straight from the workdir."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from tlt_jax import export, generate, train
from tlt_jax.checkpoints import run_model
from tlt_jax.checkpoints.huggingface_export import save_policy
from tlt_jax.checkpoints.pretrained import check_tensors, load_policy, read_source
from tlt_jax.checkpoints.run_state import RunStateStore
from tlt_jax.checkpoints.tensor_layout import flatten
from tlt_jax.models import decoder
from tlt_jax.models.specs import PolicySpec, RopeSpec
from tlt_jax.objectives.policy_update import VALUE_HEAD
from tlt_jax.tasks.character_tokenizer import character_tokenizer
from tlt_jax.tasks.tokenizer import load_tokenizer

SPEC = PolicySpec(
    family="qwen2", vocab_size=16, hidden_size=8, intermediate_size=12, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=2,
    rope=RopeSpec("default", 10000.0), rms_norm_eps=1e-6, max_position_embeddings=64, tied=True, qkv_bias=True, output_bias=False, mlp_bias=False,
    qk_norm=False, windows=(None, None))
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def same(one, two):
    one, two = flatten(one), flatten(two)
    assert one.keys() == two.keys()
    for path, leaf in one.items():
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(two[path]), err_msg=str(path))


@pytest.fixture
def model(tmp_path):
    """A tied bfloat16 Hugging Face directory with an eos list, a tokenizer and a chat template."""
    directory = tmp_path / "model"
    save_policy(directory, SPEC, decoder.init_params(SPEC, jax.random.key(0)), dtype="bfloat16")
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9], "temperature": 0.6}))
    character_tokenizer("abcdef", str(directory), chat_template=TEMPLATE)
    return directory


def make_run(workdir, source, items, step=0, host=None):
    """A workdir as training leaves it."""
    run_model.save_run_model(workdir, source)
    store = RunStateStore(workdir / "checkpoints", async_save=False)
    assert store.save(step, items, host or {})
    store.close()
    return workdir


def exported(workdir, output, *options):
    assert export.main([f"--workdir={workdir}", f"--output={output}", *options]) == 0
    return output


def test_a_run_of_no_steps_gives_back_every_tensor_bit_by_bit_with_config_tokenizer_and_template(model, tmp_path):
    loaded = load_policy(model)
    output = exported(make_run(tmp_path / "run", loaded.source, {"policy": loaded.params}), tmp_path / "out")
    before, after = load_file(model / "model.safetensors"), load_file(output / "model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype == "bfloat16"
        assert tensor.tobytes() == after[name].tobytes(), name
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert json.loads((output / name).read_text()) == json.loads((model / name).read_text()), name
    assert (output / "chat_template.jinja").read_text() == TEMPLATE
    assert read_source(output).stop_ids == (2, 7, 9)


def test_the_workdir_itself_loads_on_one_device_and_on_a_mesh(model, tmp_path):
    loaded = load_policy(model)
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("data", "fsdp", "tensor"))
    spread = load_policy(model, mesh=mesh).params
    workdir = make_run(tmp_path / "run", loaded.source, {"policy": spread, "policy_optimizer": {"count": jax.numpy.zeros(())}})
    again = load_policy(workdir)
    assert (again.spec, check_tensors(workdir)) == (SPEC, SPEC)
    same(again.params, loaded.params)
    assert {len(leaf.devices()) for leaf in jax.tree.leaves(again.params)} == {1}
    other = load_policy(workdir, mesh=jax.sharding.Mesh(np.array(jax.devices()).reshape(1, 8, 1), ("data", "fsdp", "tensor"))).params
    assert other["embed"]["embedding"].sharding.shard_shape((16, 8)) == (16, 1)
    same(other, loaded.params)
    assert load_policy(workdir, dtype="bfloat16").params["embed"]["embedding"].dtype == "bfloat16"
    for field in ("stop_ids", "pad_id", "generation_config", "config", "chat_template", "file_dtype", "tensor_dtypes"):
        assert vars(again.source)[field] == vars(loaded.source)[field], field


def test_a_template_set_in_the_config_goes_along(model, tmp_path):
    loaded = load_policy(model)
    workdir = make_run(tmp_path / "run", dataclasses.replace(loaded.source, chat_template="{{ messages[0].content }}!"), {"policy": loaded.params})
    output = exported(workdir, tmp_path / "out")
    assert load_tokenizer(str(output)).backend.chat_template == load_tokenizer(str(workdir / "tokenizer")).backend.chat_template == "{{ messages[0].content }}!"


def test_a_critic_becomes_a_sequence_classification_model(model, tmp_path, capsys):
    loaded = load_policy(model)
    critic = {**loaded.params, "head": {"kernel": jax.numpy.full((8, 1), 0.5)}}
    workdir = make_run(tmp_path / "run", loaded.source, {"policy": loaded.params, "critic": critic}, step=3)
    output = exported(workdir, tmp_path / "both", "--what=policy,critic")
    assert "critic of step 3" in capsys.readouterr().out
    same(load_policy(output / "policy").params, loaded.params)
    read = load_policy(output / "critic")
    assert read.spec == dataclasses.replace(SPEC, head="value")
    same(read.params, critic)
    config = json.loads((output / "critic" / "config.json").read_text())
    assert (config["architectures"], len(config["id2label"])) == (["Qwen2ForSequenceClassification"], 1)
    exported(workdir, tmp_path / "both", "--what=policy,critic")


def test_a_critic_on_the_policys_trunk_is_taken_apart_and_is_no_drafter(model, tmp_path, capsys):
    assert run_model.SHARED_VALUE_HEAD == VALUE_HEAD
    loaded = load_policy(model)
    head = {"kernel": jax.numpy.full((8, 1), 0.25)}
    workdir = make_run(tmp_path / "run", loaded.source, {"policy": {**loaded.params, VALUE_HEAD: head}})
    same(load_policy(workdir).params, loaded.params)
    output = exported(workdir, tmp_path / "critic", "--what=critic")
    same(load_policy(output).params, {**loaded.params, "head": head})
    assert export.main([f"--workdir={workdir}", f"--output={tmp_path / 'drafter'}", "--what=drafter"]) == 2
    assert "holds no drafter" in capsys.readouterr().err


def test_what_cannot_be_exported_is_one_clear_error_and_writes_nothing(model, tmp_path, capsys):
    loaded = load_policy(model)
    workdir = make_run(tmp_path / "run", loaded.source, {"policy": loaded.params})
    output = tmp_path / "out"
    for options, words in (
        (["--what=policies"], "--what=policies must be of policy, critic, drafter"),
        (["--what=policy,critic"], "holds no critic (it holds policy): a run trains one with algorithm.name=ppo"),
        (["--what=policy,drafter"], "holds no drafter (it holds policy): a run trains one with drafter.quanta_per_step above 0"),
        (["--step=5"], "there is no step 5"),
        ([f"--workdir={tmp_path}"], "is not the workdir of a run"),
    ):
        assert export.main([f"--workdir={workdir}", f"--output={output}", *options]) == 2
        assert words in capsys.readouterr().err
    assert not output.exists()
    run_model.save_run_model(tmp_path / "early", loaded.source)
    assert export.main([f"--workdir={tmp_path / 'early'}", f"--output={output}"]) == 2
    assert "has no checkpoint yet" in capsys.readouterr().err
    assert export.main([f"--workdir={workdir}"]) == 2


def test_a_checkpoint_of_another_model_is_refused(model, tmp_path):
    loaded = load_policy(model)
    other = dataclasses.replace(SPEC, num_layers=1, windows=(None,))
    workdir = make_run(tmp_path / "run", loaded.source, {"policy": decoder.init_params(other, jax.random.key(0))})
    for read in (check_tensors, load_policy):
        with pytest.raises(ValueError, match="does not hold the model that model.json describes.*layers/attention/key/bias"):
            read(workdir)
    (workdir / "model.json").write_text("{")
    with pytest.raises(ValueError, match="model.json cannot be read"):
        load_policy(workdir)


def test_a_trained_run_exports_reloads_and_generates(tmp_path, monkeypatch):
    every = jax.devices()
    monkeypatch.setattr(jax, "devices", lambda *_: every[:1])
    small = {"hidden_size": 16, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 8, "mlp": 16}
    workdir = tmp_path / "run"
    assert train.main([
        f"--workdir={workdir}", *(f"--config.model.scratch.{name}={value}" for name, value in small.items()), "--config.stages.order=sft",
        "--config.stages.sft.steps=2", "--config.stages.sft.batch=4", "--config.data.max_prompt_tokens=48", "--config.rollout.max_new_tokens=48",
        "--config.data.arithmetic.train_size=20", "--config.data.arithmetic.eval_size=4", "--config.logging.tensorboard=False"]) == 0
    trained, output = load_policy(workdir), exported(workdir, tmp_path / "out")
    again = load_policy(output)
    assert again.spec == trained.spec
    same(again.params, trained.params)
    assert again.source.stop_ids == trained.source.stop_ids == (2,)
    assert json.loads((output / "generation_config.json").read_text()) == {"bos_token_id": 1, "eos_token_id": [2], "pad_token_id": 0}
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+2="}\n')
    answers = []
    for place in (workdir, output):
        assert generate.main([
            f"--model={place}", f"--prompts={tmp_path / 'prompts.jsonl'}", f"--output={tmp_path / 'answers.jsonl'}", "--config.rollout.max_new_tokens=5"]) == 0
        answers.append((tmp_path / "answers.jsonl").read_text())
    assert answers[0] == answers[1]
