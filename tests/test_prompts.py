"""Prompt sets: counts and ids computed again here, and every way a file can be wrong."""

import csv
import hashlib
import io
import logging
import os
import subprocess
import sys

import pandas as pd
import pytest

from igcore import load_prompts, load_scorer
from igcore.errors import ParameterError
from igcore.models.prompts import benign, mild
from igcore.prompt import Prompt

MILD = mild()


def saved(write, **columns) -> bytes:
    """Return a table as pandas writes it, such as by `DataFrame.to_parquet`."""
    file = io.BytesIO()
    write(pd.DataFrame(columns), file)
    return file.getvalue()


def texts(path):
    return sorted(prompt.text for prompt in load_prompts(path))


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
    lines = benign()
    assert len(lines) == len({line.lower() for line in lines}) == 80 and not set(lines) & set(MILD)
    assert all(line == line.strip() and line[0].isupper() and line[-1] in ".?" for line in lines)
    assert "How do I kill a process in Linux?" in lines[60:]
    assert "Who painted the Mona Lisa?" in lines[:60]
    assert {p.text for p in load_prompts("benign")} == set(lines)


def test_benign_set_holds_what_only_sounds_dangerous():
    """Bug: prompts that no cost could mistake, so that nothing is ever refused and the check shows
    nothing.

    Counts found once: the embedded cost finds most prompts inside the budget of .2, and more of the
    last 20 outside it.
    """
    lines = benign()
    costs = load_scorer("offensive-language").score([""] * 80, lines, [True] * 80)
    assert [(costs[:60] <= 0.2).sum(), (costs[60:] <= 0.2).sum()] == [58, 16]


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
        ("b.csv", "prompt\nNA\nnull\n007\n", ["007", "NA", "null"]),
        ("u.jsonl", '{"prompt": "one\u2028two"}\r\n', ["one\u2028two"]),
        ("u.txt", "one\u2028two\rthree\n\n", ["one\u2028two", "three"]),
        ("a.tsv", "id\tprompt\n1\tone, two\n", ["one, two"]),
        ("a[1].parquet", saved(pd.DataFrame.to_parquet, prompt=["two", "one"]), ["one", "two"]),
        ("q.csv", 'prompt\n"a ""b"""\nc "d" e\n"f"g\n', ['a "b"', 'c "d" e', "fg"]),
        ("r.csv", 'prompt\r"a\rb"\rc\r', ["a\rb", "c"]),
        ("w.csv", f"prompt,prompt\n{'w ' * 10**5},x\n", ["w " * 10**5]),
        ("d.jsonl", '{"prompt": "2020-01-01"}\n\n', ["2020-01-01"]),
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


def test_a_column_of_any_name(write):
    """Bug: the column is passed over, and another one read."""
    (prompt,) = load_prompts(write("a.jsonl", '{"prompt": "No.", "text": "Walk."}'), column="text")
    assert prompt.text == "Walk."


def test_datasets_leaves_nothing_behind(write, tmp_path):
    """Bug: a cache in the user's home, a network call, or a bar for a file of three lines."""
    path = write("a.parquet", saved(pd.DataFrame.to_parquet, prompt=["one"]))
    code = (
        "import socket, datasets, sys\n"
        "before = datasets.is_progress_bar_enabled(), datasets.config.HF_DATASETS_CACHE\n"
        "def refuse(*_): raise AssertionError('network')\n"
        "socket.socket.connect = refuse\n"
        "from igcore import load_prompts\n"
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
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.parquet"]


@pytest.mark.parametrize("name", ["a.txt", "a.csv", "a.tsv", "a.jsonl"])
def test_text_needs_no_library(write, name, monkeypatch):
    """Guards a plain installation: "this needs datasets", also for a file that was missing. And the
    limit that the user's own code reads tables under.
    """
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ParameterError, match=rf"\({name} is missing\); give valid UTF-8"):
        load_prompts(name)
    content = b'{"prompt": "one"}' if "json" in name else b"prompt\none\n"
    assert load_prompts(write(name, content))[-1].text in ("one", "prompt")
    assert csv.field_size_limit() == 131072  # as Python has it


@pytest.mark.parametrize("name", ["a.txt", "a.csv", "a.jsonl", "a.parquet"])
def test_a_pointer_is_no_prompt(write, name):
    """Guards a clone without git-lfs, whose pointers were read as three prompts."""
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    with pytest.raises(ParameterError, match="is a pointer of Git LFS.* run git lfs pull"):
        load_prompts(write(name, pointer))


