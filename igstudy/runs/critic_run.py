"""One run of notebook 20: rollouts, critics trained on them, and their evaluation, in one folder.

`critic_run` loads what `CriticParams` names, samples or loads rollouts, trains and returns a
`CriticRun`; the notebook evaluates that and calls `CriticRun.finish`. The folder
``runs/<profile>/critics/<run>`` holds

- ``rollouts-train``, ``rollouts-test``: see `igstudy.runs.rollout_run`
- ``<name>``: one folder per critic, see `igcore.critic.network`
- ``value``: the value network, if the parameters name one, see `igstudy.baselines.re_control`
- ``critic.csv``: see `igstudy.report.critics.COLUMNS`
- ``manifest.json``: written last, the only sign of success
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd
import torch

from igcore import ParameterError, Policy, Prompt, Scorer, load_policy
from igcore.critic.files import Network
from igcore.critic.network import Critic, load_critic
from igcore.engine.prepack import use_prepacked
from igcore.files import digest_of
from igcore.settings import written

from ..baselines.re_control import ValueNetwork, load_value
from ..baselines.value_training import train_value
from ..files import replace_file, root
from ..linefile import read_mapping
from ..prompts import load_prompts
from ..provenance import UNPACKED, made_by, versions
from ..sources import loaded
from ..training.config import TrainingConfig
from ..training.critic import SharedSources, names_of, train
from ..training.rollouts import Rollout
from .critic_params import CriticParams
from .folders import open_run
from .identity import code_of, dated
from .rollout_run import load_rollouts, roll_out

TrainedNetwork = TypeVar("TrainedNetwork", bound=Network)


@dataclass
class CriticRun:
    """What notebook 20 evaluates: rollouts and the networks trained on them.

    Attributes
    ----------
    train, test : list of Rollout
        Rollouts to train on, and rollouts of prompts that no critic has seen.
    critics : dict of str to Critic
    value : ValueNetwork or None
        For the methods that a value network steers.
    """

    params: CriticParams
    folder: Path
    policy: Policy
    cost: Scorer
    train: list[Rollout]
    test: list[Rollout]
    critics: dict[str, Critic]
    value: ValueNetwork | None = None

    def finish(self, table: pd.DataFrame) -> Path:
        """Write ``critic.csv``, then the manifest."""
        text = table.to_csv(index=False)
        replace_file(self.folder / "critic.csv", text)
        manifest = written(self.params) | made_by()
        parts = self.folder.glob("*/manifest.json")
        roots = {path.parent.name: read_mapping(path)["root"] for path in parts}
        # one hash over the manifest, the table, and the roots of rollouts and networks
        manifest["root"] = digest_of([manifest, roots, text])
        replace_file(self.folder / "manifest.json", json.dumps(manifest, indent=1) + "\n")
        return self.folder / "critic.csv"


def critic_run(params: CriticParams) -> CriticRun:
    """Sample rollouts and train critics on them, or resume after a stop.

    Raises
    ------
    AssetError
        When prompts or models cannot be had; a finished run of these settings stays as it is.
    ParameterError, RunError
        See `igstudy.runs.rollout_run` and `igstudy.training.critic.train`.
    """
    torch.set_num_threads(params.threads)
    folder = root() / "runs" / params.profile / "critics" / params.run
    with dated():
        return _trained(params, folder)


def _trained(params: CriticParams, folder: Path) -> CriticRun:
    """Sample and train in a folder, see `critic_run`."""
    learnt = load_prompts(params.prompts, "train", params.limit)
    held_out = load_prompts(params.prompts, "test", params.test_limit)
    cost = loaded(params.cost)
    reward = loaded(params.reward, "reward")
    policy = load_policy(params.policy, params.dtype, params.device)
    for old in ("manifest.json", UNPACKED):
        (folder / old).unlink(missing_ok=True)
    scorers = {"cost": cost, "reward": reward}
    with use_prepacked(policy.model):
        train_ = _rollouts_of_split(params, folder / "rollouts-train", learnt, policy, scorers)
        test = _rollouts_of_split(params, folder / "rollouts-test", held_out, policy, scorers)
        # what weights depend on besides the settings of their training
        identity = names_of(policy, cost, reward) | {
            "code": code_of(),
            "versions": versions(),
            "rollouts": digest_of(list(map(repr, train_))),
        }
        learn = partial(train, policy, train_, shared=SharedSources(), **scorers)
        load = partial(load_critic, policy=policy, **scorers)
        critics = {
            name: trained_once(folder / name, identity, config, learn, load)
            for name, config in params.configs().items()
        }
        del learn  # it holds latents, gigabytes
        value = None
        if valuing := params.valuing():
            learn_value = partial(train_value, policy, train_, **scorers)
            load_trained = partial(load_value, policy=policy, **scorers)
            value = trained_once(folder / "value", identity, valuing, learn_value, load_trained)
    return CriticRun(params, folder, policy, cost, train_, test, critics, value)


def trained_once(
    folder: Path,
    identity: Mapping[str, Any],
    config: TrainingConfig,
    train: Callable[[TrainingConfig, Path], TrainedNetwork],
    load: Callable[[Path], TrainedNetwork],
) -> TrainedNetwork:
    """Train a network in a run folder, or load the one that an earlier start has finished there.

    Parameters
    ----------
    identity : mapping
        JSON values on which the weights depend besides the settings of their training. A folder of
        other ones is moved aside, see `igstudy.runs.folders.open_run`.
    """
    with open_run(folder, {**identity, "config": asdict(config)}) as run:
        if run.manifest.exists():
            return load(folder)
        network = train(config, folder)
        run.finish(run.params)
    return network


def _rollouts_of_split(
    params: CriticParams,
    folder: Path,
    prompts: Sequence[Prompt],
    policy: Policy,
    scorers: dict[str, Scorer],
) -> list[Rollout]:
    """Sample the rollouts of the prompts of a split, or load those of another run."""
    if not params.rollouts:
        return roll_out(policy, prompts, params.rolling(), folder=folder, **scorers)
    wanted = {prompt.id for prompt in prompts}
    source = root() / params.rollouts / folder.name
    loaded = load_rollouts(source, params.checks, policy=policy, **scorers)
    rollouts = [rollout for rollout in loaded if rollout.prompt_id in wanted]
    found = {rollout.prompt_id for rollout in rollouts}
    lengths = {(rollout.max_new_tokens, rollout.block_size) for rollout in rollouts}
    if found != wanted or lengths != {(params.max_new_tokens, params.block_size)}:
        raise ParameterError(
            f"{folder.name} of {params.rollouts} does not hold all {len(wanted)} prompts at "
            f"max_new_tokens {params.max_new_tokens} and block_size {params.block_size}; take its "
            "settings over, or set rollouts to null"
        )
    return rollouts
