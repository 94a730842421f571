"""What a run writes about itself: files, resume, console, health, curves; and that no device array gets in."""

import gzip
import io
import json

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from tlt_jax.scheduling.timeline import Span
from tlt_jax.training import reporting
from tlt_jax.training.health import health_line, numbers_line
from tlt_jax.training.reporting import Reporter, ReportSettings, Sample, SilentReporter, plain_metrics

PLAIN = ReportSettings(stages=("sft", "rl"), tensorboard=False)


def reporter(path, settings=PLAIN, **options):
    return Reporter(str(path), settings, stream=options.pop("stream", io.StringIO()), **options)


def records(path, name="metrics.jsonl"):
    return [json.loads(line) for line in (path / name).read_text().splitlines()]


def timeline_steps(path, name="timeline.json.gz"):
    """The steps of a timeline, by their marks."""
    return [event["args"]["step"] for event in json.loads(gzip.decompress((path / name).read_bytes())) if event["ph"] == "i"]


def sample(**changes):
    values = {"prompt": "2+2=", "response": "4", "answer": "4", "parsed": "4", "reward": 1.0, "components": {"format": 0.5}, "advantage": 0.7}
    return Sample(**(values | {"length": 1, "finish_reason": "stop", "policy_version": 3} | changes))


def run(path, steps, **options):
    report = reporter(path, **options)
    report.start_stage("rl", 6)
    for step in steps:
        report.record(step, {"reward/mean": float(step)})
        report.record_samples(step, [sample()])
        report.record_timeline(step, [Span(0, "rollout", step, step + 0.5)])
    report.close()


def test_every_step_is_one_json_record_on_disk_at_once(tmp_path):
    report = reporter(tmp_path)
    report.start_stage("rl", 3)
    report.record(1, {"reward/mean": np.float32(0.5), "completions/length_max": np.int64(7), "data/source": "gsm8k", "reward/flag": np.bool_(True)})
    (record,) = records(tmp_path)
    assert {name: record[name] for name in record if name != "time"} == {
        "stage": "rl",
        "step": 1,
        "reward/mean": 0.5,
        "completions/length_max": 7,
        "data/source": "gsm8k",
        "reward/flag": True,
    }
    report.close()


def test_a_device_array_is_refused_by_name(tmp_path):
    for report in (reporter(tmp_path), SilentReporter()):
        with pytest.raises(TypeError, match=r"policy/loss is a jax.*fetch it on the main thread"):
            report.record(1, {"policy/loss": jnp.float32(1.0)})
    with pytest.raises(TypeError, match="reward/mean"):
        plain_metrics({"reward/mean": np.zeros(2)})
    with pytest.raises(TypeError, match="reward/mean"):
        plain_metrics({"reward/mean": None})
    with pytest.raises(TypeError, match="format"):
        reporter(tmp_path).record_samples(1, [sample(components={"format": jnp.float32(1.0)})])


def test_a_fetched_scalar_array_is_a_number():
    assert plain_metrics({"policy/loss": np.asarray(np.float32(0.5))}) == {"policy/loss": 0.5}


@pytest.mark.parametrize("name", ["loss", "actor/loss", "policy/", "/loss"])
def test_a_metric_outside_the_namespaces_is_refused(name):
    with pytest.raises(ValueError, match="namespace"):
        plain_metrics({name: 1.0})


def test_a_step_is_recorded_once(tmp_path):
    report = reporter(tmp_path)
    report.start_stage("rl", 6)
    report.record(1, {})
    with pytest.raises(ValueError, match="step 1 of stage rl"):
        report.record(1, {})
    report.close()


def test_resume_cuts_the_records_after_the_restored_step(tmp_path):
    run(tmp_path, range(1, 6))
    run(tmp_path, range(4, 7), resumed=("rl", 3))
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert [record["step"] for record in records(tmp_path, name)] == [1, 2, 3, 4, 5, 6]
    assert timeline_steps(tmp_path) == [1, 2, 3, 4, 5, 6]


def test_resume_keeps_earlier_stages_and_drops_later_ones(tmp_path):
    report = reporter(tmp_path)
    for stage in ("sft", "rl"):
        report.start_stage(stage, 4)
        for step in range(1, 5):
            report.record(step, {"policy/loss": 1.0})
    report.close()
    reporter(tmp_path, resumed=("rl", 2)).close()
    assert [(record["stage"], record["step"]) for record in records(tmp_path)] == [("sft", n) for n in range(1, 5)] + [("rl", 1), ("rl", 2)]
    reporter(tmp_path, resumed=("sft", 3)).close()
    assert [(record["stage"], record["step"]) for record in records(tmp_path)] == [("sft", 1), ("sft", 2), ("sft", 3)]


