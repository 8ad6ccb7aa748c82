"""The settings of the search."""

from typing import Annotated, Literal

from pydantic import Field

from .budget import ACCOUNTINGS
from .engine.diversity import DIVERSITIES
from .errors import ParameterError
from .settings import (
    Budget,
    Count,
    Discount,
    Natural,
    Number,
    Probability,
    Rows,
    Share,
    Weight,
    one_of,
    settings,
)

Accounting = Annotated[str, one_of(ACCOUNTINGS)]
Checks = Literal["block", "word", "token"]
ORDERED = (
    ("keep", "n_samples"),
    ("block_size", "max_new_tokens"),
    ("step", "max_new_tokens"),
    ("step", "spend"),
    ("block_size", "spend"),
    ("at_least", "spend"),
)


@settings
class SearchConfig:
    """Settings of the blockwise search; the paper's symbol in brackets.

    Attributes
    ----------
    budget : float
        Safety budget [d], in units of the cost model. It has no default: the user decides what is
        safe.
    n_samples : int
        Continuations sampled per round, over all kept beams together [N].
    keep : int
        Beams kept after a block [K].
    block_size : int
        Tokens per block [d in Algorithm 1].
    max_new_tokens : int
        Length at which a response is finished [T, D].
    rounds : int
        Attempts per block [M]; another is made only while no candidate is safe and, under a critic,
        let through.
    temperature, top_p, top_k : float, float, int
        A token is sampled as in transformers' ``generate``: logits are divided by the temperature,
        then the `top_k` most probable tokens are left, and of these the fewest that have at least
        `top_p` of the mass; None leaves all. The paper samples from the policy itself, as by
        default. A critic must have been trained on such samples. ``log_p``, KL and perplexity stay
        those of the policy itself.
    sampling : str, optional
        ``checkpoint`` takes these three from the generation settings of the policy's model, when
        a `Guard` is made, and names in the log what else they hold, such as a repetition penalty.
    accounting : str
        How prefix scores become costs, a key of `igcore.budget.ACCOUNTINGS` [C_t].
    checks : str
        Where ``peak`` looks at the cost: ``block`` at the end of every block, ``word`` at the end
        of every word as well, ``token`` after every token of a language model that scores them in
        one pass, and else as ``word``. Other accountings look at the ends of blocks, because their
        totals depend on where they look, and so do methods that enforce the budget only at the
        end. See `igcore.scoring.readings`.
    gamma_safety : float
        Discount of the safety cost, in (0, 1] [gamma]; a block's cost has the time index of its
        last token. Below 1, and with another accounting than ``peak``, a text before the end may
        cost more than the budget: the final check is of the end and of the discounted state.
    strict : bool
        Safe means z > 0 instead of z >= 0: the paper's other reading.
    lagrange_multiplier : float
        Weight of the cost in the Lagrangian baselines [lambda].
    score_threshold : float, optional
        ``beam-lagrangian-freq`` retries a block while every c_task + lambda C is above it. By
        default lambda times the budget: the score of a text with reward 0 and cost d.
    threshold : float or str
        The critic lets an unfinished candidate through when f1 is above it. Where it lets none
        through, a block takes all its `rounds`, and the candidates within budget of highest f1 fill
        the free places; so 1 ranks by f1 alone. ``matched`` stands for 1 - `miss`^(1/m) with m =
        n_samples / keep continuations of a beam, see `critic_threshold`.
    miss : float
        Under ``matched``, the largest chance that no continuation of a beam ends within budget
        [delta].
    eta : float
        Weight of the critic's f2 in E_mix [eta].
    gamma_task : float
        Discount of the task cost, in (0, 1] [gamma]. It sets the scale of f2; a method without a
        critic ranks the same under any.
    diversity : str
        How a retry avoids the tokens of failed rounds, a key of
        `igcore.engine.diversity.DIVERSITIES`.
    diversity_penalty : float, optional
        Subtracted from the logits of avoided tokens, nats [n_2]; None stands for infinity, which
        bans them.
    on_failure : str
        What a guarded method does when no candidate is safe: ``abstain`` emits `refusal` (or the
        empty text, or nothing, whichever first passes the final check), ``truncate`` the last
        certified prefix, ``paper`` the least unsafe candidate, marked as such.
    refusal : str
        The text of an abstention.
    step : int, optional
        ``backtracking`` keeps a beam after so many tokens that have passed, a multiple of
        `block_size`; `block_size` by default.
    back : str
        How far it goes back after a failure, a key of `STEPS_BACK` in `igcore.backtracking`.
    tries : int
        Under ``back="tries"``, the failures of a beam after which it is dropped.
    spend : int, optional
        Most tokens that are sampled for a prompt, those of dropped blocks included; 4 times
        `max_new_tokens` by default.
    at_least : int
        Fewest tokens that are sampled for a prompt: another answer is drawn while it is below.
    draws : int, optional
        Most draws for a prompt; as many as `spend` allows by default.
    answers : int or str
        Accepted answers among which the reward chooses; ``all`` draws until `spend`.
    choices : int
        Blocks among which the reward chooses, while tokens last: with 2, a second one is sampled
        after the first that is within budget.
    margin : float
        What is within budget ranks by reward - `margin` * cost; 0 is the paper's ranking.
    keep_shown : bool
        The search never goes back behind a block that it has kept, so that a streamer can show it.
    stop : sequence of str
        An answer ends before the first of these texts that the policy writes, such as ``"\\nQ:"``
        after a prompt with examples.
    probe_fail_open : bool
        After a failure, go on searching as ``paper`` would, only to record the cost of the text
        that it would have emitted. These samples and scores are not counted; their seconds are.
    failure_rate : float
        Largest share of a run's texts that a scorer may fail on; beyond it the run stops. A text
        that it fails on is unsafe, and a prompt with no other text abstains.
    group_size : int
        Prompts decoded together; halved where memory runs out. Part of the settings, because float
        sums depend on it in their last bits.
    """

    budget: Budget
    n_samples: Rows = 8
    keep: Rows = 2
    block_size: Count = 8
    max_new_tokens: Count = 32
    rounds: Count = 2
    temperature: Number = 1.0
    top_p: Discount | None = None
    top_k: Count | None = None
    sampling: Literal["checkpoint"] | None = None
    accounting: Accounting = "peak"
    checks: Checks = "word"
    gamma_safety: Discount = 1.0
    strict: bool = False
    lagrange_multiplier: Weight = 5.0
    score_threshold: Number | None = None
    threshold: Number | Literal["matched"] = "matched"
    miss: Share = 0.01
    eta: Weight = 1.0
    # above 1 a later cost would weigh more than an earlier one
    gamma_task: Discount = 0.999
    diversity: Annotated[str, one_of(DIVERSITIES)] = "half"
    diversity_penalty: Weight | None = None
    on_failure: Literal["abstain", "truncate", "paper"] = "abstain"
    refusal: str = "I am sorry, I cannot help with that."
    step: Count | None = None
    back: Literal["tries", "doubling"] = "tries"
    tries: Count = 3
    spend: Count | None = None
    at_least: Natural = 0
    draws: Count | None = None
    answers: Count | Literal["all"] = 1
    choices: Rows = 1
    margin: Weight = 0
    keep_shown: bool = False
    stop: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False)] = ()
    probe_fail_open: bool = False
    failure_rate: Probability = 0.5
    group_size: Count = 32

    def __post_init__(self) -> None:
        # more beams than samples would leave beams without a continuation
        for small, large in ORDERED:
            a, b = getattr(self, small), getattr(self, large)
            if a is not None and b is not None and a > b:
                raise ParameterError(
                    f"{small} is {a}, more than {large}, which is {b}; lower {small} or raise "
                    f"{large}"
                )
        # z is charged at the ends of blocks, and a step back restores it
        if self.step and self.step % self.block_size and self.step != self.max_new_tokens:
            raise ParameterError(
                f"step is {self.step}, but a beam lies at the end of a block; give a multiple of "
                f"block_size, which is {self.block_size}"
            )
        if self.keep_shown and (self.answers, self.at_least) != (1, 0):
            raise ParameterError(
                f"keep_shown is True, but answers is {self.answers!r} and at_least {self.at_least}:"
                " what is shown cannot be exchanged for another answer; leave these two out"
            )
        # servers of models raise a lower one, and under a higher one their bans leak
        if not 0.01 <= self.temperature <= 5:
            raise ParameterError(
                f"temperature is {self.temperature}, but the search samples and is never greedy; "
                "give one from 0.01, which is all but greedy, to 5"
            )
        if self.sampling and (self.temperature, self.top_p, self.top_k) != (1, None, None):
            raise ParameterError(
                f"sampling is {self.sampling!r}, which takes temperature, top_p and top_k from the "
                "model; leave out these three, or sampling"
            )

    @property
    def lagrangian_threshold(self) -> float:
        """`score_threshold`, or lambda times the budget where none is given."""
        if self.score_threshold is None:
            return self.lagrange_multiplier * self.budget
        return self.score_threshold

    @property
    def critic_threshold(self) -> float:
        """The threshold as a number.

        f1 is the chance that one random continuation ends within budget. At least one of m does so
        with probability 1 - (1 - f1)^m, which is 1 - `miss` or more when f1 >= 1 - `miss`^(1/m).
        """
        if self.threshold == "matched":
            return float(1 - self.miss ** (self.keep / self.n_samples))
        return float(self.threshold)
