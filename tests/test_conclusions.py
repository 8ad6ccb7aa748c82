"""What pages of docs conclude, bound to the cells that it follows from: a test
that fails after new tables names a sentence to correct.
"""

import re
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from igstudy.prompts import load_prompts
from igstudy.report.claims import load_claims
from igstudy.runs.paramfiles import ParamFiles, defaults_of

ROOT = Path(__file__).parents[1]


def cells(name: str) -> pd.DataFrame:
    return pd.read_csv(ROOT / f"figures/tables/{name}.csv")


@pytest.mark.parametrize("profile", ["ci", "small", "qwen"])
def test_the_regimes_have_the_prompts_that_they_name(profile):
    """Bug: `make quick` decoded six prompts and its claims asked for twelve. Guards claims about
    more prompts than a set holds, or others than its runs have.
    """
    runs = {run: defaults_of("decode") | given for run, given in ParamFiles(profile).runs().items()}
    for name, regime in load_claims(ROOT / f"params/{profile}/claims.yaml").regimes.items():
        begins = f"regime-{name}"
        of_regime = [run for run in runs.values() if run["run"].startswith(begins)]
        if profile == "ci":  # its other runs are of methods that no claim names
            of_regime = [runs["decode-raw"]]
        assert of_regime
        for run in of_regime:
            asked = (run["prompts"], run["seed"], run["split"])
            assert asked == (regime.prompts, regime.seed, regime.split)
            assert (run["policy"], run["limit"]) == (regime.policy, regime.n_prompts)
            assert len(load_prompts(run["prompts"], run["split"])) >= regime.n_prompts


def test_the_runs_behind_each_claim():
    """Guards the table from claims to runs in docs/results.md, which no command writes."""
    page = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    section = page.partition("### From a claim to its raw record")[2].partition("\n#")[0]
    rows = [line.split("|")[1:4] for line in section.splitlines() if "`regime-" in line]
    runs = ParamFiles("small").runs()
    file = load_claims(ROOT / "params/small/claims.yaml")
    named = {name.strip(): set(re.findall("`(regime-.+?)`", "".join(row))) for name, *row in rows}
    assert named == {
        name: replace(file, claims={name: claim}).compared(runs)
        for name, claim in file.claims.items()
    }


def test_what_stepping_back_gains():
    """Guards the goals that were written down before the runs, and the sentences under the table:
    read where the cost is local and S between .1 and .4.
    """
    pooled = cells("ablation_law_pooled").set_index(["regime", "arm", "measure"])
    arms = cells("ablation_law").set_index(["regime", "arm"])
    local = pooled.loc[["numbers", "sentences"]]
    assert local["S"].between(0.1, 0.4 + 1e-9).all() and pooled.loc["rude", "S"].min() > 0.4
    gained = local.xs(("backtracking", "within_1_5"), level=("arm", "measure"))["difference"]
    assert gained.round(2).tolist() == [0.30, 0.21]
    for regime in ("numbers", "sentences"):
        assert arms.loc[(regime, "backtracking"), "within_3"].mean() >= 0.95 - 1e-9
    within_2 = pooled.xs(("backtracking", "within_2"), level=("arm", "measure"))
    assert (within_2["difference"] > -0.05).all() and len(within_2) == 5
    rewards = local.xs(("backtracking-choices", "reward"), level=("arm", "measure"))
    assert rewards["difference"].round(2).tolist() == [0.11, 0.15] and (rewards["low"] > 0.05).all()
    qwen = pooled.loc[("qwen", "backtracking")].drop("reward")
    assert ((qwen["low"] <= 0) & (qwen["high"] >= 0)).all()
    alone = cells("ablation_law").query("arm == 'guard-n1-m16'")["answered"]
    assert alone.min() == 0.60 and alone.max().round(2) == 0.98
    assert (pooled.loc["harm", "high"]["backtracking-choices", "within_3"]) > 0


def test_what_a_critic_gains():
    """Guards the conclusions under the table of critic-search."""
    found = cells("ablation_critic_search").query("arm == 'critic'")
    found = found[found["reference"] == "best-of-n-augmented"].set_index("measure")
    assert (found.loc["safe_finals", "low"] > 0).all() and (found.loc["reward", "high"] < 0).all()
    answered = found.loc["answered_safely"]
    assert (answered["low"] <= 0).all() and (answered["high"] >= 0).all()


def test_the_critic_is_compared_on_all_prompts_that_both_arms_have():
    """Bug: the gain over Best-of-N was of the 40 hardest prompts, where both arms had 100."""
    found = cells("ablation_critic_search").set_index(["arm", "reference"])
    assert (found.loc[("critic", "best-of-n-augmented"), "n_prompts"] == 100).all()
    assert (found.loc[("critic", "shuffled"), "n_prompts"] == 40).all()


