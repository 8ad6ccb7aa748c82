"""Score lines of all runs of a profile again, in one process.

``python -m igstudy.runs.spotcheck JOB OUTPUT`` is a job of Snakemake. It fails if a line does not
hold, else it writes how many did.
"""

import json
import sys
from pathlib import Path

from igcore.errors import IgcoreError, RunError
from igcore.files import replace_file, root
from igcore.settings import written

from ..linefile import Fields, read
from ..trust import admit, loaded
from ..yamlfile import read_yaml
from .decode_params import DecodeParams
from .rescore import rescored


def spotcheck(job: Path) -> Fields:
    """Score a line of each method of each run again, and return how many.

    Parameters
    ----------
    job : Path
        Its ``runs`` map the folders of runs, seen from `igcore.files.root`, to their params.

    Raises
    ------
    RunError
        Naming the first thing that does not hold.
    """
    given = read_yaml(job)
    admit(given, job)
    asked: dict[str, DecodeParams] = {}  # by scorers, which are loaded and examined once
    chosen: dict[str, list[tuple[str, Fields]]] = {}
    for number, (folder, settings) in enumerate(given["runs"].items()):
        params = DecodeParams(**settings)
        scorers = json.dumps(written({"cost": params.cost, "reward": params.reward}))
        asked[scorers] = params
        lines = read(root() / folder / "responses.jsonl")
        for method in params.methods:
            own = [(folder, line) for line in lines if line["method"] == method]
            # not always of the first prompt; a shard may have none
            chosen.setdefault(scorers, []).extend(own[number % max(len(own), 1) :][:1])
    for scorers, found in chosen.items():
        cost, reward = loaded(asked[scorers].cost), loaded(asked[scorers].reward, "reward")
        for problem in rescored([line for _, line in found], cost, reward):
            at, _, what = problem.removeprefix("line ").partition(", ")
            raise RunError(f"{found[int(at) - 1][0]} does not hold: {what}")
    return {"runs": len(given["runs"]), "lines": sum(map(len, chosen.values()))}


def main(job: str, output: str) -> None:
    """Check the runs of a job, and write what was found."""
    try:
        found = spotcheck(Path(job))
        replace_file(Path(output), json.dumps(found) + "\n")
    except IgcoreError as error:
        sys.exit(f"error: {error}")
    print(f"{found['lines']} lines of {found['runs']} runs scored again: all hold")


if __name__ == "__main__":
    main(*sys.argv[1:])
