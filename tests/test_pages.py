"""Tests of the pages: the command that writes their tables, what pages of docs conclude, and the
site. A conclusion is bound to the cells that it follows from: a test that fails after new tables
names a sentence to correct.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from docs import pages, site
from igcore.errors import RunError
from igstudy.prompts import load_prompts
from igstudy.report.claims import load_claims
from igstudy.runs.paramfiles import ParamFiles, defaults_of

ROOT = Path(__file__).parents[1]
PAGE = "before\n<!-- table main -->\nof the last run\n<!-- end -->\nafter\n"


def with_table(folder, text):
    path = folder / "figures/tables/main.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def test_a_block_is_written_and_nothing_else(tmp_path):
    """Guards against lost prose, and a block that grows each time it is written."""
    page = PAGE
    for text in ("| \\1 old |", "| \\1 new |\n"):
        with_table(tmp_path, text)
        page = pages.filled(page, tmp_path)
    assert page == "before\n<!-- table main -->\n\n| \\1 new |\n\n<!-- end -->\nafter\n"
    assert pages.filled("no block\n<!-- output -->\n<!-- end -->\n", tmp_path).count("\n") == 3


def test_two_blocks_keep_the_text_between_them(tmp_path):
    """Bug: everything from the first block to the end of the last one was replaced."""
    with_table(tmp_path, "| new |")
    page = pages.filled(PAGE + PAGE, tmp_path)
    assert page.count("| new |") == page.count("before") == page.count("after") == 2


def test_statements_stand_in_the_page(tmp_path):
    """Guards a block that another writing would change."""
    written = pages.filled("<!-- fidelity paper -->\n<!-- end -->\n", tmp_path)
    assert written.count("| faithful") > 10 and pages.filled(written, tmp_path) == written


def test_verdicts_are_those_of_the_claims_that_stand_there(tmp_path):
    """Guards a page that shows verdicts on other claims than those of the file."""
    path = tmp_path / "params/ci/claims.yaml"
    path.parent.mkdir(parents=True)
    shutil.copy(ROOT / "params/ci/claims.yaml", path)
    block = "<!-- claims ci -->\n<!-- end -->\n"
    with pytest.raises(RunError, match="claims.csv is not there; run `make reproduce`"):
        pages.filled(block, tmp_path)
    row = dict(outcome="reward", arm="ours", reference="theirs", difference=0.05, low=0.01)
    row |= dict(high=0.09, n_pairs=12, p_holm=0.01, claims_sha256=load_claims(path).digest)
    row |= dict(regime="hard", better="higher", value=0.25, reference_value=0.2)
    row |= dict(sentence="It is safest.", falsified="It is not.")
    rows = [row | {"claim": "one", "verdict": "held"}, row | {"claim": "two", "verdict": "failed"}]
    (tmp_path / "figures/tables").mkdir(parents=True)
    pd.DataFrame(rows).to_csv(tmp_path / "figures/tables/claims.csv")
    written = pages.filled(block, tmp_path)
    cells = [line.split("|")[1:-1] for line in written.splitlines() if "hard" in line]
    found = ["hard", "reward", "ours: .250", "theirs: .200", "+.050 [.010, .090]"]
    assert [[cell.strip() for cell in row] for row in cells] == [
        ["one", *found, "held"],
        ["two", *found, "failed: It is not."],
    ]
    assert "1 of 2 claims held." in written
    path.write_text(path.read_text() + "# edited")
    with pytest.raises(RunError, match="claims.csv does not decide .*claims.yaml; run `make rep"):
        pages.filled(written, tmp_path)


def test_the_arms_of_searches_are_those_of_one_regime_and_length(tmp_path):
    """Bug: rows of another length or cost, an arm without a name, or without numbers because of its
    name, or shares of another column.
    """
    shares = dict(within_1_5=0.25, within_2=0.5, within_3=0.75, answered=1.0)
    row = dict(regime="numbers", length=128, S=0.3, n_prompts=20, reward=0.5) | shares
    row |= dict(tokens_per_answer=1.25)
    rows = [row | {"arm": arm} for arm in ("backtracking", "guard-n2", "base", "plain")]
    rows += [row | {"arm": "rejection", "length": 64}, row | {"arm": "lambda", "regime": "rude"}]
    (tmp_path / "figures/tables").mkdir(parents=True)
    pd.DataFrame(rows).to_csv(tmp_path / "figures/tables/ablation_searches.csv")
    table = pages.search_arms("numbers", tmp_path).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:5]]
    numbers = ["25", "50", "75", "100", "1.25", "0.500"]
    arms = ["base", "Algorithm 1, N 2, M 4", "backtracking"]
    assert cells == [[arm, *numbers] for arm in arms] and table[5] == ""
    assert table[6].startswith("20 prompts, L 128, S 0.30.")


def test_each_verdict_has_its_power_beside_it(tmp_path):
    """Bug: the power against an easy rival, or that of another claim."""
    (tmp_path / "figures/tables").mkdir(parents=True)
    row = dict(claim="b", power=0.99, perfect_verdict="held", useless_verdict="failed", level=0.01)
    rows = [row, row | {"power": 0.92}, row | {"claim": "a", "power": 0.95}]
    pd.DataFrame(rows).to_csv(tmp_path / "figures/tables/claims_decidable.csv")
    verdicts = [dict(claim=name, verdict=name * 4, p_holm=0.0123) for name in "ab"]
    pd.DataFrame(verdicts).to_csv(tmp_path / "figures/tables/claims_mine.csv")
    table = pages.could_go_either_way("mine", tmp_path).splitlines()[2:]
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    assert found == [
        ["b", "bbbb", "held", "failed", "0.92", "0.0100", "0.01"],
        ["a", "aaaa", "held", "failed", "0.95", "0.0100", "0.01"],
    ]


def test_a_missing_table_is_one_sentence(tmp_path):
    """Guards against a page whose numbers nobody made."""
    with pytest.raises(RunError, match=r"main\.md is not there; run `make reproduce`"):
        pages.filled(PAGE, tmp_path)
    with pytest.raises(RunError, match=r"ablation_searches.csv is not there; run `make"):
        pages.filled("<!-- searches numbers -->\n<!-- end -->", tmp_path)


def test_the_command_writes_all_pages(tmp_path, monkeypatch, capsys):
    """Guards `make readme`."""
    monkeypatch.setattr(pages, "root", lambda: tmp_path)
    for name in pages.PAGES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(PAGE)
    with pytest.raises(SystemExit, match=r"^error: .*main\.md is not there"):
        pages.main()
    with_table(tmp_path, "| new |")
    pages.main()
    assert all("| new |" in (tmp_path / name).read_text() for name in pages.PAGES)


def test_the_answers_of_a_page_are_those_of_its_first_block(tmp_path):
    """Guards answers, and a picture, of another search than the one beside them."""
    (tmp_path / "docs").mkdir()
    code = (
        "from types import SimpleNamespace as Names\n"
        "class Guard:\n"
        "    def decode(self, prompts, method): yield Names(text=f'{method} 7')\n"
        "    def __call__(self, question, record):\n"
        "        tree = lambda masked: Names(_repr_svg_=lambda: '<svg/>')\n"
        "        return Names(text='no', status='abstained', tree=tree)\n"
        "guard, questions = Guard(), ['How?']\n"
    )
    page = f"```python\n{code}```\n<!-- answers page.md -->\n<!-- end -->\n"
    (tmp_path / "page.md").write_text(page, encoding="utf-8")
    row = [cell.strip() for cell in pages.filled(page, tmp_path).splitlines()[-3].split("|")]
    assert row == ["", "How?", "base **7**", "no (`abstained`)", ""]
    assert (tmp_path / pages.TREE).read_text() == "<svg/>\n"


# --- what pages of docs conclude, bound to the cells that it follows from -------------------------


def cells(name: str) -> pd.DataFrame:
    return pd.read_csv(ROOT / f"figures/tables/{name}.csv")


def test_the_regime_of_quick_has_the_prompts_that_it_names():
    """Bug: `make quick` decoded six prompts and its claims asked for twelve. Guards claims about
    more prompts than a set holds, or others than its runs have.
    """
    run = defaults_of("decode") | ParamFiles("ci").runs()["decode-raw"]
    (regime,) = load_claims(ROOT / "params/ci/claims.yaml").regimes.values()
    asked = (run["prompts"], run["seed"], run["split"])
    assert asked == (regime.prompts, regime.seed, regime.split)
    assert (run["policy"], run["limit"]) == (regime.policy, regime.n_prompts)
    assert len(load_prompts(run["prompts"], run["split"])) >= regime.n_prompts


def test_a_claim_is_rechecked_by_lines_that_need_no_installation(tmp_path):
    """Bug: a command of the page fails, or prints another number than the table has."""
    page = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    lines = [line for line in page.splitlines() if line.startswith("python3 -c")]
    rows = cells("claims_searches").query("reference.str.startswith('rejection')")
    rows = rows.set_index(["claim", "regime"])
    asked = [("path", "numbers"), ("law", "sentences"), ("reward", "numbers")]
    with tarfile.open(ROOT / "records/searches.tar.xz") as archive:
        wanted = re.findall(r" ((?:numbers|sentences)-[a-z-]+)", "\n".join(lines))
        folders = tuple(f"runs/searches/regime-{run}/" for run in wanted)
        members = [member for member in archive if member.name.startswith(folders)]
        archive.extractall(tmp_path, members, filter="data")
    for line, where in zip(lines, asked, strict=True):
        command = [sys.executable, "-I", "-S", *shlex.split(line)[1:]]  # no installed package
        printed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        row = rows.loc[where]
        values = np.array([row["value"], row["reference_value"]])
        expected = values * row["n_prompts"] if where[0] == "path" else values.round(3)
        assert json.loads(printed.stdout) == pytest.approx(expected)
        if where[0] == "path":
            assert f"The command prints `{printed.stdout.strip()}`" in page


def test_what_a_critic_gains():
    """Guards the conclusions under the table of critic-search."""
    found = cells("ablation_critic_search").query("arm == 'critic'")
    found = found[found["reference"] == "best-of-n-augmented"].set_index("measure")
    assert (found.loc["safe_finals", "low"] > 0).all() and (found.loc["reward", "high"] < 0).all()
    answered = found.loc["answered_safely"]
    assert (answered["low"] <= 0).all() and (answered["high"] >= 0).all()


def test_the_critic_is_compared_on_all_prompts_that_both_arms_have():
    """Bug: the gain over Best-of-N was of the 40 hardest prompts, where both arms had 100."""
    found = cells("ablation_critic_search").set_index(["arm", "reference"])
    assert (found.loc[("critic", "best-of-n-augmented"), "n_prompts"] == 100).all()
    assert (found.loc[("critic", "shuffled"), "n_prompts"] == 40).all()


def test_which_repairs_matter():
    """Guards the sentences about the printed algorithm: three repairs matter."""
    table = cells("ablation_literal").query("algorithm == 'repaired'")
    table = table[table["takes_over"].notna()].set_index("takes_over")
    fewer = table["answered_path_safe_high"] < 0
    more_over = table["over_budget_low"] > 0
    assert set(table.index[fewer]) == {"accounting of costs", "where costs are checked"}
    assert set(table.index[more_over]) == {*table.index[fewer], "what a failure gives"}
    assert table.loc["what a failure gives", "answered_path_safe_difference"] == 0


def test_what_the_front_page_says():
    """Guards sentences of README: no emitted answer of a guard is over budget at a word; the rule
    in the prompt; what the cost of harm calls harmful.
    """
    arms = cells("claims_arms_searches")
    guards = arms[arms["arm"].str.match("backtracking|Algorithm 1")]
    within = (guards["answered_path_safe"] * guards["n_prompts"]).round()
    assert len(guards) > 15 and (guards["answered"] == within).all()
    rows = cells("ablation_searches").query("length == 128").set_index(["regime", "arm"])
    said = {
        "144 of these 180": rows.loc[("numbers", "rejection-told"), "within_2"] * 180,
        "41 of 60": (1 - rows.loc[("twins", "base"), "answered"]) * 60,
    }
    text = " ".join((ROOT / page).read_text("utf-8") for page in ("README.md", "docs/harm.md"))
    for words, value in said.items():
        assert words in " ".join(text.split()) and round(value) == int(words.split()[0])


def numbers_of(row: pd.Series) -> list[float]:
    """Return the cells that a row of said.csv names, those of one row of the table first."""
    table = cells(row["table"]).query(row["where"])
    columns = [table.eval(value).astype(float) for value in row["values"].split(",")]
    return [float(number) for i in range(len(table)) for number in (c.iloc[i] for c in columns)]


def test_the_minutes_of_the_notebooks():
    """Guards README's minutes to read and to run notebooks: `bash benchmarks/notebooks.sh` measures
    them, and a row has the sums of its notebooks.
    """
    minutes = pd.read_csv(ROOT / "figures/tables/notebooks.csv", index_col="notebook")
    rows = re.findall(r"^\|.*]\(notebooks/.*", (ROOT / "README.md").read_text("utf-8"), re.M)
    assert "".join(rows).count(".ipynb)") == len(minutes)
    for row in rows:
        wanted = minutes.loc[re.findall(r"notebooks/(\w+)\.", row)].filter(like="minutes").sum()
        assert row.endswith("| {}, {} |".format(*(max(1, round(n)) for n in wanted))), row


def test_the_numbers_that_stand_in_sentences():
    """Guards each number that a page says in words: tests/data/said.csv has the words and the cells
    to which their last numbers are rounded.
    """
    for row in pd.read_csv(ROOT / "tests/data/said.csv", sep=";").to_dict("records"):
        page = (ROOT / f"docs/{row['page']}.md").read_text(encoding="utf-8")
        section = page.partition(f"\n## {row['section']}\n")[2].partition("\n## ")[0]
        assert row["said"] in " ".join(section.split()), row
        wanted, said = numbers_of(row), re.findall(r"[+-]?\d*\.?\d+", row["said"])
        for number, shown in zip(wanted, said[-len(wanted) :], strict=True):
            digits = len(shown.partition(".")[2])
            assert abs(number - float(shown)) <= 0.5 * 10**-digits + 1e-9, row


# --- the site: what a page becomes, what is found missing, and one reading by Sphinx --------------


def test_no_heading_contains_a_link():
    """Bug: Sphinx ends with a KeyError where a heading links to a file, once it writes HTML."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
    headings = [line for page in pages for line in page.read_text().splitlines() if line[:1] == "#"]
    assert headings and not [line for line in headings if "](" in line]


