"""Tests of `igserve verify-receipt`: honest answers hold, forged ones do not."""

import json
import time

import pytest
from mockpolicy import LetterCost, mock_policy
from tiny import tiny_policy, tiny_tokenizer

from igcore import Guard, RunError
from igserve import verify_receipt
from igserve.verify_receipt import claims_in, problem_of
from igserve.wire import CHAT, TEXT, read_request, reply
from tests.receipts import forged, honest_lines, plain

SETTINGS = dict(budget=1.0, block_size=3, max_new_tokens=12, spend=40, refusal="fed")
ROLES = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }} {% endfor %}"
PROMPTS = ["a", "bc", "f", "dd", "ea", "cc", "b", "e", "ad", "fa"]


def guard_for(**settings):
    return Guard(mock_policy(), LetterCost(), **SETTINGS | settings)


@pytest.fixture(scope="module")
def lines():
    return honest_lines(guard_for(), PROMPTS)


def problems(tmp_path, lines, guard):
    path = tmp_path / "answers.jsonl"
    path.write_text("".join(map(plain, lines)))
    return [problem_of(claim, guard) for _, claim in claims_in(path)]


def test_honest_answers_hold(tmp_path, lines):
    """Guards the check: every honest answer holds, abstentions included."""
    assert not any(problems(tmp_path, lines, guard_for()))


def test_forged_answers_do_not_hold(tmp_path, lines):
    """Bug: a text that nobody sampled, another seed's, or other numbers, with digests repaired."""
    kinds, copies = zip(*forged(lines, each=3), strict=True)
    found = problems(tmp_path, copies, guard_for())
    assert [kind for kind, why in zip(kinds, found, strict=True) if not why] == []


@pytest.mark.parametrize("change", [{"budget": 2.0}, {"seed": 3}, {"spend": 41}])
def test_the_request_is_the_verifiers(tmp_path, lines, change):
    """Bug: what a receipt says of budget, seed or settings decided what was checked."""
    assert all(problems(tmp_path, lines, guard_for(**change)))


def test_an_abstention_is_checked(tmp_path):
    """Guards abstentions: one that the guard does not make again does not hold."""
    strict = Guard(
        mock_policy(), LetterCost(lambda text: 9.0 * (text not in ("", "fed"))), **SETTINGS
    )
    lines = honest_lines(strict, PROMPTS[:4])
    assert {line["status"] for line in lines} == {"abstained"}
    assert not any(problems(tmp_path, lines, strict))
    lied = [
        line | {"receipt": line["receipt"].replace("abstained", "verified_safe")} for line in lines
    ]
    assert all(problems(tmp_path, lied, strict))


@pytest.mark.parametrize("kind", [CHAT, TEXT])
def test_replies_of_the_interface_are_checked(tmp_path, kind):
    """Guards replies of a server, with the settings of their requests."""
    tokenizer = tiny_tokenizer(chat_template=ROLES)
    cost = LetterCost(lambda text: len(text) / 100)
    guard, exchanged = Guard(tiny_policy(tokenizer), cost, **SETTINGS), []
    for n, text in enumerate(["the sun", "a tree", "one more"]):
        body = {"model": "m", "seed": n, "max_tokens": 9, "temperature": 1.5, "prompt": text}
        if kind == CHAT:
            said = [
                {"role": "system", "content": "a"},
                # a client may send a field that has no value
                {"role": "user", "content": body.pop("prompt"), "name": None},
            ]
            body["messages"] = said
        asked = read_request(kind, body, guard)
        answer = asked.guard(asked.prompt)
        exchanged.append((body, reply(asked, answer, "x", int(time.time()))))
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({"request": body, "response": given}) for body, given in exchanged]
    # a file without a line break at its end is whole, and a check changes no file
    path.write_text("\n".join(lines))
    before, claims = path.read_bytes(), [claim for _, claim in claims_in(path)]
    assert len(claims) == 3 and not any(problem_of(claim, guard) for claim in claims)
    assert path.read_bytes() == before
    for wrong in ({"seed": 99}, {"max_tokens": 6}, {"temperature": 1.4}):
        path.write_text(
            "".join(json.dumps({"request": a | wrong, "response": b}) + "\n" for a, b in exchanged)
        )
        assert all(problem_of(claim, guard) for _, claim in claims_in(path))
    request, response = exchanged[0]
    (choice,), odd = (
        response["choices"],
        {"message": {"content": 7}} if kind == CHAT else {"text": 7},
    )
    forged_line = {"request": request, "response": response | {"choices": [choice | odd]}}
    path.write_text(json.dumps(forged_line) + "\n")
    ((_, claim),) = claims_in(path)
    assert problem_of(claim, guard)
    with pytest.raises(RunError, match="cannot be read"):
        list(claims_in(tmp_path / "nowhere.jsonl"))


@pytest.mark.parametrize(
    "change",
    [
        {"ends": [1, 2]}, {"ends": "ab"}, {"ends": [True]}, {"ends": None}, {"tokens": None},
        {"tokens": 1.5}, {"z": None}, {"cost": None}, {"status": 1}, {"seed": False},
    ],
)  # fmt: skip
def test_a_receipt_of_odd_values_is_a_problem_and_no_traceback(tmp_path, lines, change):
    odd = json.dumps(json.loads(lines[0]["receipt"]) | change)
    assert all(problems(tmp_path, [lines[0] | {"receipt": odd}], guard_for()))


@pytest.mark.parametrize(
    "line", ["7", "{}", '{"receipt": 1}', '{"receipt": "{}"}', '{"request": {}, "response": {}}']
)
def test_a_line_without_a_receipt_is_one_sentence(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(RunError, match="line 1 of"):
        list(claims_in(path))


def test_numbers_are_compared_with_room_for_rounding():
    """Guards the comparison: rounding passes, another number or type does not."""
    alike = verify_receipt.alike
    assert alike(0.1 + 1e-7, 0.1) and alike(1, 1.0) and alike([1.0, 2], [1.0, 2])
    assert not any((alike(0.11, 0.1), alike(True, 1.0), alike("1", 1.0), alike([1.0], [1.0, 2.0])))
    assert not alike(float("nan"), 0.1) and not alike(None, 0.1)
