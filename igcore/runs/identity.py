"""The identity of a run: code, versions and prompts that its answers depend on, known by content.

A run folder keeps this identity; when it changes, the run starts anew. The code is the import
closure of an entry point, followed through the source without importing it. Of each module its
syntax tree counts, without docstrings: a comment, a docstring or another layout changes nothing, an
operator does. Modules of other packages count by version.
"""

import ast
import importlib.metadata
import importlib.util
import inspect
import json
import site
import sys
import sysconfig
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

from ..errors import RunError
from ..folders import DIGITS, digest_of

PACKAGE = __name__.partition(".")[0]
VERSIONS = ("igcore", "torch", "transformers", "tokenizers", "numpy")
# a package that imports names lazily has a table of this name: public name -> module
LAZY = "_HOME"
# fields of a syntax tree that do not change what the code does
LAYOUT = ("ctx", "kind", "type_comment", "type_ignores")


def versions() -> dict[str, str]:
    """Return the versions of the packages that can change a number."""
    return {name: importlib.metadata.version(name) for name in VERSIONS}


def prompts_digest(prompts: Iterable) -> dict:
    """Return number and digest of prompts (with ``id`` and ``text``), whatever their order."""
    pairs = sorted([prompt.id, prompt.text] for prompt in prompts)
    return {"n": len(pairs), "digest": digest_of(pairs)[:DIGITS]}


def about(part) -> dict:
    """Return the identity of a policy or scorer by content.

    It is ``identity()`` where the part has one, else its name and digest; its files are added. A
    part that was defined in a notebook has no module to hash, so its source counts instead.
    """
    known = (
        part.identity() if hasattr(part, "identity") else {"name": part.name, "digest": part.digest}
    )
    files = {"files": dict(part.files)} if getattr(part, "files", None) else {}
    return known | files | ({} if _has_source(part) else {"code": cells_digest([_source(part)])})


def modules_of(*parts) -> list[str]:
    """Return the modules that define policies and scorers.

    Those that `igcore.load_scorer` took them from count as well.
    """
    homes = {getattr(part, "home", None) for part in parts} | {
        type(part).__module__ for part in parts if _has_source(part)
    }
    return sorted(homes - {None})


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
    known = [getattr(part, "files", {}) for part in parts]
    models = [
        Path(files.folder) / name for files in known if hasattr(files, "folder") for name in files
    ]
    found = [path.absolute() for path in (*models, *map(Path, paths)) if path.is_file()]
    return {str(path): [path.stat().st_size, path.stat().st_mtime_ns] for path in found}


def _has_source(part) -> bool:
    """Say whether the class of a part lives in a module with readable source."""
    name = type(part).__module__
    return source_of(name, frozenset([name.partition(".")[0]])) is not None


def _source(part) -> str:
    """Return the source of a class that was defined in a notebook cell or script."""
    try:
        return textwrap.dedent(inspect.getsource(type(part)))
    except (OSError, TypeError) as error:
        raise RunError(
            f"{type(part).__name__} has no source to be known by; define it in a .py file or a "
            "notebook cell"
        ) from error


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
    found: dict[str, str] = {}
    waiting = list(entries)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        if (path := source_of(name, own)) is None:
            if name in entries:
                raise RunError(
                    f"module {name} has no source to be known by; put it into a .py file that can "
                    "be imported"
                )
            continue
        tree = parsed(path)
        found[name] = digest_of(canonical(tree))[:DIGITS]
        waiting += imports_of(
            tree, name if path.name == "__init__.py" else name.rpartition(".")[0], own
        )
        waiting += parents(name)
    return dict(sorted(found.items()))


def cells_digest(cells: Iterable[str]) -> str:
    """Return the digest of the code of notebook cells.

    A line that is no Python, such as ``%matplotlib inline``, counts as text.
    """
    return digest_of([canonical(ast.parse(plain(cell))) for cell in cells])[:DIGITS]


def notebook_code(path: Path | str) -> tuple[str, list[str]]:
    """Return the digest of a notebook's code cells, and the modules that they import.

    Outputs and texts do not count.
    """
    content = json.loads(Path(path).read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in content["cells"] if cell["cell_type"] == "code"]
    own = frozenset([PACKAGE])
    modules = {name for cell in cells for name in imports_of(ast.parse(plain(cell)), "", own)}
    return cells_digest(cells), sorted(name for name in modules if source_of(name, own))


def plain(cell: str) -> str:
    """Return a notebook cell with its magic lines as text, so that Python can parse it."""
    return "\n".join(
        repr([line]) if line.lstrip().startswith(("%", "!")) else line for line in cell.splitlines()
    )


@cache
def source_of(name: str, own: frozenset[str]) -> Path | None:
    """Return the file of a module without importing it.

    Return None for a module outside our packages (`own`), and for a name that is no module.
    """
    top, *rest = name.split(".")
    if top in sys.stdlib_module_names:
        return None
    if (
        (home := _top(top)) is None
        or top not in own
        and any(home.is_relative_to(folder) for folder in _installed())
    ):
        return None
    path = home
    for part in rest:
        if path.name != "__init__.py":
            return None  # a module has no submodules
        folder = path.parent
        path = folder / part / "__init__.py"
        if not path.is_file():
            path = folder / f"{part}.py"
    return path if path.is_file() else None


def _top(name: str) -> Path | None:
    """Return the file of a module or package of the top level."""
    loaded = sys.modules.get(name)
    try:
        spec = loaded.__spec__ if loaded is not None else importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    # a script has a file and no spec
    file = spec.origin if spec is not None else getattr(loaded, "__file__", None)
    return Path(file).resolve() if file and file.endswith(".py") else None


