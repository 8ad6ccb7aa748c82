"""The candidates of a search, kept so that they can be looked at and judged again.

`Recorder` watches a search from outside and changes nothing. What it keeps of an answer is a list
of `Node`: plain values, a few kB.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..beams import Beam, Method, PromptSearch, new_search
from ..budget import charge
from ..config import SearchConfig
from ..policy import Prompt
from ..search import Batch, Candidate
from ..verdict import Emission

# what became of a candidate
KEPT = "kept"  # the search went on from it
EMITTED = "emitted"  # it is the answer
BEATEN = "beaten"  # acceptable, but others were better
OVER_BUDGET = "over budget"
REJECTED = "rejected by the critic"
RETRIED = "retried"  # its round held no acceptable candidate, so the block was sampled again
CHECK_FAILED = "final check failed"
NOT_SAMPLED = "not sampled"  # under another budget the search would not have come here
_ON_THE_WAY = (KEPT, EMITTED, CHECK_FAILED)
FATES = (KEPT, EMITTED, BEATEN, OVER_BUDGET, REJECTED, RETRIED, CHECK_FAILED, NOT_SAMPLED)


@dataclass(frozen=True)
class Node:
    """A candidate of a search.

    Attributes
    ----------
    number, parent : int
        Its number in the order of sampling, and that of the candidate that it continues; -1 is the
        prompt.
    block, round : int
        When it was sampled, each from 0.
    text : str
        What its block adds to its parent's text.
    n_tokens : int
        Tokens of the response so far.
    finished : bool
        Whether the response ends here.
    cost, reward : float or None
        U_k (higher is worse) and reward (higher is better) of the response so far; None where the
        method does not ask or the scorer failed.
    f1, f2 : float or None
        The critic's probability of ending within budget and its expected task cost; None where no
        critic judged.
    let_through : bool
        Whether the critic lets it through; True where no critic judged.
    z : float
        Scaled remaining budget after its block, in units of the cost.
    within : bool
        Whether it is within budget.
    fate : str
        One of `FATES`.
    """

    number: int
    parent: int
    block: int
    round: int
    text: str
    n_tokens: int
    finished: bool
    cost: float | None
    reward: float | None
    f1: float | None
    f2: float | None
    let_through: bool
    z: float
    within: bool
    fate: str


@dataclass
class _Sampled:
    block: int
    round: int
    candidate: Candidate


class Recorder:
    """Keeps the candidates of all searches of a batch, up to the block in which one fails."""

    def __init__(self) -> None:
        self._sampled: dict[PromptSearch, list[_Sampled]] = defaultdict(list)
        self._kept: dict[PromptSearch, set[int]] = defaultdict(set)  # identities of beams

    def saw_round(self, block: int, round_: int, candidates: Sequence[Candidate]) -> None:
        """Keep the candidates of one round of one block."""
        for candidate in candidates:
            if not candidate.search.failure:
                self._sampled[candidate.search].append(_Sampled(block, round_, candidate))

    def saw_block(self, search: PromptSearch) -> None:
        """Remember which beams a search keeps after a block."""
        if not search.failure:
            self._kept[search] |= {id(beam) for beam in search.beams}

    def nodes(self, batch: Batch, search: PromptSearch, emission: Emission) -> list[Node]:
        """Return the candidates of a search, in the order of sampling."""
        sampled = self._sampled[search]
        rewards = _rewards(batch, search, [each.candidate.beam for each in sampled])
        numbers = {id(each.candidate.beam): number for number, each in enumerate(sampled)}
        last_round = {each.block: each.round for each in sampled}
        result = []
        for number, each in enumerate(sampled):
            beam, parent = each.candidate.beam, each.candidate.parent
            fate = _fate_of_rejected(beam, search.config)
            if each.round < last_round[each.block]:
                fate = RETRIED
            if id(beam) in self._kept[search]:
                fate = KEPT
            result.append(
                Node(
                    number=number,
                    parent=numbers.get(id(parent), -1),
                    block=each.block,
                    round=each.round,
                    text=beam.text[len(parent.text) :],
                    n_tokens=len(beam.tokens),
                    finished=beam.finished,
                    cost=_finite(beam.cost) if search.method.cost else None,
                    reward=rewards[number],
                    f1=_finite(beam.f1),
                    f2=_finite(beam.f2),
                    let_through=beam.let_through,
                    z=float(beam.state.z),
                    within=beam.safe(search.config),
                    fate=fate,
                )
            )
        end, fate = _end(search, emission)
        if end is not None and id(end) in numbers:
            number = numbers[id(end)]
            result[number] = replace(result[number], fate=fate)
        return result


def _fate_of_rejected(beam: Beam, config: SearchConfig) -> str:
    """Return the fate of a candidate that the search does not keep."""
    if not beam.safe(config):
        return OVER_BUDGET
    return BEATEN if beam.let_through else REJECTED


def _end(search: PromptSearch, emission: Emission) -> tuple[Beam | None, str]:
    """Return the beam at which a search ends, if it has one, and the beam's fate."""
    if emission.reason == "truncated":
        return search.certified, EMITTED
    if search.failure:
        return None, ""
    return search.best, CHECK_FAILED if emission.status == "abstained" else EMITTED


