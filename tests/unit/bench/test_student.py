"""Quantiles of t, held against scipy's."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import t

from outrider_serving.bench.student import central_quantile


@given(probability=st.floats(0, 0.9999), freedom=st.integers(1, 200))
def test_it_is_scipys(probability: float, freedom: int) -> None:
    expected = t.ppf((1 + probability) / 2, freedom)
    assert math.isclose(central_quantile(probability, freedom), expected, rel_tol=1e-6, abs_tol=1e-9)


@pytest.mark.parametrize(("probability", "freedom"), [(-0.1, 5), (1.0, 5), (math.nan, 5), (0.95, 0)])
def test_what_has_no_quantile(probability: float, freedom: int) -> None:
    with pytest.raises(ValueError, match="no quantile"):
        central_quantile(probability, freedom)
