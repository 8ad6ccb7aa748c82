"""Judges that compare two answers to one prompt, and the parameters of notebook 60.

A judge gives each answer a score, higher is better, for one aspect at a time. `JUDGES` holds a
language model behind any OpenAI-compatible endpoint, and two local scorers to use
without one.

Every judge has `names`, by aspect what tables call it, `identity`, the JSON values on which its
replies depend, and `ask`, which yields each question with its reply in any order, as soon as it is
there. `workers` requests are under way at a time. `ask` raises ``JudgeError`` when further requests
would fail as well; it has yielded the replies until then.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any

import numpy as np

from igcore.errors import ParameterError, unknown_name
from igcore.methods import METHODS
from igcore.models.registry import ScorerName
from igcore.scorers import COST, Scorer
from igcore.scoring import Cached
from igcore.settings import Count, Named, Threads, one_of, settings

from ..settings import FolderName, InsideFolder
from ..sources import loaded
from .openai import OpenAIJudge
from .spec import ASPECTS, Question, Reply

MethodName = Annotated[str, one_of(METHODS)]
TEXTS_AT_ONCE = 64  # texts that a local scorer reads at a time


@settings(kw_only=True)
class ScorerJudge:
    """Local scorers instead of a language model.

    The answer with the better score wins, in either order.

    Attributes
    ----------
    helpfulness, harmlessness : str or dict
        See `igcore.load_scorer`; of a cost, lower is better.
    """

    helpfulness: ScorerName = Named("minilm-relevance")
    harmlessness: ScorerName = Named("smollm2-harm-2")

    @cached_property
    def scorers(self) -> dict[str, Scorer]:
        roles = {"helpfulness": "reward", "harmlessness": "cost"}  # of a function of one's own
        return {aspect: loaded(getattr(self, aspect), roles[aspect]) for aspect in ASPECTS}

    @property
    def names(self) -> dict[str, str]:
        return {aspect: scorer.name for aspect, scorer in self.scorers.items()}

    def identity(self) -> dict[str, Any]:
        return {aspect: [scorer.name, scorer.digest] for aspect, scorer in self.scorers.items()}

    def ask(
        self, questions: Sequence[Question], seed: int, workers: int
    ) -> Iterator[tuple[Question, Reply]]:
        for aspect, scorer in self.scorers.items():
            cached, sign = Cached(scorer), -1 if scorer.sign == COST else 1
            asked = [question for question in questions if question.aspect == aspect]
            for start in range(0, len(asked), TEXTS_AT_ONCE // 2):
                batch = asked[start : start + TEXTS_AT_ONCE // 2]
                prompts = [question.prompt for question in batch for _ in range(2)]
                texts = [text for question in batch for text in (question.first, question.second)]
                scores = cached.score(prompts, texts, [True] * len(texts))
                pairs = sign * scores.reshape(-1, 2)  # (questions, 2)
                for question, pair in zip(batch, pairs, strict=True):
                    yield question, Reply(tuple(pair.tolist()) if np.isfinite(pair).all() else None)


Judge = OpenAIJudge | ScorerJudge
JUDGES: dict[str, type[Judge]] = {"openai": OpenAIJudge, "scorer": ScorerJudge}


def load_judge(judge: str | Mapping[str, Any] | Named) -> Judge:
    """Return a judge by name, without loading models or sending requests.

    Parameters
    ----------
    judge : str or mapping
        A key of `JUDGES`; a mapping gives options beside its ``name``, which are the fields of what
        `JUDGES` holds there.

    Raises
    ------
    ParameterError
        For a name that is not in `JUDGES`, and an option that is unknown, missing, of the wrong
        type or out of range.
    """
    judge = Named.of(judge, "judge")
    if judge.name not in JUDGES:
        raise unknown_name("judge", judge.name, JUDGES)
    return JUDGES[judge.name](**judge.options)


@settings(kw_only=True)
class JudgeParams:
    """Validated parameters of one run of notebook 60.

    Attributes
    ----------
    profile, run : str
        Name of the folder of verdicts, ``runs/<profile>/judge/<run>``.
    judge : str or dict
        See `load_judge`.
    pattern : str
        Of the names of the decode runs in ``runs/<profile>`` whose answers are judged; all together
        hold a policy, method and prompt once.
    baseline : str
        The method whose answers the others are compared with.
    methods : list of str, optional
        Those that are judged; by default all that were decoded.
    limit : int, optional
        Most prompts of a policy and prompt set, drawn with `seed`: the same ones for every method
        that has them. null for all.
    seed : int
        Also goes to the endpoint with every request.
    workers : int
        Requests at a time; changes no verdict.
    figures : str
        Folder, seen from `igstudy.files.root`, for the picture; the table goes to its subfolder
        ``tables``.
    """

    profile: FolderName
    run: FolderName
    figures: InsideFolder
    judge: Named = Named("scorer")
    pattern: str = "*"
    baseline: MethodName = "base"
    methods: list[MethodName] | None = None
    limit: Count | None = 500
    seed: int = 0
    workers: Threads = 4

    def __post_init__(self) -> None:
        load_judge(self.judge)
        chosen = [self.baseline, *(self.methods or [])]
        if len(set(chosen)) < len(chosen):
            raise ParameterError(f"methods and baseline are {chosen}; name each method once")
