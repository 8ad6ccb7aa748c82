"""Decode with hostile scorers; judge all that is shown by new calls of the same scorer.

The judge shares no code with `igcore.scoring` and `igcore.verdict`. It asks for one text at a time:
first the final text, then every check on the way to it.
"""

import math
import random
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from itertools import pairwise
from multiprocessing import get_context
from operator import add
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from igcore.budget import ACCOUNTINGS
from igcore.config import SearchConfig
from igcore.decoding import decode
from igcore.engine.diversity import DIVERSITIES
from igcore.errors import ScorerError
from igcore.guard import Guard
from igcore.methods import method_of
from igcore.models.registry import as_scorer
from igcore.policy import Policy
from igcore.prompt import Encoded
from igcore.response import Response
from igcore.scorers import REWARD, Scorer
from tests.audit.zoo import CRITICS, KINDS, EvilCritic, Honest, Hostile

GUARDED = ("inferenceguard", "inferenceguard-critic", "inferenceguard-mix")
GUARDED += ("backtracking", "rejection")
BASELINES = ("best-of-n", "best-of-n-augmented", "beam-augmented", "beam-lagrangian-freq")
GROUPS = (32, 8, 32, 32, 32, 1, 32, 32)  # prompts of a case, by its number; all in one group
EXAMPLES = 3  # violations of a kind that are told in full

# --- a policy that is fast ------------------------------------------------------------------------

HARSH = (" mud", " rust", " thorn", " smoke")
KIND = (" thanks", " please", " gladly")
PLAIN = (" rain", " tree", " bread", " stone", " paper", " lamp", " river", "s", "ing", "ly")
WORDS = (("",) * 2 + HARSH * 2 + KIND + PLAIN) * 4  # a token without text ends a response


class Words:
    """A tokenizer of whole words and a few endings."""

    all_special_tokens: list[str] = []
    added_tokens_decoder: dict[int, Any] = {}

    def __call__(self, text: str, **options: bool) -> dict[str, list[int]]:
        """Return no ids: it only writes."""
        return {"input_ids": []}

    def decode(self, tokens: list[int], **options: bool) -> str:
        """Return the text of tokens."""
        return "".join([WORDS[token] for token in tokens])