def _rewards(batch: Batch, search: PromptSearch, beams: Sequence[Beam]) -> list[float | None]:
    """Return the reward of every beam, also where the search did not need it."""
    method = search.method
    if not method.reward:
        return [None] * len(beams)
    if batch.guard.reward is None:
        return [beam.likelihood for beam in beams]
    known = {}
    for i, beam in enumerate(beams):
        exists = beam.finished or not method.final_only
        if exists and (beam.passes(search.config) or not method.safety_first):
            known[i] = beam.reward
    # a safety-first method leaves out what is over budget; under another budget it may count
    others = [i for i in range(len(beams)) if i not in known]
    prompts, texts = [search.prompt.text] * len(others), [beams[i].text for i in others]
    finished = [beams[i].finished for i in others]
    scores = batch.scoring.reported["reward"].score(prompts, texts, finished)
    known |= dict(zip(others, scores, strict=True))
    return [_finite(known[i]) for i in range(len(beams))]


def _finite(number: float) -> float | None:
    return float(number) if math.isfinite(number) else None


# --- another budget -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Replay:
    """A recorded search under another budget.

    Attributes
    ----------
    nodes : list of Node
        The recorded candidates with z and fates under this budget.
    leaves : int or None
        The first block at which the search would leave the recorded candidates: it would keep
        others, or sample another round. What would follow was not sampled. None where it stays.
    failed : bool
        Whether a guarded search finds no candidate within budget.
    chosen : bool
        Whether the choices were made again. Those of a critic and of ARGS are not: a critic would
        have to judge every z anew, and ARGS samples by weights of its own.
    """

    nodes: list[Node]
    leaves: int | None = None
    failed: bool = False
    chosen: bool = True


def judged_again(
    nodes: Sequence[Node], method: Method, config: SearchConfig, budget: float
) -> Replay:
    """Judge recorded candidates under another budget, without decoding.

    Parameters
    ----------
    config : SearchConfig
        The settings of the recorded search.
    budget : float
        In units of the cost.
    """
    here = _Replayed(nodes, method, replace(config, budget=budget))
    if method.asks_critic or method.search != Method.search:
        fates = [here.fate_unchosen(node) for node in nodes]
        return Replay(here.judged(fates), chosen=False)
    there = _Replayed(nodes, method, config)
    leaves = None
    for block in range(1 + max((node.block for node in nodes), default=-1)):
        there.play(block)
        here.play(block)
        if here.failed or here.wants_retry or here.kept != there.kept:
            leaves = block
            break
    judged = here.judged([here.fate_of(node, leaves) for node in nodes])
    return Replay(judged, None if here.failed else leaves, here.failed)


