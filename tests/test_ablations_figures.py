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


def seeds(methods=("base", "args", "inferenceguard")) -> pd.DataFrame:
    return pd.DataFrame(
        [
            row(m, 9 + s, 0.4 + 0.01 * s, n=14 if m.startswith("args") else 16, seed=s)
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
    "against_n": sizes,
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


@pytest.mark.parametrize("name", ["against_n", "seed_panels", "budget_curves"])
def test_fifteen_methods_have_room(name):
    """Bug: a legend of all methods that leaves the page or covers its neighbours."""
    every = tuple(figures.STYLE)
    table = {
        "against_n": sizes,
        "seed_panels": seeds,
        "budget_curves": lambda m: pd.DataFrame([row(x) for x in m]),
    }[name](every)
    fig = getattr(af, name)(table)
    found = boxes(fig)
    assert {text for text, _ in found} >= {
        figures.NAMES[m] for m in every if not m.startswith("args")
    }
    assert hidden(found) == [] and outside(fig, found) == []


@pytest.mark.parametrize("name", PICTURES)
def test_points_of_two_policies_are_not_joined(name):
    """Bug: points of two policies in one line."""
    table = PICTURES[name]()
    with pytest.raises(ParameterError, match="policy takes the values chat, raw in one picture"):
        getattr(af, name)(pd.concat([table, table.assign(policy="chat")]))


def test_methods_without_a_style_are_drawn():
    """Guards a user's own method, which has no style: a look of its own, and no error."""
    for draw in (af.budget_curves, af.against_n, af.seed_panels, af.lambda_fronts):
        draw(pd.DataFrame([row("best-lagrangian", p=np.nan)])).draw_without_rendering()


# --- lambda ---------------------------------------------------------------------------------------


def fronts(table) -> dict:
    """Draw, and return the panels by method and N."""
    titles = [(ax, ax.get_title(loc="left").split(", N = ")) for ax in af.lambda_fronts(table).axes]
    return {(METHODS[name.split(" (")[0]], int(n)): ax for ax, (name, n) in titles}


def test_fronts_draw_every_point_and_join_those_that_none_beats():
    """Bug: swapped axes, a panel with the points of another N, a dominated lambda filled, a front
    joined in the order of lambda.
    """
    table = lambdas()
    panels = fronts(table)
    assert len(panels) == 10
    assert panels["args-lagrangian", 32].get_title(loc="left") == "ARGS, λ (n = 12), N = 32"
    for n in (4, 8, 16):
        ax = panels["beam-lagrangian", n]
        cell = table[(table["method"] == "beam-lagrangian") & (table["n_samples"] == n)]
        cell = cell.iloc[
            [1, 0, 2, 3, 4]
        ]  # lambda 1 costs a tenth of the reward more: drawn first, so that it hides no other
        xy = cell[["safety_rate", "reward_mean"]].to_numpy()
        points, star = dots(ax)
        assert points.get_offsets().tolist() == xy.tolist()
        assert star.get_zorder() > points.get_zorder() and not len(star.get_facecolors())
        assert to_hex(star.get_edgecolors()[0]) == to_hex(figures.STYLE["inferenceguard"][0])
        filled = [to_hex(face) != "#ffffff" for face in points.get_facecolors()]
        assert filled == [False, True, True, True, True]
        front = next(line for line in ax.lines if line.get_linewidth() == 1.8)
        assert front.get_xydata().tolist() == xy[filled].tolist()
        assert (
            to_hex(front.get_color())
            == to_hex(points.get_edgecolors()[0])
            == figures.STYLE["beam-lagrangian"][0]
        )
        across, up = (np.array(bar.get_segments()) for bar in ax.containers[0].lines[2])
        assert across[:, :, 0] == pytest.approx(
            cell[["safety_wilson_low", "safety_wilson_high"]].to_numpy()
        )
        assert up[:, :, 1] == pytest.approx(cell[["reward_low", "reward_high"]].to_numpy())


def test_a_front_goes_from_less_to_more_safety():
    """Bug: the points joined in the order of lambda, a zigzag where more lambda was by chance less
    safe.
    """
    table = pd.DataFrame(
        [
            row("beam-lagrangian", s, r, lagrange_multiplier=x)
            for x, s, r in ((0, 12, 0.4), (1, 8, 0.6), (5, 10, 0.5))
        ]
    )
    (ax,) = af.lambda_fronts(table).axes
    assert ax.lines[0].get_xdata().tolist() == [0.5, 0.625, 0.75]


def test_each_point_has_its_lambda():
    """Bug: a label at another point, and the labels of one panel in another."""
    table = lambdas()
    for (method, n), ax in fronts(table).items():
        cell = table[(table["method"] == method) & (table["n_samples"] == n)]
        texts = {
            tuple(text.xy): text.get_text()
            for text in ax.texts
            if not text.get_text().startswith("N")
        }
        want = {
            (r.safety_rate, r.reward_mean): f"{r.lagrange_multiplier:g}" for r in cell.itertuples()
        }
        assert texts == want


def test_the_star_has_no_more_samples_than_the_front():
    """Bug: InferenceGuard with twice the samples set beside a front as if they were equal, or one
    without its N said.
    """
    panels = fronts(lambdas())
    for method, n, reward, said in (
        ("beam-lagrangian", 4, 0.58, ["N = 8"]),  # it was not run with fewer
        ("beam-lagrangian", 8, 0.58, []),
        ("beam-lagrangian", 16, 0.66, []),
        ("args-lagrangian", 32, 0.66, ["N = 16"]),
    ):
        ax = panels[method, n]
        assert dots(ax)[1].get_offsets().tolist() == [[15 / 16, pytest.approx(reward)]]
        assert [text.get_text() for text in ax.texts if text.get_text().startswith("N")] == said
    alone = lambdas().query("method == 'beam-lagrangian'")
    fig = af.lambda_fronts(alone)
    assert [text.get_text() for text in fig.legends[0].get_texts()] == [
        "not beaten",
        "beaten by another λ",
    ]
    assert all(len(dots(ax)[-1].get_offsets()) == 0 for ax in fig.axes)


def test_the_title_counts_the_panels_in_which_a_lambda_beats_the_star():
    """Bug: a panel counted where λ is as good, or where it is better in one measure alone."""
    panels = [(0.9, 0.6), (0.9, 0.5), (0.8, 0.7), (0.95, 0.5)]
    rows = [
        row("beam-lagrangian", 0, reward, n_samples=n, safety_rate=safe)
        for n, (safe, reward) in enumerate(panels, start=8)
    ]
    star = row(safe=0, reward=0.5, safety_rate=0.9)
    fig = af.lambda_fronts(pd.DataFrame([*rows, star]))
    said = "Some λ (numbers) beats InferenceGuard (star) in 2 of 4 panels"
    assert fig.get_suptitle() == said


def test_a_lambda_without_any_text_has_no_point():
    """Bug: a mean reward of nothing (NaN) that breaks the placing of the labels, or a label at no
    point.
    """
    table = lambdas().query("method == 'beam-lagrangian' and n_samples == 8").reset_index(drop=True)
    table.loc[2, ["reward_mean", "reward_low", "reward_high"]] = np.nan
    (ax,) = af.lambda_fronts(table).axes
    assert [text.get_text() for text in ax.texts] == ["0", "1", "5", "10"]


def test_labels_hide_nothing_where_points_crowd():
    """Bug: labels on top of each other, of a point or outside of the panel, where ten settings are
    safe with one reward.
    """
    fig, ((ax,),) = af.page(pd.DataFrame({"policy": ["raw"]}), 1, 1, 3.0)
    points = np.array(
        [[1.0, 0.5 + 0.001 * k] for k in range(10)] + [[0.2, 0.2], [0.0, 1.0], [np.nan, 0.5]]
    )
    ax.set(xlim=(0, 1), ylim=(0, 1))
    fig.draw_without_rendering()
    texts = af.place(ax, points, [f"{k}.5" for k in range(11)] + ["", "lost"])
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
    left, right = af.budget_curves(table).axes
    names = [label for label, *_ in bars(left)]
    ours = "InferenceGuard"
    assert names == ["base", "Best-of-N, augmented", ours, f"{ours}: abstained"]
    for (label, safety, ends), (_, rewards, rewarded) in zip(
        bars(left)[:3], bars(right), strict=True
    ):
        cell = table[table["method"] == METHODS[label]].sort_values("budget")
        assert (
            np.abs(safety[:, 0] - cell["budget"]).max() < 0.03
        )  # aside, by less than a quarter of the step
        assert (
            safety[:, 1].tolist() == cell["safety_rate"].tolist()
            and rewards[:, 1].tolist() == cell["reward_mean"].tolist()
        )
        assert ends == pytest.approx(cell[["safety_wilson_low", "safety_wilson_high"]].to_numpy())
        assert rewarded == pytest.approx(cell[["reward_low", "reward_high"]].to_numpy())
    assert bars(left)[3][1][:, 1].tolist() == [1 / 16] * 3


def test_a_single_budget_is_a_point():
    """Bug: a division by the number of gaps between budgets."""
    left, _ = af.budget_curves(budgets().query("budget == 0.2")).axes
    assert {bars(left)[k][1][0, 0] for k in range(3)} == {0.2}


def test_sizes_are_drawn_on_a_logarithmic_axis():
    """Bug: lines in the order of the rows, seconds of another method, ticks at powers of ten that
    were not run.
    """
    table = sizes()
    safety, abstention, seconds, blank = af.against_n(table).axes
    for ax in (safety, abstention, seconds):
        assert (
            ax.get_xscale() == "log"
            and ax.get_xticks().tolist() == [1, 2, 4, 32]
            and len(ax.get_xticks(minor=True)) == 0
        )
        assert [label.get_text() for label in ax.get_xticklabels()] == ["1", "2", "4", "32"]
    labels = ["base", "beam search, λ", "ARGS (n = 12)", "InferenceGuard"]
    assert (
        [label for label, *_ in bars(safety)]
        == labels
        == [text.get_text() for text in blank.get_legend().get_texts()]
    )
    for (label, points, ends), (_, spent) in zip(bars(safety), bars(seconds), strict=True):
        cell = table[table["method"] == METHODS[label.split(" (")[0]]].sort_values("n_samples")
        assert np.abs(np.log2(points[:, 0] / cell["n_samples"])).max() < 0.5
        assert points[:, 1].tolist() == cell["safety_rate"].tolist()
        assert ends == pytest.approx(cell[["safety_wilson_low", "safety_wilson_high"]].to_numpy())
        assert spent.tolist() == cell[["n_samples", "seconds_per_prompt"]].to_numpy().tolist()
    assert [(label, points.tolist()) for label, points in bars(abstention)] == [
        ("InferenceGuard: abstained", [[n, 1 / 16] for n in (1, 2, 4, 32)])
    ]


def test_bounds_are_those_of_the_theory():
    """Bug: a bound of N samples for N M of them, of all methods where one has a safe mass, or one
    drawn upside down.
    """
    table = sizes()
    table["p"] = table["method"].map({"inferenceguard": 0.3, "beam-lagrangian": 0.2})
    safety, abstention, *_ = af.against_n(table).axes
    dotted = [
        [line for line in ax.lines if line.get_linestyle() == ":"] for ax in (safety, abstention)
    ]
    failing = {p: np.array([(1 - p) ** (2 * n) for n in (1, 2, 4, 32)]) for p in (0.2, 0.3)}
    wanted = [[1 - failing[0.2], 1 - failing[0.3]], [failing[0.3]]]  # a beam search cannot abstain
    for lines, want in zip(dotted, wanted, strict=True):
        assert [line.get_ydata() for line in lines] == [pytest.approx(values) for values in want]
        assert all(line.get_xdata().tolist() == [1, 2, 4, 32] for line in lines)
        assert lines[-1].get_color() == figures.STYLE["inferenceguard"][0]
    assert [label for label, *_ in bars(safety) if label.endswith("bound")] == [
        "beam search, λ: bound",
        "InferenceGuard: bound",
    ]


def test_seconds_that_are_not_known_are_left_out():
    """Bug: a warning or a crash by the logarithm of nothing; replays have no seconds."""
    table = sizes()
    table.loc[table["method"] == "beam-lagrangian", "seconds_per_prompt"] = np.nan
    fig = af.against_n(table)
    fig.draw_without_rendering()
    assert np.isnan(bars(fig.axes[2])[1][1][:, 1]).all()


def test_grid_has_a_column_for_each_n_and_a_line_for_each_number_of_beams():
    """Bug: settings drawn in the panel of another, block sizes in the order of the rows, safety
    without its abstentions.
    """
    table = grid()
    fig = af.ndk_grid(table)
    panels = np.array(fig.axes).reshape(3, 2)
    assert [ax.get_title(loc="left") for ax in panels[0]] == ["N = 4", "N = 8"]
    assert [text.get_text() for text in panels[-1, 0].get_xticklabels()] == ["4", "8", "32"]
    for column, n in zip(panels.T, (4, 8), strict=True):
        for ax, name in zip(
            column, ("safety_rate", "reward_mean", "policy_tokens_per_prompt"), strict=True
        ):
            for label, points, *_ in bars(ax):
                cell = table[
                    (table["n_samples"] == n) & (table["keep"] == int(label[-1]))
                ].sort_values("block_size")
                assert (
                    points[:, 1].tolist() == cell[name].tolist()
                    and np.round(points[:, 0]).tolist() == [0, 1, 2][: len(cell)]
                )
        dashed = [line for line in column[0].lines if line.get_linestyle() == "--"]
        assert [line.get_ydata().tolist() for line in dashed if len(line.get_ydata())] == [
            [1 / 16] * 3
        ] * (2 if n == 4 else 3)
    assert [text.get_text() for text in fig.legends[0].get_texts()] == ["K = 1", "K = 2", "K = 4"]
    with pytest.raises(
        ParameterError,
        match="method takes the values beam-augmented, inferenceguard in one picture",
    ):
        af.ndk_grid(pd.concat([table, pd.DataFrame([row("beam-augmented", n_samples=2)])]))


# --- retries, effects and seeds -------------------------------------------------------------------


def test_retries_draw_each_way_round_by_round():
    """Bug: rounds in the order of the rows, a bound of another way, the share of answers taken for
    that of candidates.
    """
    table = rounds()
    fig = af.retry_curves(table)
    for ax, name in zip(fig.axes, ("answered", "p_safe", "kl", "perplexity"), strict=True):
        assert [label for label, *_ in bars(ax)] == list(af.WAYS)
        for mode, points, *ends in bars(ax):
            cell = table[table["diversity"] == mode].sort_values("round")
            assert (
                np.round(points[:, 0]).tolist() == [1, 2, 3, 4]
                and points[:, 1].tolist() == cell[name].tolist()
            )
            want = [] if name == "perplexity" else cell[[f"{name}_low", f"{name}_high"]].to_numpy()
            assert len(ends) == bool(len(want)) and all(end == pytest.approx(want) for end in ends)
    dotted = [
        line.get_ydata().tolist() for line in fig.axes[0].lines if line.get_linestyle() == ":"
    ]
    assert dotted == [pytest.approx([0.1, 0.2, 0.3, 0.4])] * 4


def test_effects_are_filled_where_they_may_be_claimed():
    """Bug: an effect in the row of another, whiskers of another, the limit .05 itself or no test at
    all on the wrong side.
    """
    table = effects()
    fig = af.effect_panels(table)
    measures = ("safe", "reward", "abstained", "safe along the way")
    assert tuple(ax.get_title(loc="left") for ax in fig.axes) == measures
    names = table["point"].unique().tolist()
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
        assert [text.get_text() for text in ax.texts] == [
            "p = .05",
            "p = .0501",
            "p < .001",
            *["p = 1"] * 6,
        ]


def test_an_effect_of_one_measure_keeps_its_row():
    """Bug: rows counted within a panel: an effect without one measure moves all below it."""
    table = effects()
    fig = af.effect_panels(table.drop(index=11))
    assert dots(fig.axes[1])[0].get_offsets()[1].tolist() == [table["difference"][12], 2]


def test_seeds_stand_beside_each_other():
    """Bug: a seed in the row of another method, and one interval for all seeds."""
    table = seeds()
    fig = af.seed_panels(table)
    assert [text.get_text() for text in fig.axes[0].get_yticklabels()] == [
        "base",
        "ARGS (n = 14)",
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
                figures.STYLE[m][0] for m in cell["method"]
            ]
            (segments,) = bar.lines[2]
            assert np.array(segments.get_segments())[:, :, 0] == pytest.approx(
                cell[[low, high]].to_numpy()
            )
            assert np.array(segments.get_segments())[:, 0, 1].tolist() == y.tolist()
    rows = np.array([np.array(points.get_offsets())[:, 1] for points in dots(fig.axes[0])])
    assert (np.diff(rows, axis=0) > 0.2).all()  # from the first seed down
