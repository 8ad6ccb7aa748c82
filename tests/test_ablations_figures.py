"""The data behind the pictures of the ablations, that no label hides another, and what is said
where there is nothing to draw.
"""

import itertools

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import PathCollection
from matplotlib.colors import to_hex
from matplotlib.text import Text
from notebook_code import notebook_code
from pictures import boxes, hidden, outside

from igcore.errors import ParameterError
from igcore.figures import style as figures
from igcore.figures.labels import at_ends, place

af = notebook_code("45_ablations")

LAMBDAS = (0, 1, 2.5, 5, 10)
METHODS = {name: method for method, name in figures.NAMES.items()}  # as readers see them


def row(method="inferenceguard", safe=12, reward=0.5, n=16, **fields) -> dict:
    """Return one row of a table; whiskers are no intervals of anything, so that each can be told
    from the others.
    """
    line = dict(
        policy="raw",
        method=method,
        n_prompts=n,
        safe=safe,
        abstained=1,
        unsafe=n - safe - 1,
        safety_rate=safe / n,
        safety_wilson_low=safe / n - 0.11,
        safety_wilson_high=min(1.0, safe / n + 0.07),
        reward_mean=reward,
        reward_low=reward - 0.05,
        reward_high=reward + 0.03,
        seconds_per_prompt=1.5,
        n_samples=8,
        keep=2,
        block_size=8,
        rounds=2,
        budget=0.2,
        lagrange_multiplier=5.0,
        seed=0,
    )
    return line | fields


def lambdas() -> pd.DataFrame:
    """Four methods; ARGS was run with other N, on fewer prompts, and all of it is safe with nearly
    the same reward.
    """
    rows = [
        row(
            method,
            safe=8 + min(2 * k, 8),
            reward=0.6 - 0.03 * k + 0.01 * n - 0.1 * (k == 1),
            n_samples=n,
            lagrange_multiplier=x,
        )
        for method in ("best-of-n-lagrangian", "beam-lagrangian", "beam-lagrangian-freq")
        for n in (4, 8, 16)
        for k, x in enumerate(LAMBDAS)
    ]
    args = {"n": 12, "safe": 12, "n_samples": 32, "abstained": 0}
    rows += [
        row("args-lagrangian", reward=0.5 + k / 1000, lagrange_multiplier=x, **args)
        for k, x in enumerate(LAMBDAS)
    ]
    rows += [row(safe=15, reward=0.5 + 0.01 * n, n_samples=n) for n in (8, 16)]
    return pd.DataFrame(rows)


def budgets() -> pd.DataFrame:
    methods = ("base", "best-of-n-augmented", "inferenceguard")
    budgets = ((0.3, 14), (0.1, 6), (0.2, 10))  # in no order
    return pd.DataFrame(
        [
            row(m, safe + k, 0.3 + 0.1 * k, budget=d)
            for k, m in enumerate(methods)
            for d, safe in budgets
        ]
    )


def sizes(methods=("base", "beam-lagrangian", "args", "inferenceguard")) -> pd.DataFrame:
    return pd.DataFrame(
        [
            row(
                m,
                8 + k,
                0.4,
                n=12 if m.startswith("args") else 16,
                n_samples=n,
                seconds_per_prompt=n / 4,
                p=np.nan,
            )
            for m in methods
            for k, n in ((2, 4), (1, 2), (0, 1), (3, 32))
        ]
    )


def grid() -> pd.DataFrame:
    return pd.DataFrame(
        [
            row(
                safe=9 + k,
                reward=0.3 + n / 100 + d / 1000,
                n_samples=n,
                block_size=d,
                keep=k,
                policy_tokens_per_prompt=n / d,
            )
            for n in (4, 8)
            for d in (32, 4, 8)
            for k in (1, 2, 4)
            if k <= n / 2
        ]
    )


def seeds(methods=("base", "mine", "inferenceguard")) -> pd.DataFrame:
    return pd.DataFrame(
        [
            row(m, 9 + s, 0.4 + 0.01 * s, n=14 if m == "mine" else 16, seed=s)
            for s in (2, 0, 1)
            for m in methods
        ]
    )


