"""Tests of the site: what is staged, what is found missing, and one reading by Sphinx."""

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from docs import site

ROOT = Path(__file__).parents[1]
PARTS = "docs figures igcore igstudy notebooks params tests".split()
PARTS += "README.md CHANGELOG.md CONTRIBUTING.md SECURITY.md Dockerfile .github".split()
FILES = (
    "profiles LICENSE CITATION.cff Snakefile constraints.txt environment.yml pyproject.toml "
    "codecheck.yml"
)


def executed(path, name, duration=3.0):
    """An executed copy of a committed notebook."""
    notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    done = {"input_path": f"notebooks/{name}.ipynb", "duration": duration}
    notebook.metadata["papermill"] = done
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, path)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The repository after a quick walk, with some of its notebooks."""
    folder = tmp_path_factory.mktemp("repository")
    for name in [*PARTS, *FILES.split(), ".pre-commit-config.yaml"]:
        (folder / name).symlink_to(ROOT / name)
    runs = folder / "runs/ci"
    executed(runs / "start.ipynb", "00_start_here")
    executed(runs / "theory.ipynb", "10_theory")
    for run in ("decode-raw", "decode-raw-critic"):
        executed(runs / run / "executed.ipynb", "30_decode")
    executed(runs / ".replaced/decode-raw.1/executed.ipynb", "30_decode")
    executed(runs / "tables.ipynb", "40_tables", duration=None)
    return folder


def test_each_page_shows_the_last_finished_run(base):
    """Bug: a run that was replaced or still goes on on a page, or a run without a page."""
    pages = {
        page: path.relative_to(base / "runs/ci")
        for page, path in site.executed(base / "runs/ci").items()
    }
    assert {page: path.as_posix() for page, path in pages.items()} == {
        "notebooks/00_start_here": "start.ipynb",
        "notebooks/10_theory": "theory.ipynb",
        "notebooks/30_decode": "decode-raw/executed.ipynb",
        "runs/decode-raw": "decode-raw/executed.ipynb",
        "runs/decode-raw-critic": "decode-raw-critic/executed.ipynb",
    }


def test_the_pictures_and_tables_of_a_walk_take_the_place_of_committed_ones(base, tmp_path):
    """Guards a site of other tables than those of its notebooks, and one on which the dozen prompts
    of `make quick` stand for the results.
    """
    for profile in ("ci", "small"):
        place, folder = tmp_path / profile, tmp_path / f"site-{profile}"
        place.mkdir()
        for path in base.iterdir():
            if path.is_symlink():
                (place / path.name).symlink_to(path)
        executed(place / f"runs/{profile}/start.ipynb", "00_start_here")
        tables = place / f"runs/{profile}/figures/tables"
        tables.mkdir(parents=True)
        for path in (tables / "main.md", tables / "main.csv", tables.parent / "claims.png"):
            path.write_text("of the walk")
        site.stage(place, profile, folder)
        own = profile == "small"
        assert ("of the walk" in (folder / "figures/tables/main.md").read_text()) is own
        for name in ("figures/claims.png", "figures/tables/main.csv"):
            assert (b"of the walk" == (folder / name).read_bytes()) is own
        assert (folder / "figures/tables/heldout.md").is_file()  # of which the walk has none


def test_a_fresh_clone_has_a_site(base, tmp_path):
    """Bug: a site that no visitor can build before a walk of half an hour."""
    site.stage(base, "small", tmp_path)  # of which no run is there
    for name in ("00_start_here", "30_decode"):
        stored = nbformat.read(ROOT / f"notebooks/{name}.ipynb", as_version=4)
        shown = nbformat.read(tmp_path / f"notebooks/{name}.ipynb", as_version=4)
        assert [cell.source for cell in shown.cells] == [cell.source for cell in stored.cells]
    assert (tmp_path / "docs/every-run.md").read_text().startswith("# Runs shown: 0\n")


def test_no_heading_contains_a_link():
    """Bug: Sphinx ends with a KeyError where a heading links to a file, once it writes HTML."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
    headings = [line for page in pages for line in page.read_text().splitlines() if line[:1] == "#"]
    assert headings and not [line for line in headings if "](" in line]


def test_an_interval_in_a_table_keeps_to_one_line(base, tmp_path):
    """Bug: every interval of a table of results was broken over three lines. An interval outside
    of tables, where it may be code, stays as it is.
    """
    text = "| a | {} | {} |\nlist = 3 [1, 2]\n"
    cells = ["95 % [90, 97]", "3 of 60 [-.01, .05]"]
    shown = site.staged_links(text.format(*cells), Path("docs/page.md"), base, tmp_path)
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


def test_links_lead_to_the_same_things_on_the_site(base, tmp_path):
    """Guards links of the repository that no site has: to its front page, to files, to folders."""
    text = "[a](../README.md#results) [b](../igcore/budget.py) [`c`](../igcore) ![d](method.svg)"
    written = site.staged_links(text, Path("docs/page.md"), base, tmp_path)
    assert written == "[a](../index.md#results) [b](../igcore/budget.py) `c` ![d](method.svg)"
    assert (tmp_path / "igcore/budget.py").is_file() and (tmp_path / "docs/method.svg").is_file()


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


def test_the_site_is_read_without_a_warning(base, tmp_path):
    """Guards every link between pages, every heading, every docstring of the API. The pages are
    read and their links resolved; no HTML is written, which takes most of the time.
    """
    source = tmp_path / "source"
    site.stage(base, "ci", source)
    command = [sys.executable, "-m", "sphinx", "-b", "dummy", "-q", "-W", "--keep-going"]
    command += ["-D", "suppress_warnings=mystnb"]  # about pictures, for which there is no page
    command += ["-c", str(base / "docs"), str(source), str(tmp_path / "built")]
    built = subprocess.run(command, cwd=base, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    assert "decode-raw-critic" in (source / "docs/every-run.md").read_text()
