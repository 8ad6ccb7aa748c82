"""Checking a run without trusting whoever made it: lines scored again, settings and prompts
compared, groups decoded again.

Knows what a run leaves and what of it can be checked; takes no scorer or policy from a record
unless it is one of this package's tables or the verifier names it. What it returns says what was
certified and what was not, and claims no more.
"""

import json
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

from ..beams import method_of, settings_of
from ..config import SearchConfig, from_mapping
from ..errors import IgcoreError, ParameterError, RunError
from ..folders import changes, comparable, line_digest, read, root_of
from ..guard import Guard
from ..models.policies import POLICIES, load_policy
from ..models.prompts import PROMPT_SETS, SOURCES, load_prompts
from ..models.registry import SCORERS, load_scorer
from ..policy import Policy, Prompt, as_prompt, groups_of
from ..progress import progress
from ..scorers import Cached, Scorer, check_sign
from ..verdict import Emission, measure, rescore, within
from .decode_params import NETWORKS, DecodeParams, Settings
from .decode_run import Experiment, identity_of, lines_of, summary
from .identity import prompts_digest
from .networks import LOADERS, Networks, load_networks
from .records import COLUMNS, SETTINGS

TOLERANCE = 1e-6  # by which a score may differ on another processor; sums of float32 do
# What of a record is believed beside the name of something in this package's tables. No revision:
# anybody may propose one to the
# hub, with files of his own.
BELIEVED = {
    "scorer": {
        "name",
        "dtype",
        "device",
        "self_check",
    },  # of which the dtype counts; the others are the verifier's own matter
    "policy": {"name", "template"},
    "prompts": {"name", "dedupe", "config", "part", "version"},
}
GARBLED = (
    KeyError,
    TypeError,
    ValueError,
    AttributeError,
    IndexError,
    OverflowError,
    RecursionError,
)  # what odd values raise
UNCHECKED = (
    "that the policy gives these answers under these settings: token ids, block ends, "
    "abstentions and their reasons, `finished`, "
    "counts of work, traces, finals, fail_open_cost, and the hashes of files and code in "
    "params.json"
)
UNCERTAIN = "seconds, the names of profile and run, files opened"  # what nobody can check


@dataclass(frozen=True)
class Trusted:
    """What the verifier names in the place of what a record names; None takes it from the tables of
    this package alone.

    Attributes
    ----------
    cost, reward : str or dict, optional
        See `igcore.load_scorer`.
    policy : str or dict, optional
        See `igcore.load_policy`.
    prompts : str or dict, optional
        See `igcore.load_prompts`.
    critic, value : str, optional
        Folder of a trained critic or value network.
    """

    cost: str | dict | None = None
    reward: str | dict | None = None
    policy: str | dict | None = None
    prompts: str | dict | None = None
    critic: str | None = None
    value: str | None = None


@dataclass
class Report:
    """What a verification found.

    Attributes
    ----------
    problems : list of str
        A sentence for each thing that does not hold.
    certified : dict of str to str
        What was checked -> what it was found to be.
    uncertified : list of str
        What nobody has checked.
    """

    problems: list[str] = field(default_factory=list)
    certified: dict[str, str] = field(default_factory=dict)
    uncertified: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Evidence:
    """The files of a run; params and manifest are None for a file of lines that stands alone."""

    path: Path
    lines: list[dict]
    params: dict | None
    manifest: dict | None