def rounds() -> pd.DataFrame:
    def line(mode, k, number):
        at = {
            "answered": 0.5 + 0.1 * number,
            "p_safe": 0.3 - 0.02 * k * (number > 1),
            "kl": 0.2 * k * (number - 1),
        }
        around = {
            f"{name}_{side}": x + d
            for name, x in at.items()
            for side, d in (("low", -0.04), ("high", 0.02))
        }
        return (
            {
                "policy": "raw",
                "diversity": mode,
                "n_prompts": 24 - 3 * number,
                "round": number,
                "perplexity": 8.0 + number,
                "bound": 0.1 * number,
            }
            | at
            | around
        )

    return pd.DataFrame(
        [line(mode, k, number) for k, mode in enumerate(af.WAYS) for number in (4, 1, 2, 3)]
    )


def effects(measures=("safe", "reward", "abstained", "safe along the way")) -> pd.DataFrame:
    factors = ("pathwise check", "retry", "penalty", "critic")
    points = [*factors, *(" x ".join(pair) for pair in itertools.combinations(factors, 2))]
    return pd.DataFrame(
        {
            "policy": "raw",
            "n_prompts": 16,
            "point": p,
            "measure": m,
            "difference": d,
            "low": d - 0.1,
            "high": d + 0.2,
            "p_holm": x,
        }
        for m in measures
        for p, d, x in zip(
            points,
            np.linspace(-0.2, 0.3, 10),
            [0.05, 0.0501, 0.0004, np.nan, *[1.0] * 6],
            strict=True,
        )
    )


PICTURES = {
    "lambda_fronts": lambdas,
    "budget_curves": budgets,
    "against_seconds": sizes,
    "ndk_grid": grid,
    "retry_curves": rounds,
    "effect_panels": effects,
    "seed_panels": seeds,
}


def drawn(name) -> plt.Figure:
    return getattr(af, name)(PICTURES[name]())


def bars(ax) -> list[tuple]:
    """Of every line drawn with whiskers: label, points (k, 2) and, where there are any, the ends of
    the upright whiskers (k, 2).
    """
    found = []
    for bar in ax.containers:
        ends = [
            np.array(segments.get_segments()).reshape(-1, 2, 2)[:, :, 1]
            for segments in bar.lines[2]
        ]
        found.append((bar.get_label(), bar.lines[0].get_xydata(), *ends))
    return found


def dots(ax) -> list[PathCollection]:
    return [points for points in ax.collections if isinstance(points, PathCollection)]


# --- all of them ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PICTURES)
def test_every_picture_can_be_saved_and_no_text_hides_another(name, tmp_path):
    """Bug: warnings while drawing, open pyplot figures, labels on top of each other or cut off at
    the edge.
    """
    fig = drawn(name)
    paths = figures.save(fig, tmp_path / name, {})
    assert len(paths) == 3 and all(path.stat().st_size > 1000 for path in paths[:2])
    assert plt.get_fignums() == []
    found = [(text, box) for text, box in boxes(fig) if box.width > 0]
    assert len(found) > 10 and hidden(found) == [] and outside(fig, found) == []


@pytest.mark.parametrize("name", PICTURES)
def test_points_of_two_policies_are_not_joined(name):
    """Bug: points of two policies in one line."""
    table = PICTURES[name]()
    with pytest.raises(ParameterError, match="policy takes the values chat, raw in one picture"):
        getattr(af, name)(pd.concat([table, table.assign(policy="chat")]))


# --- lambda ---------------------------------------------------------------------------------------


def test_a_panel_holds_the_methods_of_its_n():
    """Bug: InferenceGuard with twice the samples beside a frontier as if they were equal, a panel
    with the points of another N, a beaten lambda on the frontier, the lambda of another point.
    """
    table = lambdas()
    axes = af.lambda_fronts(table).axes
    assert [ax.get_title(loc="left") for ax in axes] == ["N = 8, n = 16", "N = 16, n = 16"]
    for ax, n in zip(axes, (8, 16), strict=True):
        dots_of = {
            to_hex(found.get_edgecolors()[0]): found.get_offsets().tolist() for found in dots(ax)
        }
        cell = table[(table["method"] == "beam-lagrangian") & (table["n_samples"] == n)]
        # lambda 1 costs a tenth of the reward more
        best = cell[cell["lagrange_multiplier"] != 1][["safety_rate", "reward_mean"]]
        assert dots_of[figures.STYLE["beam-lagrangian"][0]] == best.to_numpy().tolist()
        ours = [[15 / 16, pytest.approx(0.5 + 0.01 * n)]]
        assert dots_of[figures.STYLE["inferenceguard"][0]] == ours
        assert len(dots_of) == 3  # of six methods none else was run
        texts = [text.get_text() for text in ax.texts]
        assert "beam search, λ = 0" in texts and "InferenceGuard" in texts


