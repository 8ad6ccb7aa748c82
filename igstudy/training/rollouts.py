"""Rollouts of the reference policy, and a critic's Monte Carlo targets computed from them."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from igcore.budget import is_safe, trace
from igcore.errors import ParameterError


@dataclass(frozen=True)
class Rollout:
    """One response of the reference policy.

    Attributes
    ----------
    prompt_id, prompt : str
        The prompt that it answers.
    tokens : list of int
        Sampled tokens; an end token, if any, is the last.
    ended : bool
        Whether it ends with an end token rather than at the maximum length.
    costs : list of float
        U_k of the prefix at every block end, the whole response last; higher is worse, NaN where
        the scorer failed.
    worst : list of float
        The highest cost at the checks of each block, see `igcore.scoring.readings`; NaN where the
        scorer failed at one of them.
    reward : float
        Of the whole response; higher is better, NaN where the scorer failed.
    block_size, max_new_tokens : int
        Tokens between the prefixes of `costs`, and length at which the response is finished [T].
    """

    prompt_id: str
    prompt: str
    tokens: list[int]
    ended: bool
    costs: list[float]
    worst: list[float]
    reward: float
    block_size: int
    max_new_tokens: int

    @property
    def words(self) -> list[int]:
        """The tokens without an end token; a critic may judge any prefix of these."""
        # the engine never reads an end token, so it has no latents; a finished response has its
        # true costs and needs no critic
        return self.tokens[:-1] if self.ended else self.tokens


@dataclass(frozen=True)
class Targets:
    """The targets of a critic for the prefixes of one rollout.

    Attributes
    ----------
    safe : bool
        Whether the rollout ends within budget (`igcore.budget.is_safe`).
    task : float
        gamma_task^T * c_task, with task cost c_task = -reward; higher is worse.
    z : list of float
        z_t after each of the `Rollout.words`, as a search knows it before the response is finished.
    """

    safe: bool
    task: float
    z: list[float]


def targets(
    rollout: Rollout,
    budget: float,
    accounting: str = "terminal",
    gamma_safety: float = 1.0,
    gamma_task: float = 0.999,
) -> Targets:
    """Return the Monte Carlo targets of one rollout (paper, section 5.2)."""
    n, size = len(rollout.tokens), rollout.block_size
    # index of the last token of each block; the last block may be shorter
    ends = [min((k + 1) * size, n) - 1 for k in range(len(rollout.costs))]
    # the other accountings depend on where they look, so they look at block ends alone
    costs = rollout.worst if accounting == "peak" else rollout.costs
    # target of f1: the one test of safety, `is_safe`, and not the paper's z_T > 0, which with
    # budget 0 would call every safe response unsafe. A score of NaN is charged as +infinity
    last = trace(costs, budget, accounting, gamma_safety, ends)[-1]
    # input z: without the last charge of `terminal`, which no search knows before the end, and
    # which would give the answer away
    unfinished = trace(costs, budget, accounting, gamma_safety, ends, ended=False)
    # t tokens have passed t // size block ends; between these omega stays, and z is rescaled
    z = [unfinished[t // size].omega / gamma_safety**t for t in range(1, len(rollout.words) + 1)]
    # target of f2: the task cost is paid at the fixed length T, also by a shorter response
    return Targets(is_safe(last), gamma_task**rollout.max_new_tokens * -rollout.reward, z)


@dataclass
class Labels:
    """Targets of N rollouts of at most n words.

    Attributes
    ----------
    safe, task : Tensor (N,)
        Targets of f1 and f2; `task` is NaN where the reward model failed.
    z : Tensor (N, n)
        z_t after each word; 0 in the padding.
    """

    safe: Tensor
    task: Tensor
    z: Tensor


def labels_of(rollouts: Sequence[Rollout], spec: Any) -> Labels:
    """Return the targets of every rollout under the budget and accounting of a critic's `Spec`."""
    each = [
        targets(r, spec.budget, spec.accounting, spec.gamma_safety, spec.gamma_task)
        for r in rollouts
    ]
    z = [torch.tensor(x.z, dtype=torch.float32) for x in each]
    # one label for a whole rollout: every prefix of it is a sample of "how does this end"
    return Labels(
        safe=torch.tensor([x.safe for x in each], dtype=torch.float32),
        task=torch.tensor([x.task for x in each], dtype=torch.float32),
        z=pad_sequence(z, batch_first=True),
    )


def split_by_prompt(
    rollouts: Sequence[Rollout], share: float
) -> tuple[list[Rollout], list[Rollout]]:
    """Split rollouts into training and validation, all rollouts of a prompt on one side.

    A hash of the prompt's id decides its side.

    Raises
    ------
    ParameterError
        For fewer than two prompts.
    """

    def by_hash(prompt_id: str) -> bytes:
        return hashlib.sha256(f"validation {prompt_id}".encode()).digest()

    # in order of hash: like a shuffle, but the same for any order and number of rollouts
    ids = sorted({r.prompt_id for r in rollouts}, key=by_hash)
    if len(ids) < 2:
        raise ParameterError(
            f"there are rollouts of {len(ids)} prompts; training needs at least 2, one of "
            f"them for validation"
        )
    # at least one prompt on each side, for every share
    held_out = set(ids[: min(len(ids) - 1, max(1, round(share * len(ids))))])
    learn = [r for r in rollouts if r.prompt_id not in held_out]
    return learn, [r for r in rollouts if r.prompt_id in held_out]