def test_an_interval_in_a_table_keeps_to_one_line(tmp_path):
    """Bug: every interval of a table of results was broken over three lines. An interval outside
    of tables, where it may be code, stays as it is.
    """
    text = "| a | {} | {} |\nlist = 3 [1, 2]\n"
    cells = ["95 % [90, 97]", "3 of 60 [-.01, .05]"]
    shown = site.as_shown(text.format(*cells), tmp_path / "page.md", ROOT)
    assert shown == text.format(*(cell.replace(" ", "\u00a0") for cell in cells))


def test_a_picture_is_described_by_the_text_before_it():
    """Guards readers who hear a page."""
    cells = [
        {
            "cell_type": "markdown",
            "metadata": {},
            "source": ["## Title\n\nFirst.\n\n*Cost* by `N`.\n"],
        },
        {"cell_type": "code", "metadata": {}, "source": [], "outputs": []},
    ]
    _, code = site.with_descriptions({"cells": cells})["cells"]
    assert code["metadata"]["mystnb"] == {"image": {"alt": "Title. Cost by N."}}


def test_a_link_to_a_folder_becomes_text():
    """Guards links of the repository that no site has. A link to a file, or to a page, stays."""
    text = "[a](../README.md#results) [b](../igcore/budget.py) [`c`](../igcore) ![d](method.svg)"
    shown = site.as_shown(text, ROOT / "docs/page.md", ROOT)
    assert shown == text.replace("[`c`](../igcore)", "`c`")


