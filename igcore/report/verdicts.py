"""Verdicts of a judge on decoded answers: pairs, the questions about them, and win rates.

Two answers to a prompt are judged in both orders. `igcore.runs.judge_run` asks; nobody is asked
here.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
from statsmodels.stats.proportion import proportion_confint

from ..errors import RunError
from ..folders import root
from ..judge import JudgeParams
from ..judge.spec import ASPECTS, Question
from . import statistics as metrics
from .load import load_finished

Scores = tuple[float, float] | None
KEPT = ("policy", "prompts", "method", "prompt_id", "abstained")  # of a pair, in its verdict
VERDICTS = ("win", "tie", "loss", "unparsed")
COLUMNS = (
    "policy prompts method aspect n win tie loss unparsed win_rate low high abstained judge".split()
)


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
        One row per pair: ``policy``, ``prompts``, ``method``, ``prompt_id``, ``prompt``, ``ours``,
        ``theirs`` (the baseline's answer) and ``abstained`` (whether the method did). Of each
        prompt set at most `JudgeParams.limit`, in an order that the seed decides.

    Raises
    ------
    RunError
        See `igcore.report.statistics.check_records`, and when a method of `JudgeParams.methods` or
        the baseline was not decoded.
    """
    metrics.check_records(lines)
    lines = lines.assign(
        response=lines["response"].fillna(""), abstained=lines["status"] == "abstained"
    )
    found = lines["method"].unique()
    methods = params.methods or [method for method in found if method != params.baseline]
    if missing := [method for method in [params.baseline, *methods] if method not in found]:
        raise RunError(
            f"runs {params.pattern} of {params.profile} hold no answers of {missing[0]}; "
            f"decode them, or leave it out"
        )
    parts = []
    for (policy, prompts), cell in lines.groupby(["policy", "prompts"], sort=False):
        base = cell[cell["method"] == params.baseline].set_index("prompt_id").sort_index()
        if not len(base):
            raise RunError(
                f"{policy} has no answers of {params.baseline} to {prompts}, to compare "
                f"with; decode them too"
            )
        drawn = np.random.default_rng(params.seed).permutation(base.index.to_numpy())
        for method in methods:
            ours = cell[cell["method"] == method].set_index("prompt_id")
            chosen = [prompt_id for prompt_id in drawn if prompt_id in ours.index][: params.limit]
            columns = ["policy", "prompts", "method", "prompt", "abstained"]
            pair = ours.loc[chosen, columns].reset_index()
            pair["ours"] = ours.loc[chosen, "response"].to_numpy()
            pair["theirs"] = base.loc[chosen, "response"].to_numpy()
            parts.append(pair)
    return pd.concat(parts, ignore_index=True)


def asked(pair, aspect: str) -> tuple[Question, Question]:
    """Return the questions of a row of `pairs_of`: the method's answer first, and second."""
    about = (aspect, pair.prompt_id, pair.prompt)
    return Question(*about, pair.ours, pair.theirs), Question(*about, pair.theirs, pair.ours)


def questions_of(pairs: pd.DataFrame) -> dict[str, Question]:
    """Return all questions by digest, each once."""
    found = {}
    for pair in pairs.itertuples():
        for aspect in ASPECTS:
            found |= {question.digest: question for question in asked(pair, aspect)}
    return found


def scores_of(line: dict) -> Scores:
    return line["scores"] and tuple(map(float, line["scores"]))


def read(path: Path) -> dict[str, Scores]:
    """Return the scores in a file of verdicts by the digest of their question.

    A half-written last line does not count.

    Raises
    ------
    RunError
        When a line is no verdict.
    """
    whole = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    scores = {}
    for number, raw in enumerate(whole, start=1):
        try:
            line = json.loads(raw)
            scores[line["question"]] = scores_of(line)
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(
                f"line {number} of {path} is no verdict; run again, which asks for it anew"
            ) from error
    return scores


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
    rows = []
    for pair in pairs.itertuples():
        about = {name: getattr(pair, name) for name in KEPT}
        for aspect in ASPECTS:
            first, second = (_sign(scores[question.digest]) for question in asked(pair, aspect))
            verdict, swayed = _verdict(first, second and -second)
            said = {"aspect": aspect, "judge": names[aspect], "verdict": verdict, "swayed": swayed}
            rows.append(about | said)
    return pd.DataFrame(rows)


