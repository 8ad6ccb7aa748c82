"""Tests of the scorer protocol and of what stands between a scorer and the search."""

import logging
import math
from functools import partial, wraps

import numpy as np
import pytest
from mockpolicy import LetterCost
from scorerfiles import refused

from igcore import ParameterError, ScorerError, load_scorer
from igcore.models.probe import GIBBERISH, HELPFUL, UNSAFE, probe
from igcore.models.registry import SCORERS, as_scorer
from igcore.scorers import COST, REWARD, of_function
from igcore.scoring import Cached


class Shouting:
    """The ten-line scorer of the documentation."""

    name, digest, sign, unit = "shouting", "v1", "higher is worse", "share of capitals"

    def score(self, prompts, responses, finished):
        return [sum(c.isupper() for c in r) / max(len(r), 1) for r in responses]


def test_the_cache_asks_each_text_once_and_tells_prompts_and_prefixes_apart():
    """Guards the key: a reward depends on the prompt, and a scorer may treat a finished text
    otherwise.
    """
    cost = LetterCost()
    cached = Cached(cost)
    assert cached.score(["p", "q", "p"], ["ab", "ab", "ab"], [False] * 3).tolist() == [2, 2, 2]
    assert cost.texts == 2
    cached.score(["p"], ["ab"], [False]), cached.score(["p"], ["ab"], [True])
    assert cost.texts == 3


def told(prompt, response):
    return f"{response} after {prompt}"


def swapped(response, prompt):
    return f"{response} after {prompt}"


def silent(function):
    """A decorator that says nothing of the arguments itself."""

    @wraps(function)
    def inner(*args, **kwargs):
        return function(*args, **kwargs)

    return inner


def turning(function):
    """A decorator whose function takes its arguments the other way round."""

    @wraps(function)
    def inner(prompt, response):
        return function(response, prompt)

    return inner


class Asked:
    def __call__(self, completion, question):
        return f"{completion} after {question}"

    def about(self, *, answer, prompt):
        return f"{answer} after {prompt}"


@pytest.mark.parametrize(
    "function",
    [
        told,
        swapped,
        silent(swapped),
        turning(swapped),
        Asked(),
        Asked().about,
        lambda instruction, text: told(instruction, text),
        lambda question, reply: told(question, reply),
        lambda output, input: told(input, output),
        lambda generation, query, output="json": told(query, generation),
        lambda llm_output, instruction: told(instruction, llm_output),
        lambda response_text, prompt_text: told(prompt_text, response_text),
        lambda input="", output="": told(input, output),
        lambda text, prompt="nothing": told(prompt, text),
        lambda scale=1, answer="", *, question: told(question, answer),
        partial(lambda by, completion, question: told(question, completion), 2),
        partial(lambda weight, response, prompt: told(prompt, response), weight=2),
    ],
)
def test_arguments_are_given_by_their_names(function):
    """Bug: a cost of (response, prompt), or of (output, input), judged the prompt, and forbidden
    answers were verified.
    """
    scorer = of_function(function, "cost")
    assert scorer.score(["P", "Q"], ["A", "B"], [True] * 2) == ["A after P", "B after Q"]


@pytest.mark.parametrize(
    "function",
    [
        lambda text: text,
        lambda t: t,
        lambda t="": t,
        lambda input: input,
        lambda model_output, scale=2, instruction="Rate it": model_output * (instruction[0] == "R"),
        lambda scale="", reply="": scale + reply,
        lambda *texts: texts[0],
        lambda answer, *_, **__: answer,
        lambda *, completion: completion,
        partial(lambda response, prompt: response if prompt == "fixed" else "?", prompt="fixed"),
    ],
)
def test_a_function_of_the_response_alone(function):
    assert of_function(function, "reward").score(["P"], ["A"], [True]) == ["A"]


REFUSED = """response, x; x, prompt; text, answer; prompt, question, text; prompt; user_prompt
query; prompt_text; completions; prompts, answers, **_; inputs, outputs; prompt, model_outputs
a, b; y, x; hypothesis, premise; content, message; content, prompt; reply, message; response_1, text
reference_answer, response; response, context; context, prediction; prompt, message
prediction, reference; x, output=""; input, output=""; completion="", response=""; a, b, c
response, *, weight"""


@pytest.mark.parametrize("arguments", ["", *REFUSED.replace("\n", "; ").split("; ")])
def test_arguments_that_contradict_each_other_are_refused(arguments):
    """Bug: of (y, x) and (reply, message) the first was the prompt, and was not judged."""
    with pytest.raises(ParameterError, match=r"takes \(.*\), which does not say what it is to be"):
        of_function(eval(f"lambda {arguments}: 0"), "cost")


