"""Tests of the settings of the search."""

import pytest

from igcore import ParameterError, SearchConfig


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temperature": 0}, "temperature is 0, but the search samples and is never greedy; give"),
        ({"temperature": -1.0}, "temperature is -1.0, but the search samples"),
        ({"temperature": 9.0}, "temperature is 9.0, .* from 0.01, which is all but greedy, to 5"),
        ({"top_p": 0}, "top_p is 0: it must be greater than 0"),
        ({"top_p": 1.5}, "top_p is 1.5: it must be less than or equal to 1"),
        ({"top_k": 0}, "top_k is 0: it must be greater than or equal to 1"),
        ({"top_k": -1}, "top_k is -1: it must be greater than or equal to 1"),
        ({"sampling": "greedy"}, "sampling is 'greedy': it must be 'checkpoint'"),
        ({"sampling": "checkpoint", "top_k": 1}, "'checkpoint', which takes temperature, .*leave"),
    ],
)
def test_sampling_that_cannot_be_gets_one_sentence(given, message):
    with pytest.raises(ParameterError, match=message) as caught:
        SearchConfig(budget=1.0, **given)
    assert "\n" not in str(caught.value)
