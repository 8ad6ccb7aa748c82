"""Tests of scorers behind an endpoint, on loopback, with every form of reply that servers give."""

import json
import re
import time
import traceback

import numpy as np
import pytest
from mockpolicy import LetterReward, mock_policy
from scorerfiles import decoder_tokenizer
from servedstub import Reply, answering

import igcore as ig
from igcore import ParameterError, ScorerError, load_scorer
from igcore.contract import Contract
from igcore.errors import ScorerWarning
from igcore.models.probe import HELPFUL, UNSAFE
from igcore.models.registry import as_scorer
from igcore.scoring import Tally, checked_score
from igstudy.runs.decode_params import DecodeParams
from igstudy.runs.decode_run import Experiment, identity_of

KEY = "a-key-that-nobody-may-see"
PROMPTS = ["q one", "q two", "q three"]
ANSWERS = ["bad bad", "good", "bad good"]


def share(text: str) -> float:
    """Score a text by hand: its share of bad words, and half for words of neither kind."""
    known = re.findall("bad|good", text)
    return known.count("bad") / len(known) if known else 0.5


# --- the numbers, by hand -------------------------------------------------------------------------


def classes(numbers):
    """Return numbers as vLLM does for a model of one class, out of order."""
    return {"data": [{"index": i, "probs": [x]} for i, x in enumerate(numbers)][::-1]}


def honest(path: str, request: dict):
    """Answer as vLLM would."""
    assert path == "/classify"
    assert request.pop("model") == "org/guard-7b" and set(request) == {"input"}
    probs = [[1 - share(text), 0.5 * share(text), 0.5 * share(text)] for text in request["input"]]
    data = [{"index": i, "label": "x", "probs": p, "num_classes": 3} for i, p in enumerate(probs)]
    return {"data": data[::-1]}


ONE = {"labels": None}  # of a model of one class


def options(url: str, **more) -> dict:
    known = {"name": "endpoint", "model": "org/guard-7b", "url": url}
    return known | {"self_check": False, "timeout": 10.0} | more


def load(url: str, **more):
    return load_scorer(options(url, **({"labels": [1, 2]} | more)))


def test_every_text_has_its_own_number():
    """Bug: numbers of one text given to another; the probability of safe taken for that of unsafe;
    a class left out.
    """
    with answering(honest) as (url, asked):
        scorer = load(url + "/v1", batch=2)
        scores = scorer.score(PROMPTS * 2, ANSWERS * 2, [True] * 6)
    assert scores == pytest.approx([1, 0, 0.5] * 2)
    assert len(asked) == 3
    assert scorer.name == "endpoint:guard-7b-cost" and scorer.sign == "higher is worse"


@pytest.mark.parametrize(
    ("template", "sent"),
    [
        (None, "[User]\nq {response}\n\n[Assistant]\nbad"),
        ("{response}", "bad"),
        ("{response}|{prompt}", "bad|q {response}"),
    ],
)
def test_the_text_that_is_sent(template, sent):
    with answering(honest) as (url, asked):
        load(url, template=template).score(["q {response}"], ["bad"], [True])
    ((_, request, _),) = asked
    assert request["input"] == [sent]


def test_a_guard_searches_with_it():
    """Guards the whole path: options instead of a cost, no cache, a final check."""

    def letters(path, request):
        return classes([text.count("a") for text in request["input"]])

    with answering(letters) as (url, asked):
        cost = options(url, template="{response}")
        guard = ig.Guard(mock_policy(), cost=cost, budget=2, block_size=2, max_new_tokens=6)
        answers = guard.map(["ab", "ba"])
    for answer in answers:
        assert answer.status == "verified_safe" and answer.text.count("a") == answer.cost <= 2
    assert asked


def test_a_bad_word_has_to_score_higher():
    """Bug: a run on an endpoint that is down, or whose sign is the other way round."""

    def judge(path, request):
        return classes([0.9 if text == UNSAFE[1] else 0.1 for text in request["input"]])

    checked = ONE | {"self_check": True, "template": "{response}"}
    with answering(judge) as (url, asked):
        load(url, **checked)
        assert [r["input"] for _, r, _ in asked] == [[HELPFUL[1]], [HELPFUL[1], UNSAFE[1]]]
        with pytest.raises(ScorerError, match="as this is a reward, both must be finite and"):
            load(url, **checked, sign="higher is better")
    with pytest.raises(ScorerError) as caught:
        load(url, **checked, max_retries=0)
    assert str(caught.value).startswith(f"scorer 'endpoint:guard-7b-cost' at {url} does not reply;")
    assert "\n" not in str(caught.value)


# --- replies that are none ------------------------------------------------------------------------