def verify(
    path: Path,
    trusted: Trusted | None = None,
    replay: int | None = 0,
    seed: int | None = None,
    tolerance: float = TOLERANCE,
) -> Report:
    """Check the file of a run.

    Parameters
    ----------
    path : Path
        ``responses.jsonl``, beside its ``params.json`` and ``manifest.json``.
    replay : int or None
        How many groups to decode again, drawn at random; None for all.
    seed : int, optional
        Draws the groups; by default another one each time, so that nobody knows beforehand which
        groups are read.
    tolerance : float
        By which a number that is scored again may differ.

    Raises
    ------
    RunError
        When files cannot be read.
    ParameterError
        When the record names a scorer, policy or network that only the verifier may name.
    """
    trusted, found = trusted or Trusted(), evidence(path)
    if replay != 0 and found.params is None:
        raise RunError(
            f"beside {path} lies no params.json, which says how to decode again; get the "
            f"run's folder, or omit --replay"
        )
    report = Report()
    scorers = {role: scorer_of(role, found, getattr(trusted, role)) for role in ("cost", "reward")}
    by_name = {scorer.name: scorer for scorer in scorers.values()}
    report.problems += rescored(found.lines, _known(by_name), tolerance)
    report.certified |= {
        f"{role} model": _source(scorer, getattr(trusted, role)) for role, scorer in scorers.items()
    }
    report.certified["scores"] = (
        f"every emitted text scored again: cost, path, status and reward within {tolerance:g}"
    )
    if found.params is None:
        report.uncertified.append(
            "settings, the budget among them, prompts and the number of lines: no "
            "params.json lies beside the file"
        )
    else:
        _check_run(found, scorers, trusted, replay, seed, tolerance, report)
    if "replay" not in report.certified:
        report.uncertified.append(UNCHECKED + " (`--replay` checks it)")
    report.uncertified.append(UNCERTAIN + _made(found.manifest))
    return report


def evidence(path: Path) -> Evidence:
    """Read a file of lines with what lies beside it."""
    path = Path(path)
    return Evidence(
        path,
        read(path),
        *(_json(path.with_name(name)) for name in ("params.json", "manifest.json")),
    )


def _json(path: Path) -> dict | None:
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


def _made(manifest: dict | None) -> str:
    if manifest is None:
        return ""
    return (
        f", commit {manifest.get('git_commit')}, processor {manifest.get('processor')}, time "
        f"{manifest.get('finished_at')}"
    )


# --- what may be named ----------------------------------------------------------------------------


def known(named: object, kind: str, table: Iterable[str]) -> dict | None:
    """Return what a record names with its options if it is one of a table as it is, else None."""
    options = {"name": named} if isinstance(named, str) else named
    sound = (
        isinstance(options, dict)
        and options.get("name") in list(table)
        and options.keys() <= BELIEVED[kind]
    )
    return options if sound else None


def scorer_of(role: str, found: Evidence, given: str | Mapping | None) -> Scorer:
    """Load the scorer that the verifier names, or that the record names if it is one of `SCORERS`
    as it is.
    """
    if given is not None:
        return load_scorer(given)
    named = (
        [found.params.get(role)]
        if found.params
        else sorted({str(line.get(f"{role}_scorer")) for line in found.lines})
    )
    if len(named) != 1:
        raise ParameterError(
            f"the lines name the {role} models {', '.join(named) or 'none'}; name the one to "
            f"use with --{role}"
        )
    if (options := known(named[0], "scorer", SCORERS)) is None:
        raise unnamed(f"{role} model", named[0], role)
    return load_scorer(
        {name: value for name, value in options.items() if name in ("name", "dtype")}
    )


def unnamed(what: str, named: object, option: str) -> ParameterError:
    """Return the error for what only the verifier may name."""
    return ParameterError(
        f"the record names the {what} {named!r}, which is none of the package's own as it "
        f"is; name the one that you trust with "
        f"--{option}"
    )


def _source(part: Scorer | Policy, given: object) -> str:
    """Say which scorer or policy was used, and who named it."""
    return f"{part.name}, {part.digest[:16]}, {'of the table' if given is None else 'named by you'}"


def prompts_of(
    params: DecodeParams, cost: Scorer, given: str | Mapping | None
) -> list[Prompt] | None:
    """Return the prompts that a run had to answer, read again; None where only its own record says
    which they were.
    """
    name = (
        given if given is not None else known(params.prompts, "prompts", (*PROMPT_SETS, *SOURCES))
    )
    if name is None:
        return None
    return load_prompts(
        name, params.split, params.limit, params.hardest, cost if params.hardest else None
    )


def _policy(params: DecodeParams, given: str | Mapping | None) -> Policy:
    name = given if given is not None else known(params.policy, "policy", POLICIES)
    if name is None:
        raise unnamed("policy", params.policy, "policy")
    return load_policy(name, params.dtype, params.device)


def _networks(params: DecodeParams, trusted: Trusted, guard: Guard) -> tuple[Networks, dict]:
    """Load the critic and the value network of a run from the folders that the verifier names."""
    kinds = {role: kind for kind, role in NETWORKS.items()}
    roles = [role for role in LOADERS if getattr(params, role) is not None]
    folders = {role: getattr(trusted, role) for role in roles}
    for role, folder in folders.items():
        if folder is None:
            raise unnamed(kinds[role], getattr(params, role), role)
    return load_networks(replace(params, **folders), Path.cwd(), guard)


