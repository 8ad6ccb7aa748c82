"""Tests of `igserve batch` and of recipes: forms of input, shards, stops, bad rows."""

import errno
import json
import os
import random
import re

import pandas as pd
import pytest
from mockpolicy import LetterCost, mock_policy
from tiny import saved, tiny_model, tiny_tokenizer

from igcore import Guard, ParameterError, RunError
from igserve import batch, commands
from igserve.batch import part_of, path_of, rows_of, run, shard_of
from igserve.recipe import guard_of, read_recipe

LETTERS = ["a", "bc", "f", "dd", "ea", "cc", "b", "e", "ad", "fa", "ff"]
SETTINGS = dict(budget=2.0, block_size=2, max_new_tokens=12, spend=40, group_size=3)
CHAT = "/v1/completions"
COST = "def vowels(text):\n    return sum(text.count(c) for c in 'aeiou') / 10\n"


def guard_for(**settings):
    return Guard(mock_policy(), LetterCost(), refusal="fed", **SETTINGS | settings)


def requests(texts, **more):
    """Lines in OpenAI's format for batches."""
    return [
        {
            "custom_id": f"r{n}",
            "method": "POST",
            "url": CHAT,
            "body": {"model": "m", "prompt": t} | more,
        }
        for n, t in enumerate(texts)
    ]


def written(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def timeless(value):
    """A line without what time decides."""
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if k != "created" and not k.endswith("_s")}
        return {k: timeless(v) for k, v in kept.items()}
    return [timeless(v) for v in value] if isinstance(value, list) else value


def lines_of(path):
    return [timeless(json.loads(line)) for line in path.read_text().splitlines()]


# --- input ----------------------------------------------------------------------------------------


def test_all_forms_of_input_give_the_same_answers(tmp_path):
    """Guards the input: a column of a table in each form, and OpenAI's format for batches."""
    (tmp_path / "a.txt").write_text("\n".join(LETTERS))
    (tmp_path / "a.csv").write_text("n,prompt\n" + "".join(f"1,{t}\n" for t in LETTERS))
    written(tmp_path / "a.jsonl", [{"prompt": t, "n": 1} for t in LETTERS])
    pd.DataFrame({"prompt": LETTERS}).to_parquet(tmp_path / "a.parquet")
    found = []
    for ending in ("txt", "csv", "jsonl", "parquet"):
        out = tmp_path / f"out-{ending}.jsonl"
        run(guard_for(), rows_of(tmp_path / f"a.{ending}", "prompt"), out)
        found.append(lines_of(out))
    assert all(lines == found[0] for lines in found)
    assert [line["row"] for line in found[0]] == list(range(len(LETTERS)))
    asked = rows_of(written(tmp_path / "b.jsonl", requests(LETTERS)), "prompt")
    run(guard_for(), asked, tmp_path / "out.jsonl")
    for line, own in zip(lines_of(tmp_path / "out.jsonl"), found[0], strict=True):
        body = line["response"]["body"]
        assert line["custom_id"] == f"r{own['row']}" and line["error"] is None
        assert body["choices"][0]["text"] == own["text"]
        assert body["igcore"] == {k: own[k] for k in ("status", "reason", "cost", "receipt")}


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([{"custom_id": "a", "body": {}}], "line 1 of .* is no request"),
        (requests("a") + [7], "line 2 of .* is no request"),
        (requests("a") + requests("b"), "line 2 of .* has no custom_id of its own"),
        ([requests("a")[0] | {"custom_id": 3}], "line 1 of .* has no custom_id"),
        ([requests("a")[0] | {"url": "/v1/embeddings"}], "give custom_id, a url of /v1/chat/"),
    ],
)
def test_a_line_that_is_no_request_is_one_sentence(tmp_path, lines, said):
    with pytest.raises(ParameterError, match=said):
        rows_of(written(tmp_path / "a.jsonl", lines), "prompt")


def test_settings_of_a_request_count_and_a_row_without_an_answer_says_why(tmp_path):
    """Guards the rows: each has its own settings, a bad one does not stop the others, and the exit
    code tells.
    """
    lines = requests(["a", "", "f", "bc", "e"])
    lines[2]["body"] |= {"seed": 5, "max_tokens": 4}
    lines[3]["body"] |= {"tools": [1]}
    rows = rows_of(written(tmp_path / "a.jsonl", lines), "prompt")
    found = run(guard_for(), rows, tmp_path / "out.jsonl")
    again = run(guard_for(), rows, tmp_path / "out.jsonl")
    assert timeless(again) == timeless(found) == lines_of(tmp_path / "out.jsonl")
    assert [line["error"] is None for line in found] == [True, False, True, False, True]
    assert "is empty" in found[1]["error"]["message"] and "'tools'" in found[3]["error"]["message"]
    guard = guard_for()
    own = guard.with_config(max_new_tokens=4)("f", seed=5)
    assert found[2]["response"]["body"]["choices"][0]["text"] == own.text
    assert found[4]["response"]["body"]["igcore"]["receipt"] == guard("e").receipt()
    assert not batch.complete(found) and batch.complete(found[:1])
    assert batch.summary(found, tmp_path).endswith(
        "5 rows, 3 answered, 0 abstained, 2 without an answer"
    )


