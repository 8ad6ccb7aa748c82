"""Algorithm 1 of the paper: blockwise beam search under a safety budget.

The search works on candidates, their scores and their safety states. It handles no tensors: logits
and KV caches belong to the engine. A method is a set of options of this loop (`igcore.methods`). An
observer counts the work (`igcore.work.Work`); it decides nothing.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

from .beams import Beam
from .budget import SIGNED, charge
from .candidates import Candidate, PromptSearch, candidates_of, why_unsafe
from .config import SearchConfig
from .contract import Scoring
from .critic.network import Judge, Steers
from .engine.diversity import DIVERSITIES, Penalty
from .engine.local import Engine
from .engine.sampling import random_key
from .methods import Method
from .policy import Policy
from .prompt import Prompt
from .scorers import Scorer
from .scoring import readings
from .verdict import Emission, emission_of, final_check
from .work import Work

CRITIC_ROWS = 8  # candidates that a critic of keys and values reads at a time


@dataclass
class Batch:
    """A group of prompts that are searched together by one method.

    Attributes
    ----------
    policy : Policy
    reward : Scorer or None
    critic : Judge, Steers or None
    config : SearchConfig
        The effective settings of the method.
    method : Method
    searches : list of PromptSearch
        One per prompt.
    engine : Engine
    scoring : Scoring
        The scorers during the search and for the final check.
    seed : int
    work : Work
        Observes the search: counts, trace and seconds.
    grid : int
        Policy tokens between the prefixes at which every method is measured. It is the same for all
        methods, with blocks of any length.
    cancelled : callable, optional
        Whether nobody waits for the answer to a prompt any more, see `igcore.decode`.
    settled : callable, optional
        Called with a search and what is emitted for it, when that is known before the others.
    """

    policy: Policy
    reward: Scorer | None
    critic: Judge | Steers | None
    config: SearchConfig  # or the subclass of a baseline with settings of its own
    method: Method
    searches: list[PromptSearch]
    engine: Engine
    scoring: Scoring
    seed: int
    work: Work
    grid: int
    cancelled: Callable[[Prompt], bool] | None = None
    settled: Callable[[PromptSearch, Emission], None] | None = None


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
    # 1. B <- {prompt}: one empty beam per prompt, with the whole budget z_0 = d
    open_searches(batch)
    block = 0
    # a search is live while a kept beam is unfinished and the search has not stopped
    while live := [search for search in batch.searches if search.live]:
        # 2. pool <- finished beams; F <- empty, since the paper counts failures per block
        for search in live:
            search.open_block(batch.policy.eos_ids)

        for round_ in range(batch.config.rounds):  # M
            # 3. retry only the prompts without an accepted candidate; the others wait. The paper's
            # test "some E_i > 0" would never retry when all candidates have score n > 0
            pending = live if round_ == 0 else [search for search in live if not search.accepted]
            if not pending:
                break
            if round_ > 0:
                # all searches, not only the pending ones: candidates of the others stay selectable
                roll_back(batch, live)

            # 4. sample N blocks per prompt, split over the live beams
            candidates = sample(batch, pending, round_)
            # 5. score them, in this order: the critic reads z and skips what is over budget, and
            # under a safety-first method the reward model skips what either of them rejects
            charge_costs(batch, candidates)  # U -> C -> z
            ask_critic(batch, candidates)  # f1, f2 of unfinished candidates that are safe so far
            ask_reward(batch, candidates)  # only where the score still needs it

            # 6. pool the candidates of all rounds: a retry adds competitors and removes none
            for candidate in candidates:
                candidate.search.pool.append(candidate.beam)
            batch.work.saw_round(block, round_, candidates)
            # 7. F <- F + the tokens of this round; with n_2 they are less likely in the next one.
            # If a candidate was accepted, no retry of this prompt follows and F is not used
            for candidate in candidates:
                candidate.search.failures.add(candidate.tokens)

        # 8. B <- the best K of the pool; a guarded search without a safe candidate has failed
        for search in live:
            search.keep_best()
            batch.work.saw_block(search)
        drop_cancelled(batch)
        go_on(batch)
        block += 1
    # 9. the best of B, if it passes the final check
    return answers(batch, batch.searches)


# --- the steps of the loop ------------------------------------------------------------------------


def open_searches(batch: Batch) -> None:
    """Prefill the prompts; a search whose budget is spent before the first token has failed."""
    with batch.work.timed("generate"):
        batch.engine.open([search.ids for search in batch.searches])
    for search in batch.searches:
        batch.work.saw_read(search, len(search.ids))
        # only the strict reading omega > 0 with budget 0 gets here: no text can be safe then
        if search.abstains and not search.best.safe(search.config):
            search.fail("dead_end")


def drop_cancelled(batch: Batch) -> None:
    """Stop the searches for prompts whose answer nobody waits for any more."""
    for search in batch.searches:
        if batch.cancelled and batch.cancelled(search.prompt):
            search.fail("cancelled")
            search.stopped = True


def roll_back(batch: Batch, live: Sequence[PromptSearch]) -> None:
    """Return the engine to the start of the block for a retry."""
    # free the KV cache of every candidate outside the current best K: later rounds only add
    # competitors, so it cannot come back. Finished beams have no state in the engine
    kept = [beam for search in live for beam in search.chosen() if not beam.finished]
    batch.engine.rollback(keep=[beam.row for beam in kept])


def shares_of(beams: Sequence[Beam], n: int) -> list[tuple[Beam, int, int]]:
    """Split n samples evenly over beams.

    Returns
    -------
    list of (Beam, int, int)
        For each sample its beam, its index among the beam's samples, and the number of these.
    """
    # the remainder goes to the first beams, which are the best. N counts the samples of a prompt,
    # not of a beam: every method then samples the same number for any K
    shares = [n // len(beams) + (i < n % len(beams)) for i in range(len(beams))]
    pairs = zip(beams, shares, strict=True)
    return [(beam, k, share) for beam, share in pairs for k in range(share)]


def sample(batch: Batch, pending: Sequence[PromptSearch], round_: int) -> list[Candidate]:
    """Sample one block for each of N candidates per prompt; a retry samples with a penalty.

    Every token has a random key of its own, made from (seed, prompt, round, beam, position).
    """
    config, n = batch.config, batch.config.n_samples
    samples = [
        (search, beam, k, share)
        for search in pending
        for beam, k, share in shares_of(search.live, n)
    ]
    # live beams all have the same length: only an end token makes a beam shorter, and ends it
    start = len(samples[0][1].tokens)
    length = min(config.block_size, config.max_new_tokens - start)  # the last block may be shorter
    # one key per token and no shared random stream: a sample must not depend on which prompts
    # share its batch; each search has n samples in a row, so c % n numbers them
    keys = [
        [random_key(batch.seed, search.prompt.id, round_, c % n, start + t) for t in range(length)]
        for c, (search, *_) in enumerate(samples)
    ]
    # the first round samples from the reference: F is still empty
    penalties: list[Penalty | None] = [None] * len(samples)
    if round_ > 0:
        diversity = DIVERSITIES[config.diversity]
        penalties = [diversity(search.failures, k, share) for search, _, k, share in samples]

    with batch.work.timed("generate"):
        block = batch.engine.sample_block(
            [beam.row for _, beam, _, _ in samples],
            keys,
            penalties if any(penalties) else None,
            last=start + length == config.max_new_tokens,  # saves reading tokens at length T
        )
    return candidates_of(batch.policy, block, [(search, beam) for search, beam, _, _ in samples])


def scorable(method: Method, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates that have scores: the finished ones if only final costs exist."""
    return [c for c in candidates if c.beam.finished or not method.final_only]


