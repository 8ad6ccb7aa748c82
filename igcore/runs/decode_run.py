"""One run of notebook 30: prompts decoded by several methods into a run folder.

`resolve` turns `DecodeParams` into an `Experiment`, which `decode_missing` decodes: it calls
`igcore.guard.decode` for each method and group, makes a record of each response and appends it to
the folder. The unit of work is one method on one group of prompts. The parameters alone fix the
groups, so sharding and resuming never change a result.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

from ..beams import method_of
from ..decoding import decode
from ..engine.prepack import packed
from ..folders import Run, open_run, root
from ..guard import Guard
from ..models.policies import load_policy
from ..models.prompts import load_prompts
from ..models.registry import load_scorer
from ..policy import Prompt, groups_of
from .decode_params import DecodeParams, network_of, set_name
from .identity import models_identity, opened
from .networks import Networks, load_networks, network_files
from .records import record


@dataclass(frozen=True)
class Experiment:
    """The resolved parameters of a run: loaded prompts, models and networks, method by method.

    Attributes
    ----------
    name : str
        Name of the run.
    guards : dict of str to Guard
        By method, in the order of decoding; each with the network that its method needs.
    groups : list of list of Prompt
        The groups of this shard; the prompts of a group are decoded together.
    seed, memory_gb
        See `igcore.decode`.
    """

    name: str
    guards: dict[str, Guard]
    groups: list[list[Prompt]]
    seed: int
    memory_gb: float | None

    @classmethod
    def of(
        cls, params: DecodeParams, prompts: Sequence[Prompt], guard: Guard, networks: Networks
    ) -> "Experiment":
        """Return the experiment that parameters describe with these prompts and models."""
        guards = {
            method: replace(guard, critic=networks.get(network_of(method)))
            for method in params.methods
        }
        groups = groups_of(params, prompts)
        return cls(params.run, guards, groups, params.seed, params.memory_gb)

    @property
    def guard(self) -> Guard:
        """Return any of the guards: policy and scorers are the same in all."""
        return next(iter(self.guards.values()))

    @property
    def work(self) -> list[tuple[str, list[Prompt]]]:
        """Return all pairs of method and group, in the order of decoding."""
        return [(method, group) for method in self.guards for group in self.groups]


def decode_run(params: DecodeParams, folder: Path | None = None) -> Run:
    """Decode prompts by several methods into a run folder, or resume after a stop.

    Parameters
    ----------
    folder : Path, optional
        By default ``runs/<profile>/<run>`` under `igcore.folders.root`, with the shard's number
        appended when there are several.

    Returns
    -------
    Run
        With all its lines.
    """
    import torch

    torch.set_num_threads(params.threads)
    shard = f".{params.shard}-of-{params.n_shards}" if params.n_shards > 1 else ""
    folder = folder or root() / "runs" / params.profile / f"{params.run}{shard}"
    experiment, weights = resolve(params)
    guard = experiment.guard
    wanted = {(method, prompt.id) for method, group in experiment.work for prompt in group}
    identity = identity_of(params, experiment, weights)
    # pack the weights once for the whole run; every search would pack and unpack them again
    with open_run(folder, identity, wanted) as run, packed(guard.policy.model):
        run.scorers = {scorer.name: scorer for scorer in (guard.cost, guard.reward)}
        decode_missing(run, experiment)
        paths = [set_name(params.prompts), *chain(*network_files(params, root()).values())]
        files = opened(guard.policy, guard.cost, guard.reward, paths=paths)
        run.finish(summary(run.lines) | {"opened": files, "params": run.params})
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
    cost, reward = load_scorer(params.cost), load_scorer(params.reward)
    ranking = cost if params.hardest else None
    prompts = load_prompts(params.prompts, params.split, params.limit, params.hardest, ranking)
    policy = load_policy(params.policy, params.dtype, params.device)
    guard = Guard(policy, cost, reward, params.search())
    networks, weights = load_networks(params, root(), guard)
    experiment = Experiment.of(params, prompts, guard, networks)
    for method, with_network in experiment.guards.items():
        with_network.under(method)  # refuses a network that was trained for something else
    return experiment, weights


def identity_of(params: DecodeParams, experiment: Experiment, weights: Mapping[str, str]) -> dict:
    """Return what the answers of a run depend on, as JSON values, by content.

    Parameters
    ----------
    weights : mapping of str to str
        Hashes of the networks that methods need, see `igcore.runs.networks.load_networks`.
    """
    guard = experiment.guard
    models = {"policy": guard.policy, "cost": guard.cost, "reward": guard.reward}
    prompts = [prompt for group in experiment.groups for prompt in group]
    # baselines with a search of their own are found by name, so no import statement shows them
    searches = {method_of(method).search.partition(":")[0] for method in params.methods}
    known = models_identity(models, prompts, __name__, *searches)
    known["parts"] |= weights
    order = ("versions", "code", "chosen", "parts", "device")
    return asdict(params) | {name: known[name] for name in order}


def decode_missing(run: Run, experiment: Experiment) -> None:
    """Decode every group that the run lacks, and append its responses one by one."""
    run.fill(experiment.work, partial(lines_of, experiment), experiment.name)


def lines_of(experiment: Experiment, method: str, group: Sequence[Prompt]) -> Iterator[dict]:
    """Yield the record of each prompt of a group, in their order."""
    guard, seed = experiment.guards[method], experiment.seed
    for response in decode(method, guard, group, seed=seed, memory_gb=experiment.memory_gb):
        yield record(response, method, guard, seed)


def summary(lines: Sequence[dict]) -> dict:
    """Return counts of lines and near ties, seconds by part, and the statuses of each method."""
    counts: dict[str, Counter] = {}
    for line in lines:
        counts.setdefault(line["method"], Counter())[line["status"]] += 1
    parts = ("generate_s", "cost_s", "reward_s", "critic_s")
    return {
        "seconds": {name: sum(line[name] for line in lines) for name in parts},
        "near_ties": sum(line["near_ties"] for line in lines),
        "lines": len(lines),
        "counts": {method: dict(statuses) for method, statuses in counts.items()},
    }
