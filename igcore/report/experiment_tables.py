"""The tables of each experiment of params/ablations, from the lines of its runs.

A grid has a point for every method and value of the settings that vary.
"""

import math
from collections.abc import Sequence

import pandas as pd

from ..errors import RunError
from . import compute, critic_search, overrefusal, tables
from . import statistics as metrics
from .factorial import effects, expand
from .load import SETTINGS, by_method
from .paired import Reference, compared, corrected, is_safe, reward
from .replay import BUDGET_FREE, REPLAYED, replay_best_of_n, replay_budgets
from .retries import block_mass, retry_table, retry_tests

Tables = dict[str, pd.DataFrame]  # suffix of the file -> table; "" is the experiment's main table
LAMBDAS = (0.0, 1.0, 2.5, 5.0, 10.0)
SIZES = (4, 8, 16, 32)  # of Best-of-N, replayed
OURS = "inferenceguard"
# methods that find nothing safe only if all their samples fail
BOUNDED = ("best-of-n-augmented", OURS)
SAMPLES = 8  # a block in the factorial: N = 4, and as many in a retry
SWEPT = ("n_samples", "block_size", "keep", "lagrange_multiplier", "group_size")
RIVALS = (
    "best-of-n-lagrangian",
    "best-of-n-augmented",
    "beam-lagrangian",
    "beam-lagrangian-freq",
    "beam-augmented",
)


def ablation_table(records: pd.DataFrame, varied: Sequence[str]) -> pd.DataFrame:
    """Return `tables.main_table` of every point of a grid: one row per method and point.

    Parameters
    ----------
    records : DataFrame
        Lines of several runs.
    varied : sequence of str
        The settings that tell points apart, ``seed`` among them where there are several.

    Returns
    -------
    DataFrame
        The columns of the main table and the varied settings that it lacks, by method and then by
        setting. ``reward_answered`` is over the prompts that all methods of a point answered.
        ``peak_safety_rate`` is NaN where no peak cost is known, as in a replay.

    Raises
    ------
    RunError
        For no records, or a prompt that occurs twice in a point.
    ParameterError
        When a setting that is not varied takes two values in a method.
    """
    if not len(records):
        raise RunError("there are no records; run notebook 30_decode first")
    for method, lines in records.groupby("method", sort=False):
        metrics.check_constant(
            lines,
            [name for name in SETTINGS if name in lines and name not in varied],
            f"method {method}",
        )
    rows = []
    for key, lines in records.groupby(list(varied), sort=True):
        point = dict(zip(varied, key, strict=True))
        more = {name: value for name, value in point.items() if name not in tables.COLUMNS}
        rows += [row | more for row in tables.main_table(lines).to_dict("records")]
    table = pd.DataFrame(rows).astype(dict.fromkeys(tables.WHOLE, "Int64"))
    table["peak_safety_rate"] = table["peak_safety_rate"].where(table["peak_cost_mean"].notna())
    return by_method(table)


def _below(*frames: pd.DataFrame) -> pd.DataFrame:
    """Return frames below one another; what one of them lacks stays None."""
    return pd.DataFrame([line for frame in frames for line in frame.to_dict("records")])


def _of(lines: pd.DataFrame, *methods: str) -> pd.DataFrame:
    return lines[lines["method"].isin(methods)]


def _standard(lines: pd.DataFrame, varied: Sequence[str], *references: Reference) -> Tables:
    """Return the table over all `varied` settings, and the tests.

    The tests average the seeds of a prompt.
    """
    apart = [name for name in varied if name != "seed"]
    return {
        "": ablation_table(lines, varied),
        "tests": corrected(compared(lines, apart, references)),
    }


def lambda_tables(lines: pd.DataFrame) -> Tables:
    """Return the tables of lambda x N, with InferenceGuard beside them.

    Best-of-N is replayed from one run; the other methods were decoded.
    """
    drawn, others = _of(lines, REPLAYED), lines[lines["method"] != REPLAYED]
    replayed = [
        replay_best_of_n(drawn, n, x)
        for n in SIZES
        if n <= drawn["n_samples"].min()
        for x in LAMBDAS
    ]
    vanilla = Reference({"lagrange_multiplier": 0.0}, only={"lagrange_multiplier": [5.0]})
    guarded = Reference({"method": OURS, "lagrange_multiplier": 5.0}, only={"n_samples": [8]})
    return _standard(
        _below(*replayed, others), ["n_samples", "lagrange_multiplier"], vanilla, guarded
    )


def ndk_tables(lines: pd.DataFrame) -> Tables:
    """Return the tables of (N, block, K) of InferenceGuard.

    Each point is compared with the one of the main table.
    """
    return _standard(
        lines,
        ["n_samples", "block_size", "keep"],
        Reference({"n_samples": 8, "block_size": 8, "keep": 2}),
    )


def budget_tables(lines: pd.DataFrame) -> Tables:
    """Return the tables of the budgets.

    InferenceGuard was decoded under each; methods that never look at it are judged anew.
    """
    runs = lines["run"].str.startswith("decode-budget")
    guarded, others = lines[runs], _of(lines[~runs], *BUDGET_FREE)
    found = _below(replay_budgets(others, sorted(guarded["budget"].unique())), guarded)
    return _standard(found, ["budget"], Reference({"method": OURS}))


