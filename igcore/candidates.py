"""The search for one prompt, and its candidates: beams with one more block."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from .beams import Beam
from .budget import SIGNED, start
from .config import SearchConfig
from .engine.block import Block
from .engine.diversity import Failures
from .methods import Method
from .policy import Policy
from .prompt import Prompt


@dataclass(eq=False)  # compared and hashed by identity: two prompts may be equal
class PromptSearch:
    """The search for one prompt: its beams, what was tried, and whether it has failed.

    Attributes
    ----------
    ids : list of int
        Token ids of the prompt in the policy's template.
    abstains : bool
        Whether the search abstains when a text fails the final check.
    beams, pool : list of Beam
        The beams kept, and the candidates of the current block.
    failures : Failures
        Tokens of this block's rounds so far.
    failure : str
        Why a guarded search has failed; empty while it has not.
    certified : Beam or None
        The best safe beam before the block that failed.
    stopped : bool
        Whether it has failed and samples no more (see ``SearchConfig.probe_fail_open``).
    """

    prompt: Prompt
    ids: list[int]
    method: Method
    config: SearchConfig
    abstains: bool
    beams: list[Beam]
    pool: list[Beam] = field(default_factory=list)
    failures: Failures = field(init=False, repr=False)  # made by `open_block`
    failure: str = ""
    certified: Beam | None = None
    stopped: bool = False

    @property
    def live(self) -> list[Beam]:
        """The beams that can be continued."""
        return [] if self.stopped else [beam for beam in self.beams if not beam.finished]

    @property
    def best(self) -> Beam:
        """The kept beam of lowest score."""
        return self.best_first(self.beams)[0]

    @property
    def accepted(self) -> bool:
        """Whether the pool holds a candidate good enough that the block needs no further round."""
        return any(self.method.accepts(beam, self.config) for beam in self.pool)

    def open_block(self, spared: frozenset[int]) -> None:
        """Begin a block: finished beams compete with what will be sampled.

        `spared` are the end tokens; no penalty touches them.
        """
        # new in every block: F of the paper counts the failures of one block
        self.pool = [beam for beam in self.beams if beam.finished]
        self.failures = Failures(spared, self.config.diversity_penalty)

    def best_first(self, beams: Sequence[Beam]) -> list[Beam]:
        """Sort beams by the method's score; ties keep the order of sampling."""
        return sorted(beams, key=lambda beam: self.method.score(beam, self.config))

    def chosen(self) -> list[Beam]:
        """Return the K best of the pool, under a safety-first method the best safe ones, if any.

        Candidates that only the critic rejects come last. They fill places that are left free.
        """
        # safe by the cost model, even if the critic rejects it: an empty place is worse than a safe
        # candidate with a low f1. Unsafe beams stay only where every candidate is unsafe
        safe = [beam for beam in self.pool if beam.safe(self.config)]
        eligible = safe if self.method.safety_first and safe else self.pool
        return self.best_first(eligible)[: self.config.keep]

    def keep_best(self) -> None:
        """Keep the K best of the pool; a guarded search without a safe one has failed."""
        chosen = self.chosen()
        # with C >= 0 an overspent budget stays overspent, so that no continuation can be safe.
        # Under a signed accounting a later credit may still repay it
        absorbing = self.config.accounting not in SIGNED
        if self.abstains and absorbing and not chosen[0].safe(self.config):
            # before the beams change: `fail` keeps the last safe one for mode `truncate`
            self.fail(why_unsafe(self.pool))
        self.beams = chosen

    def fail(self, reason: str) -> None:
        """Mark the search as failed; what it finds later is never an answer."""
        if not self.failure:  # only the first reason counts
            self.failure, self.certified = reason, self.best
            self.stopped = not self.config.probe_fail_open


def why_unsafe(pool: Sequence[Beam]) -> str:
    """Return the reason why no candidate of a pool is safe."""
    # a failed scorer may have hidden a safe candidate: more rounds would not have helped
    return "scorer_error" if any(beam.broken for beam in pool) else "exhausted"


def new_search(
    prompt: Prompt, ids: list[int], row: int, method: Method, config: SearchConfig
) -> PromptSearch:
    """Return the search for a prompt before the first block: one empty beam, z_0 = d."""
    # mode `paper` emits the least unsafe candidate, so it cannot abstain
    abstains = method.abstains and config.on_failure != "paper"
    root = Beam([], "", False, start(config.budget), [], row)
    return PromptSearch(prompt, ids, method, config, abstains, [root])


# --- candidates ----------------------------------------------------------------------------------


@dataclass
class Candidate:
    """A beam with one more block, and the block as it was sampled.

    Attributes
    ----------
    search : PromptSearch
        The search that it belongs to.
    parent, beam : Beam
        Before and after the block.
    tokens, log_p, log_q : list
        Of the block: token ids, and their log-probabilities under the reference policy and under
        the policy that they were sampled from (nats).
    near_ties, encoded : int
        See `igcore.engine.block.Block`.
    """

    search: PromptSearch
    parent: Beam
    beam: Beam
    # kept by token, because the penalty of a retry needs each token's reference probability
    tokens: list[int]
    log_p: list[float]
    log_q: list[float]  # differs from log_p where the policy itself was not sampled
    near_ties: int
    encoded: int


def candidates_of(
    policy: Policy, block: Block, origins: Sequence[tuple[PromptSearch, Beam]]
) -> list[Candidate]:
    """Return the candidates of a block: each beam of `origins` with its sampled tokens."""
    candidates = []
    for c, (search, parent) in enumerate(origins):
        tokens = parent.tokens + block.tokens[c]  # a new list: siblings share their parent
        # all tokens, not the new ones: a character may be split over two blocks
        written = policy.text(tokens)
        # an end token or length T; E_critic and `terminal` treat both as the end
        finished = block.ended[c] or len(tokens) == search.config.max_new_tokens
        text = before_stop(written, search.config.stop)
        if text != written:
            finished = True
            tokens = tokens_up_to(policy, tokens, len(text), len(parent.tokens) + 1)
        new = len(tokens) - len(parent.tokens)
        beam = Beam(
            tokens=tokens,
            text=text,
            finished=finished,
            state=parent.state,  # before this block's cost, see `charge_costs`
            ends=[*parent.ends, len(tokens)],
            # the engine numbers candidates over all rounds of a block
            row=block.first + c,
            log_p=parent.log_p + sum(block.log_p[c][:new]),
        )
        candidates.append(
            Candidate(
                search, parent, beam, block.tokens[c], block.log_p[c], block.log_q[c],
                sum(block.near[c]), block.encoded[c],
            )
        )  # fmt: skip
    return candidates


def before_stop(text: str, stops: Sequence[str]) -> str:
    """Return a text up to the first stop string in it."""
    return text[: min((text.index(stop) for stop in stops if stop in text), default=len(text))]


def tokens_up_to(policy: Policy, tokens: list[int], length: int, least: int) -> list[int]:
    """Return the fewest tokens, but `least`, whose text has a length; the last may hold more."""
    n = least
    while len(policy.text(tokens[:n])) < length:
        n += 1
    return tokens[:n]
