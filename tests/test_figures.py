"""How pictures look: names and looks of methods, bars, and the bytes of files; the data behind
those of a critic; and notebook 50.
"""

import itertools
import json
from pathlib import Path

import matplotlib.pyplot as plt
import nbformat
import numpy as np
import pandas as pd
import pytest
import synthetic
from colorspacious import cspace_convert, deltaE
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from mockpolicy import LetterCost

from igcore.errors import ParameterError, RunError
from igcore.scorers import FunctionScorer
from igstudy.figures import critic, lessons
from igstudy.figures import style as look
from igstudy.figures.style import (
    HATCHES,
    MARKERS,
    OUTCOMES,
    PALETTE,
    SIX,
    STYLE,
    stacked_bars,
    style,
    unless_missing,
)
from igstudy.report import statistics as metrics
from igstudy.report import tables
from igstudy.report.critics import COLUMNS as CRITIC_COLUMNS


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


# --- colours in grey, and with two of three cones -------------------------------------------------


APART = 10  # of 100 steps of lightness: less is the same grey on paper
DISTINCT = 15  # in CAM02-UCS: less looks like a shade of the same colour
# what eyes without one kind of cones see
MISSING = {
    kind: {"name": "sRGB1+CVD", "cvd_type": f"{kind}omaly", "severity": 100}
    for kind in ("protan", "deuteran")
}


def seen(colour: str, vision: str) -> np.ndarray:
    """Return a colour as it is seen, in sRGB."""
    return cspace_convert(to_rgb(colour), MISSING.get(vision, "sRGB1"), "sRGB1")


def lab(colour: str, vision: str) -> np.ndarray:
    """Return lightness, a* and b* (CIE 1976) of a colour as seen; of grey, lightness alone."""
    colours = cspace_convert(seen(colour, vision), "sRGB1", "CIELab")
    return colours if vision != "grey" else colours * [1, 0, 0]


def alike(looks: dict, vision: str) -> list[tuple]:
    """Return the pairs of looks (colour, marker or hatch) that cannot be told apart."""
    return [
        (one, two)
        for (one, (a, mark)), (two, (b, other)) in itertools.combinations(looks.items(), 2)
        if mark == other and np.linalg.norm(lab(a, vision) - lab(b, vision)) < APART
    ]


def bars(colours: dict[str, str]) -> dict:
    return {name: (colour, HATCHES.get(colour)) for name, colour in colours.items()}


TOGETHER = {  # looks of one picture
    "six methods": {name: STYLE[name] for name in SIX},
    "all methods": STYLE,
    "critics": {n: (critic.look_of(n)["color"], critic.look_of(n)["marker"]) for n in range(8)},
    "beams": {k: (PALETTE[k], MARKERS[k]) for k in range(3)},
    "outcomes": bars(OUTCOMES),
}


@pytest.mark.parametrize("vision", ["full", "grey", *MISSING])
@pytest.mark.parametrize("picture", TOGETHER)
def test_looks_of_one_picture_can_be_told_apart(picture, vision):
    """Bug: two lines or bars that are one on paper or to one man in twelve: neither another
    marker or hatch, nor another lightness.
    """
    assert alike(TOGETHER[picture], vision) == []


@pytest.mark.parametrize("vision", ["full", *MISSING])
def test_no_method_has_the_colour_of_over_budget_and_no_rival_that_of_ours(vision):
    """Bug: InferenceGuard was orange, and so was "unsafe": a good line looked like a bad one."""
    colours = {name: seen(colour, vision) for name, (colour, _) in STYLE.items()}
    colours["a user's own"] = seen(style("mine")[0], vision)
    ours, unsafe = colours.pop("inferenceguard"), seen(OUTCOMES["unsafe"], vision)
    assert deltaE(ours, unsafe) > DISTINCT
    for colour in colours.values():
        assert min(deltaE(ours, colour), deltaE(unsafe, colour)) > DISTINCT


