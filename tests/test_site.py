"""Tests of the site: what a page becomes, what is found missing, and one reading by Sphinx."""

import subprocess
import sys
from pathlib import Path

from docs import site

ROOT = Path(__file__).parents[1]


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
