"""Archives of raw records: the same bytes for the same records, and none but what was packed."""

import json

import pytest

from docs.records import known, pack, unpack
from igcore.errors import RunError


@pytest.fixture
def repository(tmp_path):
    """A repository below a hidden folder, as a cluster's scratch may be."""
    tmp_path = tmp_path / ".scratch"
    run = tmp_path / "runs/mine/decode-raw"
    for folder in (run, run / ".replaced", tmp_path / "runs/mine/.jobs"):
        folder.mkdir(parents=True)
        (folder / "responses.jsonl").write_text('{"response": "One."}\n')
    (run / "manifest.json").write_text(json.dumps({"root": "1"}))
    (run / "executed.ipynb").write_text("{}")
    return tmp_path


def test_records_come_back_as_they_were(repository, tmp_path_factory):
    """Guards notebooks, jobs and replaced files in an archive, and bytes that differ by the day."""
    archive = pack("mine", repository)
    first = archive.read_bytes()
    (repository / "runs/mine/decode-raw/manifest.json").touch()
    assert pack("mine", repository).read_bytes() == first and known(repository).keys() == {
        "mine.tar.xz"
    }
    other = tmp_path_factory.mktemp("other")
    (repository / "records").rename(other / "records")
    assert unpack(other, other) == ["mine"]
    found = {path.relative_to(other).as_posix() for path in other.glob("runs/**/*.*")}
    assert found == {f"runs/mine/decode-raw/{x}" for x in ("manifest.json", "responses.jsonl")}
    text = (other / "runs/mine/decode-raw/responses.jsonl").read_text()
    assert text == '{"response": "One."}\n'
    with pytest.raises(RunError, match="runs/mine is there already; move it away"):
        unpack(other, other)


def test_another_archive_is_refused(repository):
    """Guards records that were changed after they were packed."""
    archive = pack("mine", repository)
    archive.write_bytes(archive.read_bytes()[:-1] + b"x")
    (repository / "runs").rename(repository / "kept")
    with pytest.raises(RunError, match=r"records/mine.tar.xz is not what was packed"):
        unpack(repository, repository)
    assert not (repository / "runs").exists()
    with pytest.raises(RunError, match="runs/none holds no records; run the profile first"):
        pack("none", repository)
