"""What Snakemake has to know of a job before it starts: its settings as a file, its code by content, whether its run still holds.

Knows files and names; imports no model and starts nothing. A file ``runs/<profile>/.jobs/<job>.yaml`` holds the settings for
papermill, below comments with the digests of the code. It is written only where that changes, so that a comment, a docstring or a
notebook's outputs start nothing anew.
"""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import yaml

from .config import SearchConfig
from .errors import ParameterError
from .identity import code_of, literal_table, notebook_code, versions

ENTRIES = {"decode": "igcore.decode_run", "critic": "igcore.critic_runs", "judge": "igcore.judge.verdicts"}
LEFT = {  # kind of job -> what its folder holds when it has finished
    "decode": ["params.json", "responses.jsonl"],
    "judge": ["params.json", "verdicts.jsonl"],
    "critic": ["critic.csv", "reliability.csv"],
}


def request(path: Path | str, kind: str, notebook: str, settings: Mapping) -> str:
    """Write the file of a job unless it is there with the same content, and return its path.

    Parameters
    ----------
    kind : str
        A key of `ENTRIES`, or anything else for a notebook whose imports are its code.
    settings : mapping
        Plain data; papermill reads it with YAML 1.1, so what does not survive that is refused.

    Raises
    ------
    ParameterError
        Naming a setting that a YAML file cannot hold.
    """
    settings = dict(settings)
    text = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True, width=10**9) if settings else ""
    read = yaml.safe_load(text) or {}
    for name, value in settings.items():
        if read.get(name) != value or type(read.get(name)) is not type(value):
            raise ParameterError(
                f"setting {name} is {value!r}, which a YAML file gives back as {read.get(name)!r}; write it otherwise"
            )
    of = {"version of": versions(), "code of": {notebook: notebook_code(notebook)[0]} | code(kind, notebook, settings)}
    comments = "".join(f"# {what} {name}: {digest}\n" for what, known in of.items() for name, digest in known.items())
    path = Path(path)
    if not path.is_file() or path.read_text(encoding="utf-8") != comments + text:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(comments + text, encoding="utf-8")
        part.replace(path)
    return str(path)


def code(kind: str, notebook: str, settings: Mapping) -> dict[str, str]:
    """Return the digests of the modules that decide what a job leaves, those of its scorers included."""
    if kind not in ENTRIES:
        return code_of(*notebook_code(notebook)[1])
    table = literal_table("igcore.scorers", "SCORERS")
    homes = {table[name].partition(":")[0] for name in _names(settings) if isinstance(table.get(name), str)}
    return code_of(ENTRIES[kind], *sorted(homes))


def _names(settings: Mapping) -> Iterable[str]:
    """Yield the names of scorers in settings: of the run itself, and of a judge."""
    judge = settings.get("judge")
    given = [settings.get("cost"), settings.get("reward"), *(judge.values() if isinstance(judge, dict) else ())]
    for scorer in given:
        yield str(scorer.get("name") if isinstance(scorer, dict) else scorer)


def shards_of(settings: Mapping, shards: int) -> int:
    """Return into how many shards a run is cut: no more than it has groups, as far as its limit says."""
    limit = settings.get("limit")
    return shards if limit is None else max(1, min(shards, math.ceil(limit / settings.get("group_size", SearchConfig.group_size))))


def check_run(folder: Path | str, kind: str, settings: Mapping) -> str:
    """Take back the sign of success of a run that no longer is what it was; say why, or nothing where it holds or has not finished.

    A finished run holds while its files are there, and those that it loaded have the size and time that they had.
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
    wanted = [*LEFT[kind], *(_networks(settings) if kind == "critic" else ())]
    if missing := [name for name in wanted if not (folder / name).is_file()]:
        return f"{missing[0]} is not there any more"
    try:
        opened = json.loads(manifest.read_text(encoding="utf-8")).get("opened", {})
    except (ValueError, AttributeError):
        return "its manifest is damaged"
    changed = [path for path, was in opened.items() if Path(path).is_file() and was != _stat(Path(path))]
    return f"{changed[0]} has changed since" if changed else ""


def _networks(settings: Mapping) -> list[str]:
    """Return the files of rollouts and networks that a run of notebook 20 leaves."""
    drawn = [] if settings.get("rollouts") else ["rollouts-train/responses.jsonl", "rollouts-test/responses.jsonl"]
    critics = [f"{name}/critic.safetensors" for name in settings.get("critics") or ()]
    return [*drawn, *critics, *(["value/value.safetensors"] if settings.get("value") else [])]


def _stat(path: Path) -> list[int]:
    about = path.stat()
    return [about.st_size, about.st_mtime_ns]
