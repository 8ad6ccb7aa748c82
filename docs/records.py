"""Pack the raw records behind the committed tables of a profile, and unpack them into ``runs``.

``python -m docs.records pack small`` writes ``records/small.tar.xz`` with every line, verdict and
manifest of the profile, and its hash into ``records/SHA256SUMS``; the same records give the same
bytes. ``python -m docs.records unpack`` compares the hashes and puts all of it where ``igstudy
verify`` and the notebooks look. With the file of a Snakemake job it unpacks the runs that the job
would make. ``python -m docs.records verify tokens`` judges every text in them again, and asks the
policy for every token, as the files in ``params`` request; ``verify 3`` decodes three random groups
of every run again instead, except for runs whose critic a walk trains. The exit status is that of
``igstudy verify``. It continues where it was stopped, and ``--runs 12`` takes twelve runs, chosen
by a hash. Texts in them are not masked.

Of the prompt sets in `WITHHELD` an archive has digests and lengths in place of texts, so that only
lines that are decoded again can be decided: a number has such runs decoded again as a whole.
``python -m docs.records verify tokens searches`` needs the policy `qwen-0.5b`.
"""

import argparse
import io
import json
import lzma
import multiprocessing
import re
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from igcore.errors import IgcoreError, RunError, one_line
from igcore.files import digest_of, file_digest, writing
from igserve.yamlfile import read_yaml
from igstudy.commands import ERROR, FAILS, HOLDS, number_all_or_tokens, verdict
from igstudy.files import replace_file, root
from igstudy.linefile import read_record, unpacked, without_texts
from igstudy.provenance import UNPACKED, commit
from igstudy.runs.paramfiles import ParamFiles, runs_of

if TYPE_CHECKING:  # it loads torch, which unpacking does not need
    from igstudy.runs.verify import Replay, Report

RECORDS = ("*.jsonl", "*.json", "*.csv")
# sets of harmful prompts, and of what resembles them: their texts are in no archive
WITHHELD = ("strongreject", "wsr-harmful", "wsr-harmless")
# a profile with a policy that is fetched, which is verified by name only
FETCHED = "searches"
SUM = re.compile(r"([0-9a-f]{64})  ([A-Za-z0-9_-]+)\.tar\.xz")  # a line of SHA256SUMS


def record_files(folder: Path) -> list[Path]:
    """Return the records below the runs of a profile: no notebooks, tables, jobs, old files."""
    found = {path for pattern in RECORDS for path in folder.rglob(pattern)}
    below = {path: path.relative_to(folder).parts for path in found}
    return sorted(
        path
        for path, parts in below.items()
        if parts[0] != "figures" and not any(part[0] == "." for part in parts)
    )


def pack(profile: str, base: Path) -> Path:
    """Write the archive of a profile and its hash."""
    files = record_files(base / "runs" / profile)
    withheld: dict[Path, bytes] = {}
    for path in files:
        if path.name == "responses.jsonl" and _is_withheld(path):
            withheld |= without_texts_of(path)
    if not files:
        raise RunError(f"runs/{profile} holds no records; run the profile first")
    archive = base / "records" / f"{profile}.tar.xz"
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:xz", format=tarfile.PAX_FORMAT) as tar:
        for path in files:
            entry = tarfile.TarInfo(path.relative_to(base).as_posix())  # no time, owner or mode
            content = withheld.get(path) or path.read_bytes()
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    hashes = known_hashes(base)  # first: what is wrong there is found before anything is written
    replace_file(archive, packed.getvalue())
    hashes |= {archive.name: file_digest(archive)}
    lines = [f"{digest}  {name}\n" for name, digest in sorted(hashes.items())]
    replace_file(archive.parent / "SHA256SUMS", "".join(lines))
    return archive


def _is_withheld(path: Path) -> bool:
    """True if the lines of a run answer prompts of `WITHHELD`."""
    settings = path.with_name("params.json")
    return settings.exists() and withheld(json.loads(settings.read_text()).get("prompts"))


def withheld(prompts: str | dict | None) -> bool:
    """True if a set of prompts, with options or without, is of `WITHHELD`."""
    return (prompts["name"] if isinstance(prompts, dict) else prompts) in WITHHELD


def without_texts_of(path: Path) -> dict[Path, bytes]:
    """Return the lines of a run without their texts, and a manifest with the hash over them.

    Tables name the run by its hash before that, which the manifest keeps as ``root_with_texts``.
    """
    record = read_record(path)
    lines = [without_texts(line) for line in record.lines]
    manifest = record.manifest | {"root_with_texts": record.manifest.get("root")}
    packed = replace(record, lines=lines, manifest=manifest)
    manifest = manifest | {"root": packed.root}
    return {
        path: "".join(json.dumps(line) + "\n" for line in lines).encode(),
        path.with_name("manifest.json"): json.dumps(manifest, indent=1).encode(),
    }