def test_a_lambda_without_any_text_has_no_point():
    """Bug: a mean reward of nothing (NaN) that breaks the placing of the labels, or a label at no
    point.
    """
    table = lambdas().query("method == 'beam-lagrangian' and n_samples == 8").reset_index(drop=True)
    table.loc[2, ["reward_mean", "reward_low", "reward_high"]] = np.nan
    (ax,) = af.lambda_fronts(table).axes
    texts = [text.get_text() for text in ax.texts]
    assert texts == ["beam search, λ = 0", "λ = 5", "λ = 10"]


# --- labels ---------------------------------------------------------------------------------------


def test_names_at_the_ends_keep_their_order_and_hide_nothing():
    """Bug: names on top of each other where lines end together, in another order than the lines,
    above or below the panel, or cut off at the edge of the page.
    """
    fig, ((ax,),) = af.page(pd.DataFrame({"policy": ["raw"], "n_prompts": [16]}), 1, 1, 2.0)
    ends = [("zero", 1, 0.0, "#000000"), ("lost", 1, np.nan, "#000000")]
    ends += [(f"line {k}", 1, 1 - k / 1000, "#000000") for k in range(5)]
    ax.set(xlim=(0, 1), ylim=(0, 1))
    at_ends(ax, ends)
    fig.draw_without_rendering()
    found = [(text.get_text(), Text.get_window_extent(text)) for text in ax.texts]
    assert hidden(found) == [] and outside(fig, found) == []
    centres = {name: (box.y0 + box.y1) / 2 for name, box in found}
    assert sorted(centres, key=centres.get) == ["zero", *[f"line {k}" for k in (4, 3, 2, 1, 0)]]
    assert all(ax.bbox.y0 - 2 <= y <= ax.bbox.y1 + 2 for y in centres.values())
    assert centres["zero"] == pytest.approx(ax.bbox.y0, abs=2)


def test_labels_hide_nothing_where_points_crowd():
    """Bug: labels on top of each other, of a point or outside of the panel, where ten settings are
    safe with one reward.
    """
    fig, ((ax,),) = af.page(pd.DataFrame({"policy": ["raw"], "n_prompts": [16]}), 1, 1, 3.0)
    points = np.array(
        [[1.0, 0.5 + 0.001 * k] for k in range(10)] + [[0.2, 0.2], [0.0, 1.0], [np.nan, 0.5]]
    )
    ax.set(xlim=(0, 1), ylim=(0, 1))
    fig.draw_without_rendering()
    texts = place(ax, points, [f"{k}.5" for k in range(11)] + ["", "lost"])
    assert [text.get_text() for text in texts] == [f"{k}.5" for k in range(11)]
    fig.draw_without_rendering()
    found = [(text.get_text(), Text.get_window_extent(text)) for text in texts]
    assert hidden(found) == []
    for _, box in found:
        assert (
            ax.bbox.x0 <= box.x0
            and box.x1 <= ax.bbox.x1
            and ax.bbox.y0 <= box.y0
            and box.y1 <= ax.bbox.y1
        )
        assert not any(box.contains(*at) for at in ax.transData.transform(points[:12]))
    assert not texts[10].arrow_patch.get_visible() and any(
        text.arrow_patch.get_visible() for text in texts
    )  # alone: beside it


# --- budget, N, d and K ---------------------------------------------------------------------------


def test_budgets_draw_safety_reward_and_abstention():
    """Bug: lines in the order of the rows, whiskers of another measure, abstentions of methods that
    cannot abstain.
    """
    table = budgets()
    fig = af.budget_curves(table)
    left, right = fig.axes
    names = [label for label, *_ in bars(left)]
    ours = "InferenceGuard"
    assert names == ["base", "Best-of-N, augmented", ours, f"{ours} abstained"]
    for (label, safety, ends), (_, rewards, *rewarded) in zip(
        bars(left)[:3], bars(right), strict=True
    ):
        cell = table[table["method"] == METHODS[label]].sort_values("budget")
        assert np.round(safety[:, 0]).tolist() == [0, 1, 2]
        assert safety[:, 1].tolist() == cell["safety_rate"].tolist()
        assert rewards[:, 1].tolist() == cell["reward_mean"].tolist()
        assert ends == pytest.approx(cell[["safety_wilson_low", "safety_wilson_high"]].to_numpy())
        if label != "base":  # whose texts are the same under each budget
            assert rewarded[0] == pytest.approx(cell[["reward_low", "reward_high"]].to_numpy())
    assert bars(left)[3][1][:, 1].tolist() == [1 / 16] * 3
    assert [text.get_text() for text in left.get_xticklabels()] == ["0.1", "0.2", "0.3"]
    said = "InferenceGuard's reward is 0.50 at budget 0.1 and 0.50 at budget 0.3"
    assert fig.get_suptitle() == said


