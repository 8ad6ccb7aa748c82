"""What answers cost under a budget: shares answered by sampled tokens, and the arms in pairs.

An arm is a run of params/searches, named ``regime-<regime>-<arm>``, with its L (``max_new_tokens``)
at the end where a regime has several; a cell is a regime, which has one cost, at one length. An
answer counts within c L if it is within budget at every word, and at most c L tokens were sampled
for its prompt. So it does for an algorithm that keeps another constraint, such as the printed one.
"""

import math

import numpy as np
import pandas as pd

from igcore.errors import RunError

from . import paired
from . import statistics as metrics

RUN = r"regime-(?P<regime>[a-z]+)-(?P<arm>.+?)(?:-\d{2,})?"
CAPS = {"within_1": 1.0, "within_1_5": 1.5, "within_2": 2.0, "within_2_5": 2.5, "within_3": 3.0}
CELL = ["regime", "length"]
ARMS = {  # arm -> its name for readers, in the order of a table
    "base": "base",
    "base-told": "base, with the rule",
    "best-of-2": "Best-of-2, augmented",
    "augmented": "beam search, augmented",
    "lambda": "beam search, tuned λ",
    "guard-printed": "Algorithm 1 as printed, N 2",
    "guard-n2": "Algorithm 1, N 2, M 4",
    "guard-n1": "Algorithm 1, N 1, M 128",
    "rejection": "rejection sampling",
    "rejection-told": "rejection sampling, with the rule",
    "rejection-all": "rejection sampling, best of all",
    "backtracking": "backtracking",
    "backtracking-doubling": "backtracking, doubling",
    "backtracking-told": "backtracking, with the rule",
    "backtracking-choices": "backtracking, two choices",
}
PLAIN = ("base", "plain")  # arms whose answers no search has chosen; of `plain` the seed is its own
RIVALS = "rejection rejection-told best-of-2 lambda augmented guard-n1 guard-n2".split()
PAIRS = {  # arm, reference -> what is compared
    **{("backtracking", rival): (*CAPS, "reward") for rival in RIVALS},
    ("backtracking", "backtracking-doubling"): (*CAPS, "reward"),
    ("backtracking-told", "rejection-told"): (*CAPS, "reward"),
    ("backtracking-choices", "rejection-all"): ("within_3", "reward"),
}
SPENT = ["generate_s", "cost_s", "reward_s", "critic_s"]  # seconds of a search
SAME_SECONDS = 2.0  # L of rejection sampling, whose seconds every arm gets


def with_arms(lines: pd.DataFrame) -> pd.DataFrame:
    """Return lines with their ``regime``, ``arm``, ``length`` and the values that are compared.

    ``answers`` says whether there is a text within budget at every word, and those of `CAPS`
    whether there is one within so many tokens. ``reward`` is NaN without.

    Raises
    ------
    RunError
        When a run has another name, or a prompt is twice in an arm.
    """
    lines = lines.reset_index(drop=True)
    named = lines["run"].str.fullmatch(RUN)
    if not named.all():
        run = lines.loc[~named, "run"].iloc[0]
        raise RunError(f"run {run!r} is no arm; name runs regime-<regime>-<arm>")
    lines = lines.join(lines["run"].str.extract(f"^{RUN}$")[["regime", "arm"]])
    lines = lines.assign(length=lines["max_new_tokens"])
    metrics.check_once(lines, [*CELL, "arm", "seed", "prompt_id"])
    answers = paired.answered_path_safe(lines)
    share = paired.tokens_in_length(lines)
    within = {name: answers & (share <= cap) for name, cap in CAPS.items()}
    reward = lines["reward"].astype(float).where(answers)
    return lines.assign(answers=answers, **within).assign(reward=reward)


