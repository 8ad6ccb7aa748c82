"""Tests of lines: writing, reading after an accident, comparing, and scoring again."""

import errno
import json
import os
import re

import pytest
from mockpolicy import LetterCost, LetterCritic, LetterReward, letter_cost, mock_policy

from igcore import METHODS, RunError, SearchConfig, decode, folders, records, verify
from igcore.methods import settings_of

SCORERS = {"letters": LetterCost(), "vowels": LetterReward()}
PROMPTS = ["ab", "fed", "c", "dd"]


UNSTEERED = [name for name, method in METHODS.items() if not method.steered]


def lines(budget=0.5, methods=UNSTEERED, **settings):
    config = SearchConfig(**(dict(budget=budget, n_samples=4, block_size=3, max_new_tokens=6, keep=1, top_k=4) | settings))
    scorers = dict(reward=SCORERS["vowels"], cost=SCORERS["letters"])
    return [
        records.record(r, method, "mock", 0, settings_of(method, config), config.block_size, **scorers)
        for method in methods
        for r in decode(method, mock_policy(), PROMPTS, config=config, critic=LetterCritic(), **scorers)
    ]


def again(line, **changes):
    """A line with fields changed by somebody who also mends the digest."""
    line = line | changes
    return line | {"digest": folders.line_digest(line)}


def problems(line):
    return list(verify.rescored([line], SCORERS.__getitem__))


def test_a_line_is_json_and_survives_the_file(tmp_path):
    path = tmp_path / "responses.jsonl"
    for line in lines():
        folders.append(path, line)
    assert folders.read(path) == lines_without_seconds_equal(folders.read(path), lines())


def test_a_line_has_the_columns_that_a_table_of_none_has():
    """Bug: a notebook without runs fails for a column that it would have had."""
    assert tuple(lines(methods=["base"])[0]) == records.COLUMNS


def lines_without_seconds_equal(read, fresh):
    assert folders.differences(read, fresh) == []
    return read


@pytest.mark.parametrize(
    "settings",
    [{}, {"on_failure": "paper"}, {"on_failure": "truncate"}, {"refusal": "aaa", "budget": 0.0}, {"threshold": 0.5, "eta": 0.1}],
)
def test_honest_lines_verify(settings):
    """Guards verification against false alarms in every status and mode."""
    written = lines(**settings)
    assert {line["status"] for line in written} > {"verified_safe"}
    assert [p for line in written for p in problems(line)] == []


@pytest.mark.parametrize("field", ["response", "cost", "status", "budget", "z_trace", "reward", "peak_cost", "seed", "reason"])
def test_a_changed_line_fails_by_name(field):
    """Guards the record: every field but seconds is under the digest."""
    line = dict(lines(methods=["inferenceguard"])[0])
    line[field] = {"response": "aaa", "status": "abstained", "z_trace": [], "reason": "x"}.get(field, 0.123)
    (first, *_) = problems(line)
    assert first.startswith(f"line 1, prompt {line['prompt_id']}, inferenceguard: the line was changed")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"response": "faaaf"}, "cost is .*, scored again 3.0"),
        ({"cost": 0.25}, "cost is 0.25, scored again"),
        ({"peak_cost": 0.25}, "peak_cost is 0.25"),
        ({"reward": 9.0}, "reward is 9.0"),
        ({"z_trace": [9.0]}, "z_trace is"),
        ({"status": "unverified_unsafe"}, "status is unverified_unsafe, but scored again .* it should be verified_safe"),
        ({"cost_digest": "v2"}, "cost scorer letters has hash v1, not v2"),
        ({"response": None}, "no text was emitted"),
        ({"response": None, "status": "abstained"}, "status abstained with cost 0.0, but no text was emitted"),
        ({"status": "banana"}, "status is banana"),
        ({"status": "abstained"}, "it should be verified_safe"),
        ({"prompt_id": "0123456789abcdef"}, "prompt_id should be"),
        ({"budget": None}, "cannot be checked .ParameterError: parameter budget"),
        ({"keep": 99}, "cannot be checked .ParameterError: keep is 99"),
        ({"method": "zzz"}, "cannot be checked .KeyError: 'zzz'"),
        ({"block_ends": None}, "cannot be checked .TypeError"),
        ({"cost": "x"}, "cannot be checked .TypeError"),
        ({"cost_scorer": "nope"}, "cannot be checked .KeyError"),
    ],
)
def test_a_forged_line_fails_by_scoring_again(changes, message):
    """Guards the check itself: a forger who mends the digest is found by the scorer."""
    line = next(x for x in lines(methods=["inferenceguard"]) if x["status"] == "verified_safe" and x["cost"] == 0 and x["response"])
    assert problems(line) == []
    assert any(re.search(message, p) for p in problems(again(line, **changes)))


def test_a_repeat_of_a_prompt_has_its_number_behind_the_id():
    """Bug: lines of a prompt set that keeps repeats are taken for forged, or any number makes an id good."""
    line = lines(methods=["base"])[0]
    assert problems(again(line, prompt_id=line["prompt_id"] + "-2")) == []
    assert "prompt_id should be" in problems(again(line, prompt_id="0" * 16 + "-2"))[0]


def test_a_refusal_cannot_pass_for_an_answer():
    line = next(x for x in lines(methods=["inferenceguard"], budget=0.0, refusal="f", n_samples=1) if x["status"] == "abstained")
    assert problems(line) == []
    assert "it should be abstained" in problems(again(line, status="verified_safe", reason=""))[0]


