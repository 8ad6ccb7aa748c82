"""One run of notebook 30: prompts decoded by several methods into a run folder.

`decode_run` makes an `Experiment` of what `DecodeParams` name. It calls `igcore.decode` for
each method and group, and appends a record of each response to the folder. The unit of work is one
method on one group of prompts. The parameters alone fix the groups, so sharding and resuming never
change a result.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from pathlib import Path
from typing import Any

from igcore import Guard, Prompt, decode
from igcore.catalog import found
from igcore.methods import method_of
from igcore.settings import written

from ..files import root
from ..linefile import Fields
from ..prompts import load_prompts
from ..sources import loaded
from .decode_params import DecodeParams, network_of
from .folders import Run, open_run
from .identity import dated, file_stamps, models_identity
from .networks import Networks, load_networks
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
            guards[method] = replace(guard, critic=networks.get(network_of(method) or ""))
            # refuses a network that was trained for something else
            guards[method].with_method(method)
        return cls(params, guards, params.groups(prompts))

    @property
    def work(self) -> list[tuple[str, list[Prompt]]]:
        """Return all pairs of method and group, in the order of decoding."""
        return list(product(self.guards, self.groups))

    def lines_of(self, method: str, group: Sequence[Prompt]) -> Iterator[Fields]:
        """Yield the record of each prompt of a group, in their order."""
        guard, seed = self.guards[method], self.params.seed
        for response in decode(method, guard, group, seed=seed):
            yield record(response, method, guard, seed)


def decode_run(params: DecodeParams, folder: Path | None = None) -> Run:
    """Decode prompts by several methods into a run folder, or resume after a stop.

    Parameters
    ----------
    folder : Path, optional
        By default ``runs/<profile>/<run>`` under `igstudy.files.root`, with the shard's number
        appended when there are several.

    Returns
    -------
    Run
        With all its lines.

    Raises
    ------
    ParameterError, AssetError, RunError
        When something cannot be loaded, or does not fit.
    """
    import torch

    torch.set_num_threads(params.threads)
    if folder is None:
        name = params.run
        if params.n_shards > 1:
            name += f".{params.shard}-of-{params.n_shards}"
        folder = root() / "runs" / params.profile / name
    with dated():
        return _decoded(params, folder)


def _decoded(params: DecodeParams, folder: Path) -> Run:
    """Decode into a folder, see `decode_run`."""
    guard = guard_of(params)
    params = with_sampling(params, vars(guard.config))
    prompts = load_prompts(params.prompts, params.split, params.limit, params.hardest, guard.cost)
    networks, weights = load_networks(params, guard)
    experiment = Experiment.of(params, prompts, guard, networks)
    identity = identity_of(experiment, weights)
    with open_run(folder, identity) as run:
        run.fill(experiment.work, experiment.lines_of)
        run.finish(summary(run.lines) | {"params": run.params})
    return run


# of the last run: what named its policy, it and its files; the runs of one params file share
# a process
_LAST: dict[str, Any] = {}


def guard_of(params: DecodeParams) -> Guard:
    """Return the guard of a run, with the policy of the run before if it is the same."""
    named = {"policy": params.policy, "dtype": params.dtype, "device": params.device}
    config = params.search()
    same = _LAST.get("named") == named and file_stamps(_LAST["policy"]) == _LAST["files"]
    if not same:
        _LAST.clear()  # first, so that there is memory for one policy only
    guard = Guard(
        **({"policy": _LAST["policy"]} if same else named),
        cost=loaded(params.cost),
        reward=loaded(params.reward, "reward"),
        config=config,
    )
    files = file_stamps(guard.policy)
    # not one without a digest, nor one in a server, which may change
    if not same and files and not getattr(guard.policy, "served", None):
        _LAST.update(named=named, policy=guard.policy, files=files)
    return guard


def with_sampling(params: DecodeParams, taken: Fields) -> DecodeParams:
    """Return parameters with the sampling that was taken from a model, in a run's identity."""
    own: Fields = {n: taken.get(n) for n in ("sampling", "temperature", "top_p", "top_k")}
    return replace(params, **own)


def identity_of(experiment: Experiment, weights: Mapping[str, str]) -> Fields:
    """Return the identity of a run, as JSON values: settings, models, code and prompts by content.

    Parameters
    ----------
    weights : mapping of str to str
        Hashes of the networks that methods need, see `igstudy.runs.networks.load_networks`.
    """
    guard = next(iter(experiment.guards.values()))  # policy and scorers are the same in all
    prompts = list(chain(*experiment.groups))
    # a method of a user's own is found by name
    searches = [found(method_of(method).search) for method in experiment.guards]
    modules = [search.__module__ for search in searches if search]
    known = models_identity(guard.policy, guard.cost, guard.reward, prompts, *modules)
    known["parts"] |= weights
    known["dtype"] = experiment.params.dtype
    return {**written(experiment.params), **known}


def summary(lines: Sequence[Fields]) -> Fields:
    """Return counts of lines and near ties, seconds by part, and the statuses of each method."""
    parts = ("generate_s", "cost_s", "reward_s", "critic_s")
    seconds = {name: sum(line[name] for line in lines) for name in parts}
    counts: dict[str, dict[str, int]] = {}
    for line in lines:
        statuses = counts.setdefault(line["method"], {})
        statuses[line["status"]] = statuses.get(line["status"], 0) + 1
    near_ties = sum(line["near_ties"] for line in lines)
    return {"seconds": seconds, "near_ties": near_ties, "lines": len(lines), "counts": counts}
