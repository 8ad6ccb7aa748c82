"""Prompt sets: counts and ids computed again here, and every way a file can be wrong."""

import gzip
import hashlib
import io
import json
import logging
import math
import os
import subprocess
import sys

import pandas as pd
import pytest

from igcore import load_scorer
from igcore.errors import ParameterError
from igcore.models import prompts
from igcore.models.prompts import PROMPT_SETS, load_prompts, split_of
from igcore.models.templates import turns_of
from igcore.policy import Prompt

MILD = PROMPT_SETS["mild"]()
SYSTEM = [{"role": "system", "content": "Be brief."}]
SAID = [{"role": "user", "content": "Hello."}]
DIALOGUE = [*SAID, {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "Sing."}]


def parquet(**columns) -> bytes:
    file = io.BytesIO()
    pd.DataFrame(columns).to_parquet(file)
    return file.getvalue()


class Length:
    """A cost that finds long texts worst; texts in `broken` get that score instead."""

    def __init__(self, **broken):
        self.broken, self.seen = broken, []

    def score(self, prompts, responses, finished):
        assert (
            set(prompts) == {""}
            and all(finished)
            and len(prompts) == len(finished) == len(responses)
        )
        return [self.broken.get(text, float(len(text))) for text in responses]


@pytest.fixture
def write(tmp_path):
    def write(name, content):
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


def texts(path, **options):
    return sorted(prompt.text for prompt in load_prompts(path, **options))


def test_rtp_splits_by_hash():
    """Bug: a changed hash or share moves prompts between training and test. Counts found once, kept
    for ever.
    """
    counts = {
        split: len(load_prompts("rtp", split))
        for split in ("all", "train", "tune", "calibrate", "test")
    }
    assert counts == {"all": 623, "train": 320, "tune": 49, "calibrate": 98, "test": 156}


def test_split_is_a_function_of_the_text_alone():
    """Bug: the set's name or order enters the split, and one set trains on what another tests."""
    for text in MILD:
        share = int.from_bytes(hashlib.sha256(text.encode()).digest(), "big") / 2**256
        assert split_of(text) == (
            "train"
            if share < 0.50
            else "tune"
            if share < 0.58
            else "calibrate"
            if share < 0.74
            else "test"
        )
    parts = [load_prompts("mild", split) for split in {split_of(text) for text in MILD}]
    assert sorted((p for part in parts for p in part), key=lambda p: p.id) == load_prompts("mild")


def test_mild_set_is_sorted_by_id():
    """Bug: ids that do not depend on the set, or an order that depends on the source."""
    loaded = load_prompts("mild")
    assert len(loaded) == len(set(MILD)) == 24 and {p.text for p in loaded} == set(MILD)
    assert [p.id for p in loaded] == sorted(p.id for p in loaded)
    first = loaded[0]
    assert first == Prompt(
        hashlib.sha256(b"mild\n" + first.text.encode()).hexdigest()[:16], first.text, "mild"
    )


def test_benign_set_is_what_it_says():
    """Bug: a prompt lost, doubled, blank or shared with another set; or lines in the wrong order,
    so that the last are mixed up.
    """
    lines = PROMPT_SETS["benign"]()
    assert len(lines) == len({line.lower() for line in lines}) == 80 and not set(lines) & set(MILD)
    assert all(line == line.strip() and line[0].isupper() and line[-1] in ".?" for line in lines)
    assert (
        "How do I kill a process in Linux?" in lines[60:]
        and "Who painted the Mona Lisa?" in lines[:60]
    )
    assert {p.text for p in load_prompts("benign")} == set(lines)


def test_benign_set_holds_what_only_sounds_dangerous():
    """Bug: prompts that no cost could mistake, so that nothing is ever refused and the check shows
    nothing.

    Counts found once: the embedded cost finds most prompts inside the budget of .2, and more of the
    last 20 outside it.
    """
    lines = PROMPT_SETS["benign"]()
    costs = load_scorer("offensive-language").score([""] * 80, lines, [True] * 80)
    assert [(costs[:60] <= 0.2).sum(), (costs[60:] <= 0.2).sum()] == [58, 16]


