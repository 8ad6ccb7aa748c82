"""The data behind the pictures, their bytes, and that nothing in them overlaps."""

import itertools
import math
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import synthetic
from notebook_code import notebook_code
from pictures import boxes, hidden, outside
from statsmodels.stats.proportion import proportion_confint

from igcore.errors import RunError
from igstudy.figures import style as look
from igstudy.figures.style import save
from igstudy.report import tables

figures = notebook_code("50_figures")  # what notebook 50 alone draws
start = notebook_code("00_start_here")
METHODS = list(look.STYLE)
TOKENWISE = ("args", "re-control")
TRACES = {"base": [0.2, 0.15, 0.1], "inferenceguard": [0.2, 0.1, -0.1, -math.inf]}
DRAW = {"tradeoff": figures.tradeoff, "rates": figures.rates}


@pytest.fixture(scope="module")
def records():
    return synthetic.records(40)


@pytest.fixture(scope="module")
def main(records):
    return tables.main_table(records)


@pytest.fixture(scope="module")
def every() -> pd.DataFrame:
    """Records of all methods; token-wise ones were asked 12 of 30 prompts of one policy, and none
    of the other.
    """
    methods = {name: synthetic.METHODS.get(name, (0.1, 0.0, 0.45, 2.0)) for name in METHODS}
    methods |= {
        name: (0.2, 1.0, 0.45, 2.0) for name in methods if name.startswith("inferenceguard-")
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(synthetic, "METHODS", methods)
        lines = synthetic.records(30, methods)
    few = lines["method"].str.startswith(TOKENWISE)
    asked = (lines["policy"] == "smollm2-raw") & (lines["prompt_id"] < "p012")
    return lines[~few | asked].reset_index(drop=True)


def texts(fig) -> list:
    """Return every visible text of the figure but tick labels."""
    fig.draw_without_rendering()
    return [
        text
        for ax in fig.axes
        for text in [*ax.texts, ax.title]
        if text.get_text() and text.get_visible()
    ]


def overlaps(fig) -> list[tuple[str, str]]:
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts(fig)]
    return [(one, two) for (one, a), (two, b) in itertools.combinations(boxes, 2) if a.overlaps(b)]


@pytest.mark.parametrize("name", ["tradeoff", "rates"])
def test_a_method_without_a_style_is_drawn(name, main):
    """Guards a user's own method, which has no style: a look of its own, and no error."""
    fig = DRAW[name](main.replace({"method": {"base": "mine"}}))
    assert "mine" in dict(boxes(fig))
    assert look.style("mine") not in look.STYLE.values()


@pytest.mark.parametrize("draw", DRAW.values(), ids=DRAW.keys())
def test_nothing_to_draw_is_said(draw, records):
    """Guards against an empty picture that looks like a result."""
    with pytest.raises(RunError, match="30_decode"):
        draw(records.iloc[:0])


@pytest.mark.parametrize("name", ["tradeoff", "distributions", "rates", "safety_states"])
def test_two_saves_give_the_same_bytes(name, main, records, tmp_path):
    """Guards against dates, random jitter and identifiers in committed pictures, and against open
    pyplot figures.
    """
    argument = {"safety_states": TRACES, "distributions": records}.get(name, main)
    others = {"safety_states": start.safety_states, "distributions": figures.distributions}
    draw, saved = (DRAW | others)[name], []
    for folder in ("one", "two"):
        np.random.seed(len(folder) + len(saved))
        paths = save(draw(argument), tmp_path / folder / "v1.5", {})
        assert [path.name for path in paths] == ["v1.5.pdf", "v1.5.png", "v1.5.json"]
        saved.append([path.read_bytes() for path in paths])
    assert saved[0] == saved[1]
    assert saved[0][0].startswith(b"%PDF") and saved[0][1].startswith(b"\x89PNG")
    assert b"CreationDate" not in saved[0][0] and b"Software" not in saved[0][1]
    assert plt.get_fignums() == []


@pytest.mark.parametrize("name", DRAW)
def test_fifteen_methods_and_two_policies_fit(name, every):
    """Bug: legends cut off at the edge of the page, labels on top of each other."""
    fig = DRAW[name](tables.main_table(every))
    found = boxes(fig)
    assert len(found) > 25 and hidden(found) == [] and outside(fig, found) == []


def test_methods_with_fewer_prompts_say_so(every):
    """Bug: a rate of 12 prompts beside one of 48 as if they were alike; n said where all are."""
    main = tables.main_table(every)
    tradeoff, rates = figures.tradeoff(main), figures.rates(main)
    # pictures with one message have six methods, all of which answered every prompt
    names = [look.NAMES[method] for method in look.SIX]
    assert [text.get_text() for text in tradeoff.legends[0].get_texts()] == names
    for panel in range(2):
        assert [label.get_text() for label in rates.axes[0].get_yticklabels()] == names
        for fig in (tradeoff, rates):
            assert fig.axes[panel].get_title(loc="left").endswith(", n = 30")


