"""How often nothing safe is found among n samples, against all subsets, and its picture."""

import itertools
import math

import numpy as np
import pandas as pd
import pytest
import synthetic
from notebook_code import notebook_code
from pictures import boxes, hidden, outside

from igcore.errors import ParameterError, RunError

ab = notebook_code("50_figures")
BEST, OURS = "best-of-n-lagrangian", "inferenceguard"
COLUMNS = ["policy", "curve", "samples", "n_prompts", "share", "low", "high"]


def line(prompt, costs, **fields) -> dict:
    return synthetic.record(method=BEST, prompt_id=prompt, n_samples=len(costs), **fields) | {
        "finals": [[0.5, c] for c in costs]
    }


def guard(prompt, status="verified_safe", **fields) -> dict:
    return synthetic.record(
        method=OURS, prompt_id=prompt, status=status, n_samples=4, rounds=2, **fields
    )


def records() -> pd.DataFrame:
    """First halves: no safe sample, one of two, two of two; second halves: one, none, one of two
    safe.
    """
    costs = {"p0": (0.9, 0.3, 0.2, 0.9), "p1": (0.1, 0.5, 0.21, None), "p2": (0.0, 0.2, 0.1, 0.9)}
    return pd.DataFrame(
        [
            *(line(p, c) for p, c in costs.items()),
            guard("p0", "abstained"),
            guard("p1"),
            guard("p2"),
        ]
    )


def curve(table, name) -> dict[int, float]:
    rows = table[table["curve"] == name]
    return dict(zip(rows["samples"], rows["share"], strict=True))


def test_the_bound_knows_no_sample_that_is_counted():
    """Bug: p from the samples that test it, where the bound holds whatever they are; a cost that is
    unknown taken for safe.
    """
    table = ab.abstention_table(records())
    assert list(table.columns) == COLUMNS and set(table["n_prompts"]) == {3}
    assert curve(table, "observed") == pytest.approx({1: (0.5 + 1 + 0.5) / 3, 2: 1 / 3})
    assert curve(table, "estimate") == pytest.approx(
        {n: (1 + 0.5**n + 0) / 3 for n in range(1, 9)}
    )  # to N M of the guard
    assert curve(table, OURS) == pytest.approx({8: 1 / 3})
    observed = table[table["curve"] == "observed"]
    assert ((observed["low"] < observed["share"]) & (observed["share"] < observed["high"])).all()


def test_shares_of_subsets_are_those_of_all_subsets():
    """Bug: (unsafe / N)^n, which draws with replacement and is biased."""
    unsafe = np.array([[k >> i & 1 for i in range(4)] for k in range(16)], dtype=bool)
    for n in (1, 2, 3, 4):
        slow = [
            np.mean([all(some) for some in itertools.combinations(samples, n)])
            for samples in unsafe.tolist()
        ]
        assert ab.nothing_safe(unsafe, n) == pytest.approx(slow)


@pytest.mark.parametrize("p", [0.2, 0.7])
def test_on_average_the_dots_lie_above_the_squares(p):
    """Guards the direction: over many prompts with one p the share is (1 - p)^n, and the bound of
    an estimated p above it.
    """
    rng = np.random.default_rng(0)
    costs = np.where(rng.random((4000, 8)) < p, 0.1, 0.9)  # standard error below .008
    table = ab.abstention_table(
        pd.DataFrame([line(f"p{k}", row) for k, row in enumerate(costs.tolist())])
    )
    observed, bound = curve(table, "observed"), curve(table, "estimate")
    assert list(observed) == [1, 2, 3, 4] and list(bound) == list(range(1, 9))
    assert all(
        abs(observed[n] - (1 - p) ** n) < 0.03 and bound[n] > (1 - p) ** n - 0.03 for n in observed
    )
    assert bound[4] > observed[4]


@pytest.mark.parametrize(("strict", "share"), [(False, 0.0), (True, 1.0)])
def test_the_edge_of_the_budget_is_that_of_the_run(strict, share):
    table = ab.abstention_table(pd.DataFrame([line("p0", (0.2, 0.2)) | {"strict": strict}]))
    assert curve(table, "observed") == {1: share}


def test_samples_are_those_of_one_setting():
    """Bug: samples under two budgets, whose safety means two things, in one share."""
    with pytest.raises(ParameterError, match="budget"):
        ab.abstention_table(
            pd.DataFrame([line("p0", (0.1, 0.1)), line("p1", (0.1, 0.1), budget=0.5)])
        )


def test_nothing_to_count_is_said():
    """Bug: a crash for runs without Best-of-N, or with a single sample, or without the guard."""
    for lines in ([guard("p0")], [line("p0", (0.1,))]):
        table = ab.abstention_table(pd.DataFrame(lines))
        assert list(table.columns) == COLUMNS and not len(table)
        with pytest.raises(
            RunError,
            match="no samples of best-of-n-lagrangian to count; decode it with notebook 30_decode",
        ):
            ab.abstention(table)
    assert set(ab.abstention_table(pd.DataFrame([line("p0", (0.1, 0.1))]))["curve"]) == {
        "observed",
        "estimate",
    }
    assert not len(ab.abstention_table(records().iloc[:0]))


@pytest.mark.parametrize("policies", [1, 2, 3])
def test_the_picture_draws_the_table(policies):
    """Bug: a curve of another policy, ticks that nobody drew, labels on top of each other."""
    lines = pd.concat([records().assign(policy=f"policy {k}") for k in range(policies)])
    lines.loc[(lines["policy"] == "policy 0") & (lines["method"] == OURS), "status"] = (
        "verified_safe"
    )
    table = ab.abstention_table(lines)
    fig = ab.abstention(table)
    n = table["n_prompts"].max()
    titles = [f"policy {k}, n = {n}" for k in range(policies)]
    assert [ax.get_title(loc="left") for ax in fig.axes] == titles
    seen = table[table["curve"] == "observed"].groupby("samples")["share"].mean()
    assert fig.get_suptitle() == (
        f"One answer is unsafe on {seen[1]:.0%} of prompts, all of 2 answers on {seen[2]:.0%}"
    )
    for ax, (_, rows) in zip(fig.axes, table.groupby("policy", sort=False), strict=True):
        observed, guarded = (
            container.lines[0].get_xydata().tolist() for container in ax.containers
        )
        (dotted,) = [drawn for drawn in ax.lines if drawn.get_linestyle() == ":"]
        for drawn, name in (
            (observed, "observed"),
            (guarded, OURS),
            (dotted.get_xydata().tolist(), "estimate"),
        ):
            assert (
                drawn == rows.loc[rows["curve"] == name, ["samples", "share"]].to_numpy().tolist()
            )
        ends = np.array(ax.containers[0].lines[2][0].get_segments())[:, :, 1]
        assert ends == pytest.approx(
            rows.loc[rows["curve"] == "observed", ["low", "high"]].to_numpy()
        )
        assert ax.get_xticks().tolist() == [1, 2, 4, 8]
    assert len(fig.legends[0].get_texts()) == 3
    found = boxes(fig)
    assert (
        len(found) > 5
        and hidden(found) == []
        and outside(fig, found) == []
        and not math.isnan(fig.get_figheight())
    )