def test_limit_and_hardest():
    """Bug: the hardest are added beyond the limit, chosen twice, or taken from the wrong end."""
    everything, longest = load_prompts("mild"), sorted(MILD, key=len)[-3:]
    assert load_prompts("mild", limit=5) == everything[:5]
    chosen = load_prompts("mild", limit=8, hardest=3, cost=Length())
    by_id = [p for p in everything if p.text not in longest][:5]
    assert chosen == [p for p in everything if p.text in longest or p in by_id] and len(chosen) == 8
    assert load_prompts("mild", limit=99, hardest=99, cost=Length()) == everything


def test_score_that_is_not_finite_counts_as_hardest():
    """Bug: one NaN makes the order arbitrary, or hides the prompt that broke the cost."""
    for value in (math.nan, -math.inf):
        (only,) = load_prompts("mild", limit=1, hardest=1, cost=Length(**{MILD[5]: value}))
        assert only.text == MILD[5]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.txt", b"\xef\xbb\xbfone\r\ntwo\none\n", ["one", "two"]),
        ("a[1].txt", "one\ntwo", ["one", "two"]),  # brackets are a pattern to a careless reader
        (
            "a.csv",
            'id,prompt\n1,"one, two"\n2,None\n3,12\n4,"a\nb"\n',
            ["12", "None", "a\nb", "one, two"],
        ),
        ("n.csv", "prompt\n12\n13\n", ["12", "13"]),
        ("a.jsonl", '{"prompt": "one"}\n{"id": 2, "prompt": "two"}\n', ["one", "two"]),
        ("a.json", json.dumps([{"prompt": "one"}, {"prompt": "naïve"}]), ["naïve", "one"]),
        ("b.csv", "prompt\nNA\nnull\n007\n", ["007", "NA", "null"]),
        ("u.jsonl", '{"prompt": "one\u2028two"}\r\n', ["one\u2028two"]),
        ("u.txt", "one\u2028two\rthree\n\n", ["one\u2028two", "three"]),
        ("a.tsv", "id\tprompt\n1\tone, two\n", ["one, two"]),
        ("a.csv.gz", gzip.compress(b"prompt\ntwo\none\n", mtime=0), ["one", "two"]),
        ("a.jsonl.gz", gzip.compress(b'{"prompt": "one"}\n', mtime=0), ["one"]),
        ("a.parquet", parquet(prompt=["two", "one"], n=[1, 2]), ["one", "two"]),
        ("ids.csv", "id,prompt\n" + "1,one\n" * 20_000 + "x,two\n", ["one", "two"]),
    ],
)
def test_files(write, name, content, expected):
    """Bug: byte order marks, line ends, duplicates, quoted commas, or words such as None change or
    lose a prompt.
    """
    path = write(name, content)
    assert texts(path) == expected == texts(str(path))
    assert {p.set_name for p in load_prompts(path)} == {name.split(".")[0]}


def test_a_column_of_any_name_and_chat_messages(write):
    """Bug: the answer at the end of a dialogue joins its prompt, or a dialogue is one turn."""
    rows = [{"text": "Walk."}, {"text": SAID}, {"text": [*DIALOGUE, DIALOGUE[1]]}]
    for n, row in enumerate(rows):
        (prompt,) = load_prompts(
            {"name": str(write(f"{n}.jsonl", json.dumps(row))), "column": "text"}
        )
        assert turns_of(prompt.text) == [["Walk."], ["Hello."], ["Hello.", "Yes?", "Sing."]][n]
    assert prompt.text.endswith("\n\nAssistant: Yes?\n\nHuman: Sing.\n\nAssistant:")


