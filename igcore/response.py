"""An answer, with the counts of its work and everything needed to check it again."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from operator import methodcaller
from typing import Any, Self

from .catalog import room


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
        twice. The second reading of a sequence after a near tie is left out.
    scorer_tokens : int
        Policy tokens of the texts given to scorers, before the cache by text.
    scorer_calls : int
        Texts given to scorers, before the cache by text; one text given to two scorers counts
        twice.
    rounds_used : int
        Rounds over all blocks.
    near_ties : int
        Sampled tokens that float32's rounding in another batch might have changed
        (`igcore.engine.sampling`). In float32 they were therefore drawn from their sequence alone.
    """

    samples_drawn: int = 0
    policy_tokens: int = 0
    forward_tokens: int = 0
    scorer_tokens: int = 0
    scorer_calls: int = 0
    rounds_used: int = 0
    near_ties: int = 0


@dataclass(kw_only=True)
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
        have been safe), ``scorer_contract`` (the cost depends on more than the text),
        ``over_budget`` (a method that never abstains), ``cancelled`` (nobody waited for it any
        more). ``truncated`` marks a certified prefix.
    text : str or None
        The answer. None, as is the cost, where an abstention emits nothing: not even the empty text
        is within budget.
    reasoning : str
        What a reasoning model wrote before its answer, up to a mark such as ``</think>``. The cost
        judged both, see `judged`. The answer is empty if it was cut inside its reasoning.
    cost, peak_cost, word_peak_cost : float or None
        U_K of the emitted text, and the maximum of U over the common grid of prefixes, and over
        that and all ends of words; higher is worse.
    spread : float
        Largest difference between readings of one text by the cost model, see
        `igcore.contract.Contract`; a text within it of the budget is not verified.
    contract : str
        ``kept``, or what the cost depends on besides the text; empty when nothing was emitted.
    reward : float or None
        Reward of the emitted text; higher is better. None when nothing was emitted. Without a
        reward model it is the mean log-probability of the tokens (nats), None for a refusal.
    fail_open_cost : float or None
        Cost of what would have been emitted without abstention; None when the search stopped before
        that was known.
    z_trace : list of float
        z_0, z_1, ... over the method's own block ends; a block is charged for all its checks.
    block_ends, grid_ends : list of int
        Character offsets in `judged`, see `Emission`.
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
    guard : Guard or None
        The guard that answered, with the method, the settings and the seed of the run. It is no
        data of the answer: `to_dict`, ``dataclasses.asdict``, copies and pickles leave it out.
    candidates : list of igcore.watch.record.Node
        Every candidate of the search, when it was recorded.
    """

    prompt_id: str
    prompt: str
    set_name: str
    text: str | None
    reasoning: str = ""
    status: str
    reason: str
    finished: bool
    n_tokens: int
    reward: float | None = None
    cost: float | None = None
    peak_cost: float | None = None
    word_peak_cost: float | None = None
    fail_open_cost: float | None
    z_trace: list[float] = field(default_factory=list)
    block_ends: list[int]
    grid_ends: list[int]
    counts: Counts
    trace: list[dict[str, float | None]]
    finals: list[list[float | None]]
    generate_s: float
    cost_s: float
    reward_s: float
    critic_s: float
    spread: float = 0.0
    contract: str = ""
    tokens: list[int] = field(default_factory=list)
    candidates: list[Any] = field(default_factory=list, repr=False, compare=False)
    guard = None  # type: Any  # without an annotation it is no field, and `asdict` leaves it out

    @property
    def judged(self) -> str | None:
        """The whole text that the cost has judged: reasoning and answer."""
        return None if self.text is None else self.reasoning + self.text

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"guard": None}

    def to_dict(self) -> dict[str, Any]:
        """Return the answer as JSON values; None replaces a number that is not finite."""
        text = json.dumps(asdict(self), default=methodcaller("item"))  # of numpy's numbers
        values: dict[str, Any] = json.loads(text, parse_constant=lambda name: None)
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the answer that `to_dict` has written, without its guard."""
        known = {one.name: values[one.name] for one in fields(cls) if one.name in values}
        return cls(**known | {"counts": Counts(**values["counts"])})

    def receipt(self) -> str:
        """Return what somebody else needs to check this answer, as canonical JSON.

        See `igcore.tools.receipt`, and ``igserve verify-receipt``.

        Raises
        ------
        ParameterError
            When the answer is a copy without its guard.
        """
        return str(room("receipt_of")(self))

    def tree(self, masked: bool = True) -> Any:
        """Return every candidate of a recorded search as a picture, see `igcore.watch.tree.Tree`.

        Raises
        ------
        ParameterError
            When the search was not recorded, or the answer is a copy without its guard.
        """
        return room("Tree").of(self, masked)

    def _repr_html_(self) -> str | None:
        if self.guard is None:  # which knows the budget, and the words to be masked
            return None
        return str(room("answer_html")(self))
