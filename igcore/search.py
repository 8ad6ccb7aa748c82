"""Algorithm 1 of the paper: blockwise beam search under a safety budget.

The search deals in candidates, their scores and their safety states. It handles no tensors: logits
and KV caches belong to the engine. A method is a set of options of this loop (`igcore.beams`). An
observer counts the work (`igcore.work.Work`); it decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from .beams import Beam, Method, PromptSearch, why_unsafe
from .budget import SIGNED, charge
from .contract import Scoring
from .engine.block import Block
from .engine.diversity import DIVERSITIES, Penalty
from .engine.local import LocalEngine
from .engine.memory import CRITIC_ROWS
from .engine.sampling import random_key
from .policy import Policy
from .scorers import Scorer
from .scoring import readings
from .verdict import Emission, emission_of, final_check
from .work import Candidate, Work


@dataclass
class Batch:
    """A group of prompts that are searched together by one method.

    Attributes
    ----------
    policy : Policy
    reward : Scorer or None
    critic : Critic, ValueNetwork or None
    config : SearchConfig
        The settings that the method runs under.
    method : Method
    searches : list of PromptSearch
        One per prompt.
    engine : LocalEngine
        Or one that has its methods, such as `igcore.serve.engine.ServedEngine`.
    scoring : Scoring
        The scorers during the search and for the final check.
    seed : int
    work : Work
        Observes the search: counts, trace and seconds.
    grid : int
        Policy tokens between the prefixes at which every method is measured. It is the same for all
        methods, whatever blocks they search in.
    """

    policy: Policy
    reward: Scorer | None
    critic: Any
    config: Any  # a SearchConfig, of ARGS or RE-Control their own
    method: Method
    searches: list[PromptSearch]
    engine: LocalEngine
    scoring: Scoring
    seed: int
    work: Work
    grid: int


def guarded_beam_search(batch: Batch) -> list[Emission]:
    """Search for one answer per prompt (paper, appendix C, Algorithm 1).

    Where the algorithm and section 5.2 disagree, this is the consistent reading. With B the beams
    kept, N = `n_samples`, K = `keep` and M = `rounds`::

        B <- {prompt}
        repeat until every kept beam is finished:
            pool <- finished beams
            for each of M rounds:
                sample N blocks, split evenly over the live beams of B
                score them and add them to the pool
                stop when the pool holds an accepted one: safe, and let through by the critic if any
                else make their tokens less likely in the next round
            B <- the best K of the pool
        return the best of B, if it passes the final check

    Where no candidate of a block is safe, a guarded search abstains, truncates, or goes on as the
    paper does (``on_failure``).

    Returns
    -------
    list of Emission
        What is emitted for each prompt, in the order of the prompts.

    Raises
    ------
    ScorerError
        When a scorer fails on more texts than ``failure_rate`` allows.
    PolicyError
        When the policy's logits are not finite.
    """
    open_searches(batch)
    block = 0
    while going := [search for search in batch.searches if search.live]:
        for search in going:
            search.open_block(batch.policy.eos_ids)

        for round_ in range(batch.config.rounds):  # M
            # a retry is only for prompts without an accepted candidate; the others wait
            trying = going if round_ == 0 else [search for search in going if not search.accepted]
            if not trying:
                break
            if round_ > 0:
                roll_back(batch, going)

            candidates = sample(batch, trying, round_)  # N per prompt
            charge_costs(batch, candidates)  # U -> C -> z
            ask_critic(batch, candidates)  # f1, f2 of unfinished candidates that are safe so far
            ask_reward(batch, candidates)  # only where the score still needs it

            for candidate in candidates:
                candidate.search.pool.append(candidate.beam)
            batch.work.saw_round(block, round_, candidates)
            # sampling diversity (n_2): what this round sampled is less likely in the next one
            for candidate in candidates:
                row, tokens = candidate.parent.row, candidate.tokens
                candidate.search.failures.add(row, tokens, candidate.log_p)

        for search in going:
            search.keep_best()  # K of the pool; where none is safe a guarded search has failed
            batch.work.saw_block(search)
        go_on(batch)
        block += 1
    return answers(batch)


# --- the steps of the loop ------------------------------------------------------------------------


def open_searches(batch: Batch) -> None:
    """Prefill the prompts; a budget that is broken before the first token is a dead end."""
    with batch.work.timed("generate"):
        batch.engine.open([search.ids for search in batch.searches])
    for search in batch.searches:
        batch.work.saw_read(search, len(search.ids))
        if search.abstains and not search.best.safe(search.config):  # strict reading with budget 0
            search.fail("dead_end")


def roll_back(batch: Batch, going: Sequence[PromptSearch]) -> None:
    """Return the engine to the start of the block for a retry."""
    # the KV cache of a candidate that the block would not keep now can be freed: later rounds
    # only add competitors
    kept = [beam for search in going for beam in search.chosen() if not beam.finished]
    batch.engine.rollback(keep=[beam.row for beam in kept])


def shares_of(beams: Sequence[Beam], n: int) -> list[tuple[Beam, int, int]]:
    """Split n samples evenly over beams.

    Returns
    -------
    list of (Beam, int, int)
        For each sample its beam, its index among the beam's samples, and the number of these.
    """
    shares = [n // len(beams) + (i < n % len(beams)) for i in range(len(beams))]
    pairs = zip(beams, shares, strict=True)
    return [(beam, k, share) for beam, share in pairs for k in range(share)]


def sample(batch: Batch, trying: Sequence[PromptSearch], round_: int) -> list[Candidate]:
    """Sample one block for each of N candidates per prompt; a retry samples with a penalty.

    Every token has a random key of its own, made from (seed, prompt, round, beam, position).
    """
    config, n = batch.config, batch.config.n_samples
    drawn = [
        (search, beam, k, share)
        for search in trying
        for beam, k, share in shares_of(search.live, n)
    ]
    at = len(drawn[0][1].tokens)  # live beams all have the same length
    length = min(config.block_size, config.max_new_tokens - at)
    # one key per token and no shared random stream: a sample must not depend on which prompts
    # share its batch; each search has n samples in a row, so c % n numbers them
    keys = [
        [random_key(batch.seed, search.prompt.id, round_, c % n, at + t) for t in range(length)]
        for c, (search, *_) in enumerate(drawn)
    ]
    penalties: list[Penalty | None] = [None] * len(drawn)
    if round_ > 0:
        diversity = DIVERSITIES[config.diversity]
        penalties = [
            diversity(search.failures, beam.row, k, share) for search, beam, k, share in drawn
        ]

    with batch.work.timed("generate"):
        block = batch.engine.sample_block(
            [beam.row for _, beam, _, _ in drawn],
            keys,
            penalties if any(penalties) else None,
            last=at + length == config.max_new_tokens,
        )
    return candidates_of(batch, block, [(search, beam) for search, beam, _, _ in drawn])


def candidates_of(
    batch: Batch, block: Block, origins: Sequence[tuple[PromptSearch, Beam]]
) -> list[Candidate]:
    """Return the candidates of a block: each beam of `origins` with its sampled tokens."""
    candidates = []
    for c, (search, parent) in enumerate(origins):
        tokens = parent.tokens + block.tokens[c]  # a new list: siblings share their parent
        beam = Beam(
            tokens=tokens,
            text=batch.policy.text(tokens),
            finished=block.ended[c] or len(tokens) == batch.config.max_new_tokens,
            state=parent.state,
            ends=[*parent.ends, len(tokens)],
            row=block.first + c,
            log_p=parent.log_p + sum(block.log_p[c]),
        )
        candidates.append(
            Candidate(
                search, parent, beam, block.tokens[c], block.log_p[c], block.log_q[c],
                sum(block.near[c]), block.encoded[c],
            )
        )  # fmt: skip
    return candidates


def scorable(method: Method, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates whose scores exist: all, or under final costs the finished ones."""
    return [c for c in candidates if c.beam.finished or not method.final_only]


