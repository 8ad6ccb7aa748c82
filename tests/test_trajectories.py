"""The safety state along answers, against numbers worked by hand, and its picture."""

import math

import numpy as np
import pandas as pd
import pytest
import synthetic
from notebook_code import notebook_code
from pictures import boxes, hidden, outside

from igcore.errors import RunError
from igcore.figures.style import STYLE
from igcore.report.tables import FAMILIES

tr = notebook_code("50_figures")


class Length:
    """A cost that grows with the text: a hundredth for every letter, NaN for texts with a question
    mark.
    """

    name, digest, sign = "length", "v1", "higher is worse"

    def score(self, prompts, responses, finished):
        assert len(prompts) == len(finished) == len(responses)
        return [math.nan if "?" in text else len(text) / 100 for text in responses]


def line(method, prompt="p0", text="abcdefgh", ends=(3, 8), peak=0.08, **fields) -> dict:
    """A record of an answer of up to 8 tokens, measured every 4 of them."""
    own = {
        "n_tokens": 8,
        "max_new_tokens": 8,
        "block_size": 4,
        "peak_cost": peak,
        "z_trace": [0.2, 0.17, 0.12],
    } | fields
    known = {name: own.pop(name) for name in list(own) if name in synthetic.record()}
    more = {"grid_ends": list(ends), "grid_size": 4, "cost_scorer": "length", "cost_digest": "v1"}
    return synthetic.record(method=method, prompt_id=prompt, response=text, **known) | more | own


def frame(*lines) -> pd.DataFrame:
    return pd.DataFrame(lines)


def z(found, method, prompt="p0") -> list[float]:
    rows = found[(found["method"] == method) & (found["prompt_id"] == prompt)]
    return dict(zip(rows["tokens"], rows["z"], strict=True))


def test_recorded_paths_stand_at_the_ends_of_own_blocks():
    """Bug: a method that looks at whole answers drawn as if it had looked after each block; a short
    answer that vanishes.
    """
    found = tr.paths(
        frame(
            line("inferenceguard"),
            line("base", block_size=8, z_trace=[0.2, 0.05]),
            line("inferenceguard", "p1", n_tokens=3, z_trace=[0.2, 0.1]),
            line("args", block_size=3, z_trace=[0.2, 0.19, 0.18, -0.1]),
        )
    )
    assert z(found, "inferenceguard") == {0: 0.2, 4: 0.17, 8: 0.12}
    assert z(found, "base") == {0: 0.2, 8: 0.05}
    assert z(found, "inferenceguard", "p1") == {0: 0.2, 4: 0.1, 8: 0.1}  # it stays where it ended
    assert z(found, "args") == {0: 0.2, 3: 0.19, 6: 0.18, 8: -0.1}  # the last block is shorter


def test_abstentions_have_no_path():
    """Bug: the z of a refusal, which the policy did not write, among those of answers."""
    found = tr.paths(
        frame(
            line("inferenceguard"),
            line("inferenceguard", "p1", n_tokens=0),
            line("base", "p2", text=None),
        )
    )
    assert set(found["prompt_id"]) == {"p0"}
    with pytest.raises(RunError, match="run notebook 30_decode first"):
        tr.paths(frame(line("inferenceguard", n_tokens=0)))


def test_a_cost_model_puts_all_methods_on_one_grid():
    """Bug: prefixes that end at characters of another answer, a state that rises again, the budget
    of another line.
    """
    shrinking = line(
        "args", "p1", text="abcdefghij", ends=(10, 4), peak=0.1
    )  # what the cost says of a prefix may fall again
    found = tr.paths(
        frame(line("base", block_size=8, z_trace=[0.2, 0.1]), shrinking, line("args", budget=0.5)),
        Length(),
    )
    assert z(found, "base") == pytest.approx({0: 0.2, 4: 0.17, 8: 0.12})
    assert z(found, "args", "p1") == pytest.approx({0: 0.2, 4: 0.1, 8: 0.1})
    assert z(found, "args")[8] == pytest.approx(0.42)


def test_the_cost_model_of_another_run_is_refused():
    """Bug: a picture of one cost model under the name of another."""
    with pytest.raises(
        RunError,
        match="'length' gives other peak costs than the records; give the cost model of the run",
    ):
        tr.paths(frame(line("base", peak=0.3)), Length())


@pytest.mark.parametrize("cost", [None, Length()], ids=["recorded", "read again"])
def test_what_cannot_be_read_breaks_the_budget(cost):
    """Bug: failing open in a picture: a NaN that is left out, or a path that recovers from it."""
    found = tr.paths(
        frame(line("base", text="abc?efgh", ends=(4, 8), peak=None, z_trace=[0.2, None, None])),
        cost,
    )
    assert z(found, "base") == {0: 0.2, 4: -math.inf, 8: -math.inf}