def test_bars_get_the_hatch_of_their_colour():
    """Bug: a hatch on the bar of another outcome, or under its number."""
    (ax,) = Figure().subplots(1, 1, squeeze=False).flat
    counts = pd.DataFrame({name: [3, 4] for name in OUTCOMES}, index=["one", "two"])
    stacked_bars(ax, counts, OUTCOMES)
    found = [bar.get_hatch() for bars in ax.containers for bar in bars]
    assert found == [None, None, "...", "...", "///", "///"]
    assert all(text.get_path_effects() for text in ax.texts)


# --- the pictures of a critic ---------------------------------------------------------------------


def row(name, policy="raw", position=8, auroc=0.7, low=0.6, high=0.75, features="m") -> dict:
    about = {"critic": name, "policy": policy, "position": position, "features": features}
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


def errors_in(ax) -> dict:
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
    fig = critic.auroc_by_position(critics())
    look.save(fig, tmp_path / "critic")
    assert (tmp_path / "critic.png").stat().st_size > 1000
    assert plt.get_fignums() == []
    assert all(ax.get_xlabel() for ax in fig.axes) and fig.get_supylabel()


def test_intervals_need_not_hold_the_estimate():
    """Guards against a traceback by a whisker of length -1e-17, after a search of hours."""
    fig = critic.auroc_by_position(
        pd.DataFrame(
            [row("m", auroc=0.7, low=0.7 + 1e-9, high=0.8), row("o", low=np.nan, high=np.nan)]
        )
    )
    assert errors_in(fig.axes[0])["m"][1][:, :, 1] == pytest.approx(np.array([[0.7, 0.8]]))


def test_no_critic_to_draw_is_said():
    """Guards against an empty picture that looks like a result."""
    with pytest.raises(RunError, match="there are no critics to draw; run notebook 20_train_cri"):
        critic.auroc_by_position(pd.DataFrame(columns=["critic", *CRITIC_COLUMNS]))


def test_auroc_draws_each_critic_of_a_policy():
    """Guards points of another policy or critic, whiskers of another interval, and colours that
    change from panel to panel.
    """
    table = critics()
    fig = critic.auroc_by_position(table)
    assert [ax.get_title() for ax in fig.axes] == ["raw", "chat"]
    seen = {}
    for ax, names in zip(fig.axes, (["m", "o"], ["m", "late"]), strict=True):
        drawn = errors_in(ax)
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
        for features, (label, _) in critic.REFERENCES.items():
            want = table[(table["policy"] == ax.get_title()) & (table["features"] == features)]
            assert (
                lines(ax)[label].get_xydata().tolist()
                == want[["position", "auroc_within_prompt"]].to_numpy().tolist()
            )
        assert ax.get_xticks().tolist() == [8, 16]
    assert len(set(seen.values())) == 3


# --- the notebooks to learn from ------------------------------------------------------------------


def test_states_at_words_fall_at_the_word_that_breaks_the_rule():
    """Guards the picture of z: the cost of each beginning, and the whole answer as finished."""
    asked = []

    def digits(prompt, response, finished):
        asked.append(finished)
        return sum(c.isdigit() for c in response)

    takes = {text: text for text in ("prompt", "response", "finished")}
    cost = FunctionScorer(digits, "digits", "higher is worse", takes)
    states = lessons.states_at_words(cost, "how long", "for 7 or 8.", 1)
    assert states.tolist() == [1, 1, 0, 0, -1, -1]
    assert asked == [False, False, False, False, True]


def test_a_dot_is_orange_where_a_function_jumps_up():
    """Guards the picture of both readings of z: only the value at the point differs."""
    pictures = {"closed": lambda d: int(d < 1), "strict": lambda d: int(d <= 1)}
    found = lessons.draw_jumps([1.0], pictures, xlabel="d", ylabel="V")
    dots = [ax.lines[-1].get_color() for ax in found.axes]
    assert dots == [OUTCOMES["safe"], OUTCOMES["unsafe"]]


def test_texts_beside_each_other_are_escaped():
    """Guards a page: an answer may hold HTML."""
    page = lessons.side_by_side({"plain": "<b>"})
    assert page.count("&lt;b&gt;") == 1
    assert "<b>" not in page


