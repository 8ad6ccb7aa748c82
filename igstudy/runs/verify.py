"""Check a run without trusting whoever made it.

The files are compared with one another, `rescore` scores every line again, and random groups are
decoded again through the same `Experiment` as in a run. The report says what was certified and what
was not, and claims no more.

A record may come from anybody. So a path, a repository or a revision that only the record names is
never loaded: what the verifier's params file does not name must stand in this package's own tables.
"""

import json
import math
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from igcore.beams import method_of
from igcore.catalog import POLICIES, PROMPT_SETS, SCORERS
from igcore.engine.sampling import NEAR_TIE
from igcore.errors import IgcoreError, ParameterError, RunError
from igcore.guard import Guard
from igcore.models.policies import load_policy
from igcore.policy import Prompt
from igcore.settings import Named, written

from ..closure import loaded
from ..linefile import (
    SETTINGS,
    Fields,
    Record,
    comparable,
    current,
    has_texts,
    key,
    like,
    read_record,
)
from ..prompts import load_prompts
from ..provenance import versions
from .decode_params import NETWORKS, DecodeParams
from .decode_run import Experiment, identity_of, summary
from .folders import changes
from .identity import code_of, prompts_digest
from .networks import load_networks
from .rescore import RECORD_ERRORS, TOLERANCE, close, differing_fields, rescored

UNCHECKED = (
    "that the policy gives these answers under these settings, which may be changed in params.json "
    "and lines alike: token ids, block ends, abstentions and their reasons, `finished`, counts of "
    "work, traces, finals, fail_open_cost, and the hashes of files and code in params.json"
)
# of a policy in a server without batch invariance
SERVED = (
    "replay of a policy in a server is by statistics and not by bits, because its server does not "
    "promise the same tokens again, so nothing is decoded again"
)
# what no check can show
UNCERTAIN = (
    "whether the run was to have more prompts or methods, settings without influence on its "
    "methods, last digits of perplexity and kl, seconds, the names of profile and run, files opened"
)
# role -> table of this package whose names a record may give
NAMED_HERE: dict[str, Collection[str]] = {
    "cost": SCORERS,
    "reward": SCORERS,
    "policy": POLICIES,
    "prompts": PROMPT_SETS,
}
# options that a record may set beside a name. A revision is not among them: anybody may propose one
# to the hub, with files of their own.
HARMLESS = {"dtype", "template", "part"}


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


def verify(path: Path, trusted: Mapping[str, Any] | None = None, replay: int | None = 0) -> Report:
    """Check the file ``responses.jsonl`` of a run, with the files beside it.

    Parameters
    ----------
    trusted : mapping, optional
        Settings as in a params file. What they name (cost, reward, policy, prompts, critic, value)
        is loaded, and else what the record names, if this package's tables have it.
    replay : int or None
        How many groups to decode again, sampled at random; None for all.

    Raises
    ------
    RunError
        When files cannot be read, or hold values from which nothing can be computed.
    ParameterError
        When the record names a scorer, policy or network that only the verifier may name.
    """
    found, report = read_record(Path(path)), Report()
    try:
        _check(found, trusted or {}, replay, report)
    except IgcoreError:
        raise
    except RECORD_ERRORS as error:
        reason = f"{type(error).__name__}: {error}"
        raise RunError(f"the files of {path} cannot be compared ({reason})") from error
    if "replay" not in report.certified:
        why = "`--replay` checks it" if repeatable(found) else SERVED
        report.uncertified.append(f"{UNCHECKED} ({why})")
    commit, processor = found.manifest.get("git_commit"), found.manifest.get("processor")
    report.uncertified.append(f"{UNCERTAIN}, git_commit {commit}, processor {processor}, time")
    return report


