"""One run of notebook 60: answers of decode runs are paired, and a judge compares each pair.

``runs/<profile>/judge/<run>`` holds ``params.json``, a line of ``verdicts.jsonl`` for every
question that was answered and, as the only sign of success, ``manifest.json``. A question is two
texts in one order under one aspect. So a run that was stopped, or has more prompts or methods,
asks only what is new, and a pair of equal answers is asked once for all methods that gave it.
"""

from collections.abc import Mapping
from dataclasses import asdict

import pandas as pd

from igcore.files import append_line
from igcore.progress import progress
from igcore.settings import written

from ..files import root
from ..judge import Judge, JudgeParams, load_judge
from ..judge.spec import ASPECTS, Question
from ..linefile import line_digest
from ..provenance import versions
from ..report.load import load_runs
from ..report.verdicts import Scores, pairs_of, questions_of, scores_of, verdicts
from .folders import Run, open_run, sound_lines
from .identity import code_of, modules_of


def judge_run(params: JudgeParams) -> pd.DataFrame:
    """Judge the answers of decode runs against those of the baseline, or resume after a stop.

    Returns
    -------
    DataFrame
        See `igstudy.report.verdicts.verdicts`.

    Raises
    ------
    JudgeError, ScorerError
        When the judge cannot be asked; its replies until then are kept.
    RunError, ParameterError
        See `igstudy.report.load.load_runs`, `igstudy.report.verdicts.pairs_of` and
        `igstudy.runs.folders.open_run`.
    """
    judge = load_judge(params.judge)
    pairs = pairs_of(load_runs(params.profile, pattern=params.pattern), params)
    folder = root() / "runs" / params.profile / "judge" / params.run
    # only what a reply depends on: verdicts are computed from the replies again each time
    identity = {
        "judge": judge.identity(),
        "seed": params.seed,
        "code": code_of(*modules_of(judge, *getattr(judge, "scorers", {}).values())),
        "versions": versions(),
    }
    with open_run(folder, identity) as run:
        scores = judge_missing(params, judge, run, questions_of(pairs))
        table = verdicts(pairs, scores, judge.names)
        run.finish({"pairs": len(table) // len(ASPECTS), "params": written(params)})
    return table


def judge_missing(
    params: JudgeParams, judge: Judge, run: Run, questions: Mapping[str, Question]
) -> dict[str, Scores]:
    """Ask the questions that the folder lacks; return the scores of all questions by digest.

    Replies are appended to the folder one by one.
    """
    path = run.folder / "verdicts.jsonl"
    lines = sound_lines(path)
    scores = {line["question"]: scores_of(line) for line in lines}
    missing = [question for digest, question in questions.items() if digest not in scores]
    if missing:
        run.manifest.unlink(missing_ok=True)  # a manifest is the sign of success
    with progress(len(questions), params.run) as bar:
        bar.update(len(questions) - len(missing))
        for question, reply in judge.ask(missing, params.seed, params.workers):
            line = {
                "question": question.digest,
                "aspect": question.aspect,
                "prompt_id": question.prompt_id,
                **asdict(reply),
            }
            append_line(path, line | {"digest": line_digest(line)})
            scores[question.digest] = reply.scores
            bar.update()
    return scores
