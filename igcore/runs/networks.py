"""The networks that a run names, loaded and hashed. Knows parameters and folders; leaves what fits
what to the networks' specs.
"""

import json
from pathlib import Path

from ..baselines import re_control as value
from ..baselines.re_control import ValueNetwork
from ..critic import network as critic
from ..critic.network import Critic, Shuffled
from ..folders import digest_of, file_digest
from ..policy import Policy
from ..scorers import Scorer
from .decode_params import DecodeParams

# by the parameter that names the folder, which is also what `igcore.critic.spec.asked` calls it
LOADERS = {
    "critic": (critic.load_critic, critic.WEIGHTS),
    "value": (value.load_value, value.WEIGHTS),
}
Networks = dict[str, Critic | Shuffled | ValueNetwork]


def load_networks(
    params: DecodeParams, root: Path, policy: Policy, cost: Scorer, reward: Scorer
) -> tuple[Networks, dict[str, str]]:
    """Return the critic and the value network of a run as far as it names them, and the hash of
    each one's weights and spec.

    Parameters
    ----------
    root : Path
        From which their folders are seen.

    Raises
    ------
    ParameterError, RunError
        See `igcore.critic.network.load_critic` and `igcore.baselines.re_control.load_value`.
    """
    networks: Networks = {}
    digests = {}
    for name, (load, _) in LOADERS.items():
        if folder := getattr(params, name):
            networks[name] = load(root / folder, policy=policy, cost=cost, reward=reward)
            weights, said = network_files(params, root, name)
            spec = json.loads(said.read_text(encoding="utf-8"))
            spec.pop("about")  # how it was trained, with seconds
            digests[name] = digest_of([file_digest(weights), spec])
    if "critic" in networks and params.critic_control == "shuffled":
        networks["critic"] = Shuffled(networks["critic"])
    return networks, digests


def network_files(params: DecodeParams, root: Path, *names: str) -> list[Path]:
    """Return the files of the networks of a run, weights and settings; by default of all that it
    names.
    """
    named = {name: getattr(params, name) for name in names or LOADERS}
    weights = [root / folder / LOADERS[name][1] for name, folder in named.items() if folder]
    return [path for file in weights for path in (file, file.with_suffix(".json"))]