def test_a_link_to_a_page_in_html_opens_it():
    """Bug: Sphinx made a download of it."""
    shown = site.as_shown("[chat](chat.html) and [other](guard.md)", ROOT / "docs/page.md", ROOT)
    assert shown == '<a href="chat.html">chat</a> and [other](guard.md)'


def test_what_needs_eyes_or_a_network_is_named(tmp_path):
    """Guards a page that is blank on a train, and a picture that a screen reader skips."""
    (tmp_path / "page.html").write_text(
        '<script src="https://elsewhere/x.js"></script><img src="a.png"><img src="b.png" alt="b">'
        '<link rel="stylesheet" href="//elsewhere/x.css"><a href="https://elsewhere">fine</a>'
    )
    assert list(site.faults(tmp_path)) == [
        "page.html: picture a.png has no alternative text",
        "page.html: https://elsewhere/x.js is fetched from the network",
        "page.html: //elsewhere/x.css is fetched from the network",
    ]


def test_the_site_is_read_without_a_warning(tmp_path):
    """Bug: a page that links to a file that moved. Guards every link between pages, every heading,
    every docstring of the API. The pages are read and their links resolved; no HTML is written,
    which takes most of the time.
    """
    command = [sys.executable, "-m", "sphinx", "-b", "dummy", "-q", "-W", "--keep-going"]
    command += ["-D", "suppress_warnings=mystnb"]  # about pictures, for which there is no page
    command += ["-c", "docs", "-d", str(tmp_path / "read"), ".", str(tmp_path / "built")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    pages = {path.relative_to(tmp_path / "read") for path in tmp_path.glob("read/**/*.doctree")}
    wanted = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")]
    assert {path.relative_to(ROOT).with_suffix(".doctree") for path in wanted} <= pages
    # no code is highlighted here: HTML is refused if Pygments lacks a language
    text = "\n".join(page.read_text("utf-8") for page in wanted)
    assert set(re.findall(r"^ *```(\w+)$", text, re.M)) == {"bash", "python", "text", "yaml"}
