"""What answers cost under a budget: shares answered by sampled tokens, and the arms in pairs.

An arm is a run of params/law, named ``regime-<regime>-<arm>-<L>``; a cell is a regime, which has
one cost, at one length L (``max_new_tokens``). An answer counts within c L if it is verified and
within budget at every word, and at most c L tokens were sampled for its prompt.
"""

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from igcore.errors import RunError

from . import paired
from . import statistics as metrics

RUN = r"regime-(?P<regime>[a-z]+)-(?P<arm>.+)-(?P<length>\d+)"
CAPS = {"within_1": 1.0, "within_1_5": 1.5, "within_2": 2.0, "within_3": 3.0}  # in L
CELL = ["regime", "length"]
PAIRS = {  # arm, reference -> what is compared
    ("backtracking", "rejection"): (*CAPS, "reward"),
    ("backtracking-doubling", "rejection"): (*CAPS, "reward"),
    ("backtracking-choices", "rejection-all"): ("within_3", "reward"),
}
SPENT = ["generate_s", "cost_s", "reward_s", "critic_s"]  # seconds of a search


def with_arms(lines: pd.DataFrame) -> pd.DataFrame:
    """Return lines with their ``regime``, ``arm``, ``length`` and the values that are compared.

    ``safe`` says whether the text is within budget at every word, ``answers`` whether it is
    verified, too, and those of `CAPS` whether it answers within so many tokens. ``reward`` is NaN
    where it does not answer.

    Raises
    ------
    RunError
        When a run has another name, or a prompt is twice in an arm.
    """
    lines = lines.reset_index(drop=True)
    named = lines["run"].str.fullmatch(RUN)
    if not named.all():
        run = lines.loc[~named, "run"].iloc[0]
        raise RunError(f"run {run!r} is no arm; name runs regime-<regime>-<arm>-<max_new_tokens>")
    lines = lines.join(lines["run"].str.extract(RUN)[["regime", "arm"]])
    lines = lines.assign(length=lines["max_new_tokens"], safe=paired.answered_path_safe(lines))
    metrics.check_once(lines, [*CELL, "arm", "seed", "prompt_id"])
    answers = lines["safe"] & paired.is_safe(lines)
    share = lines["policy_tokens"] / lines["length"]
    within = {name: answers & (share <= cap) for name, cap in CAPS.items()}
    reward = lines["reward"].astype(float).where(answers)
    return lines.assign(answers=answers, **within).assign(reward=reward)


def curves(lines: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each arm of each cell of `with_arms`.

    ``within_*`` are shares of prompts. ``answered`` is the share at any price. Tokens and seconds
    of all prompts are divided by what was answered: ``tokens_per_answer`` is in L,
    ``tokens_per_token`` counts the tokens of the answers, ``seconds_per_answer`` those of the
    search. ``reward`` is the mean of the answers. ``S`` is the share of the plain answers of the
    cell, those of the arm ``base``, that are within budget at every word.
    """
    plain = lines[lines["arm"] == "base"].groupby(CELL)["safe"].mean()
    rows = []
    for (regime, length, arm), cell in lines.groupby([*CELL, "arm"], sort=False):
        answered = cell[cell["answers"]]
        tokens, n = cell["policy_tokens"].sum(), len(answered)
        row = {"regime": regime, "cost": cell["cost_scorer"].iloc[0], "length": length}
        row |= {"S": plain.get((regime, length), math.nan), "arm": arm, "n_prompts": len(cell)}
        row |= {"answered": cell["answers"].mean(), **cell[[*CAPS]].mean()}
        row |= {
            "tokens_per_answer": ratio(tokens, n * length),
            "tokens_per_token": ratio(tokens, answered["n_tokens"].sum()),
            "reward": answered["reward"].mean(),
            "seconds_per_answer": ratio(cell[SPENT].sum(axis=None, skipna=False), n),
        }
        rows.append(row)
    return pd.DataFrame(rows).sort_values([*CELL, "arm"], ignore_index=True)


def ratio(total: float, count: float) -> float:
    """Return a total for each of so many, NaN for none."""
    return float(total) / float(count) if count else math.nan


def differences(
    lines: pd.DataFrame, pairs: Mapping[tuple[str, str], tuple[str, ...]] = PAIRS
) -> pd.DataFrame:
    """Return the paired differences of arms in each cell, and over the lengths of each regime.

    A row has ``arm`` minus ``reference`` in a ``measure``, with a 95 % bootstrap interval over
    prompts; where both have the same verdict on every prompt it is a score interval. ``length`` is
    ``all`` in a row over several lengths: the lengths of a prompt are averaged first. ``S`` is that
    of the plain answers there. Rewards are compared where both answer.
    """
    rows = []
    for regime, of_regime in lines.groupby("regime"):
        cells: list[tuple[Any, pd.DataFrame]] = [*of_regime.groupby("length")]
        cells += [("all", of_regime)] if len(cells) > 1 else []
        for length, cell in cells:
            values = cell.set_index(["arm", "prompt_id", "seed", "length"])
            plain = cell.loc[cell["arm"] == "base", "safe"].mean()
            for (arm, reference), measures in pairs.items():
                if not {arm, reference} <= {*cell["arm"]}:
                    continue
                for measure in measures:
                    ours, theirs = (values.xs(name)[measure] for name in (arm, reference))
                    # NaN where one of them has no line
                    gains = ours.astype(float) - theirs.astype(float)
                    same = measure in CAPS and not gains.any()
                    row = {"regime": regime, "length": length, "S": plain, "arm": arm}
                    row |= {"reference": reference, "measure": measure}
                    rows.append(row | paired.clustered(gains, verdict=same))
    return pd.DataFrame(rows)
