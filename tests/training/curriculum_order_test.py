"""Prompts under a curriculum: drawn part by part, none twice, counted by their own stage, and the same after a restart."""

import json
import math

import pytest

from tests.training.settings_test import changed
from tlt_jax.rewards.items import Scored
from tlt_jax.strategies import Completion, Request
from tlt_jax.tasks.prompts import Prompt, PromptOrder
from tlt_jax.tasks.text_files import DataError
from tlt_jax.training.curriculum_order import CurriculumOrder, parts_of
from tlt_jax.training.scoring import Rollouts

SIZES = (6, 5, 9)


def prompts_of(sizes=SIZES):
    """Prompts of difficulty 1, 2, … as many of each as `sizes` says, the hardest first."""
    difficulties = [float(part) for part, size in reversed(list(enumerate(sizes, start=1))) for _ in range(size)]
    return [Prompt(1000 + row, "rows.jsonl", row, "q", (1,), "a", difficulty) for row, difficulty in enumerate(difficulties)]


def order_of(prompts=None, **values):
    settings = {"advance": "success", "stages": 3, "success_rate": 0.5, "window": 2, "review": 0.25} | values
    return CurriculumOrder(changed(**{f"curriculum__{name}": value for name, value in settings.items()}), prompts or prompts_of())


def rolled_out(prompts, judged):
    """Rollouts with these verdicts; of one score a prompt or more."""
    generations = len(judged) // len(prompts)
    completion = Completion(Request(0, 0, 0, 0, (1,), 1, 0, 0), (2,), (0.0,), (0.0,), "stop", 0, 1)
    scores = [Scored(0, row, 0.0 if one is None else one, {}, None, None, 0.0, one) if one is not None else Scored(0, row, None, {}, None, "late", 0.0)
        for row, one in enumerate(judged)]
    return Rollouts(generations, tuple(prompts), (completion,) * len(judged), tuple(scores))


def step(order, prompts, verdict=1.0, count=4):
    """One step in which every answer gets this verdict: the indices and the metrics."""
    indices = order.draw(count)
    return indices, order.note(rolled_out([prompts[index] for index in indices], [verdict] * count))


def difficulties_of(prompts, indices):
    return sorted(prompts[index].difficulty for index in indices)


def test_the_first_stage_draws_the_easiest_and_later_ones_their_own_with_a_share_of_easier_ones():
    prompts, order = prompts_of(), order_of()
    drawn = [difficulties_of(prompts, step(order, prompts)[0]) for _ in range(6)]
    assert drawn == [[1.0] * 4] * 2 + [[1.0] + [2.0] * 3] * 2 + [[2.0] + [3.0] * 3] * 2


def test_no_prompt_is_drawn_twice_in_a_step_and_each_once_in_an_epoch_of_its_part():
    prompts, order = prompts_of(), order_of()
    drawn = []
    for _ in range(3):
        indices, _ = step(order, prompts, verdict=0.0)
        assert len(set(indices)) == 4
        drawn += indices
    assert order.epoch == 1
    assert sorted(drawn[:6]) == sorted(set(drawn)) == [index for index, prompt in enumerate(prompts) if prompt.difficulty == 1.0]
    assert len(set(order.draw(sum(SIZES)))) == sum(SIZES)
    with pytest.raises(ValueError, match="21 different prompts are asked for in one step and there are 20"):
        order.draw(21)


@pytest.mark.parametrize("advance", ["success", "step"])
def test_three_steps_a_restart_and_three_more_are_six_steps(advance):
    prompts = prompts_of()
    straight, first, second = (order_of(advance=advance, steps_per_stage=2) for _ in range(3))
    expected = [step(straight, prompts, verdict) for verdict in (1.0, 1.0, 0.5, 1.0, 1.0, 1.0)]
    before = [step(first, prompts, verdict) for verdict in (1.0, 1.0, 0.5)]
    second.restore(json.loads(json.dumps(first.state())))
    assert before + [step(second, prompts, verdict) for verdict in (1.0, 1.0, 1.0)] == expected
    assert second.state() == straight.state() and second.curriculum.stage > 0


