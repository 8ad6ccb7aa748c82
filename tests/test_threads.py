"""Tests of the number of threads: the faster one, tried once, and torch's own afterwards."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tiny import tiny_model, tiny_tokenizer

import igcore as ig
from igcore.engine import threads as module
from igcore.engine.threads import faster_threads

TOKENIZER = tiny_tokenizer()
SETTINGS = dict(max_new_tokens=6, block_size=3)
PROMPTS = ["Hello", "Good morning", "How are you?"]


class Machine:
    """torch's numbers of threads, as torch keeps them, and a clock of simulated steps."""

    def __init__(self, cores, seconds):
        self.of_new = cores  # what a new thread of Python begins with
        self.here = threading.local()
        self.seconds, self.now, self.steps = seconds, 0.0, []

    def get(self):
        return self.here.__dict__.setdefault("n", self.of_new)

    def set(self, n):
        self.here.n = self.of_new = n

    def step(self, *_, **__):
        self.steps.append(self.get())
        first = self.steps.count(self.get()) == 1  # which starts the threads
        self.now += 99 if first else self.seconds[self.get()]


@pytest.fixture
def machine(monkeypatch):
    """Return what sets up a machine: threads of torch, and the seconds of a step by threads."""

    def arrange(cores=4, seconds=None):
        there = Machine(cores, seconds or {1: 1.0, cores: 16.0})
        monkeypatch.setattr(torch, "get_num_threads", there.get)
        monkeypatch.setattr(torch, "set_num_threads", there.set)
        monkeypatch.setattr(module.time, "perf_counter", lambda: there.now)
        monkeypatch.setattr(module, "forward", there.step)
        return there

    return arrange


@pytest.mark.parametrize(
    ("cores", "seconds", "faster"),
    [
        (4, {1: 1.0, 4: 16.0}, 1),  # a busy machine
        (4, {1: 1.0, 4: 0.3}, 4),
        (2, {1: 1.0, 2: 1.0}, 1),
    ],
)
def test_the_faster_number_is_used_and_tried_once(machine, cores, seconds, faster):
    """Bug: on a busy machine of two cores two threads took 16 times as long as one."""
    there, model = machine(cores, seconds), tiny_model(TOKENIZER)
    for _ in range(2):
        with faster_threads(model):
            assert there.get() == faster
        assert there.get() == there.of_new == cores
    assert there.steps == 3 * [1] + 3 * [cores]
    there.set(8)  # by the user
    there.seconds[8] = 0.1
    with faster_threads(model):
        assert there.get() == 8


def test_one_thread_is_taken_as_it_is(machine):
    """Guards OMP_NUM_THREADS=1, under which float sums must be the same in every run."""
    there = machine(1)
    with faster_threads(tiny_model(TOKENIZER)):
        assert there.get() == 1
    assert not there.steps


@pytest.mark.parametrize("model", [object(), tiny_model(TOKENIZER).to("meta")])
def test_a_model_that_computes_elsewhere_is_not_tried(machine, model):
    there = machine()
    with faster_threads(model):
        assert there.get() == 4
    assert not there.steps


@pytest.mark.parametrize("broken", ["the call", "a step"])
def test_the_number_is_restored_after_an_error(machine, monkeypatch, broken):
    """Guards the user's process against a call that is stopped."""
    there = machine()
    if broken == "a step":
        monkeypatch.setattr(module, "forward", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError), faster_threads(tiny_model(TOKENIZER)):
        raise ZeroDivisionError
    assert there.get() == there.of_new == 4
    assert module._BEFORE == [] and not hasattr(module._HERE, "inside")


def test_a_call_inside_a_call_changes_nothing(machine):
    """Guards a guard in a cost: its end would give the outer call all threads again."""
    there, inner = machine(), tiny_model(TOKENIZER)
    with faster_threads(tiny_model(TOKENIZER)):
        with faster_threads(inner):
            assert there.get() == 1
        assert there.get() == 1
    assert there.get() == 4 and len(there.steps) == 6


@pytest.mark.parametrize("first", ["one", "two"])
def test_calls_in_threads_leave_each_thread_as_it_was(machine, first):
    """Bug: a thread that began during a call of another one had its single thread for ever."""
    there, models = machine(), [tiny_model(TOKENIZER) for _ in range(2)]
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as two:
        contexts = {pool: faster_threads(m) for pool, m in zip((one, two), models, strict=True)}
        for pool, context in contexts.items():
            pool.submit(context.__enter__).result()
            assert pool.submit(there.get).result() == 1
        for pool in (one, two) if first == "one" else (two, one):
            pool.submit(contexts[pool].__exit__, None, None, None).result()
        assert [pool.submit(there.get).result() for pool in (one, two)] == [4, 4]
    assert there.of_new == there.get() == 4 and module._BEFORE == []


def test_no_number_is_held_while_the_user_has_the_answers(machine, monkeypatch):
    """Guards the user's own work between two groups of prompts."""
    there, inside = machine(), []
    cost = lambda text: inside.append(there.get()) or 0  # noqa: E731
    monkeypatch.setattr(module, "_faster", lambda model, most: there.set(1) or 1)
    model = tiny_model(TOKENIZER)
    guard = ig.Guard((model, TOKENIZER), cost, budget=1, group_size=1, **SETTINGS)
    monkeypatch.setattr("igcore.decoding.max_batch", lambda *_: inside.append(there.get()) or 9)
    inside.clear()  # of the examination
    answers = ig.decode("backtracking", guard, PROMPTS)
    assert inside == [1]  # the test of the model is work, too
    for _ in answers:
        assert there.get() == 4
    assert inside[1:] and {*inside} == {1}


def test_answers_are_those_of_one_thread():
    """Guards the number that torch itself has: a whole answer with the real one."""
    model = tiny_model(TOKENIZER)
    guard = ig.Guard((model, TOKENIZER), lambda text: len(text), budget=99, **SETTINGS)
    expected, found = guard("Hello").tokens, []

    def answer():  # in a thread of its own, whose number dies with it
        torch.set_num_threads(2)
        found.append((guard("Hello").tokens, torch.get_num_threads()))
        torch.set_num_threads(1)

    thread = threading.Thread(target=answer)
    thread.start()
    thread.join()
    assert found == [(expected, 2)] and module._FASTER[model][0] == 2