# --- notebook 50, cell by cell without a kernel: on an empty folder, and on imaginary runs --------

ROOT = Path(__file__).parents[1]
SECTIONS = "tradeoff distributions critic".split()
CRITICS = {"critic"}
METHODS = ("base", "best-of-n", "best-of-n-lagrangian", "inferenceguard")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name in ("params", "notebooks", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(metrics, "RESAMPLES", 99)
    monkeypatch.setattr("igcore.load_scorer", lambda name: LetterCost(lambda text: 0.0))
    return tmp_path


def executed(folder, monkeypatch, **parameters) -> tuple[set[str], int]:
    """Run the notebook; return the names of the pictures that it wrote, and how many figures it
    showed.
    """
    written, shown = set(), []
    monkeypatch.setattr(
        "igstudy.figures.style.save",
        lambda fig, stem: written.add(Path(stem).relative_to(folder / "figures").as_posix()),
    )
    monkeypatch.setattr("IPython.display.display", shown.append)
    notebook = nbformat.read(ROOT / "notebooks/50_figures.ipynb", as_version=4)
    first, *rest = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    given = "\n".join([first, *(f"{name} = {value!r}" for name, value in parameters.items())])
    namespace = {"In": [given]}
    for source in [given, *rest]:
        exec("\n".join(text for text in source.splitlines() if not text.startswith("%")), namespace)
    return written, len(shown)


def decoded(folder, name, records, finished=True) -> None:
    target = folder / "runs/x" / name
    target.mkdir(parents=True)
    (target / "params.json").write_text(json.dumps({"run": name}))
    lines = [
        line | {"response": f"{line['method']} says hello"} for line in records.to_dict("records")
    ]
    (target / "responses.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if finished:
        (target / "manifest.json").write_text("{}")


def imaginary(**fields) -> pd.DataFrame:
    lines = synthetic.records(6, METHODS, {"smollm2-raw": (1.0, 0.0)}).assign(**fields)
    more = {
        "finals": [[[0.5, 0.1 * k] for k in range(4)]] * len(lines),
        "strict": False,
        "cost_digest": "v2",
    }
    lines = lines.assign(**more, lagrange_multiplier=5.0, n_samples=4)
    return lines.astype(object).where(lines.notna(), None)


def said(capsys) -> list[str]:
    return [text for text in capsys.readouterr().out.splitlines() if text]


@pytest.mark.parametrize("profile", ["x", "small"])
def test_without_any_run_every_section_says_so(profile, folder, monkeypatch, capsys):
    """Bug: a traceback in the first cell, where nothing has been decoded yet."""
    written, shown = executed(folder, monkeypatch, profile=profile, figures="figures")
    found = said(capsys)
    assert not written and not shown
    assert len(found) == len(SECTIONS) and all(text.startswith("not run: ") for text in found)
    assert all(any(what in text for what in ("30_decode", "20_train_critic")) for text in found)


def test_runs_that_have_not_finished_are_named_and_the_others_drawn(folder, monkeypatch, capsys):
    """Bug: one stopped run kept every figure from being drawn."""
    decoded(folder, "decode-a", imaginary())
    decoded(folder, "decode-b", imaginary(policy="smollm2-chat"), finished=False)
    written, shown = executed(folder, monkeypatch, profile="x", figures="figures")
    found = said(capsys)
    # and the answers of the one policy, side by side
    assert written == set(SECTIONS) - CRITICS and shown == len(written) + 1
    assert [text for text in found if "decode-b has not finished" in text][0].startswith(
        "left out: "
    )
    assert sum(text.startswith("not run: ") for text in found) == 1


def test_only_what_is_missing_is_forgiven(capsys):
    """Bug: a notebook that goes on after an error which no run would mend."""
    with unless_missing():
        raise RunError("there is nothing; run it first")
    assert capsys.readouterr().out == "not run: there is nothing; run it first\n"
    for error in (ParameterError("mistyped"), KeyError("column")):
        with pytest.raises(type(error)), unless_missing():
            raise error
