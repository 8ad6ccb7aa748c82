"""Write what the runs of params files need, for `igcore.runs.cluster`, which must not load torch.

``python -m igcore.runs.needs runs/small/.jobs/needs.json small`` is what Snakemake
starts where jobs must say what they take.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from ..errors import IgcoreError
from ..files import replace_file
from ..report.yamlfile import read_yaml
from .cluster import Need
from .paramfiles import ParamFiles
from .plan import Job, jobs
from .sharing import measured


def needs_of(
    files: ParamFiles, speeds: Mapping[tuple[str, str], float], speed: float | None = None
) -> Iterator[tuple[str, Need]]:
    """Yield name and need of every run whose models are known.

    A file that cannot be planned is named on stderr; its own job says the same.

    Parameters
    ----------
    speeds : mapping of (policy, method) to float
        Tokens per second.
    speed : float, optional
        Tokens per second of all methods, in the place of `speeds`.
    """
    kinds = ("critic", "decode", "examples", "regime")
    for file in [file for kind in kinds for file in files.files(kind)]:
        try:
            found = list(jobs([file], files))
        except IgcoreError as error:
            print(f"not planned: {error}", file=sys.stderr)
            continue
        for job in found:
            if not math.isnan(job.gib):
                name = f"critics/{job.run}" if file.stem.startswith("critic-") else job.run
                hours = hours_of(job, speeds, speed)
                need = Need(job.weights, job.prompt, job.group, hours)
                yield name, need


def hours_of(
    job: Job, speeds: Mapping[tuple[str, str], float], speed: float | None
) -> float | None:
    """Return the most hours of a run, None when the speed of one of its methods is not known."""
    hours = 0.0
    for method, tokens in job.tokens.items():
        per_second = speed or speeds.get((job.policy, method), math.nan)
        hours += tokens / per_second / 3600
    return None if math.isnan(hours) else hours


def main(arguments: Sequence[str] | None = None) -> None:
    """Write what the runs of a folder of params need."""
    parser = argparse.ArgumentParser(prog="python -m igcore.runs.needs", description=main.__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("folder", help="of params, such as small")
    parser.add_argument("--with", dest="changes", type=Path, help="YAML file of changes")
    parser.add_argument("--limit", type=int, default=0)
    parser.add_argument("--tokens-per-second", type=float)
    given = parser.parse_args(arguments)
    changes = read_yaml(given.changes) if given.changes else {}
    files = ParamFiles(given.folder, changes, given.limit)
    speeds = measured(Path("runs") / files.profile)
    needs = {name: asdict(need) for name, need in needs_of(files, speeds, given.tokens_per_second)}
    replace_file(given.out, json.dumps(needs, indent=1))


if __name__ == "__main__":
    main()
