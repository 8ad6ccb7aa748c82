"""Tests of folders by name: local, in a mirror, on the hub; and of one clear sentence for whatever
the hub answers.
"""

import importlib
import re

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from igcore import AssetError
from igcore.models.hub import MIRROR, snapshot

REPO = "owner/name"


@pytest.fixture(autouse=True)
def no_mirror(monkeypatch, tmp_path):
    monkeypatch.delenv(MIRROR, raising=False)
    monkeypatch.chdir(tmp_path)


class Hub:
    """A hub with some files: records requests and writes the matching files."""

    def __init__(self, monkeypatch, folder, *files):
        self.folder, self.files, self.asked = folder, files, []
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.download)

    def download(self, repo, revision, repo_type, allow_patterns):
        from fnmatch import fnmatch

        self.asked.append((repo, revision, repo_type))
        for file in self.files:
            if allow_patterns is None or any(fnmatch(file, pattern) for pattern in allow_patterns):
                (self.folder / file).parent.mkdir(parents=True, exist_ok=True)
                (self.folder / file).touch()
        return str(self.folder)


def failing(monkeypatch, error):
    """Let the hub fail."""

    def download(*_, **__):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)


def answered(kind, status: int, text: str):
    """Return the error for a status of the hub."""
    request = importlib.import_module(errors.Response.__module__.split(".")[0]).Request(
        "GET", f"https://huggingface.co/{REPO}"
    )
    return kind(text, response=errors.Response(status, request=request))


def raised(*arguments, **more) -> str:
    with pytest.raises(AssetError) as caught:
        snapshot(*arguments, **more)
    message = str(caught.value)
    assert "\n" not in message and re.search("; ", message)  # what is wrong, and what to do
    return message


def test_a_local_folder_is_itself(monkeypatch, tmp_path):
    """Bug: a local model is looked for on the hub or the mirror."""
    (tmp_path / "models/mine").mkdir(parents=True)
    failing(monkeypatch, AssertionError("the hub was asked"))
    assert snapshot("models/mine").resolve() == tmp_path / "models/mine"
    assert snapshot(str(tmp_path / "models/mine")) == tmp_path / "models/mine"
    monkeypatch.setenv(MIRROR, str(tmp_path / "mirror"))
    assert snapshot("models/mine").resolve() == tmp_path / "models/mine"


def test_a_mirror_is_the_only_place(monkeypatch, tmp_path):
    """Bug: a cluster node without network that waits for the hub, or takes another revision from
    it.
    """
    failing(monkeypatch, AssertionError("the hub was asked"))
    monkeypatch.setenv(MIRROR, str(tmp_path / "mirror"))
    (tmp_path / "mirror" / REPO).mkdir(parents=True)
    for kind in ("model", "dataset"):
        assert snapshot(REPO, "any", kind=kind) == tmp_path / "mirror" / REPO
    message = raised("owner/other", kind="dataset")
    assert "dataset 'owner/other' is not in IGCORE_HUB=" in message
    assert str(tmp_path / "mirror/owner/other") in message


def test_only_the_files_of_transformers_are_fetched(monkeypatch, tmp_path):
    """Bug: 14 GB more for a second copy of the weights in another format, or pickles of a trainer
    taken for weights.
    """
    folder = tmp_path / "cache"
    files = (
        "config.json", "tokenizer.model", "model-00001-of-00001.safetensors", "pytorch_model.bin",
        "training_args.bin", "x.pth",
    )  # fmt: skip
    hub = Hub(monkeypatch, folder, *files)
    assert snapshot(REPO, "abc123") == folder
    assert {p.name for p in folder.iterdir()} == {
        "config.json",
        "tokenizer.model",
        "model-00001-of-00001.safetensors",
    }
    assert hub.asked == [(REPO, "abc123", "model")]


def test_one_file_of_many(monkeypatch, tmp_path):
    """Bug: for one quantisation the other seven are downloaded too."""
    hub = Hub(monkeypatch, tmp_path / "cache", "config.json", "q4.gguf", "q8.gguf")
    folder = snapshot(REPO, "abc123", patterns=("q4.gguf",))
    assert [p.name for p in folder.iterdir()] == ["q4.gguf"]
    assert hub.asked == [(REPO, "abc123", "model")]


def test_whatever_a_tokenizer_reads_is_fetched(monkeypatch, tmp_path):
    """Bug: a tokenizer that loads from a folder and lacks a file from the hub; a template of tools
    in a folder of its own.
    """
    folder = tmp_path / "cache"
    files = {
        "vocab.txt", "bpe.codes", "source.spm", "chat_template.jinja",
        "additional_chat_templates/tools.jinja",
    }  # fmt: skip
    Hub(monkeypatch, folder, "model.safetensors", "README.md", *files)
    snapshot(REPO)
    assert {p.relative_to(folder).as_posix() for p in folder.rglob("*.*")} == files | {
        "model.safetensors"
    }


def test_pickled_weights_are_fetched_where_there_are_no_others(monkeypatch, tmp_path):
    """Bug: Vicuna, whose main branch has no safetensors."""
    folder = tmp_path / "cache"
    Hub(
        monkeypatch, folder, "config.json", "pytorch_model-00001-of-00002.bin",
        "pytorch_model.bin.index.json", "optimizer.bin",
    )  # fmt: skip
    snapshot(REPO)
    names = {"config.json", "pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"}
    assert {p.name for p in folder.iterdir()} == names


def test_a_data_set_is_fetched_whole(monkeypatch, tmp_path):
    folder = tmp_path / "cache"
    hub = Hub(monkeypatch, folder, "data/train.jsonl.gz", "category_1.csv")
    assert snapshot(REPO, kind="dataset") == folder
    assert hub.asked == [(REPO, None, "dataset")] and (folder / "data/train.jsonl.gz").exists()


@pytest.mark.parametrize(
    ("error", "parts"),
    [
        (answered(errors.GatedRepoError, 403, "Access is restricted.\nMore."),
         ["cannot be fetched (GatedRepoError: Access is restricted. More.)", "hf auth login"]),
        (answered(errors.RevisionNotFoundError, 404, "Not found.\nMore."),
         ["RevisionNotFoundError", "check its name and revision 'v9'"]),
        (TimeoutError("timed out"), ["cannot be fetched (TimeoutError: timed out)", "IGCORE_HUB"]),
        (errors.XetDownloadError("storage\nMore."),
         ["cannot be fetched (XetDownloadError: storage More.)", "IGCORE_HUB"]),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_the_hub_answers_is_one_sentence(monkeypatch, error, parts):
    """Bug: thirty lines of a stack for a licence that was not accepted. A hub's error may come from
    any library that it uses.
    """
    failing(monkeypatch, error)
    message = raised(REPO, "v9")
    assert all(part in message for part in parts), message


def test_the_cause_is_named_where_the_hub_speaks_of_its_cache(monkeypatch):
    """Bug: "cannot find an appropriate cached snapshot folder" for a server that is down."""
    error = errors.LocalEntryNotFoundError("Got: ...")
    error.__cause__ = answered(errors.HfHubHTTPError, 503, "503 Server Error")
    failing(monkeypatch, error)
    assert "(HfHubHTTPError: 503 Server Error)" in raised(REPO)


def test_without_a_network_nothing_is_left_behind(monkeypatch, tmp_path):
    """Guards the real client's way of saying so: tests run offline."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    assert "model 'owner/name' cannot be fetched (OfflineModeIsEnabled" in raised(REPO)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
