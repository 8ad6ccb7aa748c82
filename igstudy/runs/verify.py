"""Check a run against the params file that asks for it, without trusting whoever made the record.

The params file is the request, and the record is only an answer: nothing in it decides what is
loaded, compared or decoded again. Every setting is compared with the request, `rescore` scores
every line again, and random groups are decoded again through the same `Experiment` as in a run. The
report says what was certified and what was not, and claims no more.
"""

import json
import math
import os
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path

import torch

from igcore.beams import method_of
from igcore.engine.sampling import NEAR_TIE
from igcore.errors import IgcoreError, RunError, unknown_name
from igcore.files import root
from igcore.policy import Prompt

from ..linefile import SETTINGS, Fields, Record, has_texts, key, like, modern, read_record
from ..prompts import load_prompts
from ..provenance import processor, versions
from ..trust import admit, loaded
from ..yamlfile import read_yaml
from .decode_params import DecodeParams
from .decode_run import Experiment, guard_of, identity_of, settings_of, summary, with_sampling
from .folders import changes, first_start
from .identity import dated, part_identity, prompts_digest
from .networks import load_networks
from .paramfiles import runs_of
from .records import RECORD_FIELDS
from .rescore import RECORD_ERRORS, TOLERANCE, close, differing_fields, rescored, with_settings

