"""The weight of the KL moves towards its target by small steps."""

import pytest

from tlt_jax.objectives.kl_controller import adapted


@pytest.mark.parametrize(("kl", "expected"), [(0.05, 0.00097952), (0.11, 0.00101024), (0.5, 0.00102048), (0.1, 0.001)])
def test_one_step_holds_the_reference_vectors(kl, expected):
    assert adapted(0.001, kl, target=0.1, sequences=1024, horizon=10000) == pytest.approx(expected, abs=1e-8)