def test_a_resumed_stage_cannot_record_a_restored_step_again(tmp_path):
    run(tmp_path, range(1, 4))
    report = reporter(tmp_path, resumed=("rl", 3))
    report.start_stage("rl", 6)
    with pytest.raises(ValueError, match="step 3"):
        report.record(3, {})
    report.close()


def test_a_record_cut_by_a_kill_is_dropped_on_resume(tmp_path):
    run(tmp_path, range(1, 4))
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"stage": "rl", "step": 4, "rew')
    run(tmp_path, range(4, 5), resumed=("rl", 3))
    assert [record["step"] for record in records(tmp_path)] == [1, 2, 3, 4]


def test_a_broken_line_inside_is_an_error_with_file_and_line(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"stage": "rl", "step": 1}\nnonsense\n{"stage": "rl", "step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl:2"):
        reporter(tmp_path, resumed=("rl", 2))


def test_a_new_run_in_a_used_directory_sets_the_old_records_aside(tmp_path):
    for _ in range(3):
        run(tmp_path, range(1, 3))
    assert [record["step"] for record in records(tmp_path)] == [1, 2]
    assert len(records(tmp_path, "metrics.jsonl.1")) == len(records(tmp_path, "metrics.jsonl.2")) == 2
    assert timeline_steps(tmp_path) == timeline_steps(tmp_path, "timeline.json.gz.2") == [1, 2]


def test_numbers_that_json_does_not_have_become_null_and_are_named(tmp_path):
    stream = io.StringIO()
    report = reporter(tmp_path, stream=stream)
    report.start_stage("rl", 2)
    report.record(1, {"policy/loss": float("nan"), "policy/grad_norm": float("inf")})
    report.close()
    assert records(tmp_path)[0]["policy/loss"] is None
    assert "not a finite number: policy/loss, policy/grad_norm" in stream.getvalue()


def test_samples_are_bounded_and_complete(tmp_path):
    report = reporter(tmp_path, ReportSettings(tensorboard=False, samples_per_step=2))
    report.record_samples(5, [sample(id=str(number), reward=None, advantage=np.float32(0.5)) for number in range(9)])
    report.record_samples(5, [sample()] * 9, kind="evaluation", limit=3)
    report.close()
    rows = records(tmp_path, "samples.jsonl")
    assert [row["kind"] for row in rows] == ["train"] * 2 + ["evaluation"] * 3
    assert rows[1]["id"] == "1"
    assert rows[0]["reward"] is None
    assert rows[0]["advantage"] == 0.5
    expected = "stage step kind prompt response answer parsed reward components advantage length finish_reason policy_version id"
    assert set(rows[0]) == set(expected.split())


def test_a_log_file_gets_plain_lines_without_control_characters(tmp_path):
    stream = io.StringIO()
    report = reporter(tmp_path, stream=stream)
    report.say("32 prompts [8] = 256")
    report.start_stage("rl", 4)
    report.phase("rollout", rows_active=3)
    report.record(2, {"reward/mean": 0.25, "reward/accuracy": 0.5, "timing/step_seconds": 2.0, "timing/rollout_seconds": 1.5})
    report.finish(["python -m tlt_jax.train --help"])
    text = stream.getvalue()
    assert "32 prompts [8] = 256\n" in text
    assert "rl 2/4  reward 0.250  right 50 %  2.0 s (rollout 1.5)" in text
    assert "healthy" in text
    assert f"files in {tmp_path}: metrics.jsonl, curves.png\nnext: python -m tlt_jax.train --help\n" in text
    assert all(character.isprintable() or character == "\n" for character in text)


def test_a_terminal_gets_a_live_display_and_the_same_lines(tmp_path):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    report = reporter(tmp_path, stream=stream)
    report.start_stage("rl", 2)
    report.say("prompts [red] :smile:")
    report.phase("rollout", rows_active=12, tokens_per_second=900.0)
    report.record(1, {"reward/mean": 0.25})
    report.close()
    report.close()
    text = stream.getvalue()
    assert "rl: rollout, rows active 12, tokens per second 900" in text
    assert "reward 0.250" in text
    assert "prompts [red] :smile:" in text


def test_lines_come_every_n_steps_and_at_the_last_one(tmp_path):
    stream = io.StringIO()
    report = reporter(tmp_path, ReportSettings(tensorboard=False, every_steps=3), stream=stream)
    report.start_stage("rl", 5)
    for step in range(1, 6):
        report.record(step, {"reward/mean": 0.0})
    report.close()
    assert [line.split()[1] for line in stream.getvalue().splitlines() if line.startswith("rl ")] == ["3/5", "5/5"]
    assert len(records(tmp_path)) == 5


