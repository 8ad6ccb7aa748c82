"""Accounting of a search: samples, scorer calls, tokens, rounds and seconds."""

import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from .beams import Beam
from .candidates import Candidate, PromptSearch
from .config import SearchConfig
from .methods import Method
from .prompt import Prompt
from .response import Counts
from .scoring import tokens_in
from .verdict import Emission

OnBlock = Callable[[Prompt, Sequence[Beam]], None]


@dataclass
class Report:
    """The work done for one prompt; the fields are those of `Response`."""

    counts: Counts = field(default_factory=Counts)
    trace: list[dict[str, float | None]] = field(default_factory=list)  # one per round of a block
    # [reward, cost] of every finished candidate, not only of the one that is emitted
    finals: list[list[float | None]] = field(default_factory=list)


@dataclass
class Work:
    """Observes a search: counts its work, traces its rounds and measures its time.

    It decides nothing. Work that a search does after it has failed (``probe_fail_open``) is not
    counted; its seconds are.

    Attributes
    ----------
    reports : dict of PromptSearch to Report
    seconds : dict of str to float
        By part: ``generate``, ``cost``, ``reward`` and ``critic``.
    recorder : igcore.watch.record.Recorder or None
        Stores the candidates themselves.
    """

    method: Method
    config: SearchConfig
    on_block: OnBlock | None = None
    recorder: Any = None

    def __post_init__(self) -> None:
        # keyed by the identity of the search: two prompts may be equal
        self.reports: dict[PromptSearch, Report] = defaultdict(Report)
        self.seconds = {"generate": 0.0, "cost": 0.0, "reward": 0.0, "critic": 0.0}

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the seconds of a with-block to a part."""
        began = time.perf_counter()
        yield
        self.seconds[part] += time.perf_counter() - began

    def saw_read(self, search: PromptSearch, n_tokens: int) -> None:
        """Count tokens that the policy has read outside of `sample_block`."""
        self.reports[search].counts.forward_tokens += n_tokens

    def saw_scored(self, candidates: Sequence[Candidate], ends: Sequence[Sequence[int]]) -> None:
        """Count texts given to a scorer, before its cache: each candidate's, cut at these ends."""
        # before the cache, because what it already holds depends on the other prompts and methods
        for candidate, cuts in zip(candidates, ends, strict=True):
            if not candidate.search.failure:
                counts, beam = self.reports[candidate.search].counts, candidate.beam
                counts.scorer_calls += len(cuts)
                counts.scorer_tokens += tokens_in(len(beam.tokens), len(beam.text), cuts)

    def saw_round(self, block: int, round_: int, candidates: Sequence[Candidate]) -> None:
        """Count and trace one round of one block."""
        by_search: dict[PromptSearch, list[Candidate]] = defaultdict(list)
        for candidate in candidates:
            by_search[candidate.search].append(candidate)
        for search, own in by_search.items():
            # a failed search goes on only to record what `paper` would emit: not its own work
            if not search.failure:
                self._note(self.reports[search], block, round_, own)
        if self.recorder:
            self.recorder.saw_round(block, round_, candidates)

    def _note(self, report: Report, block: int, round_: int, own: Sequence[Candidate]) -> None:
        """Add one prompt's candidates of a round to its report."""
        # of all tokens of the round together: longer candidates weigh more in the perplexity
        log_p = [x for candidate in own for x in candidate.log_p]
        log_q = [x for candidate in own for x in candidate.log_q]
        beams = [candidate.beam for candidate in own]
        finals = [beam for beam in beams if beam.finished]
        # tokens sampled and tokens read differ: the last tokens of a response are never read
        report.counts.samples_drawn += len(own)
        report.counts.policy_tokens += len(log_p)
        report.counts.forward_tokens += sum(candidate.encoded for candidate in own)
        report.counts.rounds_used += 1
        report.counts.near_ties += sum(candidate.near_ties for candidate in own)
        report.finals += [self._final_scores(beam) for beam in finals]
        passed = sum(beam.passes(self.config) for beam in beams)
        safe_finals = sum(beam.safe(self.config) for beam in finals)
        report.trace.append(
            {
                "block": block,
                "round": round_,
                "drawn": len(own),
                # without a cost nothing is known about safety, and 0 would look like knowledge
                "safe": passed if self.method.cost else None,
                "finals": len(finals),
                "safe_finals": safe_finals if self.method.cost else None,
                # the samples come from q, so the mean of log q - log p over blocks estimates
                # KL(q || p) in nats per block: how far sampling moved the policy
                "kl": (sum(log_q) - sum(log_p)) / len(own),
                "perplexity": perplexity(log_p),
            }
        )

    def _final_scores(self, beam: Beam) -> list[float | None]:
        """Return reward and cost of a finished candidate; None for what was not computed."""
        # a safety-first method scores the reward of passing candidates only, see `ask_reward`
        has_reward = self.method.reward and (
            not self.method.safety_first or beam.passes(self.config)
        )
        pairs = ((beam.reward, has_reward), (beam.cost, self.method.cost))
        # None also where a scorer failed: these records are JSON, which has no infinity
        return [x if known and math.isfinite(x) else None for x, known in pairs]

    def saw_block(self, search: PromptSearch, shown: bool = True) -> None:
        """Call `on_block` with the beams kept after a block, unless the search may leave them."""
        if self.recorder:
            self.recorder.saw_block(search)
        # not after a failure: a caller that shows these beams would show unsafe text
        if self.on_block and shown and not search.failure:
            self.on_block(search.prompt, search.beams)

    def saw_check(self, search: PromptSearch, emission: Emission) -> None:
        """Count the final check of a guarded search."""
        # a method that always emits would run without the check, which only labels its text
        if search.abstains:
            counts = self.reports[search].counts
            counts.scorer_calls += emission.check_calls
            counts.scorer_tokens += emission.check_tokens


def perplexity(log_p: Sequence[float]) -> float:
    """Return exp of the mean of -log p; infinite where that exceeds every float."""
    mean = -sum(log_p) / len(log_p)
    # math.exp would raise for tokens that the policy all but excludes; NaN stays NaN
    return math.inf if mean >= math.log(sys.float_info.max) else math.exp(mean)
