"""The reward pool: worker processes that hang, crash and grow, policies for failures, order, and the limits of what is tolerated."""

import textwrap

import pytest

from tlt_jax.rewards.items import Component, PoolSettings, RewardError, RewardFailureError, RewardItem, Scorer
from tlt_jax.rewards.pool import RewardPool

REWARDS = """
import os, sys, time
LOADED = []
def score(response, answer):
    if response == "hang":
        while True:
            time.sleep(0.01)
    if response == "crash":
        os._exit(3)
    if response == "wait":
        while not os.path.exists(answer):
            time.sleep(0.01)
        return 1
    if response == "exit":
        sys.exit(1)
    if response == "raise":
        raise KeyError("no such column")
    if response == "none":
        return None
    if response == "memory":
        LOADED.append(bytearray(10**10))
    if response == "grow":
        LOADED.append(b"x" * 200_000_000)
    if response == "pid":
        return {"score": 1, "pid": os.getpid()}
    if response == "jax":
        return "jax" in sys.modules or "jaxlib" in sys.modules
    return float(response == answer)
"""


@pytest.fixture
def user(tmp_path):
    (tmp_path / "rewards.py").write_text(REWARDS)
    return Scorer("user", {"path": str(tmp_path / "rewards.py"), "function": "score"})


def items(*responses, answer="4"):
    return [RewardItem("2+2?", response, answer) for response in responses]


def score_all(pool, responses, timeout=60.0):
    for item in items(*responses):
        pool.submit(item)
    return pool.drain(timeout)


VERDICTS = [
    (r"\boxed{0.375}", r"\frac{3}{8}", 1.0),
    (r"\boxed{4}", r"4\sqrt{2}", 0.0),
    (r"\boxed{\frac{1}{\sqrt{3}}}", r"\frac{\sqrt{3}}{3}", 1.0),
    (r"\boxed{12{,}500}", "12500", 1.0),
    ("#### 7", "-7", 0.0),
    ("#### 64 apples", "64", 1.0),
    (r"\boxed{0.35}", r"35\%", 1.0),
    (r"\boxed{35}", "0.35", 0.0),
    (r"\boxed{x = 11}", "11", 1.0),
    (r"\boxed{\text{(C)}}", "C", 1.0),
    (r"\boxed{-2x + 5y - 7 = 0}", "2x - 5y + 7 = 0", 1.0),
    (r"\boxed{(0.6,2.5]}", r"(\frac{3}{5},\frac{5}{2}]", 1.0),
    (r"\boxed{(3,8)}", "3 < x < 8", 1.0),
    (r"\boxed{\{3,1,2\}}", r"\{1,2,3\}", 1.0),
    (r"\boxed{11}", r"7 \text{ and } 11", 0.0),
    (r"\boxed{\sec^2(y)}", r"\tan^2(y)+1", 1.0),
    (r"\boxed{x+1}", "x+2n+1", 0.0),
    (r"\boxed{\frac{1}{2^{81}}}", r"\frac{1}{2^{80}}", 0.0),
    ("no idea", "5", 0.0),
    (r"\boxed{9^{9^{9^{9}}}}", "5", 0.0),
]


def test_math_verdicts_in_a_worker_process_are_right_and_in_step():
    with RewardPool(PoolSettings(workers=1), Scorer("math")) as pool:
        tickets = {pool.submit(RewardItem("", response, answer)): score for response, answer, score in reversed(VERDICTS)}
        results = pool.drain(60)
    assert [(result.ticket, result.score) for result in results] == list(tickets.items())
    assert (pool.counts["errors"], pool.open) == (0, 0)
    assert results[1].pred is None and results[-1].pred == "3/8"


def test_hung_and_crashed_workers_are_replaced_and_only_their_item_fails(user):
    settings = PoolSettings(workers=2, time_limit=1.0, failing_share=1.0)
    with RewardPool(settings, user) as pool:
        results = score_all(pool, ["4", "hang", "5", "crash", "4", "exit", "raise", "none", "4", "4"])
        counts = dict(pool.counts)
    assert [result.score for result in results] == [1.0, None, 0.0, None, 1.0, None, None, None, 1.0, 1.0]
    assert [result.error is not None for result in results] == [False, True, False, True, False, True, True, False, False, False]
    assert "no reward after 1 s" in results[1].error and "ended with status 3" in results[3].error
    assert "SystemExit" in results[5].error and "no such column" in results[6].error
    assert counts == {"scored": 10, "errors": 4, "timeouts": 1, "crashes": 1, "restarts": 2, "unscored": 1}