def test_compute_is_drawn_over_seconds():
    """Bug: lines in the order of the rows, seconds of another method, ticks at powers of ten."""
    table = sizes()
    fig = af.against_seconds(table)
    safety, reward = fig.axes
    for ax in (safety, reward):
        assert ax.get_xscale() == "log" and len(ax.get_xticks(minor=True)) == 0
        fig.draw_without_rendering()
        shown = [label.get_text() for label in ax.get_xticklabels()]
        assert {"0.5", "1", "5"} <= set(shown)
    labels = ["base", "beam search, λ", "InferenceGuard"]
    assert [label for label, *_ in bars(safety)] == labels
    for (label, points, ends), (_, rewards, rewarded) in zip(
        bars(safety), bars(reward), strict=True
    ):
        cell = table[table["method"] == METHODS[label]].sort_values("n_samples")
        assert points.tolist() == cell[["seconds_per_prompt", "safety_rate"]].to_numpy().tolist()
        assert rewards.tolist() == cell[["seconds_per_prompt", "reward_mean"]].to_numpy().tolist()
        assert ends == pytest.approx(cell[["safety_wilson_low", "safety_wilson_high"]].to_numpy())
        assert rewarded == pytest.approx(cell[["reward_low", "reward_high"]].to_numpy())
    assert reward.get_title(loc="right") == "N = 1, 2, 4, 32 from left to right"
    assert fig.get_suptitle() == "Answered within budget with N = 1: base 50%; beam search, λ 50%"


def test_the_bound_is_that_of_the_theory():
    """Bug: a bound of N samples for N M of them, of a method that cannot abstain, or one drawn
    upside down.
    """
    table = sizes()
    table["p"] = table["method"].map({"inferenceguard": 0.3, "beam-lagrangian": 0.2})
    safety, reward = af.against_seconds(table).axes
    found = {label: points for label, points, *_ in bars(safety)}
    assert len(found) == 4 and len(bars(reward)) == 3
    wanted = [[n / 4, 1 - 0.7 ** (2 * n)] for n in (1, 2, 4, 32)]
    assert found["InferenceGuard, at least"] == pytest.approx(np.array(wanted))


def test_seconds_that_are_not_known_are_left_out():
    """Bug: a warning or a crash by the logarithm of nothing; replays have no seconds."""
    table = sizes()
    table.loc[table["method"] == "beam-lagrangian", "seconds_per_prompt"] = np.nan
    fig = af.against_seconds(table)
    fig.draw_without_rendering()
    names = [text.get_text() for text in fig.axes[0].texts]
    assert names == ["base", "InferenceGuard"]


def test_grid_has_a_column_for_each_block_size_and_a_line_for_each_number_of_beams():
    """Bug: settings drawn in the panel of another, N in the order of the rows, a row of panels
    that are all the same.
    """
    table = grid()
    fig = af.ndk_grid(table)
    axes = np.array(fig.axes).reshape(2, 3)
    assert [ax.get_title(loc="right") for ax in axes[0]] == [
        f"blocks of {block} tokens" for block in (4, 8, 32)
    ]
    assert [text.get_text() for text in axes[-1, 0].get_xticklabels()] == ["4", "8"]
    for column, block in zip(axes.T, (4, 8, 32), strict=True):
        for ax, name in zip(column, ("safety_rate", "reward_mean"), strict=True):
            assert [label for label, *_ in bars(ax)] == ["K = 1", "K = 2", "K = 4"]
            for label, points, *_ in bars(ax):
                chosen = (table["block_size"] == block) & (table["keep"] == int(label[-1]))
                cell = table[chosen].sort_values("n_samples")
                assert points[:, 1].tolist() == cell[name].tolist()
                assert np.round(points[:, 0]).tolist() == [0, 1][-len(cell) :]
    said = "Largest change of the reward: by samples 0.04, tokens a block 0.03, beams kept 0.00"
    assert fig.get_suptitle() == said
    flat = af.ndk_grid(table.assign(safety_rate=1.0))
    assert [ax.get_ylabel() for ax in flat.axes] == ["reward", "", ""]
    with pytest.raises(
        ParameterError,
        match="method takes the values beam-augmented, inferenceguard in one picture",
    ):
        af.ndk_grid(pd.concat([table, pd.DataFrame([row("beam-augmented", n_samples=2)])]))