def test_a_row_of_a_table_without_an_answer_counts(tmp_path, capsys):
    """Bug: a row of a table that is too long was an error in its line, and the exit code 0."""
    rows = [batch.Row(n, "text_completion", {"model": "", "prompt": text}) for n, text in
            enumerate(["a", "a" * 99, "f"])]  # fmt: skip
    found = run(guard_for(), rows, tmp_path / "out.jsonl")
    assert timeless(run(guard_for(), rows, tmp_path / "out.jsonl")) == timeless(found)
    assert "exceeds the context" in found[1]["error"] and not batch.complete(found)


def test_lines_end_where_json_lines_do(tmp_path):
    """Bug: a line separator of Unicode cut a text in two; an empty last line was refused."""
    text = "a\u2028b\x0bc"
    lines = [json.dumps(line, ensure_ascii=False) for line in requests([text, "f"])]
    (tmp_path / "in.jsonl").write_text("\ufeff" + "\n".join(lines) + "\n\n", encoding="utf-8")
    rows = rows_of(tmp_path / "in.jsonl", "prompt")
    assert [row.body["prompt"] for row in rows] == [text, "f"]
    (tmp_path / "in.jsonl").write_bytes(lines[0].encode() + b"\n\xff\n")
    with pytest.raises(ParameterError, match="give UTF-8"):
        rows_of(tmp_path / "in.jsonl", "prompt")


@pytest.mark.parametrize(
    "line",
    ['{"custom_id": 1}', '{"custom_id": 1, "response": 7}', '{"custom_id": 1, "response": {}}'],
)
def test_a_kept_line_that_is_no_answer_is_one_sentence(tmp_path, line):
    rows = rows_of(written(tmp_path / "in.jsonl", requests(LETTERS)), "prompt")
    (tmp_path / "out.jsonl").write_text(line + "\n")
    with pytest.raises(RunError, match="line 1 of"):
        run(guard_for(), rows, tmp_path / "out.jsonl")


def test_an_abstention_is_an_answer():
    rows = [batch.Row(0, "text_completion", {"model": "m", "prompt": "a"}, "x")]
    cost = LetterCost(lambda text: 9.0 * (text not in ("", "fed")))
    guard = Guard(mock_policy(), cost, refusal="fed", **SETTINGS)
    ((_, line),) = batch.group_lines(guard, rows)
    body = line["response"]["body"]
    assert body["choices"][0]["finish_reason"] == "content_filter"
    assert body["igcore"]["status"] == "abstained" and batch.complete([line])


# --- shards and stops -----------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("form", ["table", "requests"])
def test_shards_together_are_one_run(tmp_path, n, form):
    """Guards shards: no line is lost, doubled or different, and the names sort."""
    lines = requests(LETTERS) if form == "requests" else [{"prompt": t} for t in LETTERS]
    rows = rows_of(written(tmp_path / "in.jsonl", lines), "prompt")
    run(guard_for(), rows, tmp_path / "one.jsonl")
    for i in range(1, n + 1):
        run(guard_for(), part_of(rows, 3, i, n), path_of(tmp_path / "part.jsonl", i, n))
    parts = sorted(tmp_path.glob("part*.jsonl"))
    assert len(parts) == n
    assert [line for part in parts for line in lines_of(part)] == lines_of(tmp_path / "one.jsonl")


