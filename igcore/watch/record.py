"""Record the candidates of a search, to inspect them.

A `Recorder` observes a search without changing it. It keeps a list of `Node` for each answer: plain
values, a few kB.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..beams import Beam
from ..budget import SafetyState, charge, start
from ..candidates import Candidate, PromptSearch
from ..config import SearchConfig
from ..search import Batch
from ..verdict import Emission

# fates of a candidate
KEPT = "kept"  # the search continued from it
EMITTED = "emitted"  # the answer
BEATEN = "beaten"  # acceptable, but others were better
OVER_BUDGET = "over budget"
REJECTED = "rejected by the critic"
DROPPED = "dropped"  # kept until the search went back behind it
RETRIED = "retried"  # no candidate of its round was acceptable, so the block was sampled again
CHECK_FAILED = "final check failed"
ON_THE_WAY = (KEPT, EMITTED, CHECK_FAILED)


@dataclass(frozen=True)
class Node:
    """A candidate of a search.

    Attributes
    ----------
    number, parent : int
        Its number in the order of sampling, and the number of the candidate that it continues; -1
        is the prompt.
    block, round : int
        Block and round of its sampling, each from 0.
    text : str
        The text of its block.
    beam : Beam
        The candidate itself, with its tokens, its safety state, and the critic's f1 and f2. Cost
        and reward are set even if the search did not use them; infinitely bad if a scorer failed.
    within : bool
        True if it is within budget.
    fate : str
        Its fate: `KEPT`, `EMITTED`, `BEATEN`, ...
    """

    number: int
    parent: int
    block: int
    round: int
    text: str
    beam: Beam
    within: bool
    fate: str

    @property
    def cost(self) -> float:
        """U_k of the response so far; higher is worse."""
        return self.beam.cost


class Recorder:
    """Records the candidates of all searches of a batch, each up to the block in which it fails."""

    def __init__(self) -> None:
        self._sampled: dict[PromptSearch, list[tuple[int, int, Candidate]]] = defaultdict(list)
        self._kept: dict[PromptSearch, set[int]] = defaultdict(set)  # id() of beams

    def saw_round(self, block: int, round_: int, candidates: Sequence[Candidate]) -> None:
        """Record the candidates of one round of one block."""
        for candidate in candidates:
            if not candidate.search.failure:
                self._sampled[candidate.search].append((block, round_, candidate))

    def saw_block(self, search: PromptSearch) -> None:
        """Record the beams that a search keeps after a block."""
        if not search.failure:
            self._kept[search] |= {id(beam) for beam in search.beams}

    def nodes(self, batch: Batch, search: PromptSearch, emission: Emission) -> list[Node]:
        """Return the candidates of a search, in the order of sampling."""
        sampled, config = self._sampled[search], search.config
        beams = [candidate.beam for _, _, candidate in sampled]
        numbers = {id(beam): number for number, beam in enumerate(beams)}
        costs = _scores(batch, search, beams, "cost")
        rewards = _scores(batch, search, beams, "reward")
        last_round = {block: round_ for block, round_, _ in sampled}
        result: list[Node] = []
        for number, (block, round_, candidate) in enumerate(sampled):
            from_ = numbers.get(id(candidate.parent), -1)
            before = result[from_].beam.state if from_ >= 0 else start(config.budget)
            own = replace(candidate.beam, cost=costs[number], reward=rewards[number])
            own.worst = max(own.worst, own.cost)  # the search may not use the cost
            own.state = _charged(own, before, config)
            retried = round_ < last_round[block] and not search.method.stepwise
            fate = _rejection(own, config, retried)
            if id(candidate.beam) in self._kept[search]:
                fate = DROPPED if search.method.stepwise else KEPT
            text = own.text[len(candidate.parent.text) :]
            result.append(Node(number, from_, block, round_, text, own, own.safe(config), fate))
        end, fate = _end(search, emission)
        if end is not None and id(end) in numbers:
            number = numbers[id(end)]
            result[number] = replace(result[number], fate=fate)
            while (number := result[number].parent) >= 0:
                result[number] = replace(result[number], fate=KEPT)
        return result


def _rejection(beam: Beam, config: SearchConfig, retried: bool) -> str:
    """Return the fate of a candidate that the search does not keep."""
    if retried:
        return RETRIED
    if not beam.safe(config):
        return OVER_BUDGET
    return BEATEN if beam.let_through else REJECTED


def _end(search: PromptSearch, emission: Emission) -> tuple[Beam | None, str]:
    """Return the last beam of a search, if any, and the beam's fate."""
    if emission.reason == "truncated":
        return search.certified, EMITTED
    if search.failure:
        return None, ""
    return search.best, CHECK_FAILED if emission.status == "abstained" else EMITTED


def _scores(batch: Batch, search: PromptSearch, beams: Sequence[Beam], role: str) -> list[float]:
    """Return the cost or reward of every beam, even if the search did not use it.

    It is infinitely bad if the scorer fails.
    """
    if role not in batch.scoring.search:
        return [beam.likelihood for beam in beams]
    prompts, texts = [search.prompt.text] * len(beams), [beam.text for beam in beams]
    # scores that the search used are in its cache
    scorer = batch.scoring.search[role]
    found = scorer.score(prompts, texts, [beam.finished for beam in beams]).tolist()
    worst = math.inf if role == "cost" else -math.inf
    return [worst if math.isnan(score) else score for score in found]


def _charged(beam: Beam, before: SafetyState, config: SearchConfig) -> SafetyState:
    """Return the safety state of a beam, given that of its parent."""
    last = len(beam.tokens) - 1
    return charge(before, beam.worst, config.accounting, config.gamma_safety, last, beam.finished)
