"""Params files: read, overridden as a whole, and expanded into the runs of their grids.

The names of files and runs are checked here. A setting's value is checked where it is used, see
`igstudy.runs.params`.
"""

import itertools
import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from igcore.errors import ParameterError, shown, unknown_name
from igcore.settings import Options, settings
from igserve.trust import admit
from igserve.yamlfile import read_yaml

from ..settings import FolderName, check_name
from .params import class_of

DECODED = ("decode", "regime")  # of notebook 30
KINDS = ("every", *DECODED, "critic", "judge")
Given = dict[str, Any]  # the settings of a file or a run
MOST_RUNS = 10_000  # that the grid and the points of one file may make


@settings(kw_only=True)
class Runs:
    """What makes the runs of a params file, see `runs_of`."""

    run: FolderName
    grid: dict[str, Annotated[list[Any], Field(min_length=1)]] = field(default_factory=dict)
    points: Annotated[dict[str, Options], Field(min_length=1)] = field(
        default_factory=lambda: {"": {}}
    )


@dataclass(frozen=True)
class ParamFiles:
    """The files of one folder of params.

    Attributes
    ----------
    folder : str
        Name of the folder, such as ``paper``.
    changes : mapping
        Overrides of their settings. Those under ``every`` apply to all files whose kind has a
        setting of that name; those under a kind of file (its name up to the first hyphen) apply to
        all files of the kind, see `merged`; ``profile`` sends all runs to another folder.
    limit : int
        Number of prompts of each run that takes a share of hardest prompts; the share stays the
        same. 0 changes nothing.
    base : Path
        The folder ``params``.
    allow : collection of str
        Modules that the files may name, see `igserve.trust.admit`.

    Raises
    ------
    ParameterError
        For a folder or profile that `igstudy.settings.check_name` refuses, and for changes of
        another form.
    """

    folder: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    limit: int = 0
    base: Path = Path("params")
    allow: Collection[str] = ()

    def __post_init__(self) -> None:
        """Refuse invalid folder names and changes of unknown kinds of files."""
        check_name("the folder of params", self.folder)
        check_name("profile", self.profile)
        for kind, changed in self.changes.items():
            if kind != "profile" and (kind not in KINDS or not isinstance(changed, dict)):
                raise unknown_name("change, or one that is no mapping:", kind, ("profile", *KINDS))

    @property
    def profile(self) -> str:
        """Name of the folder of runs."""
        profile: str = self.changes.get("profile", self.folder)
        return profile

    def files(self, kind: str) -> list[Path]:
        """Return all files of a kind: ``critic``, ``decode``, ``judge``, ``tables``, ..."""
        paths = sorted((self.base / self.folder).glob(f"{kind}*.yaml"))
        return [path for path in paths if kind_of(path) == kind]

    def named(self, kind: str) -> dict[str, Path]:
        """Return all files of a kind by the name after it: ``raw`` of ``critic-raw.yaml``."""
        return {path.stem.removeprefix(f"{kind}-"): path for path in self.files(kind)}

    def critic_file(self, profile: str, run: str) -> Path:
        """Return the file of a run of notebook 20, of this or another profile."""
        folder = self.folder if profile == self.profile else profile
        return self.base / folder / f"critic-{run}.yaml"

    def trained(self, folder: str | None) -> list[str]:
        """Return the sign of success of the run of notebook 20 that makes a folder of networks.

        A run without a params file was trained by hand and must be there.
        """
        # runs/<profile>/critics/<run>[/<critic>]
        profile, _, run = [*Path(folder or "").parts, "", "", "", ""][1:4]
        made = self.critic_file(profile, run).is_file()
        return [f"runs/{profile}/critics/{run}/manifest.json"] if made else []

    def read(self, file: Path | str) -> Given:
        """Return the settings of a file, with the changes and within `limit`.

        Raises
        ------
        ParameterError
            When it holds no settings, when its profile names another folder, when its own name
            cannot be the name of a run, and for a module that is not allowed.
        """
        file = Path(file)
        check_name(f"the name of {file} without .yaml", file.stem)
        given, home = read_recipe(file), file.parent.name
        if given["profile"] != home:
            raise ParameterError(
                f"profile of {file} is {shown(given['profile'])}; leave it out, or set it to "
                f"{home!r}, the folder that the file lies in"
            )
        if home == self.folder and self.changes:
            every, kind = self.changes.get("every", {}), kind_of(file)
            known = defaults_of(kind) if every else {}
            given |= {name: every[name] for name in every.keys() & known.keys()}
            given = merged(given, self.changes.get(kind, {})) | {"profile": self.profile}
            moved = json.dumps(given).replace(f"runs/{self.folder}/", f"runs/{self.profile}/")
            given = json.loads(moved)
        admit(given, file, self.allow)
        hardest, limit = given.get("hardest") or 0, given.get("limit") or 0
        # not where a whole set is answered, nor where the notebook will refuse them
        if self.limit and all(type(number) is int and number > 0 for number in (hardest, limit)):
            given |= {"limit": self.limit, "hardest": round(self.limit * hardest / limit)}
        return given

    def points(self, file: Path | str) -> Iterator[tuple[str, Given]]:
        """Yield name and settings of every run of a file, see `runs_of`.

        Raises
        ------
        ParameterError
            See `read` and `runs_of`.
        """
        return runs_of(self.read(file), file)

    def runs(self) -> dict[str, Given]:
        """Return the settings of all runs of notebook 30 by name, also of regimes.

        Files of all other kinds are looked at too, so that Snakemake refuses a bad name before it
        starts anything.

        Raises
        ------
        ParameterError
            See `points`, and when two runs would write into one folder.
        """
        for kind in ("critic", "judge"):  # their runs have folders of their own
            self._made(self.files(kind))
        return self._made(self.decoded())

    def decoded(self) -> list[Path]:
        """Return all files of notebook 30, also those of regimes."""
        return [file for kind in DECODED for file in self.files(kind)]

    def _made(self, files: Iterable[Path]) -> dict[str, Given]:
        """Return the settings of all runs of these files, by name.

        Refuse two files that would write into one folder.
        """
        runs: dict[str, Given] = {}
        for file in files:
            for run, given in self.points(file):
                if run in runs:
                    raise ParameterError(
                        f"{file} makes a run {run!r}, as another file or point does; give one "
                        "of the two another name"
                    )
                runs[run] = given
        return runs


