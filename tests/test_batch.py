"""Tests of `igserve batch` and of recipes: forms of input, shards, stops, bad rows."""

import errno
import json
import os
import re

import pandas as pd
import pytest
from mockpolicy import LetterCost, mock_policy
from tiny import saved, tiny_model, tiny_tokenizer

from igcore import Guard, ParameterError
from igcore.models.prompts import file_texts
from igserve import commands
from igserve.batch import part_of, path_of, run, shard_of
from igserve.recipe import guard_of, read_recipe

LETTERS = ["a", "bc", "f", "dd", "ea", "cc", "b", "e", "ad", "fa", "ff"]
SETTINGS = dict(budget=2.0, block_size=2, max_new_tokens=12, spend=40, group_size=3)
COST = "def vowels(text):\n    return sum(text.count(c) for c in 'aeiou') / 10\n"


def guard_for(**settings):
    return Guard(mock_policy(), LetterCost(), refusal="fed", **SETTINGS | settings)


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


def test_all_forms_of_input_give_the_answers_of_one_call(tmp_path):
    """Guards the input: a column of a table in each form."""
    (tmp_path / "a.txt").write_text("\n".join(LETTERS))
    (tmp_path / "a.csv").write_text("n,prompt\n" + "".join(f"1,{t}\n" for t in LETTERS))
    written(tmp_path / "a.jsonl", [{"prompt": t, "n": 1} for t in LETTERS])
    pd.DataFrame({"prompt": LETTERS}).to_parquet(tmp_path / "a.parquet")
    guard_for().map(LETTERS, out=tmp_path / "one.jsonl")
    for ending in ("txt", "csv", "jsonl", "parquet"):
        out = tmp_path / f"out-{ending}.jsonl"
        said = run(guard_for(), file_texts(tmp_path / f"a.{ending}"), out)
        assert lines_of(out) == lines_of(tmp_path / "one.jsonl")
        assert said == f"{out}: 11 rows, 8 answered, 3 abstained"


def test_lines_end_where_json_lines_do(tmp_path):
    """Bug: a line separator of Unicode cut a text in two; an empty last line was refused."""
    texts = ["a\u2028b\x0bc", "f"]
    lines = [json.dumps({"prompt": text}, ensure_ascii=False) for text in texts]
    (tmp_path / "in.jsonl").write_text("\ufeff" + "\n".join(lines) + "\n\n", encoding="utf-8")
    assert file_texts(tmp_path / "in.jsonl") == texts


def test_a_prompt_that_cannot_be_read_is_refused_before_anything_is_decoded(tmp_path):
    """Bug: a row that is too long was an error in its line, and the exit code 0."""
    with pytest.raises(ParameterError, match=r"prompts\[1\]: .* exceeds the context"):
        run(guard_for(), ["a", "a" * 99, "f"], tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


def test_an_abstention_is_an_answer(tmp_path):
    cost = LetterCost(lambda text: 9.0 * (text not in ("", "fed")))
    guard = Guard(mock_policy(), cost, refusal="fed", **SETTINGS)
    said = run(guard, ["a"], tmp_path / "out.jsonl")
    assert said.endswith("out.jsonl: 1 rows, 0 answered, 1 abstained")
    assert lines_of(tmp_path / "out.jsonl")[0]["status"] == "abstained"


# --- shards and stops -----------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7])
def test_shards_together_are_one_run(tmp_path, n):
    """Guards shards: no line is lost, doubled or different, and the names sort."""
    run(guard_for(), LETTERS, tmp_path / "one.jsonl")
    for i in range(1, n + 1):
        run(guard_for(), part_of(LETTERS, 3, i, n), path_of(tmp_path / "part.jsonl", i, n))
    parts = sorted(tmp_path.glob("part*.jsonl"))
    assert len(parts) == n
    assert [line for part in parts for line in lines_of(part)] == lines_of(tmp_path / "one.jsonl")


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
    assert "2 rows, 2 answered, 0 abstained\n" in capsys.readouterr().out
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
        ("bugdet: 3", (), r"guard.yaml: unknown parameter 'bugdet'; did you mean 'budget'"),
        ("method: beam", (), "unknown method 'beam'"),
        ("policy: nowhere", (), "unknown policy 'nowhere'"),
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