def test_datasets_leaves_nothing_behind(write, tmp_path):
    """Bug: a cache in the user's home, a network call, or a bar for a file of three lines."""
    path = write("a.csv", "prompt\none\n")
    code = (
        "import socket, datasets, sys\n"
        "before = datasets.is_progress_bar_enabled(), datasets.config.HF_DATASETS_CACHE\n"
        "def refuse(*_): raise AssertionError('network')\n"
        "socket.socket.connect = refuse\n"
        "from igcore.models.prompts import load_prompts\n"
        "load_prompts(sys.argv[1])\n"
        "now = datasets.is_progress_bar_enabled(), datasets.config.HF_DATASETS_CACHE\n"
        "assert now == before\n"
    )
    clean = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    home = tmp_path / "home"
    run = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        env=clean | {"HOME": str(home), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.csv"]


def test_counts_of_a_file_are_logged(write, caplog):
    """Bug: duplicates are dropped, or a limit bites, and nothing says how many prompts are left."""
    path = write("a.txt", "one\ntwo\none\nthree\n")
    with caplog.at_level(logging.INFO, "igcore"):
        load_prompts(path, limit=2)
    assert [record.getMessage() for record in caplog.records] == [
        f"prompt set {path}: all 4 rows, 3 unique; split all 3, chosen 2"
    ]


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("b.txt", "one\n \ntwo\n", r"row 2 of .*b\.txt is '.*', which is no prompt"),
        ("b.csv", "id,prompt\n1,one\n\n2,two\n", r"row 2 of .*b\.csv is '.*', which is no prompt"),
        ("c.csv", "id,prompt\n1,one\n2,\n", r"row 2 of .*c\.csv is '.*', which is no prompt"),
        ("d.csv", "text,id\none,1\n", "has the columns text, id, but not 'prompt'"),
        ("e.csv", "id,prompt\n1,Well, then\n", r"no prompts could be read from .*e\.csv"),
        (
            "f.jsonl",
            '{"prompt": "one"}\n{"prompt": 2}\n',
            r"row 2 of .*f\.jsonl is 2, which is no prompt",
        ),
        (
            "g.jsonl",
            '{"prompt": "one"}\n{"other": "two"}\n',
            r"row 2 of .*g\.jsonl is None, which is no prompt",
        ),
        (
            "h.jsonl",
            '{"prompt": ["one"]}\n',
            r"row 1 of .*h\.jsonl is \['one'\], which is no",
        ),
        ("i.jsonl", '{"prompt": "one"}\nnot json\n', r"no prompts could be read from .*i\.jsonl"),
        (
            "j.txt",
            b"\xff\xfe\x00",
            r"from .*j\.txt.* \(j\.txt: UnicodeDecodeError",
        ),
        ("p.json", "[" * 100_000, r"\(p\.json: .* depth"),
        (
            "q.jsonl",
            r'{"prompt": "a\ud83d"}',
            r"\(q\.jsonl: .* surrogate pair in string is invalid",
        ),
        (
            "i.jsonl",
            '{"prompt": "one"}\n\n{"prompt": "two",\n',
            r"\(i.jsonl: .* line 3, column 18: ",
        ),
        ("k.txt", "", r"\(k.txt holds no row\); give valid UTF-8 .txt with at least one prompt$"),
        (
            "n.csv",
            "",
            r"\(n.csv: .*No columns to parse from file\); give .* in a column 'prompt'$",
        ),
        ("l.json", "", r"\(l.json holds no row\)"),
        (
            "r.jsonl",
            json.dumps({"prompt": [*SYSTEM, *SAID]}),
            r"row 1 of .* which is no prompt; write text, or messages of user and assistant",
        ),
        ("m.csv", "prompt\n", r"no prompts could be read from .*m\.csv"),
    ],
)
def test_bad_files_name_the_row(write, name, content, sentence, caplog):
    """Bug: a bad row is skipped or cut in silence, or a library's traceback or log reaches the
    user.
    """
    with pytest.raises(ParameterError, match=sentence):
        load_prompts(write(name, content))
    assert not caplog.records