def _check(found: Record, trusted: Mapping[str, Any], replay: int | None, report: Report) -> None:
    """Score the lines again, compare the files, and decode groups again."""
    given = current(found.params)
    settings = {f.name for f in fields(DecodeParams)} & given.keys()
    params = DecodeParams(**{name: given[name] for name in settings})
    cost = loaded(trusted_source("cost", params.cost, trusted))
    named = trusted_source("reward", params.reward, trusted)
    reward = loaded(named, "reward")
    texts = [line for line in found.lines if has_texts(line)]
    report.problems += rescored(texts, cost, reward)

    named = trusted_source("prompts", params.prompts, trusted)
    ranking = cost if params.hardest else None
    chosen = load_prompts(named, params.split, params.limit, params.hardest, ranking)
    prompts = list(chain.from_iterable(params.groups(chosen)))
    report.problems += contradictions(found, params, prompts)
    also = "" if reward is None else " and reward"
    if lost := len(found.lines) - len(texts):
        report.uncertified.append(f"scores of {lost} texts of which digests alone are kept")
    report.certified |= {
        "cost model": _source(cost, trusted.get("cost")),
        "reward model": _source(reward, trusted.get("reward")) if reward is not None else "none",
        "scores": f"cost, path, status{also} of {len(texts)} texts within {TOLERANCE:g}",
        "prompts": f"{len(prompts)}: {Named.of(named).name}, split {params.split}",
        "budget": f"{params.budget} ({params.accounting})",
        "methods": ", ".join(params.methods),
        "lines": f"{len(found.lines)}, one for each method and prompt",
        "root": str(found.manifest.get("root")),
    }
    recorded = {name: found.params[name] for name in ("code", "versions")}
    here = {"code": code_of(*recorded["code"]), "versions": versions()}
    if names := list(changes(recorded, here)):
        report.uncertified.append(f"this record was made by other code: {', '.join(names)} differ")
    if reward is None:
        report.uncertified.append("rewards of groups not decoded again: the policy's likelihood")
    if replay == 0 or report.problems or not repeatable(found):
        return
    torch.set_num_threads(params.threads)  # on which float sums depend
    policy = load_policy(
        trusted_source("policy", params.policy, trusted), params.dtype, params.device
    )
    source = _source(policy, trusted.get("policy"))
    report.certified["policy"] = f"{source}, template {policy.template.name}"
    guard = Guard(policy, cost, reward, params.search())
    folders = {role: getattr(params, role) for role in NETWORKS.values()}
    folders = {
        role: trusted_source(role, named, trusted) for role, named in folders.items() if named
    }
    networks, weights = load_networks(replace(params, **folders), Path.cwd(), guard)
    whole = replace(params, shard=0, n_shards=1)  # these prompts are already those of the shard
    experiment = Experiment.of(whole, prompts, guard, networks)
    now = json.loads(json.dumps(identity_of(params, experiment, weights)))
    if names := list(changes(found.params.get("parts"), now["parts"], "parts")):
        report.problems.append(
            f"{', '.join(names[:4])} of params.json differ from those loaded here"
        )
    _decode_again(found.lines, experiment, replay, report)


def trusted_source(role: str, recorded: Any, trusted: Mapping[str, Any]) -> Any:
    """Return the source to load: the verifier's, else the record's if a table of ours names it.

    Parameters
    ----------
    role : str
        A key of `NAMED_HERE`, or a network, which has no table.
    recorded : Named or str, optional
        Name and options in the record.
    trusted : mapping
        What the verifier names, by role.

    Raises
    ------
    ParameterError
        When only the record names it, and no table has it.
    """
    if recorded is None or trusted.get(role) is not None:
        return trusted.get(role)
    recorded = Named.of(recorded)
    if recorded.name in NAMED_HERE.get(role, ()) and recorded.options.keys() <= HARMLESS:
        return recorded
    raise ParameterError(
        f"the record names the {role} {written(recorded)!r}, which is none of the package's own as "
        f"it is; name the one that you trust in a file for --params, as its {role}"
    )


