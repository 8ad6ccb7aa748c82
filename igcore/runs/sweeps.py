"""Whether the runs that a table of sweeps needs have finished, see `igcore.paper.swept`."""

from pathlib import Path

from ..errors import RunError
from ..paper import swept
from .paramfiles import ParamFiles


def check_finished(profile: str, base: Path) -> None:
    """Raise ``RunError`` unless a profile sweeps for another and the runs of both have finished.

    Parameters
    ----------
    profile : str
        A key of `igcore.paper.swept.MAIN`.
    base : Path
        The folder that holds ``params`` and ``runs``.
    """
    if profile not in swept.MAIN:
        sweeping = ", ".join(swept.MAIN)
        raise RunError(
            f"the profile {profile!r} sweeps for no other, as {sweeping} does; its notebooks 40 "
            "and 50 write everything"
        )
    both = swept.MAIN[profile], profile
    missing = [f"{of}/{run}" for of in both for run in unfinished(of, base)]
    if missing:
        others = f", nor have {len(missing) - 1} others" if missing[1:] else ""
        raise RunError(
            f"the run {missing[0]} has not finished{others}, so what is there stays, for it may "
            "hold more; run `make reproduce` and then `make ablations`"
        )


def unfinished(profile: str, base: Path) -> list[str]:
    """Return the names of a profile's decode runs that have not finished.

    The profile's files below ``params`` say which runs it has.
    """
    files, folder = ParamFiles(profile, base=base / "params"), base / "runs" / profile
    names = [name for file in files.files("decode") for name, _ in files.points(file)]
    return [name for name in names if not _has_finished(folder, name)]


def _has_finished(folder: Path, run: str) -> bool:
    """Say whether a run has finished, as a whole or in all shards of one sharding."""
    shards = [path.parent.name for path in folder.glob(f"{run}.*-of-*/manifest.json")]
    return (folder / run / "manifest.json").exists() or (
        bool(shards) and len(shards) == int(shards[0].rpartition("-")[2])
    )
