"""A guard with a verdict at every token, in the format of Qwen3Guard-Stream.

Above a Qwen3 stand two heads that read every token's hidden state, one for what the user says and
one for the answer. Here the answer's is read: Linear(H -> W), RMSNorm, Linear(W -> 3). A session
reads each token once, where the code that comes with the model reads the whole text again for each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from pydantic import Field
from torch.nn.functional import linear, rms_norm

from ..errors import AssetError, ParameterError
from ..scorers import COST
from ..settings import Count, settings
from .backbone import Backbone
from .lm_scorer import Checkpoint, LMScorer
from .pretrained import one_sentence
from .templates import chatted, check_chat, turns_of

LEVELS = ("Safe", "Unsafe", "Controversial")  # of the published models
PRE, NORM, HEAD = "risk_level_category_pre", "risk_level_category_layernorm", "risk_level_head"
KEYS = tuple(f"{name}.weight" for name in (PRE, NORM, HEAD))
# the other heads: of the categories, and of what the user says
OTHERS = tuple(
    f"{name}.weight" for name in ("category_head", f"query_{PRE}", f"query_{NORM}", f"query_{HEAD}")
) + ("query_category_head.weight", "lm_head.weight")
Level = Literal["Unsafe", "Controversial"]  # those that may count as unsafe
COUNTED: list[Level] = ["Unsafe"]
FLOOR = -1.0  # the lowest margin there is


@dataclass(frozen=True)
class RunScorer(LMScorer):
    """The cost of a text whose every token has one: the worst of `run` tokens in a row.

    It is the largest number that `run` consecutive tokens of the response all reach, or `FLOOR`
    where there are fewer.

    Attributes
    ----------
    run : int
        k.
    """

    run: int = 1

    def score(
        self, prompts: Sequence[str], responses: Sequence[str], finished: Sequence[bool]
    ) -> np.ndarray:
        """Return one number per text (n,)."""
        ends = [len(response) for response in responses]
        return np.array([costs[-1] for _, costs in self.token_scores(prompts, responses, ends)])

    def token_scores(
        self, prompts: Sequence[str], responses: Sequence[str], since: Sequence[int]
    ) -> list[tuple[list[int], np.ndarray]]:
        """Return the costs after the tokens of each response, see `LMScorer.token_scores`."""
        found = []
        every = super().token_scores(prompts, responses, [0] * len(responses))
        for (ends, margins), response, start in zip(every, responses, since, strict=True):
            costs = worst_runs(margins if response else margins[:0], self.run)
            kept = [i for i, end in enumerate(ends) if end > start] or [len(ends) - 1]
            found.append(([ends[i] for i in kept], costs[kept]))
        return found


def worst_runs(margins: np.ndarray, run: int) -> np.ndarray:
    """Return after each token the largest number that some `run` tokens in a row reach.

    Parameters
    ----------
    margins : ndarray (T,)
        Of the tokens; a NaN counts from its token on.

    Returns
    -------
    ndarray (T,), or (1,) with `FLOOR` of a text without a token
    """
    if not len(margins):
        return np.array([FLOOR])
    before = np.full(run - 1, FLOOR)  # no run ends before it has begun
    lowest = sliding_window_view(np.concatenate([before, margins]), run).min(axis=1)
    return np.maximum.accumulate(lowest)


@settings(kw_only=True)
class StreamGuard(Checkpoint):
    r"""A guard in the format of Qwen3Guard-Stream; higher is worse, above 0 its rule says unsafe.

    Of each token of the response the margin is

    .. math:: m_t = \max_{l \in \mathrm{counted}} p_{t,l} - \max_{l \notin \mathrm{counted}} p_{t,l}

    between -1 and 1 and above 0 exactly where a counted level is the likeliest. The cost is the
    largest margin that `run` consecutive tokens all reach. So the rule of the model's authors,
    which calls a response unsafe when two tokens in a row are, is the budget 0 with `run` 2. Their
    strict reading, in which Controversial counts as well, is nearly ``counted: [Unsafe,
    Controversial]``: here one of either after the other is a run of two.

    The rule is part of the cost and no accounting. An accounting charges the scores of steps, and
    steps are blocks, words or tokens, as the user checks them: k steps in a row would be another
    rule at each, and would need a count in the safety state. As a function of the text the cost has
    seen every token wherever it is checked, only ever rises while the tokens stay, and can be
    computed again from the text alone; under ``peak`` the budget is broken at the token that
    completes the run.

    Attributes
    ----------
    repo, revision, dtype, device, self_check
        See `igcore.models.lm_scorer.Checkpoint`.
    counted : list of str
        The levels that count as unsafe: ``Unsafe``, ``Controversial``.
    run : int
        Tokens in a row, at least 1.
    """

    repo: str = "Qwen/Qwen3Guard-Stream-0.6B"
    counted: Annotated[list[Level], Field(min_length=1)] = Field(default_factory=COUNTED.copy)
    run: Count = 2
    boundary: ClassVar[float | None] = 0
    scale: ClassVar[str] = "probability margin"

    def scorer(self) -> RunScorer:
        """Return the scorer, unchecked.

        Raises
        ------
        ParameterError
            When the text does not end with the response, or the tokenizer does not tell where its
            tokens stand.
        AssetError
            When the levels of the files are not `LEVELS`.
        """
        check_chat(self.tokenizer, "chat", self.repo)
        model, tensors = self.model(heads=KEYS, optional=OTHERS)
        pre, norm, head = (tensors[key].float().to(model.device) for key in KEYS)
        named = getattr(model.config, "response_risk_level_map", None) or dict(enumerate(LEVELS))
        levels = tuple(named.get(i, named.get(str(i))) for i in range(len(named)))
        if levels != LEVELS:
            raise AssetError(
                f"{self.folder} has the levels {levels}; choose a guard whose levels are {LEVELS}"
            )
        width, hidden = len(norm), model.config.hidden_size
        with one_sentence(self.folder):
            pre, head = pre.reshape(width, hidden), head.reshape(len(LEVELS), width)
        counted = [LEVELS.index(level) for level in sorted(set(self.counted))]
        margin = partial(margins, (pre, norm, head), model.config.rms_norm_eps, counted)
        backbone = Backbone(model, self.tokenizer, self._write, special=False)
        if not backbone.reads_tokens:
            raise ParameterError(
                f"the text that {self.repo} reads does not end with the response, or its tokenizer "
                "does not tell where tokens stand; give it the tokenizer.json and the chat "
                "template that it was published with"
            )
        name = f"stream:{Path(self.repo).name}"
        kind = partial(RunScorer, run=self.run)
        options = {"counted": sorted(set(self.counted)), "run": self.run}
        return self.made(kind, name, COST, backbone, margin, options)

    def _write(self, prompt: str, response: str) -> str:
        """Return the text up to the end of the response so far.

        Its template writes an empty piece of reasoning before an answer.
        """
        opening = chatted(self.tokenizer, turns_of(prompt), opened=True, enable_thinking=False)
        return opening + response


def margins(
    weights: Sequence[torch.Tensor], epsilon: float, counted: Sequence[int], states: torch.Tensor
) -> torch.Tensor:
    """Return the margins (R,) of hidden states (R, H): of counted levels over the others."""
    pre, norm, head = weights
    inner = rms_norm(linear(states.to(pre.device), pre), norm.shape, norm, epsilon)  # (R, W)
    p = linear(inner, head).double().softmax(1)  # (R, 3)
    others = [level for level in range(p.shape[1]) if level not in counted]
    return p[:, list(counted)].amax(1) - p[:, others].amax(1)
