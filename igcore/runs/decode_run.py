"""One run of notebook 30: prompts decoded by several methods into a run folder.

`resolve` turns `DecodeParams` into an `Experiment`, which `decode_missing` decodes: it calls
`igcore.guard.decode` for each method and group, makes a record of each response and appends it to
the folder. The unit of work is one method on one group of prompts. The parameters alone fix the
groups, so sharding and resuming never change a result.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, product
from pathlib import Path

from ..beams import method_of
from ..engine.prepack import keep_packed, packed
from ..files import root
from ..guard import Guard, decode
from ..models.policies import load_policy
from ..models.prompts import load_prompts
from ..models.registry import load_scorer, scored_by
from ..policy import Policy, Prompt
from ..settings import written
from .decode_params import DecodeParams, network_of, pool_of
from .folders import Run, groups_of, open_run
from .identity import models_identity, opened
from .networks import Networks, load_networks, network_files
from .records import record


@dataclass(frozen=True)
class Experiment:
    """The resolved parameters of a run: loaded prompts, models and networks, method by method.

    Attributes
    ----------
    params : DecodeParams
        The parameters.
    guards : dict of str to Guard
        By method, in the order of decoding; each with the network that its method needs.
    groups : list of list of Prompt
        The groups of this shard; the prompts of a group are decoded together.
    """

    params: DecodeParams
    guards: dict[str, Guard]
    groups: list[list[Prompt]]

    @classmethod
    def of(
        cls, params: DecodeParams, prompts: Sequence[Prompt], guard: Guard, networks: Networks
    ) -> "Experiment":
        """Return the experiment that parameters describe with these prompts and models."""
        guards = {}
        for method in params.methods:
            network = networks.get(network_of(method))
            guards[method] = replace(guard, critic=network)
        return cls(params, guards, groups_of(params, prompts))

    @property
    def guard(self) -> Guard:
        """Return any of the guards: policy and scorers are the same in all."""
        return next(iter(self.guards.values()))

    @property
    def work(self) -> list[tuple[str, list[Prompt]]]:
        """Return all pairs of method and group, in the order of decoding."""
        return list(product(self.guards, self.groups))


def decode_run(params: DecodeParams, folder: Path | None = None) -> Run:
    """Decode prompts by several methods into a run folder, or resume after a stop.

    Parameters
    ----------
    folder : Path, optional
        By default ``runs/<profile>/<run>`` under `igcore.files.root`, with the shard's number
        appended when there are several.

    Returns
    -------
    Run
        With all its lines.
    """
    import torch

    torch.set_num_threads(params.threads)
    if folder is None:
        name = params.run
        if params.n_shards > 1:
            name += f".{params.shard}-of-{params.n_shards}"
        folder = root() / "runs" / params.profile / name
    experiment, weights = resolve(params)
    identity = identity_of(params, experiment, weights)
    wanted = {(method, prompt.id) for method, group in experiment.work for prompt in group}
    guard = experiment.guard
    # pack the weights once for the whole run; every search would pack and unpack them again
    with open_run(folder, identity, wanted) as run, packed(guard.policy.model):
        run.scorers = {
            scorer.name: scorer for scorer in (guard.cost, guard.reward) if scorer is not None
        }
        decode_missing(run, experiment)
        manifest = summary(run.lines)
        manifest["params"] = run.params
        if guard.pool:  # of this start alone
            manifest["pool"] = {"drawn": guard.pool.drawn, "reused": guard.pool.reused}
        paths = [params.prompts.name]
        for path in network_files(params, root()):
            paths += [path, path.with_suffix(".json")]
        manifest["opened"] = opened(guard.policy, guard.cost, guard.reward, paths=paths)
        run.finish(manifest)
    return run


def resolve(params: DecodeParams) -> tuple[Experiment, dict[str, str]]:
    """Load what parameters name, and check once that it fits together.

    Returns
    -------
    experiment : Experiment
    weights : dict of str to str
        Hashes of the networks that methods need.

    Raises
    ------
    ParameterError, AssetError, RunError
        When something cannot be loaded, or does not fit.
    """
    cost = load_scorer(params.cost)
    reward = None if params.reward is None else load_scorer(params.reward, "reward")
    prompts = load_prompts(
        params.prompts,
        params.split,
        params.limit,
        params.hardest,
        cost if params.hardest else None,
    )
    policy = loaded_policy(params)
    guard = Guard(policy, cost, reward, params.search(), pool=pool_of(params))
    networks, weights = load_networks(params, root(), guard)
    experiment = Experiment.of(params, prompts, guard, networks)
    for method, with_network in experiment.guards.items():
        with_network.under(method)  # refuses a network that was trained for something else
    return experiment, weights


# what the last run loaded, its policy and the files of that: the runs of one params file share a
# process
_LAST: list[tuple[tuple, Policy, dict[str, list[int]]]] = []


def loaded_policy(params: DecodeParams) -> Policy:
    """Return the policy of a run: that of the run before, if it is the same and its files are."""
    wanted = params.policy, params.dtype, params.device
    for known, policy, files in _LAST:
        if known == wanted and opened(policy) == files:
            return policy
    _LAST.clear()  # first, so that there is memory for one policy only
    policy = load_policy(*wanted)
    files = opened(policy)
    # not one that nobody could tell from another, nor one in a server, which may change
    if files and not getattr(policy, "served", None):
        keep_packed(policy.model)
        _LAST.append((wanted, policy, files))
    return policy


def identity_of(params: DecodeParams, experiment: Experiment, weights: Mapping[str, str]) -> dict:
    """Return what the answers of a run depend on, as JSON values, by content.

    Parameters
    ----------
    weights : mapping of str to str
        Hashes of the networks that methods need, see `igcore.runs.networks.load_networks`.
    """
    guard = experiment.guard
    prompts = list(chain(*experiment.groups))
    # a method of a user's own is found by name
    searches = [method_of(method).search for method in params.methods]
    modules = [search.__module__ for search in searches if search]
    known = models_identity(guard.policy, guard.cost, guard.reward, prompts, *modules)
    known["parts"] |= weights
    known["dtype"] = params.dtype
    scorers = {"cost": scored_by(params.cost), "reward": scored_by(params.reward)}
    return written(params) | written(scorers) | known


def decode_missing(run: Run, experiment: Experiment) -> None:
    """Decode every group that the run lacks, and append its responses one by one."""
    run.fill(experiment.work, partial(lines_of, experiment), experiment.params.run)


def lines_of(experiment: Experiment, method: str, group: Sequence[Prompt]) -> Iterator[dict]:
    """Yield the record of each prompt of a group, in their order."""
    params = experiment.params
    guard = experiment.guards[method]
    responses = decode(method, guard, group, seed=params.seed, memory_gb=params.memory_gb)
    for response in responses:
        yield record(response, method, guard, params.seed)


def summary(lines: Sequence[dict]) -> dict:
    """Return counts of lines and near ties, seconds by part, and the statuses of each method."""
    seconds = dict.fromkeys(("generate_s", "cost_s", "reward_s", "critic_s"), 0)
    counts: dict[str, dict[str, int]] = {}
    near_ties = 0
    for line in lines:
        statuses = counts.setdefault(line["method"], {})
        statuses[line["status"]] = statuses.get(line["status"], 0) + 1
        near_ties += line["near_ties"]
        for name in seconds:
            seconds[name] += line[name]
    return {"seconds": seconds, "near_ties": near_ties, "lines": len(lines), "counts": counts}