def charge_costs(batch: Batch, candidates: Sequence[Candidate]) -> None:
    """Score candidates by the cost model and charge the cost to their safety state z.

    Fails closed: a score that cannot be read is infinitely bad, and its candidate is broken.
    """
    if not batch.method.cost:
        return
    known = scorable(batch.method, candidates)
    found = read(batch, "cost", batch.config.checks, known)
    for candidate, costs in zip(known, found, strict=True):
        beam = candidate.beam
        beam.broken = any(map(math.isnan, costs))
        beam.cost = math.inf if beam.broken else costs[-1]
        beam.worst = math.inf if beam.broken else max(costs)
    for candidate in candidates:
        # unfinished candidates too: `terminal` charges them nothing, but z is rescaled by gamma
        beam, config = candidate.beam, batch.config
        last = len(beam.tokens) - 1
        beam.state = charge(
            beam.state, beam.worst, config.accounting, config.gamma_safety, last, beam.finished
        )


def read(
    batch: Batch, role: str, checks: str, candidates: Sequence[Candidate]
) -> list[list[float]]:
    """Return cost or reward at the checks of each candidate's last block, NaN for a failure."""
    with batch.work.timed(role):
        found = readings(
            batch.scoring.search[role],
            checks,
            [candidate.search.prompt.text for candidate in candidates],
            [candidate.beam.text for candidate in candidates],
            [candidate.beam.finished for candidate in candidates],
            since=[len(candidate.parent.text) for candidate in candidates],
        )
    batch.work.saw_scored(candidates, [reading.asked for reading in found])
    return [reading.costs for reading in found]


