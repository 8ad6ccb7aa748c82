"""What pages say came out, bound to the cells that it follows from."""

import re
import tomllib
from pathlib import Path

import pandas as pd

from igcore import SearchConfig
from igcore.models.prompts import load_prompts
from igcore.report.claims import load_claims
from igcore.report.statistics import ALPHA, CONFIDENCE
from igcore.runs.paramfiles import ParamFiles
from igcore.scoring import AT_LEAST

ROOT = Path(__file__).parents[1]
FINALS = ROOT / "params/critic-search/decode-finals-8.yaml"
NUMBERS = {5: "Five", 4: "Four", 3: "Three"}


def page(name: str) -> str:
    """Return a page with its line breaks taken for spaces."""
    return " ".join((ROOT / name).read_text(encoding="utf-8").split())


def cells(name: str) -> pd.DataFrame:
    return pd.read_csv(ROOT / f"figures/tables/{name}.csv")


def test_the_regimes_have_the_prompts_that_they_name():
    """Guards claims about more prompts than a list holds, or others than its runs have."""
    runs = ParamFiles("small").runs()
    for name, regime in load_claims(ROOT / "params/small/claims.yaml").regimes.items():
        of_regime = [run for run in runs.values() if run["run"].startswith(f"regime-{name}")]
        if name.startswith("reward-"):
            of_regime.append(runs[f"decode-{name.removeprefix('reward-')}"])
        assert of_regime
        for run in of_regime:
            assert (run["seed"], run["split"]) == (regime.seed, regime.split)
            assert (run["policy"], run["limit"]) == (regime.policy, regime.n_prompts)
            if run["hardest"] == 0:
                assert len(load_prompts(run["prompts"], run["split"])) >= regime.n_prompts


def test_what_a_critic_gains():
    """Guards the conclusions under the table of critic-search."""
    found = cells("ablation_critic_search").query("arm == 'critic'")
    found = found[found["reference"] == "best-of-n-augmented"].set_index("measure")
    assert (found.loc["safe_finals", "low"] > 0).all() and (found.loc["reward", "high"] < 0).all()
    answered = found.loc["answered_safely"]
    assert (answered["low"] <= 0).all() and (answered["high"] >= 0).all()
    text = page("docs/results.md")
    assert "With the critic, more candidates are safe and rewards are lower." in text
    assert "No difference in the share of prompts with a safe answer is resolved" in text
    arms = cells("claims_arms").query("regime == 'critic'").set_index("arm")
    assert arms.loc["critic, prefix reward where f1 > .9", "reward_difference"] == 0, (
        "of the others"
    )
    assert arms.loc["critic, ranking by f1", "reward_high"] < 0
    assert "the reward of the text so far where f1 > .9, has a higher reward than ranking" in text


def test_the_recommended_arm_is_the_one_that_was_chosen():
    """Guards a recommendation that no table supports."""
    arms = cells("ablation_arms").query("chosen")
    (chosen,) = arms.to_dict("records")
    said = (
        f"use `{chosen['method']}` with `accounting: terminal`, `threshold: {chosen['threshold']}`"
    )
    assert f"{said} and `eta: {chosen['eta']:g}`" in page("docs/guard.md")
    gate = ParamFiles("small").runs()["regime-critic-gate"]
    assert gate["methods"] == [chosen["method"]] and gate["eta"] == chosen["eta"]
    assert gate["threshold"] == float(chosen["threshold"])


def test_the_weights_of_the_claims_are_those_chosen_on_tune():
    """Guards a baseline with another weight than the one that was found hardest to beat."""
    weights, claims = cells("ablation_weights"), load_claims(ROOT / "params/small/claims.yaml")
    chosen = {"safest": ("safety", "safest"), "reward": ("reward-raw", "rewarded")}
    for claim, (regime, column) in chosen.items():
        named = claims.claims[claim]
        arm = claims.regimes[regime].arms[named.reference]
        of_policy = weights[weights["policy"] == claims.regimes[regime].policy]
        of_budget = of_policy[of_policy["budget"] == claims.regimes[regime].budget]
        assert of_budget.loc[of_budget[column], "lagrange_multiplier"].tolist() == [
            arm["lagrange_multiplier"]
        ]


def test_the_steps_of_re_control_are_those_chosen_on_tune():
    """Guards a step that another one beats, or of which no row is committed."""
    steps, runs = cells("ablation_steps"), ParamFiles("small").runs()
    for policy in ("raw", "chat"):
        for run, method in (("re-control", "re-control"), ("tokenwise", "re-control-lagrangian")):
            rows = steps.query(f"policy == 'smollm2-{policy}' and method == '{method}'")
            climbing = rows[rows["gain_low"] > 0]
            best = (climbing if len(climbing) else rows)["gain_difference"].idxmax()
            step = runs[f"decode-{policy}-{run}"]["value_step_size"]
            assert step == rows.loc[best, "value_step_size"], (policy, method)


