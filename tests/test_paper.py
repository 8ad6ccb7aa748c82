"""Tests of the paper's tables: counts of rows, names, settings, and digits that must survive; and
of what says where each statement of the paper is here.
"""

import re
import shutil
from fnmatch import fnmatch
from fractions import Fraction as F
from functools import reduce
from pathlib import Path
from pkgutil import resolve_name

import nbformat
import numpy as np
import pandas as pd
import pytest
from scipy.stats import binomtest

from docs import fidelity
from igcore import METHODS, POLICIES
from igcore.errors import ParameterError
from igserve.yamlfile import read_yaml
from igstudy import paper
from igstudy.paper import counts, read
from igstudy.runs.paramfiles import defaults_of, kind_of


def cell(table, **settings):
    """The one row with these values."""
    rows = paper.reported(table)
    for name, value in settings.items():
        rows = rows[rows[name] == value]
    (found,) = rows.to_dict("records")
    return found


@pytest.mark.parametrize("table", paper.TABLES)
def test_every_row_has_names_that_exist_here(table):
    """Bug: a name of the paper's that no run has, so that its row would never stand beside ours."""
    rows = paper.reported(table)
    assert set(rows["method"]) <= set(METHODS) and set(rows["policy"]) <= set(POLICIES)
    assert set(rows["prompts"]) <= {"pku-saferlhf", "hex-phi", "hh-rlhf"}
    assert not rows.duplicated(paper.IDENTITY).any()


@pytest.mark.parametrize("table", paper.TABLES)
def test_a_setting_is_there_where_it_applies_and_nowhere_else(table):
    """Bug: a multiplier at a method that has none, or a block size at Best-of-N, whose answers here
    are one block.
    """
    for row in paper.reported(table).itertuples():
        swept = "lagrangian" in row.method
        assert swept or pd.isna(row.lagrange_multiplier)
        assert pd.notna(row.lagrange_multiplier) or not swept or table == "win_rates"
        blocks = row.method.startswith(("beam", "inferenceguard", "args"))
        assert blocks or pd.isna(row.block_size)
        assert pd.isna(row.keep) or row.method.startswith(("beam", "inferenceguard"))


def test_cells_are_those_of_the_paper():
    """Guards the columns: one row of each kind, read off the page."""
    critic = cell("main_alpaca_beaver", policy="alpaca-7b", method="inferenceguard-critic")
    numbers = ["reward_mean", "reward_std", "safety_rate", "seconds"]
    assert [critic[name] for name in numbers] == [6.5, 2.5, 0.9446, 15.07]
    settings = ["n_samples", "block_size", "keep", "tex_line"]
    assert [critic[name] for name in settings] == [128, 32, 32, 810]
    greedy = cell(
        "lambda_vicuna", prompts="hex-phi", method="best-of-n-lagrangian", n_samples=64,
        lagrange_multiplier=0,
    )  # fmt: skip
    assert (greedy["reward_mean"], greedy["safety_printed"], greedy["printed_as"]) == (
        6.97,
        "34.33",
        "Best-of-N Lag. N=64",
    )
    freq = cell(
        "lambda_alpaca_beaver", method="beam-lagrangian-freq", n_samples=256, lagrange_multiplier=10
    )
    assert (freq["safety_printed"], freq["keep"]) == ("52.25", 64)
    wide = cell("ndk", n_samples=256, block_size=64, keep=64)
    assert (wide["cost_mean"], wide["safety_rate"], wide["reward_mean"]) == (-1.05, 0.9934, 5.92)
    judged = cell("win_rates", method="best-of-n-lagrangian")
    assert (judged["n_samples"], judged["lagrange_multiplier"], judged["harmlessness_rate"]) == (
        500,
        5,
        0.606,
    )
    timed = cell("latency", method="inferenceguard", n_samples=64)
    assert (timed["generation_seconds"], timed["scoring_seconds"], timed["seconds"]) == (
        2.85,
        1.2,
        4.05,
    )


def test_reported_digits_survive():
    """Bug: 94.0 read as the number 94, which a hundred times as many denominators fit."""
    digits = paper.reported("main_llama")["safety_printed"]
    assert "94.0" in set(digits) and "52.7" in set(digits)
    assert set(paper.reported("latency")["safety_printed"]) >= {"89.60", "99.60"}


