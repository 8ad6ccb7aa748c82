"""How pictures look: names and looks of methods, bars, and the bytes of files."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import synthetic

from igcore.errors import RunError
from igstudy.figures import style as look
from igstudy.report import tables


@pytest.fixture(scope="module")
def main():
    return tables.main_table(synthetic.records(40))


def drawn(table):
    """Return a picture of a main table: bars of what became of the prompts, a panel per policy."""
    fig, panels = look.policy_panels(look.shown_methods(table) if len(table) else table, 2.5)
    for ax, policy, rows in panels:
        look.stacked_bars(ax, rows.set_index("label")[list(look.OUTCOMES)], look.OUTCOMES)
        ax.set_title(policy)
    look.legend_below(fig, 3)
    return fig


def test_a_method_without_a_style_is_drawn(main):
    """Guards a user's own method, which has no style: a look of its own, and no error."""
    fig = drawn(main.replace({"method": {"base": "mine"}}))
    assert "mine" in [label.get_text() for label in fig.axes[0].get_yticklabels()]
    assert look.style("mine") not in look.STYLE.values()


def test_nothing_to_draw_is_said(main):
    """Guards against an empty picture that looks like a result."""
    with pytest.raises(RunError, match="30_decode"):
        drawn(main.iloc[:0])


def test_two_saves_give_the_same_bytes(main, tmp_path):
    """Guards against dates and identifiers in committed pictures, and against open pyplot
    figures.
    """
    saved = []
    for folder in ("one", "two"):
        look.save(drawn(main), tmp_path / folder / "v1.5")
        saved.append((tmp_path / folder / "v1.5.png").read_bytes())
    assert saved[0] == saved[1] and saved[0].startswith(b"\x89PNG")
    assert b"Software" not in saved[0]
    assert plt.get_fignums() == []


def test_bars_are_the_shares_of_their_rows(main):
    """Guards against bars that do not add up, and the row of another method."""
    fig = drawn(main)
    for ax, (_, rows) in zip(fig.axes, main.groupby("policy", sort=False), strict=True):
        rows = rows[rows["method"].isin(look.SIX)]
        widths = np.array([[bar.get_width() for bar in bars] for bars in ax.containers])
        assert widths == pytest.approx(rows[list(look.OUTCOMES)].to_numpy().T / 40)
        names = [label.get_text() for label in ax.get_yticklabels()]
        assert names == [look.NAMES[method] for method in rows["method"]]


def test_whiskers_are_never_negative():
    """Bug: a percentile interval that does not hold its centre ended the picture."""
    centre, low, high = pd.Series([0.5, 0.5]), pd.Series([0.6, 0.4]), pd.Series([0.7, 0.8])
    assert look.whiskers(centre, low, high) == pytest.approx(np.array([[0, 0.1], [0.2, 0.3]]))
