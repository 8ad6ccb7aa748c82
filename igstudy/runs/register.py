"""Register claims before their runs, unless they could not go either way.

``python -m igstudy.runs.register params/mine/claims.yaml tune runs/mine/claims`` reads the finished
pilot runs of the profile ``tune`` and prints the table of `igstudy.report.decidable`. Where each
claim is decidable it registers the file in the folder, with the table beside it as
``decidable.csv``; without a folder it only prints.
"""

import argparse
import json
import sys
from pathlib import Path

from igcore.errors import IgcoreError, ParameterError, RunError

from ..files import replace_file
from ..report.claims import ClaimsFile, load_claims
from ..report.decidable import check_decidable, decidable
from ..report.load import load_finished


def register(file: ClaimsFile, folder: Path) -> None:
    """Keep the digest of a claims file before its runs start.

    Raises
    ------
    RunError
        When another digest is kept there: the file was edited after its runs had started.
    """
    kept = folder / "registered.json"
    if not kept.exists():
        replace_file(kept, json.dumps({"claims": file.digest}) + "\n")
    check_registered(file, folder)


def check_registered(file: ClaimsFile, folder: Path) -> None:
    """Raise ``RunError`` unless this very claims file was registered."""
    try:
        known = json.loads((folder / "registered.json").read_text(encoding="utf-8"))["claims"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"{folder / 'registered.json'} does not say which claims were registered before the "
            "runs; delete the folder of the profile and run again"
        ) from error
    if known != file.digest:
        raise RunError(
            f"{file.path} (sha256 {file.digest[:12]}) is not the file that was registered before "
            f"its runs ({known[:12]}); restore it, or delete {folder.parent} and run again"
        )


def check_pilots(file: ClaimsFile) -> None:
    """Raise ``ParameterError`` unless each claim's pilot has other prompts and another seed."""
    pilots = file.pilot().regimes
    for name in {name for claim in file.claims.values() for name in claim.regimes}:
        regime, pilot = file.regimes[name], pilots[name]
        same_prompts = (pilot.prompts, pilot.split) == (regime.prompts, regime.split)
        if same_prompts or pilot.seed == regime.seed:
            shared = f"split {pilot.split!r}" if same_prompts else f"seed {pilot.seed}"
            raise ParameterError(
                f"regime {name!r} of {file.path} has the {shared} of its pilot; name another split "
                "or set of prompts in pilot, and another seed"
            )


def register_decidable(path: Path, profile: str, folder: Path | None = None) -> None:
    """Print what imagined arms would get, and register the claims in a folder.

    Raises
    ------
    ParameterError
        For a file that cannot be read, a pilot on the prompts of a claim, or a claim that cannot go
        either way.
    RunError
        When another file was registered in the folder, or the pilot lacks lines.
    """
    file = load_claims(path)
    if folder and (folder / "registered.json").exists():
        check_registered(file, folder)
    check_pilots(file)
    pilot = load_finished(profile, "?*")
    table = decidable(file, pilot)
    print(table.drop(columns="why").to_string(index=False))
    for claim, why in table.groupby("claim", sort=False)["why"].first().items():
        print(f"{claim}: {why or 'decidable'}")
    check_decidable(table)
    if folder:
        register(file, folder)
        replace_file(folder / "decidable.csv", table.to_csv(index=False))


def main() -> None:
    """Read the command line; an error is one sentence, and the exit status is 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="the claims")
    parser.add_argument("profile", help="the profile of the pilot runs")
    parser.add_argument("folder", type=Path, nargs="?", help="where the file is registered")
    given = parser.parse_args()
    try:
        register_decidable(given.file, given.profile, given.folder)
    except IgcoreError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