def test_workers_know_no_jax_and_memory_is_bounded(user):
    settings = PoolSettings(workers=1, memory_limit_mb=4096, recycle_mb=150, failing_share=1.0)
    with RewardPool(settings, user) as pool:
        results = score_all(pool, ["jax", "pid", "memory", "grow", "pid"])
    assert results[0].score == 0.0
    assert "MemoryError" in results[2].error
    assert results[3].error is None and pool.counts["restarts"] == 1
    assert results[1].components["pid"] != results[4].components["pid"]


def test_the_policy_for_failures_is_exclude_zero_or_raise(user):
    for policy, score in (("exclude", None), ("zero", 0.0)):
        with RewardPool(PoolSettings(workers=0, on_error=policy), user) as pool:
            assert [(result.score, result.error is None) for result in score_all(pool, ["4", "raise"])] == [(1.0, True), (score, False)]
            assert pool.counts["errors"] == 1
    with RewardPool(PoolSettings(workers=0, on_error="raise"), user) as pool, pytest.raises(RewardFailureError, match="no such column"):
        score_all(pool, ["4", "raise"])
    with pytest.raises(ValueError, match="exclude"):
        PoolSettings(on_error="ignore")


def test_more_than_one_failure_in_twenty_stops_the_run(user):
    with RewardPool(PoolSettings(workers=0), user) as pool:
        assert len(score_all(pool, ["4"] * 19 + ["raise"])) == 20
        with pytest.raises(RewardFailureError, match=r"(?s)2 of 21 rewards failed.*no such column"):
            score_all(pool, ["raise"])


def test_a_group_reward_sees_its_whole_group(tmp_path):
    (tmp_path / "rewards.py").write_text("def score(completions, **kwargs):\n    return [len(completions) - completions.count(c) for c in completions]")
    plural = Scorer("user", {"path": str(tmp_path / "rewards.py"), "function": "score"})
    both = Scorer("composite", components=(Component("rare", 1.0, plural), Component("right", 10.0, Scorer("math"))))
    with RewardPool(PoolSettings(workers=1), both) as pool:
        first, second = pool.submit(tuple(items("4", "5", "4"))), pool.submit(items("4")[0])
        results = pool.drain(60)
    assert [(result.ticket, result.index, result.score) for result in results] == [(first, 0, 11.0), (first, 1, 2.0), (first, 2, 11.0), (second, 0, 10.0)]


def test_a_group_for_a_reward_of_single_responses_is_scored_row_by_row(user):
    with RewardPool(PoolSettings(workers=0), user) as pool:
        pool.submit(tuple(items("4", "raise", "5")))
        assert [(result.index, result.score) for result in pool.drain(1)] == [(0, 1.0), (1, None), (2, 0.0)]


def test_top_level_callables_travel_and_others_are_refused(tmp_path, monkeypatch):
    (tmp_path / "pool_callable_rewards.py").write_text(
        textwrap.dedent("""
        def length(item):
            return {"score": len(item.response), "step": item.step}
    """)
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import pool_callable_rewards

    with RewardPool(PoolSettings(workers=1), Scorer("callable", {"function": pool_callable_rewards.length})) as pool:
        check = pool.self_check(RewardItem("", "abc", "4", step=2))
        assert (check.right.score, check.empty.score, check.right.components) == (3.0, 0.0, {"step": 2.0})
        unsendable = RewardItem("", "abc", metadata={"handle": lambda: 0})
        pool.submit(unsendable)
        assert "cannot be sent" in pool.drain(30)[0].error
    with pytest.raises(RewardError, match="top level"):
        RewardPool(PoolSettings(workers=1), Scorer("callable", {"function": lambda item: 1.0}))


def test_a_file_that_cannot_be_loaded_is_an_error_at_the_first_poll(tmp_path):
    (tmp_path / "rewards.py").write_text("import nothing_of_this_name")
    scorer = Scorer("user", {"path": str(tmp_path / "rewards.py"), "function": "score"})
    with RewardPool(PoolSettings(workers=1), scorer) as pool, pytest.raises(RewardError, match="nothing_of_this_name"):
        pool.self_check(items("4")[0])


def test_submitting_more_than_the_pipes_hold_neither_blocks_nor_loses_order(user, tmp_path):
    """The worker scores nothing until all is submitted: were a submit to wait for it, the first item would run out of its time."""
    long = [RewardItem("p" * 50_000, str(row), str(row % 2), metadata={"text": "x" * 50_000}) for row in range(40)]
    everything = tmp_path / "submitted"
    with RewardPool(PoolSettings(workers=1), user) as pool:
        for item in [*items("wait", answer=str(everything)), *long]:
            pool.submit(item)
        everything.touch()
        results = pool.drain(60)
    assert [result.score for result in results] == [1.0, *(float(row == row % 2) for row in range(40))]
