"""The data behind the pictures of the ablations."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import PathCollection
from matplotlib.colors import to_hex
from notebook_code import notebook_code
from pictures import boxes, hidden, outside

from igcore.errors import ParameterError
from igstudy.figures import style as figures

af = notebook_code("45_ablations")
METHODS = {name: method for method, name in figures.NAMES.items()}  # as readers see them
CURVES = [
    "lambda_curves",
    "ndk_curves",
    "retry_curves",
    "budget_curves",
    "compute_curves",
]
DIFFERENCES = ["effect_panels", "search_differences"]


def row(method="inferenceguard", safe=12, reward=0.5, **fields) -> dict:
    """Return one row of a main table; each whisker has its own length."""
    line = dict(
        policy="raw",
        method=method,
        n_prompts=16,
        safety_rate=safe / 16,
        safety_wilson_low=safe / 16 - 0.11,
        safety_wilson_high=min(1.0, safe / 16 + 0.07),
        reward_mean=reward,
        reward_low=reward - 0.05,
        reward_high=reward + 0.03,
        seconds_per_prompt=1.5,
        n_samples=8,
        keep=2,
        block_size=8,
        budget=0.2,
        lagrange_multiplier=5.0,
    )
    return line | fields


def grid() -> pd.DataFrame:
    """Return a main table over everything that varies in a picture."""
    rows = [
        row(
            method,
            safe=9 + number,
            reward=0.3 + n / 100 + d / 1000 + number / 200,
            n_samples=n,
            block_size=d,
            keep=keep,
            budget=n / 80,
            seconds_per_prompt=n / 4 + number / 10,
        )
        for number, method in enumerate(("base", "beam-lagrangian", "inferenceguard"))
        for d in (4, 8)
        for keep in (1, 2)
        for n in (4, 8, 16)
    ]
    return pd.DataFrame(rows)


def rounds() -> pd.DataFrame:
    rows = [
        {"policy": "raw", "diversity": way, "n_prompts": 24, "round": number, "kl": number / 10}
        | {"answered": number / 5, "answered_low": number / 6, "answered_high": number / 4}
        for way in ("none", "half")
        for number in (1, 2, 3, 4)
    ]
    return pd.DataFrame(rows)


def effects() -> pd.DataFrame:
    """Return ten points of two measures; of each, the first and the third may be claimed."""
    points = ["check", "retry", "penalty", "critic", *(f"check x {k}" for k in range(6))]
    rows = [
        {"policy": "raw", "n_prompts": 16, "point": point, "measure": measure, "difference": d}
        | {"low": d - 0.1, "high": d + 0.2, "p_holm": p, "n_samples": 8}
        | {"arm": point, "reference": "best-of-n-augmented"}
        for measure in ("safe", "reward")
        for point, d, p in zip(
            points,
            np.linspace(-0.2, 0.3, 10),
            [0.05, 0.0501, 0.0004, np.nan, *[1.0] * 6],
            strict=True,
        )
    ]
    return pd.DataFrame(rows)


def drawn(name, monkeypatch, table=None) -> plt.Figure:
    made = {"": effects() if name == "search_differences" else grid()}
    made |= {"rounds": rounds(), "tests": effects()}
    monkeypatch.setattr(af, "lines", pd.DataFrame({"policy": ["raw"]}), raising=False)
    if table is not None:
        made = dict.fromkeys(made, table)
    if name in ("budget_curves", "compute_curves"):
        x = {"budget_curves": "budget", "compute_curves": "seconds_per_prompt"}[name]
        return af.both_measures("A title", x, "x")(made)
    return getattr(af, name)(made)


def bars(ax) -> dict[str, tuple]:
    """By label: points (k, 2) and, where there are any, the ends of the upright whiskers (k, 2)."""
    found = {}
    for bar in ax.containers:
        ends = [
            np.array(segments.get_segments()).reshape(-1, 2, 2)[:, :, 1]
            for segments in bar.lines[2]
        ]
        found[bar.get_label()] = (bar.lines[0].get_xydata(), *ends)
    return found


@pytest.mark.parametrize("name", [*CURVES, *DIFFERENCES])
def test_every_picture_can_be_saved_and_no_text_hides_another(name, tmp_path, monkeypatch):
    """Bug: warnings while drawing, open pyplot figures, labels on top of each other or cut off at
    the edge.
    """
    fig = drawn(name, monkeypatch)
    paths = figures.save(fig, tmp_path / name, {})
    assert len(paths) == 3 and all(path.stat().st_size > 1000 for path in paths[:2])
    assert plt.get_fignums() == []
    found = [(text, box) for text, box in boxes(fig) if box.width > 0]
    assert len(found) > 10 and hidden(found) == [] and outside(fig, found) == []


@pytest.mark.parametrize("name", [*CURVES, "effect_panels"])
def test_points_of_two_policies_are_not_joined(name, monkeypatch):
    """Bug: points of two policies in one line."""
    table = {"retry_curves": rounds, "effect_panels": effects}.get(name, grid)()
    both = pd.concat([table, table.assign(policy="chat")])
    with pytest.raises(ParameterError, match="policy takes the values chat, raw in one picture"):
        drawn(name, monkeypatch, both)


def test_a_line_has_the_points_and_whiskers_of_its_method():
    """Bug: lines of another method or measure, and whiskers of another interval."""
    table = grid().query("block_size == 8 and keep == 1")
    fig = af.both_measures("A title", "seconds_per_prompt", "seconds")({"": table})
    limits = (("safety_rate", "safety_wilson"), ("reward_mean", "reward"))
    assert [ax.get_ylabel() for ax in fig.axes] == ["answered within budget", "reward"]
    for ax, (column, stem) in zip(fig.axes, limits, strict=True):
        assert list(bars(ax)) == ["base", "beam search, λ", "InferenceGuard"]
        for label, (points, ends) in bars(ax).items():
            cell = table[table["method"] == METHODS[label]]
            assert points.tolist() == cell[["seconds_per_prompt", column]].to_numpy().tolist()
            assert ends == pytest.approx(cell[[f"{stem}_low", f"{stem}_high"]].to_numpy())


def test_panels_hold_the_points_of_their_setting(monkeypatch):
    """Bug: InferenceGuard with twice the samples beside a method as if they were equal, or blocks
    of another size.
    """
    fig, ours = drawn("lambda_curves", monkeypatch), grid().query("method == 'inferenceguard'")
    assert [ax.get_ylabel() for ax in fig.axes] == [f"reward, N = {n}" for n in (4, 8, 16)]
    for ax, n in zip(fig.axes, (4, 8, 16), strict=True):
        points, _ = bars(ax)["InferenceGuard"]
        cell = ours[ours["n_samples"] == n]
        assert points.tolist() == cell[["safety_rate", "reward_mean"]].to_numpy().tolist()
    fig = af.ndk_curves({"": ours})
    for ax, d in zip(fig.axes, (4, 8), strict=True):
        for keep in (1, 2):
            points, _ = bars(ax)[f"keep {keep}"]
            cell = ours[(ours["block_size"] == d) & (ours["keep"] == keep)]
            assert points.tolist() == cell[["n_samples", "reward_mean"]].to_numpy().tolist()


def test_retries_draw_each_way_round_by_round(monkeypatch):
    """Bug: the name of another way, and whiskers of what has no interval."""
    answered, kl = drawn("retry_curves", monkeypatch).axes
    for way in ("none", "half"):
        cell = rounds().query("diversity == @way")
        points, ends = bars(answered)[f"diversity {way}"]
        assert points.tolist() == cell[["round", "answered"]].to_numpy().tolist()
        assert ends == pytest.approx(cell[["answered_low", "answered_high"]].to_numpy())
        (points,) = bars(kl)[f"diversity {way}"]
        assert points.tolist() == cell[["round", "kl"]].to_numpy().tolist()


def test_effects_are_filled_where_they_may_be_claimed(monkeypatch):
    """Bug: an effect in the row of another, whiskers of another, the limit .05 itself or no test at
    all on the wrong side.
    """
    fig = drawn("effect_panels", monkeypatch)
    table = effects()
    assert [ax.get_xlabel() for ax in fig.axes] == ["safe", "reward"]
    names = [text.get_text() for text in fig.axes[0].get_yticklabels()]
    assert names == list(table["point"].unique()) and fig.axes[0].yaxis_inverted()
    for ax, (_, cell) in zip(fig.axes, table.groupby("measure", sort=False), strict=True):
        (points,) = [found for found in ax.collections if isinstance(found, PathCollection)]
        assert points.get_offsets().tolist() == [[x, k] for k, x in enumerate(cell["difference"])]
        filled = [to_hex(face) != "#ffffff" for face in points.get_facecolors()]
        assert filled == [True, False, True, *[False] * 7]
        (segments,) = ax.containers[0].lines[2]
        ends = np.array(segments.get_segments())[:, :, 0]
        assert ends == pytest.approx(cell[["low", "high"]].to_numpy())
