"""What the reference policy says by itself, how it ends, and what a critic should have said of
every prefix.

Knows prompts, the policy's samples and their scores; knows nothing of critics. A folder of rollouts
is a run folder, see `igcore.folders`: one line of ``responses.jsonl`` holds all responses to one
prompt as token ids with costs and rewards. Hidden states are not stored; `igcore.critic.latent` makes them
again from the ids.
"""

import hashlib
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from ..budget import is_safe, trace
from ..engine.local import LocalEngine
from ..engine.memory import halving
from ..engine.prepack import packed
from ..engine.sampling import random_key
from ..errors import ParameterError, RunError
from ..folders import Run, open_run, read
from ..policy import Policy, Prompt, groups_of
from ..progress import progress
from ..runs.identity import about, code_of, modules_of, prompts_digest, versions
from ..scorers import Scorer, check_sign, checked_score
from .config import RolloutConfig

METHOD = "rollouts"  # what the lines call it


@dataclass(frozen=True)
class Rollout:
    """One response of the reference policy.

    Attributes
    ----------
    prompt_id, prompt : str
        What it answers.
    tokens : list of int
        Sampled tokens; an end token is the last, where there is one.
    ended : bool
        Whether it ends with an end token rather than at the maximum length.
    costs : list of float
        U_k of the prefix at every block end, the whole response last; higher is worse, NaN where
        the scorer failed.
    reward : float
        Of the whole response; higher is better, NaN where the scorer failed.
    block_size, max_new_tokens : int
        See `RolloutConfig`.
    """

    prompt_id: str
    prompt: str
    tokens: list[int]
    ended: bool
    costs: list[float]
    reward: float
    block_size: int
    max_new_tokens: int

    @property
    def words(self) -> list[int]:
        """The tokens without an end token: their prefixes are what a critic may be asked about."""
        return self.tokens[:-1] if self.ended else self.tokens


