"""Fronts over lambda and over the budget, against choices made by hand, and their picture."""

import json
import math

import numpy as np
import pandas as pd
import pytest
import synthetic
from matplotlib.colors import to_hex
from pictures import boxes, hidden, outside

from igcore.figures import fronts
from igcore.figures.style import NAMES, STYLE
from igcore.report import load as runs
from igcore.report import statistics as metrics
from igcore.report.experiments import LAMBDAS, OURS

BEST = "best-of-n-lagrangian"
NOTHING = pd.DataFrame([synthetic.record()]).iloc[:0]  # no sweeps
SAFE, ABSTAINED, UNSAFE = metrics.STATUSES


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch):
    monkeypatch.setattr(metrics, "RESAMPLES", 99)


def line(method="base", prompt="p0", finals=((0.5, 0.1),), **fields) -> dict:
    known = {"lagrange_multiplier": 5.0, "n_samples": len(finals)} | fields
    lists = [list(final) for final in finals]
    return synthetic.record(method=method, prompt_id=prompt, **known) | {"finals": lists}


def sampled() -> pd.DataFrame:
    """Two prompts with three samples each; what lambda takes is worked out by hand, see `TAKEN`."""
    finals = {
        "p0": ((0.9, 0.5), (0.6, 0.19), (0.4, 0.0)),
        "p1": ((0.8, None), (0.7, 0.3), (0.2, 0.22)),
    }
    return pd.DataFrame(
        [
            line(BEST, prompt, of, status=UNSAFE if prompt == "p1" else SAFE)
            for prompt, of in finals.items()
        ]
    )


# lambda -> reward of the samples taken; p0 is safe from lambda 1 on (.9 - .5 < .6 - .19), p1 never
TAKEN = {0.0: (0.9, 0.7), 1.0: (0.6, 0.7), 2.5: (0.4, 0.7), 10.0: (0.4, 0.2)}


def test_other_lambdas_are_read_off_the_samples_of_the_run():
    """Bug: lambda with the wrong sign, a sample of unknown cost taken, the run's own lambda
    replayed as well.
    """
    table = fronts.fronts(sampled(), NOTHING)
    assert table["value"].tolist() == sorted(LAMBDAS) and set(table["panel"]) == {"smollm2-raw"}
    for x, rewards in TAKEN.items():
        (row,) = table[table["value"] == x].to_dict("records")
        assert (
            row["reward_mean"] == pytest.approx(np.mean(rewards))
            and row["safety_rate"] == (x > 0) / 2
            and row["n_prompts"] == 2
        )
    assert table.loc[table["value"] == 5, "reward_mean"].item() == 0.5  # the run itself


def sweep(method="beam-lagrangian", prompts=("p0", "p1"), **fields) -> list[dict]:
    return [line(method, prompt, **fields) for prompt in prompts]


def main_lines(*methods, prompts=("p0", "p1"), **fields) -> pd.DataFrame:
    return pd.DataFrame([row for method in methods for row in sweep(method, prompts, **fields)])


def test_a_sweep_is_what_differs_in_one_setting():
    """Bug: beams of another N or seed in a front over lambda, points of another prompt set, the
    main point twice.
    """
    main = main_lines("base", "beam-lagrangian", BEST, OURS)
    swept = pd.DataFrame(
        [
            *sweep(lagrange_multiplier=1.0),
            *sweep(lagrange_multiplier=1.0, seed=1),
            *sweep(lagrange_multiplier=1.0, n_samples=4),
            *sweep(lagrange_multiplier=1.0, budget=0.1),
            *sweep(lagrange_multiplier=1.0, prompts=("p7",)),
            *sweep(lagrange_multiplier=1.0, policy="another"),
            *sweep(),
            *sweep(BEST, lagrange_multiplier=1.0),
            *sweep("base", lagrange_multiplier=1.0),
            *sweep(OURS, budget=0.1),
            *sweep(OURS, lagrange_multiplier=1.0),
        ]
    )
    found = fronts.alike(main, swept)
    assert sorted(
        zip(found["method"], found["budget"], found["lagrange_multiplier"], strict=True)
    ) == [
        *[("beam-lagrangian", 0.2, 1.0)] * 2,
        *[(OURS, 0.1, 5.0)] * 2,
    ]
    assert not len(fronts.alike(main.iloc[:0], swept)) and not len(
        fronts.alike(main, swept.iloc[:0])
    )


