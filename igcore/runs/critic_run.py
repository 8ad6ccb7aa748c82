"""One run of notebook 20: rollouts, critics trained on them, and their evaluation, in one folder.

`critic_run` loads what `CriticParams` names, samples or loads rollouts, trains and returns a
`CriticRun`; the notebook evaluates that and calls `CriticRun.finish`. The folder
``runs/<profile>/critics/<run>`` holds

- ``rollouts-train``, ``rollouts-test``: see `igcore.runs.rollout_run`
- ``<name>``: one folder per critic, see `igcore.critic.network`
- ``value``: the value network, if one is wanted, see `igcore.baselines.re_control`
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
from ..baselines.value_training import of_first, train_value
from ..critic.network import Critic
from ..critic.rollouts import Rollout
from ..critic.training import train
from ..decoding import decode
from ..engine.prepack import packed
from ..errors import ParameterError, RunError
from ..folders import digest_of, root
from ..guard import Guard
from ..models.policies import load_policy
from ..models.prompts import load_prompts
from ..models.registry import load_scorer
from ..policy import Policy, Prompt
from ..provenance import made_by
from ..report.certify import smallest_n
from ..report.critic_metrics import (
    COLUMNS,
    RELIABILITY,
    critic_table,
    judgements,
    reference_table,
    reliability_table,
)
from ..report.critic_search import safe_final_share
from ..report.tables import by_prompt_set, replace_file
from ..report.value_metrics import expectations, value_table
from ..scorers import Scorer
from .critic_only import critic_only_losses
from .critic_params import CriticParams
from .identity import network_identity, opened
from .rollout_run import load_rollouts, roll_out

# entry points of training: the code that they import is part of a network's identity
TRAINING, VALUE_TRAINING = "igcore.critic.training", "igcore.baselines.value_training"
CALIBRATION = ["critic", "policy", "accounting", *RELIABILITY]


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

    def judged(self) -> dict[str, pd.DataFrame]:
        """Return every critic's predictions on the test rollouts.

        See `igcore.report.critic_metrics.judgements`.
        """
        with packed(self.policy.model):
            return {
                name: judgements(critic, self.policy, self.test)
                for name, critic in self.critics.items()
            }

    def table(self, judged: dict[str, pd.DataFrame]) -> pd.DataFrame:
        """Return the table of all critics, with the two untrained references below them."""
        rows = [
            critic_table(critic, judged[name]).assign(critic=name)
            for name, critic in self.critics.items()
        ]
        rows.append(
            reference_table(self.policy, self.test, self.cost, self.params.budget).assign(
                critic="none"
            )
        )
        return _below(rows, ["critic", *COLUMNS])

    def reliability(self, judged: dict[str, pd.DataFrame]) -> pd.DataFrame:
        """Return the calibration of every critic, with the columns `CALIBRATION`.

        It is the share of prefixes that end within budget, by the f1 that the critic predicted.
        """
        rows = [
            reliability_table(judged[name]).assign(
                critic=name, policy=critic.spec.policy, accounting=critic.spec.accounting
            )
            for name, critic in self.critics.items()
        ]
        return _below(rows, CALIBRATION)

    def valued(self) -> pd.DataFrame:
        """Return how the value network agrees with the test rollouts.

        See `igcore.report.value_metrics.value_table`.
        """
        with packed(self.policy.model):
            test = of_first(self.test, self.value.about["config"]["n_prompts"])
            return value_table(expectations(self.value, self.policy, test))

    def searched(self) -> pd.DataFrame:
        """Search test prompts with the first critic, and compare f1 on the way with the outcome.

        Returns
        -------
        DataFrame
            One row per prompt and block but the last: ``position`` (tokens), ``f1`` (mean over the
            beams kept there) and ``safe`` (share of the search's complete candidates that stay
            within budget).
        """
        prompts = load_prompts(self.params.prompts, "test", self.params.search_limit)
        kept: list[dict] = []

        def note(prompt, beams) -> None:
            """Keep the mean f1 of the unfinished beams at one block end."""
            f1 = [beam.f1 for beam in beams if not beam.finished]
            if f1:
                position = max(len(beam.tokens) for beam in beams)
                kept.append({"prompt_id": prompt.id, "position": position, "f1": sum(f1) / len(f1)})

        guard = Guard(
            self.policy, self.cost, self.reward, self.params.searching(), critic=self.first
        )
        found = decode("inferenceguard-critic", guard, prompts, on_block=note)
        safe = {
            r.prompt_id: safe_final_share({"method": "inferenceguard-critic", "trace": r.trace})
            for r in found
        }
        frame = pd.DataFrame(kept, columns=["prompt_id", "position", "f1"])
        return frame.assign(safe=frame["prompt_id"].map(safe))

    def critic_only(self, split: str, thresholds: Sequence[float]) -> pd.DataFrame:
        """Search a split with the first critic as the only guard.

        See `igcore.runs.critic_only.critic_only_losses`.
        """
        prompts = load_prompts(self.params.prompts, split)
        if split == "calibrate" and len(prompts) < (
            n := smallest_n(self.params.alpha, self.params.delta)
        ):
            raise ParameterError(
                f"split 'calibrate' has {len(prompts)} prompts, but alpha {self.params.alpha} and "
                f"delta {self.params.delta} need {n}; give more prompts, or raise one of the two"
            )
        with packed(self.policy.model):
            guard = Guard(
                self.policy, self.cost, self.reward, self.params.searching(), critic=self.first
            )
            return critic_only_losses(
                guard, prompts, thresholds, self.folder / f"critic-only-{split}"
            )

    def finish(self, table: pd.DataFrame, reliability: pd.DataFrame) -> Path:
        """Write ``critic.csv`` and ``reliability.csv``, then the manifest."""
        replace_file(self.folder / "critic.csv", table.to_csv(index=False))
        replace_file(self.folder / "reliability.csv", reliability.to_csv(index=False))
        prompts = (
            self.params.prompts
            if isinstance(self.params.prompts, str)
            else self.params.prompts["name"]
        )
        manifest = (
            asdict(self.params)
            | made_by()
            | {"opened": opened(self.policy, self.cost, self.reward, paths=[prompts])}
        )
        replace_file(
            self.folder / "manifest.json",
            json.dumps(manifest | {"root": self._root(manifest)}, indent=1) + "\n",
        )
        return self.folder / "critic.csv"

    def _root(self, manifest: dict) -> str:
        """Return one hash over the manifest, the tables and the roots of rollouts and networks."""
        made = sorted(self.folder.glob("*/manifest.json"))
        parts = {
            path.parent.name: json.loads(path.read_text(encoding="utf-8"))["root"] for path in made
        }
        tables = {
            name: (self.folder / name).read_text(encoding="utf-8")
            for name in ("critic.csv", "reliability.csv")
        }
        return digest_of([manifest, parts, tables])


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
    with packed(policy.model):
        train_, test = (
            _rollouts(params, folder, split, chosen, policy, cost, reward)
            for split, chosen in prompts.items()
        )
        scorers = {"cost": cost, "reward": reward}
        code = network_identity(TRAINING)
        critics = {
            name: train(policy, train_, config, folder / name, **scorers, identity=code)
            for name, config in params.configs().items()
        }
        value = None
        if wanted := params.valuing():
            code = network_identity(TRAINING, VALUE_TRAINING)
            value = train_value(policy, train_, wanted, folder / "value", **scorers, identity=code)
    return CriticRun(params, folder, policy, cost, reward, train_, test, critics, value)


def _rollouts(
    params: CriticParams,
    folder: Path,
    split: str,
    prompts: Sequence[Prompt],
    policy: Policy,
    cost: Scorer,
    reward: Scorer,
) -> list[Rollout]:
    """Sample the rollouts of the prompts of a split, or load those of another run."""
    if not params.rollouts:
        return roll_out(
            policy,
            prompts,
            params.rolling(),
            cost=cost,
            reward=reward,
            folder=folder / f"rollouts-{split}",
        )
    found = load_rollouts(
        root() / params.rollouts / f"rollouts-{split}", policy=policy, cost=cost, reward=reward
    )
    wanted = {prompt.id for prompt in prompts}
    found = [rollout for rollout in found if rollout.prompt_id in wanted]
    shape = {(r.max_new_tokens, r.block_size) for r in found}
    if {r.prompt_id for r in found} != wanted or shape != {
        (params.max_new_tokens, params.block_size)
    }:
        raise ParameterError(
            f"rollouts names {params.rollouts}, which does not hold all {len(wanted)} prompts of "
            f"split {split!r} at max_new_tokens {params.max_new_tokens} and block_size "
            f"{params.block_size}; take its settings over, or set rollouts to null"
        )
    return found


def load_tables(profile: str) -> pd.DataFrame:
    """Return the tables of all runs of notebook 20 in a profile, concatenated.

    The table is empty when there is no run.

    Raises
    ------
    RunError
        When a run has not finished.
    """
    found, left_out = load_finished(profile)
    for reason in left_out:
        raise RunError(reason)
    return found


def load_finished(profile: str) -> tuple[pd.DataFrame, list[str]]:
    """Return `load_tables` of the finished runs, and for every other run why it is left out."""
    folders = sorted((root() / "runs" / profile / "critics").glob("[!.]*/"))
    finished = [folder for folder in folders if (folder / "manifest.json").exists()]
    left_out = [
        f"the critics in {folder} have not finished; run notebook 20 again with the same settings, "
        "which goes on"
        for folder in folders
        if folder not in finished
    ]
    return _of_all([folder / "critic.csv" for folder in finished], ["critic", *COLUMNS]), left_out


def load_reliability(profile: str) -> pd.DataFrame:
    """Return `CriticRun.reliability` of the finished runs of a profile, concatenated.

    The table is empty when no run has left one.
    """
    left = (root() / "runs" / profile / "critics").glob("[!.]*/reliability.csv")
    return _of_all(
        sorted(path for path in left if path.with_name("manifest.json").exists()), CALIBRATION
    )


def _of_all(paths: Sequence[Path], names: Sequence[str]) -> pd.DataFrame:
    """Return the tables of runs, concatenated.

    Where critics of one policy belong to several prompt sets, the policy gets a name for each set.
    """
    tables = []
    for path in paths:
        prompts = json.loads((path.parent / "manifest.json").read_text(encoding="utf-8"))["prompts"]
        name = prompts if isinstance(prompts, str) else prompts["name"]
        tables.append(pd.read_csv(path).assign(prompts=Path(name).stem))
    return by_prompt_set(_below(tables, [*names, "prompts"]))[names]


def _below(tables: Sequence[pd.DataFrame], names: Sequence[str]) -> pd.DataFrame:
    """Concatenate tables; those without rows are left out, for they would change column types."""
    found = [table for table in tables if len(table)]
    return pd.concat(found, ignore_index=True)[names] if found else pd.DataFrame(columns=names)
