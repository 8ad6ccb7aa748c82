"""Rejection sampling that stops early: whole answers, each left at its first check over budget.

The policy draws one answer after another. Each is checked as it grows, at the ends of words and
blocks as InferenceGuard's answers are, and left at the first check that is over budget or that the
cost model fails on. Of the answers that are complete and within budget, the one with the highest
reward goes through the final check. The first draw is the sample of `base`.

InferenceGuard does not stop its blocks like this: under the diversities `half` and `paper` a retry
avoids the tokens after a violation, too, so its answers would change.
"""

from collections.abc import Sequence
from dataclasses import replace

from igcore.beams import Beam, Method, PromptSearch, e_inter
from igcore.budget import SIGNED
from igcore.config import SearchConfig
from igcore.engine.sampling import random_key
from igcore.scoring import word_ends
from igcore.search import (
    Batch,
    answers,
    ask_reward,
    candidates_of,
    charge_costs,
    go_on,
    open_searches,
)
from igcore.settings import Count, settings
from igcore.verdict import Emission
from igcore.work import Candidate

from ..settings import upcast_settings


@settings
class RejectionConfig(SearchConfig):
    """Settings of rejection sampling besides those of `SearchConfig`.

    Attributes
    ----------
    spend : int
        A prompt draws until so many policy tokens are sampled, those of stopped answers included,
        and an answer is accepted.
    draws : int
        Largest number of draws for a prompt.
    """

    spend: Count = 64
    draws: Count = 24


def rejection(batch: Batch) -> list[Emission]:
    """Draw whole answers of each prompt, and propose the accepted one of highest reward.

    Answers are drawn to their ends, and judged there, if their total cost may fall again (an
    accounting in `igcore.budget.SIGNED`), if it exists at the end alone (``terminal``), and in mode
    ``paper``, which emits the least unsafe of them. Under a discount words are checked at the end
    of their block, as a block is charged at its last token. There is no certified prefix, so
    ``truncate`` abstains.

    Returns
    -------
    list of Emission
        One per prompt, in their order.

    Raises
    ------
    ScorerError, PolicyError
        As `igcore.search.guarded_beam_search`.
    """
    open_searches(batch)
    for number in range(batch.config.draws):
        drawing = [search for search in batch.searches if draws_on(search, batch.config)]
        if not drawing:
            break
        candidates = draw(batch, drawing, number)
        ask_reward(batch, candidates)
        batch.work.saw_round(0, number, candidates)
        for candidate in candidates:
            candidate.search.pool.append(candidate.beam)
    for search in batch.searches:
        if search.pool:
            search.keep_best()
            batch.work.saw_block(search)
    go_on(batch)  # no row goes on: this frees the KV caches
    return answers(batch)


def draws_on(search: PromptSearch, config: RejectionConfig) -> bool:
    """True while tokens are left to spend, or no answer is accepted."""
    spent = sum(len(beam.tokens) for beam in search.pool)
    return not search.stopped and (spent < config.spend or not search.accepted)


def draw(batch: Batch, searches: Sequence[PromptSearch], number: int) -> list[Candidate]:
    """Draw one answer for each prompt, with the costs of its checks."""
    config: RejectionConfig = batch.config
    origins = [(search, search.live[0]) for search in searches]
    checked = {c: root for c, (_, root) in enumerate(origins)}  # each answer at its last check
    stops = config.accounting not in SIGNED and config.on_failure != "paper"

    def over_budget(numbers: list[int], tokens: list[list[int]]) -> list[int]:
        """Charge the answers that have come to a check; return those that are over budget."""
        pairs = zip(numbers, tokens, strict=True)
        reached = {c: at_check(batch, checked[c], own) for c, own in pairs}
        grown = {c: beam for c, beam in reached.items() if beam}
        if grown:
            charge(batch, searches, checked, grown)
            batch.scoring.retain(
                [searches[c].prompt.text for c in numbers], [checked[c].text for c in numbers]
            )
        return [c for c in grown if stops and not checked[c].safe(config)]

    keys = [
        [random_key(batch.seed, s.prompt.id, number, 0, t) for t in range(config.max_new_tokens)]
        for s in searches
    ]
    rows = [root.row for _, root in origins]
    stop = None if config.accounting == "terminal" else over_budget
    before = batch.work.seconds["cost"]
    with batch.work.timed("generate"):
        block = batch.engine.sample_block(rows, keys, last=True, stop=stop)
    batch.work.seconds["generate"] -= batch.work.seconds["cost"] - before

    candidates = candidates_of(batch, block, origins)
    for c, candidate in enumerate(candidates):
        beam, n = candidate.beam, len(candidate.tokens)
        beam.ends = [*range(config.block_size, n, config.block_size), n]
        beam.state, beam.broken = checked[c].state, checked[c].broken
    complete = {c: whole.beam for c, whole in enumerate(candidates) if whole.beam.finished}
    if complete:
        charge(batch, searches, checked, complete)
    for candidate in candidates:
        candidate.beam.worst = candidate.beam.state.peak  # of all checks, not the last ones alone
    return candidates


def at_check(batch: Batch, before: Beam, tokens: list[int]) -> Beam | None:
    """Return an unfinished answer at its next check, if these tokens come to one."""
    config: RejectionConfig = batch.config
    if len(tokens) == config.max_new_tokens:  # complete, and checked as such
        return None
    text = batch.policy.text(tokens)
    if len(tokens) % config.block_size == 0:
        return replace(before, tokens=tokens, text=text)
    if config.checks == "block" or config.gamma_safety != 1:
        return None
    # a word has ended where another character follows it, which is of the last token
    ends = word_ends(text, len(before.text))
    return replace(before, tokens=tokens[:-1], text=text[: ends[-1]]) if ends else None


def charge(
    batch: Batch, searches: Sequence[PromptSearch], checked: dict[int, Beam], grown: dict[int, Beam]
) -> None:
    """Charge answers for the checks since their last one, which they replace in `checked`."""
    candidates = [
        Candidate(searches[c], checked[c], beam, [], [], [], 0, 0) for c, beam in grown.items()
    ]
    charge_costs(batch, candidates)
    for c, beam in grown.items():
        beam.broken |= checked[c].broken  # a cost that failed at an earlier check
    checked |= grown


def whole_answers(config: SearchConfig) -> RejectionConfig:
    """Return settings under which one answer is drawn at a time, and no failure is probed."""
    own: RejectionConfig = upcast_settings(RejectionConfig, config)
    return replace(own, n_samples=1, keep=1, rounds=1, probe_fail_open=False)


REJECTION = Method(e_inter, whole_answers, abstains=True, safety_first=True, search=rejection)