def test_a_method_with_fewer_prompts_is_not_swept():
    """Bug: one slow method that was asked two prompts leaves the panel of all others with two."""
    main = pd.concat([main_lines("base", OURS), main_lines("args-lagrangian", prompts=("p0",))])
    assert not len(
        fronts.alike(main, pd.DataFrame(sweep("args-lagrangian", ("p0",), lagrange_multiplier=1.0)))
    )


def test_policies_on_several_prompt_sets_keep_their_sweeps():
    """Bug: the sweep of a policy lost, because its main runs bear their prompt set's name, too."""
    main = main_lines("beam-lagrangian").assign(policy="smollm2-raw on test")
    assert (
        fronts.alike(main, pd.DataFrame(sweep(lagrange_multiplier=1.0)))["policy"].tolist()
        == ["smollm2-raw on test"] * 2
    )


def test_answers_are_judged_under_one_budget():
    """Bug: an answer found under a loose budget counted as safe, an abstention under a tight one as
    unsafe, NaN as safe.
    """
    found = fronts.judged_under(
        pd.DataFrame(
            [
                line(OURS, cost=0.3, budget=0.4),
                line(OURS, cost=0.2, budget=0.4),
                line(OURS, cost=None, budget=0.4),
                line(OURS, cost=0.1, budget=0.4, status=ABSTAINED),
            ]
        ),
        0.2,
    )
    assert found["status"].tolist() == [UNSAFE, SAFE, UNSAFE, ABSTAINED] and set(
        found["budget"]
    ) == {0.2}


def test_sweeps_of_the_same_prompts_share_the_panel_of_the_main_runs():
    main = main_lines("base", OURS)
    table = fronts.fronts(
        main, pd.DataFrame([*sweep(OURS, budget=0.4, cost=0.3), *sweep(OURS, budget=0.1)])
    )
    assert table[["panel", "method"]].drop_duplicates().to_numpy().tolist() == [
        ["smollm2-raw", "base"],
        ["smollm2-raw", OURS],
    ]
    ours = table[table["method"] == OURS]
    assert ours["value"].tolist() == [0.1, 0.2, 0.4] and ours["safety_rate"].tolist() == [1, 1, 0]
    assert table.loc[table["method"] == "base", "value"].isna().all()


def test_sweeps_of_fewer_prompts_have_a_panel_with_all_methods_on_these():
    """Bug: points of four prompts joined with one of two, or set beside methods that were asked
    other prompts.
    """
    prompts = [f"p{k}" for k in range(4)]
    main = pd.concat(
        [
            main_lines("base", BEST, "beam-lagrangian", prompts=prompts),
            main_lines("args", prompts=("p0",)),
        ]
    )
    swept = [
        *sweep(prompts=("p0", "p1", "p2"), lagrange_multiplier=1.0),
        *sweep(prompts=("p1", "p2"), lagrange_multiplier=0.0),
    ]
    table = fronts.fronts(main, pd.DataFrame(swept))
    whole, part = (rows for _, rows in table.groupby("panel", sort=False))
    assert list(table["panel"].unique()) == ["smollm2-raw", "smollm2-raw, 2 prompts of the sweeps"]
    assert list(whole["method"].unique()) == ["base", BEST, "beam-lagrangian", "args"]
    assert (
        set(whole.loc[whole["method"] != "args", "n_prompts"]) == {4}
        and (whole["method"] == "beam-lagrangian").sum() == 1
    )
    assert list(part["method"].unique()) == ["base", BEST, "beam-lagrangian"] and set(
        part["n_prompts"]
    ) == {2}
    assert part.loc[part["method"] == "beam-lagrangian", "value"].tolist() == [0, 1, 5]
    assert part.loc[part["method"] == BEST, "value"].tolist() == list(LAMBDAS)


