"""What stands for the paper's rows where other policies were run.

A smaller model under another cost has other rates and rewards. What it can share with the paper is
the order of methods, which is what the paper's claims are about.
"""

from collections.abc import Sequence

import pandas as pd

from . import IDENTITY, SETTINGS, WHOLE, measured, reported
from .compare import Cell, cells, estimate, measures_of

EMBEDDED = RAW, CHAT = "smollm2-raw", "smollm2-chat"
# policy of the paper -> the embedded one that stands for it: unaligned or aligned, as it is
STANDS_FOR = {"alpaca-7b": RAW, "vicuna-7b": RAW, "beaver-7b-v3": CHAT, "llama-3.1-8b": CHAT}
TIMED = {"latency": RAW}  # table -> the one embedded policy whose seconds are measured
ALIKE = ["policy", "prompts", "method"]  # rows that differ in their settings only


def has_policies_of_the_paper(records: pd.DataFrame) -> bool:
    """Say whether records are of the paper's policies; without any record they are."""
    return not len(records) or bool(set(records["policy"]) & set(measured()["policy"]))


def standing_in(table: str, records: pd.DataFrame, policies: Sequence[str]) -> pd.DataFrame:
    """Return one of the paper's tables of results, and the runs that stand for its rows here.

    Parameters
    ----------
    table, records
        As in `compared`.
    policies : sequence of str
        Those that were run. Each stands for all of the paper's; where there are none but embedded
        ones, those of `STANDS_FOR` do.

    Returns
    -------
    DataFrame
        A row for every row of the paper and policy that stands for its own: `IDENTITY` and
        ``printed_as`` as reported, ``standing`` (the policy), ``run``, and the settings of the run,
        ``ours_`` and their names, see `nearest`. For each of `measures_of` there are ``_paper``,
        ``_ours``, ``_low``, ``_high`` and ``_n``. No verdict: other models, prompts and costs have
        other numbers, and what may agree is their order, see notebook 40.
    """
    candidates = cells(table, records)
    rows, measures, result = reported(table), measures_of(table), []
    embedded = set(policies) <= set(EMBEDDED)
    for row in rows.to_dict("records"):
        alike = rows[ALIKE].eq([row[name] for name in ALIKE]).all(axis=1)
        standing = [TIMED.get(table, STANDS_FOR[row["policy"]])] if embedded else policies
        for policy in standing:
            wanted = {"policy": policy, "method": row["method"]}
            of_method = [cell for cell in candidates if cell.settings.items() >= wanted.items()]
            cell = nearest(row, rows[alike], of_method) or Cell(wanted)
            made = {name: row[name] for name in [*IDENTITY, "printed_as"]}
            made |= {"standing": policy, "run": cell.run}
            made |= {f"ours_{name}": cell.settings.get(name) for name in SETTINGS}
            for name, measure in measures.items():
                numbers = {"paper": row[measure.reported]}
                numbers |= estimate(measure.values(cell), measure.kind)
                made |= {f"{name}_{part}": number for part, number in numbers.items()}
            result.append(made)
    types = WHOLE | {f"ours_{name}": kind for name, kind in WHOLE.items()}
    of_weights = dict.fromkeys(["lagrange_multiplier", "ours_lagrange_multiplier"], float)
    return pd.DataFrame(result).astype(types | of_weights)


def nearest(row: dict, printed: pd.DataFrame, candidates: Sequence[Cell]) -> Cell | None:
    """Return the cell that stands for a row of the paper, None where there is none.

    A multiplier must be the row's. Of all other settings that the row states, the smallest value
    here stands for the smallest there, the next for the next, and so on: N = 4 and 8 stand for 64
    and 128.

    Parameters
    ----------
    printed : DataFrame
        The rows of this policy, prompt set and method.
    candidates : sequence of Cell
        Of the method and the policy that stands here, the first choice first.
    """
    for name in SETTINGS:
        if pd.isna(row[name]):
            continue
        value = row[name]
        if name != "lagrange_multiplier":
            theirs = sorted(printed[name].dropna().unique())
            ours = sorted({cell.settings[name] for cell in candidates})
            place = theirs.index(value)
            value = ours[place] if place < len(ours) else None
            printed = printed[printed[name] == row[name]]
        candidates = [cell for cell in candidates if cell.settings[name] == value]
    return candidates[0] if candidates else None
