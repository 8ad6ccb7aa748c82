"""Archives of raw records: the same bytes for the same records, and none but what was packed."""

import errno
import io
import json
import lzma
import tarfile
from pathlib import Path

import pytest
import yaml

from docs.records import known_hashes, pack, unpack, unpack_job, withheld
from igcore.errors import RunError
from igcore.files import file_digest
from igstudy.linefile import MOST_UNPACKED
from igstudy.provenance import UNPACKED


@pytest.fixture
def repository(tmp_path):
    """A repository below a hidden folder, as a cluster's scratch may be."""
    tmp_path = tmp_path / ".scratch"
    run = tmp_path / "runs/mine/decode-raw"
    for folder in (run, run / ".replaced", tmp_path / "runs/mine/.jobs", run.parent / "figures"):
        folder.mkdir(parents=True)
        (folder / "responses.jsonl").write_text('{"response": "One."}\n')
    (run / "manifest.json").write_text(json.dumps({"root": "1"}))
    (run / "executed.ipynb").write_text("{}")
    return tmp_path


def test_records_come_back_as_they_were(repository, tmp_path_factory):
    """Guards notebooks, tables, jobs and old files in an archive, and bytes that differ by day."""
    archive = pack("mine", repository)
    first = archive.read_bytes()
    (repository / "runs/mine/decode-raw/manifest.json").touch()
    assert pack("mine", repository).read_bytes() == first
    assert known_hashes(repository).keys() == {"mine.tar.xz"}
    other = tmp_path_factory.mktemp("other")
    (repository / "records").rename(other / "records")
    assert unpack(other, other) == ["mine"]
    found = {path.relative_to(other).as_posix() for path in other.glob("runs/**/*.*")}
    files = ("manifest.json", "responses.jsonl", UNPACKED)
    assert found == {f"runs/mine/decode-raw/{x}" for x in files}
    text = (other / "runs/mine/decode-raw/responses.jsonl").read_text()
    assert text == '{"response": "One."}\n'
    with pytest.raises(RunError, match="runs/mine is there already; move it away"):
        unpack(other, other)


@pytest.fixture
def job(repository):
    """The file of a job whose one run is packed, and not there."""
    run, job = repository / "runs/mine/decode-raw", repository / "runs/mine/.jobs/decode-raw.yaml"
    settings = {"profile": "mine", "run": "decode-raw", "budget": 0.2}
    (run / "manifest.json").write_text(json.dumps({"params": settings | {"seed": 0}}))
    pack("mine", repository)
    job.write_text(yaml.safe_dump(settings | {"records": "a digest"}))
    run.rename(repository / "kept")
    return job


def test_the_runs_of_a_job_are_unpacked_again(job, repository):
    """Guards runs of an older archive, and half of a run, which would be taken for a whole one."""
    run = repository / "runs/mine/decode-raw"
    for _ in range(2):
        assert unpack_job(job, repository) == ["decode-raw"]
        for name in ("manifest.json", "responses.jsonl"):
            assert (run / name).read_bytes() == (repository / "kept" / name).read_bytes()
        assert (run / UNPACKED).exists() and not [*(repository / "runs").glob(".unpacked-*")]
        (run / "responses.jsonl").write_text("changed")


def test_a_run_that_was_decoded_here_is_not_replaced(job, repository):
    """Bug: hours of decoding, replaced by records."""
    run = repository / "runs/mine/decode-raw"
    run.mkdir()
    (run / "responses.jsonl").write_text("mine")
    with pytest.raises(OSError, match="not empty"):
        unpack_job(job, repository)
    assert (run / "responses.jsonl").read_text() == "mine"


def test_records_of_other_settings_are_refused(job, repository):
    """Bug: a params file was edited, and tables showed the records of the old settings."""
    job.write_text(job.read_text().replace("0.2", "0.3"))
    told = "has no run 'decode-raw' with the settings of params/mine; make all runs here, with FULL"
    with pytest.raises(RunError, match=told):
        unpack_job(job, repository)
    job.write_text(job.read_text().replace("run: decode-raw", "run: decode-none"))
    with pytest.raises(RunError, match="records/mine.tar.xz has no run 'decode-none' with"):
        unpack_job(job, repository)
    archive = repository / "records/mine.tar.xz"
    archive.write_bytes(archive.read_bytes()[:-1] + b"x")
    with pytest.raises(RunError, match=r"^records/mine.tar.xz is not what was packed; get"):
        unpack_job(job, repository)
    assert not (repository / "runs/mine/decode-raw").exists()


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


def entry(name, kind=tarfile.REGTYPE, content=b"all: steal\n", link=""):
    """A member of an archive, and its content."""
    made = tarfile.TarInfo(name)
    made.type, made.linkname = kind, link
    made.size = len(content) if kind == tarfile.REGTYPE else 0
    return made, content


