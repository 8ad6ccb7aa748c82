"""Tests of the digest of a function: what it holds is in it, and nothing else is.

Bug: a cost kept its digest when an argument, a state, a closure or a global of it changed, and a
run resumed with the lines of the old one.
"""

import abc
import collections
import enum
import functools
import importlib
import os
import re
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch

from igcore import RunError
from igcore.scorers import of_function
from igstudy.closure import content_digest, identified

CALLS: list[str] = []


def weighing(text, weight, words=()):
    return weight * sum(word in text for word in words)


class Grade(enum.Enum):
    LOW = 1
    HIGH = 2


class Base(abc.ABC):
    __slots__ = ("level",)

    @property
    def doubled(self):
        return 2 * self.level

    @abc.abstractmethod
    def __call__(self, text): ...


class Slotted(Base):
    __slots__ = ("grade",)

    def __init__(self, level, grade=Grade.LOW):
        self.level, self.grade = level, grade

    def __call__(self, text):
        return self.doubled * self.grade.value


@dataclass
class Listed:
    words: set = field(default_factory=set)
    more: dict = field(default_factory=dict)

    def __call__(self, text):
        return len(self.words)

    def about(self, text):
        return len(self.more)


class Net:
    def __init__(self, seed, dtype=torch.float32):
        torch.manual_seed(seed)
        self.layers = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Identity()).to(dtype)

    def __call__(self, text):
        return self.layers(torch.ones(2))


def closed(limit):
    def cost(text):
        return [len(word) > limit for word in text.split()].count(True)

    return cost


def source(text: str, name="cost", **names):
    """Return a function of a notebook: it has no module and no source."""
    exec(text, names)
    return names[name]


READS = "def cost(text):\n    return (lambda t: t.count(WORD))(text)"
CALLING = "def helper(text):\n    return len(text) {}\ndef cost(text):\n    return helper(text)"
EACH_OTHER = """
def even(text): return not text or odd(text[1:])
def odd(text): return bool(text) {} even(text[1:])
cost = even
"""
KIND = """
class Kind:
    limit = {}
    def at(self): return {}
def cost(text): return Kind().at()
"""
CASES = {  # a cost -> another one
    "argument of a partial": (
        functools.partial(weighing, weight=1),
        functools.partial(weighing, weight=2),
    ),
    "word of a partial": (
        functools.partial(weighing, 1, words=["a"]),
        functools.partial(weighing, 1, words=["b"]),
    ),
    "function of a partial": (functools.partial(weighing, 1), functools.partial(len, 1)),
    "state": (Listed({"a", "b"}), Listed({"a", "c"})),
    "state of a method's object": (Listed(more={"a": [1]}).about, Listed(more={"a": [2]}).about),
    "slots": (Slotted(1), Slotted(2)),
    "member of an enumeration": (Slotted(1), Slotted(1, Grade.HIGH)),
    "weights": (Net(0), Net(1)),
    "dtype": (Net(0), Net(0, torch.bfloat16)),
    "array": (functools.partial(weighing, np.zeros(2)), functools.partial(weighing, np.ones(2))),
    "pattern": (re.compile("a|b").search, re.compile("a|c").search),
    "bound set": ({"a"}.__contains__, {"b"}.__contains__),
    "closure": (closed(1), closed(2)),
    "global": (source(READS, WORD="a"), source(READS, WORD="b")),
    "a function that it calls": (source(CALLING.format("")), source(CALLING.format("+ 1"))),
    "functions that call each other": (
        source(EACH_OTHER.format("and")),
        source(EACH_OTHER.format("or")),
    ),
    "method of a class": (source(KIND.format(1, "2")), source(KIND.format(1, "3"))),
    "member of a class": (source(KIND.format(1, "2")), source(KIND.format(2, "2"))),
    "default": (source("def cost(t, k=1): return k"), source("def cost(t, k=2): return k")),
    "default by name": (source("def cost(t, *, k=1): ..."), source("def cost(t, *, k=2): ...")),
    "functions of one line": (lambda text: len(text), lambda text: 2 * len(text)),
    "constant in a nested function": (
        source("def cost(t): return [x for x in t if (lambda: 1)()]"),
        source("def cost(t): return [x for x in t if (lambda: 2)()]"),
    ),
    "exception that is caught": (
        source("def cost(t):\n    try: return 1 / len(t)\n    except ZeroDivisionError: return 0"),
        source("def cost(t):\n    try: return 1 / len(t)\n    except ValueError: return 0"),
    ),
    "function behind a cache": (functools.lru_cache(closed(1)), functools.lru_cache(closed(2))),
    "what it is decorated with": (
        functools.wraps(closed(0))(closed(1)),
        functools.wraps(closed(0))(closed(2)),
    ),
    "order": (
        functools.partial(weighing, words=["a", "b"]),
        functools.partial(weighing, words=["b", "a"]),
    ),
    "number and truth": (closed(1), closed(True)),
    "zeros": (closed(0.0), closed(-0.0)),
    "text and bytes": (closed("a"), closed(b"a")),
    "built in": (len, sum),
}