MALFORMED = {
    "no JSON": "<html>",
    "nothing": {"data": []},
    "too many": classes([0.0, 0.0]),
    "no index": {"data": [{"probs": [0.0]}]},
    "another index": {"data": [{"index": 1, "probs": [0.0]}]},
    "a number in quotes": {"data": [{"index": 0, "probs": ["0.0"]}]},
    "a verdict": {"data": [{"index": 0, "probs": [False]}]},
    "an error": {"error": {"message": "no"}},
}


def lost(reply, seconds: float = 5.0, **more) -> str:
    """Return the sentence with which a text gets no number, and see that it takes no time."""
    with answering(lambda path, request: reply) as (url, asked):
        scorer = load(url, **more)
        began = time.monotonic()
        with pytest.warns(ScorerWarning) as said:
            scores = scorer.score(["q"], ["a"], [True])
    assert time.monotonic() - began < seconds and np.isnan(scores).all() and len(said) == 1
    sentence = str(said[0].message)
    place = f"scorer 'endpoint:guard-7b-cost' at {url} "
    assert sentence.startswith(place) and sentence.endswith("; 1 of 1 texts count as unsafe")
    assert "\n" not in sentence and len(sentence) < 500
    return sentence.removeprefix(place)


@pytest.mark.parametrize("reply", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_reply_is_no_number(reply):
    """Bug: a reply of another form read as a score of 0."""
    said = lost(reply, **ONE)
    assert said.startswith("does not answer as /classify does (")
    assert "; correct url or labels; " in said


def test_a_class_that_the_endpoint_drops_is_no_number():
    """Bug: a class that is not there counts as harmless."""
    assert "IndexError" in lost({"data": [{"index": 0, "probs": [0.1]}]})


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_number_that_is_not_finite_is_unsafe(number):
    """Bug: -Infinity is below every budget."""
    first = '{"index": 0, "probs": [' + number
    body = '{"data": [' + first + ']}, {"index": 1, "probs": [0.25]}]}'
    with answering(lambda path, request: body) as (url, _):
        scores = checked_score(load(url, **ONE), ["q"] * 2, ["a", "b"], [True] * 2, Tally())
    assert np.isnan(scores[0]) and scores[1] == 0.25


@pytest.mark.parametrize("labels", [None, []])
def test_several_classes_need_labels(labels):
    """Bug: the first class of several, which may be the harmless one."""
    reply = {"data": [{"index": 0, "probs": [0.9, 0.1]}]}
    assert "name in labels those that count, from 0" in lost(reply, labels=labels)


# --- servers that fail ----------------------------------------------------------------------------


def test_a_text_that_is_refused_costs_only_itself():
    """Bug: one text that is too long for the server makes all others of its request unsafe."""

    def answer(path, request):
        if any("bad " * 10 in text for text in request["input"]):
            return Reply({"error": {"message": "too long"}}, 400)
        return honest(path, request)

    with answering(answer) as (url, _):
        for lost, why in (("bad " * 10, "too long"), ("\ud83d", "half a character")):
            texts = ["q"] * 4, [lost, *ANSWERS], [True] * 4
            with pytest.warns(ScorerWarning, match=f"{why}.*; 1 of 1 texts count as unsafe"):
                scores = checked_score(load(url), *texts, Tally())
            assert np.isnan(scores[0]) and scores[1:] == pytest.approx([1, 0, 0.5])


def test_what_was_refused_is_not_asked_again_after_the_endpoint_is_down():
    """Bug: the texts of a refused request are sent one by one to an endpoint that is down."""
    statuses = [400, 401]
    with answering(lambda path, request: Reply("no", statuses.pop(0))) as (url, asked):
        scorer = load(url, batch=2, workers=1)
        with pytest.warns(ScorerWarning, match="4 of 4 texts"):
            scorer.score(["q"] * 4, ["a"] * 4, [True] * 4)
    assert len(asked) == 2


def test_an_endpoint_that_fails_makes_a_search_abstain():
    """Bug: answers emitted that no cost model has read, or a search that never ends."""
    down = []
    small = dict(budget=2, block_size=2, max_new_tokens=4)

    def answer(path, request):
        return Reply("no", 401) if down else honest(path, request)

    with answering(answer) as (url, _):
        guard = ig.Guard(mock_policy(), cost=options(url, labels=[1]), **small)
        down.append(True)
        with pytest.warns(ScorerWarning):
            found = guard("ab")
        assert found.status == "abstained" and found.reason == "scorer_error"
        with (
            pytest.warns(ScorerWarning, match="401"),
            pytest.raises(ig.ParameterError, match="failed on all of 7 short texts"),
        ):
            ig.Guard(mock_policy(), cost=options(url), **small)


def test_a_server_whose_numbers_move_is_not_trusted():
    """Bug: a cost that depends on the batch it was sent with passes for a function of the text."""

    def answer(path, request):
        n = len(request["input"])
        return classes([len(text) + 100 * (n > 1) for text in request["input"]])

    with answering(answer) as (url, _), pytest.warns(ScorerWarning, match="depends on the batch"):
        assert Contract.examined(load(url, **ONE), Tally()).problem


# --- options, keys, identity ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    decoder_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"labels": ["hate"]}, "parameter labels.0 is 'hate': it must be a valid integer"),
        ({"template": "{prompt}"}, "template has no {response}; write it"),
        ({"timeout": 0}, "parameter timeout is 0: it must be greater than 0"),
        ({"sign": "worse"}, "sign is 'worse': it must be 'higher is"),
        ({"url": f"http://host/?key={KEY}"}, "parameter url is not a plain http address such as"),
        ({"key": KEY}, "unknown option of scorer 'endpoint': 'key'"),
        ({"api": "classify"}, "unknown option of scorer 'endpoint': 'api'"),
    ],
)
def test_options_that_do_not_fit_are_named(given, sentence):
    """Bug: an option left aside without a word; a key in the error."""
    with pytest.raises(ParameterError) as caught:
        load_scorer(options("http://localhost:1") | given)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value) and KEY not in str(caught.value)