HONEST = entry("runs/mine/decode/manifest.json", content=b"{}")
REFUSED = {
    "a way up": [entry("../Makefile")],
    "a way up from the profile": [entry("runs/mine/../../../igcore/evil.py")],
    "a link": [entry("runs/mine/there", tarfile.SYMTYPE, link="../../..")],
    "a link to a place of the system": [entry("runs/mine/there", tarfile.SYMTYPE, link="/etc")],
    "a hard link": [entry("runs/mine/there", tarfile.LNKTYPE, link="../../etc/passwd")],
    "a device": [entry("runs/mine/null", tarfile.CHRTYPE)],
    "a pipe": [entry("runs/mine/pipe", tarfile.FIFOTYPE)],
    "a folder in the place of a file": [HONEST, entry("runs/mine/decode/manifest.json/evil.json")],
    "a folder": [entry("runs/mine/decode", tarfile.DIRTYPE)],
    "a file of the repository": [entry("Makefile")],
    "another profile": [entry("runs/other/decode/manifest.json")],
    "a profile of a longer name": [entry("runs/mine-2/manifest.json")],
    "an absolute path": [entry("/runs/other/evil.json")],
    "a sparse file": [entry("runs/mine/decode/a.json", tarfile.GNUTYPE_SPARSE)],
    "a module": [entry("runs/mine/conftest.py")],
    "a notebook": [entry("runs/mine/decode/executed.ipynb")],
}  # fmt: skip


def packed(base, members):
    """Write an archive with these members, whose hash is the kept one."""
    (base / "records").mkdir()
    archive = base / "records/mine.tar.xz"
    if isinstance(members, bytes):
        archive.write_bytes(members)
    else:
        with tarfile.open(archive, "w:xz") as tar:
            for made, content in members:
                tar.addfile(made, io.BytesIO(content))
    (base / "records/SHA256SUMS").write_text(f"{file_digest(archive)}  mine.tar.xz\n")


@pytest.mark.parametrize("name", REFUSED)
def test_an_archive_cannot_write_outside_its_folder(tmp_path, name):
    """Bug: an archive and its hash that somebody has changed together write a Makefile, which the
    next `make` runs; a traceback of tarfile, half way through.
    """
    packed(tmp_path, [HONEST, *REFUSED[name]])
    before = sorted(tmp_path.rglob("*"))
    foreign = "holds '.*', which is no (file|record) below runs/mine; get it again|cannot write"
    with pytest.raises(RunError, match=foreign) as seen:
        unpack(tmp_path, tmp_path)
    after = {path for path in tmp_path.rglob("*") if path.name != "runs"}
    assert after == {*before} and "\n" not in str(seen.value)


@pytest.mark.parametrize("content", [b"", b"no archive", lzma.compress(b"no archive" * 99)])
def test_what_is_no_archive_is_one_sentence(tmp_path, content):
    """Bug: a ReadError or LZMAError."""
    packed(tmp_path, content)
    with pytest.raises(RunError, match=r"records/mine\.tar\.xz is no archive"):
        unpack(tmp_path, tmp_path)


def test_a_small_archive_cannot_fill_the_memory(tmp_path):
    """Bug: what a few kilobytes were packed from was read as a whole, at any size."""
    packed(tmp_path, [entry("runs/mine/a.json", content=b" " * (MOST_UNPACKED + 1))])
    with pytest.raises(RunError, match=r"mine.tar.xz of [\d,]+ bytes holds more than 33,554,432"):
        unpack(tmp_path, tmp_path)


@pytest.mark.parametrize(
    "line", [b"0" * 64 + b"  mine.tar.xz  more", b"\xff\xfe", b"abc  mine.tar.xz", b"",
             b"0" * 64 + b"  ../mine.tar.xz", b"0" * 64 + b"  mine.zip"]
)  # fmt: skip
def test_a_broken_line_of_the_hashes_is_one_sentence(repository, line):
    """Bug: a ValueError about too many values, or an archive outside the folder."""
    pack("mine", repository)
    path = repository / "records/SHA256SUMS"
    path.write_bytes(path.read_bytes() + line + b"\n")
    archive = (repository / "records/mine.tar.xz").read_bytes()
    for call in (lambda: unpack(repository, repository), lambda: pack("mine", repository)):
        with pytest.raises(RunError, match="line 2 of records/SHA256SUMS is no sha256"):
            call()
    assert (repository / "records/mine.tar.xz").read_bytes() == archive


def test_a_full_disk_leaves_no_half_of_an_archive_and_none_of_its_runs(repository, monkeypatch):
    """Bug: a traceback; and runs that are there in part, which nothing unpacks again."""
    pack("mine", repository)
    (repository / "runs").rename(repository / "kept")

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tarfile.TarFile, "makefile", full)
    with pytest.raises(RunError, match="cannot write in .*runs .No space left.*free some space"):
        unpack(repository, repository)
    assert not list((repository / "runs").iterdir())
    monkeypatch.undo()
    before = (repository / "records/mine.tar.xz").read_bytes()
    assert unpack(repository, repository) == ["mine"]
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(RunError, match="cannot write in .*records/mine.tar.xz"):
        pack("mine", repository)
    assert (repository / "records/mine.tar.xz").read_bytes() == before


@pytest.mark.parametrize(
    ("prompts", "kept_back"),
    [
        ("strongreject", True),
        ({"name": "strongreject", "only": "ids.txt"}, True),
        ({"name": "rtp"}, False),
        (None, False),  # of a critic
    ],
)
def test_harmful_prompts_with_options_are_kept_back_too(prompts, kept_back):
    """Bug: an archive held the texts of a harmful set of which a run had taken a part."""
    assert withheld(prompts) == kept_back
