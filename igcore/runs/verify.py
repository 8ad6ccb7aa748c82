"""Check a run without trusting whoever made it.

Four steps: `evidence` reads the files and compares them with one another, `trusted` decides which
models and prompts may be loaded, `rescore` scores every line again, and here random groups are
decoded again through the same `Experiment` as in a run. The report says what was certified and what
was not, and claims no more.
"""

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..errors import IgcoreError, ParameterError, RunError
from ..folders import changes, comparable
from ..guard import Guard
from ..policy import Policy, Prompt, groups_of
from ..progress import progress
from ..scorers import Scorer
from .decode_params import NETWORKS, DecodeParams
from .decode_run import Experiment, identity_of, lines_of
from .evidence import Evidence, claimed_groups, contradictions, evidence, params_of
from .networks import LOADERS, Networks, load_networks
from .rescore import GARBLED, TOLERANCE, close, rescored
from .trusted import Trusted, policy_of, prompts_of, scorer_of, unnamed

UNCHECKED = (
    "that the policy gives these answers under these settings: token ids, block ends, abstentions "
    "and their reasons, `finished`, counts of work, traces, finals, fail_open_cost, and the hashes "
    "of files and code in params.json"
)
UNCERTAIN = "seconds, the names of profile and run, files opened"  # no check can show these


@dataclass
class Report:
    """What a verification found.

    Attributes
    ----------
    problems : list of str
        A sentence for each thing that does not hold.
    certified : dict of str to str
        Thing checked -> what the check found.
    uncertified : list of str
        Things that were not checked.
    """

    problems: list[str] = field(default_factory=list)
    certified: dict[str, str] = field(default_factory=dict)
    uncertified: list[str] = field(default_factory=list)


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
    trusted : Trusted, optional
        What the verifier names in the place of the record's.
    replay : int or None
        How many groups to decode again, drawn at random; None for all.
    seed : int, optional
        Draws the groups; by default another one each time, so that nobody knows beforehand which
        groups are checked.
    tolerance : float
        By how much a number may differ when it is scored again.

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
            f"beside {path} lies no params.json, which says how to decode again; get the run's "
            "folder, or omit --replay"
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
            "settings, the budget among them, prompts and the number of lines: no params.json lies "
            "beside the file"
        )
    else:
        _check_run(found, scorers, trusted, replay, seed, tolerance, report)
    if "replay" not in report.certified:
        report.uncertified.append(UNCHECKED + " (`--replay` checks it)")
    report.uncertified.append(UNCERTAIN + _made(found.manifest))
    return report


def _known(scorers: Mapping[str, Scorer]) -> Callable[[str], Scorer]:
    """Return a loader that knows only the given scorers."""

    def load(name: str) -> Scorer:
        """Return the scorer of a name, or raise ``ParameterError``."""
        if name not in scorers:
            raise ParameterError(
                f"it names the scorer {name!r}, where {', '.join(scorers)} were loaded"
            )
        return scorers[name]

    return load


def _source(part: Scorer | Policy, given: object) -> str:
    """Say which scorer or policy was used, and who named it."""
    return f"{part.name}, {part.digest[:16]}, {'of the table' if given is None else 'named by you'}"


def _made(manifest: dict | None) -> str:
    """Say which commit, processor and time the manifest claims."""
    if manifest is None:
        return ""
    return (
        f", commit {manifest.get('git_commit')}, processor {manifest.get('processor')}, time "
        f"{manifest.get('finished_at')}"
    )


# --- the whole run --------------------------------------------------------------------------------


def _check_run(
    found: Evidence,
    scorers: Mapping,
    trusted: Trusted,
    replay: int | None,
    seed: int | None,
    tolerance: float,
    report: Report,
) -> None:
    """Compare lines with settings, prompts and manifest, and decode groups again."""
    params = params_of(found)
    read_again = prompts_of(params, scorers["cost"], trusted.prompts)
    try:
        if read_again is None:
            groups = claimed_groups(params, found.lines)
        else:
            groups = groups_of(params, read_again)
        prompts = [prompt for group in groups for prompt in group]
        report.problems += list(contradictions(found, params, prompts))
    except GARBLED as error:
        report.problems.append(
            f"lines, params.json and manifest.json cannot be compared ({type(error).__name__}: "
            f"{error})"
        )
        return
    known = read_again is not None
    _certify_run(report, found, params, len(prompts), known, trusted)
    if replay == 0 or report.problems:
        return
    try:
        experiment, parts = _experiment(params, prompts, scorers, trusted)
        policy = experiment.guard.policy
        report.certified["policy"] = (
            f"{_source(policy, trusted.policy)}, template {policy.template.name}"
        )
        _check_parts(found, parts, report)
        report.certified["replay"] = _replayed(found, experiment, replay, seed, tolerance, report)
    except IgcoreError:
        raise
    except GARBLED as error:
        raise RunError(
            f"nothing can be decoded under the settings of params.json ({type(error).__name__}: "
            f"{error})"
        ) from error


