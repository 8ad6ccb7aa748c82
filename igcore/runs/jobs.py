"""What Snakemake needs to know of a job: its settings, its code by content, whether its run holds.

A file ``runs/<profile>/.jobs/<job>.yaml`` holds the settings for papermill, below comments with the
digests of the code. It is written only when its content changes, so that a comment, a docstring or
a notebook's outputs restart nothing. No model is imported: Snakemake loads this for every job.
"""

import json
import math
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import yaml

from ..config import SearchConfig
from ..errors import ParameterError
from .identity import code_of, literal_table, notebook_code, versions

ENTRIES = {
    "decode": "igcore.runs.decode_run",
    "critic": "igcore.runs.critic_run",
    "judge": "igcore.runs.judge_run",
}
LEFT = {  # kind of job -> what its folder holds when it has finished
    "decode": ["params.json", "responses.jsonl"],
    "judge": ["params.json", "verdicts.jsonl"],
    "critic": ["critic.csv", "reliability.csv"],
}
# all jobs of one Snakemake run share the same code, so hash it once
_code = cache(code_of)
_notebook = cache(notebook_code)


def request(path: Path | str, kind: str, notebook: str, settings: Mapping) -> str:
    """Write the file of a job unless it is there with the same content, and return its path.

    Parameters
    ----------
    kind : str
        A key of `ENTRIES`, or anything else for a notebook whose imports are its code.
    settings : mapping
        Text, numbers, true, false, null, lists and mappings.

    Raises
    ------
    ParameterError
        Naming a setting that papermill would not pass on unchanged.
    """
    settings = dict(settings)
    for name, value in settings.items():
        if not _plain(value):
            raise ParameterError(
                f"setting {name} is {value!r}, which reaches no notebook as it is; give text (in "
                "quotes if it looks like a date), a finite number, true, false, null, or a list or "
                "mapping of these"
            )
    # escaped and unwrapped, so that no reader takes a rare character for the end of a line
    text = yaml.safe_dump(settings, sort_keys=False, width=math.inf) if settings else ""
    known = {
        "version of": versions(),
        "code of": {notebook: _notebook(notebook)[0]} | code(kind, notebook, settings),
    }
    comments = "".join(
        f"# {what} {name}: {digest}\n" for what, of in known.items() for name, digest in of.items()
    )
    path = Path(path)
    if not path.is_file() or path.read_text(encoding="utf-8") != comments + text:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(comments + text, encoding="utf-8")
        part.replace(path)
    return str(path)


def _plain(value: object) -> bool:
    """Say whether a value survives YAML 1.1, as papermill reads it.

    Dates, numbers that are not finite and lone surrogates do not.
    """
    if type(value) in (list, dict):
        parts = value if isinstance(value, list) else [*value, *value.values()]
        return all(_plain(part) for part in parts)
    if type(value) is str:
        return not any("\ud800" <= character <= "\udfff" for character in value)
    return (
        value is None or type(value) in (bool, int) or type(value) is float and math.isfinite(value)
    )


def code(kind: str, notebook: str, settings: Mapping) -> dict[str, str]:
    """Return the digests of the modules that decide what a job leaves, its scorers included."""
    if kind not in ENTRIES:
        return _code(*_notebook(notebook)[1])
    named = set(_scorers(settings))
    homes = {
        home.partition(":")[0]
        for name, home in literal_table("igcore.models.registry", "SCORERS").items()
        if named & {name, None}
    }
    return _code(ENTRIES[kind], *sorted(homes))


def _scorers(settings: Mapping) -> Iterable[str | None]:
    """Yield the names of the scorers in the settings of a run or of a judge.

    None stands for a scorer left to its default, whichever that is.
    """
    judge = settings.get("judge")
    given = (
        judge
        if isinstance(judge, dict)
        else {role: settings.get(role) for role in ("cost", "reward")}
    )
    for scorer in given.values():
        name = scorer.get("name") if isinstance(scorer, dict) else scorer
        yield None if name is None else str(name)


def shards_of(settings: Mapping, shards: int) -> int:
    """Return the number of shards of a run: no more than its limit makes groups.

    Settings that are no positive whole numbers are left to the notebook, which refuses them by
    name.
    """
    limit, size = settings.get("limit"), settings.get("group_size", SearchConfig.group_size)
    if not all(isinstance(number, int) and number > 0 for number in (limit, size)):
        return shards
    return min(shards, math.ceil(limit / size))


def check_run(folder: Path | str, kind: str, settings: Mapping) -> str:
    """Remove the manifest of a run that no longer holds; return why, or "" where nothing changed.

    A finished run holds while its files are there, and those that it loaded keep size and time.
    """
    folder = Path(folder)
    manifest = folder / "manifest.json"
    if not manifest.is_file():
        return ""
    if why := _broken(folder, manifest, kind, settings):
        manifest.unlink()
        return f"{folder}: {why}, so it runs again"
    return ""


def _broken(folder: Path, manifest: Path, kind: str, settings: Mapping) -> str:
    """Return why a finished run no longer holds, or ""."""
    wanted = [*LEFT[kind], *(_networks(settings) if kind == "critic" else ())]
    if missing := [name for name in wanted if not (folder / name).is_file()]:
        return f"{missing[0]} is not there any more"
    try:
        opened = json.loads(manifest.read_text(encoding="utf-8")).get("opened", {}).items()
    except (ValueError, AttributeError, RecursionError):
        return "its manifest is damaged"
    changed = [path for path, was in opened if Path(path).is_file() and was != _stat(Path(path))]
    return f"{changed[0]} has changed since" if changed else ""


def _networks(settings: Mapping) -> list[str]:
    """Return the files of rollouts and networks that a run of notebook 20 leaves."""
    drawn = (
        []
        if settings.get("rollouts")
        else ["rollouts-train/responses.jsonl", "rollouts-test/responses.jsonl"]
    )
    critics = [f"{name}/critic.safetensors" for name in settings.get("critics") or ()]
    return [*drawn, *critics, *(["value/value.safetensors"] if settings.get("value") else [])]


def _stat(path: Path) -> list[int]:
    """Return size and time (ns) of a file, as `igcore.runs.identity.opened` records them."""
    about = path.stat()
    return [about.st_size, about.st_mtime_ns]
