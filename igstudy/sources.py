"""Digests of source code: of the packages, and of the modules that a user names.

A digest is that of a syntax tree without docstrings, so that comments and layout do not count. A
package counts as a whole, and a user's module by its own file: what it imports does not count.
"""

import ast
import hashlib
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache, partial
from inspect import isroutine
from pathlib import Path
from typing import Any

import igcore
import igserve
from igcore.errors import RunError
from igcore.files import DIGITS, digest_of
from igcore.scorers import FunctionScorer
from igcore.settings import Named
from igserve.trust import load_trusted, source_of

# the packages, whose code counts as a whole, see `igstudy.runs.identity`
HOMES = {
    "igcore": Path(igcore.__file__).parent,
    "igserve": Path(igserve.__file__).parent,
    "igstudy": Path(__file__).parent,
}


# --- modules --------------------------------------------------------------------------------------


def tree_digest(tree: ast.AST) -> str:
    """Return the digest of code; comments, layout and docstrings do not count."""
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            body[:] = [statement for statement in body if not _is_text(statement)]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()[:DIGITS]


def _is_text(node: object) -> bool:
    """Return True if a statement is a text alone, such as a docstring."""
    text = node.value if isinstance(node, ast.Expr) else None
    return isinstance(text, ast.Constant) and isinstance(text.value, str)


@cache
def package_digest(package: str, *parts: str) -> str:
    """Return the digest of a package's syntax trees, or of some parts; watching never counts."""
    digests = {}
    for file in sorted(HOMES[package].rglob("*.py")):
        name = file.relative_to(HOMES[package])
        part = name.parts[0].removesuffix(".py")
        if part != "watch" and (not parts or part in parts):
            digests[name.as_posix()] = tree_digest(ast.parse(file.read_bytes()))
    return digest_of(digests)[:DIGITS]


def module_digests(*modules: str) -> dict[str, str]:
    """Return the digests of the files of a user's modules, by name; nothing is imported.

    Modules without a file in Python, and those of `HOMES` and of Python, are left out.

    Raises
    ------
    RunError
        For a file that is no Python.
    """
    found = {}
    for name in sorted({*modules}):
        path = source_of(name)
        if path is None:
            continue
        try:
            found[name] = tree_digest(ast.parse(path.read_bytes()))
        except SyntaxError as error:
            raise RunError(f"{path} is no Python that can be read ({error}); correct it") from error
    return found


# --- scorers --------------------------------------------------------------------------------------


def all_parts(scorer: Any) -> Iterator[Any]:
    """Yield a scorer and those that it is made of, as a maximum is, at any depth."""
    yield scorer
    for part in getattr(scorer, "parts", ()):
        yield from all_parts(part)


def identified(scorer: Any) -> Any:
    """Return a scorer whose functions have a digest: their own, or that of their module's file.

    Raises
    ------
    RunError
        For a scorer without a digest that was not loaded as ``module:function`` from a file.
    """
    for part in all_parts(scorer):
        if not part.digest:
            part.digest = function_digest(part)
    return scorer


def loaded(scorer: Named | None, role: str = "cost") -> Any:
    """Load a scorer as `igserve.trust.load_trusted`, `identified` before it has scored anything."""
    return None if scorer is None else identified(load_trusted(scorer, role))


def function_digest(scorer: Any) -> str:
    """Return the digest of a function that a module names, 64 hex digits.

    It is that of its name, the file of the module, and the file that defines the function. A
    partial of such a function counts by the plain values that it holds, too.
    """
    home, _, path = scorer.name.partition(":")
    function: Any = getattr(scorer, "function", None)
    inner = function.func if isinstance(function, partial) else function
    files, held = {}, []
    if not path and is_named(inner):
        home, path = inner.__module__, inner.__name__
        held = [] if inner is function else [path, function.args, function.keywords]
    # any other function may hold values that stand in no file
    if isinstance(scorer, FunctionScorer) and path:
        files = module_digests(home, getattr(function, "__module__", None) or "")
    with suppress(TypeError):  # a partial may hold what is no plain value
        if home in files:
            return digest_of([scorer.name, files, *held])
    raise RunError(
        f"scorer {scorer.name!r} has no digest, and no file of a module tells what it is, so a run "
        "would not see it change; put it into a module and name it as module:function, or give it "
        "a text as its attribute digest, such as 'v1', and change that with it"
    )


def is_named(function: Any) -> bool:
    """True if a function is what its module has under its name."""
    module = sys.modules.get(getattr(function, "__module__", "")) if isroutine(function) else None
    return module is not None and getattr(module, function.__name__, None) is function