def known_hashes(base: Path, only: str = "") -> dict[str, str]:
    """Return the hashes of all archives, or of one profile's, by name.

    Raises
    ------
    RunError
        For a line that is no hash.
    """
    path = base / "records/SHA256SUMS"
    lines = path.read_bytes().splitlines() if path.exists() else []
    sums = [SUM.fullmatch(line.decode(errors="replace")) for line in lines]
    if None in sums:
        raise RunError(
            f"line {1 + sums.index(None)} of records/SHA256SUMS is no sha256, two spaces and the "
            "name of an archive; get the file again from the repository"
        )
    return {f"{found[2]}.tar.xz": found[1] for found in sums if found and only in ("", found[2])}


def unpack(base: Path, into: Path, only: str = "") -> list[str]:
    """Extract all archives into the folder ``runs`` of `into`, and return the profiles.

    Nothing is written unless all of them have the hashes that are kept. Every manifest gets the
    empty file `igstudy.provenance.UNPACKED` beside it, so that tables can name the origin of runs.

    Parameters
    ----------
    only : str
        The one profile to extract; by default all.

    Raises
    ------
    RunError
        For an archive that is not the one whose hash is kept, that cannot be unpacked, or that
        holds anything but files of its profile's runs; where a profile has runs already; and where
        nothing can be written.
    """
    profiles = {}
    for name, digest in known_hashes(base, only).items():
        archive, profile = base / "records" / name, name.removesuffix(".tar.xz")
        if not archive.exists() or file_digest(archive) != digest:
            raise RunError(
                f"records/{name} is not what was packed; get it again from the repository"
            )
        if (into / "runs" / profile).exists():
            raise RunError(f"runs/{profile} is there already; move it away, then unpack again")
        profiles[profile] = archive
    with writing(into / "runs"):
        (into / "runs").mkdir(parents=True, exist_ok=True)
        for profile, archive in profiles.items():
            # beside its place, so that a stop or a full disk leaves no half of it there
            with tempfile.TemporaryDirectory(prefix=".unpacked-", dir=into / "runs") as half:
                try:
                    with tarfile.open(fileobj=io.BytesIO(unpacked(archive)), mode="r:") as tar:
                        tar.extractall(half, filter=partial(_only, profile))
                except (tarfile.TarError, lzma.LZMAError, EOFError) as error:
                    raise RunError(
                        f"records/{archive.name} is no archive of files ({one_line(error)}); get "
                        "it again from the repository, and see who has changed it"
                    ) from error
                for manifest in Path(half).rglob("manifest.json"):
                    manifest.with_name(UNPACKED).touch()
                (Path(half) / "runs" / profile).rename(into / "runs" / profile)
    return list(profiles)


def unpack_job(job: Path, base: Path) -> list[str]:
    """Extract the runs that a Snakemake job would make, and return their names.

    Those that were unpacked before are replaced, each as a whole.

    Parameters
    ----------
    job : Path
        See `igstudy.runs.jobs.request`; its setting ``records`` plays no part.

    Raises
    ------
    RunError
        See `unpack`; and unless the archive has all these runs, with the job's settings.
    """
    wanted = read_yaml(job)
    wanted.pop("records", None)
    below, profile = "critics" if job.name.startswith("critic-") else "", wanted["profile"]
    runs = dict(runs_of(wanted, job))
    with tempfile.TemporaryDirectory(prefix=".unpacked-", dir=base / "runs") as half:
        unpack(base, Path(half), profile)
        for run, given in runs.items():
            place = Path("runs", profile, below, run)
            manifest = Path(half, place, "manifest.json")
            held = json.loads(manifest.read_text()) if manifest.exists() else {}
            if not given.items() <= held.get("params", held).items():
                raise RunError(
                    f"records/{profile}.tar.xz has no run {run!r} with the settings of "
                    f"params/{profile}; make all runs here, with FULL=1"
                )
            if (base / place / UNPACKED).exists():
                (base / place).rename(Path(half, run))
            Path(half, place).rename(base / place)  # onto nothing, or an empty folder
    return list(runs)