def test_which_token_wise_methods_climb():
    """Guards the sentence about ARGS and RE-Control."""
    steps = cells("ablation_steps")
    resolved = steps[steps["gain_low"] > 0].groupby("method")["policy"].unique().map(set)
    assert resolved["args"] == resolved["args-lagrangian"] == {"smollm2-raw", "smollm2-chat"}
    assert resolved["re-control"] == {"smollm2-raw"}
    assert not {"args-cost", "re-control-lagrangian"} & {*resolved.index}
    said = (
        "ARGS was resolved to climb with the reward in its sum, and RE-Control for the unaligned "
        "policy; `args-cost`, `re-control-lagrangian` and RE-Control for the aligned policy were "
        "not resolved to climb what they climb"
    )
    assert said in page("docs/results.md")


def test_which_repairs_matter():
    """Guards the sentences about the printed algorithm."""
    table = cells("ablation_literal").query("algorithm == 'repaired'")
    table = table[table["takes_over"].notna()].set_index("takes_over")
    fewer = table["answered_path_safe_high"] < 0
    more_over = table["over_budget_low"] > 0
    assert set(table.index[fewer]) == {"accounting of costs", "where costs are checked"}
    assert set(table.index[more_over]) == {*table.index[fewer], "what a failure gives"}
    assert table.loc["what a failure gives", "answered_path_safe_difference"] == 0
    assert "Three repairs are resolved to matter there" in page("docs/results.md")


def short(number: float) -> str:
    """Return a number as pages write it: ``.05``."""
    return f"{number:g}".removeprefix("0") if 0 < number < 1 else f"{number:g}"


def test_the_settings_that_pages_name():
    """Bug: a budget, a seed or a number of samples in a sentence, from before it was changed."""
    small, claims = ParamFiles("small").runs(), load_claims(ROOT / "params/small/claims.yaml")
    safety, main = small["regime-safety-rounds-4"], small["decode-raw"]
    front, cards, results = page("README.md"), page("docs/cards.md"), page("docs/results.md")
    assert f"often breaks the budget, N = {safety['n_samples']}." in front
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    python = project["requires-python"].removeprefix(">=")
    assert f"(Python {python} or newer" in front
    assert f"break the path at the budget of {short(safety['budget'])}" in results
    assert f"Holm's p of at most {short(ALPHA)}" in results
    assert f"the {CONFIDENCE:.0%} interval".replace("%", " %") in results
    assert f"budget {short(main['budget'])} |" in cards
    assert safety["n_samples"] == 2
    assert f"budget {short(safety['budget'])} and two samples for the claims" in cards
    assert f"the claims run under seed {safety['seed']}" in cards
    (pilot,) = {regime.pilot["seed"] for regime in claims.regimes.values()}
    assert f"power of claims is computed | `train`, under seed {pilot}" in cards
    search = list(ParamFiles("critic-search").points(FINALS))
    assert len(search) == 3 and "with three seeds" in results
    trained = ParamFiles("small").read("params/small/critic-raw.yaml")["critics"]
    (layer,) = {critic["layer"] for critic in trained.values()}
    assert f"layer {layer} and pooled states" in cards
    assert SearchConfig(budget=1.0).failure_rate == 0.5
    assert f"(a half) of at least {AT_LEAST} texts" in page("docs/scorers.md")


def test_the_settings_of_the_papers_runs_that_pages_name():
    """Bug: another cut of a prompt set, or another budget, than the files have."""
    runs = ParamFiles("paper").runs().values()
    cut = {run["limit"] for run in runs if "hh-rlhf" in str(run.get("prompts", ""))}
    text = page("docs/paper.md")
    assert len(cut - {None}) >= 1 and f"HH-RLHF is cut to {max(cut):,} test prompts" in text
    main = [run for run in runs if str(run["run"]).startswith("decode-main")]
    assert {run["budget"] for run in main} == {0.0} and "The budget is 0, where" in text


def test_the_front_page_has_no_other_number():
    """Bug: a number in the prose of the front page that no command wrote and no test knows."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"<!-- (?!end).*?<!-- end -->|```.*?```", "", text, flags=re.DOTALL)
    text = re.sub(r"\]\([^)]*\)|`[^`]*`|^\d\. |\[\d\d_\w+", "", text, flags=re.MULTILINE)
    # Python, N and the licence; the first two are bound above
    assert re.findall(r"\d[\d.,]*\d|\d", text) == ["3.11", "2", "2.0"]