def test_the_order_of_methods_is_the_papers_in_part():
    """Guards the sentences under the table of orders, and the one exception that they name."""
    found = cells("paper_orderings")
    policy, prompts, measure = (
        found[name] for name in ("paper_policy", "paper_prompts", "measure")
    )
    reversed_ = (policy == "llama-3.1-8b") & (prompts == "pku-saferlhf") & (measure == "reward")
    assert (found.loc[reversed_, "high"] < 0).tolist() == [True]
    assert (found.loc[~reversed_, "low"] > 0).all() and (found["spearman"] < 1).all()


def test_which_repairs_matter():
    """Guards the sentences about the printed algorithm: three repairs matter."""
    table = cells("ablation_literal").query("algorithm == 'repaired'")
    table = table[table["takes_over"].notna()].set_index("takes_over")
    fewer = table["answered_path_safe_high"] < 0
    more_over = table["over_budget_low"] > 0
    assert set(table.index[fewer]) == {"accounting of costs", "where costs are checked"}
    assert set(table.index[more_over]) == {*table.index[fewer], "what a failure gives"}
    assert table.loc["what a failure gives", "answered_path_safe_difference"] == 0


def test_what_the_front_page_says_in_words():
    """Guards the paragraph under the claims of README, which no command writes."""
    verdicts = cells("claims").drop_duplicates("claim").set_index("claim")["verdict"]
    assert "held" not in set(verdicts) and verdicts["critic"] == "failed"
    assert verdicts["judge"] == "not resolved"
    judged = cells("claims").set_index("claim").loc["judge"]
    assert judged["difference"] < 0 < judged["high"]
    arms = cells("claims_arms").set_index(["regime", "arm"])
    guard = arms.loc[("harm", "InferenceGuard, M 4")]
    assert guard["answered"] / guard["n_prompts"] == guard["answered_path_safe"]
    assert guard["abstained"] > 0
    for rival in ("beam search, λ 5", "rejection sampling"):
        other = arms.loc[("harm", rival)]
        assert other["answered_path_safe"] > guard["answered_path_safe"]
        assert 1.3 < other["policy_tokens"] / guard["policy_tokens"] < 1.4
    critic, best = (arms.loc[("critic", arm)] for arm in ("E_critic as printed", "Best-of-N"))
    assert critic["safety_rate"] < best["safety_rate"]
    # no guard could be better than these by the ten points that the claims ask for
    assert arms.loc[("harm", "beam search, λ 5"), "safety_rate"] > 0.9
    assert arms.loc[("rude", "rejection sampling"), "answered_path_safe"] > 0.9
    assert best["safety_rate"] > 0.9


@pytest.mark.parametrize("name", ["claims_arms", "claims_arms_qwen"])
def test_answers_that_no_judge_has_read_have_no_count(name):
    """Bug: 0 of them were harmful."""
    arms = cells(name)
    assert arms["judged_harmful"].isna().tolist() == (arms["judged"] == 0).tolist()


def test_what_the_larger_policy_shows():
    """Guards the sentences on the larger policy in docs/results.md."""
    arms = cells("claims_arms_qwen").set_index(["arm", "regime"])
    assert (arms.loc["rejection sampling", "answered_path_safe"] == 1).all()
    assert (arms.loc["InferenceGuard, M 4", "abstained"] > 0).all()
    asked = cells("harm_qwen").query("judge.str.startswith('llama-labels')").set_index("arm")
    read = asked.loc[["base", "beam search, λ 5", "InferenceGuard, M 4"]]
    assert read["harm_low"].max() < read["harm_high"].min()


def test_rivals_have_as_many_tokens_as_the_guard():
    """Guards the sentence on tokens under the claims: a rival with fewer is no fair one."""
    rows = cells("claims").set_index("claim")
    gap = rows["reference_tokens"] - rows["tokens"]
    assert (gap[["safety", "path", "front"]] > 0).all() and abs(gap["critic"]) < 1
    assert gap["judge"] < 0


def numbers_of(row: pd.Series) -> list[float]:
    """Return the cells that a row of said.csv names, those of one row of the table first."""
    table = cells(row["table"]).query(row["where"])
    columns = [table.eval(value).astype(float) for value in row["values"].split(",")]
    return [float(number) for i in range(len(table)) for number in (c.iloc[i] for c in columns)]


def test_the_numbers_that_stand_in_sentences():
    """Guards each number that a page says in words: tests/data/said.csv has the words and the cells
    to which their last numbers are rounded.
    """
    for row in pd.read_csv(ROOT / "tests/data/said.csv", sep=";").to_dict("records"):
        page = (ROOT / f"docs/{row['page']}.md").read_text(encoding="utf-8")
        section = page.partition(f"\n## {row['section']}\n")[2].partition("\n## ")[0]
        assert row["said"] in " ".join(section.split()), row
        wanted, said = numbers_of(row), re.findall(r"[+-]?\d*\.?\d+", row["said"])
        for number, shown in zip(wanted, said[-len(wanted) :], strict=True):
            digits = len(shown.partition(".")[2])
            assert abs(number - float(shown)) <= 0.5 * 10**-digits + 1e-9, row
