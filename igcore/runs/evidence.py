"""The files of a run, read and compared with one another: lines, settings and manifest.

The cheap part of `igcore.runs.verify`: it scores nothing and loads no model.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from ..beams import settings_of
from ..errors import IgcoreError, RunError
from ..folders import read, root_of
from ..policy import Prompt, groups_of
from .decode_params import DecodeParams
from .decode_run import summary
from .identity import prompts_digest
from .records import SETTINGS
from .rescore import GARBLED, close


@dataclass(frozen=True)
class Evidence:
    """The files of a run; params and manifest are None for a file of lines that stands alone."""

    path: Path
    lines: list[dict]
    params: dict | None
    manifest: dict | None


def evidence(path: Path) -> Evidence:
    """Read a file of lines with what lies beside it."""
    path = Path(path)
    params, manifest = path.with_name("params.json"), path.with_name("manifest.json")
    return Evidence(path, read(path), _json(params), _json(manifest))


def _json(path: Path) -> dict | None:
    """Return the mapping that a JSON file holds, None when the file does not exist."""
    if not path.exists():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(
            f"{path} cannot be read ({type(error).__name__}); get the run's files again"
        ) from error
    if not isinstance(value, dict):
        raise RunError(f"{path} holds no mapping; get the run's files again")
    return value


def params_of(found: Evidence) -> DecodeParams:
    """Return the parameters that params.json holds.

    Raises
    ------
    RunError
        When it lacks one, or holds what cannot be parameters.
    """
    given = found.params
    names = {f.name for f in fields(DecodeParams)}
    if missing := sorted(names - given.keys()):
        raise RunError(
            f"params.json lacks {', '.join(missing[:4])}; it was written by another version, or "
            "changed"
        )
    try:
        return DecodeParams(**{name: given[name] for name in names})
    except IgcoreError:
        raise
    except GARBLED as error:
        raise RunError(
            f"params.json holds no parameters of a run ({type(error).__name__}: {error})"
        ) from error


def contradictions(
    found: Evidence, params: DecodeParams, prompts: Sequence[Prompt]
) -> Iterator[str]:
    """Say where lines, settings, manifest and the prompts to answer disagree."""
    yield from _unlike_params(found, params, prompts)
    yield from _coverage(found.lines, params.methods, prompts)
    yield from _manifest(found)
    yield from _chosen(found.params, prompts)


def claimed_groups(params: DecodeParams, lines: Sequence[dict]) -> list[list[Prompt]]:
    """Return the groups of the prompts that the lines themselves name.

    The lines of a shard hold only its own prompts, so all of their groups count.
    """
    known = {
        line["prompt_id"]: Prompt(line["prompt_id"], line["prompt"], line["prompts"])
        for line in lines
    }
    return groups_of(replace(params, shard=0, n_shards=1), [known[name] for name in sorted(known)])


def _unlike_params(
    found: Evidence, params: DecodeParams, prompts: Sequence[Prompt]
) -> Iterator[str]:
    """Say where a line was made under other settings, or for another prompt, than its run."""
    texts = {prompt.id: {"prompt": prompt.text, "prompts": prompt.set_name} for prompt in prompts}
    for number, line in enumerate(found.lines, start=1):
        if line["method"] not in params.methods:
            yield f"line {number}: method {line['method']} is not one of params.json"
            continue
        settings = asdict(settings_of(line["method"], params.search()))
        wanted = {name: settings[name] for name in SETTINGS} | {
            "seed": params.seed,
            "grid_size": params.block_size,
        }
        wanted |= {"policy": _names(found.params).get("policy")} | texts.get(line["prompt_id"], {})
        for name, value in wanted.items():
            if not close(line[name], value, 0.0):
                yield f"line {number}: {name} is {line[name]!r}, where the run has {value!r}"


def _names(params: dict) -> dict[str, str]:
    """Return the names of policy and scorers by role, as the identity of a run has them."""
    parts = params.get("parts", {})
    return {role: part.get("name") for role, part in parts.items() if isinstance(part, dict)}


def _coverage(
    lines: Sequence[dict], methods: Sequence[str], prompts: Sequence[Prompt]
) -> Iterator[str]:
    """Say which answers are missing, and which were not asked for."""
    held = {(line["method"], line["prompt_id"]) for line in lines}
    asked = {(method, prompt.id) for method in methods for prompt in prompts}
    for what, names in (("missing", asked - held), ("not asked for", held - asked)):
        if names:
            yield (
                f"{len(names)} answers are {what}, the first that of {min(names)[0]} to prompt "
                f"{min(names)[1]}"
            )


def _chosen(params: dict, prompts: Sequence[Prompt]) -> Iterator[str]:
    """Say whether the prompts are others than those that params.json was made for."""
    if params.get("chosen") != (chosen := prompts_digest(prompts)):
        yield f"the prompts are {chosen}, where params.json gives {params.get('chosen')}"


def _manifest(found: Evidence) -> Iterator[str]:
    """Say where the manifest disagrees with the lines and the parameters."""
    if found.manifest is None:
        yield "there is no manifest.json: the run has not finished"
        return
    for name, value in summary(found.lines).items():
        if name != "seconds" and found.manifest.get(name) != value:
            yield f"manifest.json gives {name} {found.manifest.get(name)!r}, the lines {value!r}"
    if found.manifest.get("params") != found.params:
        yield "manifest.json holds other parameters than params.json"
    if found.manifest.get("root") != (now := root_of(found.params, found.lines, found.manifest)):
        yield (
            f"manifest.json gives the root hash {str(found.manifest.get('root'))[:16]}, its "
            f"contents {now[:16]}"
        )
