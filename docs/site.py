"""Build the site of the committed pages, notebooks, figures and tables: ``make docs``.

``python -m docs.site`` lets Sphinx turn them into one HTML folder. They are read where they lie in
the repository, so that a link leads to the same thing here and there. Nothing is run, and nothing
is downloaded: the pages need no network either.
"""

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bs4 import BeautifulSoup

from igcore.errors import IgcoreError, RunError, needs
from igstudy.files import root

FRONT = "README"
# a value with its interval in a table, which no line may break
INTERVAL = re.compile(r"(\d+ of )?[\d.]+( %)? \[[-+−\d.]+, [-+−\d.]+\](?=.*\|$)", re.MULTILINE)
LINK = re.compile(r"(?<!!)\[(?P<label>[^\]]*)\]\((?P<path>[^)\s#:]+)\)")
GUIDES = (
    "guard", "scorers", "budget", "method", "serve", "batch", "reproduce", "extend", "promise",
)  # fmt: skip
RESULTS = ("results", "harm", "experiments", "replication", "fidelity", "cards")
REFERENCE = ("reading", "paper-to-code", "paper", "api")
ANSWER = re.compile(r"^\*\*(.+?)\*\*", re.MULTILINE | re.DOTALL)  # the first sentence of a page
# where pages stand in the list beside every page: caption -> pages
CONTENTS = {
    "Guides": [f"docs/{name}" for name in GUIDES],
    "Notebooks": ["notebooks/*"],
    "Results": [f"docs/{name}" for name in RESULTS],
    "Reference": [*(f"docs/{name}" for name in REFERENCE), "[CS]*"],
}


# --- reading --------------------------------------------------------------------------------------


def setup(app: Any) -> None:
    """Let Sphinx show each page as `as_shown` returns it."""

    def read(_: Any, page: str, content: list[str]) -> None:
        content[0] = as_shown(content[0], app.env.doc2path(page), root())

    app.connect("source-read", read)


def as_shown(text: str, path: Path, base: Path) -> str:
    """Return the text of a page as the site shows it.

    The pictures of a notebook are described, and the front page gets the contents. A link to a
    folder becomes plain text, and one to a page in HTML opens it. An interval keeps to one line.
    """
    if path.suffix == ".ipynb":
        return json.dumps(with_descriptions(json.loads(text)))

    def of_site(match: re.Match) -> str:
        label, target = match["label"], match["path"]
        if target.endswith(".html"):  # which Sphinx would offer as a download
            return f'<a href="{target}">{label}</a>'
        return label if (path.parent / target).is_dir() else match.group()

    text = INTERVAL.sub(lambda match: match.group().replace(" ", "\u00a0"), text)
    text = LINK.sub(of_site, text)
    if path == base / f"{FRONT}.md":
        text = "\n\n".join([text, *map(_toctree, CONTENTS, CONTENTS.values())])
    return text


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


def _toctree(caption: str, pages: list[str]) -> str:
    """Return a list of pages as Sphinx reads it, which is shown beside every page."""
    options = [":hidden:", ":glob:", f":caption: {caption}"]
    return "\n".join(["```{toctree}", *options, "", *pages, "```"])


# --- building -------------------------------------------------------------------------------------


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


def for_machines(base: Path) -> str:
    """Return ``llms.txt``: a line for each page that answers a question, with its answer."""
    lines = ["# igcore", "", "> A hard limit on what a language model says.", ""]
    for name in (*GUIDES, *RESULTS, *REFERENCE):
        text = (base / f"docs/{name}.md").read_text(encoding="utf-8")
        title, found = text.partition("\n")[0].strip("# "), ANSWER.search(text)
        answer = _plain(LINK.sub(r"\g<label>", found[1])) if found else ""
        lines.append(f"- [{title}](docs/{name}.html): {answer}")
    return "\n".join(lines) + "\n"


def build(base: Path, site: Path) -> None:
    """Build the site.

    Raises
    ------
    RunError
        When a page has a fault; Sphinx says which.
    """
    sphinx = needs("sphinx.cmd.build", "'.[docs]'")
    with tempfile.TemporaryDirectory() as scratch:
        built = Path(scratch) / "site"
        options = ["-q", "-W", "--keep-going", "-c", str(base / "docs"), "-d", f"{scratch}/read"]
        if sphinx.build_main([*options, str(base), str(built)]):
            raise RunError("Sphinx found faults in the pages, see above; correct them")
        shutil.copyfile(built / f"{FRONT}.html", built / "index.html")
        for page in (base / "docs").glob("*.html"):
            shutil.copy(page, built / "docs")
        (built / "llms.txt").write_text(for_machines(base), encoding="utf-8")
        shutil.rmtree(site, ignore_errors=True)
        shutil.copytree(built, site)  # notebooks leave a folder beside the one that is built
    if found := list(faults(site)):
        raise RunError("\n".join(found))


def main() -> None:
    """Build the site and say where it is."""
    site = root() / "site"
    try:
        build(root(), site)
    except IgcoreError as error:
        sys.exit(f"error: {error}")
    print(f"open {site / 'index.html'}")


if __name__ == "__main__":
    main()
