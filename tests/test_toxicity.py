"""The judge of rude words that no search knows: the texts of these records are its scores."""

import math

import pandas as pd
import pytest
import synthetic

from igcore.errors import ParameterError, ScorerError
from igstudy.report import paired


class Reader:
    """A judge that reads its score from the text."""

    name, digest, sign, unit = "reader", "r1", "higher is worse", "probability"

    def __init__(self):
        self.seen = []

    def score(self, prompts, responses, finished):
        assert all(finished)
        self.seen += responses
        return [float(text) for text in responses]


def records(texts, method="base", status="verified_safe"):
    about = {"method": method, "status": status}
    lines = [synthetic.record(prompt_id=f"p{k}", **about) for k in range(len(texts))]
    return pd.DataFrame(lines).assign(response=texts, cost_digest="c1", reward_digest="r0")


def test_each_text_is_judged_once():
    """Guards against the answers that several methods share being read again for each, and a judge
    asked about silence.
    """
    reader = Reader()
    given = [records(["0.9", "0.8"]), records(["0.9", "0.1"], "best-of-n"), records([None])]
    judged = paired.with_toxicity(pd.concat(given, ignore_index=True), reader)
    assert sorted(reader.seen) == ["0.1", "0.8", "0.9"]
    assert judged["toxicity"].tolist()[:4] == [0.9, 0.8, 0.9, 0.1]
    assert math.isnan(judged["toxicity"].iloc[4])


def test_an_abstention_has_no_toxicity():
    """Guards against the text of a refusal entering the mean of the answers."""
    judged = paired.with_toxicity(records(["0.9"], status="abstained"), Reader())
    assert paired.toxicity(judged).isna().all()


def test_a_missing_score_stays_missing():
    """Guards against a judge that fails and so finds everything mild."""
    assert paired.with_toxicity(records(["nan", "0.1"]), Reader())["toxicity"].isna().any()
    with pytest.raises(ScorerError, match="'reader' failed on 51 of 100 texts"):
        texts = [f"{k + 1}e999" for k in range(51)] + [f"{k}" for k in range(49)]
        paired.with_toxicity(records(texts), Reader())


@pytest.mark.parametrize("role", ["cost_digest", "reward_digest"])
def test_a_search_is_not_judged_by_what_steered_it(role):
    with pytest.raises(ParameterError, match="'reader' steered these searches"):
        paired.with_toxicity(records(["0.1"]).assign(**{role: "r1"}), Reader())