def test_the_curves_are_a_png_and_a_run_without_records_draws_none(tmp_path):
    report = reporter(tmp_path)
    report.finish()
    assert not (tmp_path / "curves.png").exists()
    report.start_stage("rl", 2)
    report.record(0, {"reward/heldout_accuracy": 0.1})
    report.record(1, {"reward/mean": 0.5, "policy/entropy": float("nan"), "completions/length_mean": 7.0})
    report.finish()
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("every", "drawn"), [(2, ["rl step 2", "rl step 4"]), (0, [])])
def test_a_picture_of_the_timeline_is_drawn_each_n_steps_and_listed(tmp_path, monkeypatch, every, drawn):
    titles, draw, stream = [], reporting.draw, io.StringIO()
    monkeypatch.setattr(reporting, "draw", lambda spans, path, title: (titles.append(title), draw(spans, path, title)))
    report = reporter(tmp_path, ReportSettings(tensorboard=False, timeline_every_steps=every), stream=stream)
    report.start_stage("rl", 5)
    for step in range(1, 6):
        report.record_timeline(step, [Span(0, "rollout", step, step + 0.5)])
    report.finish()
    assert titles == drawn and timeline_steps(tmp_path) == [1, 2, 3, 4, 5]
    assert (tmp_path / "timeline.png").exists() == bool(drawn)
    assert f"files in {tmp_path}: timeline.json.gz{', timeline.png' if drawn else ''}\n" in stream.getvalue()


def scalars(path):
    """(tag, step, value) of the TensorBoard events under a folder: records of length (8 bytes), its check sum (4), data, check sum (4)."""
    found = []
    for file in sorted(path.iterdir()):
        data = file.read_bytes()
        while data:
            length = int.from_bytes(data[:8], "little")
            event = event_pb2.Event.FromString(data[12 : 12 + length])
            found += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
            data = data[16 + length :]
    return found


def test_tensorboard_gets_the_numbers_of_each_stage_on_its_own_axis(tmp_path):
    report = reporter(tmp_path, ReportSettings(stages=("sft", "rl")))
    report.start_stage("sft", 1)
    report.record(1, {"policy/loss": 2.0, "data/source": "text"})
    report.start_stage("rl", 1)
    report.record(1, {"reward/mean": 0.5})
    report.close()
    assert scalars(tmp_path / "tensorboard" / "sft") == [("policy/loss", 1, 2.0)]
    assert scalars(tmp_path / "tensorboard" / "rl") == [("reward/mean", 1, 0.5)]


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        (
            {"reward/groups_equal_fraction": 1.0, "reward/groups_all_wrong_fraction": 0.9, "reward/groups_all_right_fraction": 0.1},
            "all groups have equal rewards",
        ),
        ({"reward/groups_equal_fraction": 0.9, "reward/groups_all_wrong_fraction": 0.1, "reward/groups_all_right_fraction": 0.8}, "too easy"),
        ({"completions/truncated_fraction": 0.5}, "50 % of the completions were cut"),
        ({"sampler/logprob_difference_mean": 0.2}, "sampler and trainer disagree by 0.200"),
        ({"reward/errors": 2, "reward/timeouts": 1}, "2 reward errors and 1 time-outs"),
        ({"policy/kl": 2.0}, "KL to the reference is 2.00"),
        ({"policy/clip_fraction": 0.6}, "60 % of the tokens are clipped"),
        ({"policy/skipped_updates": 1}, "1 updates skipped"),
        ({"policy/loss": float("nan")}, "not a finite number: policy/loss"),
    ],
)
def test_the_health_line_names_the_cause(metrics, words):
    line = health_line(metrics)
    assert line.startswith("look: ")
    assert words in line


def test_a_compile_is_a_trouble_only_after_the_warm_up():
    assert health_line({"perf/compiles": 3}, [{}]) == "healthy"
    assert "3 programs compiled" in health_line({"perf/compiles": 3}, [{}, {}])


def test_falling_entropy_is_seen_against_ten_steps_before():
    steps = [{"policy/entropy": 1.0 - 0.06 * step} for step in range(11)]
    assert "entropy fell from 1.000 to 0.400 in 10 steps" in health_line(steps[10], steps[:10])
    assert health_line(steps[4], steps[:4]) == "healthy"


def test_a_good_step_says_how_many_groups_teach():
    assert health_line({"reward/groups_equal_fraction": 0.25, "policy/kl": 0.01}) == "healthy: 75 % of the groups teach something"


def test_the_rl_loss_is_not_headlined():
    assert "loss" not in numbers_line({"reward/mean": 1.0, "policy/loss": 0.1})
    assert "loss 0.1000" in numbers_line({"policy/loss": 0.1})
