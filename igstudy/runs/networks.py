"""The networks that a run names: its critic and its value network, loaded and hashed.

`igstudy.runs.decode_run.decode_run` calls `load_networks`; the networks go into the guards of the
methods that need them, the hashes into the identity of the run.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import torch

from igcore.critic.network import Critic, load_critic
from igcore.files import digest_of, file_digest
from igcore.guard import Guard

from ..baselines.re_control import ValueNetwork, load_value
from ..files import root
from ..linefile import read_mapping
from .decode_params import DecodeParams


class ShuffledCritic:
    """Control: a critic whose verdicts are permuted at random among the candidates of a prompt.

    They are right on average and useless to a search.
    """

    def __init__(self, critic: Critic):
        """Wrap a critic."""
        self.critic, self.spec = critic, critic.spec
        self.watch, self.reads_keys = critic.watch, critic.reads_keys
        self.judge = critic.judge

    def deal(
        self,
        verdicts: Sequence[tuple[float, float]],
        owners: Sequence[Hashable],
        tokens: Sequence[Sequence[int]],
    ) -> list[tuple[float, float]]:
        """Permute the pairs (f1, f2) among the candidates of each prompt.

        The order depends on the tokens of these candidates alone: not on the other prompts of a
        batch, nor on last digits, which differ between processors.

        Parameters
        ----------
        verdicts : sequence of R pairs
            f1 and f2 of each candidate.
        owners : sequence of R
            Whose candidate each is.
        tokens : sequence of R sequences of int
            Each candidate's.
        """
        places: dict[Hashable, list[int]] = defaultdict(list)
        for place, owner in enumerate(owners):
            places[owner].append(place)
        dealt = list(verdicts)
        for own in places.values():
            seed = int(digest_of([list(tokens[place]) for place in own])[:14], 16)
            order = torch.randperm(len(own), generator=torch.Generator().manual_seed(seed))
            for place, source in zip(own, order.tolist(), strict=True):
                dealt[place] = verdicts[own[source]]
        return dealt


Networks = dict[str, Critic | ShuffledCritic | ValueNetwork]


# parameter that names a folder of weights -> what loads them
LOADERS: dict[str, Any] = {"critic": load_critic, "value": load_value}


def load_networks(params: DecodeParams, guard: Guard) -> tuple[Networks, dict[str, str]]:
    """Return the networks that a run names, and the hash of each one's weights and spec.

    Parameters
    ----------
    guard : Guard
        Policy and scorers that the networks must have been trained for.

    Raises
    ------
    ParameterError, RunError
        See `igcore.critic.network.load_critic` and `igstudy.baselines.re_control.load_value`.
    """
    parts: Any = {"policy": guard.policy, "cost": guard.cost, "reward": guard.reward}
    named = {role: getattr(params, role) for role in LOADERS if getattr(params, role)}
    networks = {role: LOADERS[role](root() / named[role], **parts) for role in named}
    if "critic" in networks and params.critic_control == "shuffled":
        networks["critic"] = ShuffledCritic(networks["critic"])
    return networks, {role: _digest(root() / named[role], role) for role in named}


def _digest(folder: Path, name: str) -> str:
    """Return the digest of a network's weights and spec, without how it was trained."""
    spec = read_mapping(folder / f"{name}.json")
    del spec["about"]  # it holds seconds
    return digest_of([file_digest(folder / f"{name}.safetensors"), spec])
