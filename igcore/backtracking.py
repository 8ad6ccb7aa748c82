"""The search with steps back: one sample, left at its first check over budget.

It is Algorithm 1 with one sample and one beam, and with two differences. A sample is left at once,
and where the blocks after a beam fail, the search goes back to an earlier beam, down to the empty
answer. That is legal in the augmented MDP, because the state (s, z) of each beam is stored::

    stack <- [the empty answer]
    until an answer is accepted, or `spend` tokens are sampled:
        draw tokens after the top of the stack, checked as they come
        after each `step` tokens that have passed: push a beam
        at a check over budget: drop beams as `STEPS_BACK` says, and draw again, with new keys
        at the end of an answer within budget: accept it
    return the accepted answer of highest reward, if it passes the final check

An empty stack would be the only dead end, and the empty answer is never dropped. So the chance of
an answer goes to 1 with `spend` wherever a plain answer is within budget with a chance above 0.
Rejection sampling is the member of the family whose step is the whole answer.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from .beams import Beam
from .budget import SIGNED
from .candidates import Candidate, PromptSearch, before_stop
from .engine.sampling import random_key
from .scoring import word_ends
from .search import Batch, answers, ask_reward, charge_costs, drop_cancelled, open_searches
from .verdict import Emission

SPARE = 1.1  # tokens sampled for a token of an answer, steps back included


@dataclass
class Kept:
    """A beam of the stack, and how often what was drawn after it has failed."""

    beam: Beam
    failures: int = 0


class Walk:
    """The search for one prompt: its stack, and the block that is being drawn.

    Attributes
    ----------
    search : PromptSearch
        Its pool has the complete answers, and those that were left.
    stack : list of Kept
        The empty answer first.
    draft : Candidate
        The block after the top of the stack; its beam is the answer at its last check.
    rivals : list of Candidate
        Blocks after the top of the stack that have passed, and among which there is a choice.
    number, choice : int
        Of the draw, which ends with a failure, an answer or a choice; and of the rival.
    spent : int
        Tokens sampled so far.
    deepest, failures : int
        Most tokens of a beam since the search was at the empty answer, and the failures since.
    longest : Beam
        The first of the longest beams so far.
    beaten : list of Beam
        Complete answers within budget to which the reward preferred a block.
    """

    def __init__(self, search: PromptSearch):
        """Begin at the empty answer."""
        self.search, self.config = search, search.config
        self.root = self.longest = search.beams[0]
        self.number = self.choice = self.spent = 0
        self.rivals: list[Candidate] = []
        self.beaten: list[Beam] = []
        self.restart()

    @property
    def step(self) -> int:
        """Tokens from beam to beam."""
        return int(self.config.step or 0)

    @property
    def left(self) -> int:
        """Tokens that may still be sampled."""
        return int(self.config.spend or 0) - self.spent

    @property
    def emits_any(self) -> bool:
        """Whether answers are drawn to their ends, because one of them is emitted in any case."""
        return self.config.on_failure == "paper"

    @property
    def leaves(self) -> bool:
        """Whether an answer is left where it is over budget: its total cannot fall again."""
        return self.config.accounting not in SIGNED and not self.emits_any

    @property
    def answered(self) -> bool:
        """Whether enough answers are accepted, and enough tokens sampled, before another draw."""
        wanted = self.config.answers
        accepted = sum(beam.passes(self.config) for beam in self.search.pool)
        enough = wanted != "all" and accepted >= wanted and self.spent >= self.config.at_least
        begun = len(self.stack) > 1 or self.draft.tokens or self.rivals
        return enough and not begun

    @property
    def over(self) -> bool:
        """Whether no more tokens are sampled."""
        unfinished = self.emits_any and self.draft.tokens
        used_up = self.left <= 0 or self.number == self.config.draws
        return self.answered or self.search.stopped or (used_up and not unfinished)

    @property
    def wants_rival(self) -> bool:
        """Whether another block is drawn beside those that have passed, while tokens last."""
        missing = self.config.max_new_tokens - len(self.draft.beam.tokens)
        choices = self.config.choices
        lasts = self.left > SPARE * choices * missing and self.left >= self.step
        return self.choice + 1 < choices and lasts

    def restart(self) -> None:
        """Go back to the empty answer."""
        self.stack = [Kept(self.root)]
        self.deepest = self.failures = 0
        self.begin()

    def begin(self) -> None:
        """Begin a block after the top of the stack."""
        top = self.stack[-1].beam
        self.draft = Candidate(self.search, top, top, [], [], [], 0, 0)

    def push(self, beam: Beam) -> None:
        """Keep a beam, and draw on after it."""
        self.stack.append(Kept(beam))
        if len(beam.tokens) > self.deepest:
            self.deepest, self.failures = len(beam.tokens), 0
        if len(beam.tokens) > len(self.longest.tokens):
            self.longest = beam
        self.begin()

    def step_back(self) -> None:
        """Count a failure, and drop as many beams as the rule says."""
        self.failures += 1
        self.stack[-1].failures += 1
        wanted = 0 if self.config.keep_shown else STEPS_BACK[self.config.back](self)
        del self.stack[max(1, len(self.stack) - wanted) :]  # the empty answer stays
        self.begin()


# --- how far to go back ---------------------------------------------------------------------------


def by_tries(walk: Walk) -> int:
    """Drop each beam that has failed `tries` times, which is a failure of the one before."""
    dropped = 0
    for after, before in pairwise(reversed(walk.stack)):
        if after.failures < walk.config.tries:
            break
        before.failures += 1
        dropped += 1
    return dropped


def by_doubling(walk: Walk) -> int:
    """Drop 2^(k-2) beams at the k-th failure since the deepest beam so far, and none at the first.

    So a few failures lead back to the empty answer, as in rejection sampling.
    """
    return 0 if walk.failures < 2 else 2 ** min(walk.failures - 2, 30)  # more beams than any stack


STEPS_BACK: dict[str, Callable[[Walk], int]] = {"tries": by_tries, "doubling": by_doubling}


# --- the search -----------------------------------------------------------------------------------


def backtracking(batch: Batch) -> list[Emission]:
    """Search for one answer per prompt, see the module.

    Each prompt has a depth of its own, and one that has ended leaves the batch.

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
    walks = [Walk(search) for search in batch.searches]
    going, found = walks, dict[Walk, Emission]()
    while going:
        drop_cancelled(batch)
        for walk in going:
            while walk.over and walk not in found:
                if emission := conclude(batch, walk):
                    found[walk] = emission
                    if batch.settled:
                        batch.settled(walk.search, emission)
        going = [walk for walk in going if walk not in found]
        if going:
            advance(batch, going)
    batch.engine.select([])  # frees the KV caches
    return [found[walk] for walk in walks]


