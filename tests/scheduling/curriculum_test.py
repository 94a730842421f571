"""The curriculum: parts of about one size, from easy to hard; harder ones begin when they should, and a restart changes nothing."""

import collections
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlt_jax.scheduling.curriculum import Curriculum, CurriculumSettings, split

DIFFICULTIES = st.lists(st.integers(0, 12).map(float), min_size=2, max_size=80).filter(lambda values: len(set(values)) > 1)
SIZES = st.lists(st.integers(1, 20), min_size=1, max_size=5)
RATES = st.one_of(st.none(), st.floats(0, 1))
SETTINGS = st.builds(
    CurriculumSettings, st.sampled_from(["success", "step"]), st.floats(0, 1), st.integers(1, 4), st.integers(1, 4), st.floats(0, 0.99))
BY_SUCCESS, BY_STEP = CurriculumSettings("success", 0.7, window=3), CurriculumSettings("step", steps_per_stage=3)


def stages_of(settings, rates, parts=4):
    """The stage of every step, that after the last included."""
    curriculum = Curriculum(settings, [10] * parts)
    stages = [0]
    for rate in rates:
        curriculum.note(rate)
        stages.append(curriculum.stage)
    return stages


@given(DIFFICULTIES, st.integers(2, 8))
def test_equal_difficulties_stay_together_and_harder_ones_are_never_in_an_easier_part(difficulties, stages):
    parts = split(difficulties, stages)
    assert len(parts) == len(difficulties)
    of_difficulty = dict(zip(difficulties, parts, strict=True))
    assert parts == [of_difficulty[difficulty] for difficulty in difficulties]
    ordered = [of_difficulty[difficulty] for difficulty in sorted(of_difficulty)]
    assert ordered == sorted(ordered)


@given(DIFFICULTIES, st.integers(2, 8))
def test_parts_are_numbered_without_a_gap_and_there_are_at_least_two_and_at_most_as_many_as_stages(difficulties, stages):
    parts = split(difficulties, stages)
    assert sorted(set(parts)) == list(range(max(parts) + 1))
    assert 2 <= len(set(parts)) <= min(stages, len(set(difficulties)))


@given(DIFFICULTIES, st.integers(2, 8))
def test_no_part_is_larger_than_its_share_and_the_largest_group_that_cannot_be_cut(difficulties, stages):
    largest = max(collections.Counter(difficulties).values())
    assert max(collections.Counter(split(difficulties, stages)).values()) <= len(difficulties) / stages + largest


@given(st.integers(2, 60), st.integers(2, 8), st.randoms())
def test_different_difficulties_give_parts_that_differ_by_one_at_most_in_any_order(count, stages, random):
    difficulties = list(range(count))
    random.shuffle(difficulties)
    parts = split(difficulties, stages)
    sizes = collections.Counter(parts).values()
    assert max(sizes) - min(sizes) <= 1 and len(sizes) == min(stages, count)
    expected = split(sorted(difficulties), stages)
    assert parts == [expected[difficulty] for difficulty in difficulties]


@given(st.sets(st.integers(-9, 9), min_size=2, max_size=6), st.integers(0, 4))
def test_with_no_more_difficulties_than_stages_each_is_a_part_of_its_own(values, more):
    ordered = sorted(values)
    assert split([value for value in ordered for _ in range(value % 3 + 1)], len(values) + more) == [
        part for part, value in enumerate(ordered) for _ in range(value % 3 + 1)]


def test_a_few_common_difficulties_are_split_by_where_they_lie():
    assert split([1] * 6 + [2] * 2 + [3] * 2 + [4] * 2, 2) == [0] * 6 + [1] * 6
    assert split([1] * 8 + [2, 3], 2) == [0] * 8 + [1, 1]
    assert split([1, 2] + [3] * 8, 2) == [0, 0] + [1] * 8


@pytest.mark.parametrize(("difficulties", "message"), [([2.0] * 5, "all 5 prompts have the difficulty 2.0"), ([], "all 0 prompts")])
def test_difficulties_that_are_all_equal_cannot_be_split(difficulties, message):
    with pytest.raises(ValueError, match=message):
        split(difficulties, 3)


@given(SETTINGS, SIZES, st.lists(RATES, max_size=12), st.integers(1, 100))
def test_a_step_draws_what_is_wanted_and_of_no_part_more_than_it_has(settings, sizes, rates, wanted):
    curriculum = Curriculum(settings, sizes)
    for rate in rates:
        curriculum.note(rate)
    if wanted > sum(sizes):
        with pytest.raises(ValueError, match=f"{wanted} different prompts .* there are {sum(sizes)}"):
            curriculum.counts(wanted)
        return
    counts = curriculum.counts(wanted)
    assert sum(counts) == wanted and all(0 <= count <= size for count, size in zip(counts, sizes, strict=True))
    harder, easier = counts[curriculum.stage + 1 :], counts[: curriculum.stage + 1]
    assert not any(harder) or easier == sizes[: curriculum.stage + 1], "harder ones come only when nothing easier is left"