def test_an_unknown_table_is_one_clear_sentence():
    with pytest.raises(
        ParameterError,
        match="unknown table of the paper 'main_lama'; did you mean 'main_llama'\\? "
        "allowed: lambda",
    ):
        paper.reported("main_lama")


# --- notebook 10 shows something of every statement of the paper ----------------------------------


NOTEBOOK = Path(__file__).parents[1] / "notebooks/10_theory.ipynb"
# as the paper's LaTeX numbers them: a lemma counts with the theorems, a definition with its section
NUMBERED = [
    *("Definition 5.1", "A1", "A2", "Theorem 1(a)", "Theorem 1(b)", "Theorem 1(c)", "Theorem 2"),
    *("B1", "B2", "B3", "Lemma 3(a)", "Lemma 3(b)", "Lemma 3(c)"),
    *("Theorem 4(a)", "Theorem 4(b)", "B1'", "B4", "Theorem 5"),
]


def listed():
    """Return what the last cell of the stored notebook printed: statement -> its lines."""
    last = [c for c in nbformat.read(NOTEBOOK, as_version=4).cells if c.cell_type == "code"][-1]
    text = "".join(output.text for output in last.outputs)
    parts = re.findall(r"^(\S.*?) \((?:section|appendix) .*\n((?:    .*\n)*)", text, re.MULTILINE)
    return {name: lines.strip().splitlines() for name, lines in parts}, text


def test_every_statement_of_the_paper_has_a_check_that_holds():
    """Bug: assumptions and two parts of a lemma that no cell looked at."""
    found, text = listed()
    assert [name for name in found if not name.startswith("equation")] == NUMBERED
    assert list(found) == read("theory")["statement"].tolist()
    for name, lines in found.items():
        assert any(line.strip().startswith("check: ") for line in lines), name
    assert "NOT SHOWN" not in text and text.rstrip().endswith("without a check: none")


def test_what_may_fail_has_a_counterexample():
    """Guards conditions that are assumed, with nothing that shows why."""
    found, _ = listed()
    without = [
        name for name, lines in found.items() if not any("counterexample: " in x for x in lines)
    ]
    # what n at least makes true is shown below n* for Theorem 2
    assert set(without) <= {"equation 4", "Theorem 1(a)", "Theorem 1(b)"}


def test_the_reading_of_equation_6_is_shown_in_exact_numbers():
    """Bug: no page named the assumption that the printed reading breaks."""
    lines = " ".join(listed()[0]["equation 6"])
    assert "read as z >= 0" in lines and "is 9/10, 1/10 and 1/10" in lines
    assert "read as z > 0, it is 9/10, 9/10 and 1/10" in lines


# --- counts behind printed percentages ------------------------------------------------------------


def slow(percentage, n):
    """Whether some k/n prints so, rounded and cut off, in exact rationals."""
    unit = F(1, 10 ** len(percentage.partition(".")[2]))
    values = [F(100 * k, n) for k in range(n + 1)]
    return any(abs(v - F(percentage)) <= unit / 2 for v in values), any(
        0 <= v - F(percentage) < unit for v in values
    )


@pytest.mark.parametrize(
    "percentage",
    ["94.46", "98.15", "29.47", "94.3", "81", "12", "13", "100", "0", "0.01", "99.99", "62.50"],
)
def test_fits_agrees_with_trying_every_k(percentage):
    """Bug: a nearest k that is one off, a k above n, or halves (12.5 of eight) that go one way
    only.
    """
    rounded, cut = counts.fitting_counts(percentage, 60)
    assert [(r, c) for r, c in zip(rounded.tolist(), cut.tolist(), strict=True)] == [
        slow(percentage, n) for n in range(1, 61)
    ]


def test_hand_worked_percentages_at_759():
    """94.07 is 714/759; 745/759 = 98.1555... prints 98.15 only if cut off; 29.47 lies between
    223/759 and 224/759.
    """
    at = {
        p: tuple(bool(each[758]) for each in counts.fitting_counts(p, 759))
        for p in ("94.07", "98.15", "29.47")
    }
    assert at == {"94.07": (True, True), "98.15": (False, True), "29.47": (False, False)}