def advance(batch: Batch, walks: Sequence[Walk]) -> None:
    """Sample tokens after each draft, and check the drafts token by token."""
    drafts = [walk.draft for walk in walks]
    texts = [draft.parent.tokens + draft.tokens for draft in drafts]
    keys = [keys_of(batch.seed, walk, len(text)) for walk, text in zip(walks, texts, strict=True)]
    rows = [walk.root.row for walk in walks]
    with batch.work.timed("generate"):
        block = batch.engine.go_on(rows, texts, keys, batch.config.max_new_tokens)
    for c, draft in enumerate(drafts):
        walks[c].spent += len(block.tokens[c])
        draft.tokens += block.tokens[c]
        draft.log_p += block.log_p[c]
        draft.log_q += block.log_q[c]
        draft.near_ties += sum(block.near[c])
        draft.encoded += block.encoded[c]
    # a server gives several tokens. What it sampled after a failed check counts as sampled, but is
    # no part of the answer
    for n in range(max(map(len, block.tokens))):
        grown = {}
        for c, walk in enumerate(walks):
            if walk.draft is drafts[c] and n < len(block.tokens[c]):
                last = block.ended[c] and n + 1 == len(block.tokens[c])
                grown[walk] = at_token(batch, walk, texts[c] + block.tokens[c][: n + 1], last)
        check(batch, grown)
    with batch.work.timed("cost"):
        # scorers with a KV cache keep what the stack holds
        prompts = [walk.search.prompt.text for walk in walks]
        batch.scoring.retain(prompts, [walk.draft.beam.text for walk in walks])


def keys_of(seed: int, walk: Walk, start: int) -> list[int]:
    """Return the keys of the tokens up to the next end of a block, as far as tokens are left."""
    config, prompt = walk.config, walk.search.prompt
    end = min(start - start % config.block_size + config.block_size, config.max_new_tokens)
    if not walk.emits_any:
        end = min(end, start + walk.left)
    return [random_key(seed, prompt.id, walk.number, walk.choice, t) for t in range(start, end)]


def at_token(batch: Batch, walk: Walk, tokens: list[int], ended: bool) -> Beam:
    """Return the answer of a draft with these tokens; its state is that of the last check."""
    draft, config, n = walk.draft, walk.config, len(tokens)
    written = batch.policy.text(tokens)
    text = before_stop(written, config.stop)
    new = n - len(draft.parent.tokens)
    return replace(
        draft.beam,
        tokens=tokens,
        text=text,
        finished=ended or n == config.max_new_tokens or text != written,
        ends=[*range(config.block_size, n, config.block_size), n],
        log_p=draft.parent.log_p + sum(draft.log_p[:new]),
    )


