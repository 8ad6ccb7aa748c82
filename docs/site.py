"""Build the site: ``make docs``, which is ``python -m docs.site``.

Pages, figures, tables and notebooks are staged where they lie in the repository, so that a link
leads to the same thing here and there. The executed notebooks, figures and tables of the last walk
take the place of the committed ones; a fresh clone has no walk, and its site shows the committed
ones alone. Nothing is run, and nothing is downloaded: the pages need no network either. Sphinx
turns them into one HTML folder.
"""

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bs4 import BeautifulSoup

from docs.compare import PUBLISHED
from igcore.errors import IgcoreError, RunError, needs
from igcore.files import replace_file, root
from igstudy.runs.folders import ASIDE

# a value with its interval in a table, which no line may break
INTERVAL = re.compile(r"(\d+ of )?[\d.]+( %)? \[[-+−\d.]+, [-+−\d.]+\](?=.*\|$)", re.MULTILINE)
LINK = re.compile(r"(?<=\]\()(?P<path>[^)\s#:]+)(?P<anchor>#[^)\s]*)?(?=\))")
GUIDES = ("guard", "budget", "scorers", "paper", "runs", "promise")
RESULTS = ("replication", "results", "fidelity", "paper-to-code", "cards")
# where pages stand in the list beside every page: caption -> pages
CONTENTS = {
    "Guides": [f"docs/{name}" for name in GUIDES],
    "Notebooks": ["notebooks/*"],
    "Results": [*(f"docs/{name}" for name in RESULTS), "docs/tables", "docs/every-run"],
    "Reference": ["docs/commands", "docs/reading", "docs/api", "[CS]*"],
}


# --- staging --------------------------------------------------------------------------------------


def executed(runs: Path) -> dict[str, Path]:
    """Return the executed notebooks of a profile by the page that shows them.

    The first run of a notebook is the page of its name, and every run of one that ran several times
    has a page of its own.
    """
    found: dict[str, dict[str, Path]] = {}
    for path in sorted(runs.glob("**/*.ipynb")):
        done = json.loads(path.read_text(encoding="utf-8"))["metadata"].get("papermill", {})
        if ASIDE not in path.parts and done.get("duration"):  # neither replaced nor unfinished
            run = path.parent.relative_to(runs).as_posix()
            found.setdefault(Path(done["input_path"]).stem, {})[run] = path
    pages = {}
    for notebook, by_run in found.items():
        pages[f"notebooks/{notebook}"] = next(iter(by_run.values()))
        if len(by_run) > 1:
            pages |= {f"runs/{run}": path for run, path in by_run.items()}
    return pages


def with_descriptions(notebook: dict) -> dict:
    """Return a notebook in which each picture is described to those who cannot see it.

    The description is the heading of its section and the paragraph before it.
    """
    heading = said = ""
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            headings = re.findall(r"^#+ (.+)$", source, flags=re.MULTILINE)
            paragraphs = [part for part in source.split("\n\n") if not part.startswith("#")]
            heading = _plain(headings[-1]) if headings else heading
            said = _plain(paragraphs[-1]) if paragraphs else ""
        else:
            alt = f"{heading}. {said}" if heading and said else heading or said
            cell["metadata"]["mystnb"] = {"image": {"alt": alt or "picture"}}
    return notebook


def _plain(text: str) -> str:
    """Return Markdown without its signs, on one line."""
    return " ".join(re.sub(r"[*`$_\[\]]", "", text).split())


def staged_links(text: str, page: Path, base: Path, folder: Path) -> str:
    """Return a page whose links hold in `folder` as well; what they lead to is copied there.

    A file, of code as well, is downloaded. A link to a folder becomes plain text. An interval in a
    table keeps to one line.
    """

    def follow(match: re.Match) -> str:
        target = Path(os.path.normpath(page.parent / match["path"]))
        anchor = match["anchor"] or ""
        if target == Path("README.md"):
            return os.path.relpath("index.md", page.parent) + anchor
        if target.suffix not in (".md", ".ipynb") and (base / target).is_file():
            (folder / target).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(base / target, folder / target)
        return match.group()

    def without_folders(match: re.Match) -> str:
        is_folder = (base / page.parent / match["path"]).is_dir()
        return match["label"] if is_folder else match.group()

    link = re.compile(r"(?<!!)\[(?P<label>[^\]]*)\]\((?P<path>[^)\s#:]+)\)")
    text = INTERVAL.sub(lambda match: match.group().replace(" ", "\u00a0"), text)
    return LINK.sub(follow, link.sub(without_folders, text))


