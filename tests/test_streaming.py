"""Tests of `Guard.stream`, of answers in a file, and of a search that nobody waits for any more."""

import asyncio
import hashlib
import itertools
import json
import threading
import time

import pytest
from mockpolicy import EOS, LetterCost, letter_cost, mock_policy, noise, outcome
from test_batch import lines_of

from igcore import Guard, ParameterError, RunError, decode
from igcore.engine.local import LocalEngine
from igcore.prompt import as_prompt
from igcore.response import Response
from igcore.tools.answers import writer_of

PROMPTS = ["a", "bc", "f", "dd", "ea"]
SHOWN = dict(budget=2.0, block_size=2, max_new_tokens=12, spend=40, keep_shown=True)
BEAMS = dict(method="inferenceguard", n_samples=3, keep=2, budget=2.0, block_size=2)


def guard_of(cost=None, **settings):
    """A guard of the mock policy whose refusal may be emitted."""
    return Guard(mock_policy(), cost or LetterCost(), refusal="fed", **settings)


# --- stream ---------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.* is over the budget of")
@pytest.mark.parametrize(
    "settings",
    [SHOWN, SHOWN | {"on_failure": "truncate"}, SHOWN | {"stop": ["ef", "dd"]}, BEAMS],
    ids=["shown", "truncate", "stop", "beams"],
)
def test_a_stream_is_the_answer_of_a_call(settings):
    """Guards the stream: the same answer as a call, in parts that are never taken back and that
    were within budget, and nothing after an abstention.
    """
    parts = abstained = 0
    for (prompt, seed), cost in itertools.product(
        itertools.product(PROMPTS, range(4)), (letter_cost, lambda text: 4 * noise(text))
    ):
        guard = guard_of(LetterCost(cost), **settings)
        *pieces, answer = guard.stream(prompt, seed=seed)
        assert outcome(answer) == outcome(guard(prompt, seed=seed))
        text, begun = "".join(pieces), ""
        assert all(pieces)
        if answer.status == "abstained":
            abstained += 1
            assert text == answer.judged or answer.text == "fed"
        else:
            assert text == answer.judged
        for piece in pieces[:-1]:
            begun += piece
            assert cost(begun) <= 2.0
        parts += len(pieces) > 1
    assert parts
    assert abstained or {"stop", "on_failure"} & settings.keys()


def test_a_search_that_may_go_back_says_once_that_all_comes_at_its_end():
    """Bug: the text came at the end, without a word about it."""
    guard = guard_of(**SHOWN | {"keep_shown": False})
    with pytest.warns(UserWarning, match="keep_shown=True shows each block") as said:
        pieces = guard.stream("a")
    (text, answer) = pieces
    assert text == answer.text and len(said) == 1


@pytest.mark.parametrize("method", ["rejection", "best-of-n"])
def test_a_method_whose_block_is_the_answer_has_one_part(method):
    more = {"n_samples": 2} if method == "best-of-n" else {}
    text, answer = guard_of(method=method, budget=2.0, **more).stream("a")
    assert text == answer.text


def test_bad_input_is_refused_before_a_thread_begins():
    """Guards the call: an error of the request comes from it, and not from the first part."""
    before = threading.active_count()
    with pytest.raises(ParameterError, match="is empty"):
        guard_of(**SHOWN).stream(" ")
    with pytest.raises(ParameterError, match="seed is 1.5"):
        guard_of(**SHOWN).stream("a", seed=1.5)
    assert threading.active_count() == before


class Breaks(LetterCost):
    """Fails on texts of the search, and not when it is examined."""

    def score(self, prompts, responses, finished):
        if "a" in prompts:
            raise KeyboardInterrupt
        return super().score(prompts, responses, finished)


def test_an_error_of_the_search_reaches_the_reader():
    """Bug: an error in the thread was printed there, and the reader waited forever."""
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        list(guard_of(Breaks(), **SHOWN).stream("a"))
    assert threading.active_count() == before


class Gate(LetterCost):
    """A cost that waits at its n-th call until it is opened."""

    def __init__(self, *of):
        super().__init__(*of)
        self.left, self.open = 0, threading.Event()

    def score(self, *texts):
        self.left -= 1
        if not self.left:
            self.open.wait(10)
        return super().score(*texts)


