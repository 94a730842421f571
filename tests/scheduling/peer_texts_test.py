"""Segments for texts: rows that run keep theirs, the oldest finished text goes first, earlier answers come once for each prompt."""

import hypothesis
import hypothesis.strategies as st

from tlt_jax.scheduling.peer_texts import AnswerHistory, PeerTexts
from tlt_jax.strategies import Request


def request(prompt, sample=0):
    return Request(prompt=prompt, sample=sample, draw=0, index=0, prompt_ids=(1, 2), max_new_tokens=4, seed=0, step=1)


@hypothesis.given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=60))
def test_no_two_running_rows_share_a_segment_and_a_prompt_has_one_group(turns):
    slots, history = 4, AnswerHistory(2)
    texts, running = PeerTexts(2 * slots, history), []
    for enters, prompt in turns:
        if enters and len(running) < slots:
            [place], earlier = texts.enter([request(prompt)], slots)
            held = {other.segment for _, other in running}
            assert place.segment not in held and not held & {one.segment for one, _ in earlier} and place.segment not in {one.segment for one, _ in earlier}
            assert all(other.group == place.group for number, other in running if number == prompt)
            assert all(one.group == place.group for one, _ in earlier) and len(earlier) <= 2
            running.append((prompt, place))
        elif running:
            number, place = running.pop(prompt % len(running))
            if prompt % 3:
                texts.leave(request(number), place, (7, number))
            else:
                texts.move_away(place)
    assert len(texts._free) + len(running) == 2 * slots


def test_the_latest_answers_of_a_prompt_come_back_in_the_next_phase_once():
    history = AnswerHistory(2)
    first = PeerTexts(8, history)
    places, earlier = first.enter([request(5, sample) for sample in range(3)], 4)
    assert not earlier
    for sample, place in enumerate(places):
        first.leave(request(5, sample), place, (sample,))
    second = PeerTexts(8, history)
    _, earlier = second.enter([request(5), request(6)], 4)
    assert [text for _, text in earlier] == [(1, 2, 2), (1, 2, 1)]
    assert second.enter([request(5)], 4)[1] == []


def test_the_history_forgets_the_prompts_answered_longest_ago_when_it_is_full():
    history = AnswerHistory(2, most_tokens=10)
    for prompt in range(3):
        history.add(prompt, (prompt,) * 4)
    assert [history.of(prompt) for prompt in range(3)] == [[], [(1,) * 4], [(2,) * 4]]
    assert AnswerHistory(0).of(1) == []