def _certify_run(
    report: Report,
    found: Evidence,
    params: DecodeParams,
    n_prompts: int,
    known: bool,
    trusted: Trusted,
) -> None:
    """Note what the comparison has shown.

    When the verifier does not read the prompt set again, only the record speaks for it.
    """
    of = f" of {_label(params, trusted.prompts)}" if known else ", as the record itself says"
    report.certified |= {
        "budget": f"{params.budget} ({params.accounting})",
        "methods": ", ".join(params.methods),
        "prompts": f"{n_prompts}{of}",
        "lines": (
            f"{len(found.lines)}, one for each method and prompt, under the settings of params.json"
        ),
        "root": str((found.manifest or {}).get("root")),
    }
    if not known:
        report.uncertified.append(
            f"that these are all prompts of {params.prompts!r}: name the set with --prompts"
        )


def _label(params: DecodeParams, given: str | Mapping | None) -> str:
    """Say which prompts were read again: the verifier's own set, or one of the package's."""
    cut = [
        f"{name} {getattr(params, name)}" for name in ("limit", "hardest") if getattr(params, name)
    ]
    shard = [f"shard {params.shard} of {params.n_shards}"] if params.n_shards > 1 else []
    name = params.prompts if given is None else f"{given}, named by you"
    return ", ".join([f"{name}, split {params.split}", *cut, *shard])


# --- decoding again -------------------------------------------------------------------------------


def _experiment(
    params: DecodeParams, prompts: Sequence[Prompt], scorers: Mapping, trusted: Trusted
) -> tuple[Experiment, dict]:
    """Load the policy and the networks that the verifier names, and resolve the run again.

    Returns
    -------
    experiment : Experiment
        The run of these prompts, which are already those of its shard.
    identity : dict
        What its lines depend on in this installation.
    """
    import torch

    torch.set_num_threads(params.threads)  # on which float sums depend
    policy = policy_of(params, trusted.policy)
    guard = Guard(policy, scorers["cost"], scorers["reward"], params.search())
    networks, weights = _networks(params, trusted, guard)
    whole = replace(params, shard=0, n_shards=1)
    experiment = Experiment.of(whole, prompts, guard, networks)
    return experiment, identity_of(params, experiment, weights)


def _networks(params: DecodeParams, trusted: Trusted, guard: Guard) -> tuple[Networks, dict]:
    """Load the critic and the value network of a run from the folders that the verifier names."""
    kinds = {role: kind for kind, role in NETWORKS.items()}
    roles = [role for role in LOADERS if getattr(params, role) is not None]
    folders = {role: getattr(trusted, role) for role in roles}
    for role, folder in folders.items():
        if folder is None:
            raise unnamed(kinds[role], getattr(params, role), role)
    return load_networks(replace(params, **folders), Path.cwd(), guard)


def _check_parts(found: Evidence, now: Mapping, report: Report) -> None:
    """Say where models, versions or code differ from those of the run."""
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


def _replayed(
    found: Evidence,
    experiment: Experiment,
    replay: int | None,
    seed: int | None,
    tolerance: float,
    report: Report,
) -> str:
    """Decode groups again and compare all that does not depend on time; return what was done."""
    work = experiment.work
    seed = random.SystemRandom().randrange(2**32) if seed is None else seed
    drawn = _drawn(len(work), replay, seed)
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
        "traces compared"
    )


def _drawn(n_groups: int, replay: int | None, seed: int) -> Sequence[int]:
    """Return the numbers of the groups to decode again, in order; None draws all."""
    size = n_groups if replay is None else min(replay, n_groups)
    return sorted(random.Random(seed).sample(range(n_groups), size))


def _unlike(line: dict, again: dict, tolerance: float) -> Iterator[str]:
    """Say in which fields a line differs from the same work done again."""
    for name, value in comparable(again).items():
        if name != "digest" and not close(line.get(name), value, tolerance):
            yield (
                f"{line['method']}, prompt {line['prompt_id']}: {name} is not what the policy "
                "gives when it decodes again"
            )