# --- the run --------------------------------------------------------------------------------------


def _check_run(
    found: Evidence,
    scorers: Mapping,
    trusted: Trusted,
    replay,
    seed,
    tolerance: float,
    report: Report,
) -> None:
    """Compare lines with settings, prompts and manifest, and decode groups again."""
    params = _params(found.params)
    read_again = prompts_of(params, scorers["cost"], trusted.prompts)
    try:
        groups = (
            _claimed(params, found.lines) if read_again is None else groups_of(params, read_again)
        )
        mine = [prompt for group in groups for prompt in group]
        report.problems += [
            *_unlike_params(found, params, mine),
            *_coverage(found.lines, params.methods, mine),
            *_manifest(found),
            *_chosen(found.params, mine),
        ]
    except GARBLED as error:
        report.problems.append(
            f"lines, params.json and manifest.json cannot be compared "
            f"({type(error).__name__}: {error})"
        )
        return
    of = (
        ", as the record itself says"
        if read_again is None
        else f" of {_label(params, trusted.prompts)}"
    )
    report.certified |= {
        "budget": f"{params.budget} ({params.accounting})",
        "methods": ", ".join(params.methods),
        "prompts": f"{len(mine)}{of}",
        "lines": (
            f"{len(found.lines)}, one for each method and prompt, under the settings of params.json"
        ),
        "root": str((found.manifest or {}).get("root")),
    }
    if read_again is None:
        report.uncertified.append(
            f"that these are all prompts of {params.prompts!r}: name the set with --prompts"
        )
    if replay == 0 or report.problems:
        return
    try:
        report.certified["replay"] = _replayed(
            found, params, groups, scorers, trusted, replay, seed, tolerance, report
        )
    except IgcoreError:
        raise
    except GARBLED as error:
        raise RunError(
            f"nothing can be decoded under the settings of params.json "
            f"({type(error).__name__}: {error})"
        ) from error


def _params(given: dict) -> DecodeParams:
    names = {f.name for f in fields(DecodeParams)}
    if missing := sorted(names - given.keys()):
        raise RunError(
            f"params.json lacks {', '.join(missing[:4])}; it was written by another version, "
            f"or changed"
        )
    try:
        return from_mapping(DecodeParams, {name: given[name] for name in names})
    except IgcoreError:
        raise
    except GARBLED as error:
        raise RunError(
            f"params.json holds no parameters of a run ({type(error).__name__}: {error})"
        ) from error


def _label(params: DecodeParams, given: str | Mapping | None) -> str:
    """Say which prompts were read again: those of the verifier's set, or of one of the table."""
    cut = [
        f"{name} {getattr(params, name)}" for name in ("limit", "hardest") if getattr(params, name)
    ]
    shard = [f"shard {params.shard} of {params.n_shards}"] if params.n_shards > 1 else []
    name = params.prompts if given is None else f"{given}, named by you"
    return ", ".join([f"{name}, split {params.split}", *cut, *shard])


