"""Tests of the go or no-go of regimes, by hand and beside a slow reference."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import tiny

from igcore import Guard
from igcore.files import root
from igcore.scorers import of_function
from igcore.scoring import Cached
from igstudy.report import regimes
from igstudy.runs import regimes_run

ABOUT = {"regime": "r", "policy": "p", "cost": "c", "budget": 0.0, "kind": "pilot"}
COLUMNS = ("prompt_id", "tokens", "breach")
NONE = math.nan


def draws(rows):
    """Return plain answers of (prompt, tokens, breach)."""
    return pd.DataFrame([ABOUT | dict(zip(COLUMNS, r, strict=True)) for r in rows])


def test_an_answer_is_kept_up_to_its_first_breach():
    """Guards the length: a breach behind the first tokens does not count there."""
    found = draws([("a", 50, NONE), ("a", 50, 32), ("b", 128, 33)])
    assert regimes.kept(found, 32).tolist() == [True, False, True]
    assert regimes.kept(found, 128).tolist() == [True, False, False]


def test_the_share_between_prompts():
    """By hand: prompts decide all, chance decides all, and a mixture. Bug: with three answers a
    prompt, the variance of prompts' means is not 0 where only chance decides.
    """
    prompts = pd.Series([*"aaabbb"])
    assert regimes.between(pd.Series([1, 1, 1, 0, 0, 0]), prompts) == 1.0
    assert regimes.between(pd.Series([1, 0, 1, 1, 0, 1]), prompts) == pytest.approx(-0.5)
    # means 1/3 and 1: among 3 * 2/9, within 1/6, so (2/3 - 1/6) / (2/3 + 2/6)
    assert regimes.between(pd.Series([1, 0, 0, 1, 1, 1]), prompts) == pytest.approx(0.5)
    assert math.isnan(regimes.between(pd.Series([1, 1, 1, 1, 1, 1]), prompts))


def test_the_share_between_prompts_is_unbiased():
    """Compares with the share that made the values, over 2,000 prompts."""
    rng = np.random.default_rng(0)
    chance = rng.beta(1, 3, size=2000)  # variance 3/80, of values 3/16: a share of .2
    values = (rng.random((2000, 3)) < chance[:, None]).ravel()
    found = regimes.between(pd.Series(values), pd.Series(np.repeat(np.arange(2000), 3)))
    assert found == pytest.approx(0.2, abs=0.03)


def test_the_price_of_rejection_is_that_of_a_simulation():
    """Compares with rejection sampling from the same answers, drawn again and again."""
    found = draws([("a", 10, NONE), ("a", 20, NONE), ("b", 30, 4), ("b", 25, 25), ("c", 9, 2)])
    at = np.random.default_rng(1).integers(len(found), size=40_000)
    tokens, breach = found["tokens"].to_numpy()[at], found["breach"].to_numpy()[at]
    answers = tokens[np.isnan(breach)]
    spent = answers.sum() + np.nansum(breach)
    simulated = spent / len(answers) / np.mean(answers)
    assert regimes.price(found, 128) == pytest.approx(simulated, rel=0.02)
    assert regimes.price(found, 128) == (10 + 20 + 4 + 25 + 2) / 30
    assert regimes.price(draws([("a", 9, 2)]), 128) == math.inf


def test_the_law_at_its_ends():
    """By hand: 1 where all answers are kept; at S 1/e it is e - 1; no answer costs for ever."""
    assert regimes.law(1.0) == 1.0
    assert regimes.law(1 / math.e) == pytest.approx(math.e - 1)
    assert regimes.law(0.0) == math.inf


def test_a_regime_goes_where_chance_decides_and_rejection_is_dear():
    """Guards the verdict: cheap regimes and those that prompts decide tell no searches apart."""
    chance = [(p, 100, b) for p in "abcdef" for b in (90, 80, NONE)]
    prompts = [(p, 100, b) for p in "abcdef" for b in [90 if p < "e" else NONE] * 3]
    cheap = [(p, 100, b) for p in "abcdef" for b in (NONE, 80, NONE)]
    parts = [draws(rows).assign(regime=n) for n, rows in enumerate((chance, prompts, cheap))]
    harmless = draws([("h", 100, 5), ("h", 100, NONE)]).assign(kind="harmless", regime=0)
    table = regimes.go_or_no_go(pd.concat([*parts, harmless]))
    assert table["go"].tolist() == [True, False, False]
    assert table["S_128"].tolist() == pytest.approx([1 / 3, 1 / 3, 2 / 3])
    assert table["n_prompts"].tolist() == [6, 6, 6]
    assert table["alarms"].iloc[0] == 0.5 and table["alarms"].iloc[1:].isna().all()


def test_the_committed_table_is_that_of_the_committed_answers():
    """Bug: new answers were drawn, and the page kept the verdicts of the old ones."""
    kept = root() / "figures/tables"
    found = regimes.go_or_no_go(pd.read_csv(kept / "regimes_draws.csv.gz"))
    pd.testing.assert_frame_equal(found, pd.read_csv(kept / "regimes.csv"), atol=1e-9)


def test_a_breach_is_counted_in_tokens():
    """Guards the first check over budget, and its place among the tokens."""
    text, tiny_policy = "one two three four", tiny.tiny_policy()
    tokens = tiny_policy.encode(text)
    answer = SimpleNamespace(prompt="p", text=text, tokens=tokens)
    many = Cached(of_function(lambda response: response.count(" "), "cost"))
    first = regimes_run.breach(answer, tiny_policy, many, 1)
    before = tiny_policy.decoded(tokens[: first - 1]), tiny_policy.decoded(tokens[:first])
    assert len(before[0]) < len("one two three") <= len(before[1])
    assert regimes_run.breach(answer, tiny_policy, many, 3) is None
    broken = Cached(of_function(lambda response: float("nan"), "cost"))
    assert regimes_run.breach(answer, tiny_policy, broken, 3) is not None


def test_the_command_draws_once_and_writes_the_table(tmp_path, monkeypatch):
    """Guards that a set with its lines is not drawn again, and harmless prompts beside pilots."""
    (tmp_path / "params").mkdir()
    (tmp_path / "asked.txt").write_text("a b\nc d\n")
    given = {"policy": "tiny", "prompts": "asked.txt", "split": "all", "harmless": "asked.txt"}
    rule = {"cost": {"name": "length", "unit": "characters"}, "budget": 3}
    text = json.dumps({"small": given | {"regimes": {"short": rule}}})
    (tmp_path / "params/regimes.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(regimes_run, "root", lambda: tmp_path)
    monkeypatch.setattr(regimes_run, "plain_guard", lambda policy, length: drawn)
    free = of_function(lambda response: 0.0, "cost")
    drawn = Guard(tiny.tiny_policy(), cost=free, budget=1, max_new_tokens=8)
    regimes_run.main()
    (kept,) = (tmp_path / "runs/regimes").glob("small-*.csv")
    lines = pd.read_csv(kept)
    seeds = len(regimes_run.SEEDS)
    assert lines["kind"].value_counts().to_dict() == {"pilot": 2 * seeds, "harmless": 2 * seeds}
    table = pd.read_csv(tmp_path / "runs/regimes/figures/tables/regimes.csv")
    assert table["cost"].tolist() == ["length"] and table["n_prompts"].tolist() == [2]
    monkeypatch.setattr(regimes_run, "plain_guard", None)  # it must not be asked
    regimes_run.main()
    # other settings are other answers: once, a pilot of 40 prompts would have counted as one of 99
    (tmp_path / "params/regimes.yaml").write_text(text.replace('"all"', '"train"'))
    with pytest.raises(TypeError, match="not callable"):
        regimes_run.main()