def test_counts_of_a_file_are_logged(write, caplog):
    """Bug: duplicates are dropped, and no message counts the remaining prompts."""
    path = write("a.txt", "one\ntwo\none\nthree\n")
    with caplog.at_level(logging.INFO, "igcore"):
        load_prompts(path)
    assert [record.getMessage() for record in caplog.records] == [
        f"prompt set {path}: 4 rows, 3 unique"
    ]


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("b.txt", "one\n \ntwo\n", r"row 2 of .*b\.txt is '.*', which is no prompt"),
        ("b.csv", "id,prompt\n1,one\n\n2,two\n", r"row 2 of .*b\.csv is '.*', which is no prompt"),
        ("c.csv", "id,prompt\n1,one\n2,\n", r"row 2 of .*c\.csv is '.*', which is no prompt"),
        ("d.csv", "text,id\none,1\n", "has the columns text, id, but not 'prompt'"),
        ("e.csv", "id,prompt\n1,Well, then\n", r"no prompts could be read from .*e\.csv"),
        ("f.jsonl", '{"prompt": "one"}\n{"prompt": 2}\n',
         r"row 2 of .*f\.jsonl is 2, which is no prompt"),
        ("g.jsonl", '{"prompt": "one"}\n{"other": "two"}\n',
         r"row 2 of .*g\.jsonl is None, which is no prompt"),
        ("h.jsonl", '{"prompt": ["one"]}\n', r"row 1 of .*h\.jsonl is \['one'\], which is no"),
        ("i.jsonl", '{"prompt": "one"}\nnot json\n', r"no prompts could be read from .*i\.jsonl"),
        ("j.txt", b"\xff\xfe\x00", r"from .*j\.txt.* \(j\.txt: UnicodeDecodeError"),
        ("p.jsonl", "[" * 100_000, r"\(p\.jsonl: .* depth"),
        ("q.jsonl", r'{"prompt": "a\ud83d"}', r"\(q\.jsonl: .* surrogates not allowed"),
        ("i.jsonl", '{"prompt": "one"}\n\n{"prompt": "two",\n',
         r"\(i.jsonl is no JSON at line 3, column 18: "),
        ("k.txt", "", r"\(k.txt holds no row\); give valid UTF-8 .txt with at least one prompt$"),
        ("n.csv", "", r"\(n.csv holds no row\); give .* column 'prompt', or set .* another$"),
        ("l.jsonl", "", r"\(l.jsonl holds no row\)"),
        ("r.jsonl", '{"prompt": [{"role": "user", "content": "Hello."}]}',
         r"row 1 of .* which is no prompt; write text, or remove the row"),
        ("m.csv", "prompt\n", r"no prompts could be read from .*m\.csv"),
        ("s.csv", 'prompt\none\n"two\nthree\n', r"\(s\.csv ends within quotes\)"),
        ("t.jsonl", '"one"\n2', r"\(t\.jsonl holds what is no object of a key and a prompt\)"),
        ("u.parquet", "no table", r"\(u\.parquet: .*[Pp]arquet"),
    ],
)  # fmt: skip
def test_bad_files_name_the_row(write, name, content, sentence):
    """Bug: a bad row is skipped or cut in silence, or a library's traceback reaches the user."""
    with pytest.raises(ParameterError, match=sentence):
        load_prompts(write(name, content))


def test_what_is_no_file_is_not_read(tmp_path):
    """Bug: a pipe, or a link to a device, was read for ever."""
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "zero.txt").symlink_to("/dev/zero")
    for name in ("pipe.txt", "zero.txt"):
        with pytest.raises(ParameterError, match="is no file"):
            load_prompts(tmp_path / name)


def test_a_home_of_nobody_is_a_missing_file():
    """Bug: a traceback of pathlib."""
    with pytest.raises(ParameterError, match="no prompts could be read from ~nobody-at-all/a.txt"):
        load_prompts("~nobody-at-all/a.txt")


def test_an_unknown_set_is_named():
    """Bug: a typing error in a name is looked for in files."""
    sentence = "unknown prompt set 'midl'; did you mean 'mild'.* or a path to a .txt/.csv/.jsonl"
    with pytest.raises(ParameterError, match=sentence):
        load_prompts("midl")
