"""Tests of the plan of runs before they start: tokens worked out by hand, and bad files."""

import json
from pathlib import Path

import pytest
import yaml

import igcore
from igcore.errors import ParameterError
from igstudy import commands
from igstudy.runs import plan

SHARED = dict(
    profile="paper",
    policy="vicuna-7b",
    budget=0.0,
    reward="llama-7b-rm",
    cost="beaver-7b-cost",
    block_size=16,
    max_new_tokens=64,
    dtype="bfloat16",
)
SEARCH = dict(methods=["base", "inferenceguard"], n_samples=8, keep=2, rounds=2)
DECODE = SHARED | SEARCH | dict(run="decode-a", prompts={"name": "hex-phi"})
CRITIC = SHARED | dict(
    run="a",
    prompts="pku-saferlhf",
    limit=2000,
    critics={"terminal": {"features": "ho", "width": 4096}},
    n_rollouts=5,
)


def written(tmp_path, name, base=DECODE, **changes) -> Path:
    """Write params/paper/<name>.yaml below a comment."""
    path = tmp_path / "paper" / f"{name}.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text("# What it is for.\n" + yaml.safe_dump(base | changes, sort_keys=False))
    return path


def rows(*files) -> list[list[str]]:
    return [line.split() for line in plan.report(files)][1:]


def test_tokens_by_hand(tmp_path):
    """Bug: the tokens of one method only, a grid planned as one run, or rollouts planned that
    another run has left.
    """
    by_hand = f"{64 * (1 + 8 * 2):,}"
    assert rows(written(tmp_path, "decode-a")) == [[by_hand, "all", "decode-a"]]
    grid = {"n_samples": [8, 256]}
    file = written(tmp_path, "decode-b", methods=["best-of-n"], grid=grid, limit=20)
    assert rows(file, written(tmp_path, "tables")) == [
        ["512", "20", "decode-a-n_samples-8"],
        ["16,384", "20", "decode-a-n_samples-256"],
    ]
    assert rows(written(tmp_path, "critic-a", CRITIC)) == [["320", "2000", "a"]]
    left = written(tmp_path, "critic-b", CRITIC, rollouts="runs/paper/critics/a")
    assert rows(left) == [["0", "2000", "a"]]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "cannot be read"),
        ("- run", "cannot be read .*; it must be a mapping of settings"),
        (json.dumps(DECODE | {"n_sample": 3}), "'n_sample'"),
    ],
)
def test_a_bad_file_is_one_sentence_with_its_name(tmp_path, capsys, content, sentence):
    """Bug: an error among 30 files that does not say which."""
    file = tmp_path / "paper/decode-a.yaml"
    file.parent.mkdir()
    if content is not None:
        file.write_text(content)
    with pytest.raises(ParameterError, match=sentence) as caught:
        rows(file)
    assert str(caught.value).startswith(str(file)) and "\n" not in str(caught.value)
    assert commands.main(["plan", str(file)]) == 1
    assert capsys.readouterr().err.startswith(f"error: {file}")


def test_every_committed_file_of_the_paper_has_a_plan():
    """Guards `make dry-run`, which starts nothing."""
    assert rows(*sorted(Path(igcore.__file__).parents[1].glob("params/paper/*.yaml")))