def test_a_function_whose_only_argument_is_given_is_refused():
    with pytest.raises(ParameterError, match=r"takes \(\), which does not say what it is to be"):
        of_function(partial(lambda text: 0, text="fixed"), "cost")


@pytest.mark.parametrize("kind", [dict, Shouting])
def test_a_class_is_no_scorer(kind):
    """Bug: a guard was made of a class, and all its answers abstained."""
    with pytest.raises(ParameterError, match=f"{kind.__name__} is a class; make an instance of it"):
        as_scorer(kind, "cost")


def test_a_registered_scorer_has_a_name_and_a_home(monkeypatch):
    """Bug: a change in the scorer of a run that no hash of the run's code covers."""
    monkeypatch.setitem(SCORERS, "shouting", Shouting)
    loaded = load_scorer("shouting")
    assert isinstance(loaded, Shouting) and loaded.home == __name__
    assert load_scorer("offensive-language").home == "igstudy.scorers.embedded"
    with pytest.raises(ParameterError, match="unknown option of scorer 'shouting': 'loud'"):
        load_scorer({"name": "shouting", "loud": True})


@pytest.mark.parametrize(
    ("name", "sign", "unit"),
    [
        ("offensive-language", "higher is worse", "probability"),
        ("minilm-relevance", "higher is better", "cosine"),
        ("smollm2-harm-2", "higher is worse", "probability"),
    ],
)
def test_named_scorers_say_what_they_are(name, sign, unit):
    """Bug: a sign turned round. Nothing is downloaded for these."""
    scorer = load_scorer(name)
    assert (scorer.name, scorer.sign, scorer.unit, len(scorer.digest)) == (name, sign, unit, 64)


# --- the first look at a scorer: what it lets through and refuses ---------------------------------


class Table:
    """A scorer that knows the probe's texts alone."""

    name, digest, unit = "table", "v1", "points"

    def __init__(self, helpful: float, unsafe: float | None = None, gibberish: float = math.nan):
        self.sign = REWARD if unsafe is None else COST
        self.known = {HELPFUL: helpful, UNSAFE: unsafe, GIBBERISH: gibberish}
        self.finished = []

    def score(self, prompts, responses, finished):
        self.finished.extend(finished)
        return np.array([self.known[text] for text in zip(prompts, responses, strict=True)])


@pytest.mark.parametrize("helpful, unsafe", [(-2.0, 3.0), (0.2, 0.7)])
def test_a_cost_that_tells_them_apart_passes(caplog, helpful, unsafe):
    """Guards sound scorers, and the numbers in the log, from which users choose a budget."""
    scorer = Table(helpful, unsafe=unsafe)
    with caplog.at_level(logging.INFO, "igcore"):
        probe(scorer)
    assert scorer.finished == [True, True]
    assert caplog.messages == [
        f"cost 'table' gives {helpful:.6g} to a harmless answer and {unsafe:.6g} to an unsafe one"
    ]


def test_a_reward_that_tells_them_apart_passes(caplog):
    """Guards rewards, for which the order is that of help, not of harm."""
    with caplog.at_level(logging.INFO, "igcore"):
        probe(Table(4.5, gibberish=-1.25))
    assert caplog.messages == [
        "reward 'table' gives -1.25 to gibberish and 4.5 to a helpful answer"
    ]


@pytest.mark.parametrize(
    "scorer, match",
    [
        (Table(3.0, unsafe=-2.0),
         "gives 3 to a harmless answer and -2 to an unsafe one, but .* second must be higher"),
        (Table(1.0, gibberish=2.0),
         "gives 2 to gibberish and 1 to a helpful answer, but .* the second must be higher"),
        (Table(0.5, unsafe=0.5), "the second must be higher"),
        (Table(0.5, gibberish=0.5), "the second must be higher"),
        (Table(-2.0, unsafe=math.nan), "both must be finite"),
        (Table(-math.inf, unsafe=1.0), "both must be finite"),
        (Table(math.inf, gibberish=0.0), "both must be finite"),
    ],
)  # fmt: skip
def test_what_is_refused(scorer, match):
    """Guards every number after it. Bug: a sign turned round, a score of the padding, an overflow
    in half precision.
    """
    with refused(ScorerError, match) as caught:
        probe(scorer)
    message = str(caught.value)
    assert repr(scorer.name) in message
    assert message.endswith("self_check: false loads it all the same")


def test_a_mapping_with_an_unknown_name_is_refused():
    """Bug: `cost={...}` taken for an object without a score."""
    with pytest.raises(ParameterError, match="unknown scorer 'lenght'; did you mean 'length'"):
        as_scorer({"name": "lenght"}, "cost")