def test_a_run_that_was_killed_anywhere_goes_on(tmp_path, monkeypatch):
    """Bug: a line lost, doubled or half-written after a stop; a file of other rows continued."""
    rows = rows_of(written(tmp_path / "in.jsonl", requests(LETTERS)), "prompt")
    run(guard_for(), rows, tmp_path / "one.jsonl")
    content, whole = (tmp_path / "one.jsonl").read_bytes(), lines_of(tmp_path / "one.jsonl")
    chance = random.Random(7)
    for cut in chance.sample(range(len(content)), 12):
        out = tmp_path / "part.jsonl"
        out.write_bytes(content[:cut])
        assert timeless(run(guard_for(), rows, out)) == whole
        assert lines_of(out) == whole
    monkeypatch.setattr(batch, "decode", None)  # nothing is left to decode
    run(guard_for(), rows, tmp_path / "one.jsonl")
    for guard, other, said in (
        (guard_for(budget=1.0), rows, r"line 1 of .* \(budget, settings\)"),
        (guard_for(seed=1), rows, r"\(seed\)"),
        (guard_for(), rows[:3], "has 11 answers, and there are 3 rows"),
        (guard_for(), rows[1:] + rows[:1], r"line 1 of .* \(prompt\)"),
    ):
        with pytest.raises(RunError, match=said):
            run(guard, other, tmp_path / "one.jsonl")
    assert (tmp_path / "one.jsonl").read_bytes() == content


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "a/b", "-1/2", "1/0", "1/2/3", ""])
def test_a_shard_that_does_not_exist_is_one_sentence(text):
    with pytest.raises(ParameterError, match="give i/n, from 1/n to n/n"):
        shard_of(text)


# --- recipes and the command ----------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """A tiny saved model, a cost beside the recipe, and prompts."""
    tokenizer = tiny_tokenizer()
    saved(tmp_path / "model", tiny_model(tokenizer), tokenizer)
    (tmp_path / "own_vowels.py").write_text(COST)
    (tmp_path / "guard.yaml").write_text(
        f"policy: {tmp_path / 'model'}\ncost: own_vowels:vowels\nbudget: 3\n"
        "block_size: 4\nmax_new_tokens: 8\n"
    )
    (tmp_path / "in.csv").write_text("prompt\nthe sun\na tree\n")
    return tmp_path


def ask(folder, *options, out="out.jsonl", recipe="guard.yaml"):
    paths = [str(folder / "in.csv"), str(folder / out), "--guard", str(folder / recipe)]
    return commands.main(["batch", *paths, *options])


def test_the_command_guards_a_file_and_says_what_came_out(folder, capsys):
    assert ask(folder) == 0
    assert "2 rows, 2 answered, 0 abstained, 0 without an answer" in capsys.readouterr().out
    assert ask(folder, "--shard", "1/2") == 0 and (folder / "out-1-of-2.jsonl").exists()
    guard = guard_of(read_recipe(folder / "guard.yaml"), folder)
    line, _ = lines_of(folder / "out.jsonl")
    assert line["receipt"] == guard("the sun").receipt()
    # of the file that defines the function, so that another cost of this name is another cost
    assert len(json.loads(line["receipt"])["cost_model"]["digest"]) == 64


@pytest.mark.parametrize(
    ("change", "options", "said"),
    [
        ("cost: os:getcwd", (), "names 'os:getcwd', and may name only functions of modules"),
        ("cost: json.tool:main", (), "may name only functions of modules of your own below its"),
        ("bugdet: 3", (), r"guard.yaml: unknown parameter 'bugdet'; did you mean 'budget'"),
        ("method: beam", (), "unknown method 'beam'"),
        ("policy: nowhere", (), "unknown policy 'nowhere'"),
        ("policy: [", (), "cannot be read"),
        ("", ("--shard", "3/2"), "shard is '3/2'"),
        ("", ("--column", "text"), "has the columns prompt, but not 'text'"),
    ],
)
def test_bad_input_is_one_sentence_and_writes_nothing(folder, capsys, change, options, said):
    recipe = (folder / "guard.yaml").read_text()
    key = change.partition(":")[0]
    kept = [line for line in recipe.splitlines() if not key or not line.startswith(key + ":")]
    (folder / "guard.yaml").write_text("\n".join([*kept, change]))
    before = set(folder.iterdir())
    assert ask(folder, *options) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert re.search(said, error) and set(folder.iterdir()) == before


def test_answers_end_in_jsonl(folder, capsys):
    assert ask(folder, out="out.csv") == 1
    assert "end its name in .jsonl" in capsys.readouterr().err


def test_a_full_disk_is_one_sentence_and_loses_nothing(folder, capsys, monkeypatch):
    """Guards the append: what was written stays, and the next start goes on."""
    write, left = os.write, [1]

    def full(file, data):
        if not left:
            raise OSError(errno.ENOSPC, "No space left on device")
        left.pop()
        return write(file, data)

    with monkeypatch.context() as patch:
        patch.setattr("igcore.files.os.write", full)
        assert ask(folder) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert len(lines_of(folder / "out.jsonl")) == 1
    assert ask(folder) == 0 and len(lines_of(folder / "out.jsonl")) == 2