@pytest.mark.parametrize("settings", [SHOWN, BEAMS], ids=["steps", "beams"])
def test_a_closed_stream_frees_its_rows_at_the_next_block(monkeypatch, settings):
    """Guards closing: no further block is drawn, the engine has no rows left, the thread ends."""
    rows, drawn = [], []

    def spied(name, note):
        inner = getattr(LocalEngine, name)

        def spy(self, *given, **named):
            note(given)
            return inner(self, *given, **named)

        monkeypatch.setattr(LocalEngine, name, spy)

    spied("select", lambda given: rows.append(len(given[0])))
    spied("sample_block", lambda given: drawn.append(2))
    spied("go_on", lambda given: drawn.append(1))  # a token
    never_ends = lambda prefix: [-99.0 * (t == EOS) for t in range(7)]  # noqa: E731
    gate = Gate(lambda text: 0.0)
    guard = Guard(mock_policy(never_ends), gate, **settings | {"max_new_tokens": 40})
    before = threading.active_count()
    gate.left = 12  # it waits in the search, after the first part
    stream = guard.stream("f")
    assert next(stream)
    while gate.left > 0:
        time.sleep(0.001)
    seen = sum(drawn)
    threading.Timer(0.05, gate.open.set).start()
    stream.close()
    assert sum(drawn) - seen <= 2 and seen < 38
    assert rows[-1] == 0
    while threading.active_count() > before:  # the timer
        time.sleep(0.001)


def test_a_cancelled_prompt_leaves_the_others_alone():
    """Guards the reason ``cancelled``, and the answers of the prompts beside it."""
    for settings in (SHOWN, BEAMS):
        guard = guard_of(**settings)
        gone = lambda prompt: prompt.text == "f"  # noqa: E731
        found = list(decode(guard.method, guard, PROMPTS, cancelled=gone))
        for answer, alone in zip(found, guard.decode(PROMPTS), strict=True):
            if answer.prompt == "f":
                assert (answer.status, answer.reason, answer.text) == (
                    "abstained",
                    "cancelled",
                    "fed",
                )
            else:
                assert outcome(answer) == outcome(alone)


@pytest.mark.parametrize("settings", [SHOWN, BEAMS, SHOWN | {"answers": 1, "keep_shown": False}])
def test_each_answer_is_told_when_it_is_known(settings):
    """Bug: the answer to a short prompt waited for the longest of its group."""
    guard, told, going = guard_of(**settings), [], []
    note = lambda prompt, answer: (told.append(answer), going.append(len(asked)))  # noqa: E731
    asked = guard.cost.asked
    found = list(decode(guard.method, guard, PROMPTS, on_answer=note))
    assert sorted(map(id, told)) == sorted(map(id, found))
    assert [outcome(r) for r in found] == [outcome(r) for r in guard.decode(PROMPTS)]
    assert all(r.receipt() for r in found)
    steps = settings is not BEAMS
    assert not steps or [r.prompt for r in told] != PROMPTS  # in the order in which they end
    assert not steps or going[0] < going[-1]


def test_a_guard_answers_in_a_thread_of_asyncio():
    """Guards ``asyncio.to_thread``: equal answers, also beside one that timed out."""
    guard, gate = guard_of(**SHOWN), Gate()
    slow = guard_of(gate, **SHOWN)
    gate.left = 3

    async def run():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.to_thread(slow, "a"), 0.05)
        gate.open.set()
        return await asyncio.gather(*(asyncio.to_thread(guard, prompt) for prompt in PROMPTS))

    found = asyncio.run(run())
    assert [outcome(r) for r in found] == [outcome(guard(prompt)) for prompt in PROMPTS]


# --- a file of answers ----------------------------------------------------------------------------


def test_a_file_of_answers_goes_on_after_a_stop(tmp_path):
    """Guards ``map(out=)``: killed after any line, or inside one, it goes on, and the file is that
    of a call that was never stopped.
    """
    guard = guard_of(**SHOWN | {"group_size": 2})
    whole = tmp_path / "whole.jsonl"
    answers = guard.map(PROMPTS, out=whole)
    content = whole.read_bytes()
    ends = [i + 1 for i, byte in enumerate(content) if byte == 10]
    assert len(ends) == len(PROMPTS)
    for cut in (0, *ends, *(end - 5 for end in ends)):
        part = tmp_path / "part.jsonl"
        part.write_bytes(content[:cut])
        found = guard.map(PROMPTS, out=str(part))
        assert lines_of(part) == lines_of(whole)
        assert [outcome(r) for r in found] == [outcome(r) for r in answers]
        assert [r.receipt() for r in found] == [r.receipt() for r in answers]