@given(SETTINGS, st.integers(2, 5), st.integers(1, 30), st.integers(0, 4))
def test_the_review_share_comes_from_the_easier_parts_and_evenly(settings, parts, wanted, stage):
    curriculum = Curriculum(settings, [100] * parts)
    curriculum.stage = min(stage, parts - 1)
    counts, review = curriculum.counts(wanted), int(settings.review * wanted) if curriculum.stage else 0
    easier = counts[: curriculum.stage]
    assert counts[curriculum.stage] == wanted - review and sum(easier) == review and not any(counts[curriculum.stage + 1 :])
    assert not easier or max(easier) - min(easier) <= 1


def test_a_part_that_is_too_small_is_filled_up_with_the_next_easier_ones_before_harder_ones():
    curriculum = Curriculum(BY_STEP._replace(review=0.0), [4, 4, 3, 9])
    curriculum.stage = 2
    assert [curriculum.counts(wanted) for wanted in (3, 5, 9, 12)] == [[0, 0, 3, 0], [0, 2, 3, 0], [2, 4, 3, 0], [4, 4, 3, 1]]


def test_where_the_easier_part_is_too_small_for_the_review_the_present_one_gives_more():
    curriculum = Curriculum(BY_STEP._replace(review=0.5), [2, 50])
    curriculum.stage = 1
    assert curriculum.counts(20) == [2, 18]


@given(SETTINGS, st.lists(RATES, max_size=40), st.integers(1, 5))
def test_a_stage_never_goes_back_never_skips_one_and_never_passes_the_last(settings, rates, parts):
    stages = stages_of(settings, rates, parts)
    assert all(after - before in (0, 1) for before, after in zip(stages, stages[1:], strict=False)) and max(stages) < parts


@given(st.floats(0, 1), st.integers(1, 4), st.lists(RATES, max_size=40))
def test_success_goes_on_exactly_after_a_window_of_one_stage_with_the_wanted_mean(wanted, window, rates):
    stages = stages_of(CurriculumSettings("success", wanted, window), rates)
    since = []
    for step, rate in enumerate(rates):
        since += [] if rate is None else [rate]
        latest = since[-window:]
        ready = len(latest) == window and sum(latest) / window >= wanted and stages[step] < 3
        assert stages[step + 1] - stages[step] == ready
        since = [] if ready else since


def test_one_lucky_step_is_no_success_and_a_new_stage_starts_without_the_old_ones_rates():
    assert stages_of(BY_SUCCESS, [1.0, 1.0, 0.2, 0.9, 1.0]) == [0, 0, 0, 1, 1, 1]
    assert stages_of(BY_SUCCESS, [1.0, 1.0, 0.0, 0.9, 0.9, 0.2]) == [0] * 7
    assert stages_of(BY_SUCCESS, [1.0] * 6) == [0, 0, 0, 1, 1, 1, 2]


def test_a_step_without_an_answer_of_the_stage_counts_for_no_success():
    assert stages_of(BY_SUCCESS, [1.0, None, 1.0, None, 1.0, None]) == [0, 0, 0, 0, 0, 1, 1]


def test_by_step_each_stage_has_its_steps_whatever_the_answers():
    assert stages_of(BY_STEP, [None, 0.0, 1.0] * 3, parts=3) == [0] * 3 + [1] * 3 + [2] * 4


def test_success_is_the_mean_over_the_window_of_the_present_stage():
    curriculum, seen = Curriculum(BY_SUCCESS, [9, 9]), []
    for rate in (0.5, 1.0, 0.3, 0.2, None):
        curriculum.note(rate)
        seen.append(curriculum.success)
    assert seen == pytest.approx([0.5, 0.75, 0.6, 0.5, 0.5])
    curriculum = Curriculum(BY_STEP, [9, 9])
    for _ in range(3):
        curriculum.note(1.0)
    assert (curriculum.stage, curriculum.success) == (1, 0.0)


@given(SETTINGS, SIZES, st.lists(RATES, max_size=30), st.integers(0, 30))
def test_a_restored_curriculum_has_the_future_of_the_one_that_was_saved(settings, sizes, rates, stop):
    straight, first, second = (Curriculum(settings, sizes) for _ in range(3))
    for rate in rates[:stop]:
        straight.note(rate), first.note(rate)
    second.restore(json.loads(json.dumps(first.state())))
    for rate in [*rates[stop:], 1.0, 0.0]:
        straight.note(rate), second.note(rate)
        assert second.counts(sum(sizes) // 2) == straight.counts(sum(sizes) // 2) and second.success == straight.success
    assert second.state() == straight.state()


def test_a_stage_beyond_the_last_of_fewer_parts_is_the_last():
    curriculum = Curriculum(BY_SUCCESS, [3, 3])
    curriculum.restore({"stage": 4, "steps": 2, "rates": [0.1, 0.2, 0.3, 0.4]})
    assert curriculum.stage == 1 and curriculum.state()["rates"] == [0.2, 0.3, 0.4]
    assert curriculum.counts(4) == [1, 3]
