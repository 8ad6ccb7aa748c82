"""The data behind the pictures of a critic, and what is said where there is nothing to draw."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_hex
from notebook_code import notebook_code
from pictures import boxes, hidden, outside

from igcore.errors import RunError
from igcore.figures import critic as cf
from igcore.report.critics import CALIBRATION
from igcore.report.critics import COLUMNS as CRITIC_COLUMNS
from igcore.report.pictures import save

training, figures = notebook_code("20_train_critic"), notebook_code("50_figures")
ablations = notebook_code("45_ablations")

HISTORIES = {
    "m": [
        {"epoch": e, "learn_loss": 1 / e, "check_loss": check}
        for e, check in enumerate([0.9, 0.6, 0.7, 0.8], start=1)
    ],
    "o": [
        {"epoch": e, "learn_loss": 2 / e, "check_loss": check}
        for e, check in enumerate([0.5, 0.55], start=1)
    ],
}


def row(critic, policy="raw", position=8, auroc=0.7, low=0.6, high=0.75, features="m") -> dict:
    return {
        "critic": critic,
        "policy": policy,
        "position": position,
        "features": features,
        "auroc_within_prompt": auroc,
        "within_low": low,
        "within_high": high,
    }


def critics() -> pd.DataFrame:
    """Two policies; one critic is there for both, one for the second only."""
    rows = [
        row(
            name,
            policy,
            t,
            auroc=0.6 + t / 100 + 0.1 * (policy == "chat"),
            low=0.5 + t / 100,
            high=0.9,
        )
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


def difference(
    n=8, arm="critic", reference="shuffled", measure="reward", value=0.1, low=0.05, high=0.2
) -> dict:
    numbers = {
        "n_pairs": 4,
        "n_prompts": 4,
        "mean_arm": value,
        "mean_reference": 0.0,
        "low_one_sided": low,
    }
    return {
        "n_samples": n,
        "arm": arm,
        "reference": reference,
        "measure": measure,
        "difference": value,
        "low": low,
        "high": high,
    } | numbers


def differences() -> pd.DataFrame:
    return pd.DataFrame(
        [
            difference(8, measure="safe_finals"),
            difference(8),
            difference(8, "inferenceguard", "best-of-n-augmented", value=-0.1, low=-0.3, high=0.1),
            difference(
                32, "inferenceguard", "best-of-n-augmented", value=-0.2, low=-0.2, high=-0.2
            ),
        ],
    )


def bins() -> pd.DataFrame:
    """Two policies and positions; "o" is there for the second policy only, and one bin has too few
    prompts.
    """
    rows = [
        (name, policy, t, p, p + 0.05, p - 0.1, p + 0.08, 20 if p > 0.3 else 4)
        for policy, names in (("raw", ["m"]), ("chat", ["m", "o"]))
        for name in names
        for t in (8, 16)
        for p in (0.25, 0.55, 0.9)
    ]
    return pd.DataFrame(
        rows, columns="critic policy position probability safe low high n_prompts".split()
    )


PICTURES = {
    "training_curves": lambda: training.training_curves(HISTORIES),
    "reliability_by_position": lambda: figures.reliability_by_position(bins()),
    "auroc_by_position": lambda: cf.auroc_by_position(critics()),
    "search_differences": lambda: ablations.search_differences(differences()),
}


def lines(ax) -> dict:
    return {line.get_label(): line for line in ax.lines}


def bars(ax) -> dict:
    """By label: points (k, 2), ends of the whiskers (k, 2, 2) and colour."""
    found = {}
    for bar in ax.containers:
        points, _, (whiskers,) = bar.lines
        found[bar.get_label()] = (
            np.array(points.get_xydata()),
            np.array(whiskers.get_segments()),
            to_hex(points.get_color()),
        )
    return found


def legend(fig) -> list[str]:
    return [text.get_text() for text in fig.legends[0].get_texts()]


@pytest.mark.parametrize("name", PICTURES)
def test_every_picture_can_be_saved_and_says_what_its_axes_are(name, tmp_path):
    """Guards against warnings while drawing, open pyplot figures, and a picture that nobody can
    read alone.
    """
    fig = PICTURES[name]()
    paths = save(fig, tmp_path / name, {})
    assert len(paths) == 3 and all(path.stat().st_size > 1000 for path in paths[:2])
    assert plt.get_fignums() == []
    assert fig.get_supxlabel() or all(ax.get_xlabel() for ax in fig.axes)
    assert fig.axes[0].get_ylabel() or fig.axes[0].get_yticklabels()


def test_reliability_draws_the_bins_of_each_critic():
    """Bug: dots of another policy or position, whiskers of another interval, a dot of a handful of
    prompts.
    """
    table = bins()
    fig = figures.reliability_by_position(table)
    cells = [(policy, t) for policy in ("raw", "chat") for t in (8, 16)]
    assert [ax.get_title() for ax in fig.axes] == ["8 tokens", "16 tokens", "", ""]
    assert [ax.get_ylabel() for ax in fig.axes] == ["raw", "", "chat", ""]
    for ax, (policy, t) in zip(fig.axes, cells, strict=True):
        drawn = bars(ax)
        assert list(drawn) == (["m"] if policy == "raw" else ["m", "o"])
        for name, (points, whiskers, _) in drawn.items():
            rows = table[
                (table["policy"] == policy) & (table["position"] == t) & (table["critic"] == name)
            ].iloc[1:]
            assert points == pytest.approx(rows[["probability", "safe"]].to_numpy())
            assert whiskers[:, :, 1] == pytest.approx(rows[["low", "high"]].to_numpy())
        assert lines(ax)["calibrated"].get_xydata().tolist() == [[0, 0], [1, 1]]
    assert legend(fig) == ["calibrated", "m", "o"]
    found = boxes(fig)
    assert hidden(found) == [] and outside(fig, found) == []


def test_intervals_need_not_hold_the_estimate():
    """Guards against a traceback by a whisker of length -1e-17, after a search of hours."""
    fig = cf.auroc_by_position(
        pd.DataFrame(
            [row("m", auroc=0.7, low=0.7 + 1e-9, high=0.8), row("o", low=np.nan, high=np.nan)]
        )
    )
    assert bars(fig.axes[0])["m"][1][:, :, 1] == pytest.approx(np.array([[0.7, 0.8]]))
    fig = ablations.search_differences(
        pd.DataFrame([difference(value=0.3, low=0.1, high=0.3 - 1e-9)])
    )
    assert bars(fig.axes[0])["N = 8"][1][:, :, 0] == pytest.approx(np.array([[0.1, 0.3]]))
    ablations.search_differences(
        pd.DataFrame([difference(low=np.nan, high=np.nan)])
    ).draw_without_rendering()  # one prompt alone


def test_differences_draw_every_pair_and_size():
    """Guards a pair in the row of another, whiskers of another interval, and a measure of one pair
    alone.
    """
    fig = ablations.search_differences(differences())
    finals, reward = fig.axes
    titles = ["safe complete candidates, n = 4", "reward, n = 4"]
    assert [finals.get_title(), reward.get_title()] == titles
    names = [text.get_text() for text in finals.get_yticklabels()]
    assert (
        names == ["critic\nover shuffled critic", "InferenceGuard\nover Best-of-N"]
        and finals.yaxis_inverted()
    )
    few, many = (bars(reward)[f"N = {n}"] for n in (8, 32))
    assert (
        few[0][:, 0].tolist() == [0.1, -0.1]
        and many[0][:, 0].tolist() == [-0.2]
        and few[2] != many[2]
    )
    assert (
        np.round(few[0][:, 1]).tolist() == [0, 1]
        and np.round(many[0][:, 1]).tolist() == [1]
        and few[0][1, 1] != many[0][0, 1]
    )
    assert few[1][:, :, 0] == pytest.approx(np.array([[0.05, 0.2], [-0.3, 0.1]]))
    assert (
        len(bars(finals)["N = 8"][0]) == 1
        and len(bars(finals)["N = 32"][0]) == 0
        and legend(fig) == ["N = 8", "N = 32"]
    )


@pytest.mark.parametrize(
    ("draw", "columns", "sentence"),
    [
        (
            cf.auroc_by_position,
            ["critic", *CRITIC_COLUMNS],
            "there are no critics to draw; run notebook 20_train_critic first",
        ),
        (
            figures.reliability_by_position,
            CALIBRATION,
            "there is no reliability to draw; run notebook 20_train_critic first",
        ),
    ],
)
def test_nothing_to_draw_is_said(draw, columns, sentence):
    """Guards against an empty picture that looks like a result, and against a traceback of the
    picture library.
    """
    with pytest.raises(RunError, match=sentence):
        draw(pd.DataFrame(columns=columns))


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
            assert (
                np.abs(points[:, 0] - rows["position"]).max() < 0.5
            )  # aside, so that whiskers do not hide one another
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