# --- retries, effects and seeds -------------------------------------------------------------------


def test_retries_draw_each_way_round_by_round():
    """Bug: rounds in the order of the rows, the name of another way, a bound for retries that do
    not sample from the policy.
    """
    table = rounds()
    fig = af.retry_curves(table)
    bound = ["bound of theory"]
    for ax, name in zip(fig.axes, ("answered", "kl"), strict=True):
        lines = [found for found in bars(ax) if found[0] not in bound]
        assert [label for label, *_ in lines] == [name for name, *_ in af.WAYS.values()]
        for mode, (_, points, ends) in zip(af.WAYS, lines, strict=True):
            cell = table[table["diversity"] == mode].sort_values("round")
            assert np.round(points[:, 0]).tolist() == [1, 2, 3, 4]
            assert points[:, 1].tolist() == cell[name].tolist()
            want = cell[[f"{name}_low", f"{name}_high"]].to_numpy()
            assert ends == pytest.approx(want)
    (dotted,) = [points for label, points, *_ in bars(fig.axes[0]) if label in bound]
    assert dotted[:, 1] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert fig.get_suptitle() == "Prompts answered in 4 rounds 90%, in 1 round 60%"


def test_effects_are_filled_where_they_may_be_claimed():
    """Bug: an effect in the row of another, whiskers of another, the limit .05 itself or no test at
    all on the wrong side, a p value of an effect that may not be claimed.
    """
    table = effects()
    fig = af.effect_panels(table)
    measures = ("safe", "reward", "safe along the way")
    assert tuple(ax.get_xlabel() for ax in fig.axes) == tuple(f"change: {x}" for x in measures)
    names = [point.replace(" x ", " × ") for point in table["point"].unique()]
    assert [text.get_text() for text in fig.axes[0].get_yticklabels()] == names and fig.axes[
        0
    ].yaxis_inverted()
    for ax, measure in zip(fig.axes, measures, strict=True):
        cell = table[table["measure"] == measure]
        (points,) = dots(ax)
        assert points.get_offsets().tolist() == [[x, k] for k, x in enumerate(cell["difference"])]
        assert [to_hex(face) != "#ffffff" for face in points.get_facecolors()] == [
            True,
            False,
            True,
        ] + [False] * 7
        (segments,) = ax.containers[0].lines[2]
        assert np.array(segments.get_segments())[:, :, 0] == pytest.approx(
            cell[["low", "high"]].to_numpy()
        )
        assert [text.get_text() for text in ax.texts] == ["p = .05", "p < .001"]
    none = af.effect_panels(table.assign(p_holm=0.2))
    assert none.get_suptitle() == "No effect can be claimed"
    one = table.assign(p_holm=np.where(table.index == 13, 0.01, 1.0))
    said = "Largest claimed effects: critic -0.03 (reward)"
    assert af.effect_panels(one).get_suptitle() == said


def test_seeds_stand_beside_each_other():
    """Bug: a seed in the row of another method, and one interval for all seeds."""
    table = seeds()
    fig = af.seed_panels(table)
    assert [text.get_text() for text in fig.axes[0].get_yticklabels()] == [
        "base",
        "mine (n = 14)",
        "InferenceGuard",
    ]
    assert [text.get_text() for text in fig.legends[0].get_texts()] == [
        "seed 0",
        "seed 1",
        "seed 2",
    ]
    for ax, name, low, high in zip(
        fig.axes,
        ("safety_rate", "reward_mean"),
        ("safety_wilson_low", "reward_low"),
        ("safety_wilson_high", "reward_high"),
        strict=True,
    ):
        for seed, (points, bar) in enumerate(zip(dots(ax), ax.containers, strict=True)):
            cell = table[table["seed"] == seed]
            x, y = np.array(points.get_offsets()).T
            assert x.tolist() == cell[name].tolist() and np.round(y).tolist() == [0, 1, 2]
            assert [to_hex(face) for face in points.get_facecolors()] == [
                figures.style(m)[0] for m in cell["method"]
            ]
            (segments,) = bar.lines[2]
            assert np.array(segments.get_segments())[:, :, 0] == pytest.approx(
                cell[[low, high]].to_numpy()
            )
            assert np.array(segments.get_segments())[:, 0, 1].tolist() == y.tolist()
    rows = np.array([np.array(points.get_offsets())[:, 1] for points in dots(fig.axes[0])])
    assert (np.diff(rows, axis=0) > 0.2).all()  # from the first seed down
