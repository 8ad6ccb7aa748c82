"""Tests of the job that scores lines of a profile's runs again."""

import json

import pytest
from mockpolicy import LetterCost, LetterReward
from tiny import letters

from igcore.models import policies
from igcore.models.registry import SCORERS
from igcore.prompt import as_prompt
from igstudy.linefile import line_digest
from igstudy.runs import decode_run, rescore, spotcheck
from igstudy.runs.decode_params import DecodeParams

PROMPTS = [as_prompt(text, "mild") for text in ("ab", "fed", "c", "dd")]
GIVEN = dict(profile="mine", policy="smollm2-raw", prompts="mild", n_samples=4, keep=2)
GIVEN |= dict(methods=["base", "inferenceguard"], block_size=3, max_new_tokens=6)
GIVEN |= dict(refusal="f", budget=1.0)


@pytest.fixture
def job(tmp_path, monkeypatch):
    """The job of three runs of mock models, which share two pairs of scorers."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(policies, "load_policy", lambda *_: letters())
    monkeypatch.setattr(decode_run, "load_prompts", lambda *_: PROMPTS)
    monkeypatch.setitem(SCORERS, "letters", LetterCost)
    monkeypatch.setitem(SCORERS, "vowels", LetterReward)
    runs = {}
    for run, reward in {"one": "vowels", "two": "vowels", "three": None}.items():
        given = GIVEN | {"run": run, "cost": "letters", "reward": reward}
        runs[f"runs/mine/{run}"] = given
        decode_run.decode_run(DecodeParams(**given))
    file = tmp_path / "job.yaml"
    file.write_text(json.dumps({"runs": runs}))
    return file


def edit(path, number, **changes):
    """Change a line, and mend its digest."""
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    lines[number] |= changes
    lines[number]["digest"] = line_digest(lines[number])
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_line_of_each_method_of_each_run_is_scored_again(job, monkeypatch, capsys, tmp_path):
    """Guards the cost of the check: scorers are examined once for all runs that share them; and
    that it reads other prompts in each run.
    """
    calls = []

    def rescored(lines, *scorers):
        calls.append([(line["method"], line["prompt_id"]) for line in lines])
        return rescore.rescored(lines, *scorers)

    monkeypatch.setattr(spotcheck, "rescored", rescored)
    spotcheck.main(str(job), str(tmp_path / "rescored.json"))
    assert json.loads((tmp_path / "rescored.json").read_text()) == {"runs": 3, "lines": 6}
    methods = GIVEN["methods"]
    first, second = ([(m, p.id) for p in ps for m in methods] for ps in (PROMPTS[:2], PROMPTS[2:3]))
    assert calls == [first, second]
    assert capsys.readouterr().out.endswith("6 lines of 3 runs scored again: all hold\n")


def test_a_line_that_does_not_hold_stops_the_walk(job, tmp_path):
    """Bug: a cost that was changed after the search, with its digest, and a table of it."""
    edit(tmp_path / "runs/mine/two/responses.jsonl", 1, cost=0.123)  # the second run, its line
    name = f"prompt {PROMPTS[1].id}, base"
    with pytest.raises(SystemExit, match=f"error: runs/mine/two does not hold: {name}: cost is"):
        spotcheck.main(str(job), str(tmp_path / "rescored.json"))
    assert not (tmp_path / "rescored.json").exists()


def test_a_shard_without_prompts_has_no_line(job, tmp_path):
    """Bug: more shards than groups of prompts, and a walk that ended with an error."""
    (tmp_path / "runs/mine/one/responses.jsonl").write_text("")
    assert spotcheck.spotcheck(job) == {"runs": 3, "lines": 4}
