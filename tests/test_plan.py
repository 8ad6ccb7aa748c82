"""Tests of the plan of runs before they start: prompts and tokens worked out by hand, and files
that say too little.
"""

import json
import math
from pathlib import Path

import pytest
import yaml

import igcore
from igcore.errors import ParameterError
from igcore.runs import plan

DECODE = dict(
    profile="paper",
    run="decode-a",
    policy="vicuna-7b",
    methods=["base", "inferenceguard"],
    prompts={"name": "hex-phi"},
    budget=0.0,
    reward="llama-7b-rm",
    cost="beaver-7b-cost",
    n_samples=8,
    keep=2,
    block_size=16,
    max_new_tokens=64,
    rounds=2,
    dtype="bfloat16",
)
CRITIC = dict(
    profile="paper",
    run="a",
    policy="vicuna-7b",
    prompts="hex-phi",
    budget=0.0,
    reward="llama-7b-rm",
    cost="beaver-7b-cost",
    critics={"terminal": {"features": "ho", "width": 4096}},
    value={"width": 4096},
    n_rollouts=5,
    max_new_tokens=64,
    block_size=16,
    search={"n_samples": 128, "keep": 32},
    dtype="bfloat16",
)


def written(tmp_path, name, base=DECODE, **changes) -> Path:
    """Write params/paper/<name>.yaml below a comment."""
    path = tmp_path / "paper" / f"{name}.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text("# What it is for.\n" + yaml.safe_dump(base | changes, sort_keys=False))
    return path


def planned(*files) -> list[plan.Job]:
    return list(plan.jobs(files))


def test_a_decode_run_by_hand(tmp_path):
    """Bug: prompts of another set, or the tokens of one method only."""
    file = written(tmp_path, "decode-a")
    assert planned(file) == [plan.Job(file, "decode-a", 300, 300 * 64 * (1 + 8 * 2))]


@pytest.mark.parametrize(
    ("prompts", "split", "limit", "expected"),
    [
        ({"name": "pku-saferlhf", "part": "test"}, "all", None, 759),
        ("pku-saferlhf", "test", None, 759),  # its owners' test part, whole
        ("pku-saferlhf", "test", 200, 200),
        ("hh-rlhf", "all", 20_000, 12_451),
        ("hh-rlhf", "train", None, math.nan),
        ("hex-phi", "train", None, 150),
        ("hex-phi", "test", None, 78),
        ("rtp", "all", None, 623),
        ("mild", "all", None, 24),
        ("pku-saferlhf", "train", 2000, 2000),
        ("pku-saferlhf", "train", None, math.nan),
        ({"name": "pku-saferlhf", "part": "train"}, "test", None, math.nan),
    ],
)
def test_prompts_are_counted_without_a_download(prompts, split, limit, expected):
    """Bug: a split's share of a set that is not there, or a limit above what there is."""
    assert plan.count(prompts, split, limit) == pytest.approx(expected, nan_ok=True)


def test_prompts_of_a_file_are_counted_in_it(tmp_path):
    (tmp_path / "own.txt").write_text("one\ntwo\nthree\n")
    assert plan.count(str(tmp_path / "own.txt"), "all", 2) == 2
    assert plan.count({"name": str(tmp_path / "own.txt")}, "all", None) == 3


def test_a_critics_run_by_hand(tmp_path):
    """Bug: rollouts of one split only, or rollouts planned that another run has left."""
    (job,) = planned(written(tmp_path, "critic-a", CRITIC))
    searched = 24 * 128 * 64 * 2
    assert (job.run, job.prompts) == ("critics/a", 150 + 78)
    assert job.tokens == (150 + 78) * 5 * 64 + searched
    (again,) = planned(written(tmp_path, "critic-b", CRITIC, rollouts="runs/paper/critics/a"))
    assert again.tokens == searched


def test_a_policy_in_a_server_is_planned(tmp_path):
    """Bug: no plan of a file whose policy is a server, which has no name."""
    policy = {"server": "http://127.0.0.1:8000/v1", "model": "nobody/knows", "tokenizer": "x"}
    (job,) = planned(written(tmp_path, "decode-a", policy=policy))
    assert job.prompts == 300


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "cannot be read"),
        ("run: [", "cannot be read"),
        ("- run", "cannot be read .*; it must be a mapping of settings"),
        (json.dumps(DECODE | {"n_sample": 3}), "'n_sample'"),
        (
            json.dumps(DECODE | {"prompts": "nowhere.csv"}),
            "no prompts could be read from nowhere.csv",
        ),
    ],
)
def test_a_bad_file_is_one_sentence_with_its_name(tmp_path, content, sentence):
    """Bug: an error among 30 files that does not say which."""
    file = tmp_path / "paper/decode-a.yaml"
    file.parent.mkdir()
    if content is not None:
        file.write_text(content)
    with pytest.raises(ParameterError, match=sentence) as caught:
        planned(file)
    assert str(caught.value).startswith(str(file)) and "\n" not in str(caught.value)


def test_every_point_of_a_file_has_its_line(tmp_path):
    """Bug: a grid planned as one run, and a total that leaves out what is not known."""
    grid = {"n_samples": [8, 256]}
    file = written(tmp_path, "decode-a", methods=["best-of-n"], grid=grid)
    small, large = plan.report([file]).splitlines()[1:-1]
    assert small.split() == ["0.15", "300", planned(file)[0].run]
    assert large.split()[:2] == ["4.92", "300"]
    assert plan.report([file]).endswith("in all: 2 runs of 1 params files")
    other = written(tmp_path, "decode-b", run="decode-b", prompts="hh-rlhf", split="train")
    *_, job, total = plan.report([file, other]).splitlines()
    assert job.split() == ["unknown", "unknown", "decode-b"] and total.split()[0] == "unknown"


def test_the_command_prints_or_says_what_is_wrong(tmp_path, capsys):
    """Guards `make dry-run`, which starts nothing."""
    plan.main([str(written(tmp_path, "decode-a"))])
    assert "decode-a\n" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"error: no file has a run; give files named decode"):
        plan.main([str(written(tmp_path, "tables"))])


def test_every_committed_file_of_the_paper_has_a_plan():
    """Bug: a params file that names a prompt set of unknown size."""
    found = planned(*sorted(Path(igcore.__file__).parents[1].glob("params/paper/*.yaml")))
    assert found and not [job.file for job in found if math.isnan(job.tokens)]
