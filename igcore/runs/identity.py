"""The identity of a run: code, versions and prompts that its answers depend on, known by content.

A run folder keeps this identity; when it changes, the run starts anew. The code is the import
closure of an entry point, followed through the source without importing it. Of each module its
syntax tree counts, without docstrings: a comment, a docstring or another layout changes nothing, an
operator does. Modules of other packages count by version.
"""

import ast
import contextlib
import importlib.metadata
import importlib.util
import inspect
import json
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.util import resolve_name
from pathlib import Path
from typing import Any

from ..errors import RunError
from ..folders import DIGITS, digest_of

PACKAGE = __name__.partition(".")[0]
OWN = frozenset([PACKAGE])
INSTALLED = {"site-packages", "dist-packages"}  # folders into which packages are installed
VERSIONS = ("igcore", "torch", "transformers", "tokenizers", "numpy")
# a package that imports names lazily has a table of this name: public name -> module
LAZY = "_HOME"
TYPING_ONLY = ("TYPE_CHECKING", "typing.TYPE_CHECKING")
# fields of a syntax tree that do not change what the code does
LAYOUT = ("ctx", "kind", "type_comment", "type_ignores")


def versions() -> dict[str, str]:
    """Return the versions of the packages that can change a number."""
    return {name: importlib.metadata.version(name) for name in VERSIONS}


def prompts_digest(prompts: Iterable) -> dict:
    """Return number and digest of prompts (with ``id`` and ``text``), whatever their order."""
    pairs = sorted([prompt.id, prompt.text] for prompt in prompts)
    return {"n": len(pairs), "digest": digest_of(pairs)[:DIGITS]}


def part_identity(part) -> dict:
    """Return the identity of a policy or scorer by content.

    It is ``identity()`` where the part has one, else its name and digest; its files are added. A
    part that was defined in a notebook has no module to hash, so its source counts instead.
    """
    known = {"name": part.name, "digest": part.digest}
    if hasattr(part, "identity"):
        known = part.identity()
    if getattr(part, "files", None):
        known = known | {"files": dict(part.files)}
    if _has_source(part):
        return known
    try:
        source = textwrap.dedent(inspect.getsource(type(part)))
    except (OSError, TypeError) as error:
        raise RunError(
            f"{type(part).__name__} has no source to be known by; define it in a .py file or a "
            "notebook cell"
        ) from error
    return known | {"code": cells_digest([source])}


def models_identity(models: Mapping[str, Any], prompts: Iterable, *modules: str) -> dict:
    """Return what lines depend on besides settings: models, code, versions, device and prompts.

    Parameters
    ----------
    models : mapping of str to Policy or Scorer
        By role; one is ``policy``.
    modules : str
        Dotted names of the modules that make the lines.
    """
    model = models["policy"].model
    return {
        "parts": {role: part_identity(part) for role, part in models.items()},
        "code": code_of(*modules, *modules_of(*models.values())),
        "versions": versions(),
        "dtype": str(model.dtype),
        "device": str(model.device),
        "chosen": prompts_digest(prompts),
    }


def modules_of(*parts) -> list[str]:
    """Return the modules that define policies and scorers.

    Those that `igcore.load_scorer` took them from count as well.
    """
    homes = {getattr(part, "home", None) for part in parts} - {None}
    return sorted(homes | {type(part).__module__ for part in parts if _has_source(part)})


def network_identity(*modules: str) -> dict:
    """Return what weights depend on besides settings and rollouts: training code and versions.

    Parameters
    ----------
    modules : str
        Dotted names of the modules that train.
    """
    return {"code": code_of(*modules), "versions": versions()}


def opened(*parts, paths: Iterable[Path | str] = ()) -> dict[str, list[int]]:
    """Return size and time (ns) of the files of policies and scorers, and of other paths.

    A later change then shows without reading gigabytes.
    """
    files = [Path(path) for path in paths]
    for part in parts:
        names = getattr(part, "files", {})
        if hasattr(names, "folder"):
            files += [Path(names.folder) / name for name in names]
    stats = {str(file.absolute()): file.stat() for file in files if file.is_file()}
    return {file: [stat.st_size, stat.st_mtime_ns] for file, stat in stats.items()}


def _has_source(part) -> bool:
    """Say whether the class of a part lives in a module with readable source."""
    name = type(part).__module__
    return source_of(name, frozenset([name.partition(".")[0]])) is not None


# --- code -----------------------------------------------------------------------------------------


def code_of(*entries: str) -> dict[str, str]:
    """Return the digest of every module that entry points import, directly or not, by name.

    Parameters
    ----------
    entries : str
        Dotted names of modules. The modules of their packages count wherever they are installed.
        Any other module counts unless it belongs to the standard library or to an installed
        package.

    Raises
    ------
    RunError
        When an entry point has no source that can be read.
    """
    own = frozenset(entry.partition(".")[0] for entry in entries)
    digests: dict[str, str] = {}
    waiting = list(entries)
    while waiting:
        name = waiting.pop()
        path = None if name in digests else source_of(name, own)
        if path is not None:
            tree = parsed(path)
            digests[name] = digest_of(canonical(tree))[:DIGITS]
            package = name if path.name == "__init__.py" else name.rpartition(".")[0]
            waiting += imports_of(tree, package, own)
            waiting.append(name.rpartition(".")[0])  # importing it runs the package above it
        elif name in entries and name not in digests:
            raise RunError(
                f"module {name} has no source to be known by; put it into a .py file that can be "
                "imported"
            )
    return dict(sorted(digests.items()))