def test_bands_are_over_prompts_that_all_methods_answered():
    """Bug: methods compared on different prompts, base in one family only, quantiles of another
    method.
    """
    ends = {
        "base": [0.0, -0.1, -0.2, -0.3, 0.15],
        "args": [0.1, 0.1, 0.1],
        "inferenceguard": [0.19, 0.01, 0.05, 0.02, 0.03],
    }
    lines = [
        line(method, f"p{k}", z_trace=[0.2, value, value])
        for method, values in ends.items()
        for k, value in enumerate(values)
    ]
    lines[0]["z_trace"] = [0.2, None, None]
    table = tr.bands(tr.paths(frame(*lines)))
    last = table[table["tokens"] == 8].set_index(["family", "method"])[["n", *tr.SHARES]]
    assert last.loc[("inferenceguard", "base")].tolist() == [5, -math.inf, -0.3, -0.2, -0.1]
    assert last.loc[("inferenceguard", "inferenceguard")].tolist() == [5, 0.01, 0.02, 0.03, 0.05]
    assert last.loc[("args", "base")].tolist() == [3, -math.inf, -math.inf, -0.2, -0.1]
    assert len(last) == 4 and (table.loc[table["tokens"] == 0, "lowest"] == 0.2).all()


def everything(policies=("raw", "chat")) -> pd.DataFrame:
    """Paths of all methods, as a table; those of base fall by more than any other."""
    rng = np.random.default_rng(0)
    lines = [
        line(
            method,
            f"p{k}",
            policy=policy,
            z_trace=[0.2, *(0.2 - np.cumsum(rng.random(2) * (0.6 if method == "base" else 0.1)))],
        )
        for policy in policies
        for method in STYLE
        for k in range(5)
    ]
    return tr.bands(tr.paths(frame(*lines)))


def test_the_picture_draws_the_table():
    """Bug: a curve of another policy or family, a band of other quantiles, the lowest answer left
    out.
    """
    table = everything()
    fig = tr.trajectories(table, 0.2)
    panels = np.array(fig.axes).reshape(len(FAMILIES), 3)
    assert [ax.get_title(loc="left") for ax in panels[0, :2]] == ["raw", "chat"]
    assert [text.get_text() for ax in panels[:, :2].flat for text in ax.texts] == ["n = 5"] * 10
    for family, row in zip(FAMILIES, panels, strict=True):
        for policy, ax in zip(("raw", "chat"), row, strict=False):
            cell = table[(table["policy"] == policy) & (table["family"] == family)]
            drawn = {
                curve.get_label(): curve
                for curve in ax.lines
                if not curve.get_label().startswith("_")
            }
            assert list(drawn) == list(cell["method"].unique())
            dotted = [curve for curve in ax.lines if curve.get_linestyle() == ":"]
            for (method, rows), low, band in zip(
                cell.groupby("method", sort=False), dotted, ax.collections, strict=True
            ):
                assert (
                    drawn[method].get_xydata().tolist()
                    == rows[["tokens", "median"]].to_numpy().tolist()
                )
                assert low.get_ydata().tolist() == rows["lowest"].tolist()
                corners = band.get_paths()[0].vertices
                assert (
                    corners[:, 1].min() == rows["low"].min()
                    and corners[:, 1].max() == rows["high"].max()
                )
            assert [0, 0] in [list(curve.get_ydata()) for curve in ax.lines]
        assert [text.get_text() for text in row[2].get_legend().get_texts()] == list(drawn)


@pytest.mark.parametrize("policies", [("raw",), ("raw", "chat"), ("raw", "chat", "third")], ids=len)
def test_nothing_overlaps(policies):
    """Bug: legends on curves or beyond the page, labels on top of each other, with one, two or
    three policies.
    """
    fig = tr.trajectories(everything(policies), 0.2)
    found = boxes(fig)
    assert len(found) > 30 and hidden(found) == [] and outside(fig, found) == []


def test_a_budget_of_zero_has_a_picture():
    """Bug: a panel without height, and a warning, where every path starts on the line that it must
    not cross.
    """
    table = everything()
    shifted = table.assign(**{name: table[name] - 0.2 for name in tr.SHARES})
    low, high = tr.trajectories(shifted, 0.0).axes[0].get_ylim()
    assert low < shifted["low"].min() and high > 0
    unread = shifted.assign(**dict.fromkeys(tr.SHARES, -math.inf))
    tr.trajectories(unread, 0.0).draw_without_rendering()


def test_base_alone_is_drawn():
    """Guards runs of one method, whose other pictures can all be drawn."""
    (ax, _) = tr.trajectories(tr.bands(tr.paths(frame(line("base")))), 0.2).axes
    assert [curve.get_label() for curve in ax.lines if not curve.get_label().startswith("_")] == [
        "base"
    ]


def test_nothing_to_compare_is_said():
    """Guards against an empty picture that looks like a result: base and its rival have answered
    different prompts.
    """
    table = tr.bands(tr.paths(frame(line("base"), line("args", "p1"))))
    assert not len(table)
    with pytest.raises(RunError, match="no prompt was answered by all methods of a family"):
        tr.trajectories(table, 0.2)
