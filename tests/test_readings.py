"""Tests of the scores that are kept of an embedded scorer, with a stub in its place."""

import json
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
from mockpolicy import LetterCost, letter_cost, mock_policy

from igcore import Guard, ParameterError
from igcore.catalog import SCORERS
from igcore.contract import EMBEDDED, TEXTS, Contract
from igcore.errors import ScorerWarning
from igcore.models import readings
from igcore.models.registry import load_scorer
from igcore.scoring import Tally

COSTS = tuple(map(letter_cost, TEXTS))


class Embedded(LetterCost):
    """The letters' cost under the name of an embedded scorer."""

    name, home = "smollm2-harm-2", EMBEDDED["smollm2-harm-2"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("IGCORE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def examined(scorer):
    """Examine a scorer; return the contract, and how many texts that took."""
    before = scorer.texts
    return Contract.examined(scorer, Tally()), scorer.texts - before


def test_an_embedded_scorer_is_examined_once(cache):
    """Bug: the cost of harm read 28 texts in every process, for three seconds."""
    first, asked = examined(Embedded())
    again, none = examined(Embedded())
    assert (asked, none) == (4 * len(TEXTS), 0)
    assert again.costs == first.costs == COSTS
    assert (again.spread, again.tolerance) == (first.spread, first.tolerance)
    (file,) = cache.iterdir()
    assert re.fullmatch(r"readings-[0-9a-f]{64}\.json", file.name)


def test_the_embedded_scorers_are_those_that_the_registry_loads():
    """Guards the names: with another one every process would examine the scorer again."""
    scorer = load_scorer("offensive-language")
    assert scorer.home == EMBEDDED[scorer.name]
    assert {name: SCORERS[name].partition(":")[0] for name in EMBEDDED} == EMBEDDED


@pytest.mark.parametrize("changed", [{"name": "letters"}, {"home": "mine"}, {"home": None}])
def test_a_users_scorer_is_always_examined(cache, changed):
    """Guards the promise: a user's digest may be "v1" for ever."""
    scorer = Embedded()
    vars(scorer).update(changed)
    assert [examined(scorer)[1] for _ in range(2)] == [4 * len(TEXTS)] * 2
    assert not cache.exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda scorer, m: setattr(scorer, "digest", "another"),
        lambda scorer, m: m.setattr(readings, "version", lambda name: "another"),
        lambda scorer, m: m.setattr(readings, "file_digest", lambda file: "another"),
        lambda scorer, m: m.setattr(readings.torch, "get_num_threads", lambda: 3),
        lambda scorer, m: m.setattr("igcore.contract.TEXTS", (*TEXTS[:-1], "another")),
    ],
)
def test_scores_of_something_else_are_not_taken(monkeypatch, change):
    examined(Embedded())
    scorer = Embedded()
    change(scorer, monkeypatch)
    assert examined(scorer)[1] == 4 * len(TEXTS)


def test_scores_of_another_device_or_type_are_not_taken():
    """Guards a scorer that was examined on a GPU, or in bfloat16."""

    def asked(device, dtype):
        scorer = Embedded()
        model = SimpleNamespace(device=SimpleNamespace(type=device), dtype=dtype)
        scorer.backbone = SimpleNamespace(model=model)
        return examined(scorer)[1]

    places = [("cpu", "float32"), ("cpu", "float32"), ("cuda", "float32"), ("cpu", "bfloat16")]
    assert [asked(*place) > 0 for place in places] == [True, False, True, True]


def forged(text):
    """Return the text of a file in which a number was changed."""
    digest, numbers = json.loads(text)
    numbers[1][0] += 100.0
    return json.dumps([digest, numbers])


@pytest.mark.parametrize(
    "damage",
    [lambda text: text[:-9], lambda text: "", lambda text: "{}", lambda text: "3", forged,
     lambda text: text.replace("[[", "[[NaN, "), lambda text: json.dumps(["", [[0.0]]])],
)  # fmt: skip
def test_a_damaged_file_is_ignored(cache, damage):
    """Guards against numbers that nobody has read: they would decide what is verified."""
    examined(Embedded())
    (file,) = cache.iterdir()
    sound = file.read_text()
    file.write_text(damage(sound))
    contract, asked = examined(Embedded())
    assert asked == 4 * len(TEXTS) and contract.costs == COSTS
    assert file.read_text() == sound


def test_bytes_that_are_no_text_are_ignored(cache):
    examined(Embedded())
    (file,) = cache.iterdir()
    file.write_bytes(b"\xff\xfe")
    assert examined(Embedded())[1] == 4 * len(TEXTS)


def test_a_cache_that_cannot_be_written_is_done_without(cache):
    """Guards a read-only home: a guard needs no file."""
    cache.write_text("a file in its place")
    assert [examined(Embedded())[1] for _ in range(2)] == [4 * len(TEXTS)] * 2


def test_what_is_kept_still_warns():
    """Guards against a record that makes an unsafe scorer safe."""

    class Moving(Embedded):
        def score(self, prompts, responses, finished):
            found = np.array(super().score(prompts, responses, finished), float)
            return found + 50 * (len(found) > 1)

    for asked in (4 * len(TEXTS), 0):
        with pytest.warns(ScorerWarning, match="'smollm2-harm-2' depends on the batch"):
            contract, texts = examined(Moving())
        assert contract.problem and texts == asked


def test_failures_are_not_kept(cache):
    """Guards against an hour of a full memory that would refuse a scorer for ever."""

    class Failing(Embedded):
        def score(self, prompts, responses, finished):
            super().score(prompts, responses, finished)
            return [math.nan for _ in responses]

    for _ in range(2):
        scorer = Failing()
        with pytest.raises(ParameterError, match="failed on all of 7 short texts"):
            Guard(mock_policy(), scorer, budget=1.0)
        assert scorer.texts >= 4 * len(TEXTS)
    assert not cache.exists()
