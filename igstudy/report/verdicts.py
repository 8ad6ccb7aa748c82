"""Verdicts of a judge on decoded answers: the pairs, and the questions about them.

Two answers to a prompt are judged in both orders. `igstudy.runs.judge_run` calls the judge.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from statsmodels.stats.proportion import proportion_confint

from igcore.errors import RunError

from ..judge import JudgeParams
from ..judge.spec import ASPECTS, Question
from . import statistics as metrics

Scores = tuple[float, float] | None
PAIR_KEY = ["policy", "prompts", "method", "prompt_id", "abstained"]  # of a pair, in its verdict
VERDICTS = ["win", "tie", "loss", "unparsed"]
RATE_KEY = ["policy", "prompts", "method", "aspect"]  # a row of `win_rates`


def pairs_of(lines: pd.DataFrame, params: JudgeParams) -> pd.DataFrame:
    """Pair the answers of each method with those of the baseline to the same prompts.

    An abstention is judged by what its reader gets: the refusal, or the empty text where nothing
    was emitted. Left out, it would spare a method its hardest prompts.

    Parameters
    ----------
    lines : DataFrame
        Lines of ``responses.jsonl``, one per policy, method and prompt; policies may have answered
        several prompt sets.

    Returns
    -------
    DataFrame
        One row per pair: ``policy``, ``prompts``, ``method``, ``prompt_id``, ``prompt``,
        ``abstained`` (whether the method did), ``answer`` and ``baseline_answer``. Of each prompt
        set at most `JudgeParams.limit`, in an order that the seed decides.

    Raises
    ------
    RunError
        When a method answered a prompt twice, or one of `JudgeParams.methods` or the baseline was
        not decoded.
    """
    metrics.check_once(lines, ["policy", "method", "prompt_id"])
    answers = lines[["policy", "prompts", "method", "prompt_id", "prompt"]].assign(
        abstained=lines["status"] == "abstained", answer=lines["response"].fillna("")
    )
    decoded = answers["method"].unique()
    methods = params.methods or [method for method in decoded if method != params.baseline]
    if missing := [method for method in [params.baseline, *methods] if method not in decoded]:
        raise RunError(
            f"runs {params.pattern} of {params.profile} hold no answers of {missing[0]}; "
            f"decode them, or leave it out"
        )
    parts = []
    for (policy, prompts), cell in answers.groupby(["policy", "prompts"], sort=False):
        baseline = cell[cell["method"] == params.baseline].set_index("prompt_id")["answer"]
        if not len(baseline):
            raise RunError(
                f"{policy} has no answers of {params.baseline} to {prompts}, to compare "
                f"with; decode them too"
            )
        order = np.random.default_rng(params.seed).permutation(sorted(baseline.index))
        for method in methods:
            of_method = cell[cell["method"] == method].set_index("prompt_id")
            chosen = [prompt_id for prompt_id in order if prompt_id in of_method.index]
            pairs = of_method.loc[chosen[: params.limit]].reset_index()
            parts.append(pairs.assign(baseline_answer=pairs["prompt_id"].map(baseline)))
    return pd.concat(parts, ignore_index=True)


def both_orders(pair: Any, aspect: str) -> tuple[Question, Question]:
    """Return the questions of a row of `pairs_of`: the method's answer first, and second."""
    about = (aspect, pair.prompt_id, pair.prompt)
    return (
        Question(*about, pair.answer, pair.baseline_answer),
        Question(*about, pair.baseline_answer, pair.answer),
    )


def questions_of(pairs: pd.DataFrame) -> dict[str, Question]:
    """Return all questions by digest, each once."""
    return {
        question.digest: question
        for pair in pairs.itertuples()
        for aspect in ASPECTS
        for question in both_orders(pair, aspect)
    }


def scores_of(line: dict[str, Any]) -> Scores:
    return line["scores"] and tuple(map(float, line["scores"]))


def verdicts(
    pairs: pd.DataFrame, scores: Mapping[str, Scores], names: Mapping[str, str]
) -> pd.DataFrame:
    """Return one row per pair and aspect, with the ``verdict`` on the method.

    Of `pairs_of` it has all but texts, and besides ``aspect``, ``judge``, ``verdict`` and
    ``swayed``.

    A method wins or loses where both orders say so, and ties otherwise; ``swayed`` marks the ties
    in which whichever answer stood first (or second) was preferred both times. The verdict is
    ``unparsed`` when one of the two replies could not be read.
    """
    parts = []
    for aspect in ASPECTS:
        both = [both_orders(pair, aspect) for pair in pairs.itertuples()]
        found = [_verdict(scores[first.digest], scores[second.digest]) for first, second in both]
        columns = pd.DataFrame(found, columns=["verdict", "swayed"])
        parts.append(pairs[PAIR_KEY].assign(aspect=aspect, judge=names[aspect]).join(columns))
    # both aspects of a pair stand together
    return pd.concat(parts).sort_index(kind="stable").reset_index(drop=True)


def _verdict(first: Scores, second: Scores) -> tuple[str, bool]:
    """Return the verdict on a method whose answer stood first, and then second.

    Also whether the order decided.
    """
    if first is None or second is None:
        return "unparsed", False
    preferences = {np.sign(first[0] - first[1]), np.sign(second[1] - second[0])}
    if preferences == {1}:
        return "win", False
    if preferences == {-1}:
        return "loss", False
    return "tie", preferences == {1, -1}


def win_rates(judged: pd.DataFrame) -> pd.DataFrame:
    """Count verdicts, a row per policy, prompt set, method and aspect (paper, table of win rates).

    Of the ``n`` pairs ``unparsed`` have no verdict; ``abstained`` counts the pairs in which the
    method abstained. The win rate is (wins + ties / 2) / judged pairs, with a 95 % Wilson interval.
    """
    cells = judged.groupby(RATE_KEY, sort=False)
    rates = cells.agg(n=("verdict", "size"))
    counts = cells["verdict"].value_counts().unstack(fill_value=0)
    rates = rates.join(counts.reindex(columns=VERDICTS, fill_value=0))
    parsed, points = rates["n"] - rates["unparsed"], rates["win"] + rates["tie"] / 2
    parsed = parsed.where(parsed > 0)
    rates["win_rate"] = points / parsed
    # too wide rather than too narrow for a tie: of all points from 0 to 1, zeros and ones vary most
    rates["low"], rates["high"] = proportion_confint(points, parsed, method="wilson")
    rates["abstained"], rates["judge"] = cells["abstained"].sum(), cells["judge"].first()
    return rates.reset_index()
