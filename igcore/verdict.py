"""The final check: is a text within budget at every check, by fresh and uncached scores?

The final check, truncated answers, the streamer and the verification of records all call `judge`.
It asks an uncached cost model for one text at a time, and fails closed: a text that cannot be
scored is not within budget.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from .beams import Beam
from .budget import SafetyState, is_safe, trace
from .config import SearchConfig
from .contract import Contract, Scoring
from .policy import Policy
from .prompt import Prompt
from .scorers import Scorer, keeps_cache, reads_tokens, uncached
from .scoring import Cached, Tally, checked_score, checked_tokens, tokens_in, word_ends


@dataclass(frozen=True)
class Verdict:
    """The result of judging a text by fresh scores.

    Attributes
    ----------
    cost : float
        U_K of the whole text; higher is worse, NaN where the scorer failed.
    worst : list of float
        The highest cost at the checks of each block; NaN where the scorer failed at one of them.
    cuts : dict of int to float
        Number of characters -> the cost of the text cut there, where a cut was scored.
    contract : Contract
        The contract of the scorer; its spread includes the scores of this text.
    within : bool
        Whether the whole text is within budget, with the spread added to its cost.
    passed : bool
        Whether that holds at every check: ``verified_safe`` of a guarded method.
    calls, tokens : int
        Texts scored, and the policy tokens in them.
    """

    cost: float
    worst: list[float]
    cuts: dict[int, float]
    contract: Contract
    within: bool
    passed: bool
    calls: int
    tokens: int

    def failure_reason(self, default: str, at_end: bool = False) -> str:
        """Return the reason why a text failed; `default` if it is not the scorer.

        With `at_end` only the score of the whole text counts.
        """
        # a sum is NaN if one of the costs is; there is no +infinity among them, which could give
        # inf - inf
        if math.isnan(self.cost if at_end else sum(self.worst)):
            return "scorer_error"
        return "scorer_contract" if self.contract.problem else default


@dataclass
class Emission:
    """A text that may be emitted.

    Attributes
    ----------
    text : str or None
        None: nothing at all.
    status, reason : str
        Status and reason of the response when the text passes the final check.
    rejection : str
        The reason of the response when the final check rejects the text.
    ends : list of int
        Character offsets of the ends of the method's own blocks; the last is the length of the
        text.
    grid : list of int
        The same on the grid that all methods share: every ``config.block_size`` policy tokens.
    n_tokens : int
        Policy tokens of the text; 0 for a refusal, which the policy did not write.
    tokens : list of int
        These tokens; an end token is among them.
    likelihood : float or None
        Mean log-probability of these tokens under the policy, in nats; None for a refusal.
    finished : bool
        Whether the policy reached its end token or the maximum length.
    safe : bool
        What the search itself concludes. The final check can reject a text that the search calls
        safe, and never the reverse.
    verdict : Verdict or None
        Of the final check; None before it, and without a text.
    check_calls, check_tokens : int
        Texts that the final check scored until this one was emitted, and the policy tokens in them.
    """

    text: str | None
    status: str = "abstained"
    reason: str = ""
    rejection: str = "final_check"
    ends: list[int] = field(default_factory=list)
    grid: list[int] = field(default_factory=list)
    n_tokens: int = 0
    tokens: list[int] = field(default_factory=list)
    likelihood: float | None = None
    finished: bool = False
    safe: bool = True
    verdict: Verdict | None = None
    check_calls: int = 0
    check_tokens: int = 0


# --- the verdict ----------------------------------------------------------------------------------


def within(cost: Any, config: SearchConfig) -> Any:
    """True where the final cost U_K is within budget; False for NaN."""
    # not `is_safe`, which needs a path: this is about one text. A comparison with NaN is False, so
    # a failed scorer is never within budget; `not cost > budget` would let it pass
    return cost < config.budget if config.strict else cost <= config.budget


def judge(
    contract: Contract,
    prompt: str,
    emission: Emission,
    config: SearchConfig,
    earlier: Mapping[tuple[str, str, bool], float] | None = None,
    finished: bool = True,
    shown: Mapping[int, float] | None = None,
) -> Verdict:
    """Judge a text by fresh, uncached scores.

    A scorer without a KV cache is asked for one text at a time. A language model scores the text
    and all its cuts in one fresh pass, and the whole text once more by itself.

    Parameters
    ----------
    contract : Contract
        The contract of the cost model.
    emission : Emission
        Only its text, block ends and number of tokens are used.
    earlier : mapping of (prompt, text, finished) to float, optional
        Scores from the search. If they differ from the fresh ones, the spread grows.
    finished : bool
        Whether the text is a complete answer, or the part that a streamer has shown.
    shown : mapping of int to float, optional
        Number of characters -> fresh cost of the text cut there, from the verdict on a part that
        has been shown. It is charged again, and not scored again.
    """
    # 1. fresh scores. Those of the search may come from a KV cache and differ in their last bits;
    # only an uncached score decides what is emitted
    text, scorer, tally = emission.text or "", uncached(contract.scorer), contract.tally
    # by itself, so that others can compute it again
    (cost,) = checked_score(scorer, [prompt], [text], [finished], tally).tolist()
    cuts: dict[int, float] = {}
    inside: dict[int, float] = {}  # offset -> highest cost of the text cut there
    one_pass = config.checks == "token" and reads_tokens(scorer)
    if one_pass:
        ((ends, costs),) = checked_tokens(scorer, [prompt], [text], [0], tally)
        again = costs[-1]
        for end, token_cost in zip(ends[:-1], costs, strict=False):
            # several tokens may end at one character (the bytes of an emoji): keep the worst
            inside[end] = float(np.max([token_cost, inside.get(end, -math.inf)]))  # keeps a NaN
    else:
        new = [at for at in _places(emission, config) if at not in (shown or {})]
        *costs, again = _costs_at(scorer, prompt, text, [*new, len(text)], finished, tally)
        cuts = dict(zip(new, costs, strict=True))
        inside = {**(shown or {}), **cuts}

    # 2. the spread: a cost that is a function of the text gives the same number every time, by
    # itself, with its cuts, and in the search
    pairs = [(cost, again)]
    # the search does not store scores of single tokens by text, so `one_pass` has none to compare
    for end, fresh in ({} if one_pass else cuts | {len(text): cost}).items():
        # only the whole text was scored as finished
        searched = (earlier or {}).get((prompt, text[:end], finished and end == len(text)))
        pairs += [] if searched is None else [(fresh, searched)]
    first, second = zip(*pairs, strict=True)
    contract = contract.compared(first, second, "the call: asked in the search and once more,")

    # 3. charge the path as the search did, with the spread added to every score as a safety margin
    worst = _worst_by_block(emission.ends, inside, cost)
    charged = [u + contract.spread for u in worst]
    path = _states(charged, emission.n_tokens, config)[-1]
    is_within = bool(within(cost + contract.spread, config)) and not contract.problem
    return Verdict(
        cost=cost,
        worst=worst,
        cuts=cuts,
        contract=contract,
        within=is_within,
        # with C >= 0 an overspent budget is never repaid, so the last state decides for all blocks
        passed=is_within and is_safe(path, config.strict),
        calls=len(cuts) + 2,  # the whole text twice
        tokens=tokens_in(emission.n_tokens, len(text), [*cuts, len(text), len(text)]),
    )


def _places(emission: Emission, config: SearchConfig) -> list[int]:
    """Return the character offsets at which a text is cut for its checks."""
    if config.accounting == "terminal":  # only whole answers have a cost
        return []
    # `token` comes here, too, if the scorer cannot score tokens: it then checks words
    words = [] if config.checks == "block" else word_ends(emission.text or "")
    # block ends as well, so that word checks contain the block checks; the end is scored by `judge`
    return sorted({*emission.ends[:-1], *words})


def _costs_at(
    scorer: Scorer, prompt: str, text: str, places: Sequence[int], finished: bool, tally: Tally
) -> list[float]:
    """Return the cost of a text cut at each place, the whole text last; NaN where it failed."""
    # only the whole text may be complete
    parts = [(text[:at], False) for at in places[:-1]] + [(text, finished)]
    # one text per call, because a batch may change the last bits. Only a language model scores the
    # cuts together, in one fresh pass: one pass per cut would be slow
    groups = [parts] if keeps_cache(scorer) else [[part] for part in parts]
    costs: list[float] = []
    for group in groups:
        cut, ended = zip(*group, strict=True)
        costs += checked_score(scorer, [prompt] * len(cut), cut, ended, tally).tolist()
    return costs


def _worst_by_block(ends: Sequence[int], inside: Mapping[int, float], final: float) -> list[float]:
    """Return the highest cost at the checks of each block, NaN where one is; the last block last.

    A block without a check of its own has the cost at its end, or -infinity.
    """
    worst, start = [], 0
    for end in ends[:-1]:
        costs = [cost for at, cost in inside.items() if start < at <= end]
        # a block may add no character (half an emoji): it then ends where the last one did
        costs = costs or [inside.get(end, -math.inf)]
        worst.append(float(np.max(costs)))  # np.max keeps a NaN, which `max` may lose
        start = end
    rest = [cost for at, cost in inside.items() if at > start]
    return [*worst, float(np.max([*rest, final]))]


# --- the final check ------------------------------------------------------------------------------


def emission_of(beam: Beam, policy: Policy, grid: int) -> Emission:
    """Return a beam as a text to emit, with the character offsets of its block ends.

    Every method is measured at the prefixes of `grid`, 2 `grid`, ... policy tokens.
    """
    n = len(beam.tokens)
    # one grid for all methods: Best-of-N checks once and would look safer on its own block ends
    on_grid = [*range(grid, n, grid), n]  # tokens at the grid's ends, the whole text last
    return Emission(
        text=beam.text,
        status="verified_safe",  # unless the final check disagrees
        # decoding a prefix of the tokens gives a prefix of the text, see `Policy.text`
        # and the text of the last token may go on after a stop string
        ends=[min(len(policy.text(beam.tokens[:k])), len(beam.text)) for k in beam.ends],
        grid=[min(len(policy.text(beam.tokens[:k])), len(beam.text)) for k in on_grid],
        n_tokens=n,
        tokens=beam.tokens,
        likelihood=beam.likelihood if beam.tokens else None,
        finished=beam.finished,
    )


def final_check(
    scoring: Scoring,
    prompts: Sequence[Prompt],
    proposals: Sequence[Emission],
    config: SearchConfig,
    guarded: bool,
) -> list[Emission]:
    """Return the answer to each prompt: the proposed text if it passes, else a fallback.

    Parameters
    ----------
    proposals : sequence of Emission
        One per prompt. Text None means that the search has already failed, for the reason given.
    guarded : bool
        Whether the method keeps within budget at every check. Its text must pass them all; a text
        that fails is replaced by a fallback, except in mode ``paper``. The text of a baseline is
        always emitted, and marked by its final cost alone.
    """
    abstains = guarded and config.on_failure != "paper"
    earlier = scoring.search["cost"].known
    out = []
    for prompt, proposed in zip(prompts, proposals, strict=True):
        emission = proposed
        if emission.text is not None:
            verdict = judge(scoring.contract, prompt.text, emission, config, earlier)
            emission = replace(
                emission, verdict=verdict, check_calls=verdict.calls, check_tokens=verdict.tokens
            )
            # both must agree: the final check can reject what the search calls safe, and never
            # pass what the search calls unsafe
            if not ((verdict.passed if guarded else verdict.within) and emission.safe):
                reason = verdict.failure_reason(emission.rejection, at_end=not guarded)
                emission = _failed(emission, reason, abstains)
        if emission.text is None:
            emission = _fallback(scoring.contract, prompt, emission, config)
        out.append(emission)
    return out


def _failed(emission: Emission, reason: str, abstains: bool) -> Emission:
    """Return the fallback for a text that fails the final check."""
    if not abstains:
        return replace(emission, status="unverified_unsafe", reason=reason)
    # a new emission, so that nothing of the rejected text can leak into the response
    return Emission(
        None, reason=reason, check_calls=emission.check_calls, check_tokens=emission.check_tokens
    )


def _fallback(
    contract: Contract, prompt: Prompt, failed: Emission, config: SearchConfig
) -> Emission:
    """Return the refusal if it passes the final check, else the empty text, else nothing."""
    calls = failed.check_calls
    # no text is exempt: a cost model may score a refusal, or even the empty text, over budget
    for text in (config.refusal, ""):
        # one block of its own: the block ends of the rejected text do not apply
        refusal = replace(failed, text=text, ends=[len(text)], grid=[len(text)])
        verdict = judge(contract, prompt.text, refusal, config)
        calls += verdict.calls
        if verdict.passed:
            return replace(refusal, verdict=verdict, check_calls=calls)
    return replace(failed, check_calls=calls)


# --- what is reported -----------------------------------------------------------------------------


def measure(
    emissions: Sequence[Emission],
    prompts: Sequence[Prompt],
    reward: Cached | None,
    cost: Scorer,
    config: SearchConfig,
) -> list[dict[str, Any]]:
    """Measure judged texts: reward, final cost, peak cost on the common grid and at words, and z.

    Without a reward model the reward is the likelihood of the text.

    Parameters
    ----------
    cost : Scorer
        An uncached cost model.
    config : SearchConfig
        The method's effective settings, for the time index of its blocks.

    Returns
    -------
    list of dict
        For each emission the fields of `igcore.Response` that are measured; none without a text.
    """
    kept = [i for i, emission in enumerate(emissions) if emission.text is not None]
    rewards = [emissions[i].likelihood for i in kept]
    if reward is not None:
        texts = [emission.text for emission in emissions if emission.text is not None]
        rewards = reward.score([prompts[i].text for i in kept], texts, [True] * len(kept)).tolist()
    out: list[dict[str, Any]] = [{} for _ in emissions]
    for i, r in zip(kept, rewards, strict=True):
        emission, verdict = emissions[i], emissions[i].verdict
        assert verdict is not None and emission.text is not None  # the final check saw it
        # the final check has scored some of these cuts; the metrics need the same ones of
        # every method
        wanted = {*emission.grid[:-1], *word_ends(emission.text)}
        new = sorted(wanted - verdict.cuts.keys())
        cut = [emission.text[:at] for at in new]
        # no tally: a failure in a metric must not stop a run
        scores = checked_score(cost, [prompts[i].text] * len(cut), cut, [False] * len(cut))
        u = verdict.cuts | dict(zip(new, scores.tolist(), strict=True))
        on_grid = [*(u[at] for at in emission.grid[:-1]), verdict.cost]
        states = _states(verdict.worst, emission.n_tokens, config)
        out[i] = {
            "reward": r,
            "cost": verdict.cost,
            "peak_cost": float(np.max(on_grid)),  # np.max keeps a NaN
            "word_peak_cost": float(np.max([*u.values(), verdict.cost])),
            "z_trace": [float(state.z) for state in states],
            "spread": verdict.contract.spread,
            "contract": verdict.contract.problem or "kept",
        }
    return out


def _states(worst: Sequence[float], n_tokens: int, config: SearchConfig) -> list[SafetyState]:
    """Return the safety states z_0, z_1, ... after each block, given the highest cost of each."""
    # time index of each block's last token, as in the search, or gamma^t would differ; a refusal
    # has 0 policy tokens and counts as one
    ends = [min((k + 1) * config.block_size, n_tokens or 1) - 1 for k in range(len(worst))]
    return trace(worst, config.budget, config.accounting, config.gamma_safety, ends)