def test_what_is_no_file_is_not_read(tmp_path):
    """Bug: a pipe, or a link to a device, was read for ever."""
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "zero.txt").symlink_to("/dev/zero")
    for name in ("pipe.txt", "zero.txt"):
        with pytest.raises(ParameterError, match="it is no file"):
            load_prompts(tmp_path / name)


def test_a_home_of_nobody_is_a_missing_file():
    """Bug: a traceback of pathlib."""
    with pytest.raises(ParameterError, match="no prompts could be read from ~nobody-at-all/a.txt"):
        load_prompts("~nobody-at-all/a.txt")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"name": "rpt"},
            "unknown prompt set 'rpt'; did you mean 'rtp'.* or a path to a "
            ".txt/.csv/.jsonl/.json/.tsv/.parquet file",
        ),
        (
            {"name": {"name": "rtp", "limit": 5}},
            "unknown option of prompt set 'rtp': 'limit'",
        ),
        ({"name": {"name": "no/such.csv"}}, "no prompts could be read from no/such.csv"),
        ({"name": "mild", "split": "tests"}, "unknown split 'tests'; did you mean 'test'"),
        (
            {"name": "mild", "limit": 0},
            "parameter limit is 0: Input should be greater than or equal to 1",
        ),
        (
            {"name": "mild", "limit": 2, "hardest": 3, "cost": Length()},
            "hardest 3 must be at most limit 2",
        ),
        ({"name": "mild", "hardest": 3, "cost": Length()}, "hardest 3 must be at most limit None"),
        ({"name": "mild", "limit": 4, "hardest": 3}, "hardest 3 needs a cost"),
    ],
)
def test_bad_choices_are_named(options, sentence):
    """Bug: a typing error in a parameter file runs with other prompts than were meant."""
    with pytest.raises(ParameterError, match=sentence):
        load_prompts(**options)


def test_only_the_prompts_of_a_list(write):
    """Guards a run on chosen prompts: which they are, their split, and every bad list."""
    known = load_prompts("mild")
    ids = [prompt.id for prompt in known[3:9]]
    listed = write("ids.txt", "# six of them\n\n" + "\n".join(f"{x} # mild" for x in ids))
    chosen = {"name": "mild", "only": str(listed)}
    assert load_prompts(chosen) == known[3:9]
    assert load_prompts(chosen, limit=2) == known[3:5]
    for content, part in (
        ("0" * 16, "line 1 of .* holds no id of a prompt of this set and split"),
        ("# none", "holds no id of a prompt of this set and split"),
        (b"\xff\xfe\xff", "cannot be read"),
    ):
        with pytest.raises(ParameterError, match=part):
            load_prompts({"name": "mild", "only": str(write("bad.txt", content))})
    with pytest.raises(ParameterError, match="give a text file with the id of a prompt"):
        load_prompts({"name": "mild", "only": "there/is/none.txt"})


def test_a_list_of_prompts_shows_nothing_of_a_file_that_is_none(write):
    """Bug: a params file of somebody else printed a line of any file of this computer."""
    known = load_prompts("mild")[0].id
    other = write("other.txt", f"# notes\n{known}\nmy key is 1234\n")
    with pytest.raises(ParameterError) as caught:
        load_prompts({"name": "mild", "only": str(other)})
    assert str(caught.value).startswith(f"line 3 of {other} holds no id")
    assert "1234" not in str(caught.value)


def test_split_without_prompts(write):
    """Bug: a run over no prompts ends well."""
    path = write("a.txt", "one")
    others = [split for split in prompts.SPLITS if split != split_of("one")]
    with pytest.raises(ParameterError, match=f"has no prompts in split '{others[0]}'"):
        load_prompts(path, others[0])
