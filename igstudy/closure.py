"""Content hashes of a user's code: of a module its syntax tree, of a function all that it uses.

The digest of a function is the hash of a pickle in which what a user has defined counts by its
content: a function by its bytecode, defaults, closure, the globals whose names it uses and its
module with what that imports; a class by its members. A partial holds its arguments, and an object
its state. What an installed package defines counts by name, and what has a text ``digest`` by that
text. Sets and mappings count without their order, and nothing counts by its address, so another
process finds the same digest.
"""

import ast
import functools
import hashlib
import importlib.util
import pickle
import sys
import types
from collections.abc import Iterator
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import igcore
import igserve
from igcore.errors import RunError, one_line
from igcore.files import DIGITS, digest_of
from igcore.scorers import FunctionScorer

# the packages, whose code counts as a whole, see `igstudy.runs.identity`
HOMES = {
    "igcore": Path(igcore.__file__).parent,
    "igserve": Path(igserve.__file__).parent,
    "igstudy": Path(__file__).parent,
}
INSTALLED = {"site-packages", "dist-packages"}  # folders into which packages are installed
CODE_ATTRIBUTES = attrgetter(
    *("co_code", "co_exceptiontable", "co_consts", "co_names", "co_varnames", "co_freevars"),
    *("co_flags", "co_argcount", "co_posonlyargcount", "co_kwonlyargcount"),
)
LRU_WRAPPER = type(functools.lru_cache(len))
WRAPPERS = (staticmethod, classmethod, property, functools.cached_property, LRU_WRAPPER)
WRAPPED = ("__wrapped__", "fget", "func")  # the functions in them


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
    """Return the digests of a user's modules and of those that they import, by name.

    Nothing is imported. Modules of `PACKAGES`, of Python and of installed packages do not count.
    """
    found: dict[str, str] = {}
    waiting = list(modules)
    while waiting:
        name = waiting.pop()
        path = source_of(name)
        if name in found or path is None:
            continue
        above = name.rpartition(".")[0]
        package = name if path.name == "__init__.py" else above
        try:
            found[name], imports = _known(path.read_bytes(), package)
        except SyntaxError as error:
            raise RunError(f"{path} is no Python that can be read ({error}); correct it") from error
        waiting += [above, *imports]  # importing a module runs the package above it
    return dict(sorted(found.items()))


@cache  # by content: functions share modules, and modules what they import
def _known(source: bytes, package: str) -> tuple[str, list[str]]:
    """Return the digest of a module's code, and the names that it imports and may be modules."""
    tree = ast.parse(source)
    imports = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imports += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            base = importlib.util.resolve_name(base, package)
            imports += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return tree_digest(tree), imports


def source_of(name: str) -> Path | None:
    """Return the file of a user's module without importing it; None for any other name.

    None also for a script or notebook, whose functions count by the globals that they use.
    """
    top, *rest = name.split(".")
    if top in ("", "__main__", *HOMES) or top in sys.stdlib_module_names:
        return None
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # of a module that no file has
        return None
    folders = getattr(spec, "submodule_search_locations", None) or [""]
    home = Path(getattr(spec, "origin", None) or Path(next(iter(folders)), "__init__.py")).resolve()
    if home.suffix != ".py" or INSTALLED & set(home.parts):
        return None
    place = home.parent.joinpath(*rest)
    files = [place / "__init__.py", place.with_suffix(".py")] if rest else [home]
    return next((path for path in files if path.is_file()), None)


# --- functions ------------------------------------------------------------------------------------


def identified(scorer: Any) -> Any:
    """Return a scorer whose functions have a digest: the given one, or that of their content.

    Raises
    ------
    RunError
        For a function that holds a value without content to hash, such as a lock.
    """
    for part in getattr(scorer, "parts", (scorer,)):
        if isinstance(part, FunctionScorer) and not part.digest:
            try:
                part.digest = content_digest(part.function)
            except Exception as error:  # pickle may run anybody's code
                raise RunError(
                    f"scorer {part.name!r} holds a value that has no hash ({one_line(error)}), so "
                    "a run would not see it change; give the function a text as its attribute "
                    "digest, such as 'v1', and change it with the value"
                ) from error
    return scorer


def content_digest(value: Any) -> str:
    """Return the digest of a value, 64 hex digits; errors of pickle pass through."""
    hashed = hashlib.sha256()
    ContentPickler(types.SimpleNamespace(write=hashed.update), protocol=4).dump(value)
    return hashed.hexdigest()


class ContentPickler(pickle.Pickler):
    """Pickles what a user has defined by its content, and nothing by its order or address."""

    def persistent_id(self, value: Any) -> Any:
        """Return a form of a text, set or mapping without identity or order; None for others."""
        if type(value) is str:  # else pickle would tell one text from two equal ones
            return value.encode(errors="surrogatepass")
        if type(value) in (set, frozenset):
            return sorted(map(content_digest, value))
        if type(value) is dict:
            return [(name, value[name]) for name in sorted(value, key=content_digest)]
        return None

    def reducer_override(self, value: Any) -> Any:
        """Return the content of a value of a user; pickle reduces the others by its own rules."""
        torch = sys.modules.get("torch")
        if isinstance(digest := getattr(value, "digest", None), str) and digest:
            held: Any = digest
        elif isinstance(value, WRAPPERS):
            held = [getattr(value, name, None) for name in WRAPPED]
        elif torch and isinstance(value, torch.Tensor):
            flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            held = str(value.dtype), tuple(value.shape), flat.numpy()
        elif isinstance(value, types.ModuleType):
            held = value.__name__, module_digests(value.__name__)
        elif isinstance(value, types.CodeType):
            held = CODE_ATTRIBUTES(value)
        elif is_installed(value):
            return NotImplemented
        elif isinstance(value, types.FunctionType):
            held = content_of(value)
        elif isinstance(value, type):
            held = value.__qualname__, value.__bases__, members_of(value)
        else:
            return NotImplemented
        return list, (), held  # as a state, which may lead back to the value


def has_source(kind: type) -> bool:
    """True if the packages or a module of a user define a class, and no notebook does."""
    return kind.__module__.partition(".")[0] in HOMES or bool(source_of(kind.__module__))


def members_of(kind: type) -> dict[str, Any]:
    """Return a class's own attributes, without those that Python adds."""
    names = [n for n in vars(kind) if not n.startswith("__") or callable(getattr(kind, n))]
    return {name: vars(kind)[name] for name in names if name != "_abc_impl"}


def content_of(function: types.FunctionType) -> list[Any]:
    """Return code, defaults, attributes, closure, globals and modules of a function."""
    names = set(names_in_code(function.__code__))  # of globals, attributes and imports alike
    read = {name: function.__globals__[name] for name in names & function.__globals__.keys()}
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    defaults = function.__defaults__, function.__kwdefaults__
    own = module_digests(function.__module__ or "", *names - read.keys())
    return [function.__code__, defaults, vars(function), cells, read, own]


def names_in_code(code: types.CodeType) -> Iterator[str]:
    """Yield the names that code and the functions in it use."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names_in_code(constant)


def is_installed(value: Any) -> bool:
    """True if pickle finds a class or function by name, in Python or an installed package."""
    module, name = getattr(value, "__module__", None) or "", getattr(value, "__qualname__", None)
    imported = sys.modules.get(module)
    if not getattr(imported, "__spec__", None) or source_of(module):  # none of a notebook
        return False
    try:  # not a function within a function, nor one that `exec` has made
        return bool(attrgetter(str(name))(imported) is value)
    except AttributeError:
        return False
