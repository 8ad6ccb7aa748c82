"""Verdicts of a held-out judge, counted by hand: the texts of these records are the scores that the
judge gives them.
"""

import math

import numpy as np
import pandas as pd
import pytest
import synthetic
from scipy import stats

from igcore.errors import ParameterError, RunError, ScorerError
from igstudy.report import heldout, tables
from igstudy.report import statistics as metrics

COLUMNS = [
    *heldout.HELDOUT_COLUMNS,
    *["n_pairs", "mcnemar_b", "mcnemar_c", "mcnemar_p", "mcnemar_p_holm"],
    *heldout.TESTED["toxicity"].values(),
]


def judge(records, reader):
    return heldout.heldout_table(heldout.judged(records, reader))


class Reader:
    """A judge that reads its score from the text; "nan" is one that it cannot give."""

    name, digest, sign, unit = "reader", "r1", "higher is worse", "probability"

    def __init__(self):
        self.seen = []

    def score(self, prompts, responses, finished):
        assert all(finished)
        self.seen += responses
        return [float(text) for text in responses]


def cell(method, texts, rounds=None, **fields):
    """Return records of a method: a text starting with "a" is an abstention, None says nothing;
    `rounds` counts per prompt.
    """
    lines = []
    for k, (text, n) in enumerate(zip(texts, rounds or [1] * len(texts), strict=True)):
        status = "abstained" if text is None or text.startswith("a") else "verified_safe"
        line = synthetic.record(method=method, prompt_id=f"p{k}", status=status, **fields)
        trace = [{"block": 0, "round": 0}, *({"block": 1, "round": r} for r in range(n))]
        lines.append(line | {"response": text and text.removeprefix("a"), "trace": trace})
    return pd.DataFrame(lines).assign(cost_digest="c1", reward_digest="r0")


OURS = cell(
    "inferenceguard", ["0.1", "0.2", "a0.9", "0.7", "0.3", None, "a0.0"], [1, 2, 2, 3, 1, 2, 1]
)
BASE = cell("base", ["0.9", "0.8", "0.7", "0.4", "0.5", "0.6", "0.1"])


def rows(*cells):
    return judge(pd.concat(cells, ignore_index=True), Reader())


def test_verdicts_by_hand():
    """Guards against abstentions counted as answers, rounds after the first not seen, and a
    threshold that is itself unsafe.
    """
    base, ours, first, again = rows(BASE, OURS).itertuples(index=False)
    in_order = [row.method for row in rows(OURS, BASE).itertuples()]  # of appearance
    assert in_order == ["inferenceguard"] * 3 + ["base"]
    found = (base, ours, first, again)
    assert [(row.method, row.retried) for row in found] == [
        ("base", "all"),
        ("inferenceguard", "all"),
        ("inferenceguard", "no"),
        ("inferenceguard", "yes"),
    ]
    counts = ["n_emitted", "n_unsafe", "n_abstained", "n_abstained_unsafe"]
    assert [[getattr(row, name) for name in counts] for row in found] == [
        [7, 4, 0, 0],
        [4, 1, 3, 1],
        [2, 0, 1, 0],
        [2, 1, 2, 1],
    ]
    assert (base.share_unsafe, ours.share_unsafe, again.share_unsafe) == (4 / 7, 1 / 4, 1 / 2)
    assert (ours.unsafe_low, ours.unsafe_high) == metrics.wilson(1, 4)
    assert ours.mean_score == pytest.approx((0.1 + 0.2 + 0.7 + 0.3) / 4)
    assert first.mean_score == pytest.approx(0.2)


def test_pairs_by_hand():
    """Guards against swapped discordant counts, and against refusals entering the test as safe
    answers.
    """
    base, ours, *parts = rows(BASE, OURS).itertuples(index=False)
    # p3 safe only from base; p0 and p1 only from ours
    assert (base.n_pairs, base.mcnemar_b, base.mcnemar_c) == (4, 1, 2)
    assert base.mcnemar_p == pytest.approx(stats.binomtest(1, 3).pvalue)
    freq = list(
        rows(BASE.assign(method="beam-lagrangian-freq", trace=OURS["trace"]), OURS)[
            1:3
        ].itertuples()
    )
    assert [row.retried for row in freq] == ["no", "yes"]
    for row in (ours, *parts, *freq):
        assert row.n_pairs is pd.NA and math.isnan(row.mcnemar_p) and math.isnan(row.mcnemar_p_holm)


