"""The identity of a run: code, versions and prompts that its answers depend on, known by content.

A run folder keeps this identity; when it changes, the run starts anew. The code is the import
closure of an entry point, followed through the source without importing it. Of each module its
syntax tree counts, without docstrings: a comment, a docstring or another layout changes nothing, an
operator does. Modules of other packages count by version.
"""

import ast
import importlib.util
import inspect
import json
import sys
import textwrap
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.util import resolve_name
from itertools import groupby
from pathlib import Path

from .. import _HOME
from ..errors import RunError
from ..folders import DIGITS, digest_of
from ..policy import Policy, Prompt
from ..provenance import versions
from ..scorers import Scorer

PACKAGE = "igcore"
CATALOG = f"{PACKAGE}.catalog"  # knows all rooms; those that a run enters are entries of their own
INSTALLED = {"site-packages", "dist-packages"}  # folders into which packages are installed
# public name of the package, which imports it when it is asked for -> its module
PUBLIC = {name: f"{PACKAGE}.{home}" for name, home in _HOME.items()}
# fields of a syntax tree that do not change what the code does
LAYOUT = {"ctx", "kind", "type_comment", "type_ignores"}


def prompts_digest(prompts: Iterable) -> dict:
    """Return number and digest of prompts (with ``id`` and ``text``), whatever their order."""
    pairs = sorted([prompt.id, prompt.text] for prompt in prompts)
    return {"n": len(pairs), "digest": digest_of(pairs)[:DIGITS]}


def part_identity(part) -> dict:
    """Return the identity of a policy or scorer by content.

    It is ``identity()`` where the part has one, else its name and digest; its files are added. A
    part that was defined in a notebook or in an installed package has no module to hash, so its
    source counts instead.

    Raises
    ------
    RunError
        For a function that holds what cannot be told from another.
    """
    if hasattr(part, "identity"):
        known = part.identity()
    else:
        known = {"name": part.name, "digest": part.digest}
    for inner in getattr(part, "parts", (part,)):
        if unknown := getattr(inner, "unknown", ""):
            raise RunError(
                f"scorer {inner.name!r} holds what nobody can tell from another ({unknown}), so a "
                "run would not see it change; give the function a text as its attribute digest, "
                "such as 'v1', and change it with what the function holds"
            )
    if files := getattr(part, "files", None):
        known = known | {"files": dict(files)}
    if not _has_source(part):
        source = textwrap.dedent(inspect.getsource(type(part)))
        known = known | {"code": _digest(_cell(source))}
    return known


def models_identity(
    policy: Policy, cost: Scorer, reward: Scorer | None, prompts: Iterable[Prompt], *modules: str
) -> dict:
    """Return what lines depend on besides settings: models, code, versions, device and prompts.

    Parameters
    ----------
    modules : str
        Dotted names of the modules that make the lines.
    """
    model = policy.model
    parts = {
        "policy": part_identity(policy),
        "cost": part_identity(cost),
        "reward": None if reward is None else part_identity(reward),
    }
    return {
        "parts": parts,
        "code": code_of(*modules, *modules_of(policy, cost, reward)),
        "versions": versions(),
        "dtype": str(model.dtype),
        "device": str(model.device),
        "chosen": prompts_digest(prompts),
    }


def modules_of(*parts) -> list[str]:
    """Return the modules that define policies and scorers.

    Those that `igcore.load_scorer` took them from count as well, and those of their parts.
    """
    inner = [part for outer in parts for part in getattr(outer, "parts", ())]
    parts = (*parts, *inner)
    modules = {type(part).__module__ for part in parts if _has_source(part)}
    homes = {getattr(part, "home", None) for part in parts} - {None}
    return sorted(modules | {home for home in homes if source_of(home)})


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
    files = [Path(path).absolute() for path in paths]
    for part in parts:
        names = getattr(part, "files", {})
        if hasattr(names, "folder"):
            files += [Path(names.folder, name).absolute() for name in names]
    known = {}
    for file in files:
        if file.is_file():
            known[str(file)] = [file.stat().st_size, file.stat().st_mtime_ns]
    return known


def _has_source(part) -> bool:
    """Say whether the class of a part lives in a module with readable source."""
    return source_of(type(part).__module__) is not None


# --- the import closure ---------------------------------------------------------------------------


