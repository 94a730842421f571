"""Updates owed to the drafter."""

from hypothesis import given
from hypothesis import strategies as st

from tlt_jax.scheduling.quotas import STEPS_KEPT, Quota, come_due, left_for_the_end, repaid


@given(st.integers(0, 10), st.lists(st.integers(0, 30), max_size=40))
def test_what_is_owed_is_repaid_in_idle_time_first_and_at_the_end_of_every_step_at_the_latest(per_step, idle):
    quota, trained = Quota(per_step), 0
    for quanta in idle:
        quota = repaid(come_due(quota), quanta)
        rest = left_for_the_end(quota, "always")
        assert rest == max(per_step - quanta, 0)
        quota, trained = repaid(quota, rest), trained + quanta + rest
        assert quota.owed == 0
    assert trained >= per_step * len(idle)


@given(st.integers(0, 10), st.lists(st.integers(0, 30), max_size=40))
def test_in_idle_mode_nothing_is_trained_at_the_end_and_debts_stay_bounded(per_step, idle):
    quota = Quota(per_step)
    for quanta in idle:
        quota = repaid(come_due(quota), quanta)
        assert left_for_the_end(quota, "idle") == 0 and 0 <= quota.owed <= STEPS_KEPT * per_step