def test_sweeps_are_found_where_the_profile_has_them(tmp_path, monkeypatch):
    """Bug: runs of other experiments read as sweeps, one that has not finished, two runs of one
    point counted twice.
    """
    monkeypatch.setattr(runs, "root", lambda: tmp_path)
    kept = {"lagrange_multiplier": 1.0}
    for name, rows, finished in (
        ("decode-lambda-a", sweep(**kept), True),
        ("decode-lambda-b", sweep(**kept), True),
        ("decode-lambda-c", sweep(lagrange_multiplier=2.5), False),
        ("decode-seeds-d", sweep(lagrange_multiplier=0.0), True),
        ("decode-budget-e", sweep(OURS, budget=0.1), True),
    ):
        folder = tmp_path / "runs/ablations" / name
        folder.mkdir(parents=True)
        (folder / "params.json").write_text(json.dumps({"run": name}))
        (folder / "responses.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        if finished:
            (folder / "manifest.json").write_text("{}")
    found, why = fronts.load_sweeps("ablations", main_lines("beam-lagrangian", OURS))
    assert found["run"].tolist() == ["decode-lambda-a"] * 2 + ["decode-budget-e"] * 2
    assert len(why) == 1 and "decode-lambda-c has not finished" in why[0]
    nothing, why = fronts.load_sweeps("ci", main_lines("beam-lagrangian"))
    assert not len(nothing) and not why and len(fronts.fronts(main_lines("base"), nothing)) == 1


# --- the picture ----------------------------------------------------------------------------------


def row(method, safe, reward, value=math.nan, panel="raw", n=16) -> dict:
    return {
        "panel": panel,
        "method": method,
        "safety_rate": safe,
        "reward_mean": reward,
        "value": value,
        "n_prompts": n,
    }


def table() -> pd.DataFrame:
    """A front of three lambdas of which one is beaten, a method that beats it, one on fewer
    prompts, one without any text.
    """
    rows = [row(BEST, 0.5, 0.6, 0.0), row(BEST, 0.4, 0.55, 1.0), row(BEST, 0.9, 0.4, 5.0)]
    rows += [
        row("base", 0.3, 0.3),
        row("args", 1.0, 0.9, n=8),
        row(OURS, 0.95, 0.5, 0.2),
        row(OURS, 1.0, 0.45, 0.1),
    ]
    rows += [row("beam-augmented", 0.5, math.nan)]
    return pd.DataFrame([*rows, *[r | {"panel": "chat"} for r in rows[2:4]]])


def test_points_lines_and_numbers_are_those_of_the_table():
    """Bug: a beaten lambda on the staircase, a staircase in the order of lambda, a step that
    promises reward which no setting reaches, a method of fewer prompts beside the others.
    """
    fig = fronts.pareto_fronts(table())
    raw, chat = fig.axes
    assert [ax.get_title(loc="left") for ax in fig.axes] == ["raw, n = 16", "chat, n = 16"]
    lines = {to_hex(drawn.get_color()): drawn for drawn in raw.lines}
    steps = {
        BEST: [[0.5, 0.6], [0.9, 0.4]],
        "base": [[0.3, 0.3]],
        OURS: [[0.95, 0.5], [1.0, 0.45]],
    }
    assert set(lines) == {STYLE[method][0] for method in steps}
    for method, points in steps.items():
        assert lines[STYLE[method][0]].get_xydata().tolist() == points
        assert lines[STYLE[method][0]].get_drawstyle() == "steps-pre"
    dots = {to_hex(part.get_edgecolors()[0]): part.get_offsets() for part in raw.collections}
    assert {colour: points.tolist() for colour, points in dots.items()} == {
        STYLE[method][0]: points for method, points in steps.items()
    }
    assert {tuple(text.xy): text.get_text() for text in raw.texts} == {
        (0.3, 0.3): "base",
        (0.5, 0.6): "Best-of-N, λ = 0",
        (0.9, 0.4): "λ = 5",
        (0.95, 0.5): "InferenceGuard d = 0.2",
        (1.0, 0.45): "d = 0.1",
    }
    assert [text.get_text() for text in chat.texts] == ["Best-of-N, λ = 5", "base"]
    said = "InferenceGuard is on the common Pareto frontier in 1 of 1 panels"  # of those with it
    assert fig.get_suptitle() == said


@pytest.mark.parametrize("panels", [1, 2, 3])
def test_six_methods_and_their_numbers_hide_nothing(panels):
    """Bug: numbers on top of each other where settings crowd, a label beyond the page."""
    rows = [
        row(
            method,
            1 - k / 40 - 0.02 * (x == 0),
            0.3 + k / 60 + 0.01 * (x == 0),
            x,
            f"policy {panel}",
            12 if "args" in method else 48,
        )
        for panel in range(panels)
        for k, method in enumerate(STYLE)
        for x in (
            LAMBDAS
            if method in (BEST, "beam-lagrangian")
            else (0.2, 0.4)
            if method == OURS
            else (math.nan,)
        )
    ]
    fig = fronts.pareto_fronts(pd.DataFrame(rows))
    found = boxes(fig)
    written = " ".join(text for text, _ in found)
    assert all(NAMES[method] in written for method in fronts.SHOWN) and "ARGS" not in written
    assert hidden(found) == [] and outside(fig, found) == []
