"""The verdict on an answer: the final check of its text, and the metrics that are reported of it.

The final check scores the exact text with an uncached cost model before the text is emitted. It
fails closed: a guarded method does not emit what cannot be scored.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pkgutil import resolve_name
from typing import Any

import numpy as np
import numpy.typing as npt

from .beams import Beam
from .budget import trace
from .config import SearchConfig
from .errors import ScorerError
from .policy import Policy, Prompt
from .scorers import Scorer, Scores, Scoring, checked_score


@dataclass
class Counts:
    """Work done for one prompt; scoring the metrics afterwards does not count.

    Attributes
    ----------
    samples_drawn : int
        Continuations sampled.
    policy_tokens : int
        Tokens sampled; of a token-wise method, tokens considered.
    forward_tokens : int
        Tokens that the policy has read, those of the prompt once: the prefix cache reads no prefix
        twice.
    scorer_tokens : int
        Policy tokens of the texts given to scorers, before the cache by text.
    scorer_calls : int
        Texts given to scorers, before the cache by text; one text given to two scorers counts
        twice.
    rounds_used : int
        Rounds over all blocks.
    near_ties : int
        Sampled tokens that might differ in another batch, see `igcore.engine.sampling`.
    """

    samples_drawn: int = 0
    policy_tokens: int = 0
    forward_tokens: int = 0
    scorer_tokens: int = 0
    scorer_calls: int = 0
    rounds_used: int = 0
    near_ties: int = 0


@dataclass
class Emission:
    """A text that may be emitted.

    Attributes
    ----------
    text : str or None
        None: nothing at all.
    status, reason : str
        Status and reason of the response when the text passes the final check.
    otherwise : str
        The reason when it does not pass.
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
    cost : float
        U_K in the final check; NaN before it, or when the scorer failed.
    check_calls, check_tokens : int
        Texts that the final check scored until this one was emitted, and the policy tokens in them.
    """

    text: str | None
    status: str = "abstained"
    reason: str = ""
    otherwise: str = "final_check"
    ends: list[int] = field(default_factory=list)
    grid: list[int] = field(default_factory=list)
    n_tokens: int = 0
    tokens: list[int] = field(default_factory=list)
    likelihood: float | None = None
    finished: bool = False
    safe: bool = True
    cost: float = math.nan
    check_calls: int = 0
    check_tokens: int = 0


@dataclass
class Response:
    """The answer to one prompt, with everything needed to check it again.

    Attributes
    ----------
    status : str
        ``verified_safe``: the emitted text passed the final check; ``abstained``: no text of the
        policy was emitted; ``unverified_unsafe``: the text was emitted although it fails the check
        (methods and modes that never abstain).
    reason : str
        Why, when the status is not ``verified_safe``: ``exhausted`` (all rounds used, no safe
        candidate), ``dead_end`` (nothing left to continue), ``final_check`` (the final check
        disagreed with the search), ``scorer_error`` (the scorer failed on candidates that might
        have been safe), ``over_budget`` (a method that never abstains). ``truncated`` marks a
        certified prefix.
    cost, peak_cost : float or None
        U_K of the emitted text, and the maximum of U over the common grid of prefixes; higher is
        worse.
    reward : float or None
        Reward of the emitted text; higher is better. None when nothing was emitted. Without a
        reward model it is the mean log-probability of the tokens (nats), None for a refusal.
    fail_open_cost : float or None
        Cost of what would have been emitted without abstention; None when the search stopped before
        that was known.
    z_trace : list of float
        z_0, z_1, ... over the method's own block ends.
    block_ends, grid_ends : list of int
        Character offsets in `text`, see `Emission`.
    trace : list of dict
        One entry per block and round: block, round, drawn (samples), safe (samples within budget
        and, under a critic, let through), finals (finished samples), safe_finals (finished samples
        within budget), kl (of the penalised policy from the reference, a Monte Carlo estimate in
        nats per block) and perplexity (under the reference, per token). safe and safe_finals are
        None under a method that searches without the cost.
    finals : list of [reward, cost]
        Of every candidate that finished during the search, in the order of sampling; None where it
        was not computed or the scorer failed. Sample i is the same for every ``n_samples`` above i,
        so the first n are the samples of Best-of-n.
    generate_s, cost_s, reward_s, critic_s : float
        Seconds spent sampling, in the two scorers and in the critic: the group's total divided by
        its prompts.
    tokens : list of int
        The sampled tokens of `text`, an end token included; empty for a refusal, which the policy
        did not write.
    guard : Guard
        What answered, with the method and the settings that it ran under.
    candidates : list of igcore.watch.record.Node
        Every candidate of the search, when it was recorded.
    """

    prompt_id: str
    prompt: str
    set_name: str
    text: str | None
    status: str
    reason: str
    finished: bool
    n_tokens: int
    reward: float | None
    cost: float | None
    peak_cost: float | None
    fail_open_cost: float | None
    z_trace: list[float]
    block_ends: list[int]
    grid_ends: list[int]
    counts: Counts
    trace: list[dict[str, Any]]
    finals: list[list[float | None]]
    generate_s: float
    cost_s: float
    reward_s: float
    critic_s: float
    tokens: list[int] = field(default_factory=list)
    guard: Any = field(default=None, repr=False, compare=False)
    candidates: list[Any] = field(default_factory=list, repr=False, compare=False)

    def tree(self, masked: bool = True) -> Any:
        """Return every candidate of a recorded search as a picture, see `igcore.watch.tree.Tree`.

        Raises
        ------
        ParameterError
            When the search was not recorded.
        """
        return resolve_name("igcore.watch.tree:Tree").of(self, masked)

    def _repr_html_(self) -> str:
        html: str = resolve_name("igcore.watch.html:answer_html")(self)
        return html

    @property
    def z(self) -> float | None:
        """The safety state at the end, in units of the budget; None when nothing was emitted."""
        return self.z_trace[-1] if self.z_trace else None


def within(cost: Any, config: SearchConfig) -> Any:
    """Say whether a final cost U_K, or each of an array, is within budget; never for NaN."""
    # not `is_safe`, which needs a path: this is about one text; any comparison with NaN is False
    return cost < config.budget if config.strict else cost <= config.budget


def rescore(
    scorer: Scorer, prompts: Sequence[Prompt], texts: Sequence[str], config: SearchConfig
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """Score exact texts again with an uncached scorer, and say which are within budget.

    Returns
    -------
    costs : ndarray (n,)
        U_K; NaN where the scorer failed.
    passed : ndarray (n,) of bool
        Whether the cost is within budget; never for NaN.
    """
    costs = checked_score(scorer, [p.text for p in prompts], texts, [True] * len(texts))
    return costs, within(costs, config)


def written(beam: Beam, policy: Policy, grid: int) -> Emission:
    """Return a beam as a text to emit, with the character offsets of its block ends.

    Parameters
    ----------
    grid : int
        Policy tokens between the prefixes at which every method is measured.
    """
    n = len(beam.tokens)
    on_grid = [*range(grid, n, grid), n]  # tokens at the grid's ends, the whole text last
    return Emission(
        text=beam.text,
        status="verified_safe",  # unless the final check disagrees
        # decoding a prefix of the tokens gives a prefix of the text, see `Policy.text`
        ends=[len(policy.text(beam.tokens[:k])) for k in beam.ends],
        grid=[len(policy.text(beam.tokens[:k])) for k in on_grid],
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
    abstains: bool,
) -> list[Emission]:
    """Return what is emitted for each prompt: the proposed text if it passes, else a fallback.

    Parameters
    ----------
    scoring : Scoring
        Its uncached cost model decides. If the search scored with a KV cache, the path to a text is
        checked again as well, because in bfloat16 cached and uncached scores differ.
    proposals : sequence of Emission
        One per prompt. Text None means that the search has already failed, for the reason given.
    abstains : bool
        Whether a text that fails the check is replaced by a fallback; if not, it is emitted and
        marked.

    Raises
    ------
    ScorerError
        When the cost model gives no finite number for any of several texts.
    """
    # a baseline is judged by its final cost alone, so its path is not read again
    scorer, path = scoring.final_cost, scoring.path_cost if abstains else None
    out = list(proposals)
    scored = [i for i, emission in enumerate(proposals) if emission.text is not None]
    texts = [emission.text for emission in proposals if emission.text is not None]
    costs, passed = rescore(scorer, [prompts[i] for i in scored], texts, config)
    # one failure may be the text's; when every text fails, the scorer is broken
    if len(scored) > 1 and np.isnan(costs).all():
        raise ScorerError(
            f"scorer {scorer.name!r} returned no finite number for any of the {len(scored)} texts "
            "to be emitted"
        )
    for i, cost, ok in zip(scored, costs, passed, strict=True):
        n_tokens = proposals[i].n_tokens
        out[i] = replace(proposals[i], cost=float(cost), check_calls=1, check_tokens=n_tokens)
        # all must agree: the final score, the search and, where that used a KV cache, the path
        if ok and out[i].safe:
            if path is None or _path_within_budget(path, prompts[i], out[i], config):
                continue
        reason = "scorer_error" if math.isnan(cost) else out[i].otherwise
        if abstains:
            # a new emission, so that nothing of the rejected text can leak into the response
            out[i] = Emission(None, reason=reason, check_calls=1, check_tokens=n_tokens)
        else:
            out[i] = replace(out[i], status="unverified_unsafe", reason=reason)
    return [
        emission if emission.text is not None else _fallback(scorer, prompt, emission, config)
        for prompt, emission in zip(prompts, out, strict=True)
    ]


def _path_within_budget(
    scorer: Scores, prompt: Prompt, emission: Emission, config: SearchConfig
) -> bool:
    """Say whether a text is within budget when its block ends are scored again without a cache."""
    costs = _ends_before(scorer, [prompt], [emission])
    z = _z(
        [costs[0, end] for end in emission.ends[:-1]] + [emission.cost], emission.n_tokens, config
    )[-1]
    # z of the end is enough: with C >= 0 an overspent budget is never repaid; NaN fails
    return z > 0 if config.strict else z >= 0


def _ends_before(
    cost: Scores, prompts: Sequence[Prompt], emissions: Sequence[Emission]
) -> dict[tuple[int, int], float]:
    """Return U of each text at its block ends and the grid's, by (number of the text, offset).

    The end of the text itself is left out: the final check has scored it.
    """
    # one call for all texts, so that the scorer can batch them
    spans, texts = [], []
    for i, emission in enumerate(emissions):
        if emission.text is not None:
            ends = sorted({*emission.ends[:-1], *emission.grid[:-1]})
            spans += [(i, end) for end in ends]
            texts += [emission.text[:end] for end in ends]
    costs = cost.score([prompts[i].text for i, _ in spans], texts, [False] * len(spans))
    return dict(zip(spans, map(float, costs), strict=True))


def _fallback(scorer: Scorer, prompt: Prompt, failed: Emission, config: SearchConfig) -> Emission:
    """Return the refusal if it passes the final check, else the empty text, else nothing."""
    calls = failed.check_calls
    # a refusal is text, too, and a cost model may dislike it
    for text in (config.refusal, ""):
        calls += 1
        (cost,), (ok,) = rescore(scorer, [prompt], [text], config)
        if ok:
            ends = [len(text)]
            return replace(
                failed, text=text, ends=ends, grid=ends, cost=float(cost), check_calls=calls
            )
    return replace(failed, check_calls=calls)


@dataclass
class Measurement:
    """The metrics of one emitted text; the fields are those of `Response`."""

    reward: float | None = None
    cost: float | None = None
    peak_cost: float | None = None
    z_trace: list[float] = field(default_factory=list)


def measure(
    emissions: Sequence[Emission],
    prompts: Sequence[Prompt],
    reward: Scores | None,
    cost: Scores,
    config: SearchConfig,
) -> list[Measurement]:
    """Measure emitted texts: reward, final cost, peak cost on the common grid, and z.

    Without a reward model the reward is the likelihood of the text.

    Parameters
    ----------
    config : SearchConfig
        The method's effective settings, for the time index of its blocks.
    """
    kept = [i for i, emission in enumerate(emissions) if emission.text is not None]
    u = _ends_before(cost, prompts, emissions)
    rewards = [emissions[i].likelihood for i in kept]
    if reward is not None:
        texts = [emission.text for emission in emissions if emission.text is not None]
        rewards = reward.score([prompts[i].text for i in kept], texts, [True] * len(kept)).tolist()
    out = [Measurement() for _ in emissions]
    for i, r in zip(kept, rewards, strict=True):
        e = emissions[i]
        # the last score is the one that decided in the final check
        own, grid = ([u[i, end] for end in ends[:-1]] + [e.cost] for ends in (e.ends, e.grid))
        out[i] = Measurement(
            r, e.cost, float(np.max(grid)), _z(own, e.n_tokens, config)
        )  # np.max keeps a NaN
    return out


def _z(scores: Sequence[float], n_tokens: int, config: SearchConfig) -> list[float]:
    """Return z_0, z_1, ... given the scores at the block ends of a text of `n_tokens`."""
    # time index of each block's last token; a refusal has 0 policy tokens and counts as one
    ends = [min((k + 1) * config.block_size, n_tokens or 1) - 1 for k in range(len(scores))]
    return [
        float(s.z)
        for s in trace(scores, config.budget, config.accounting, config.gamma_safety, ends)
    ]