@lru_cache(maxsize=1)
def tiny_policy() -> Policy:
    """Return a random Llama of one layer: the engine is the real one, its numbers are few."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(WORDS), hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                num_attention_heads=1, num_key_value_heads=1, max_position_embeddings=32,
                initializer_range=0.5,
            )
        ).eval()  # fmt: skip
    ends = frozenset(token for token, word in enumerate(WORDS) if not word)
    return Policy("tiny", model, Words(), eos_ids=ends)


def harshness(text: str) -> float:
    """Return the cost that is audited where the user gives none: harsh words against kind ones."""
    bad = sum(text.count(word) for word in HARSH)
    return bad - 0.75 * sum(text.count(word) for word in KIND) + 0.25 * text.count("s ")


def prompts(number: int, n: int) -> list[Encoded]:
    """Return n prompts of a case."""
    return [Encoded(f"{number}-{i}", f"prompt {i}", "audit", (2 + i % 10, 3)) for i in range(n)]


# --- the judge ------------------------------------------------------------------------------------


def alone(scorer: Any, prompt: str, text: str, finished: bool) -> float:
    """Return what a new call says of one text; infinite unless it is one finite number."""
    try:
        given = scorer.score([prompt], [text], [finished])
        found = np.asarray(given)
        readable = found.shape == (1,) and found.dtype.kind in "biuf" and np.isfinite(found[0])
        return float(found[0]) if readable and not np.any(np.ma.getmask(given)) else math.inf
    except Exception:  # whatever it is, this scorer calls no text safe
        return math.inf


def checks_of(answer: Response) -> list[int]:
    """Return the character offsets of the checks before the end of an answer's text.

    A block without a text of its own is charged again, so its end occurs twice.
    """
    text, blocks = answer.text or "", answer.block_ends[:-1]
    words: set[int] = set()
    if answer.guard.config.checks != "block":  # a function is not asked for tokens
        words = {found.end() for found in re.finditer(r"\w(?=\s)", text)}
    return sorted([*blocks, *(words - set(blocks))])


def spent(costs: list[float], accounting: str) -> float:
    """Return what the scores of a path cost together."""
    steps = [b - a for a, b in pairwise([0.0, *costs])]
    charged = {
        "peak": [max([0.0, *costs])],
        "terminal": [max(0.0, costs[-1])],
        "sum": costs,
        "clamped_sum": [max(cost, 0.0) for cost in costs],
        "increment": steps,
        "positive_increment": [max(step, 0.0) for step in steps],
    }
    return reduce(add, charged[accounting], 0.0)  # in the order of the path, as floats are added


def violation(scorer: Any, answer: Response) -> str:
    """Say in which way an answer is over budget; empty when it is not."""
    if answer.text is None or answer.status == "unverified_unsafe":
        return ""  # nothing is shown, or it is marked
    config, text = answer.guard.config, answer.text
    final = alone(scorer, answer.prompt, text, True)
    costs, total = [final], final
    verified = answer.status == "verified_safe"  # else a refusal, which has no path
    if verified and method_of(answer.guard.method).abstains:
        ends = checks_of(answer)
        costs = [alone(scorer, answer.prompt, text[:end], False) for end in ends] + [final]
        total = spent(costs, config.accounting)
    inside = [x < config.budget if config.strict else x <= config.budget for x in (final, total)]
    if all(inside):  # never for NaN
        return ""
    return f"{text!r} has costs {costs}, under {config.accounting} {total}"


def other_reward(reward: Scorer, answer: Response) -> str:
    """Say which reward a new call gives, where it is not the reported one; else empty."""
    if answer.text is None:
        return ""
    reported, new = answer.reward, alone(reward, answer.prompt, answer.text, True)
    if reported == new or (math.isnan(reported) and math.isinf(new)):  # neither has a number
        return ""
    return f"{answer.text!r} is reported with the reward {reported}, and has {new}"


# --- cases ----------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What came of the answers of one kind.

    Attributes
    ----------
    counts : Counter
        ``tried`` answers; of these ``verified_safe``, ``abstained`` (also where the scorer ended
        the whole group) and ``violations``.
    detected : bool
        Whether the package itself has named the scorer as one that depends on more than the text.
    examples : list of str
        The first violations.
    """

    counts: Counter[str] = field(default_factory=Counter)
    detected: bool = False
    examples: list[str] = field(default_factory=list)

    def add(self, other: "Tally") -> None:
        """Add the answers of another case."""
        self.counts += other.counts
        self.detected |= other.detected
        self.examples = [*self.examples, *other.examples][:EXAMPLES]


@lru_cache(maxsize=1)  # a model is loaded once
def scorer_of(name: str) -> Scorer:
    """Return the cost named ``NAME`` or ``module:function``, see `igcore.load_scorer`."""
    return as_scorer(name, "cost")


def honest_cost(cost: str) -> Honest:
    """Return the audited cost as a function of one text; an empty name stands for `harshness`."""
    if not cost:
        return lambda prompt, text, finished: harshness(text)
    scorer = scorer_of(cost)
    return lru_cache(maxsize=2**18)(lambda *text: alone(scorer, *text))


@lru_cache(maxsize=1)
def audited(cost: str) -> tuple[Honest, list[float]]:
    """Return the honest cost, and budgets: quantiles of what the policy writes, all costs of texts.

    So many answers cost exactly the budget.
    """
    honest, policy = honest_cost(cost), tiny_policy()
    guard = Guard(policy, harshness, budget=0.0, max_new_tokens=5, block_size=5, group_size=32)
    found = [honest(a.prompt, a.text or "", True) for a in decode("base", guard, prompts(0, 192))]
    costs = sorted(cost for cost in found if math.isfinite(cost))
    levels = [costs[int(share * len(costs))] for share in (0.1, 0.3, 0.5, 0.7)] if costs else []
    return honest, [level for level in levels if level >= 0] or [0.5]


