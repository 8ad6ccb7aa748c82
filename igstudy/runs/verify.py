"""Check a run against the params file that asks for it, without trusting whoever made the record.

The params file is the request, and the record is only an answer: nothing in it decides what is
loaded, compared, decoded again or excused. Every setting is compared with the request, and
`rescore` scores every line again. The policy is the `witness`: it is asked whether it gave every
token, or decodes random groups again. The report says what was certified and what was not, and
claims no more.
"""

import math
import os
import random
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import datetime
from itertools import chain, product
from pathlib import Path
from typing import Literal

from igcore.errors import IgcoreError, RunError, unknown_name
from igcore.methods import method_of
from igcore.prompt import Prompt
from igcore.settings import written
from igserve.trust import admit

from ..linefile import SETTINGS, Fields, LineKey, Record, has_texts, key, read_record
from ..prompts import load_prompts
from ..sources import loaded
from .decode_params import DecodeParams
from .decode_run import summary, with_sampling
from .identity import dated, part_identity, prompts_digest
from .paramfiles import read_recipe, runs_of
from .rescore import RECORD_ERRORS, differing_fields, odd_fields, rescored
from .witness import UNCERTAIN, Witness

TOKENS: Literal["tokens"] = "tokens"  # the policy is asked, and groups are decoded where it must be
Replay = int | Literal["tokens"] | None
UNCHECKED = (
    "of lines that were not replayed: that the policy gives these answers with this work, and its "
    "name, hashes and device"
)
UNASKED = (
    "of lines that were not replayed: that the blocks of an answer are of one search, abstentions, "
    "reasons and costs of failing open, which of its samples a search has chosen, counts of work, "
    "traces and finals; and the networks of the run"
)
SERVED = (
    "the params file names a policy in a server, which gives no probabilities of all tokens and, "
    "without `batch_invariant: true`, does not promise the same tokens again"
)
# file -> fields that cannot be checked afterwards
NOT_CERTIFIED = {
    "params.json": {"began_at", "code", "versions"},
    "manifest.json": {*"seconds git_commit versions processor finished_at root_with_texts".split()},
    "responses.jsonl": UNCERTAIN,
}


@dataclass
class Report:
    """What a verification found.

    Attributes
    ----------
    problems : list of str
        A sentence for each thing that does not hold.
    undecided : list of str
        A sentence for each thing that this machine cannot decide.
    replayed : str
        How many lines were decoded again; empty if something does not hold.
    uncertified : list of str
        Things that were not checked.
    """

    problems: list[str] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)
    replayed: str = ""
    uncertified: list[str] = field(default_factory=list)


def request_of(file: Path, params: Path) -> DecodeParams:
    """Return what a params file requests of the run in whose folder a file of responses is.

    The folder's name says which run it is, and which shard; a params file with one run asks for
    that one.

    Raises
    ------
    ParameterError
        When the params file cannot be read, makes no run of that name, asks for something invalid,
        or names a module that is not allowed, see `igserve.trust.admit`.
    """
    given = read_recipe(params)
    admit(given, params)
    runs = dict(runs_of(given, params))
    # realpath, as resolve raises an error for a link to itself
    name, _, suffix = Path(os.path.realpath(file)).parent.name.partition(".")
    if len(runs) == 1:
        (name,) = runs
    if name not in runs:
        hint = f"; the folder of {file} must have the name of its run"
        raise unknown_name(f"run of {params}", name, runs, hint)
    shard = re.fullmatch(r"(\d+)-of-(\d+)", suffix)
    own = {"shard": int(shard[1]), "n_shards": int(shard[2])} if shard else {}
    return DecodeParams(**runs[name] | own)


def verify(path: Path, request: DecodeParams, replay: Replay = 0) -> Report:
    """Check the file ``responses.jsonl`` of a run, with the files beside it.

    Parameters
    ----------
    request : DecodeParams
        What was asked for, see `request_of`.
    replay : int, "tokens" or None
        How many groups to decode again, sampled at random; None for all. With ``tokens`` the policy
        is asked for every recorded token, and only what it cannot tell is decoded again.

    Raises
    ------
    ParameterError, AssetError
        When something that the request names cannot be loaded.
    RunError
        When files cannot be read, are of another run, or hold values from which nothing can be
        computed.
    """
    found, report = read_record(Path(path)), Report()
    if (run := found.params.get("run")) != request.run:
        raise RunError(
            f"{path} is a record of the run {str(run)[:60]!r}, but the params file asks for "
            f"{request.run!r}; give the params file of that run"
        )
    try:
        with dated():
            _check(found, request, replay, report)
    except IgcoreError:
        raise
    except RECORD_ERRORS as error:
        reason = f"{type(error).__name__}: {error}"
        raise RunError(f"the files of {path} cannot be compared ({reason})") from error
    report.uncertified += [f"{', '.join(sorted(x))} of {file}" for file, x in NOT_CERTIFIED.items()]
    report.uncertified.append("last digits of perplexity and kl")
    return report