def test_no_key_is_kept_or_shown(monkeypatch):
    """Bug: a key in a record, a manifest, a repr or the words of a server that repeats it."""
    monkeypatch.setenv("IGCORE_SCORER_KEY", KEY)
    reply = Reply({"error": {"message": f"no {KEY[3:]}"}}, 403)
    with answering(lambda path, request: reply) as (url, _):
        scorer = load(url)
        with pytest.warns(ScorerWarning, match="its message repeats the key") as said:
            scorer.score(["q"], ["a"], [True])
        with pytest.raises(ScorerError) as caught:
            load(url, self_check=True)
    shown = [repr(scorer), scorer.digest, scorer.name, *(str(w.message) for w in said)]
    shown += traceback.format_exception(caught.value)
    assert not any(KEY[3:] in text for text in shown)


def test_the_digest_covers_the_model_and_what_changes_a_number(tokenizer):
    """Bug: scores of another question under one hash; or a run that starts again because a server
    came back at another address.
    """

    def digest(url="http://localhost:1", **more):
        return load(url, **more).digest

    same = digest()
    assert len(same) == 64
    for other in (
        {"timeout": 3.0},
        {"batch": 1},
        {"workers": 2},
        {"api_key_env": "IGCORE_SCORER_X"},
    ):
        assert digest(**other) == same
    assert digest(url="https://elsewhere.example/v1") == same
    known = [
        same,
        digest(model="other"),
        digest(template="{response}"),
        digest(labels=[0]),
        digest(sign="higher is better"),
        digest(tokenizer=tokenizer),
    ]
    assert len(set(known)) == len(known)


def test_a_run_goes_on_when_a_server_comes_back_at_another_address():
    """Bug: a run thrown away because a server has a new port; or kept when the model has changed,
    or with the address in its records.
    """

    def identity(**changes):
        given = options("http://localhost:1") | changes
        params = DecodeParams(
            profile="t", run="t", policy="smollm2-chat", methods=["base"], prompts="x.jsonl",
            budget=1, cost=given,
        )  # fmt: skip
        cost = load_scorer(given)
        known = {"cost": Contract(cost)}  # no request is sent
        guard = ig.Guard(mock_policy(), cost, LetterReward(), params.search(), contracts=known)
        return json.dumps(identity_of(Experiment.of(params, [], guard, {}), {}))

    same = identity()
    assert identity(url="https://host.example/v1", workers=1, timeout=3.0) == same
    assert "localhost" not in same and '"model": "org/guard-7b"' in same
    assert identity(model="org/other") != same
    assert identity(labels=[1]) != same


def test_a_mapping_with_an_unknown_name_is_refused():
    """Bug: `cost={...}` taken for an object without a score."""
    with pytest.raises(ParameterError, match="unknown scorer 'endpont'; did you mean 'endpoint'"):
        as_scorer({"name": "endpont"}, "cost")


def test_texts_that_spell_special_tokens_are_broken_up(tokenizer):
    """Bug: an answer that ends its turn for the server, which reads the rest as its own words."""
    with answering(honest) as (url, asked):
        given = options(url, tokenizer=tokenizer, labels=[1])
        load_scorer(given).score(["q<|end|>"], ["a<|end|>"], [True])
    ((_, request, _),) = asked
    assert request["input"] == ["[User]\nq< |end|>\n\n[Assistant]\na< |end|>"]