def cells_digest(cells: Iterable[str]) -> str:
    """Return the digest of the code of notebook cells.

    A line that is no Python, such as ``%matplotlib inline``, counts as text.
    """
    return digest_of([canonical(_cell(cell)) for cell in cells])[:DIGITS]


def notebook_code(path: Path | str) -> tuple[str, list[str]]:
    """Return the digest of a notebook's code cells, and the modules that they import.

    Outputs and texts do not count.
    """
    content = json.loads(Path(path).read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in content["cells"] if cell["cell_type"] == "code"]
    modules = {name for cell in cells for name in imports_of(_cell(cell), "", OWN)}
    return cells_digest(cells), sorted(name for name in modules if source_of(name, OWN))


def _cell(cell: str) -> ast.Module:
    """Return the syntax tree of a notebook cell, with its magic lines as text."""
    lines = [
        repr([line]) if line.lstrip().startswith(("%", "!")) else line for line in cell.splitlines()
    ]
    return ast.parse("\n".join(lines))


@cache
def source_of(name: str, own: frozenset[str]) -> Path | None:
    """Return the file of a module without importing it.

    Return None for a module outside our packages (`own`), and for a name that is no module.
    """
    top, *rest = name.split(".")
    home = _top(top)
    if home is None or (top not in own and INSTALLED & set(home.parts)):
        return None
    if not rest:
        return home
    place = home.parent.joinpath(*rest)
    files = (place / "__init__.py", place.with_suffix(".py"))
    return next((file for file in files if file.is_file()), None)


def _top(name: str) -> Path | None:
    """Return the file of a module or package of the top level, None for the standard library."""
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # a script has a file and no spec
        spec = None
    file = spec.origin if spec else getattr(sys.modules.get(name), "__file__", None)
    known = name not in sys.stdlib_module_names and file and file.endswith(".py")
    return Path(file).resolve() if known else None


def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a file; it is parsed again when the file has changed."""
    stat = path.stat()
    return _parsed(path, stat.st_mtime_ns, stat.st_size)


@cache
def _parsed(path: Path, changed_ns: int, size: int) -> ast.Module:
    """Parse a file as it was at a time."""
    try:
        return ast.parse(path.read_bytes())
    except SyntaxError as error:
        raise RunError(
            f"{path} is no Python that can be read ({error.msg}, line {error.lineno}); mend it"
        ) from error


def imports_of(tree: ast.AST, package: str, own: frozenset[str]) -> Iterator[str]:
    """Yield the names that a module imports and that may be modules.

    Imports for type checkers alone do not count. A name of a package that imports lazily (`LAZY`)
    stands for the module in which it lives.
    """
    nodes = list(running(tree))
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
                lazy = _lazy(alias.name, own)
                yield from (lazy[name] for name in attributes & lazy.keys())
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            yield base
            for alias in node.names:
                yield _lazy(base, own).get(alias.name, f"{base}.{alias.name}")
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = ast.unparse(node.func).rpartition(".")[2]
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield resolve_name(node.args[0].value, package)


def running(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a tree without the blocks that only a type checker reads."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        typing_only = isinstance(node, ast.If) and ast.unparse(node.test) in TYPING_ONLY
        waiting += node.orelse if typing_only else list(ast.iter_child_nodes(node))


@cache
def _lazy(package: str, own: frozenset[str]) -> dict[str, str]:
    """Return the lazily imported names of a package, with their modules."""
    return {name: f"{package}.{home}" for name, home in literal_table(package, LAZY, own).items()}


def literal_table(module: str, name: str, own: frozenset[str] = OWN) -> dict[str, str]:
    """Return a module's table of literal strings.

    The table is read from the source, without an import; it is empty where the module has none.
    """
    path = source_of(module, own)
    for node in parsed(path).body if path else ():
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if name in [getattr(target, "id", "") for target in targets]:
            with contextlib.suppress(ValueError):
                return ast.literal_eval(node.value)
    return {}


# --- syntax trees ---------------------------------------------------------------------------------


def canonical(node: object) -> object:
    """Return a syntax tree as JSON lists that are the same under every supported Python version.

    It has no positions, no ``pass``, no docstrings or other strings that stand alone, and no empty
    fields, because newer versions have fields that older ones lack. Neighbouring plain parts of an
    f-string are merged.
    """
    if isinstance(node, ast.Constant):
        return ["Constant", type(node.value).__name__, repr(node.value)]
    if isinstance(node, ast.JoinedStr):
        return ["JoinedStr", *map(canonical, _joined(node.values))]
    if isinstance(node, ast.AST):
        names = [name for name in node._fields if name not in LAYOUT]
        values = [(name, getattr(node, name, None)) for name in names]
        kept = [[name, canonical(value)] for name, value in values if value not in (None, [])]
        return [type(node).__name__, *kept]
    if isinstance(node, list):
        return [canonical(part) for part in node if not _idle(part)]
    return node


def _idle(node: object) -> bool:
    """Say whether a statement does nothing: a string that stands alone, or ``pass``."""
    value = getattr(node, "value", None)
    text = isinstance(value, ast.Constant) and isinstance(value.value, str)
    return isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and text)


def _joined(parts: Sequence[ast.expr]) -> list[ast.expr]:
    """Return the parts of an f-string, neighbouring plain parts merged and empty ones dropped."""
    merged: list[ast.expr] = []
    for part in parts:
        if isinstance(part, ast.Constant) and merged and isinstance(merged[-1], ast.Constant):
            merged[-1] = ast.Constant(merged[-1].value + part.value)
        elif not (isinstance(part, ast.Constant) and part.value == ""):
            merged.append(part)
    return merged