def curves(lines: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each arm of each cell of `with_arms`.

    ``within_*`` are shares of prompts, and so is ``at_same_seconds``, see `at_same_seconds`.
    ``answered`` is the share at any price. Tokens and seconds of all prompts are divided by what
    was answered: ``tokens_per_answer`` is in L, ``tokens_per_token`` counts the tokens of the
    answers, ``seconds_per_answer`` those of the search. ``forward_tokens`` and ``scorer_tokens``
    are those that the policy and the scorers have read, for a prompt. ``reward`` is the mean of the
    answers. ``S`` is the share of the plain answers of the cell that are within budget at every
    word.
    """
    plain = lines[lines["arm"].isin(PLAIN)].groupby(CELL)["answers"].mean()
    rows = []
    for (regime, length), cell in lines.groupby(CELL, sort=False):
        same = at_same_seconds(cell)
        for arm, own in cell.groupby("arm", sort=False):
            answered = own[own["answers"]]
            tokens, n = own["policy_tokens"].sum(), len(answered)
            row = {"regime": regime, "cost": own["cost_scorer"].iloc[0], "length": length}
            row |= {"S": plain.get((regime, length), math.nan), "arm": arm, "n_prompts": len(own)}
            row |= {"answered": own["answers"].mean(), **own[[*CAPS]].mean()}
            row |= {
                "at_same_seconds": same.get(arm, math.nan),
                "tokens_per_answer": ratio(tokens, n * length),
                "tokens_per_token": ratio(tokens, answered["n_tokens"].sum()),
                "reward": answered["reward"].mean(),
                "seconds_per_answer": ratio(own[SPENT].sum(axis=None, skipna=False), n),
                **own[["forward_tokens", "scorer_tokens"]].mean(),
            }
            rows.append(row)
    return pd.DataFrame(rows).sort_values([*CELL, "arm"], ignore_index=True)


def at_same_seconds(cell: pd.DataFrame) -> pd.Series:
    """Return the share of prompts that each arm of a cell answers at equal CPU seconds.

    They are those of rejection sampling for `SAME_SECONDS` L. Prompts are decoded together, so the
    seconds of an arm are shared out over its sampled tokens. The series is empty without that arm.
    """
    of_arm = cell.groupby("arm")
    per_token = of_arm[SPENT].sum().sum(axis=1) / of_arm["policy_tokens"].sum()
    if "rejection" not in per_token:
        return pd.Series(dtype=float)
    seconds = cell["policy_tokens"] * cell["arm"].map(per_token)
    most = SAME_SECONDS * cell["length"] * per_token["rejection"]
    return (cell["answers"] & (seconds <= most)).groupby(cell["arm"]).mean()


def ratio(total: float, count: float) -> float:
    """Return a total for each of so many, NaN for none."""
    return float(total) / float(count) if count else math.nan


def differences(lines: pd.DataFrame) -> pd.DataFrame:
    """Return the paired differences of arms in each cell.

    A row has ``arm`` minus ``reference`` in a ``measure``, with a 95 % bootstrap interval over
    prompts; where both have the same verdict on every prompt it is a score interval. ``S`` is that
    of the plain answers there. Rewards are compared where both answer.
    """
    rows = []
    for (regime, length), cell in lines.groupby(CELL):
        values = cell.set_index(["arm", "prompt_id"])
        plain = cell.loc[cell["arm"].isin(PLAIN), "answers"].mean()
        for (arm, reference), measures in PAIRS.items():
            if not {arm, reference} <= {*cell["arm"]}:
                continue
            for measure in measures:
                ours, theirs = (values.xs(name)[measure] for name in (arm, reference))
                gains = ours.astype(float) - theirs.astype(float)  # NaN where one has no line
                same = measure in CAPS and not gains.any()
                row = {"regime": regime, "length": length, "S": plain, "arm": arm}
                row |= {"reference": reference, "measure": measure}
                rows.append(row | paired.clustered(gains, verdict=same))
    return pd.DataFrame(rows)


# --- the law --------------------------------------------------------------------------------------

SEARCHES = ("rejection", "backtracking")
RESAMPLES = 2_000


def law(share: float) -> float:
    """Return the price of rejection sampling, in L, if breaches come at a constant rate.

    With S the share of plain answers within budget and x = -ln S it is (e^x - 1) / x.
    """
    if share in (0, 1):
        return 1.0 if share else math.inf
    x = -math.log(share)
    return math.expm1(x) / x


# a resample without a safe answer has an infinite x or cost, and one of both no ratio
@np.errstate(divide="ignore", invalid="ignore")
def growth(lines: pd.DataFrame) -> pd.DataFrame:
    """Return what answers cost beside the law, a row for each cell and search, and their slopes.

    ``S`` is the share of plain answers within budget, of the arm ``plain``, whose seed is its own;
    ``x`` is -ln S. ``cost`` is the tokens per answer of a search, in L, the mean tokens of its
    answers, with a 95 % bootstrap interval over prompts; ``law`` is `law` of S, and
    ``log_ratio`` the logarithm of their ratio. In a row whose length is ``all`` it is its slope
    against x over all cells of rejection sampling: 0 if tokens grow as the law says.
    """
    cells = [(about, cell) for about, cell in lines.groupby(CELL) if {*SEARCHES} < {*cell["arm"]}]
    cells = [(about, cell) for about, cell in cells if "plain" in set(cell["arm"])]
    draws: list[tuple[np.ndarray, np.ndarray]] = []  # x and log ratio of each cell, resampled
    rows = []
    for (regime, length), cell in cells:
        by_arm = {arm: own.set_index("prompt_id") for arm, own in cell.groupby("arm")}
        prompts = by_arm["plain"].index
        index = _resampled(len(prompts))
        share = by_arm["plain"]["answers"].to_numpy(float)[index].mean(axis=1)
        x, expected = -np.log(share), np.array([law(each) for each in share])
        for name in SEARCHES:
            cost = _cost(by_arm[name].loc[prompts], index)
            away = np.log(cost / expected)
            # not between two of them: one may be infinite
            low, high = np.quantile(cost[1:], [0.025, 0.975], method="nearest")
            row = {"regime": regime, "length": length, "search": name, "n_prompts": len(prompts)}
            row |= {"S": share[0], "x": x[0], "law": expected[0], "cost": cost[0]}
            rows.append(row | {"low": low, "high": high, "log_ratio": away[0]})
            if name == "rejection":
                draws.append((x, away))
    if len(draws) > 1:
        slopes = _slopes(*(np.vstack(each) for each in zip(*draws, strict=True)))
        low, high = pd.Series(slopes[1:]).quantile([0.025, 0.975])  # without those of no ratio
        row = {"regime": "all", "length": "all", "search": "rejection"}
        rows.append(row | {"log_ratio": slopes[0], "low": low, "high": high})
    return pd.DataFrame(rows)


def _resampled(n: int) -> np.ndarray:
    """Return the places of n prompts, and of `RESAMPLES` resamples, the same in every cell."""
    places = np.random.default_rng(0).integers(0, n, (RESAMPLES, n))
    return np.vstack([np.arange(n), places])


def _cost(own: pd.DataFrame, index: np.ndarray) -> np.ndarray:
    """Return the tokens per answer, in mean tokens of an answer, of each resample.

    It is infinite in one without an answer.
    """
    answers, sampled = own["answers"].to_numpy(float), own["policy_tokens"].to_numpy(float)
    spoken = own["n_tokens"].to_numpy(float) * answers
    # tokens / answers over spoken / answers
    cost: np.ndarray = sampled[index].sum(axis=1) / spoken[index].sum(axis=1)
    return cost


def _slopes(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the least-squares slope of each column of y (cells, resamples) on that of x."""
    dx, dy = x - x.mean(axis=0), y - y.mean(axis=0)
    slope: np.ndarray = (dx * dy).sum(axis=0) / (dx**2).sum(axis=0)
    return slope