def charge_costs(batch: Batch, candidates: Sequence[Candidate]) -> None:
    """Score candidates by the cost model and charge the cost to their safety state z.

    Fails closed: a score that cannot be read is infinitely bad, and its candidate is broken.
    """
    if not batch.method.cost:
        return
    scored = scorable(batch.method, candidates)
    all_costs = read_scores(batch, "cost", batch.config.checks, scored)
    for candidate, costs in zip(scored, all_costs, strict=True):
        beam = candidate.beam
        # one failed check is enough. max() would not show it: it may drop a NaN, and a comparison
        # of the budget with NaN must not decide
        beam.broken = any(map(math.isnan, costs))
        beam.cost = math.inf if beam.broken else costs[-1]
        beam.worst = math.inf if beam.broken else max(costs)
    for candidate in candidates:
        # unfinished candidates too: `terminal` charges them nothing, but z is rescaled by gamma
        beam, config = candidate.beam, batch.config
        last = len(beam.tokens) - 1  # time index t of the block's last token
        # the worst check of the block, so that a peak inside it is charged. Where a method checks
        # block ends alone, that is the cost at the end
        beam.state = charge(
            beam.state, beam.worst, config.accounting, config.gamma_safety, last, beam.finished
        )


def read_scores(
    batch: Batch, role: str, checks: str, candidates: Sequence[Candidate]
) -> list[list[float]]:
    """Return cost or reward at the checks of each candidate's last block, NaN for a failure."""
    with batch.work.timed(role):
        results = readings(
            # cached by text; the final check reads the cost without this cache
            batch.scoring.search[role],
            checks,
            [candidate.search.prompt.text for candidate in candidates],
            [candidate.beam.text for candidate in candidates],
            [candidate.beam.finished for candidate in candidates],
            # the parent's state holds the earlier checks: only the new part of the text is read
            since=[len(candidate.parent.text) for candidate in candidates],
        )
    batch.work.saw_scored(candidates, [reading.scored_ends for reading in results])
    return [reading.costs for reading in results]


