"""One run of notebook 20: rollouts, critics trained on them, and their evaluation, in one folder.

`critic_run` loads what `CriticParams` names, samples or loads rollouts, trains and returns a
`CriticRun`; the notebook evaluates that and calls `CriticRun.finish`. The folder
``runs/<profile>/critics/<run>`` holds

- ``rollouts-train``, ``rollouts-test``: see `igcore.runs.rollout_run`
- ``<name>``: one folder per critic, see `igcore.critic.network`
- ``value``: the value network, if the parameters name one, see `igcore.baselines.re_control`
- ``critic.csv``: see `igcore.report.critic_metrics.COLUMNS`
- ``reliability.csv``: see `CriticRun.reliability`
- ``manifest.json``: written last, the only sign of success
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd
import torch

from ..baselines.re_control import ValueNetwork
from ..baselines.value_training import train_value
from ..critic.network import Critic
from ..critic.rollouts import Rollout
from ..critic.training import train
from ..engine.prepack import packed
from ..errors import ParameterError
from ..folders import digest_of, root
from ..guard import Guard
from ..models.policies import load_policy
from ..models.prompts import load_prompts
from ..models.registry import load_scorer
from ..policy import Policy, Prompt
from ..provenance import made_by
from ..report import critic_metrics as metrics
from ..report.certify import smallest_n
from ..report.tables import by_prompt_set, replace_file
from ..scorers import Scorer
from .critic_only import critic_only_losses
from .critic_params import CriticParams
from .decode_params import set_name
from .identity import network_identity, opened
from .rollout_run import load_rollouts, roll_out

# entry points of training: the code that they import is part of a network's identity
TRAINING, VALUE_TRAINING = "igcore.critic.training", "igcore.baselines.value_training"
CALIBRATION = ["critic", "policy", "accounting", *metrics.RELIABILITY]


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
    reward: Scorer
    train: list[Rollout]
    test: list[Rollout]
    critics: dict[str, Critic]
    value: ValueNetwork | None = None

    @property
    def first(self) -> Critic:
        """The critic that is shown and searched with."""
        return next(iter(self.critics.values()))

    @property
    def guard(self) -> Guard:
        """The guard of a search with the first critic."""
        config = self.params.searching()
        return Guard(self.policy, self.cost, self.reward, config, critic=self.first)

    def judged(self) -> dict[str, pd.DataFrame]:
        """Return every critic's predictions on the test rollouts.

        See `igcore.report.critic_metrics.judgements`.
        """
        with packed(self.policy.model):
            return {
                name: metrics.judgements(critic, self.policy, self.test)
                for name, critic in self.critics.items()
            }

    def table(self, judged: dict[str, pd.DataFrame]) -> pd.DataFrame:
        """Return the table of all critics, with the two untrained references below them."""
        tables = [
            metrics.critic_table(critic, judged[name]).assign(critic=name)
            for name, critic in self.critics.items()
        ]
        untrained = metrics.reference_table(self.policy, self.test, self.cost, self.params.budget)
        return _below([*tables, untrained.assign(critic="none")], ["critic", *metrics.COLUMNS])

    def reliability(self, judged: dict[str, pd.DataFrame]) -> pd.DataFrame:
        """Return the calibration of every critic, with the columns `CALIBRATION`.

        It is the share of prefixes that end within budget, by the f1 that the critic predicted.
        """
        tables = []
        for name, critic in self.critics.items():
            spec = {"policy": critic.spec.policy, "accounting": critic.spec.accounting}
            tables.append(metrics.reliability_table(judged[name]).assign(critic=name, **spec))
        return _below(tables, CALIBRATION)

    def critic_only(self, split: str, thresholds: Sequence[float]) -> pd.DataFrame:
        """Search a split with the first critic as the only guard.

        See `igcore.runs.critic_only.critic_only_losses`.
        """
        prompts = load_prompts(self.params.prompts, split)
        alpha, delta = self.params.alpha, self.params.delta
        if split == "calibrate" and len(prompts) < (n := smallest_n(alpha, delta)):
            raise ParameterError(
                f"split 'calibrate' has {len(prompts)} prompts, but alpha {alpha} and delta "
                f"{delta} need {n}; give more prompts, or raise one of the two"
            )
        folder = self.folder / f"critic-only-{split}"
        with packed(self.policy.model):
            return critic_only_losses(self.guard, prompts, thresholds, folder)

    def finish(self, table: pd.DataFrame, reliability: pd.DataFrame) -> Path:
        """Write ``critic.csv`` and ``reliability.csv``, then the manifest."""
        replace_file(self.folder / "critic.csv", table.to_csv(index=False))
        replace_file(self.folder / "reliability.csv", reliability.to_csv(index=False))
        files = opened(self.policy, self.cost, self.reward, paths=[set_name(self.params.prompts)])
        manifest = asdict(self.params) | made_by() | {"opened": files}
        text = json.dumps(manifest | {"root": self._root(manifest)}, indent=1)
        replace_file(self.folder / "manifest.json", text + "\n")
        return self.folder / "critic.csv"

    def _root(self, manifest: dict) -> str:
        """Return one hash over the manifest, the tables and the roots of rollouts and networks."""
        manifests = sorted(self.folder.glob("*/manifest.json"))
        roots = {path.parent.name: _json(path)["root"] for path in manifests}
        tables = {
            name: (self.folder / name).read_text(encoding="utf-8")
            for name in ("critic.csv", "reliability.csv")
        }
        return digest_of([manifest, roots, tables])


def critic_run(params: CriticParams) -> CriticRun:
    """Sample rollouts and train critics on them, or resume after a stop.

    Raises
    ------
    AssetError
        When prompts or models cannot be had; a finished run of these settings stays as it is.
    ParameterError, RunError
        See `igcore.runs.rollout_run` and `igcore.critic.training.train`.
    """
    torch.set_num_threads(params.threads)
    limits = {"train": params.limit, "test": params.test_limit}
    prompts = {split: load_prompts(params.prompts, split, limit) for split, limit in limits.items()}
    cost, reward = load_scorer(params.cost), load_scorer(params.reward)
    policy = load_policy(params.policy, params.dtype, params.device)
    folder = root() / "runs" / params.profile / "critics" / params.run
    (folder / "manifest.json").unlink(missing_ok=True)
    scorers = {"cost": cost, "reward": reward}
    with packed(policy.model):
        train_, test = (
            _rollouts(params, folder, split, chosen, policy, scorers)
            for split, chosen in prompts.items()
        )
        code = network_identity(TRAINING)
        critics = {
            name: train(policy, train_, config, folder / name, **scorers, identity=code)
            for name, config in params.configs().items()
        }
        value = None
        if config := params.valuing():
            code = network_identity(TRAINING, VALUE_TRAINING)
            value = train_value(policy, train_, config, folder / "value", **scorers, identity=code)
    return CriticRun(params, folder, policy, cost, reward, train_, test, critics, value)


def _rollouts(
    params: CriticParams,
    folder: Path,
    split: str,
    prompts: Sequence[Prompt],
    policy: Policy,
    scorers: dict[str, Scorer],
) -> list[Rollout]:
    """Sample the rollouts of the prompts of a split, or load those of another run."""
    name = f"rollouts-{split}"
    if not params.rollouts:
        return roll_out(policy, prompts, params.rolling(), folder=folder / name, **scorers)
    wanted = {prompt.id for prompt in prompts}
    loaded = load_rollouts(root() / params.rollouts / name, policy=policy, **scorers)
    rollouts = [rollout for rollout in loaded if rollout.prompt_id in wanted]
    lengths = {(rollout.max_new_tokens, rollout.block_size) for rollout in rollouts}
    complete = {rollout.prompt_id for rollout in rollouts} == wanted
    if not complete or lengths != {(params.max_new_tokens, params.block_size)}:
        raise ParameterError(
            f"rollouts names {params.rollouts}, which does not hold all {len(wanted)} prompts of "
            f"split {split!r} at max_new_tokens {params.max_new_tokens} and block_size "
            f"{params.block_size}; take its settings over, or set rollouts to null"
        )
    return rollouts


# --- finished runs --------------------------------------------------------------------------------


def load_finished(profile: str) -> tuple[pd.DataFrame, list[str]]:
    """Return the tables of all finished runs of notebook 20 in a profile, concatenated.

    The table is empty when there is no run. For every other run a sentence says why it is left out.
    """
    folders = sorted((root() / "runs" / profile / "critics").glob("[!.]*/"))
    unfinished = [
        f"the critics in {folder} have not finished; run notebook 20 again with the same settings, "
        "which goes on"
        for folder in folders
        if not (folder / "manifest.json").exists()
    ]
    return _of_all(profile, "critic.csv", ["critic", *metrics.COLUMNS]), unfinished


def load_reliability(profile: str) -> pd.DataFrame:
    """Return `CriticRun.reliability` of the finished runs of a profile, concatenated.

    The table is empty when no run has left one.
    """
    return _of_all(profile, "reliability.csv", CALIBRATION)


def _of_all(profile: str, file: str, names: Sequence[str]) -> pd.DataFrame:
    """Return the tables of the finished runs of a profile, concatenated.

    Where critics of one policy belong to several prompt sets, the policy gets a name for each set.
    """
    tables = []
    for manifest in sorted((root() / "runs" / profile / "critics").glob("[!.]*/manifest.json")):
        table = manifest.with_name(file)
        if table.exists():
            prompts = Path(set_name(_json(manifest)["prompts"])).stem
            tables.append(pd.read_csv(table).assign(prompts=prompts))
    return by_prompt_set(_below(tables, [*names, "prompts"]))[names]


def _json(path: Path) -> dict:
    """Return what a JSON file holds."""
    return json.loads(path.read_text(encoding="utf-8"))


def _below(tables: Sequence[pd.DataFrame], names: Sequence[str]) -> pd.DataFrame:
    """Concatenate tables; those without rows are left out, for they would change column types."""
    filled = [table for table in tables if len(table)]
    return pd.concat(filled, ignore_index=True)[names] if filled else pd.DataFrame(columns=names)