def test_distributions_hold_every_answer_and_its_own_score(records):
    """Bug: costs in the panel of rewards, or abstentions counted as answers."""
    fig = figures.distributions(records)
    assert [ax.get_title(loc="left").rpartition(", ")[2] for ax in fig.axes[:2]] == [
        "reward",
        "cost",
    ]
    answered = records[(records["policy"] == "smollm2-raw") & (records["method"] == "base")]
    for ax, score in zip(fig.axes, ("reward", "cost"), strict=False):
        drawn = ax.collections[0].get_paths()[0].vertices[:, 0]
        values = answered[score].dropna().astype(float)
        assert [drawn.min(), drawn.max()] == pytest.approx([values.min(), values.max()])


# --- trade-off ------------------------------------------------------------------------------------


def test_tradeoff_draws_the_numbers_of_the_table(main):
    """Guards against swapped axes, whiskers of another number, and points of another policy."""
    fig = figures.tradeoff(main)
    rows_of = dict(list(main.groupby("policy", sort=False)))
    for ax in fig.axes:
        rows = rows_of[ax.get_title(loc="left").split(",")[0]]
        rows = rows[rows["method"].isin(look.SIX)]
        assert len(ax.containers) == len(rows)
        for drawn, row in zip(ax.containers, rows.itertuples(), strict=True):
            (x,), (y,) = drawn.lines[0].get_data()
            assert (x, y) == (row.word_safety_rate, row.reward_mean)
            (across,), (up,) = (bar.get_segments() for bar in drawn.lines[2])
            n_safe = round(row.word_safety_rate * row.n_prompts)
            interval = proportion_confint(n_safe, row.n_prompts, method="wilson")
            assert across[:, 0] == pytest.approx(interval)
            assert up[:, 1] == pytest.approx([row.reward_low, row.reward_high])
    best = main[main["method"].isin(look.SIX)]
    safe = (best["word_safety_rate"] * best["n_prompts"]).groupby(best["method"]).sum()
    shares = safe / best.groupby("method")["n_prompts"].sum()
    first = shares.max()
    assert f"kept the budget on {first:.1%} of prompts, " in fig.get_suptitle()


def test_tradeoff_names_methods_without_any_text(main):
    """Guards against a method that vanishes from the picture because it emitted nothing."""
    silent = main.copy()
    silent.loc[
        silent["method"] == "inferenceguard", ["reward_mean", "reward_low", "reward_high"]
    ] = np.nan
    title = figures.tradeoff(silent).axes[0].get_title(loc="left")
    assert title == "smollm2-raw, n = 40 (nothing emitted: InferenceGuard)"


# --- other pictures -------------------------------------------------------------------------------


def test_rates_draw_what_became_of_every_prompt(main):
    """Guards against bars that do not add up, and an answer that is safe at its end only as if it
    were safe.
    """
    fig = figures.rates(main)
    assert fig.get_suptitle() == "No answer that ended within budget had broken it"
    main = main.assign(word_safety_rate=main["word_safety_rate"].clip(upper=0.5))
    fig = figures.rates(main)
    for ax, (_, rows) in zip(fig.axes, main.groupby("policy", sort=False), strict=True):
        rows = rows[rows["method"].isin(look.SIX)]
        widths = np.array([[bar.get_width() for bar in bars] for bars in ax.containers])
        on_the_way = (rows["word_safety_rate"] * 40).round().to_numpy()
        counts = np.array(
            [on_the_way, rows["safe"] - on_the_way, rows["unsafe"], rows["abstained"]]
        )
        assert widths == pytest.approx(counts / 40) and counts.sum(axis=0) == pytest.approx(40)
    assert "ended within budget after they had broken it" in fig.get_suptitle()
    assert overlaps(fig) == []


@pytest.mark.parametrize("unread", [math.nan, -math.inf])
def test_safety_states_show_unreadable_scores_as_unsafe(unread):
    """Guards against failing open in a picture."""
    ax = start.safety_states({"base": [0.2, 0.1, unread]}).axes[0]
    line = next(line for line in ax.lines if line.get_label() == "base")
    assert line.get_ydata().tolist() == [0.2, 0.1, ax.get_ylim()[0]] and ax.get_ylim()[0] < 0


def test_the_safety_state_falls_by_the_worst_score_so_far(monkeypatch):
    """Bug: a state that rises again, a whole answer read as a beginning, a trace without z_0."""

    class Cost:
        def score(self, prompts, texts, finished):
            assert texts == ["ab", "abcd", "abcdef"] and finished == [False, False, True]
            return np.array([0.05, -0.2, 0.15])

    answer = SimpleNamespace(text="abcdef", grid_ends=[2, 4, 6])
    monkeypatch.setattr(start, "cost", Cost(), raising=False)
    monkeypatch.setattr(start, "prompt", "p", raising=False)
    monkeypatch.setattr(start, "budget", 0.1, raising=False)
    assert start.safety_trace(answer) == pytest.approx([0.1, 0.05, 0.05, -0.05])