def stage(base: Path, profile: str, folder: Path) -> None:
    """Write the sources of the site into a folder."""
    ran = executed(base / "runs" / profile)
    committed = {f"notebooks/{path.stem}": path for path in base.glob("notebooks/*.ipynb")}
    for page, path in (committed | ran).items():
        notebook = json.loads(path.read_text(encoding="utf-8"))
        replace_file(folder / f"{page}.ipynb", json.dumps(with_descriptions(notebook)))
    pages = [*base.glob("docs/*.md"), *base.glob("[CS]*.md")]
    for path in pages:
        page = path.relative_to(base)
        text = path.read_text(encoding="utf-8")
        replace_file(folder / page, staged_links(text, page, base, folder))
    made = base / "runs" / profile / "figures"
    folders = [base / "figures", *([made] if profile in PUBLISHED else [])]
    tables = {path.stem: path for where in folders for path in sorted(where.glob("tables/*.md"))}
    for path in tables.values():
        files = [path.with_suffix(end) for end in (".csv", ".json")]
        links = ", ".join(f"[{file.name}]({file.name})" for file in files if file.exists())
        text = f"# {path.stem}\n\n{path.read_text(encoding='utf-8')}\n\nThe same as {links}.\n"
        page = Path("figures/tables", path.name)
        replace_file(folder / page, staged_links(text, page, base, folder))
    names = [f"../figures/tables/{name}" for name in sorted(tables)]
    replace_file(folder / "docs/tables.md", f"# Every table\n\n{_toctree(names)}")
    runs = [f"{page.removeprefix('runs/')} <../{page}>" for page in ran if page.startswith("runs/")]
    replace_file(folder / "docs/every-run.md", f"# Runs shown: {len(runs)}\n\n{_toctree(runs)}")
    front = staged_links(
        (base / "README.md").read_text(encoding="utf-8"), Path("README.md"), base, folder
    )
    if made in folders and made.is_dir():  # the pictures, and the other files of the tables
        rest = shutil.ignore_patterns("*.md")
        shutil.copytree(made, folder / "figures", ignore=rest, dirs_exist_ok=True)
    contents = [_toctree(pages, caption) for caption, pages in CONTENTS.items()]
    replace_file(folder / "index.md", "\n\n".join([front, *contents]))


def _toctree(pages: list[str], caption: str = "") -> str:
    """Return a list of pages as Sphinx reads it; with a caption it stands beside every page."""
    options = [":hidden:", f":caption: {caption}", ":glob:"] if caption else [":maxdepth: 1"]
    return "\n".join(["```{toctree}", *options, "", *pages, "```"])


# --- checks ---------------------------------------------------------------------------------------


def faults(site: Path) -> Iterator[str]:
    """Yield a sentence for everything on a page that needs eyes or a network."""
    for path in sorted(site.rglob("*.html")):
        page, name = BeautifulSoup(path.read_bytes(), "html.parser"), path.relative_to(site)
        for picture in page.select("img:not([alt]), img[alt='']"):
            yield f"{name}: picture {picture.get('src')} has no alternative text"
        for loaded in page.select("script, img, iframe, link[rel~=stylesheet]"):
            source = str(loaded.get("src") or loaded.get("href"))
            if re.match(r"(https?:)?//", source):
                yield f"{name}: {source} is fetched from the network"


# --- building -------------------------------------------------------------------------------------


def build(base: Path, profile: str, site: Path) -> None:
    """Build the site with a profile's last walk, or without any.

    Raises
    ------
    RunError
        When a page has a fault; Sphinx says which.
    """
    sphinx = needs("sphinx.cmd.build", "'.[docs]'")
    with tempfile.TemporaryDirectory() as scratch:
        source, built = Path(scratch) / "source", Path(scratch) / "site"
        stage(base, profile, source)
        options = ["-q", "-W", "--keep-going", "-c", str(base / "docs"), "-d", f"{scratch}/read"]
        if sphinx.build_main([*options, str(source), str(built)]):
            raise RunError("Sphinx found faults in the pages, see above; correct them")
        shutil.rmtree(site, ignore_errors=True)
        shutil.copytree(built, site)  # notebooks leave a folder beside the one that is built
    if found := list(faults(site)):
        raise RunError("\n".join(found))


def main() -> None:
    """Build the site and say where it is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", default="small")
    profile, site = parser.parse_args().profile, root() / "site"
    try:
        build(root(), profile, site)
    except IgcoreError as error:
        sys.exit(f"error: {error}")
    ran = len(executed(root() / "runs" / profile))
    print(f"open {site / 'index.html'}; notebooks of runs/{profile}: {ran}, others as committed")


if __name__ == "__main__":
    main()
