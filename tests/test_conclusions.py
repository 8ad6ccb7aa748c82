"""What pages say came out, bound to the cells that it follows from."""

from pathlib import Path

import pandas as pd

from igcore.models.prompts import load_prompts
from igcore.report.claims import load_claims
from igcore.runs.paramfiles import ParamFiles

ROOT = Path(__file__).parents[1]


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