def attributed(limit):
    def cost(text):
        return len(text) > cost.limit

    cost.limit = limit
    return cost


CASES["attribute of a function"] = attributed(1), attributed(2)


@pytest.mark.parametrize("case", CASES)
def test_a_change_changes_the_digest(case):
    one, other = (content_digest(cost) for cost in CASES[case])
    assert len(one) == len(other) == 64 and one != other


@pytest.mark.parametrize(
    ("one", "same"),
    [
        (closed(3), closed(3)),
        (Listed({"a", "b"}), Listed({"b", "a"})),
        (Listed(more={"a": 1, "b": 2}), Listed(more={"b": 2, "a": 1})),
        (Net(0), Net(0)),
        (source(CALLING.format("")), source("# a comment\n" + CALLING.format(""))),
        (source(READS, WORD="a", OTHER=1), source(READS, WORD="a", OTHER=2)),
        (source(KIND.format(1, "2")), source(KIND.format(1, "2"))),
        (closed("text" * 9), closed("".join(["text"] * 9))),
        (closed(["".join("ab")] * 2), closed(["ab", "".join("ab")])),
        (closed(collections.Counter("aab")), closed(collections.Counter("baa"))),
        (source(READS, WORD=frozenset("abc")), source(READS, WORD=frozenset("cab"))),
    ],
)
def test_what_is_equal_has_the_same_digest(one, same):
    """Guards resuming: a cell that runs again makes the same things anew."""
    assert content_digest(one) == content_digest(same)


def test_what_cannot_be_hashed_is_named():
    deep: list = []
    for _ in range(10**5):
        deep = [deep]
    held = {"TypeError: cannot pickle '_thread.lock' object": threading.Lock()}
    held |= {"cannot pickle 'generator' object": (x for x in "a"), "RecursionError": deep}
    for reason, value in held.items():
        with pytest.raises(RunError, match=f"cost' holds .*{reason}.* give the function a text"):
            identified(of_function(closed(value), "cost"))


def test_what_says_what_it_is_counts_by_that():
    """Guards models that no one wants to hash, and what cannot be hashed."""

    class Model:
        def __init__(self, digest):
            self.digest, self.lock = digest, threading.Lock()

    one, same, other = (content_digest(closed(Model(digest))) for digest in ("v1", "v1", "v2"))
    assert one == same != other


MODULE = "import aid\nLIMIT = {limit}\ndef cost(text):\n    return aid.words(text) > LIMIT\n"
AID = "def words(text):\n    return len(text.split()) * {by}\n"


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """A function that writes a cost's module and another that it imports, and imports both anew."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def cost(limit=1, by=1):
        (tmp_path / "mycost.py").write_text(MODULE.format(limit=limit))
        (tmp_path / "aid.py").write_text(AID.format(by=by))
        for name in ("mycost", "aid"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        importlib.invalidate_caches()
        return importlib.import_module("mycost").cost

    yield cost
    for name in ("mycost", "aid"):
        sys.modules.pop(name, None)


def test_a_module_counts_with_what_it_imports(modules):
    """Guards a helper in another file."""
    first = content_digest(modules())
    assert first == content_digest(modules())
    assert len({first, content_digest(modules(limit=2)), content_digest(modules(by=2))}) == 3


PROGRAM = """
import functools
from igstudy.closure import content_digest
from mycost import cost
WORDS = {"one", "two", "three", "four"}
class Cost:
    def __init__(self): self.words, self.by = set(WORDS), {w: {len(w), w} for w in WORDS}
    def __call__(self, text): return len(self.words & WORDS)
def plain(text): return [w in text for w in ("a", *WORDS)] + [w in {"x", "y", "z"} for w in text]
FUNCTIONS = {plain, cost}
held = functools.partial(lambda text, by: 1, by=FUNCTIONS)
for made in (cost, Cost(), plain, held, Cost().__call__):
    print(content_digest(made))
"""


def test_another_process_finds_the_same_digests(modules, tmp_path):
    """Guards resuming after a restart: sets have another order there, and all other addresses."""
    modules()
    (tmp_path / "program.py").write_text(PROGRAM)
    printed = set()
    for seed in "12":
        paths = os.pathsep.join([str(Path(__file__).parents[1]), str(tmp_path)])
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": paths}
        run = [sys.executable, str(tmp_path / "program.py")]
        done = subprocess.run(run, capture_output=True, text=True, env=environment)
        printed.add(done.stdout)
        assert done.returncode == 0, done.stderr
    lines = printed.pop().splitlines()
    assert not printed and len(set(lines)) == 5 and all(len(line.strip()) == 64 for line in lines)


def test_a_cycle_ends():
    one: list = [1]
    one.append(one)
    two: list = [2]
    two.append(two)
    assert content_digest(closed(one)) != content_digest(closed(two))