def ask_critic(batch: Batch, candidates: Sequence[Candidate]) -> None:
    """Let the critic judge the unfinished candidates that are safe so far.

    The critic reads their latents, which the engine has computed already.
    """
    if not batch.method.asks_critic:
        return
    # a finished candidate has its true costs and needs no estimate; the engine keeps no state of it
    judged = [c for c in candidates if not c.beam.finished and c.beam.safe(batch.config)]
    critic = batch.critic
    assert isinstance(critic, Judge)  # which the method needs
    verdicts: list[tuple[float, float]] = []
    # the KV cache of many candidates is large, so a critic that reads it sees a few at a time
    size = CRITIC_ROWS if critic.reads_keys else max(1, len(judged))
    for first in range(0, len(judged), size):
        part = [candidate.beam for candidate in judged[first : first + size]]
        with batch.work.timed("critic"):
            # h_t and o_t of the block's end, from the cache: no token is encoded for the critic
            history = batch.engine.history([beam.row for beam in part], critic.reads_keys)
            found = critic.judge(history, [beam.state.z for beam in part])
            verdicts += zip(*(each.tolist() for each in found), strict=True)
    # a control experiment replaces the verdicts; it works prompt by prompt, so that the result does
    # not depend on the other prompts of the batch
    if deal := getattr(critic, "deal", None):
        owners = [candidate.search for candidate in judged]
        verdicts = deal(verdicts, owners, [candidate.beam.tokens for candidate in judged])
    for candidate, (f1, f2) in zip(judged, verdicts, strict=True):
        candidate.beam.judge(f1, f2, batch.config)


def ask_reward(batch: Batch, candidates: Sequence[Candidate]) -> None:
    """Score candidates by the reward model; under a safety-first method only those that pass.

    Without a reward model the reward is the policy's own likelihood.
    """
    if not batch.method.reward:
        return
    scored = scorable(batch.method, candidates)
    if batch.method.safety_first:  # the reward of a rejected candidate would not change its rank
        scored = [candidate for candidate in scored if candidate.beam.passes(batch.config)]
    if batch.reward is None:
        for candidate in scored:
            candidate.beam.reward = candidate.beam.likelihood
        return
    # "block": the reward of the text so far ranks, and no path of rewards is needed
    rewards = read_scores(batch, "reward", "block", scored)
    for candidate, (reward,) in zip(scored, rewards, strict=True):
        beam = candidate.beam
        beam.broken |= math.isnan(reward)  # |= because the cost may have failed before
        # a finite number would rank a failure among real rewards, and NaN would break the sort
        beam.reward = -math.inf if math.isnan(reward) else reward


def go_on(batch: Batch) -> None:
    """Make the kept beams the rows of the engine, and free the KV cache of all other candidates."""
    live = [(search, beam) for search in batch.searches for beam in search.live]
    with batch.work.timed("generate"):
        # one call for all prompts: it drops every candidate that it is not given
        batch.engine.select([beam.row for _, beam in live])
    with batch.work.timed("cost"):
        # scorers with a KV cache forget the other candidates, too
        batch.scoring.retain(
            [search.prompt.text for search, _ in live], [beam.text for _, beam in live]
        )
    # `select` renumbers: candidate numbers of the block become rows 0, 1, ... in this order
    for row, (_, beam) in enumerate(live):
        beam.row = row


# --- the end --------------------------------------------------------------------------------------


def answers(batch: Batch, searches: Sequence[PromptSearch]) -> list[Emission]:
    """Return the answers: the best beam of each search if it passes the final check."""
    prompts, abstains = [search.prompt for search in searches], searches[0].abstains
    proposals = [proposal(batch, search) for search in searches]
    # a method that always emits would run without the check, so the seconds are not counted then
    with batch.work.timed("cost") if abstains else nullcontext():
        # not the variable above: mode `paper` emits also what fails the check, but its text is
        # judged at every check, as that of any guarded method
        guarded = batch.method.abstains
        emissions = final_check(batch.scoring, prompts, proposals, batch.config, guarded)
    for search, emission in zip(searches, emissions, strict=True):
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
        rejection = "over_budget"
        if search.method.abstains:
            rejection = "final_check" if safe else why_unsafe(search.pool)
        text = emission_of(best, batch.policy, batch.grid)
        return replace(text, safe=safe, rejection=rejection)
    certified = search.certified
    # the prefix is a proposal like any other: it goes through the final check as well
    if config.on_failure == "truncate" and certified and certified.tokens:
        prefix = emission_of(certified, batch.policy, batch.grid)
        # under a signed accounting the failure shows at the end, so the prefix may be unsafe
        prefix.safe = certified.safe(config)
        return replace(prefix, reason="truncated", rejection=search.failure, finished=False)
    # no text at all: the final check then tries the refusal and the empty text
    return Emission(None, reason=search.failure)
