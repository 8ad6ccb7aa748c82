"""The file of a Snakemake job: its settings, and the digests of its code.

A file ``runs/<profile>/.jobs/<job>.yaml`` holds the settings for papermill, below comments with the
digests of the code. It is written only when its content changes, so that a comment, a docstring or
a notebook's outputs restart nothing. No model is imported: Snakemake loads this for every job.
"""

import json
import sys
import tarfile
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from fnmatch import fnmatchcase
from functools import cache
from io import StringIO
from pathlib import Path, PurePosixPath
from typing import Any

from ruamel.yaml import YAML

from igcore.errors import ParameterError, shown, unknown_name
from igcore.files import file_digest, locked
from igcore.models.registry import first_on_path
from igserve.trust import admitted, named_modules
from igserve.yamlfile import read_yaml

from ..files import replace_file
from ..provenance import UNPACKED, versions
from ..sources import package_digest
from .identity import code_of, notebook_digest
from .paramfiles import Given, ParamFiles
from .profiles import Profile

# the keys after --config: texts, and numbers
TEXT_KEYS = ("profile", "with", "hub", "allow")
NUMBER_KEYS = ("limit", "shards", "gpu", "full")


def configured(config: Mapping[str, Any]) -> dict[str, Any]:
    """Check the keys after ``--config``, and return the settings of the file named by ``with``.

    Raises
    ------
    ParameterError
        For a key that nothing would read, a value that is no number where one is read, and a file
        that holds no mapping.
    """
    for key, value in config.items():
        if key not in (*TEXT_KEYS, *NUMBER_KEYS):
            raise unknown_name("key after --config", key, (*TEXT_KEYS, *NUMBER_KEYS))
        if key in NUMBER_KEYS and not (isinstance(value, int) and value >= 0):
            raise ParameterError(
                f"{key} after --config is {shown(value)}; give a number of 0 or more, such "
                f"as {key}=4"
            )
    if not config.get("with"):
        return {}
    return read_yaml(str(config["with"]), "name a file with a mapping of settings after with=")


def as_yaml(settings: Mapping[str, Any]) -> str:
    """Return a mapping as YAML 1.2, each text in one line with its rare characters escaped."""
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style, yaml.width = False, sys.maxsize
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]  # typed as None
    text = StringIO()
    # copied, as a value that two settings share would be an alias
    yaml.dump(json.loads(json.dumps(settings)), text)
    return text.getvalue()


def request(path: Path | str, kind: str, notebook: str, settings: Mapping[str, Any]) -> str:
    """Write the file of a job unless it is there with the same content, and return its path.

    Parameters
    ----------
    kind : str
        See `code`.
    settings : mapping
        Text, numbers, true, false, null, lists and mappings.
    """
    digests = {notebook: notebook_digest(notebook)} | code(kind, settings)
    lines = [f"# version of {name}: {version}" for name, version in versions().items()]
    lines += [f"# code of {name}: {digest}" for name, digest in digests.items()]
    if settings:
        lines.append(as_yaml(settings))
    text = "\n".join(lines)
    path = Path(path)
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        replace_file(path, text)
    return str(path)