def test_a_file_of_answers_is_read_and_not_decoded_again(tmp_path, monkeypatch):
    guard = guard_of(**SHOWN)
    guard.map(PROMPTS, out=tmp_path / "a.jsonl")
    monkeypatch.setattr(LocalEngine, "open", None)
    (first, *_) = guard.map(PROMPTS, out=tmp_path / "a.jsonl")
    assert isinstance(first, Response) and first.counts.policy_tokens > 0


@pytest.mark.parametrize(
    ("change", "prompts", "seed", "said"),
    [
        ({"budget": 1.0}, PROMPTS, 0, r"line 1 of .* \(budget, settings\)"),
        ({}, PROMPTS, 1, r"\(seed\)"),
        ({}, ["a", "bd", "f"], 0, r"line 2 of .* \(prompt\)"),
        ({}, ["a"], 0, "has 3 answers, and there are 1 prompts"),
        ({}, [as_prompt("a", "other")] + PROMPTS[1:], 0, r"line 1 of .* \(set\)"),
    ],
)
def test_answers_to_something_else_are_kept_and_refused(tmp_path, change, prompts, seed, said):
    """Guards the file: an answer of another guard is never taken for one of this."""
    path = tmp_path / "a.jsonl"
    guard_of(**SHOWN).map(PROMPTS[:3], out=path)
    before = path.read_bytes()
    with pytest.raises(RunError, match=said):
        guard_of(**SHOWN | change).map(prompts, seed=seed, out=path)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "line",
    ["7", "{", "{}", '{"receipt": "7"}', '{"receipt": {}}', '{"counts": {}}', '{"counts": 1}'],
)
def test_a_line_that_is_no_answer_is_one_sentence(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(RunError, match="line 1 of"):
        guard_of(**SHOWN).map(PROMPTS, out=path)


def test_a_line_that_was_changed_is_one_sentence(tmp_path):
    """Bug: an answer that somebody has edited was returned as the guard's own."""
    path, guard = tmp_path / "a.jsonl", guard_of(**SHOWN)
    line = json.loads((guard.map(PROMPTS, out=path), path.read_text().splitlines()[0])[1])
    for change in ({"text": "edited"}, {"z_trace": "?", "surplus": 1, "text": 7}):
        path.write_text(json.dumps(line | change) + "\n")
        with pytest.raises(RunError, match="line 1 of"):
            guard.map(PROMPTS, out=path)


def test_two_writers_of_one_file_are_refused(tmp_path):
    """Guards the lock: two processes would interleave their lines."""
    guard, path = guard_of(**SHOWN), tmp_path / "a.jsonl"
    with writer_of(path), pytest.raises(RunError, match="another process is writing"):
        guard.map(PROMPTS, out=path)


# --- receipts -------------------------------------------------------------------------------------


def test_a_receipt_is_canonical_and_holds_no_text():
    """Guards the receipt: one form, every field of it, and none of the words."""
    guard = guard_of(**SHOWN)
    answer = guard("ea", seed=3)
    text = answer.receipt()
    receipt = json.loads(text)
    assert text == json.dumps(receipt, sort_keys=True, separators=(",", ":")) and text.isascii()
    assert receipt["z"] == answer.z_trace and receipt["ends"] == answer.block_ends
    assert receipt["seed"] == 3 and receipt["budget"] == 2.0
    assert receipt["cost_model"] == {"name": "letters", "digest": "v1"}
    assert receipt["policy"] == {"name": "mock", "digest": "mock"}
    assert receipt["text"] == hashlib.sha256(answer.text.encode()).hexdigest()
    assert receipt["prompt"] == hashlib.sha256(b"ea").hexdigest()
    others = [guard("ea", seed=4), guard("a", seed=3), guard.with_config(budget=1.5)("ea", seed=3)]
    assert all(other.receipt() != text for other in others)


def test_a_receipt_of_a_copy_needs_its_guard():
    answer = Response.from_dict(guard_of(**SHOWN)("a").to_dict())
    with pytest.raises(ParameterError, match="set answer.guard"):
        answer.receipt()