def check(batch: Batch, grown: Mapping[Walk, Beam]) -> None:
    """Charge the drafts that have come to a check, and settle those that end there."""
    reached = {walk: at_check(walk, beam) for walk, beam in grown.items()}
    checked = {walk: beam for walk, beam in reached.items() if beam}
    parents = [walk.draft.beam for walk in checked]
    candidates = [
        Candidate(walk.search, parent, beam, [], [], [], 0, 0)
        for parent, (walk, beam) in zip(parents, checked.items(), strict=True)
    ]
    if candidates:
        charge_costs(batch, candidates)
    settled = []
    for parent, (walk, beam) in zip(parents, checked.items(), strict=True):
        beam.broken |= parent.broken  # a cost that failed at an earlier check
        walk.draft.beam, answer = beam, grown[walk]
        fails = not beam.safe(walk.config)
        passes = not fails and len(answer.tokens) == len(walk.draft.parent.tokens) + walk.step
        if answer.finished or passes or (fails and walk.leaves):
            answer.state, answer.broken, answer.cost = beam.state, beam.broken, beam.cost
            answer.worst = beam.state.peak  # of all checks so far, not the last ones alone
            walk.draft.beam = answer
            settled.append(walk)
    rated = [w.draft for w in settled if w.draft.beam.finished or w.rivals or w.wants_rival]
    ask_reward(batch, rated)
    for walk in settled:
        settle(batch, walk)


def at_check(walk: Walk, beam: Beam) -> Beam | None:
    """Return an answer at its next check, if its last token has come to one."""
    config, before = walk.config, walk.draft.beam
    if beam.finished:
        return beam
    if config.accounting == "terminal":
        return None
    if len(beam.tokens) % config.block_size == 0:
        return beam
    # under a discount words are checked at the end of their block, which is charged at its last
    # token
    if config.checks == "block" or config.gamma_safety != 1:
        return None
    # a word has ended where another character follows it, which is of the last token
    ends = word_ends(beam.text, len(before.text))
    return replace(beam, tokens=beam.tokens[:-1], text=beam.text[: ends[-1]]) if ends else None


def settle(batch: Batch, walk: Walk) -> None:
    """End a block: draw another beside it, keep the best, accept an answer, or go back."""
    beam = walk.draft.beam
    note(batch, walk)
    if beam.passes(walk.config):
        walk.rivals.append(walk.draft)
    else:
        walk.search.pool.append(beam)
    if walk.rivals and walk.wants_rival:
        walk.choice += 1
        walk.begin()
        return
    best, *others = walk.search.best_first([rival.beam for rival in walk.rivals]) or [beam]
    if not walk.config.keep_shown:  # else it would replace what is shown
        walk.beaten += [other for other in others if other.finished]
    # a draw goes on after a beam, unless there was a choice
    if walk.choice or best.finished or not walk.rivals:
        walk.number += 1
    rivals, walk.choice, walk.rivals = walk.rivals, 0, []
    if not rivals:
        walk.step_back()
    elif best.finished:
        walk.search.pool.append(best)
        walk.restart()
    else:
        walk.push(best)
        walk.search.beams = [best]
        batch.work.saw_block(walk.search, shown=walk.config.keep_shown)


def note(batch: Batch, walk: Walk) -> None:
    """Count and trace the block that has been drawn."""
    batch.work.saw_round(len(walk.draft.parent.tokens) // walk.step, walk.number, [walk.draft])


def conclude(batch: Batch, walk: Walk) -> Emission | None:
    """Return what is emitted for a prompt; None where the search goes on after a failed check."""
    search = walk.search
    if new := walk.draft.tokens:  # cut, because no tokens are left
        walk.draft.beam = at_token(batch, walk, walk.draft.parent.tokens + new, False)
        note(batch, walk)
        walk.begin()
    search.pool += walk.beaten
    walk.beaten = []
    search.beams = [walk.longest]  # which mode `truncate` emits if no answer is accepted
    if search.pool:
        search.keep_best()
        batch.work.saw_block(search, shown=False)
    elif not search.failure:
        search.fail("exhausted")
    (emission,) = answers(batch, [search])
    if emission.reason != "final_check" or walk.emits_any or walk.config.keep_shown:
        return emission
    # the fresh cost of the best answer is over budget: the next best, or other answers
    search.pool.remove(search.best)
    if walk.left > 0 or any(beam.passes(walk.config) for beam in search.pool):
        return None
    return emission