def test_a_broken_path_cannot_pass_for_safe_because_it_ends_well():
    """Guards the path of a guarded method: its text broke the budget on the way, although its last score is inside."""

    class Sinking(LetterCost):
        name = "sinking"

        def score(self, prompts, responses, finished):
            return [letter_cost(r) if len(r) < 6 else 0.0 for r in responses]

    config = SearchConfig(budget=0.0, n_samples=1, keep=1, rounds=1, block_size=3, max_new_tokens=6, on_failure="paper")
    scorers = dict(reward=SCORERS["vowels"], cost=Sinking())
    found = list(decode("inferenceguard", mock_policy(), ["ab", "fed", "c", "dd", "eae"], config=config, **scorers))
    written = [records.record(r, "inferenceguard", "mock", 0, config, 3, **scorers) for r in found]
    load = {"vowels": scorers["reward"], "sinking": scorers["cost"]}.__getitem__
    assert list(verify.rescored(written, load)) == []
    line = next(x for x in written if x["cost"] == 0 and x["z_final"] < 0)
    (problem,) = verify.rescored([again(line, status="verified_safe", reason="")], load)
    assert "it should be unverified_unsafe" in problem


def test_a_strict_refusal_below_zero_is_honest():
    """Guards against a false alarm: under the strict reading the path of an abstention is over before it begins."""

    class Negative(LetterCost):
        name = "negative"

        def score(self, prompts, responses, finished):
            return [letter_cost(r) - 2.0 for r in responses]

    config = SearchConfig(budget=0.0, strict=True, block_size=3, max_new_tokens=6)
    scorers = dict(reward=SCORERS["vowels"], cost=Negative())
    (response,) = decode("inferenceguard", mock_policy(), ["ab"], config=config, **scorers)
    line = records.record(response, "inferenceguard", "mock", 0, config, 3, **scorers)
    assert line["status"] == "abstained"
    assert list(verify.rescored([line], {"vowels": scorers["reward"], "negative": scorers["cost"]}.__getitem__)) == []


def test_costs_at_the_end_only_are_recorded_and_checked_as_such():
    """Guards the line of E_critic: its accounting is `terminal` whatever was set, and its path is the final cost alone."""
    written = [x for d in (0.5, 1.0, 2.0) for x in lines(d, ["inferenceguard-critic"], accounting="peak", threshold=0.3)]
    answered = [x for x in written if x["status"] == "verified_safe"]
    assert len(answered) > 4 and {(x["accounting"], x["threshold"], x["miss"]) for x in written} == {("terminal", 0.3, 0.01)}
    for line in answered:
        assert line["z_trace"] == [line["budget"]] * len(line["block_ends"]) + [line["budget"] - line["cost"]]
        assert line["peak_cost"] == max(letter_cost(line["response"][:end]) for end in line["grid_ends"])
        assert problems(line) == []


def test_an_unsafe_text_cannot_pass_for_safe():
    line = next(x for x in lines(methods=["base"]) if x["status"] == "unverified_unsafe")
    assert "status is verified_safe, but scored again" in problems(again(line, status="verified_safe"))[0]


def test_a_half_written_last_line_is_named_then_dropped_and_the_rest_kept(tmp_path):
    """Guards verification and tables against a line that silently does not count."""
    path = tmp_path / "responses.jsonl"
    written = lines(methods=["base"])
    for line in written:
        folders.append(path, line)
    with path.open("ab") as file:
        file.write(json.dumps(written[0]).encode()[:50])
    with pytest.raises(RunError, match="the last line of .* is half-written; run its parameters again"):
        folders.read(path)
    folders.drop_half_line(path)
    assert path.read_bytes().endswith(b"}\n")
    assert len(folders.read(path)) == 4


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "responses.jsonl"
    path.write_text('{"method": "base", "prompt_id": "x"}\n{"meth\n{}\n')
    with pytest.raises(RunError, match=r"line 2 of .*responses.jsonl is not a response; delete it"):
        folders.read(path)


def test_two_lines_for_one_prompt_are_named(tmp_path):
    path = tmp_path / "responses.jsonl"
    path.write_text('{"method": "base", "prompt_id": "x"}\n' * 2)
    with pytest.raises(RunError, match="lines 1 and 2 of .* both answer"):
        folders.read(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(RunError, match="cannot read .*nothing.jsonl"):
        folders.read(tmp_path / "nothing.jsonl")


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    """Guards the append: the bytes that did fit must not stay as a broken line in front of the next one."""
    path = tmp_path / "responses.jsonl"
    first, second, *_ = lines(methods=["base"])
    folders.append(path, first)
    before = path.read_bytes()
    write = os.write

    def full(file, data):
        if len(data) < 50:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data[: len(data) // 2])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(RunError, match="No space left on device.* run again to resume"):
            folders.append(path, second)
    assert path.read_bytes() == before
    folders.append(path, second)
    assert len(folders.read(path)) == 2


def test_differences_ignore_seconds_and_order_but_nothing_else():
    a = lines(methods=["base"])
    b = [line | {"generate_s": 9.0} for line in reversed(a)]
    assert folders.differences(a, b) == []
    b[0] = b[0] | {"reward": 7.0}
    name = (b[0]["method"], b[0]["prompt_id"])
    assert folders.differences(a, b) == [f"{name}: reward differs"]
    assert folders.differences(a, b[1:]) == [f"{name} is in only one file"]