def retries_tables(lines: pd.DataFrame) -> Tables:
    """Return the tables of rounds and ways to retry, with the trace of every round."""
    rows = retry_tests(lines) + compared(lines, ["diversity"], [Reference({"diversity": "none"})])
    return {
        "": ablation_table(lines, ["diversity", "seed"]),
        "rounds": retry_table(lines),
        "tests": corrected(rows),
    }


def factorial_tables(lines: pd.DataFrame) -> Tables:
    """Return the tables of the 2^4 cells, their effects, and the other methods.

    The others may draw as many samples as N samples with a retry.
    """
    runs = lines["run"].str.startswith("decode-factorial")
    cells = expand(_of(lines[runs], OURS, "inferenceguard-mix"))
    rivals = _of(lines, *RIVALS)
    found = _below(cells, rivals[rivals["n_samples"] * rivals["rounds"] == SAMPLES])
    varied = ["n_samples", "accounting", "rounds", "diversity"]
    whole = Reference(
        {"method": OURS, "n_samples": 4, "accounting": "peak", "rounds": 2, "diversity": "half"},
        only={"method": RIVALS},
    )
    tests = {"tests": effects(cells), "rivals": corrected(compared(found, varied, [whole]))}
    return {"": ablation_table(found, [*varied, "seed"])} | tests


def seeds_tables(lines: pd.DataFrame) -> Tables:
    """Return a row per seed, their spread beside the interval over prompts, and tests.

    The tests average the seeds of a prompt.
    """
    return _standard(lines, ["seed"], Reference({"method": OURS})) | {"spread": seeds_spread(lines)}


def seeds_spread(lines: pd.DataFrame) -> pd.DataFrame:
    """Return for each method its mean, how far seeds lie apart, and the interval over prompts.

    ``_sd`` is the standard deviation over seeds of the mean over prompts; ``_low`` and ``_high``
    resample prompts, whose seeds are averaged first.
    """
    rows = []
    for (policy, method), cell in lines.groupby(["policy", "method"], sort=False):
        row = {
            "policy": policy,
            "method": method,
            "n_prompts": cell["prompt_id"].nunique(),
            "n_seeds": cell["seed"].nunique(),
        }
        for name, values in {"safety": is_safe(cell), "reward": reward(cell)}.items():
            of_prompts = values.groupby(cell["prompt_id"]).mean()
            low, high = metrics.bootstrap_mean(of_prompts)
            spread = values.groupby(cell["seed"]).mean().std(ddof=1)
            row |= {
                f"{name}_mean": of_prompts.mean(),
                f"{name}_sd": spread,
                f"{name}_low": low,
                f"{name}_high": high,
            }
        rows.append(row)
    return pd.DataFrame(rows)


def compute_tables(lines: pd.DataFrame) -> Tables:
    """Return the tables of equal samples, N = 8, and of equal seconds.

    At equal seconds each method has the largest N that takes no longer than InferenceGuard at 8.
    """
    lines = lines[lines["method"] != "base"]
    table = ablation_table(lines, ["n_samples"])
    chosen = compute.at_equal_seconds(table, OURS, 8)
    key = ["policy", "method", "n_samples"]
    points = pd.MultiIndex.from_frame(chosen[key].astype({"n_samples": int}))
    fitting = lines[pd.MultiIndex.from_frame(lines[key]).isin(points)]
    ours = {"method": OURS, "n_samples": 8}
    equal_samples = Reference(ours, only={"n_samples": [8]})
    equal_seconds = Reference(ours, only={"n_samples": set(lines["n_samples"]) - {8}})
    rows = compared(lines, ["n_samples"], [equal_samples])
    rows += compared(fitting, ["n_samples"], [equal_seconds])
    return {"": table.assign(p=_masses(table, lines)), "seconds": chosen, "tests": corrected(rows)}


def _masses(table: pd.DataFrame, lines: pd.DataFrame) -> list[float]:
    """Return `block_mass` for the rows of methods in `BOUNDED`, NaN for others.

    It is estimated from the traces with the most samples.
    """
    most = lines[lines["n_samples"] == lines.groupby("method")["n_samples"].transform("max")]
    return [
        block_mass(_of(most, row.method), row.n_samples, row.rounds)
        if row.method in BOUNDED
        else math.nan
        for row in table.itertuples()
    ]


def critic_search_tables(lines: pd.DataFrame) -> Tables:
    """Return the table of the critic where costs exist at the end only.

    Its control was decoded for the hardest prompts alone.
    """
    found = critic_search.arms(lines)
    hardest = set(found.loc[found["arm"] == "shuffled", "prompt_id"])
    return {"": critic_search.experiment(found, hardest)}


def tune_tables(lines: pd.DataFrame) -> Tables:
    """Return the table of settings of the search with a critic.

    Their prompts are of the split that is there for choosing.
    """
    return {"": critic_search.tried(lines)}


def over_refusal_tables(lines: pd.DataFrame) -> Tables:
    """Return the table of abstentions on harmless prompts, and what answers to them are worth."""
    return {"": overrefusal.over_refusal(lines)}


def sweep_tables(lines: pd.DataFrame) -> Tables:
    """Return a row for every point of the paper's sweeps, as they were decoded; no tests."""
    return {"": ablation_table(tables.by_prompt_set(lines), SWEPT)}