@dataclass(frozen=True)
class Targets:
    """What a critic should say of the prefixes of one rollout.

    Attributes
    ----------
    safe : bool
        Whether the budget holds at the end, by the one predicate of `igcore.budget`.
    task : float
        gamma_task^T * c_task, with task cost c_task = -reward; higher is worse.
    z : list of float
        z_t after each of the `Rollout.words`, as a search would know it that has not finished.
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
    """Return the Monte Carlo targets of one rollout (paper section 4: f1 and f2 of the critic)."""
    n, size = len(rollout.tokens), rollout.block_size
    ends = [min((k + 1) * size, n) - 1 for k in range(len(rollout.costs))]
    last = trace(rollout.costs, budget, accounting, gamma_safety, ends)[-1]
    # cost by cost without the last charge of `terminal`, which nobody knows before the end
    going = trace(rollout.costs, budget, accounting, gamma_safety, ends, ended=False)
    z = [going[t // size].omega / gamma_safety**t for t in range(1, len(rollout.words) + 1)]
    return Targets(is_safe(last), gamma_task**rollout.max_new_tokens * -rollout.reward, z)


@dataclass
class Labels:
    """Targets of N rollouts of at most n words.

    Attributes
    ----------
    safe, task : Tensor (N,)
        What f1 and f2 should say; `task` is NaN where the reward model failed.
    z : Tensor (N, n)
        z_t after each word; 0 in the padding.
    """

    safe: torch.Tensor
    task: torch.Tensor
    z: torch.Tensor

    @classmethod
    def of(cls, rollouts: Sequence[Rollout], budgets: Sequence[float], *settings) -> "Labels":
        """Return the targets of every rollout at its own budget; `settings` are those of `targets`."""
        found = [
            targets(rollout, d, *settings) for rollout, d in zip(rollouts, budgets, strict=True)
        ]
        n = max(len(f.z) for f in found)
        parts = (
            [f.safe for f in found],
            [f.task for f in found],
            [f.z + [0.0] * (n - len(f.z)) for f in found],
        )
        return cls(*(torch.tensor(part, dtype=torch.float32) for part in parts))


def split_by_prompt(
    rollouts: Sequence[Rollout], share: float
) -> tuple[list[Rollout], list[Rollout]]:
    """Return rollouts to learn from and rollouts for validation; a prompt's side is fixed by a hash
    of its id.

    Raises
    ------
    ParameterError
        For fewer than two prompts.
    """
    ids = sorted(
        {r.prompt_id for r in rollouts},
        key=lambda i: hashlib.sha256(f"validation {i}".encode()).digest(),
    )
    if len(ids) < 2:
        raise ParameterError(
            f"there are rollouts of {len(ids)} prompts; training needs at least 2, one of "
            f"them for validation"
        )
    held = set(ids[: min(len(ids) - 1, max(1, round(share * len(ids))))])
    return [r for r in rollouts if r.prompt_id not in held], [
        r for r in rollouts if r.prompt_id in held
    ]


def roll_out(
    policy: Policy,
    prompts: Sequence[Prompt],
    config: RolloutConfig,
    *,
    cost: Scorer,
    reward: Scorer,
    folder: Path,
) -> list[Rollout]:
    """Draw responses at temperature 1 without top-k or top-p, score them and store them; start
    again after any stop.

    Parameters
    ----------
    prompts : sequence of Prompt
        In the order of their ids, as `igcore.load_prompts` gives them.
    folder : Path
        Filled group by group. A folder that holds other rollouts is moved aside, see
        `igcore.folders.open_run`.

    Raises
    ------
    ParameterError
        For a scorer with the wrong sign, a prompt that is too long, more shards than groups, or no
        prompt.
    RunError
        When the folder cannot be written, or another process is writing to it.
    """
    check_sign(reward, "reward"), check_sign(cost, "cost")
    if not prompts:
        raise ParameterError("there are no prompts; give at least one")
    encoded = {prompt.id: policy.encode(prompt.text, config.max_new_tokens) for prompt in prompts}
    groups = groups_of(config, list(prompts))
    mine = [prompt for group in groups for prompt in group]
    parts = {"policy": about(policy), "cost": about(cost), "reward": about(reward)}
    identity = asdict(config) | {
        "dtype": str(policy.model.dtype),
        "chosen": prompts_digest(mine),
        "versions": versions(),
        "code": code_of(__name__, *modules_of(policy, cost, reward)),
        "parts": parts,
        "device": str(policy.model.device),
    }
    with (
        open_run(Path(folder), identity, {(METHOD, prompt.id) for prompt in mine}) as run,
        packed(policy.model),
    ):
        _fill(run, policy, groups, encoded, config, cost, reward)
        run.finish(
            {
                "lines": len(run.lines),
                "seconds": sum(line["generate_s"] + line["score_s"] for line in run.lines),
            }
        )
    return _rollouts(run.lines)


def load_rollouts(*folders: Path, policy: Policy, cost: Scorer, reward: Scorer) -> list[Rollout]:
    """Return the rollouts of finished folders, such as all shards.

    Raises
    ------
    RunError
        When one has not finished.
    ParameterError
        When one is of another policy, or was scored by others.
    """
    for folder in map(Path, folders):
        if not (folder / "manifest.json").exists():
            raise RunError(
                f"the rollouts in {folder} have not finished; draw them again with the same "
                f"settings, which goes on"
            )
        known = json.loads((folder / "params.json").read_text(encoding="utf-8"))["parts"]
        for role, part in (("policy", policy), ("cost", cost), ("reward", reward)):
            if known[role]["digest"] != part.digest:
                raise ParameterError(
                    f"the rollouts in {folder} are of {role} {known[role]['name']!r} of hash "
                    f"{known[role]['digest'][:12]!r}, not "
                    f"of {part.name!r} of hash {part.digest[:12]!r}; draw rollouts with it"
                )
    return [
        rollout
        for folder in folders
        for rollout in _rollouts(read(Path(folder) / "responses.jsonl"))
    ]


def _fill(
    run: Run,
    policy: Policy,
    groups: list[list[Prompt]],
    encoded: dict,
    config: RolloutConfig,
    cost,
    reward,
) -> None:
    """Append a line for every prompt that the run does not hold yet."""
    done = {line["prompt_id"] for line in run.lines}
    if any(prompt.id not in done for group in groups for prompt in group):
        run.manifest.unlink(missing_ok=True)  # no longer the sign of success
    run.responses.touch()  # a shard without a group is complete, too
    bar = progress(sum(map(len, groups)), f"rollouts {policy.name}")
    for group in groups:
        missing = {prompt.id for prompt in group} - done
        # the whole group, even when some of its lines exist: its results depend on its composition
        if missing:

            def draw(batch: Sequence[Prompt]) -> list[dict]:
                return _lines(policy, batch, encoded, config, cost, reward)

            for line in halving(group, len(group), draw):
                if line["prompt_id"] in missing:
                    run.append(line)
        bar.update(len(group))
    bar.close()


def _lines(
    policy: Policy, prompts: Sequence[Prompt], encoded: dict, config: RolloutConfig, cost, reward
) -> list[dict]:
    """Draw and score the responses to one group of prompts; return one line per prompt."""
    began = time.perf_counter()
    n, size, length = config.n_rollouts, config.block_size, config.max_new_tokens
    engine = LocalEngine(policy.model, policy.eos_ids, policy.cache)
    engine.open([encoded[prompt.id] for prompt in prompts])
    keys = [
        [random_key(config.seed, p.id, 0, i, t) for t in range(length)]
        for p in prompts
        for i in range(n)
    ]
    block = engine.sample_block(
        [row for row in range(len(prompts)) for _ in range(n)], keys, last=True
    )
    drawn = time.perf_counter()
    # (response, its text up to a block end, is that its end)
    prefixes = [
        (r, policy.text(tokens[:end]), end == len(tokens))
        for r, tokens in enumerate(block.tokens)
        for end in [*range(size, len(tokens), size), len(tokens)]
    ]
    asked = [(prompts[r // n].text, text, whole) for r, text, whole in prefixes]
    u: list[list] = [[] for _ in block.tokens]
    for (r, _, _), score in zip(prefixes, _scores(cost, asked), strict=True):
        u[r].append(score)
    whole = [x for x in asked if x[2]]
    rewards = _scores(reward, whole)
    share = {
        "generate_s": (drawn - began) / len(prompts),
        "score_s": (time.perf_counter() - drawn) / len(prompts),
    }
    return [
        {
            "method": METHOD, "prompt_id": prompt.id, "prompt": prompt.text,
            "prompts": prompt.set_name, "policy": policy.name,
            "block_size": size, "max_new_tokens": length, "seed": config.seed,
            "tokens": block.tokens[mine], "texts": [text for _, text, _ in whole[mine]],
            "ended": block.ended[mine],
            "costs": u[mine], "rewards": rewards[mine], **share,
        }
        for prompt, mine in zip(prompts, [slice(k * n, (k + 1) * n) for k in range(len(prompts))],
        strict=True)
    ]  # fmt: skip


def _scores(scorer: Scorer, texts: Sequence[tuple[str, str, bool]]) -> list[float | None]:
    """Score texts; None where the scorer failed, for JSON has no NaN."""
    return [
        None if math.isnan(x) else x
        for x in checked_score(scorer, *zip(*texts, strict=True)).tolist()
    ]


def _rollouts(lines: list[dict]) -> list[Rollout]:
    nan = math.nan
    return [
        Rollout(
            line["prompt_id"], line["prompt"], tokens, ended,
            [nan if u is None else u for u in costs],
            nan if reward is None else reward, line["block_size"], line["max_new_tokens"],
        )
        for line in lines
        for tokens, ended, costs, reward in zip(line["tokens"], line["ended"], line["costs"],
        line["rewards"], strict=True)
    ]  # fmt: skip
