"""Rollouts sampled from the reference policy, scored and stored: the first half of notebook 20.

A folder of rollouts is a run folder, see `igstudy.runs.folders`: one line of ``responses.jsonl``
holds all responses to one prompt as token ids with costs and rewards. Hidden states are not stored;
`igcore.critic.latent` computes them again from the ids.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np

from igcore import ParameterError, Policy, Prompt, RunError, Scorer
from igcore.engine.block import Block
from igcore.engine.local import LocalEngine
from igcore.engine.memory import halving
from igcore.engine.prepack import use_prepacked
from igcore.engine.sampling import random_key
from igcore.prompt import Chat
from igcore.scorers import check_sign
from igcore.scoring import Cached, Tally, TextKey, checked_score, readings

from ..linefile import Fields, read_record
from ..training.rollouts import Rollout
from .critic_params import RolloutConfig
from .folders import groups_of, open_run
from .identity import models_identity

METHOD = "rollouts"  # the lines' field ``method``


# --- sampling and scoring ------------------------------------------------------------------------


def roll_out(
    policy: Policy,
    prompts: Sequence[Prompt],
    config: RolloutConfig,
    *,
    cost: Scorer,
    reward: Scorer,
    folder: Path,
) -> list[Rollout]:
    """Sample responses at temperature 1 without top-k or top-p, score them and store them.

    Start it again after any stop and it resumes.

    Parameters
    ----------
    prompts : sequence of Prompt
        In the order of their ids, as `igstudy.prompts.load_prompts` gives them.
    folder : Path
        Filled group by group. A folder that holds other rollouts is moved aside, see
        `igstudy.runs.folders.open_run`.

    Raises
    ------
    ParameterError
        For a scorer with the wrong sign, or a prompt that is too long or has a system message.
    RunError
        When the folder cannot be written, or another process is writing to it.
    """
    check_sign(reward, "reward")
    check_sign(cost, "cost")
    for prompt in prompts:
        if isinstance(prompt, Chat):  # a critic encodes the text of a prompt again
            raise ParameterError(
                "prompts have a system message, which no critic would read; leave out system"
            )
        policy.encode(prompt.text, config.max_new_tokens)  # refuses before anything is written
    groups = groups_of(prompts, config.group_size)
    identity = asdict(config) | models_identity(policy, cost, reward, prompts)
    tallies = Tally(), Tally()  # of the whole run: it stops where a scorer mostly fails

    def lines_of(method: str, group: Sequence[Prompt]) -> list[Fields]:
        """Return the lines of a group, in smaller batches where memory runs out."""
        work = partial(_lines, policy, config, cost, reward, tallies)
        return list(halving(group, len(group), work))

    with open_run(folder, identity) as run, use_prepacked(policy.model):
        run.fill([(METHOD, group) for group in groups], lines_of)
        seconds = sum(line["generate_s"] + line["score_s"] for line in run.lines)
        run.finish({"lines": len(run.lines), "seconds": seconds})
    return _rollouts_of_lines(run.lines)


def _lines(
    policy: Policy,
    config: RolloutConfig,
    cost: Scorer,
    reward: Scorer,
    tallies: tuple[Tally, Tally],
    prompts: Sequence[Prompt],
) -> list[Fields]:
    """Sample and score the responses to one group of prompts; return one line per prompt."""
    n, size = config.n_rollouts, config.block_size
    began = time.perf_counter()
    block = _sampled(policy, prompts, config)
    sampled = time.perf_counter()
    # each response cut at every block end, the whole response last; `owners` says whose prefix
    texts: list[TextKey] = []
    owners = []
    for i, tokens in enumerate(block.tokens):
        for end in [*range(size, len(tokens), size), len(tokens)]:
            texts.append((prompts[i // n].text, policy.text(tokens[:end]), end == len(tokens)))
            owners.append(i)
    since, found = [0] * len(texts), Cached(cost, tallies[0])
    for k in range(1, len(texts)):  # a block begins where the text before it ended
        since[k] = len(texts[k - 1][1]) if owners[k] == owners[k - 1] else 0
    costs: list[list[float]] = [[] for _ in block.tokens]
    worst: list[list[float]] = [[] for _ in block.tokens]
    asked, answers, ends = zip(*texts, strict=True)
    given = readings(found, config.checks, asked, answers, ends, since)
    for i, reading in zip(owners, given, strict=True):
        costs[i].append(reading.costs[-1])
        worst[i].append(float(np.max(reading.costs)))  # np.max keeps a NaN
    whole = [text for text in texts if text[2]]
    asked, answers, ends = zip(*whole, strict=True)
    rewards = checked_score(reward, asked, answers, ends, tallies[1]).tolist()
    scored = time.perf_counter()
    lines = []
    for k, prompt in enumerate(prompts):
        own = slice(k * n, (k + 1) * n)
        line = {
            "method": METHOD,
            "prompt_id": prompt.id,
            "prompt": prompt.text,
            "prompts": prompt.set_name,
            "policy": policy.name,
            "block_size": size,
            "max_new_tokens": config.max_new_tokens,
            "seed": config.seed,
            "tokens": block.tokens[own],
            "texts": [text for _, text, _ in whole[own]],
            "ended": block.ended[own],
            "costs": costs[own],
            "worst": worst[own],
            "rewards": rewards[own],
            "generate_s": (sampled - began) / len(prompts),
            "score_s": (scored - sampled) / len(prompts),
        }
        lines.append(line)
    return lines


def _sampled(policy: Policy, prompts: Sequence[Prompt], config: RolloutConfig) -> Block:
    """Sample `n_rollouts` whole responses to each prompt; those of one prompt are neighbours."""
    engine = LocalEngine(policy.model, policy.eos_ids, policy.cache)
    engine.open([policy.encode(prompt.text) for prompt in prompts])
    rows, keys = [], []
    for row, prompt in enumerate(prompts):
        for i in range(config.n_rollouts):
            rows.append(row)
            # the keys of beam i in round 0 of a search: `base` samples a prompt's first rollout
            places = range(config.max_new_tokens)
            keys.append([random_key(config.seed, prompt.id, 0, i, t) for t in places])
    return engine.sample_block(rows, keys, last=True)


# --- reading --------------------------------------------------------------------------------------


def load_rollouts(
    folder: Path, checks: str, *, policy: Policy, cost: Scorer, reward: Scorer
) -> list[Rollout]:
    """Return the rollouts of a finished folder; those beside shipped networks are packed.

    Parameters
    ----------
    checks : str
        Where their cost must have been read, see `RolloutConfig`.

    Raises
    ------
    RunError
        When it has not finished, or its lines are not those that its manifest was written for.
    ParameterError
        When it comes from another policy, or was scored by other scorers or at other checks.
    """
    lines, packed_ = folder / "responses.jsonl", folder / "responses.jsonl.gz"
    found = read_record(packed_ if packed_.exists() else lines)
    params, parts = found.params, found.params["parts"]
    for role, part in (("policy", policy), ("cost", cost), ("reward", reward)):
        name, digest = parts[role]["name"], parts[role]["digest"]
        if digest != part.digest:
            raise ParameterError(
                f"the rollouts in {folder} are of {role} {name!r} of hash {digest[:12]!r}, not "
                f"of {part.name!r} of hash {part.digest[:12]!r}; sample rollouts with it"
            )
    if params["checks"] != checks:  # a critic would learn other labels than the search charges
        raise ParameterError(
            f"the rollouts in {folder} were read at checks {params['checks']!r}, not {checks!r}; "
            "set checks to that, or sample rollouts with it"
        )
    if found.root != found.manifest.get("root"):
        raise RunError(
            f"the rollouts in {folder} have changed since they were sampled; sample them again, or "
            "download the folder again"
        )
    return _rollouts_of_lines(found.lines)


def _rollouts_of_lines(lines: list[Fields]) -> list[Rollout]:
    """Return the rollouts of all lines, in their order; null is read as NaN."""
    rollouts = []
    for line in lines:
        rewards = np.array(line["rewards"], dtype=float).tolist()
        for i, tokens in enumerate(line["tokens"]):
            rollout = Rollout(
                prompt_id=line["prompt_id"],
                prompt=line["prompt"],
                block_size=line["block_size"],
                max_new_tokens=line["max_new_tokens"],
                tokens=tokens,
                ended=line["ended"][i],
                costs=np.array(line["costs"][i], dtype=float).tolist(),
                worst=np.array(line["worst"][i], dtype=float).tolist(),
                reward=rewards[i],
            )
            rollouts.append(rollout)
    return rollouts