def test_percentages_that_only_759_fits():
    """94.07 is 714 of 759, 86.56 is 657, and so on; printed by trying every k of every n, no other
    n up to 1000 has all six.
    """
    safe = [714, 731, 657, 688, 735, 747]
    percentages = [f"{100 * k / 759:.2f}" for k in safe]
    fitting = [
        n
        for n in range(1, 1001)
        if {f"{100 * k / n:.2f}" for k in range(n + 1)} >= set(percentages)
    ]
    found = counts.implied(percentages, 1000)
    assert fitting == [759] and found["common"] == found["n"] == 759 and found["fits"] == 6


def test_chance_implies_nothing():
    """Bug: the best of thousands of denominators taken for a finding."""
    spread = np.random.default_rng(0).integers(0, 10_001, 40) / 100
    found = counts.implied([f"{p:.2f}" for p in spread], 1000)
    assert not found["implied"] and found["p"] > 0.05
    # whole numbers fit nearly everything
    assert not counts.implied(["81", "48", "96"], 1000)["implied"]


def test_a_small_chance_keeps_its_digits():
    """Bug: one minus a sum near one, which is 0 where many percentages fit."""
    percentages = [f"{100 * k / 300:.2f}" for k in range(1, 300, 7)]
    found = counts.implied(percentages, 1000)
    # all of them fit 300, each by chance in 3 of 100 cases, and 1000 denominators are tried
    assert found["n"] == 300 and found["p"] == pytest.approx(1000 * 0.03 ** len(percentages))


@pytest.mark.parametrize(
    ("safe", "others", "n"), [(5, 3, 6), (4, 4, 6), (6, 2, 6), (3, 1, 4), (0, 2, 5)]
)
def test_mcnemar_bounds_are_those_of_all_pairings(safe, others, n):
    """Against every number of prompts that are safe under both."""
    values = []
    for both in range(max(0, safe + others - n), min(safe, others) + 1):
        b, c = safe - both, others - both
        values.append(binomtest(b, b + c).pvalue if b + c else 1.0)
    assert counts.mcnemar_bounds(safe, others, n) == pytest.approx((min(values), max(values)))


def test_the_main_gap_stands_under_every_pairing():
    """717 and 669 of 759: between 2^-47 and 3.6e-5."""
    best, worst = counts.mcnemar_bounds(717, 669, 759)
    assert best == pytest.approx(2.0**-47) and worst == pytest.approx(3.57e-5, rel=0.01)


# --- the fidelity table: its code exists, its reasons are given, and params/paper keeps to it -----

ROOT = Path(__file__).parents[1]
ROWS = fidelity.fidelity().to_dict("records")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["printed"][:40])
def test_each_row_leads_to_code_and_gives_its_reason(row):
    """Bug: a function renamed, a deviation without a reason, a verdict of no kind."""
    assert (
        row["part"] and row["printed"] and row["where"] and row["verdict"] in fidelity.KINDS_OF_ROWS
    )
    assert row["why"] or row["verdict"] == "faithful"
    for name in row["code"].split():
        assert resolve_name(name) is not None
    assert bool(row["files"]) == bool(row["setting"])


def wrong_settings(params):
    """Return a sentence for every file of a folder that does not have the setting of its row.

    A row without a value says that its files leave the setting out, or set it to null.
    """
    found = []
    for row in ROWS:
        wanted = row["value"].split() or [""] * len(row["setting"].split())
        files = [path for path in sorted(params.glob("*.yaml")) if fnmatch(path.stem, row["files"])]
        if row["files"] and not files:
            found.append(f"{row['printed']}: no file of {params} is called {row['files']}")
        for path in files:
            given = read_yaml(path)
            whole = defaults_of(kind_of(path)) | given
            for name, value in zip(row["setting"].split(), wanted, strict=True):
                has = value_of(whole if value else given, name)
                if has != value:
                    found.append(f"{path}: {name} is {has or 'not set'}, not {value or 'left out'}")
    return found


def value_of(settings, name):
    """Return the value of a setting, whose parts a dot joins, as text, or nothing."""
    value = reduce(lambda part, key: (part or {}).get(key), name.split("."), settings)
    return "" if value is None else str(value)