class _Replayed:
    """The choices of a search among recorded candidates.

    Attributes
    ----------
    beams : dict of int to Beam
        By number of the node.
    kept : list of int
        Numbers of the beams kept after the last block, best first.
    wants_retry : bool
        Whether the last block would be sampled once more.
    """

    def __init__(self, nodes: Sequence[Node], method: Method, config: SearchConfig):
        self.nodes, self.method, self.config = nodes, method, config
        self.search = new_search(Prompt("", "", ""), [], -1, method, config)
        self.beams = {-1: self.search.beams[0]}
        for node in nodes:
            self.beams[node.number] = self._beam(node)
        self.kept: list[int] = []
        self.unused_rounds: set[tuple[int, int]] = set()
        self.wants_retry = False

    @property
    def failed(self) -> bool:
        return bool(self.search.failure)

    def _beam(self, node: Node) -> Beam:
        """Return a node as a beam, charged under this budget."""
        parent, config = self.beams[node.parent], self.config
        broken = self.method.cost and node.cost is None
        cost = math.inf if broken else node.cost or 0.0
        state = parent.state
        if self.method.cost:
            last = node.n_tokens - 1
            state = charge(state, cost, config.accounting, config.gamma_safety, last, node.finished)
        return Beam(
            tokens=[0] * node.n_tokens,  # only their number counts
            text=parent.text + node.text,
            finished=node.finished,
            state=state,
            ends=[*parent.ends, node.n_tokens],
            row=node.number,
            cost=cost,
            reward=-math.inf if node.reward is None else node.reward,
            broken=broken or (self.method.reward and node.reward is None),
            f1=-math.inf if node.f1 is None else node.f1,
            f2=math.inf if node.f2 is None else node.f2,
            let_through=node.let_through,
        )

    def play(self, block: int) -> None:
        """Choose among the candidates of a block as the search does."""
        self.search.open_block(frozenset())
        rounds = sorted({node.round for node in self.nodes if node.block == block})
        for round_ in rounds:
            if round_ > 0 and self.search.accepted:
                self.unused_rounds.add((block, round_))
                continue
            for node in self.nodes:
                if (node.block, node.round) == (block, round_):
                    self.search.pool.append(self.beams[node.number])
        self.wants_retry = not self.search.accepted and len(rounds) < self.config.rounds
        if self.wants_retry:  # what would be kept depends on samples that were not drawn
            return
        self.search.keep_best()
        self.kept = [beam.row for beam in self.search.beams]

    def fate_of(self, node: Node, leaves: int | None) -> str:
        """Return the fate of a candidate; at block `leaves` this search leaves the record."""
        if leaves is None:
            return node.fate if node.fate in _ON_THE_WAY else self._rejection(node)
        if node.block > leaves or (node.block, node.round) in self.unused_rounds:
            return NOT_SAMPLED
        if node.block < leaves:
            return KEPT if node.fate in _ON_THE_WAY else self._rejection(node)
        if self.wants_retry:
            return RETRIED
        if node.number in self.kept and not self.failed:
            return KEPT
        return self._rejection(node)

    def fate_unchosen(self, node: Node) -> str:
        """Return the fate of a candidate as far as the budget alone decides it."""
        within = self.beams[node.number].safe(self.config)
        if within == node.within:
            return node.fate
        return BEATEN if within else OVER_BUDGET

    def judged(self, fates: Sequence[str]) -> list[Node]:
        """Return the recorded candidates with these fates, and z under this budget."""
        judged = []
        for node, fate in zip(self.nodes, fates, strict=True):
            beam = self.beams[node.number]
            within = beam.safe(self.config)
            judged.append(replace(node, z=float(beam.state.z), within=within, fate=fate))
        return judged

    def _rejection(self, node: Node) -> str:
        if node.fate == RETRIED:
            return RETRIED
        return _fate_of_rejected(self.beams[node.number], self.config)