def code(kind: str, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the digests of the code that decides what a job leaves, a user's scorers included."""
    # a judge asks by the pairs of `igstudy.report.verdicts`; its replies stay when that changes
    whole = {} if kind in ("decode", "critic") else {"igstudy": package_digest("igstudy")}
    with first_on_path(*admitted().values()):
        own = code_of(*named_modules(settings))
    return own | whole


# --- what the jobs of a profile are asked ---------------------------------------------------------


def decode_jobs(files: ParamFiles, read: Collection[str]) -> dict[str, Given]:
    """Return the settings of the jobs of notebook 30 by name.

    A params file is one job, or two where only some of its runs are read from records.

    Parameters
    ----------
    read : collection of str
        See `packed_runs`.
    """
    jobs: dict[str, Given] = {}
    for path in files.decoded():
        shared = files.read(path)["run"]
        for run, settings in files.points(path):
            packed = f"{files.profile}/{run}" in read
            name = f"{path.stem}-packed" if packed else path.stem
            job = {"profile": files.profile, "run": shared, "points": {}}
            if packed:
                job |= archive_of(files.profile)
            points = jobs.setdefault(name, job)["points"]
            points[run.removeprefix(shared).removeprefix("-")] = settings
    return jobs


def critic_settings(files: ParamFiles, profile: str, run: str, read: Collection[str] = ()) -> Given:
    """Return the settings of a run of notebook 20; `read` as in `decode_jobs`."""
    settings = files.read(files.critic_file(profile, run))
    if f"{profile}/critics/{run}" in read:
        settings |= archive_of(profile)
    return settings


def archive_of(profile: str) -> Given:
    """Return the setting of jobs that read packed records: they run again when these change."""
    return {"records": file_digest(Path(f"records/{profile}.tar.xz"))}


def own_files(settings: Given) -> list[str]:
    """Return the files of a user that a run reads: prompts, a list of ids, a model's folder.

    The run is made again when one of them changes.
    """
    named = [settings.get(role) for role in ("prompts", "policy", "cost", "reward")]
    values = [
        value for one in named for value in (one.values() if isinstance(one, dict) else [one])
    ]
    paths = [Path(value) for value in values if value and isinstance(value, str)]
    return sorted(
        {str(file) for path in paths for file in [path, *path.glob("*")] if file.is_file()}
    )


def check_claims(path: str, folder: Path, start: bool) -> None:
    """Refuse claims that were edited since they were registered; at the start, register them."""
    # pandas, which the file of a job does not need
    from ..report import claims
    from . import register

    file = claims.load_claims(Path(path))
    if start:
        register.register(file, folder)
        print(f"{len(file.claims)} claims, registered as {file.digest[:12]}", file=sys.stderr)
    elif folder.exists():
        register.check_registered(file, folder)


# --- runs that are there --------------------------------------------------------------------------


def packed_runs(files: ParamFiles, asked: Profile) -> set[str]:
    """Return the runs that are read from the packed records of the profile, and not made.

    Where there is an archive, and a pattern `Profile.again`, a run is made if its name has the
    pattern, or if it was begun here. A critic is made if such a run needs its networks, which no
    archive has.

    Returns
    -------
    set of str
        ``<profile>/<run>``, and of critics ``<profile>/critics/<run>``.
    """
    packed = Path("records", f"{files.profile}.tar.xz")
    if asked.again is None or not packed.is_file():
        return set()
    decoded = files.runs()
    made = {run for run in decoded if fnmatchcase(run, asked.again)}
    home = Path("runs", files.profile)
    made |= {run for run in decoded if _begun(home / run)}
    used = str([decoded[run] for run in made])
    critics = {f"critics/{run}" for run in files.named("critic")}
    made |= {run for run in critics if f"{home / run}/" in used or _begun(home / run)}
    with tarfile.open(packed) as archive:
        signs = [PurePosixPath(name) for name in archive.getnames()]
    there = {str(sign.parent.relative_to("runs")) for sign in signs if sign.name == "manifest.json"}
    return there & {f"{files.profile}/{run}" for run in (decoded.keys() | critics) - made}


def _begun(folder: Path) -> bool:
    """True if a run was begun here, rather than read from records."""
    return any(folder.rglob("*.*")) and not (folder / UNPACKED).exists()


@cache  # which keeps it; a process that asks again has its own lock
def lock(folder: Path) -> AbstractContextManager[object]:
    """Lock a folder for one run of Snakemake, until this process ends, also by a kill.

    Parameters
    ----------
    folder : Path
        Absolute.

    Raises
    ------
    RunError
        When another process has locked the folder, or its file system has no locks.
    """
    path = folder / ".snakemake/run.lock"
    busy = f"another Snakemake runs in {folder}; wait for it, or stop it first"
    return locked(path, busy)
