"""The data behind the pictures of a critic, and what is said where there is nothing to draw."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_hex

from igcore.errors import RunError
from igstudy.figures import critic as cf
from igstudy.figures.style import save
from igstudy.report.critics import COLUMNS as CRITIC_COLUMNS


def row(critic, policy="raw", position=8, auroc=0.7, low=0.6, high=0.75, features="m") -> dict:
    about = {"critic": critic, "policy": policy, "position": position, "features": features}
    return about | {"auroc_within_prompt": auroc, "within_low": low, "within_high": high}


def critics() -> pd.DataFrame:
    """Two policies; one critic is there for both, one for the second only."""
    gains = {"raw": 0.0, "chat": 0.1}
    rows = [
        row(name, policy, t, 0.6 + t / 100 + gains[policy], 0.5 + t / 100, 0.9)
        for policy, names in (("raw", ["m", "o"]), ("chat", ["m", "late"]))
        for name in names
        for t in (8, 16)
    ]
    rows += [
        row("none", policy, t, value, np.nan, np.nan, features)
        for policy in ("raw", "chat")
        for features, value in (("prompt-cost", 0.5), ("partial-cost", 0.58))
        for t in (8, 16)
    ]
    return pd.DataFrame(rows)


def lines(ax) -> dict:
    return {line.get_label(): line for line in ax.lines}


def bars(ax) -> dict:
    """By label: points (k, 2), ends of the whiskers (k, 2, 2) and colour."""
    found = {}
    for bar in ax.containers:
        points, _, (whiskers,) = bar.lines
        places = np.array(points.get_xydata()), np.array(whiskers.get_segments())
        found[bar.get_label()] = *places, to_hex(points.get_color())
    return found


def test_the_picture_can_be_saved_and_says_what_its_axes_are(tmp_path):
    """Guards against warnings while drawing, open pyplot figures, and a picture that nobody can
    read alone.
    """
    fig = cf.auroc_by_position(critics())
    save(fig, tmp_path / "critic")
    assert (tmp_path / "critic.png").stat().st_size > 1000
    assert plt.get_fignums() == []
    assert all(ax.get_xlabel() for ax in fig.axes) and fig.get_supylabel()


def test_intervals_need_not_hold_the_estimate():
    """Guards against a traceback by a whisker of length -1e-17, after a search of hours."""
    fig = cf.auroc_by_position(
        pd.DataFrame(
            [row("m", auroc=0.7, low=0.7 + 1e-9, high=0.8), row("o", low=np.nan, high=np.nan)]
        )
    )
    assert bars(fig.axes[0])["m"][1][:, :, 1] == pytest.approx(np.array([[0.7, 0.8]]))


def test_nothing_to_draw_is_said():
    """Guards against an empty picture that looks like a result."""
    with pytest.raises(RunError, match="there are no critics to draw; run notebook 20_train_cri"):
        cf.auroc_by_position(pd.DataFrame(columns=["critic", *CRITIC_COLUMNS]))


def test_auroc_draws_each_critic_of_a_policy():
    """Guards points of another policy or critic, whiskers of another interval, and colours that
    change from panel to panel.
    """
    table = critics()
    fig = cf.auroc_by_position(table)
    assert [ax.get_title() for ax in fig.axes] == ["raw", "chat"]
    seen = {}
    for ax, names in zip(fig.axes, (["m", "o"], ["m", "late"]), strict=True):
        drawn = bars(ax)
        assert list(drawn) == names
        for name, (points, whiskers, colour) in drawn.items():
            rows = table[(table["policy"] == ax.get_title()) & (table["critic"] == name)]
            assert points[:, 1].tolist() == rows["auroc_within_prompt"].tolist()
            # aside, so that whiskers do not hide one another
            assert np.abs(points[:, 0] - rows["position"]).max() < 0.5
            assert whiskers[:, :, 1] == pytest.approx(
                rows[["within_low", "within_high"]].to_numpy()
            )
            assert seen.setdefault(name, colour) == colour
        for features, (label, _) in cf.REFERENCES.items():
            want = table[(table["policy"] == ax.get_title()) & (table["features"] == features)]
            assert (
                lines(ax)[label].get_xydata().tolist()
                == want[["position", "auroc_within_prompt"]].to_numpy().tolist()
            )
        assert ax.get_xticks().tolist() == [8, 16]
    assert len(set(seen.values())) == 3