def _check(found: Record, request: DecodeParams, replay: Replay, report: Report) -> None:
    """Score the lines again, compare the files, and ask the policy or decode groups again."""
    if odd := odd_fields(found.lines):
        report.problems.append(odd)
        return
    cost, reward = loaded(request.cost), loaded(request.reward, "reward")
    report.problems += rescored(found.lines, cost, reward)
    chosen = load_prompts(request.prompts, request.split, request.limit, request.hardest, cost)
    prompts = list(chain.from_iterable(request.groups(chosen)))
    report.problems += contradictions(found, request, prompts)
    report.problems += impossible_seconds(found)
    scorers = {"cost": part_identity(cost), "reward": reward and part_identity(reward)}
    report.problems += differing_fields("parts of params.json", found.params["parts"], scorers)
    if report.problems:
        return
    asked, again = set[LineKey](), set[LineKey]()
    options = request.policy.options
    repeats = options.get("batch_invariant") is True and replay != TOKENS
    if replay != 0 and "server" in options and not repeats:
        report.undecided.append(SERVED)
    elif replay != 0:
        witness = Witness.of(found, request, chosen)
        if replay == TOKENS and not witness.problems:
            asked, again = witness.ask_all()
        elif not witness.problems:
            again = witness.decode_again(_sampled(request, chosen, replay))
        report.problems += witness.problems
        report.undecided += witness.undecided
    if hidden := sum(not has_texts(x) and key(x) not in again for x in found.lines):
        report.undecided.append(
            f"{hidden} lines hold digests in place of texts, so their scores cannot be checked "
            "unless they are replayed"
        )
    report.replayed = f"{len(again)} of {len(found.lines)} lines were replayed"
    if replay == TOKENS:
        gave = f"the policy gives every token of {len(asked)} of {len(found.lines)} lines"
        report.replayed = f"{gave}; {report.replayed}"
    if len(asked | again) < len(found.lines):
        report.replayed += "; the others were only scored again"
    if len(again) < len(found.lines):
        report.uncertified.append(UNASKED if replay == TOKENS else UNCHECKED)


def _sampled(request: DecodeParams, prompts: list[Prompt], replay: Replay) -> set[LineKey]:
    """Return the keys of the lines of so many random groups, or of all groups."""
    work = list(product(request.methods, request.groups(prompts)))
    size = min(replay, len(work)) if isinstance(replay, int) else len(work)
    # which groups are checked cannot be predicted
    drawn = random.SystemRandom().sample(work, size)
    return {(method, prompt.id) for method, group in drawn for prompt in group}


# --- the files against the request ----------------------------------------------------------------


def contradictions(found: Record, request: DecodeParams, prompts: list[Prompt]) -> Iterator[str]:
    """List where lines, settings and manifest differ from the request, or disagree."""
    given = found.params
    # what a checkpoint sets a replay compares
    params = with_sampling(request, given) if request.sampling else request
    policy = given["parts"]["policy"]["name"]  # which a replay compares
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
            yield from differing_fields(f"line {number}", line, expected)
    expected = written(params) | {"chosen": prompts_digest(prompts)}
    # parts and device depend on the policy
    yield from _compared("params.json", given, expected, "parts", "device")
    expected = summary(found.lines) | {"params": found.params, "root": found.root}
    yield from _compared("manifest.json", found.manifest, expected)


def _compared(file: str, found: Fields, expected: Fields, *besides: str) -> Iterator[str]:
    """Yield a sentence for each field of a file that differs, also for an unexpected one."""
    names = (found.keys() | expected.keys()) - NOT_CERTIFIED[file] - {*besides}
    old, new = ({n: x.get(n, "missing") for n in sorted(names)} for x in (found, expected))
    return differing_fields(file, old, new)


def impossible_seconds(found: Record) -> Iterator[str]:
    """List the lines whose seconds cannot be, and say if all took longer than the run."""
    total = 0.0
    for number, line in enumerate(found.lines, start=1):
        for name in ("generate_s", "cost_s", "reward_s", "critic_s", "score_s"):
            if not 0 <= line[name] < math.inf:
                yield f"line {number}: {name} is {line[name]!r:.60}, which is no time"
        total += line["generate_s"] + line["score_s"]
    times = found.params["began_at"], found.manifest["finished_at"]
    began, finished = (datetime.fromisoformat(time).timestamp() for time in times)
    lasted = finished - began + 1  # both are in whole seconds
    if not total <= lasted:
        yield f"the lines took {total:.6g} s, but the run {lasted:.6g} s"