def read_recipe(path: Path) -> Given:
    """Return the settings of a params file, and those that its place decides.

    By default ``profile`` is the name of the folder that the file lies in, ``run`` the name of the
    file, of a critic or a judge without its kind, and ``figures`` the folder of that name in the
    folder of runs. What else is left out has the default of its class in `igstudy.runs.params`. A
    file whose name is of no kind names all that it needs.
    """
    kind, given = kind_of(path), read_yaml(path)
    placed = {"profile": path.resolve().parent.name} if kind in KINDS else {}
    if kind in DECODED:
        placed["run"] = path.stem
    elif kind in ("critic", "judge"):
        placed["run"] = path.stem.removeprefix(f"{kind}-")
    given = placed | given
    if kind == "judge":
        given = {"figures": figures_of(given["profile"])} | given
    return given


def figures_of(profile: str) -> str:
    """Return the folder of a profile's tables and pictures, seen from the repository's root."""
    return f"runs/{profile}/figures"


def kind_of(file: Path) -> str:
    """Return the kind of a file: its name up to the first hyphen."""
    return file.stem.split("-")[0]


def defaults_of(kind: str) -> Given:
    """Return the default of each setting of a kind of file, or ``MISSING`` of `dataclasses`."""
    known = class_of("decode" if kind in DECODED else kind)
    return {setting.name: setting.default for setting in fields(known)}


def runs_of(given: Mapping[str, Any], file: object) -> Iterator[tuple[str, Given]]:
    """Yield name and settings of every run that the settings of a file make.

    There is one for every point of its ``grid``, a mapping of settings to lists of values, and of
    its ``points``, a mapping of names to settings of their own; of both, one for each pair. A point
    whose name is empty is the run that has the file's own name.

    Parameters
    ----------
    file : object
        What an error calls the file.

    Raises
    ------
    ParameterError
        When the name of a run is not allowed, a point makes such a name, grid or points have
        another form, or there are more than `MOST_RUNS`.
    """
    shared = dict(given)
    own = {name: shared.pop(name) for name in ("grid", "points") if name in shared}
    try:
        made = Runs(run=shared.get("run", ""), **own)
    except ParameterError as error:
        raise ParameterError(f"{file}: {error}") from None
    if (many := math.prod(map(len, (made.points, *made.grid.values())))) > MOST_RUNS:
        raise ParameterError(
            f"grid and points of {file} make {many} runs, and may make {MOST_RUNS}; give them "
            "fewer values, or divide them among several files"
        )
    for (name, own), *values in itertools.product(made.points.items(), *made.grid.values()):
        of_grid = dict(zip(made.grid, values, strict=True))
        names = [made.run, *([name] if name else [])]
        names += [f"{setting}-{value}" for setting, value in of_grid.items()]
        run = "-".join(names).replace(".", "_")  # to Snakemake a dot would begin a suffix
        check_name(f"a run of the grid of {file}", run)
        yield run, shared | own | of_grid | {"run": run}


def merged(old: object, new: object) -> Any:
    """Return a setting after a change: of a mapping the parts that the change does not name stay.

    What stands under ``every`` changes all mappings in the old one. A mapping with a ``name``, such
    as a prompt set with its options, takes the place of the old one.
    """
    if not isinstance(old, dict) or not isinstance(new, dict) or "name" in new:
        return new
    changes = dict(new)
    every = changes.pop("every", {})
    parts = {k: merged(part, every) if isinstance(part, dict) else part for k, part in old.items()}
    return parts | {name: merged(parts.get(name), part) for name, part in changes.items()}
