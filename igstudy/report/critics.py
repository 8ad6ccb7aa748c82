"""The tables that finished runs of notebook 20 have left, read without loading a critic."""

import json
from pathlib import Path

import pandas as pd

from igcore.settings import Named

from ..files import root
from .tables import by_prompt_set

# of ``critic.csv``: how well f1 tells safe from unsafe, a row per critic and position
COLUMNS = (
    "policy features use_z position auroc auroc_low auroc_high auroc_within_prompt spearman ece "
    "parameters train_s within_low within_high n n_unsafe n_pairs accounting"
).split()


def load_finished(profile: str) -> pd.DataFrame:
    """Return the tables of all finished runs of notebook 20 in a profile, concatenated.

    The table is empty when there is no run. Where critics of one policy belong to several prompt
    sets, the policy gets a name for each set; where they belong to several budgets, the table has
    those of the first run, as budgets cannot be compared. For every unfinished run a sentence is
    printed that says why it is left out.
    """
    names = ["critic", *COLUMNS]
    tables = [pd.DataFrame(columns=[*names, "prompts", "budget"])]
    for folder in sorted((root() / "runs" / profile / "critics").glob("[!.]*/")):
        manifest = folder / "manifest.json"
        if not manifest.exists():
            print(
                f"left out: the critics in {folder} have not finished; run notebook 20 again with "
                "the same settings, which goes on"
            )
            continue
        made = json.loads(manifest.read_text(encoding="utf-8"))
        prompts = Path(Named.of(made["prompts"]).name).stem
        about = {"prompts": prompts, "budget": made["budget"]}
        tables.append(pd.read_csv(folder / "critic.csv").assign(**about))
    # a table without rows would change the types of columns
    filled = [table for table in tables if len(table)] or tables
    found = pd.concat(filled, ignore_index=True)
    first = found.groupby(["policy", "prompts"])["budget"].transform("first")
    return by_prompt_set(found[found["budget"] == first])[names]