def code_of(*entries: str) -> dict[str, str]:
    """Return the digests of all modules that entry points import, directly or not, by name.

    Parameters
    ----------
    entries : str
        Dotted names of modules. The modules of igcore count wherever it is installed. Any other
        module counts unless it belongs to the standard library or to an installed package.

    Raises
    ------
    RunError
        When an entry point has no source that can be read.
    """
    digests: dict[str, str] = {}
    waiting = list(entries)
    while waiting:
        name = waiting.pop()
        path = source_of(name)
        if name in digests or path is None or name == CATALOG:
            continue
        above = name.rpartition(".")[0]
        waiting.append(above)  # importing a module runs the package above it
        package = name if path.name == "__init__.py" else above
        digests[name], imports = _known(path, path.read_bytes(), package)
        waiting += imports
    for name in entries:
        if name not in digests:
            raise RunError(
                f"module {name} has no source to be known by; put it into a .py file that can be "
                "imported"
            )
    return dict(sorted(digests.items()))


def notebook_code(path: Path | str) -> tuple[str, list[str]]:
    """Return the digest of a notebook's code cells, and the modules that they import.

    Outputs and texts do not count.
    """
    cells = json.loads(Path(path).read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    tree = _cell("\n".join(code))
    modules = {name for name in imports_of(tree, "") if source_of(name)}
    return _digest(tree), sorted(modules)


def _cell(cell: str) -> ast.Module:
    """Return the syntax tree of notebook code; a line such as ``%matplotlib`` counts as text."""
    lines = cell.splitlines()
    for number, line in enumerate(lines):
        if line.lstrip().startswith(("%", "!")):
            lines[number] = repr([line])
    return ast.parse("\n".join(lines))


@cache
def source_of(name: str) -> Path | None:
    """Return the file of a module without importing it.

    Return None for a module of another installed package, and for a name that is no module.
    """
    top, *rest = name.split(".")
    home = _top(top)
    if home is None or (top != PACKAGE and INSTALLED & set(home.parts)):
        return None
    if not rest:
        return home
    place = home.parent.joinpath(*rest)
    files = [place / "__init__.py", place.with_suffix(".py")]
    return next((file for file in files if file.is_file()), None)


def _top(name: str) -> Path | None:
    """Return the file of a module or package of the top level, None for the standard library."""
    if name in sys.stdlib_module_names:
        return None
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # a script has a file and no spec
        spec = None
    file = spec.origin if spec else getattr(sys.modules.get(name), "__file__", None)
    return Path(file).resolve() if file and file.endswith(".py") else None


@cache  # by content: entry points share most of their modules, and so do the runs of a process
def _known(path: Path, source: bytes, package: str) -> tuple[str, tuple[str, ...]]:
    """Return the digest of a module's code, and the names that it imports."""
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise RunError(f"{path} is no Python that can be read ({error}); mend it") from error
    return _digest(tree), tuple(imports_of(tree, package))


def imports_of(tree: ast.AST, package: str) -> Iterator[str]:
    """Yield the names that a module imports and that may be modules.

    A public name of the package stands for the module in which it lives.
    """
    nodes = list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            homes = PUBLIC if base == PACKAGE else {}
            yield base
            for alias in node.names:
                yield homes.get(alias.name, f"{base}.{alias.name}")
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
                if alias.name == PACKAGE:  # whose attributes may follow, whatever it is called here
                    yield from PUBLIC.values()


# --- syntax trees ---------------------------------------------------------------------------------


def _digest(tree: ast.AST) -> str:
    """Return the digest of code."""
    return digest_of(canonical(tree))[:DIGITS]


def canonical(node: object) -> object:
    """Return a syntax tree as JSON lists that are the same under every supported Python version.

    It has no positions, no ``pass``, no docstrings or other strings that stand alone, and no empty
    fields, because newer versions have fields that older ones lack. Neighbouring plain parts of an
    f-string are merged.
    """
    if isinstance(node, list):
        return [canonical(part) for part in node if not _idle(part)]
    if not isinstance(node, ast.AST):
        return node
    kind = type(node).__name__
    if isinstance(node, ast.Constant):
        return [kind, type(node.value).__name__, repr(node.value)]
    if isinstance(node, ast.JoinedStr):
        return [kind, *_joined(node.values)]
    known = [kind]
    for name, value in ast.iter_fields(node):
        if name not in LAYOUT and value not in (None, []):
            known.append([name, canonical(value)])
    return known


def _idle(node: object) -> bool:
    """Say whether a statement does nothing: a string that stands alone, or ``pass``."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return isinstance(node.value.value, str)
    return isinstance(node, ast.Pass)


def _joined(parts: list[ast.expr]) -> Iterator[object]:
    """Yield the parts of an f-string, neighbouring plain parts merged and empty ones dropped."""
    for kind, group in groupby(parts, type):
        if kind is not ast.Constant:
            yield from map(canonical, group)
        elif text := "".join(part.value for part in group):
            yield canonical(ast.Constant(text))
