"""What a profile makes of its runs: the notebooks that read them, and the tables and pictures that
these leave.

``profile.yaml`` in a folder of params says it. Without that file a profile gets a table with a row
per run and two pictures.
"""

from collections.abc import Iterator
from dataclasses import field
from pathlib import Path

from igcore.errors import ParameterError, unknown_name
from igcore.settings import Options, settings
from igserve.yamlfile import read_yaml

from ..settings import FolderName, InsideFolder
from .paramfiles import Given, ParamFiles, figures_of

# a profile's own file, and the notebook that decides claims
FILE, CLAIMS = "profile.yaml", "80_claims"


@settings(kw_only=True)
class Made:
    """What a notebook makes of finished runs.

    Attributes
    ----------
    tables, pictures : list of str
        Names of its files in the folder of figures, without ending.
    given : mapping
        Its settings, besides profile and folder of figures.
    beside : str, optional
        Another profile, whose finished runs it reads, too.
    """

    tables: list[str] = field(default_factory=list)
    pictures: list[str] = field(default_factory=list)
    given: Options = field(default_factory=dict)
    beside: FolderName | None = None

    def files(self, figures: str) -> Iterator[str]:
        """Yield the paths of its files in a folder of figures."""
        for name in self.tables:
            # its numbers, the same for people, and its sources
            yield from (f"{figures}/tables/{name}.{end}" for end in ("csv", "md", "json"))
        yield from (f"{figures}/{name}.png" for name in self.pictures)


DEFAULT: Given = {
    "notebooks": {
        "40_tables": {"given": {"by_run": True}, "tables": ["main", "compute", "comparison"]},
        "50_figures": {"given": {"by_run": True}, "pictures": ["tradeoff", "distributions"]},
    }
}


@settings(kw_only=True)
class Profile:
    """What a profile makes.

    Attributes
    ----------
    notebooks : mapping
        Name of a notebook, without ending -> the fields of `Made`.
    claims : str, optional
        The file of the claims that notebook 80 decides.
    pilot : bool
        Whether these runs are those from which power is computed, and decide nothing.
    again : str, optional
        Where there are packed records, a pattern of the names of the runs that are made again; all
        others are read from the records, see `igstudy.runs.jobs.packed_runs`. By default all are
        made.
    """

    notebooks: dict[str, Options]
    claims: InsideFolder | None = None
    pilot: bool = False
    again: str | None = None

    def made(self) -> dict[str, Made]:
        """Return what each notebook makes."""
        return {name: Made(**given) for name, given in self.notebooks.items()}


def load_profile(files: ParamFiles, notebooks: Path = Path("notebooks")) -> Profile:
    """Read what a profile makes.

    Raises
    ------
    ParameterError
        When the file cannot be read, or names a setting or notebook that there is not.
    """
    path = files.base / files.folder / FILE
    given = read_yaml(path) if path.is_file() else DEFAULT
    try:
        profile = Profile(**given)
        made = profile.made()
    except ParameterError as error:
        raise ParameterError(f"{path}: {error}") from None
    known = [book.stem for book in sorted(notebooks.glob("*.ipynb"))]
    for name in made:
        if name not in known:
            raise unknown_name(f"notebook of {path}", name, known)
    return profile


def left_by(notebook: str, profile: str, base: Path) -> Made | None:
    """Return what ``profile.yaml`` asks of a notebook, or None where a profile has no such file.

    Parameters
    ----------
    base : Path
        The folder that holds ``params`` and ``notebooks``.

    Raises
    ------
    ParameterError
        See `load_profile`.
    """
    files = ParamFiles(profile, base=base / "params")
    if not (files.base / profile / FILE).is_file():
        return None
    return load_profile(files, base / "notebooks").made().get(notebook, Made())


def settings_for(files: ParamFiles, profile: Profile, name: str) -> Given:
    """Return the settings of a notebook of a profile, with places."""
    placed: Given = {"profile": files.profile, "figures": figures_of(files.profile)}
    if name == CLAIMS:
        placed |= {"claims": profile.claims, "pilot": profile.pilot}
    return placed | profile.made()[name].given