def _sign(scores: Scores) -> int | None:
    """Return 1 when the first answer is the better one, -1 when the second is."""
    return scores and (scores[0] > scores[1]) - (scores[0] < scores[1])


def _verdict(one: int | None, other: int | None) -> tuple[str, bool]:
    """Return the verdict on a method, and whether the order decided.

    In each order the method was preferred (1), equal (0) or not (-1).
    """
    if one is None or other is None:
        return "unparsed", False
    return ({1: "win", -1: "loss"}[one] if one == other and one else "tie"), one * other < 0


def win_rates(judged: pd.DataFrame) -> pd.DataFrame:
    """Count verdicts, a row per policy, prompt set, method and aspect (paper, table of win rates).

    Parameters
    ----------
    judged : DataFrame
        See `verdicts`.

    Returns
    -------
    DataFrame
        The columns `COLUMNS`. Of the ``n`` pairs ``unparsed`` have no verdict; ``win_rate`` is
        (wins + ties / 2) / (n - unparsed), so that 0.5 is the baseline itself, between the ends of
        its 95 % Wilson interval. The interval takes a tie for half a win and half a loss and is too
        wide rather than too narrow for it: of all points from 0 to 1, zeros and ones vary most. In
        ``abstained`` pairs the method gave no answer of its own.
    """
    keys = ["policy", "prompts", "method", "aspect"]
    rows = [
        dict(zip(keys, key, strict=True)) | _counts(cell)
        for key, cell in judged.groupby(keys, sort=False)
    ]
    return pd.DataFrame(rows, columns=COLUMNS)


def _counts(cell: pd.DataFrame) -> dict:
    of = {verdict: int((cell["verdict"] == verdict).sum()) for verdict in VERDICTS}
    parsed, points = len(cell) - of["unparsed"], of["win"] + of["tie"] / 2
    rate = dict.fromkeys(("win_rate", "low", "high"), math.nan)
    if parsed:
        low, high = map(float, proportion_confint(points, parsed, method="wilson"))
        rate = {"win_rate": points / parsed, "low": low, "high": high}
    return {
        "n": len(cell),
        **of,
        **rate,
        "abstained": int(cell["abstained"].sum()),
        "judge": cell["judge"].iloc[0],
    }


def load_rates(profile: str) -> pd.DataFrame:
    """Return `win_rates` of the finished runs of notebook 60 in a profile, below one another.

    Answers of decode runs that have not finished are left out. Where there are several judges,
    ``policy`` says which it was; ``judge`` is always the run's name. Without any the table is
    empty.

    Raises
    ------
    RunError
        When answers that were judged are not there any more, or others are in their place.
    """
    manifests = sorted((root() / "runs" / profile / "judge").glob("*/manifest.json"))
    found = []
    for manifest in manifests:
        params = JudgeParams(**json.loads(manifest.read_text(encoding="utf-8"))["params"])
        answers, _ = load_finished(profile, params.pattern)
        pairs, scores = pairs_of(answers, params), read(manifest.with_name("verdicts.jsonl"))
        if questions_of(pairs).keys() - scores.keys():
            raise RunError(
                f"answers judged in {manifest.parent} were decoded anew; run notebook 60 "
                f"with its parameters again"
            )
        rates = win_rates(verdicts(pairs, scores, dict.fromkeys(ASPECTS, params.run)))
        if len(manifests) > 1:
            rates = rates.assign(policy=rates["policy"] + f", judged by {params.run}")
        found.append(rates)
    return pd.concat(found, ignore_index=True) if found else pd.DataFrame(columns=COLUMNS)