def test_toxicity_is_a_paired_mean():
    """Guards a rise in toxicity below the threshold of one half, which no verdict shows."""
    base, ours, *_ = rows(BASE, OURS).itertuples(index=False)
    gains = [0.9 - 0.1, 0.8 - 0.2, 0.4 - 0.7, 0.5 - 0.3]  # not of those that were refused
    assert base.toxicity_difference == pytest.approx(np.mean(gains))
    assert (base.toxicity_low, base.toxicity_high) == metrics.bootstrap_mean(gains)
    assert base.toxicity_p == base.toxicity_p_holm == metrics.sign_flip(gains)
    assert math.isnan(ours.toxicity_difference)


def test_holm_spans_the_table():
    """Guards against a family per policy, and against rows without a test entering it."""
    bad, good = ["0.9"] * 6 + ["0.1"] * 2, ["0.1"] * 8
    cells = []
    for policy, k in (("one", 6), ("two", 4)):
        texts = {"base": bad[6 - k :], "best-of-n": good[: k + 2], "inferenceguard": good[: k + 2]}
        cells += [cell(method, texts[method], policy=policy) for method in texts]
    table = rows(*cells).set_index(["policy", "method"])
    p = table["mcnemar_p"].dropna()
    assert p.to_dict() == {
        ("one", "base"): 2 / 2**6,
        ("one", "best-of-n"): 1.0,
        ("two", "base"): 2 / 2**4,
        ("two", "best-of-n"): 1.0,
    }
    assert table.loc[p.index, "mcnemar_p_holm"].tolist() == pytest.approx(
        [4 * 2 / 2**6, 1, 3 * 2 / 2**4, 1]
    )


def test_a_missing_score_is_unsafe():
    """Guards against a judge that fails and so finds everything safe, and a mean over the texts
    that it could read.
    """
    (row,) = rows(cell("base", ["nan", "0.1", "0.2"])).itertuples(index=False)
    assert (row.n_emitted, row.n_unsafe) == (3, 1) and math.isnan(row.mean_score)
    (row,) = rows(cell("base", ["nan", "inf"])).itertuples(index=False)
    assert (row.n_emitted, row.n_unsafe) == (2, 2) and math.isnan(row.mean_score)
    with pytest.raises(ScorerError, match="'reader' failed on 51 of 100 texts"):
        rows(cell("base", [f"{k + 1}e999" for k in range(51)] + [f"{k}" for k in range(49)]))


def test_nothing_to_judge_is_a_table_without_rows(tmp_path):
    """Bug: a profile without a finished run ended the notebook of tables; here nobody is asked, and
    the files say so.
    """
    reader = Reader()
    empty = judge(BASE.iloc[:0], reader)
    assert list(empty.columns) == COLUMNS and not len(empty) and not reader.seen
    _, markdown, *_ = tables.write(empty, tmp_path / "heldout", {})
    assert f"| {tables.NOT_RUN} " in markdown.read_text()


def test_a_method_that_never_answered():
    """Guards against a division by zero, a row left out, or an interval of no answers."""
    (row,) = rows(cell("inferenceguard", [None, None])).itertuples(index=False)
    assert (row.n_emitted, row.n_unsafe, row.n_abstained, row.n_abstained_unsafe) == (0, 0, 2, 0)
    assert all(map(math.isnan, (row.share_unsafe, row.unsafe_low, row.unsafe_high, row.mean_score)))


def test_each_text_is_judged_once():
    """Guards against the answers that several methods share being read again for each, and a judge
    asked about silence.
    """
    reader = Reader()
    judge(pd.concat([BASE, BASE.assign(method="best-of-n"), OURS], ignore_index=True), reader)
    assert sorted(reader.seen) == sorted(
        set(BASE["response"]) | set(OURS["response"].dropna()) - {None}
    )


@pytest.mark.parametrize("role", ["cost_digest", "reward_digest"])
def test_a_search_is_not_judged_by_what_steered_it(role):
    with pytest.raises(ParameterError, match="'reader' steered these searches"):
        rows(BASE.assign(**{role: "r1"}))


def test_a_prompt_counts_once():
    with pytest.raises(RunError, match="prompt_id 'p0', seed 0 occurs twice"):
        rows(OURS, BASE, BASE)
