"""The modules that a params file or a recipe may name, and how scorers in them are loaded.

Such a file may come from somebody else. A function in it, ``module:function``, is imported only
from a module whose file lies below the folder of the file, or that the command line allows
and whose file lies below the current folder. Neither is ever a module of Python or of an installed
package. `admit` looks at the files when the settings are read, and imports nothing. It notes the
folders in the environment variable `MODULES`, which jobs and kernels inherit.
"""

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from importlib import import_module
from inspect import isroutine
from pathlib import Path
from types import ModuleType
from typing import Any

from igcore.errors import ParameterError, one_line
from igcore.models.registry import OWN, first_on_path, load_scorer
from igcore.settings import Named, written

MODULES = "IGSERVE_MODULES"  # module -> the folder that it is imported from, as JSON
OWN_PACKAGES = {"igcore", "igserve", "igstudy"}
INSTALLED = {"site-packages", "dist-packages"}  # folders into which packages are installed
SCORERS = {"cost", "reward", "costs", "helpfulness", "harmlessness"}  # settings


def add_allow_option(parser: argparse.ArgumentParser) -> None:
    """Add the option for the modules that a params file may name."""
    about = "a module of the current folder whose functions the params file may name"
    parser.add_argument("--allow", action="append", default=[], metavar="MODULE", help=about)


def named_functions(settings: Any, key: str = "") -> Iterator[str]:
    """Yield each ``module:function`` that settings name as a scorer, at any depth.

    Parameters
    ----------
    key : str
        The setting that `settings` are the value of.
    """
    if isinstance(settings, Mapping):
        for name, part in settings.items():
            yield from named_functions(part, key if name == "name" else name)
    elif isinstance(settings, list):
        for part in settings:
            yield from named_functions(part, key)
    elif key in SCORERS and isinstance(settings, str) and OWN.fullmatch(settings):
        yield settings


def named_modules(settings: Any) -> list[str]:
    """Return the modules of all `named_functions`."""
    return [name.partition(":")[0] for name in named_functions(settings)]


def admitted() -> dict[str, str]:
    """Return the modules that were admitted, each with the folder that it is imported from."""
    return dict(json.loads(os.environ.get(MODULES, "{}")))


def admit(settings: Mapping[str, Any], source: Path | str, allow: Collection[str] = ()) -> None:
    """Admit the modules that the settings of a params file name. Nothing is imported.

    Parameters
    ----------
    source : Path or str
        The params file, or what an error calls settings that have none.
    allow : collection of str
        Modules and packages that may also lie in the current folder.

    Raises
    ------
    ParameterError
        For a module that is not allowed.
    """
    known = admitted()
    for name in named_functions(settings):
        module = name.partition(":")[0]
        folders = [source.resolve().parent] if isinstance(source, Path) else []
        if module in allow or module.partition(".")[0] in allow:
            folders.append(Path.cwd())
        if module in known:  # to the process that started this one
            folders.append(Path(known[module]))
        homes = [str(folder) for folder in folders if lies_below(module, folder)]
        if not homes:
            option = f"add --allow {module} to the command (of Snakemake: --config allow={module})"
            remedy = f"; if you trust it, {option}" if lies_below(module, Path.cwd()) else ""
            raise ParameterError(
                f"{source} names {name!r:.100}, and may name only functions of modules of your own "
                f"below its folder{remedy}"
            )
        known[module] = homes[0]
    os.environ[MODULES] = json.dumps(known)


def lies_below(module: str, folder: Path) -> bool:
    """True if a module that no package has installed would be imported from below a folder."""
    with first_on_path(str(folder)):
        file = source_of(module)
    if file is None or INSTALLED & set(file.parts):
        return False
    return file.resolve().is_relative_to(folder.resolve())


def source_of(name: str) -> Path | None:
    """Return the file of a user's module without importing it; None for any other name.

    None also for a script or notebook: what a cell has defined is in no file.
    """
    top, *rest = name.split(".")
    if top in ("", "__main__", *OWN_PACKAGES) or top in sys.stdlib_module_names:
        return None
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # of a module that no file has
        return None
    folders = getattr(spec, "submodule_search_locations", None) or [""]
    home = Path(getattr(spec, "origin", None) or Path(next(iter(folders)), "__init__.py")).resolve()
    if home.suffix != ".py":
        return None
    place = home.parent.joinpath(*rest)
    files = [place / "__init__.py", place.with_suffix(".py")] if rest else [home]
    return next((path for path in files if path.is_file()), None)


def load_trusted(scorer: Named, role: str = "cost") -> Any:
    """Load a scorer as `igcore.load_scorer`, of a module only what was admitted.

    Raises
    ------
    ParameterError
        Also when a module that a params file named is another one by now, and for a function or
        class that such a module has imported itself.
    """
    known = admitted()
    for name in named_functions({role: written(scorer)}):
        module, _, path = name.partition(":")
        if module not in known:  # a user's own program or notebook names it
            continue
        found = lies_below(module, Path(known[module]))
        try:
            with first_on_path(known[module]):
                own = found and is_defined(path, import_module(module))
        except Exception as error:  # a user's module may raise anything
            raise ParameterError(
                f"{name!r:.100} cannot be imported ({one_line(error):.200}); correct the module"
            ) from None
        if not own:
            raise ParameterError(
                f"{name!r:.100} is not defined in the module {module} below {known[module]}; name "
                "a function that is, and give the module a name that no other has"
            )
    return load_scorer(scorer, role)


def is_defined(path: str, module: ModuleType) -> bool:
    """True if a path of attributes leads to what a module defines, so that its file tells it."""
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part)
        if isinstance(value, ModuleType):
            return False
    made_here = getattr(value, "__module__", None) == module.__name__
    return made_here or not (isroutine(value) or isinstance(value, type))
