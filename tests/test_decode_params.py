"""Tests of the parameters of notebook 30."""

import pytest

from igcore import ParameterError
from igcore.runs.decode_params import DecodeParams

GOOD = dict(
    profile="ci", run="x", policy="smollm2-raw", methods=["base"], prompts="mild", budget=0.2
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_sample": 4}, "unknown parameter 'n_sample'; did you mean 'n_samples'"),
        ({"budget": "0.2"}, "budget is '0.2': Input should be a valid number"),
        ({"methods": "base"}, "methods is 'base': Input should be a valid list"),
        ({"methods": []}, "methods is empty"),
        ({"methods": ["base", "base"]}, "methods names 'base' twice"),
        ({"methods": ["bose"]}, "unknown method 'bose'; did you mean 'base'"),
        (
            {"methods": ["base", "inferenceguard-mix"]},
            "'inferenceguard-mix', which uses a critic, but critic names none; train one",
        ),
        ({"critic": 1}, "critic is 1: Input should be a valid string"),
        (
            {"threshold": "match"},
            "threshold is 'match': Input should be a valid number",
        ),
        (
            {"cost": "offensive"},
            "unknown cost scorer 'offensive'; did you mean 'offensive-language'",
        ),
        ({"limit": "all"}, "limit is 'all': Input should be a valid integer"),
        ({"limit": 0}, "limit is 0"),
        ({"shard": 2, "n_shards": 2}, "shard is 2; with n_shards 2 it must be below"),
        ({"keep": 9}, "keep is 9, more than n_samples, which is 8"),
        ({"seed": 1.5}, "seed is 1.5: Input should be a valid integer"),
    ],
)
def test_bad_parameters_are_named(changes, message):
    with pytest.raises(ParameterError, match=message):
        DecodeParams(**(GOOD | changes))


def test_a_missing_parameter_is_named():
    with pytest.raises(ParameterError, match="parameter budget is missing"):
        DecodeParams(**{name: value for name, value in GOOD.items() if name != "budget"})