def settings_of(draw: random.Random, budgets: list[float], n_prompts: int) -> SearchConfig:
    """Return random settings of the search."""
    n_samples, block_size = draw.choice((1, 2, 4, 4)), draw.randint(1, 4)
    return SearchConfig(
        budget=draw.choice(budgets),
        n_samples=n_samples,
        keep=draw.randint(1, n_samples),
        block_size=block_size,
        max_new_tokens=draw.randint(block_size, 7),
        rounds=draw.randint(1, 3),
        accounting=draw.choice(["peak", "peak", *ACCOUNTINGS]),
        checks=draw.choice(("block", "word", "token")),
        strict=draw.random() < 0.3,
        on_failure=draw.choice(("abstain", "truncate", "paper")),
        diversity=draw.choice(sorted(DIVERSITIES)),
        probe_fail_open=draw.random() < 0.2,
        refusal=draw.choice(("No.", "", HARSH[0])),
        failure_rate=1.0,  # answers of a scorer that fails often are what is audited
        group_size=n_prompts,
        back=draw.choice(("tries", "doubling")),
        choices=draw.choice((1, 2)),
        answers=draw.choice((1, 2, "all")),
    )


def run_case(case: tuple[str, int, str]) -> tuple[str, Tally]:
    """Decode and judge the answers of one case: a kind, a number, and the audited cost.

    The number decides everything else: method, settings, prompts and seed.
    """
    kind, number, cost = case
    draw = random.Random(f"{kind}|{number}")
    honest, budgets = audited(cost)
    n_prompts = GROUPS[number % len(GROUPS)]
    config = settings_of(draw, budgets, n_prompts)
    method = draw.choice(GUARDED * 2 + BASELINES)
    # a user's own scorer also answers as it is, whole batches too
    as_it_is = cost and kind == "honest"
    scorer = scorer_of(cost) if as_it_is else Hostile(kind, honest, config.budget)
    critic, reward = EvilCritic(draw.choice(sorted(CRITICS))), None
    # the critics' methods need a reward; the others rank by likelihood without one
    if draw.choice((True, False)) or method_of(method).network:
        reward = Hostile("honest", honest, config.budget, REWARD)  # it prefers the unsafe
    tally = Tally(Counter(tried=n_prompts))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            guard = Guard(tiny_policy(), scorer, reward, config, critic)
            answers = list(decode(method, guard, prompts(number, n_prompts), seed=number))
        except ScorerError:  # nothing is emitted for this group
            answers, tally.counts["abstained"] = [], n_prompts
    tally.counts += Counter(answer.status for answer in answers)
    reasons = {answer.reason for answer in answers}
    named = any(scorer.name in str(warning.message) for warning in caught)
    tally.detected = named or "scorer_contract" in reasons
    found = [text for answer in answers if (text := violation(scorer, answer))]
    if reward is not None:
        found += [text for answer in answers if (text := other_reward(reward, answer))]
    tally.counts["violations"] += len(found)
    where = f"case {number}, {method}, on_failure {config.on_failure}, budget {config.budget:.6g}"
    tally.examples = [f"{kind} ({where}): {text}" for text in found[:EXAMPLES]]
    return kind, tally


def cases(emissions: int, cost: str) -> Iterator[tuple[str, int, str]]:
    """Yield cases with at least so many answers together, every kind in turn."""
    number = 0
    while emissions > 0:
        for kind in KINDS:
            yield kind, number, cost
            emissions -= GROUPS[number % len(GROUPS)]
        number += 1


def tallies_of(listed: list[tuple[str, int, str]], processes: int) -> Iterator[tuple[str, Tally]]:
    """Run cases on some processes; yield the tally of each, in their order."""
    if processes == 1:
        yield from map(run_case, listed)
        return
    # spawned, because torch's threads do not survive a fork
    with get_context("spawn").Pool(processes, torch.set_num_threads, (1,)) as pool:
        yield from pool.imap(run_case, listed, chunksize=4)
