"""What waits for sweeps: which of our tables and pictures hold the runs of two profiles, and which
profile writes them.

The one place that says so; the Snakefile, the notebooks 40, 45 and 50 and the README ask here. From
the runs of one profile alone each of them would lose rows, cells or a panel; so the profile of the
sweeps writes them, when the runs of both have finished.
"""

from pathlib import Path

from ..errors import RunError
from ..runs.paramfiles import ParamFiles

MAIN = {"ablations": "small"}  # profile of sweeps -> the one whose main runs stand beside them
TABLES = (
    "lambda_alpaca_beaver",
    "lambda_vicuna",
    "ndk",
    "latency",
    "hyperparameters",
)  # of `igcore.paper.TABLES`
PICTURE = "pareto"


def waits(profile: str, name: str) -> bool:
    """Say whether a table or picture of this profile is left to notebook 45 and a profile of
    sweeps, see `MAIN`.

    Every other profile holds its own sweeps, and its notebooks 40 and 50 write everything.
    """
    return profile in {*MAIN, *MAIN.values()} and name in {*TABLES, PICTURE}


def check(profile: str, base: Path) -> None:
    """Raise ``RunError`` unless a profile sweeps for another and the runs of both have finished
    below `base`.
    """
    if profile not in MAIN:
        sweeping = ", ".join(MAIN)
        raise RunError(
            f"the profile {profile!r} sweeps for no other, as {sweeping} does; its notebooks "
            f"40 and 50 write everything"
        )
    missing = [f"{of}/{run}" for of in (MAIN[profile], profile) for run in unfinished(of, base)]
    if missing:
        others = f", nor have {len(missing) - 1} others" if missing[1:] else ""
        raise RunError(
            f"the run {missing[0]} has not finished{others}, so what is there stays, for it "
            f"may hold more; run `make reproduce` "
            "and then `make ablations`"
        )


def unfinished(profile: str, base: Path) -> list[str]:
    """Return the names of a profile's decode runs, by its files below ``params``, that are not
    whole below ``runs``.
    """
    files, folder = ParamFiles(profile, base=base / "params"), base / "runs" / profile
    names = [name for file in files.files("decode") for name, _ in files.points(file)]
    return [name for name in names if not _has_finished(folder, name)]


def _has_finished(folder: Path, run: str) -> bool:
    """Say whether a run is there as a whole, or in all shards of one sharding."""
    shards = [path.parent.name for path in folder.glob(f"{run}.*-of-*/manifest.json")]
    return (folder / run / "manifest.json").exists() or (
        bool(shards) and len(shards) == int(shards[0].rpartition("-")[2])
    )