def _only(profile: str, member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo:
    """Refuse a member of an archive that is no record below the runs of its profile."""
    path = PurePosixPath(member.name)
    below = path.parts[:2] == ("runs", profile) and ".." not in path.parts
    whole = member.isreg() and not member.issparse()  # a sparse file may be of any size
    packed = any(map(path.match, RECORDS))
    if not (below and whole and packed):
        kind = "record" if below and whole else "file"
        raise RunError(
            f"records/{profile}.tar.xz holds {member.name!r:.100}, which is no {kind} below "
            f"runs/{profile}; get it again from the repository, and see who has changed it"
        )
    # the present time, not 1970: what is older than its table would not be read again
    return tarfile.data_filter(member, folder).replace(mtime=None)


def verified(
    base: Path, replay: "Replay", profiles: Sequence[str] = (), some: int | None = None
) -> "Iterator[tuple[str, Report]]":
    """Yield every run of the archives and what a verification found, groups decoded again.

    The files in ``params`` of this repository ask for the runs. Runs are verified side by side, one
    on each core. Those that held are noted in ``runs/verified.txt``, with the code's commit and the
    archive's hash, and not verified again.

    Parameters
    ----------
    replay : int, "tokens" or None
        See `igstudy.runs.verify.verify`. With a number of groups runs of `WITHHELD` prompts are
        decoded again as a whole, and those whose critic a walk trains not at all.
    profiles : sequence of str
        By default all but `FETCHED`.
    some : int, optional
        How many runs, the first by the hash of what would be noted.

    Raises
    ------
    RunError
        See `unpack`; and for a record of a run that no file of ``params`` requests.
    """
    from igstudy.runs.verify import Report

    notes, sums = base / "runs/verified.txt", known_hashes(base)
    notes.parent.mkdir(exist_ok=True)  # a fresh clone has none
    before = notes.read_text().splitlines() if notes.exists() else []
    code = commit() or "+"  # with + the code is unknown, and nothing is noted
    new = multiprocessing.get_context("spawn")  # torch cannot be used after a fork
    with tempfile.TemporaryDirectory() as scratch, ProcessPoolExecutor(mp_context=new) as pool:
        tasks = {}  # by the line that is noted when a run holds
        unpacked = unpack(base, Path(scratch))
        for profile in profiles or [name for name in unpacked if name != FETCHED]:
            runs = ParamFiles(profile, base=base / "params").runs()
            folder = Path(scratch) / "runs" / profile
            held = {path.parent.name for path in folder.glob("**/responses.jsonl")}
            if unasked := sorted(held - runs.keys()):
                raise RunError(
                    f"records/{profile}.tar.xz holds the run {unasked[0]!r}, which no file of "
                    f"params/{profile} asks for; pack the profile again"
                )
            for run, given in runs.items():
                note = f"{code} {replay} {sums[f'{profile}.tar.xz']} {profile}/{run}"
                whole = withheld(given["prompts"]) and isinstance(replay, int)
                lines = folder / run / "responses.jsonl"
                tasks[note] = (f"{profile}/{run}", lines, given, None if whole else replay)
        chosen = sorted(tasks, key=digest_of)[:some]
        left = [note for note in chosen if note not in before]
        for note in (note for note in chosen if note in before):
            yield tasks[note][0], Report(replayed="this was found before")
        # closing: after an error here, no run is begun
        with closing(pool.map(_verify_run, [tasks[note] for note in left])) as found:
            for note, (run, report) in zip(left, found, strict=True):
                if verdict(run, report)[0] == HOLDS and not code.endswith("+"):
                    with writing(notes), notes.open("a") as file:
                        file.write(note + "\n")
                yield run, report


def _verify_run(task: "tuple[str, Path, dict, Replay]") -> "tuple[str, Report]":
    """Verify one run on one thread; a record that cannot be compared is a problem of this run.

    A critic below ``runs`` is trained by a walk, and another processor trains another one: a run
    with such a critic is scored again, and its tokens may be asked for, but it is not decoded.
    """
    import torch

    from igstudy.runs.decode_params import DecodeParams
    from igstudy.runs.verify import Report, verify

    torch.set_num_threads(1)
    name, lines, given, replay = task
    trained = (given.get("critic") or "").startswith("runs/") and replay != "tokens"
    try:
        report = verify(lines, DecodeParams(**given), 0 if trained else replay)
    except RunError as error:
        return name, Report([str(error)])
    if trained and replay != 0:
        report.undecided.append(
            f"{given['critic']} is in no archive; `make reproduce` trains it, decodes the run again"
            " and compares the answers"
        )
    return name, report


def main() -> None:
    """Pack the records of profiles, or unpack all that are kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("pack").add_argument("profiles", nargs="+")
    commands.add_parser("unpack").add_argument("job", nargs="?", type=Path)
    checked = commands.add_parser("verify")
    groups = "'tokens', or so many groups of every run"
    checked.add_argument("replay", type=number_all_or_tokens, help=groups)
    checked.add_argument("--runs", type=int, help="how many runs, by hash; by default all")
    checked.add_argument("profiles", nargs="*", help="by default all that need no fetching")
    given = parser.parse_args()
    try:
        if given.command == "unpack":
            runs = unpack_job(given.job, root()) if given.job else unpack(root(), root())
            print("unpacked", *runs)
        elif given.command == "pack":
            for profile in given.profiles:
                archive = pack(profile, root())
                print(f"records/{archive.name}: {archive.stat().st_size / 1e6:.1f} MB")
        else:
            sys.exit(_print(verified(root(), given.replay, given.profiles, given.runs)))
    except IgcoreError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(ERROR)


def _print(found: "Iterator[tuple[str, Report]]") -> int:
    """Print the verdict on every run; return the exit status."""
    statuses = {HOLDS}
    for run, report in found:
        status, lines = verdict(run, report)
        print(*lines, sep="\n", flush=True)
        statuses.add(status)
    return FAILS if FAILS in statuses else max(statuses)


if __name__ == "__main__":
    main()
