"""Test of the words that pages, notebooks, docstrings and comments do not use."""

import io
import json
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LISTED = re.compile(r"^```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROGRAM = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)  # a block of a page
SPAN = re.compile(r"`[^`\n]*`")
PAGES = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY")]
PAGES += sorted(ROOT.glob("docs/*.md"))
NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))
MODULES = sorted(
    path for room in ("igcore", "igserve", "igstudy") for path in ROOT.glob(f"{room}/**/*.py")
)


def listed_words() -> list[str]:
    """Return the words that CONTRIBUTING.md lists."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return LISTED.search(page)[1].split()


def blank(match: re.Match) -> str:
    """Return as many lines as a match has, so that lines after it keep their numbers."""
    return "\n" * match[0].count("\n")


def of_page(text: str) -> str:
    """Return a page without its programs."""
    return SPAN.sub(" ", PROGRAM.sub(blank, text))


def of_notebook(text: str) -> str:
    """Return the Markdown cells of a notebook without their programs."""
    cells = json.loads(text)["cells"]
    texts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
    return of_page("\n".join(texts))


def of_module(text: str) -> str:
    """Return the comments and docstrings of a module, each on its line."""
    lines = [""] * (text.count("\n") + 1)
    begins = True  # a statement: a text that begins one is a docstring
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and begins):
            for number, line in enumerate(token.string.split("\n"), token.start[0] - 1):
                lines[number] += line
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            begins = token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    return SPAN.sub(" ", "\n".join(lines))


def found(text: str, words: list[str]) -> Iterator[str]:
    """Yield line and word of each occurrence as a whole word."""
    whole = re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, words))})(?![\w-])", re.IGNORECASE)
    for number, line in enumerate(text.split("\n"), 1):
        yield from (f"{number}: {match[0]}" for match in whole.finditer(line))


def test_words_are_found_in_prose_alone():
    """Bug: a word in a program, which a page must show, or in a name such as `base-told`."""
    page = "Told.\n```bash\ntold\n```\n`told` not-told foretold\n  ```\n  told\n  ```\nis told\n"
    assert list(found(of_page(page), ["told"])) == ["1: Told", "9: told"]
    cells = [{"cell_type": kind, "source": ["told\n"]} for kind in ("code", "markdown")]
    assert list(found(of_notebook(json.dumps({"cells": cells})), ["told"])) == ["1: told"]


def test_words_are_found_in_docstrings_and_comments():
    """Bug: a docstring that nobody reads, or a text of the program taken for one."""
    module = '"""Told\n\ntold."""\nname = "told"  # told\n\n\ndef f():\n    "told"\n'
    module += '    return "told"\n'
    lines = ["1: Told", "3: told", "4: told", "8: told"]
    assert list(found(of_module(module), ["told"])) == lines


@pytest.mark.parametrize(
    ("files", "prose_of"),
    [(PAGES, of_page), (NOTEBOOKS, of_notebook), (MODULES, of_module)],
    ids=["pages", "notebooks", "modules"],
)
def test_no_text_has_a_word_of_the_list(files, prose_of):
    """Guards plain English."""
    words = listed_words()
    assert files and len(words) > 10
    occurrences = [
        f"{file.relative_to(ROOT)}:{occurrence}"
        for file in files
        for occurrence in found(prose_of(file.read_text(encoding="utf-8")), words)
    ]
    assert not occurrences, "\n".join(occurrences)
