"""``make rehearsal``: the complete grid of params/paper on tiny random checkpoints, the judge
included. Knows the order of work.

Nothing that comes out means anything but that every file format, adapter, notebook and table works.
What was rehearsed stands in ``runs/rehearsal``, as the real runs will in ``runs/paper``.
"""

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

import yaml

from igcore.errors import IgcoreError
from igstudy.files import root
from igstudy.runs.paramfiles import ParamFiles
from tests.rehearsal.checkpoints import build_checkpoints
from tests.rehearsal.data import build_data
from tests.rehearsal.stub import stub_judge


def build_mirror(folder: Path) -> Path:
    """Fill a folder with models and prompt sets as ``<owner>/<name>``, unless it is there; nothing
    half-built is left.
    """
    if not folder.is_dir():
        part = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        build_checkpoints(part)
        build_data(part)
        part.replace(folder)
    return folder


def rehearse(folder: Path, cores: int) -> int:
    """Walk through params/paper with what `params/rehearsal.yaml` changes; return Snakemake's exit
    status.
    """
    mirror = build_mirror(folder / "hub")
    changes = yaml.safe_load((root() / "params/rehearsal.yaml").read_text(encoding="utf-8"))
    with stub_judge() as stub:
        for file in ParamFiles("paper", base=root() / "params").files("judge"):
            judge = yaml.safe_load(file.read_text(encoding="utf-8"))["judge"]
            changes["judge"] = changes.get("judge", {}) | {
                "judge": judge | {"base_url": stub.base_url}
            }
        (folder / "changes.yaml").write_text(yaml.safe_dump(changes), encoding="utf-8")
        config = ["profile=paper", f"with={folder / 'changes.yaml'}", f"hub={mirror}"]
        jobs = cores + 1  # a third of a job this small is waiting for its kernel
        # the Snakefile locks the folder itself
        options = f"--nolock --cores {jobs} --quiet rules --rerun-incomplete --config".split()
        command = [sys.executable, "-m", "snakemake", *options, *config]
        return subprocess.run(command, cwd=root(), check=False).returncode


def main(arguments: list[str] | None = None) -> int:
    """Rehearse from the command line; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.rehearsal", description="Rehearse params/paper without a download."
    )
    parser.add_argument("--cores", type=int, default=2)
    given = parser.parse_args(arguments)
    began = time.monotonic()
    try:
        status = rehearse(root() / "runs/rehearsal", given.cores)
    except IgcoreError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if not status:
        print(
            f"rehearsed in {(time.monotonic() - began) / 60:.1f} minutes; tables and figures "
            f"are in runs/rehearsal/figures"
        )
    return status


if __name__ == "__main__":
    sys.exit(main())