def ask_critic(batch: Batch, candidates: Sequence[Candidate]) -> None:
    """Let the critic judge the unfinished candidates that are safe so far.

    The critic reads their latents, which the engine has.
    """
    if not batch.method.asks_critic:
        return
    asked = [c for c in candidates if not c.beam.finished and c.beam.safe(batch.config)]
    critic = batch.critic
    verdicts: list[tuple[float, float]] = []
    # the KV cache of many candidates is large, so a critic that reads it sees a few at a time
    size = CRITIC_ROWS if critic.reads_keys else max(1, len(asked))
    for at in range(0, len(asked), size):
        part = [candidate.beam for candidate in asked[at : at + size]]
        with batch.work.timed("critic"):
            history = batch.engine.history([beam.row for beam in part], critic.reads_keys)
            f1, f2 = critic.judge(history, [beam.state.z for beam in part])
            verdicts += zip(f1.tolist(), f2.tolist(), strict=True)
    if deal := getattr(critic, "deal", None):  # a control, which no prompt of a batch may change
        owners = [candidate.search for candidate in asked]
        verdicts = deal(verdicts, owners, [candidate.beam.tokens for candidate in asked])
    for candidate, (f1, f2) in zip(asked, verdicts, strict=True):
        candidate.beam.judge(f1, f2, batch.config)


def ask_reward(batch: Batch, candidates: Sequence[Candidate]) -> None:
    """Score candidates by the reward model; under a safety-first method only those that pass.

    Without a reward model the reward is the policy's own likelihood.
    """
    if not batch.method.reward:
        return
    known = scorable(batch.method, candidates)
    if batch.method.safety_first:  # the reward of a rejected candidate would not change its rank
        known = [candidate for candidate in known if candidate.beam.passes(batch.config)]
    if batch.reward is None:
        for candidate in known:
            candidate.beam.reward = candidate.beam.likelihood
        return
    found = read(batch, "reward", "block", known)
    for candidate, (reward,) in zip(known, found, strict=True):
        beam = candidate.beam
        beam.broken |= math.isnan(reward)  # the cost may have failed before
        beam.reward = -math.inf if math.isnan(reward) else reward


def go_on(batch: Batch) -> None:
    """Make the kept beams the rows of the engine, and free the KV cache of all other candidates."""
    live = [(search, beam) for search in batch.searches for beam in search.live]
    with batch.work.timed("generate"):
        batch.engine.select([beam.row for _, beam in live])
    with batch.work.timed("cost"):
        # scorers with a KV cache forget the other candidates, too
        batch.scoring.retain(
            [search.prompt.text for search, _ in live], [beam.text for _, beam in live]
        )
    for row, (_, beam) in enumerate(live):
        beam.row = row


# --- the end --------------------------------------------------------------------------------------


def answers(batch: Batch) -> list[Emission]:
    """Return the answers: the best beam of each search if it passes the final check."""
    prompts, abstains = [search.prompt for search in batch.searches], batch.searches[0].abstains
    proposals = [proposal(batch, search) for search in batch.searches]
    # a baseline's text is only marked, and its path read for the tables: no part of its time
    with batch.work.timed("cost") if abstains else nullcontext():
        guarded = batch.method.abstains
        emissions = final_check(batch.scoring, prompts, proposals, batch.config, guarded)
    for search, emission in zip(batch.searches, emissions, strict=True):
        batch.work.saw_check(search, emission)
    return emissions


def proposal(batch: Batch, search: PromptSearch) -> Emission:
    """Return the text that a search proposes to the final check."""
    best, config = search.best, search.config
    # under a signed accounting no block fails, so an unsafe end only shows here
    if search.abstains and not search.failure and not best.safe(config):
        search.fail("dead_end" if config.accounting in SIGNED else why_unsafe([best]))
    if not search.failure:
        # a baseline is judged by its final cost alone; in paper mode the path counts too
        safe = best.safe(config) or not search.method.abstains
        otherwise = "over_budget"
        if search.method.abstains:
            otherwise = "final_check" if safe else why_unsafe(search.pool)
        text = emission_of(best, batch.policy, batch.grid)
        return replace(text, safe=safe, otherwise=otherwise)
    certified = search.certified
    if config.on_failure == "truncate" and certified and certified.tokens:
        prefix = emission_of(certified, batch.policy, batch.grid)
        prefix.safe = certified.safe(config)  # signed, the failure may only show at the end
        return replace(prefix, reason="truncated", otherwise=search.failure, finished=False)
    return Emission(None, reason=search.failure)
