"""The search for one prompt: its beams, what was tried, and what would leave it. Knows no other
prompt, and asks no model.

`igcore.search` draws and scores for many of these at once.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from .beams import RANKS, Beam, Method, Rank
from .budget import SIGNED
from .config import SearchConfig
from .engine.diversity import Failures
from .engine.engine import Block
from .policy import Policy, Prompt
from .verdict import Counts, Emission


@dataclass
class Job:
    """The state of one search.

    Attributes
    ----------
    config : SearchConfig
        What the method really runs under.
    gated : bool
        Whether a text that fails the check is held back.
    beams, pool : list of Beam
        The beams kept, and the candidates of the block at hand.
    finals : list of [reward, cost]
        Of every finished candidate, see `igcore.verdict.Response`.
    failed : Failures or None
        Tokens of this block's rounds so far.
    failure : str
        Why a gated search has failed; empty while it has not. Work done afterwards is not counted.
    certified : Beam or None
        The best safe beam before the block that failed.
    stopped : bool
        Whether a failed search is not searched on.
    """

    prompt: Prompt
    method: Method
    config: SearchConfig
    gated: bool
    beams: list[Beam]
    counts: Counts = field(default_factory=Counts)
    trace: list[dict] = field(default_factory=list)
    finals: list[list[float | None]] = field(default_factory=list)
    pool: list[Beam] = field(default_factory=list)
    failed: Failures | None = None
    failure: str = ""
    certified: Beam | None = None
    stopped: bool = False

    @property
    def rank(self) -> Rank:
        return RANKS[self.method.rank]

    @property
    def live(self) -> list[Beam]:
        return [] if self.stopped else [beam for beam in self.beams if not beam.finished]

    @property
    def best(self) -> Beam:
        return self.best_first(self.beams)[0]

    @property
    def found(self) -> bool:
        """Whether the pool holds what ends the rounds of a block."""
        return any(self.method.accepts(beam, self.config) for beam in self.pool)

    def best_first(self, beams: Sequence[Beam]) -> list[Beam]:
        return sorted(beams, key=lambda beam: self.rank.key(beam, self.config))

    def chosen(self) -> list[Beam]:
        """Return the best of the pool that may be kept: under a safety-first rank those that are
        safe, if there are any, else all.

        What the critic alone rejects is ranked last, and fills the places that what it lets through
        leaves free.
        """
        safe = (
            [beam for beam in self.pool if beam.safe(self.config)] if self.rank.safety_first else []
        )
        return self.best_first(safe or self.pool)[: self.config.keep]

    def keep(self) -> None:
        """Go on from the best of the pool; with no safe one in an absorbing accounting a gated
        search has failed.
        """
        chosen = self.chosen()
        if self.gated and self.config.accounting not in SIGNED and not chosen[0].safe(self.config):
            self.fail(self.why(self.pool))
        self.beams = chosen

    def why(self, pool: Sequence[Beam]) -> str:
        return "scorer_error" if any(beam.broken for beam in pool) else "exhausted"

    def fail(self, reason: str) -> None:
        """Mark the search as failed, once; what is found later never counts as an answer."""
        if not self.failure:
            self.failure, self.certified = reason, self.best
            self.stopped = not self.config.probe_fail_open

    def note(
        self, number: int, round_: int, beams: list[Beam], block: Block, mine: list[int]
    ) -> None:
        """Count the work of a round and what it found; `mine` are the candidates of this prompt in
        the block.
        """
        if self.failure:
            return
        log_p = [x for c in mine for x in block.log_p[c]]
        log_q = [x for c in mine for x in block.log_q[c]]
        finals = [beam for beam in beams if beam.finished]
        self.counts.samples_drawn += len(mine)
        self.counts.policy_tokens += len(log_p)
        self.counts.forward_tokens += sum(block.encoded[c] for c in mine)
        self.counts.rounds_used += 1
        self.counts.near_ties += sum(block.near_ties[c] for c in mine)
        self.finals += [self.scores(beam) for beam in finals]
        self.trace.append(
            {
                "block": number,
                "round": round_,
                "drawn": len(mine),
                "safe": sum(b.passes(self.config) for b in beams) if self.rank.cost else None,
                "finals": len(finals),
                "safe_finals": sum(b.safe(self.config) for b in finals) if self.rank.cost else None,
                "kl": (sum(log_q) - sum(log_p)) / len(mine),
                "perplexity": _perplexity(log_p),
            }
        )

    def scores(self, beam: Beam) -> list[float | None]:
        """Return reward and cost of a finished candidate as far as they were asked and known."""
        asked = (
            self.rank.reward and (not self.rank.safety_first or beam.passes(self.config)),
            self.rank.cost,
        )
        return [
            x if known and math.isfinite(x) else None
            for x, known in zip((beam.reward, beam.cost), asked, strict=True)
        ]

    def emission(self, policy: Policy, grid: int) -> Emission:
        """Return what the search would emit, before the gate; `grid` is the block size that all
        methods are measured on.
        """
        best = self.best
        if self.gated and not self.failure and not best.safe(self.config):
            self.fail("dead_end" if self.config.accounting in SIGNED else self.why([best]))
        if not self.failure:
            # a method without a gate is judged by its final cost alone; in paper mode the path
            # counts too
            safe = best.safe(self.config) or not self.method.gated
            otherwise = (
                ("final_check" if safe else self.why(self.pool))
                if self.method.gated
                else "over_budget"
            )
            return _written(best, policy, grid, safe=safe, otherwise=otherwise)
        if self.config.on_failure == "truncate" and self.certified.tokens:
            safe = self.certified.safe(
                self.config
            )  # under signed accounting the failure may only show at the end
            return _written(
                self.certified,
                policy,
                grid,
                reason="truncated",
                otherwise=self.failure,
                finished=False,
                safe=safe,
            )
        return Emission(None, reason=self.failure)


def _perplexity(log_p: Sequence[float]) -> float:
    """Return exp of the mean of -log p; infinite where that exceeds every float, as for tokens that
    the policy all but excludes.
    """
    mean = -sum(log_p) / len(log_p)
    return math.exp(mean) if mean < math.log(sys.float_info.max) else math.inf


def _written(beam: Beam, policy: Policy, grid: int, **more) -> Emission:
    """Return a beam as a text to emit, with the character offsets of its block ends."""
    n = len(beam.tokens)
    offsets = (
        [len(policy.text(beam.tokens[:k])) for k in counts]
        for counts in (beam.ends, [*range(grid, n, grid), n])
    )
    ends, grid_ends = offsets
    fields = {
        "text": beam.text,
        "status": "verified_safe",
        "finished": beam.finished,
        "n_tokens": n,
        "tokens": beam.tokens,
    }
    return Emission(ends=ends, grid=grid_ends, **(fields | more))