def test_the_papers_files_keep_to_the_table():
    """Guards params/paper against what the table says of it, such as the networks for HEx-PHI."""
    assert wrong_settings(ROOT / "params/paper") == []


@pytest.mark.parametrize(
    ("file", "old", "new", "sentence"),
    [
        ("decode-main-vicuna-hex", "vicuna-hh/terminal", "vicuna-pku/terminal", "critic is runs"),
        ("decode-main-vicuna-hex", "vicuna-hh/value", "vicuna-pku/value",
         "value is runs/paper/critics/vicuna-pku/value, not runs/"),
        ("decode-main-alpaca-pku", "keep: 32", "keep: 32\ndiversity: paper", "not half"),
        ("decode-main-beaver-pku", "keep: 32", "keep: 32\nthreshold: 0.5", "threshold is 0.5, not"),
        ("critic-alpaca-pku", "limit: 2000", "limit: null", "limit is not set, not 2000"),
        ("critic-alpaca-pku", "batch_size: 8", "batch_size: 9", "critics.terminal.batch_size is 9"),
        ("critic-beaver-pku", "features: o,", "features: m,",
         "critics.terminal.features is m, not o"),
        ("critic-llama-pku", "lr: 1.0e-4", "lr: 1.0e-3", "value.lr is 0.001, not 0.0001"),
        ("decode-main-llama-pku", "keep: 32", "keep: 32\ntemperature: 0.7",
         "temperature is 0.7, not left out"),
    ],
)  # fmt: skip
def test_a_file_that_contradicts_the_table_is_named(tmp_path, file, old, new, sentence):
    """Guards the comparison itself: no row that every file would pass."""
    shutil.copytree(ROOT / "params/paper", tmp_path / "paper")
    path = tmp_path / f"paper/{file}.yaml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    found = wrong_settings(tmp_path / "paper")
    assert found and all(str(path) in said for said in found) and sentence in found[0]


def test_a_row_about_no_file_is_named(tmp_path):
    """Guards rows whose files were renamed, which nothing would contradict."""
    (tmp_path / "paper").mkdir()
    found = wrong_settings(tmp_path / "paper")
    assert len(found) == sum(bool(row["files"]) for row in ROWS)


# --- docs/paper-to-code.md leads from the paper to the code ---------------------------------------


PAGE = Path(__file__).parents[1] / "docs" / "paper-to-code.md"
ROW = re.compile(r"^\|[^|]*\| \[(?P<path>[^]]+)\.py\][^|]*\|(?P<names>[^|]*)\|", re.MULTILINE)
PLACE = re.compile(r"section|equation|algorithm 1|appendix", re.IGNORECASE)
FUNCTIONS = [
    f"{row['path'].replace('/', '.')}:{name}"
    for row in ROW.finditer(PAGE.read_text(encoding="utf-8"))
    for name in re.findall(r"`([^`]+)`", row["names"])
]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_object_is_a_function_that_cites_the_paper(name):
    """Bug: a function renamed or moved and a reader of the paper sent to nothing, or a docstring
    that does not say which part of the paper it is.
    """
    assert PLACE.search(resolve_name(name).__doc__)


def test_the_reading_guide_names_code_of_its_files():
    """Bug: docs/reading.md names a function that was renamed or moved to another file."""
    for section in PAGE.with_name("reading.md").read_text(encoding="utf-8").split("\n### ")[1:]:
        path = re.search(r"\]\(\.\./(\S+\.py)\)", section)[1]
        source = (PAGE.parents[1] / path).read_text(encoding="utf-8")
        for name in re.findall(r"`([\w.]+)`", section.partition("\n## ")[0]):
            assert name.endswith(".py") or re.search(rf"\b{name.split('.')[-1]}\b", source), name


def test_each_room_has_a_row():
    """Bug: the room of the paper's scorers, which no table of rooms named."""
    page, root = PAGE.read_text(encoding="utf-8"), PAGE.parents[1]
    for init in [*root.glob("igcore/*/__init__.py"), *root.glob("igstudy/*/__init__.py")]:
        assert f"| [{init.parent.relative_to(root).as_posix()}/](" in page