UNCHECKED = (
    "of lines that were not replayed: that the policy gives these answers with this work, and its "
    "name, hashes and device"
)
SERVED = (
    "the params file names a policy in a server without `batch_invariant: true`, which does not "
    "promise the same tokens again"
)
# file -> fields that cannot be checked afterwards
NOT_CERTIFIED = {
    "params.json": {"code", "date", "versions"},
    "manifest.json": {
        *"seconds pool opened git_commit versions processor finished_at root_with_texts".split()
    },
    "responses.jsonl": {"near_ties", *(name for name in RECORD_FIELDS if name.endswith("_s"))},
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
        or names a module that is not allowed, see `igstudy.trust.admit`.
    """
    given = read_yaml(params)
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


def verify(path: Path, request: DecodeParams, replay: int | None = 0) -> Report:
    """Check the file ``responses.jsonl`` of a run, with the files beside it.

    Parameters
    ----------
    request : DecodeParams
        What was asked for, see `request_of`.
    replay : int or None
        How many groups to decode again, sampled at random; None for all.

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
        with dated(first_start(path.parent)):  # which the record says, as a part of its prompts
            _check(found, request, replay, report)
    except IgcoreError:
        raise
    except RECORD_ERRORS as error:
        reason = f"{type(error).__name__}: {error}"
        raise RunError(f"the files of {path} cannot be compared ({reason})") from error
    report.uncertified += [f"{', '.join(sorted(x))} of {file}" for file, x in NOT_CERTIFIED.items()]
    report.uncertified.append("last digits of perplexity and kl")
    return report


def _check(found: Record, request: DecodeParams, replay: int | None, report: Report) -> None:
    """Score the lines again, compare the files, and decode groups again."""
    cost, reward = loaded(request.cost), loaded(request.reward, "reward")
    report.problems += rescored(found.lines, cost, reward)
    chosen = load_prompts(request.prompts, request.split, request.limit, request.hardest, cost)
    prompts = list(chain.from_iterable(request.groups(chosen)))
    report.problems += contradictions(found, request, prompts)
    scorers = {"cost": part_identity(cost), "reward": reward and part_identity(reward)}
    report.problems += differing_fields("parts of params.json", found.params["parts"], scorers)
    if report.problems:
        return
    again: set[tuple[str, str]] = set()
    options = request.policy.options
    if replay != 0 and "server" in options and options.get("batch_invariant") is not True:
        report.undecided.append(SERVED)
    elif replay != 0:
        again = _replayed(found, request, chosen, replay, report)
    if hidden := sum(not has_texts(x) and key(x) not in again for x in found.lines):
        report.undecided.append(
            f"{hidden} lines hold digests in place of texts, so their scores cannot be checked "
            "unless they are replayed"
        )
    report.replayed = f"{len(again)} of {len(found.lines)} lines were replayed"
    if len(again) < len(found.lines):
        report.replayed += "; the others were only scored again"
        report.uncertified.append(UNCHECKED)


# --- the files against the request ----------------------------------------------------------------


def contradictions(found: Record, request: DecodeParams, prompts: list[Prompt]) -> Iterator[str]:
    """List where lines, settings and manifest differ from the request, or disagree."""
    given = modern(found.params)
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
            yield from differing_fields(f"line {number}", with_settings(line), expected)
    expected = settings_of(params) | {"chosen": prompts_digest(prompts)}
    # parts and device depend on the policy
    yield from _compared("params.json", given, expected, "parts", "device")
    expected = summary(found.lines) | {"params": found.params, "root": found.root}
    yield from _compared("manifest.json", found.manifest, expected)


def _compared(file: str, found: Fields, expected: Fields, *besides: str) -> Iterator[str]:
    """Yield a sentence for each field of a file that differs, also for an unexpected one."""
    names = (found.keys() | expected.keys()) - NOT_CERTIFIED[file] - {*besides}
    old, new = ({n: x.get(n, "missing") for n in sorted(names)} for x in (found, expected))
    return differing_fields(file, old, new)


# --- decoding again -------------------------------------------------------------------------------


def _replayed(
    found: Record, request: DecodeParams, prompts: list[Prompt], replay: int | None, report: Report
) -> set[tuple[str, str]]:
    """Decode sampled groups again, and return the keys of their lines."""
    torch.set_num_threads(request.threads)  # on which float sums depend
    # a pool may hold samples of others
    guard = guard_of(replace(request, pool=None))
    params = with_sampling(request, vars(guard.config))
    networks, weights = load_networks(params, root(), guard)
    experiment = Experiment.of(params, prompts, guard, networks)
    now = json.loads(json.dumps(identity_of(params, experiment, weights)))
    given = modern(found.params)
    besides = NOT_CERTIFIED["params.json"] | ({"device"} if request.device == "auto" else set())
    old, new = ({n: x[n] for n in sorted(x.keys() - besides)} for x in (given, now))
    if names := ", ".join(list(changes(old, new))[:4]):
        report.problems.append(f"{names} of params.json differ from those loaded here")
    size = len(experiment.work) if replay is None else min(replay, len(experiment.work))
    # which groups are checked cannot be predicted
    drawn = random.SystemRandom().sample(experiment.work, size)
    lines = {key(line): line for line in found.lines}
    made = found.manifest.get("processor"), found.params.get("versions")
    elsewhere = made != (processor(), versions())
    for method, group in drawn:
        for again in experiment.lines_of(method, group):
            where = f"{method}, prompt {again['prompt_id']}, decoded again"
            differing = list(differences(where, lines[key(again)], again))
            # what no token decides has been compared before
            tied = again["near_ties"] or guard.policy.model.dtype != torch.float32
            if differing and elsewhere and tied:
                report.undecided.append(
                    f"{where}: differs after a near tie, as another processor or version may"
                )
            else:
                report.problems += differing
    return {(method, prompt.id) for method, group in drawn for prompt in group}


def differences(where: str, line: Fields, again: Fields) -> Iterator[str]:
    """List where a line differs from the one decoded again, beyond the rounding of batches.

    Hashes are left out, because those of scorers change with their code. Where one of the two has
    no texts, only their digests are compared.
    """
    line, again = with_settings(line), with_settings(again)
    line = like(again, line)
    expected = {
        name: value
        for name, value in like(line, again).items()
        if name not in NOT_CERTIFIED["responses.jsonl"] and not name.endswith("digest")
    }
    allow_for_batch(line["trace"], expected["trace"], line["block_size"])
    return differing_fields(where, line, expected, TOLERANCE)


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