@cache
def _installed() -> list[Path]:
    """Return the folders into which packages are installed."""
    places = {
        sysconfig.get_path("purelib"),
        sysconfig.get_path("platlib"),
        site.getusersitepackages(),
        *site.getsitepackages(),
    }
    return [Path(place).resolve() for place in places]


def parents(name: str) -> list[str]:
    """Return the packages in which a module lies: importing it runs their ``__init__``."""
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


_TREES: dict[tuple, ast.Module] = {}


def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a file; it is parsed again when the file has changed."""
    about = path.stat()
    key = (path, about.st_mtime_ns, about.st_size)
    if key not in _TREES:
        try:
            _TREES[key] = ast.parse(path.read_bytes())
        except SyntaxError as error:
            raise RunError(
                f"{path} is no Python that can be read ({error.msg}, line {error.lineno}); mend it"
            ) from error
    return _TREES[key]


def imports_of(tree: ast.AST, package: str, own: frozenset[str]) -> Iterator[str]:
    """Yield the names that a module imports and that may be modules.

    Imports for type checkers alone do not count. A name of a package that imports lazily (`LAZY`)
    stands for the module in which it lives.
    """
    for node in running(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
                yield from _used(tree, alias.asname or alias.name, alias.name, own)
        elif isinstance(node, ast.ImportFrom):
            base = absolute(node, package)
            yield base
            for alias in node.names:
                yield _lazy(base, own).get(alias.name, f"{base}.{alias.name}")
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = (
                node.func.attr
                if isinstance(node.func, ast.Attribute)
                else getattr(node.func, "id", "")
            )
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield _resolved(node.args[0].value, package)


def running(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a tree without the blocks that only a type checker reads."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in (
            getattr(node.test, a, "") for a in ("id", "attr")
        )
        waiting += node.orelse if typing_only else list(ast.iter_child_nodes(node))


def absolute(node: ast.ImportFrom, package: str) -> str:
    """Return the full name of the module of a ``from ... import`` statement."""
    return _resolved("." * node.level + (node.module or ""), package)


def _resolved(name: str, package: str) -> str:
    """Return the full name of a module that is named from inside a package."""
    rest = name.lstrip(".")
    if level := len(name) - len(rest):
        parts = package.split(".")
        base = parts[: len(parts) - level + 1]
        return ".".join([*base, *([rest] if rest else [])])
    return name


@cache
def _lazy(package: str, own: frozenset[str]) -> dict[str, str]:
    """Return the lazily imported names of a package, with their modules."""
    return {name: f"{package}.{home}" for name, home in literal_table(package, LAZY, own).items()}


def literal_table(module: str, name: str, own: frozenset[str] = frozenset([PACKAGE])) -> dict:
    """Return the entries of a module's table whose keys and values are literal strings.

    The table is read from the source, without an import; it is empty where the module has none.
    """
    path = source_of(module, own)
    for node in parsed(path).body if path else ():
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(getattr(node, "value", None), ast.Dict) and any(
            getattr(target, "id", "") == name for target in targets
        ):
            pairs = zip(node.value.keys, node.value.values, strict=True)
            texts = [
                (k.value, v.value)
                for k, v in pairs
                if isinstance(k, ast.Constant) and isinstance(v, ast.Constant)
            ]
            return {name: value for name, value in texts if isinstance(value, str)}
    return {}


def _used(tree: ast.AST, alias: str, package: str, own: frozenset[str]) -> Iterator[str]:
    """Yield the modules of the lazy names that are used as attributes of an imported package."""
    if names := _lazy(package, own):
        for node in running(tree):
            if (
                isinstance(node, ast.Attribute)
                and getattr(node.value, "id", "") == alias
                and node.attr in names
            ):
                yield names[node.attr]


# --- syntax trees ---------------------------------------------------------------------------------


def canonical(node: object) -> object:
    """Return a syntax tree as JSON lists that are the same under every supported Python version.

    Left out are positions, docstrings and other strings that stand alone, ``pass``, and empty
    fields, because newer versions have fields that older ones lack. Neighbouring plain parts of an
    f-string are merged.
    """
    if isinstance(node, ast.Constant):
        return ["Constant", type(node.value).__name__, repr(node.value)]
    if isinstance(node, ast.JoinedStr):
        return ["JoinedStr", *map(canonical, _joined(node.values))]
    if isinstance(node, ast.AST):
        fields = [(name, getattr(node, name, None)) for name in node._fields if name not in LAYOUT]
        kept = [
            [name, canonical(value)] for name, value in fields if value is not None and value != []
        ]
        return [type(node).__name__, *kept]
    if isinstance(node, list):
        return [canonical(part) for part in node if not _idle(part)]
    return node


def _idle(node: object) -> bool:
    """Say whether a statement does nothing: a string that stands alone, or ``pass``."""
    return isinstance(node, ast.Pass) or (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _joined(parts: Sequence[ast.expr]) -> list[ast.expr]:
    """Return the parts of an f-string, neighbouring plain parts merged and empty ones dropped."""
    out: list[ast.expr] = []
    for part in parts:
        if isinstance(part, ast.Constant) and out and isinstance(out[-1], ast.Constant):
            out[-1] = ast.Constant(out[-1].value + part.value)
        elif not (isinstance(part, ast.Constant) and part.value == ""):
            out.append(part)
    return out