def test_the_seed_and_shuffling_decide_the_order_within_a_part():
    prompts = prompts_of((20, 20))
    config = changed(curriculum__advance="step")
    other, plain = changed(curriculum__advance="step", seed=1), changed(curriculum__advance="step", data__shuffle=False)
    draws = [CurriculumOrder(one, prompts).draw(12) for one in (config, config, other, plain)]
    assert draws[0] == draws[1] != draws[2] and draws[3] == list(range(20, 32))


@pytest.mark.parametrize("without", [3, 17])
def test_a_row_without_a_difficulty_is_named_with_what_to_do(without):
    prompts = [Prompt(prompt.key, prompt.source, prompt.row, "q", (1,), "a") if prompt.row in (without, 19) else prompt for prompt in prompts_of()]
    with pytest.raises(DataError, match=rf"2 of 20 prompts have no difficulty, the first is rows\.jsonl, row {without}: .*curriculum\.advance=off"):
        order_of(prompts)


def test_rows_of_one_difficulty_are_no_curriculum():
    with pytest.raises(DataError, match=r"all 8 prompts have the difficulty 1\.0.*curriculum\.advance=off"):
        order_of(prompts_of((8,)))


def test_parts_are_those_of_the_difficulties_in_the_order_of_the_data():
    assert parts_of(changed(curriculum__advance="step", curriculum__stages=2), prompts_of((2, 2))) == [1, 1, 0, 0]


def test_a_curriculum_does_not_go_on_from_a_plain_order_nor_the_other_way_round():
    order, plain = order_of(), PromptOrder(20, 0)
    with pytest.raises(DataError, match="saved with no curriculum and there are 3 parts now"):
        order.restore(plain.state())
    with pytest.raises(DataError, match="saved with a curriculum"):
        plain.restore(order.state())


def test_a_curriculum_of_other_parts_or_other_data_is_not_continued():
    saved = order_of().state()
    with pytest.raises(DataError, match="a curriculum of 3 parts and there are 2 parts now"):
        order_of(stages=2).restore(saved)
    with pytest.raises(DataError, match="count=6"):
        order_of(prompts_of((7, 5, 9))).restore(saved)


def test_metrics_tell_what_a_step_drew_and_how_its_stage_is_mastered():
    prompts, order = prompts_of(), order_of(success_rate=1.0)
    easy, middle = prompts[-1], prompts[9]
    metrics = order.note(rolled_out([easy, easy, easy, middle], [1.0, 0.5, 1.0, 1.0]))
    assert metrics == {
        "data/difficulty_part_1": 0.75, "data/difficulty_part_2": 0.25, "data/difficulty_part_3": 0.0, "data/curriculum_stage": 1,
        "data/curriculum_success": pytest.approx(2 / 3), "data/difficulty_mean": 1.25}


def test_a_stage_begins_after_the_step_that_is_reported_under_the_old_one():
    prompts, order = prompts_of(), order_of()
    metrics = [step(order, prompts)[1] for _ in range(3)]
    assert [one["data/curriculum_stage"] for one in metrics] == [1, 1, 2]
    assert [one["data/curriculum_success"] for one in metrics] == [1.0, 0.0, 1.0]


def test_only_answers_to_prompts_of_the_present_stage_count():
    prompts, order = prompts_of(), order_of()
    for _ in range(2):
        step(order, prompts)
    assert order.curriculum.stage == 1
    easy, own = prompts[-1], prompts[9]
    metrics = order.note(rolled_out([easy, own], [0.0, 0.0, 1.0, 1.0]))
    assert metrics["data/curriculum_success"] == 1.0
    assert order.note(rolled_out([easy, easy], [0.0, 0.0]))["data/curriculum_success"] == 1.0


def test_an_answer_without_a_verdict_is_neither_right_nor_wrong():
    prompts, order = prompts_of(), order_of(success_rate=1.0)
    easy = prompts[-1]
    assert order.note(rolled_out([easy], [None, math.nan, 1.0]))["data/curriculum_success"] == 1.0
    assert order.note(rolled_out([easy], [None, math.nan]))["data/curriculum_success"] == 1.0
    assert order.curriculum.stage == 0


def test_the_line_for_the_start_of_a_run_shows_the_parts():
    assert order_of(stages=2).describe() == "curriculum: difficulties in 2 stages: 1 (1 to 2, 11 prompts), 2 (3 to 3, 9 prompts)"
