"""The start-up check of a user's reward."""

import pytest

from tlt_jax.rewards.items import PoolSettings, RewardError, Scorer
from tlt_jax.rewards.pool import RewardPool
from tlt_jax.tasks.prompts import Prompt
from tlt_jax.training.scoring import check_reward

PROMPT = Prompt(key=1, source="train.jsonl", row=3, text="2+2=?", prompt_ids=(1, 2), answer="4")


def pool_of(tmp_path, body: str) -> RewardPool:
    file = tmp_path / "reward.py"
    file.write_text(f"def score(response, answer):\n    {body}\n")
    return RewardPool(PoolSettings(workers=0), Scorer("user", {"path": str(file), "function": "score"}))


def test_a_users_reward_is_shown_on_the_reference_answer_and_on_nothing(tmp_path):
    with pool_of(tmp_path, "return float(answer in response)") as pool:
        said = check_reward(pool, PROMPT)
    assert "row 3" in said and "scores 1.0" in said and "empty response 0.0" in said


def test_a_reward_that_fails_on_the_first_prompt_stops_the_run_and_names_the_row(tmp_path):
    with pool_of(tmp_path, "return float(response[0] == 'T')") as pool, pytest.raises(RewardError, match=r"train\.jsonl, row 3(.|\n)*IndexError"):
        check_reward(pool, PROMPT)
