"""What docs/results.md and docs/guard.md conclude, bound to the cells that it follows from: a test
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


def section(heading: str, page: str = "docs/results.md") -> str:
    """Return the text of a section of a page, on one line."""
    text = (ROOT / page).read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2]
    return " ".join(text.partition("\n## ")[0].split())


def signed(value: float, digits: int = 3) -> str:
    """Return a number as pages write it: -.067."""
    return f"{value:.{digits}f}".replace("0.", ".", 1)


def interval(low: float, high: float, digits: int = 3) -> str:
    return f"[{signed(low, digits)}, {signed(high, digits)}]"


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


def test_the_counts_and_intervals_of_each_claim():
    """Guards the list of verdicts in docs/results.md, which stands in words."""
    said, arms = section("Claims"), cells("claims_arms").set_index(["regime", "arm"])
    for row in cells("claims").to_dict("records"):
        if row["claim"] != "front":
            sign = "+" if row["difference"] > 0 else ""
            ends = interval(row["low"], row["high"])
            assert f"{sign}{signed(row['difference'])} {ends}" in said, row
        assert f"*{row['claim']}* {row['verdict'].replace('not', 'is not')}" in said
    assert "for 7 in the plain answer alone, and for 3 in the guarded answer alone" in said
    judged = cells("claims").set_index("claim").loc["judge"]
    assert (judged["n_prompts"], judged["n_lower"], judged["n_higher"]) == (56, 7, 3)
    counted = [
        ("harm", "InferenceGuard, M 4", "safety_rate", 56, 4, "56 of 60"),
        ("harm", "beam search, λ 5", "safety_rate", 60, 0, "60 of 60"),
        ("rude", "InferenceGuard, M 4", "answered_path_safe", 98, 0, "98 of 98"),
        ("rude", "beam search, λ 5", "answered_path_safe", 95, 0, "λ = 5 for 95"),
        ("rude", "rejection sampling", "answered_path_safe", 97, 1, "sampling for 97"),
        ("harm", "InferenceGuard, M 4", "answered_path_safe", 56, 4, "for 56 of 60"),
        ("harm", "beam search, λ .5", "answered_path_safe", 53, 0, "for 53, 57, 59 and 59"),
        ("harm", "beam search, λ 2", "answered_path_safe", 57, 0, "for 53, 57, 59 and 59"),
        ("harm", "beam search, λ 5", "answered_path_safe", 59, 0, "for 53, 57, 59 and 59"),
        ("harm", "beam search, λ 40", "answered_path_safe", 59, 0, "for 53, 57, 59 and 59"),
        ("critic", "E_critic as printed", "safety_rate", 55, 5, "55 of 60"),
        ("critic", "Best-of-N", "safety_rate", 60, 0, "60 of 60"),
    ]
    for regime, arm, column, count, abstained, words in counted:
        row = arms.loc[(regime, arm)]
        assert round(row[column] * row["n_prompts"]) == count and row["abstained"] == abstained
        assert words in said
    front = cells("claims").query("claim == 'front' and outcome == 'reward'")
    front = front.set_index("reference")
    for arm in ("beam search, λ .5", "beam search, λ 5"):
        ends = interval(front.loc[arm, "low"], front.loc[arm, "high"])
        assert f"{signed(front.loc[arm, 'difference'])} {ends}" in said


def test_what_the_budgets_of_the_claims_mean():
    """Guards the counts of harmless answers over budget in docs/results.md."""
    found, said = cells("claims_budgets").set_index("regime"), section("Claims")
    counts = (found[["at_end", "at_a_word"]].mul(found["n"], axis=0)).round().astype(int)
    assert counts.loc["harm"].tolist() == [4, 5] and counts.loc["rude"].tolist() == [3, 12]
    assert "4 are over it at the end and 5 at some word" in said
    assert "3 of 159 are over it at the end, 12 at some word" in said
    assert found["empty"].round(3).unique().tolist() == [0.024, 0.036] and "costs .024" in said


def test_what_each_judge_counts():
    """Guards the counts of harm, and of harmless twins, that stand in words in docs/results.md."""
    said, found = section("Harm"), cells("harm").set_index(["judge", "arm"])

    def harm(judge: str, *arms: str) -> list[int]:
        names = ["base", "InferenceGuard, M 4", "beam search, λ 5", *arms]
        return found.loc[[(judge, name) for name in names], "harm"].astype(int).tolist()

    outside = "llama-labels:qwen2.5-coder-1.5b"
    assert harm(outside, "InferenceGuard, M 1", "InferenceGuard, M 2") == [19, 13, 12, 11, 12]
    for arm, count in (("InferenceGuard, M 4", 13), ("base", 19), ("beam search, λ 5", 12)):
        row = found.loc[(outside, arm)]
        ends = interval(row["harm_low"], row["harm_high"], 2)
        assert f"{count} of 60" in said and ends in said
    assert "11 and 12 of 60, with 10 and 5 abstentions" in said
    assert harm("jigsaw-toxicity", "rejection sampling") == [13, 7, 5, 9]
    assert "13 of 60 plain answers, 7 of the guard, 5 of beam search with λ = 5 and 9 of" in said
    own = harm("probe:harm-other-half", "rejection sampling", "InferenceGuard as printed")
    assert own == [15, 7, 1, 5, 2] and "15 of 60 plain answers, 7 of the guard, 1 of beam" in said
    abstained = [found.loc[(outside, f"InferenceGuard, M {m}"), "abstained"] for m in (4, 1, 2)]
    assert abstained == [4, 10, 5]
    shown = ["answered", "refused", "abstained"]
    twins = cells("harm_twins").set_index("arm")[shown].astype(int).T.to_dict("list")
    assert twins["base"] == [59, 1, 0] and twins["InferenceGuard, M 4"] == [57, 1, 2]
    assert "answers 59 and refuses 1. Under the guard 57 are answered and 1 is refused" in said
    assert twins["rejection sampling"] == [60, 0, 0]
    larger = cells("harm_twins_qwen").set_index("arm")[shown].astype(int).T.to_dict("list")
    assert larger["base"] == [54, 6, 0] and larger["rejection sampling"] == [53, 7, 0]
    assert larger["InferenceGuard, M 4"] == [50, 6, 4]
    assert larger["InferenceGuard, M 1"] == [40, 5, 15]
    asked = cells("harm_qwen").query("judge == @outside").set_index("arm")["harm"]
    names = ["base", "InferenceGuard, M 4", "beam search, λ 5"]
    assert asked[names].astype(int).tolist() == [9, 6, 8]
    assert "9 of 60 plain answers, in 6 of the guard, which abstains from 9, and in 8" in said


def test_how_much_stepping_back_gains():
    """Guards the small table of differences in docs/results.md."""
    said = section("What an answer within budget costs")
    pooled = cells("ablation_law_pooled").set_index(["regime", "arm", "measure"])
    for regime in ("numbers", "sentences", "rude", "harm", "qwen"):
        row = pooled.loc[(regime, "backtracking", "within_1_5")]
        sign = "+" if row["difference"] > 0 else ""
        gain = f"{sign}{signed(row['difference'] + 1e-9, 2)}"
        ends = interval(row["low"] + 1e-9, row["high"] + 1e-9, 2)
        assert f"| {signed(row['S'] + 1e-9, 2)} | {gain} {ends} |" in said, regime


def test_how_much_a_critic_gains():
    """Guards the intervals of critic-search that stand in words in docs/results.md."""
    said = section("A critic when only complete answers have a cost")
    found = cells("ablation_critic_search").set_index(["arm", "reference", "measure"])
    for place in (
        ("critic", "best-of-n-augmented", "safe_finals"),
        ("critic", "best-of-n-augmented", "answered_safely"),
        ("critic", "best-of-n-augmented", "reward"),
        ("critic", "shuffled", "safe_finals"),
        ("inferenceguard", "best-of-n-augmented", "answered_safely"),
        ("inferenceguard", "best-of-n-augmented", "reward"),
    ):
        for _, row in found.loc[[place]].iterrows():
            low, high = row["low"], row["high"]
            if high < 0:  # in words: lower by so much
                low, high = -high, -low
            assert interval(low, high, 2) in said, (place, low, high)
            assert signed(abs(row["difference"]), 2) in said


def test_how_far_the_orders_agree():
    """Guards the correlations that stand in words in docs/results.md."""
    found, said = cells("paper_orderings"), section("Do the methods have the paper's order?")
    by = {name: rows["spearman"] for name, rows in found.groupby("measure")}
    above = by["reward"][by["reward"] > 0]
    assert f"{signed(by['safety'].min(), 2)} to {signed(by['safety'].max(), 2)}" in said
    assert len(above) == 5 and f"{signed(above.min(), 2)} to {signed(above.max(), 2)}" in said
    last = found.loc[by["reward"].idxmin()]
    ends = interval(last["low"], last["high"], 2)
    assert f"{signed(last['spearman'], 2)} {ends}" in said


def test_the_larger_policy_in_words():
    """Guards the counts of qwen-0.5b under the arms in docs/results.md."""
    said = section("Claims")
    arms = cells("claims_arms_qwen").query("regime == 'harm'").set_index("arm")
    counts = (arms["answered_path_safe"] * arms["n_prompts"]).round().astype(int)
    names = ["InferenceGuard, M 4", "rejection sampling", "beam search, λ 5"]
    assert counts[names].tolist() == [51, 60, 52] and arms.loc[names[0], "abstained"] == 9
    assert "for 51 of 60 harmful requests and abstained from 9" in said and "λ = 5 for 52" in said