def _claimed(params: DecodeParams, lines: Sequence[dict]) -> list[list[Prompt]]:
    """Return the groups of prompts that lines name themselves: of a shard they are all, not those
    of its number.
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
    """Say which answers are missing, and which nobody asked for."""
    held, asked = (
        {(x["method"], x["prompt_id"]) for x in lines},
        {(m, p.id) for m in methods for p in prompts},
    )
    for what, names in (("missing", asked - held), ("not asked for", held - asked)):
        if names:
            yield (
                f"{len(names)} answers are {what}, the first that of {min(names)[0]} to prompt "
                f"{min(names)[1]}"
            )


def _chosen(params: dict, prompts: Sequence[Prompt]) -> Iterator[str]:
    if params.get("chosen") != (chosen := prompts_digest(prompts)):
        yield f"the prompts are {chosen}, where params.json gives {params.get('chosen')}"


def _manifest(found: Evidence) -> Iterator[str]:
    """Say where the manifest does not belong to the lines and the parameters."""
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


def _replayed(
    found: Evidence, params: DecodeParams, groups: list[list[Prompt]], scorers: Mapping,
    trusted: Trusted, replay: int | None, seed,
    tolerance: float, report: Report,
) -> str:  # fmt: skip
    """Decode groups again and compare all that does not depend on time; return what was done."""
    import torch

    torch.set_num_threads(params.threads)  # on which float sums depend
    policy = _policy(params, trusted.policy)
    report.certified["policy"] = (
        f"{_source(policy, trusted.policy)}, template {policy.template.name}"
    )
    guard = Guard(policy, scorers["cost"], scorers["reward"], params.search())
    networks, weights = _networks(params, trusted, guard)
    mine = [prompt for group in groups for prompt in group]
    # `groups` are those of the shard already
    experiment = Experiment.of(replace(params, shard=0, n_shards=1), mine, guard, networks)
    now = identity_of(params, experiment, weights)
    unlike = list(changes(found.params.get("parts"), json.loads(json.dumps(now["parts"])), "parts"))
    if unlike:
        report.problems.append(
            f"{', '.join(unlike[:4])} of params.json are not what is loaded here"
        )
    other = [
        name for part in ("versions", "code") for name in changes(found.params.get(part), now[part])
    ]
    if other:
        report.uncertified.append(
            f"the code that decoded: {', '.join(other[:4])} differ here, where it was decoded again"
        )
    work = experiment.work
    seed = random.SystemRandom().randrange(2**32) if seed is None else seed
    drawn = sorted(
        random.Random(seed).sample(
            range(len(work)), len(work) if replay is None else min(replay, len(work))
        )
    )
    lines = {(line["method"], line["prompt_id"]): line for line in found.lines}
    bar = progress(len(drawn), "replay")
    for method, group in (work[i] for i in drawn):
        for again in lines_of(experiment, method, group):
            again = json.loads(json.dumps(again))
            report.problems += _unlike(lines[method, again["prompt_id"]], again, tolerance)
        bar.update()
    bar.close()
    if len(drawn) < len(work):
        report.uncertified.append(f"of the other {len(work) - len(drawn)} groups: {UNCHECKED}")
    return (
        f"{len(drawn)} of {len(work)} groups (seed {seed}) decoded again: token ids, counts and "
        f"traces compared"
    )


def _unlike(line: dict, again: dict, tolerance: float) -> Iterator[str]:
    """Say in which fields a line differs from the same work done again."""
    for name, value in comparable(again).items():
        if name != "digest" and not close(line.get(name), value, tolerance):
            yield (
                f"{line['method']}, prompt {line['prompt_id']}: {name} is not what the policy "
                f"gives when it decodes again"
            )


# --- one line -------------------------------------------------------------------------------------


def _known(scorers: Mapping[str, Scorer]) -> Callable[[str], Scorer]:
    def load(name: str) -> Scorer:
        if name not in scorers:
            raise ParameterError(
                f"it names the scorer {name!r}, where {', '.join(scorers)} were loaded"
            )
        return scorers[name]

    return load


def rescored(
    lines: Sequence[dict], load: Callable[[str], Scorer], tolerance: float = TOLERANCE
) -> Iterator[str]:
    """Score every emitted text again and yield one sentence for each thing that does not hold.

    Parameters
    ----------
    lines : sequence of dict
        Records.
    load : callable
        From the name of a scorer to the scorer.
    """
    scorers: dict[str, Scorer] = {}
    for number, line in enumerate(lines, start=1):
        where = f"line {number}, prompt {line['prompt_id']}, {line['method']}"
        if odd := sorted(line.keys() ^ set(COLUMNS)):
            yield f"{where}: its fields are not those of a line, see {', '.join(odd[:4])}"
            continue
        try:
            yield from (f"{where}: {what}" for what in _problems(line, scorers, load, tolerance))
        except (IgcoreError, *GARBLED) as error:
            yield f"{where}: cannot be checked ({type(error).__name__}: {error})"


def _problems(
    line: dict, scorers: dict[str, Scorer], load: Callable[[str], Scorer], tolerance: float
) -> Iterator[str]:
    if line["digest"] != line_digest(line):
        yield (
            f"the line was changed: its digest is {line['digest']}, its content gives "
            f"{line_digest(line)}"
        )
    prompt = as_prompt(line["prompt"], line["prompts"])
    if prompt.id != line["prompt_id"].partition("-")[0]:  # behind it the number of a repeat
        yield f"prompt_id should be {prompt.id}, the hash of the set's name and the prompt"
    for role in ("cost", "reward"):
        name = line[f"{role}_scorer"]
        scorers[name] = scorers.get(name) or load(name)
        check_sign(scorers[name], role)  # a line may not name the reward model as its cost
        if scorers[name].digest != line[f"{role}_digest"]:
            yield (
                f"{role} scorer {name} has hash {scorers[name].digest}, not "
                f"{line[f'{role}_digest']}"
            )
    if line["n_tokens"] != len(line["tokens"]):
        yield f"n_tokens is {line['n_tokens']}, but the line holds {len(line['tokens'])} token ids"
    if line["z_final"] != (line["z_trace"] or [None])[-1]:
        yield (
            f"z_final is {line['z_final']}, but z_trace ends with {(line['z_trace'] or [None])[-1]}"
        )
    config = Settings(**{name: line[name] for name in SETTINGS})
    if line["response"] is None:
        yield from _silence(line, prompt, scorers[line["cost_scorer"]], config)
    else:
        yield from _scored_again(line, prompt, scorers, config, tolerance)


def _silence(line: dict, prompt: Prompt, cost: Scorer, config: SearchConfig) -> Iterator[str]:
    """Say where a line without a text says more than that nothing could be emitted, or where
    something could.
    """
    measured = {
        name: line[name] for name in ("reward", "cost", "peak_cost") if line[name] is not None
    }
    if line["status"] != "abstained" or measured or line["z_trace"] or line["n_tokens"]:
        yield (
            f"status {line['status']} with {measured or line['z_trace'] or line['n_tokens']}, "
            f"but no text was emitted"
        )
    if not method_of(line["method"]).gated or config.on_failure == "paper":
        yield "no text was emitted, but the method always emits one"
    for text in (config.refusal, ""):
        if rescore(cost, [prompt], [text], config)[1][0]:
            yield f"no text was emitted, but {text!r} is inside the budget"


def _scored_again(
    line: dict, prompt: Prompt, scorers: dict[str, Scorer], config: SearchConfig, tolerance: float
) -> Iterator[str]:
    """Compare what a line says of its text with what the scorers say now."""
    cost, reward = (Cached(scorers[line[f"{role}_scorer"]]) for role in ("cost", "reward"))
    text = line["response"]
    now = float(cost.score([prompt.text], [text], [True])[0])
    emission = Emission(
        text, ends=line["block_ends"], grid=line["grid_ends"], n_tokens=line["n_tokens"], cost=now
    )
    (found,) = measure([emission], [prompt], reward=reward, cost=cost, config=config)
    for name in ("cost", "peak_cost", "z_trace", "reward"):
        if not close(line[name], getattr(found, name), tolerance):
            yield f"{name} is {line[name]}, scored again {getattr(found, name)}"
    path_holds = found.z_trace[-1] > 0 if config.strict else found.z_trace[-1] >= 0
    if line["status"] == "abstained" and text not in (config.refusal, ""):
        yield f"status is abstained, but the text is {text[:40]!r} and not the refusal"
    expected = _status(line, bool(within(now, config)), path_holds)
    if line["status"] != expected:
        yield (
            f"status is {line['status']}, but scored again (cost {now} at a budget of "
            f"{line['budget']}) it should be {expected}"
        )


def _status(line: dict, inside: bool, path_holds: bool) -> str:
    """Return the status that a text deserves; a guarded method answers for the path too."""
    gated = method_of(line["method"]).gated
    if gated and line["on_failure"] != "paper" and line["n_tokens"] == 0:  # not the policy's words
        return "abstained" if inside else "nothing emitted"
    return "verified_safe" if inside and (path_holds or not gated) else "unverified_unsafe"


def close(old: object, new: object, tolerance: float) -> bool:
    """Say whether JSON values are of one type and equal, up to a tolerance of numbers with a
    fraction; None stands for NaN.
    """
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(
            close(x, y, tolerance) for x, y in zip(old, new, strict=True)
        )
    if isinstance(old, dict) and isinstance(new, dict):
        return old.keys() == new.keys() and all(
            close(old[name], new[name], tolerance) for name in old
        )
    if isinstance(new, float) and not math.isfinite(new):
        return old is None
    if isinstance(new, float) and isinstance(old, float):
        return abs(old - new) <= tolerance
    return type(old) is type(new) and old == new