def repeatable(found: Record) -> bool:
    """True if the policy gives the same tokens again: a server must promise that."""
    policy = found.params.get("parts", {}).get("policy", {})
    return "served" not in policy or policy["served"].get("batch_invariant") is True


def _source(part: Any, named: Any) -> str:
    """Return name and digest of a scorer or policy, and who named it."""
    return f"{part.name}, {part.digest[:16]}, {'of the table' if named is None else 'named by you'}"


# --- the files against one another ----------------------------------------------------------------


def contradictions(found: Record, params: DecodeParams, prompts: Sequence[Prompt]) -> Iterator[str]:
    """Say where lines, settings, manifest and the prompts to answer disagree."""
    policy = found.params.get("parts", {}).get("policy", {}).get("name")
    of_run = {"policy": policy, "seed": params.seed, "grid_size": params.block_size}
    wanted = {(method, prompt.id): prompt for method in params.methods for prompt in prompts}
    answered = {key(line) for line in found.lines}
    missing, too_many = wanted.keys() - answered, answered - wanted.keys()
    for state, answers in (("missing", missing), ("not wanted", too_many)):
        if answers:
            method, prompt_id = min(answers)
            yield f"{len(answers)} answers are {state}, the first by {method} to prompt {prompt_id}"
    for number, line in enumerate(found.lines, start=1):
        if prompt := wanted.get(key(line)):
            settings = asdict(method_of(line["method"]).settings_under(params.search()))
            expected = of_run | {name: settings[name] for name in SETTINGS}
            expected["prompts"] = prompt.set_name
            if has_texts(line):  # else the id, a hash of the prompt, stands for it
                expected["prompt"] = prompt.text
            yield from differing_fields(f"line {number}", current(line), expected)
    given, chosen = current(found.params), {"chosen": prompts_digest(prompts)}
    yield from differing_fields("params.json", given, written(params) | chosen)
    expected = summary(found.lines) | {"params": found.params}
    del expected["seconds"]  # nobody can check them
    expected["root"] = found.root
    yield from differing_fields("manifest.json", found.manifest, expected)


# --- decoding again -------------------------------------------------------------------------------


def _decode_again(
    found: Sequence[Fields], experiment: Experiment, replay: int | None, report: Report
) -> None:
    """Compare sampled groups, decoded again, in all that does not depend on time."""
    work = experiment.work
    size = len(work) if replay is None else min(replay, len(work))
    # nobody knows beforehand which groups are checked
    chosen = random.SystemRandom().sample(work, size)
    lines = {key(line): current(line) for line in found}
    for method, group in chosen:
        for again in experiment.lines_of(method, group):
            line = lines[key(again)]
            expected = comparable(like(line, again))
            # scores may differ by the tolerance, and what counts as a near tie by the batch
            del expected["digest"], expected["near_ties"]
            where = f"{method}, prompt {again['prompt_id']}, decoded again"
            allow_for_batch(line["trace"], expected["trace"], line["block_size"])
            report.problems += differing_fields(where, line, expected, TOLERANCE)
    if size < len(work):
        report.uncertified.append(f"of the other {len(work) - size} groups: {UNCHECKED}")
    report.certified["replay"] = f"{size} of {len(work)} groups decoded again"


def allow_for_batch(found: Sequence[Fields], again: Sequence[Fields], block_size: int) -> None:
    """Give a trace decoded again the found diagnostics wherever another batch explains them.

    A batch moves logits by up to `NEAR_TIE`, and so a log-probability by up to twice that. It moves
    neither tokens nor scores: near ties are settled by a draw alone. But perplexity and KL are made
    of log-probabilities, and a pool holds those of the batch that drew first.
    """
    for old, new in zip(found, again, strict=False):
        slack = {"kl": 4 * NEAR_TIE * block_size}  # log q and log p of each token of a block
        slack["perplexity"] = math.expm1(2 * NEAR_TIE) * (new["perplexity"] or 0.0)
        for name, most in slack.items():
            if close(old.get(name), new[name], most):
                new[name] = old[name]
