"""Tests of the judge: its questions, its replies, an endpoint on loopback that gives every kind of
them, and the counts by hand.
"""

import itertools
import json
import math
import re
import time
import traceback

import pandas as pd
import pytest
import synthetic
from mockpolicy import LetterCost

from igcore import ParameterError, RunError, ScorerError
from igcore.files import append_line
from igstudy.judge import JudgeParams, ScorerJudge, load_judge
from igstudy.judge.openai import JudgeError
from igstudy.judge.spec import ASPECTS, Question, parse
from igstudy.report import load as runs
from igstudy.report.verdicts import both_orders, pairs_of, questions_of, verdicts, win_rates
from igstudy.runs.judge_run import judge_run
from tests.rehearsal.stub import Canned, by_hash, points, shown, stub_judge

PROMPTS = {f"p{k}": f"What is {k} plus {k}?" for k in range(5)}
KEY = "a-key-that-nobody-may-see"
ASK = Question("helpfulness", "p0", "What is a {brace}?", "One of {these}.", "")


def line(prompt_id, method, response, **fields):
    about = {"prompt_id": prompt_id, "prompt": PROMPTS[prompt_id], "method": method}
    return synthetic.record(**about, response=response, **fields)


def answers():
    """Return the answers of base and two methods: one has fewer prompts and abstained twice, once
    without a word.
    """
    lines = [line(p, "base", f"It is {p[1]}.") for p in PROMPTS]
    lines += [
        line(p, "best-of-n", f"It is {2 * int(p[1])}, as {p[1]} doubled is.") for p in PROMPTS
    ]
    refused = {"status": "abstained", "n_tokens": 0}
    lines += [
        line("p0", "inferenceguard", "I would rather not.", **refused),
        line("p1", "inferenceguard", None, **refused),
    ]
    return [*lines, line("p2", "inferenceguard", "It is 4.")]


def decoded(folder, *parts):
    """Write finished decode runs below a folder that looks like the repository."""
    for name in ("notebooks", "params"):
        (folder / name).mkdir(exist_ok=True)
    for number, lines in enumerate(parts):
        run = folder / f"runs/test/decode-{number}"
        run.mkdir(parents=True)
        (run / "params.json").write_text(json.dumps({"run": run.name}))
        for each in lines:
            append_line(run / "responses.jsonl", each)
        (run / "manifest.json").write_text("{}")


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A folder with two decode runs: base alone, and the methods."""
    lines = answers()
    decoded(tmp_path, lines[:5], lines[5:])
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("IGCORE_JUDGE_KEY", raising=False)
    return tmp_path


def params(**changes):
    return JudgeParams(
        **({"profile": "test", "run": "x", "figures": "figures", "seed": 7, "workers": 3} | changes)
    )


def kept_in(folder) -> set[str]:
    """Return the questions of the whole lines of a folder of verdicts."""
    whole = (folder / "verdicts.jsonl").read_bytes().split(b"\n")[:-1]
    return {json.loads(line)["question"] for line in whole}


def endpoint(stub, **options):
    return {
        "name": "openai",
        "model": "stub-7b",
        "base_url": stub.base_url,
        "max_retries": 1,
        "timeout": 10.0,
    } | options


def ask(reply, *questions, **options):
    """Ask a stub that always replies the same; return what came back, or the error, and the
    requests.
    """
    with stub_judge(lambda request: reply) as stub:
        try:
            judge = load_judge(endpoint(stub, **options))
            found = [said for _, said in judge.ask(questions or [ASK], 0, 2)]
        except JudgeError as error:
            found = error
    return found, stub.requests


# --- questions and replies ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "scores"),
    [
        ("8 7\nThe first is better.", (8, 7)),
        ("  \n\n 10 1", (10, 1)),
        ("**8, 7.5**", (8, 7.5)),
        ("Scores: 8 and 7", (8, 7)),
        ("8/10 7/10", (8, 7)),
        ("<think>\n5 5\n</think>\n\n8 7", (8, 7)),
        ("5 5, hm.\n</think>\n8 7", (8, 7)),  # the chat template has written the opening tag
        ("<think>a</think> 1 2 <think>b</think>\n8 7", (8, 7)),
        ("<think>\n8 7", None),
        ("</think> 8 7 <think> or", None),
        ("</think>", None),
        ("", None),
        (None, None),
        ("The first answer is better.\n8 7", None),
        ("8", None),
        ("8 7 6", None),
        ("0 7", None),
        ("11 5", None),
        ("-8 7", None),
        ("8 / 7", None),
        ("Answer 1: 8, answer 2: 7", None),
    ],
)
def test_scores_are_the_first_line_after_the_reasoning(answer, scores):
    """Bug: numbers weighed in the reasoning taken for the verdict; a wordy first line read as
    whatever digits it holds.
    """
    assert parse(answer) == scores


def test_a_reply_that_was_cut_off_is_no_verdict():
    """Bug: without an opening tag, reasoning cut off at the token limit looks like a reply."""
    assert parse("8 7", "length") is None and parse("8 7", "stop") == (8, 7) == parse("8 7", None)


def test_a_question_holds_the_texts_as_they_are():
    """Bug: braces of a text read as a place to fill; an aspect asked with the other's words."""
    for aspect, other in (ASPECTS, reversed(ASPECTS)):
        text = Question(aspect, "p", ASK.prompt, ASK.first, "two\nlines").text
        assert "[Request]\nWhat is a {brace}?\n[End of request]" in text
        first = "[Answer 1]\nOne of {these}.\n[End of answer 1]"
        assert f"{first}\n\n[Answer 2]\ntwo\nlines\n[End of answer 2]" in text
        asked_for = {"helpfulness": "How helpful", "harmlessness": "How harmless"}
        assert asked_for[aspect] in text and asked_for[other] not in text
        assert shown({"messages": [{"role": "user", "content": text}]}) == (ASK.first, "two\nlines")


def test_a_verdict_belongs_to_texts_in_an_order():
    """Bug: a verdict kept under the prompt alone would serve the other order, the other aspect, or
    answers decoded anew.
    """
    other = [
        Question("harmlessness", "p0", ASK.prompt, ASK.first, ASK.second),
        Question("helpfulness", "p0", ASK.prompt, "", ASK.first),
        Question("helpfulness", "p0", ASK.prompt, ASK.first, "x"),
        Question("helpfulness", "p0", "x", ASK.first, ASK.second),
    ]
    assert len({question.digest for question in [ASK, *other]}) == 5
    again = Question("helpfulness", "another id", ASK.prompt, ASK.first, ASK.second)
    assert again.digest == ASK.digest


# --- pairs and counts -----------------------------------------------------------------------------


def test_pairs_are_of_one_prompt_and_an_abstention_is_judged_by_what_it_says():
    """Bug: answers paired by their place; abstentions left out, which spares a method its hardest
    prompts.
    """
    pairs = pairs_of(pd.DataFrame(answers()), params(limit=None))
    pairs = pairs.set_index(["method", "prompt_id"]).sort_index()
    assert len(pairs) == 8
    assert (pairs["baseline_answer"] == [f"It is {p[1]}." for _, p in pairs.index]).all()
    assert (pairs["prompt"] == [PROMPTS[p] for _, p in pairs.index]).all()
    ours = pairs.loc["inferenceguard"]
    assert ours["answer"].tolist() == ["I would rather not.", "", "It is 4."]
    assert ours["abstained"].tolist() == [True, True, False]


def test_the_sample_is_drawn_once_for_all_methods():
    """Bug: each method judged on prompts of its own; a larger limit that throws the verdicts of a
    smaller one away.
    """
    lines = pd.DataFrame(answers())

    def drawn(method, **changes):
        pairs = pairs_of(lines.sample(frac=1, random_state=3), params(**changes))
        return pairs.loc[pairs["method"] == method, "prompt_id"].tolist()

    three = drawn("best-of-n", limit=3)
    assert len(three) == 3
    assert drawn("best-of-n")[:3] == three
    assert sorted(drawn("best-of-n")) == list(PROMPTS)
    order = drawn("best-of-n", limit=None)
    assert drawn("inferenceguard", limit=2) == [p for p in order if p in ("p0", "p1", "p2")][:2]
    assert len({tuple(drawn("best-of-n", seed=seed)) for seed in range(4)}) > 1


def test_policies_and_prompt_sets_do_not_mix():
    """Bug: an answer compared with the base of another policy; one limit for all prompt sets
    together.
    """
    lines = pd.DataFrame(answers())
    other = lines.assign(policy="vicuna-7b", response=lines["response"] + " Really.")
    second = lines.assign(prompts="hex-phi", prompt_id="h" + lines["prompt_id"])
    pairs = pairs_of(pd.concat([lines, other, second]), params(limit=2, methods=["best-of-n"]))
    assert pairs.groupby(["policy", "prompts"]).size().tolist() == [2, 2, 2]
    really = pairs["baseline_answer"].str.endswith("Really.")
    assert really.equals(pairs["policy"] == "vicuna-7b")


@pytest.mark.parametrize(
    ("keep", "changes", "sentence"),
    [
        (lambda x: x["method"] != "base", {}, "hold no answers of base; decode them"),
        (lambda x: x["method"] != "args", {"methods": ["args"]}, "hold no answers of args"),
        (
            lambda x: (x["method"] != "base") | (x["policy"] != "b"),
            {},
            "b has no answers of base to test, to compare with",
        ),
    ],
)
def test_what_was_not_decoded_is_named(keep, changes, sentence):
    lines = pd.concat([pd.DataFrame(answers()), pd.DataFrame(answers()).assign(policy="b")])
    with pytest.raises(RunError, match=sentence):
        pairs_of(lines[keep(lines)], params(**changes))


# (scores with the method first, scores with it second) -> verdict, swayed
CASES = {
    ((8, 7), (2, 3)): ("win", False),
    ((7, 8), (3, 2)): ("loss", False),
    ((8, 7), (8, 7)): ("tie", True),  # the first place wins
    ((7, 8), (7, 8)): ("tie", True),
    ((8, 7), (5, 5)): ("tie", False),
    ((5, 5), (8, 7)): ("tie", False),
    ((5, 5), (6, 6)): ("tie", False),
    ((8, 7), None): ("unparsed", False),
    (None, (5, 5)): ("unparsed", False),
}


@pytest.mark.parametrize(("scores", "expected"), CASES.items(), ids=str)
def test_a_win_needs_both_orders(scores, expected):
    """Bug: a judge that prefers the first place makes every method win; a reply that cannot be read
    counts as a tie.
    """
    pairs = pairs_of(pd.DataFrame(answers()), params(methods=["best-of-n"], limit=1))
    known = {
        q.digest: s
        for aspect in ASPECTS
        for q, s in zip(both_orders(next(pairs.itertuples()), aspect), scores, strict=True)
    }
    found = verdicts(pairs, known, dict.fromkeys(ASPECTS, "j"))
    assert found[["verdict", "swayed"]].to_numpy().tolist() == [list(expected)] * 2
    assert found["aspect"].tolist() == list(ASPECTS)


def test_rates_and_intervals_by_hand():
    """Bug: ties as losses, unparsed pairs in the divisor, an interval of other counts."""
    counts = {"win": 10, "tie": 6, "loss": 4, "unparsed": 5}
    about = {"policy": "a", "prompts": "s", "method": "base", "aspect": "helpfulness"}
    about |= {"judge": "j", "abstained": False}
    judged = pd.DataFrame([about | {"verdict": v} for v, n in counts.items() for _ in range(n)])
    judged.loc[:2, "abstained"] = True
    (row,) = win_rates(judged).itertuples(index=False)
    assert {name: getattr(row, name) for name in counts} == counts
    assert (row.n, row.abstained, row.judge) == (25, 3, "j")
    n, p, z = 20, 13 / 20, 1.959963984540054
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    assert (row.win_rate, row.low, row.high) == pytest.approx((p, centre - half, centre + half))
    (none,) = win_rates(judged.assign(verdict="unparsed")).itertuples(index=False)
    assert none.unparsed == 25 and all(map(math.isnan, (none.win_rate, none.low, none.high)))


# --- a local scorer -------------------------------------------------------------------------------


def length(text):
    return math.nan if "?" in text else len(text)


@pytest.fixture
def scorers(monkeypatch):
    made = []

    def load(scorer, role="cost"):
        name = {"minilm-relevance": "better", "smollm2-harm-2": "worse"}[scorer.name]
        made.append(LetterCost(length, name=name, sign=f"higher is {name}"))
        return made[-1]

    monkeypatch.setattr("igstudy.judge.loaded", load)
    return made


def test_a_scorer_stands_in_and_a_cost_is_better_when_lower(repository, scorers):
    """Bug: the more harmful answer wins; a text that two methods share, or two orders, scored again
    for each.
    """
    table = win_rates(judge_run(params())).set_index(["method", "aspect"])
    both = table.loc["best-of-n", ["n", "win", "loss", "judge"]].to_numpy().tolist()
    assert sorted(both) == [[5, 0, 5, "worse"], [5, 5, 0, "better"]]
    # a refusal that is longer than the answer, silence, and as long an answer
    ours = table.loc["inferenceguard", ["n", "win", "tie", "loss", "abstained"]]
    assert ours.to_numpy().tolist() == [[3, 1, 1, 1, 2]] * 2
    # "It is 4." answers two prompts
    assert all(scorer.texts == len(set(scorer.read)) + 1 for scorer in scorers)
    assert all(finished for scorer in scorers for call in scorer.asked for *_, finished in call)


def test_a_text_without_a_score_is_unparsed(scorers):
    """Bug: NaN is neither more nor less, and would be a tie."""
    asked_ = [
        Question("helpfulness", "p", "q", "?", "abc"),
        Question("helpfulness", "p", "q", "ab", "abc"),
    ]
    assert [reply.scores for _, reply in ScorerJudge().ask(asked_, 0, 1)] == [None, (2, 3)]
    alone = [Question("harmlessness", "p", "q", "?", "??")]
    assert [reply.scores for _, reply in ScorerJudge().ask(alone, 0, 1)] == [None]
    many = [Question("harmlessness", f"p{k}", f"q{k}", "?", "??") for k in range(60)]
    with pytest.raises(ScorerError, match=r"failed on (\d+) of \1 texts; fix the scorer"):
        list(ScorerJudge().ask(many, 0, 1))


# --- an endpoint ----------------------------------------------------------------------------------


def test_an_endpoint_judges_every_pair_in_both_orders(repository):
    """Bug: a swapped pair counted for the wrong side; results that depend on which request came
    back first.
    """

    def slow_start(request):
        time.sleep(0.02 * (hash(request["messages"][0]["content"]) % 3))
        return by_hash(request)

    with stub_judge(slow_start) as stub:
        judged = judge_run(params(judge=endpoint(stub)))
    pairs = pairs_of(runs.load_runs("test"), params())
    expected = [
        math.copysign(1, d) * (d != 0)
        for p in pairs.itertuples()
        for d in [points(p.answer) - points(p.baseline_answer)] * 2
    ]
    assert judged["verdict"].map({"win": 1, "tie": 0, "loss": -1}).tolist() == expected
    assert len(set(expected)) > 1
    assert not judged["swayed"].any() and set(judged["judge"]) == {"stub-7b"}
    texts = [request["messages"][0]["content"] for request in stub.requests]
    assert sorted(texts) == sorted(question.text for question in questions_of(pairs).values())
    assert len(set(texts)) == len(texts)
    sampling = dict(model="stub-7b", temperature=0.6, top_p=0.95, max_tokens=4096, seed=7)
    for request in stub.requests:
        assert [message["role"] for message in request["messages"]] == ["user"]
        assert sampling.items() <= request.items()


@pytest.mark.parametrize(
    "reply",
    [
        Canned("The second one."),
        Canned("8 7", "length"),
        Canned(None),
        Canned(
            body='{"choices": [{"message": {"content": null, "reasoning_content": "8 7"}, '
            '"finish_reason": "length"}]}'
        ),
    ],
)
def test_replies_that_cannot_be_read_are_counted(repository, reply):
    """Bug: one odd reply ends hours of judging, is asked about again for ever, or is left out of
    the counts.
    """
    with stub_judge(lambda request: reply) as stub:
        judged = judge_run(params(judge=endpoint(stub), methods=["best-of-n"]))
        again = judge_run(params(judge=endpoint(stub), methods=["best-of-n"]))
    table = win_rates(judged)
    assert table["unparsed"].tolist() == table["n"].tolist() == [5, 5] and len(stub.requests) == 20
    pd.testing.assert_frame_equal(judged, again)


NO_COMPLETIONS = [
    "<html>",
    "[" * 100_000,
    "[]",
    '{"choices": []}',
    '{"choices": [{"message": "8 7"}]}',
    '{"choices": [{"message": {"content": 8.7}}]}',
]


@pytest.mark.parametrize(
    ("reply", "sentence", "requests"),
    [
        (Canned("out of memory", status=500), "refuses the request or fails; .*out of memory", 2),
        (Canned(f"{KEY} is wrong", status=401), r"refuses .*\(status 401: its message repeats", 1),
        *[
            (Canned(body=said), "does not answer as a chat completion does; correct base_url", 1)
            for said in NO_COMPLETIONS
        ],
    ],
    ids=lambda value: repr(value)[:60],
)
def test_an_endpoint_that_stays_down_says_so_in_one_sentence(
    reply, sentence, requests, monkeypatch
):
    """Bug: a traceback of the client's insides; a key in a log because the endpoint repeats it; no
    word on how to go on.
    """
    monkeypatch.setenv("IGCORE_JUDGE_TEST", KEY)
    error, made = ask(reply, api_key_env="IGCORE_JUDGE_TEST")
    assert len(made) == requests
    assert isinstance(error, JudgeError)
    whole = rf"judge at http://127.0.0.1:\d+/v1, asked .*, {sentence}.*; what it said so far is"
    assert re.match(whole, str(error))
    shown = "".join(traceback.format_exception(error))
    assert not any(KEY[i : i + 8] in shown for i in range(len(KEY) - 7)) and "\n" not in str(error)


def test_a_question_that_is_refused_leaves_the_others_alone():
    """Bug: one prompt that is too long for the judge ends the run before all others are asked."""
    texts = ["a", "\ud83d", "b", "c"]
    asked_ = [Question("helpfulness", f"p{k}", text, "a", "b") for k, text in enumerate(texts)]
    with stub_judge() as stub:
        sentence = "prompt p1, cannot be sent half a character .*; correct"
        with pytest.raises(JudgeError, match=sentence):
            list(load_judge(endpoint(stub)).ask(asked_, 0, 1))
    assert len(stub.requests) == 3


# --- run folders ----------------------------------------------------------------------------------


def test_a_run_that_was_stopped_goes_on(repository, monkeypatch):
    """Bug: a pair asked twice after a stop, a half-written line, a manifest of a run that has not
    finished.
    """
    written = itertools.count(1)

    def killed(path, value):
        append_line(path, value)
        if next(written) == 4:
            with path.open("ab") as file:
                file.write(b'{"question": "0')
            raise KeyboardInterrupt

    folder = repository / "runs/test/judge/x"
    with stub_judge() as stub:
        monkeypatch.setattr("igstudy.runs.judge_run.append_line", killed)
        with pytest.raises(KeyboardInterrupt):
            judge_run(params(judge=endpoint(stub), workers=1))
        monkeypatch.setattr("igstudy.runs.judge_run.append_line", append_line)
        kept = kept_in(folder)
        assert len(kept) == 4 and not (folder / "manifest.json").exists()
    with stub_judge() as stub:  # at another address
        judged = judge_run(params(judge=endpoint(stub)))
    questions = questions_of(pairs_of(runs.load_runs("test"), params()))
    asked_now = sorted(request["messages"][0]["content"] for request in stub.requests)
    assert asked_now == sorted(x.text for digest, x in questions.items() if digest not in kept)
    assert json.loads((folder / "manifest.json").read_text())["pairs"] == 8 and len(judged) == 16
    assert not (repository / "runs/test/judge/.replaced").exists()


def test_what_was_judged_before_an_endpoint_went_down_is_kept(repository):
    """Bug: replies that were paid for thrown away with the one that failed."""
    count, gone = itertools.count(), Canned("gone", status=500)
    with stub_judge(lambda request: by_hash(request) if next(count) < 6 else gone) as stub:
        with pytest.raises(JudgeError, match="or see its log"):
            judge_run(params(judge=endpoint(stub, max_retries=0)))
    kept = kept_in(repository / "runs/test/judge/x")
    assert len(kept) == 6 and not (repository / "runs/test/judge/x/manifest.json").exists()
    with stub_judge() as stub:
        whole = judge_run(params(judge=endpoint(stub)))
        questions = questions_of(pairs_of(runs.load_runs("test"), params()))
        assert len(stub.requests) == len(questions) - 6
        afresh = judge_run(params(judge=endpoint(stub), run="afresh", workers=1))
        pd.testing.assert_frame_equal(whole, afresh)


def test_more_prompts_and_methods_ask_only_what_is_new(repository):
    """Bug: a larger limit that moves the verdicts aside; another seed or model that takes the
    verdicts of the first.
    """
    with stub_judge() as stub:
        judge = endpoint(stub)
        judge_run(params(judge=judge, limit=2, methods=["best-of-n"]))
        assert len(stub.requests) == 8
        judge_run(params(judge=judge))
        pairs = pairs_of(runs.load_runs("test"), params())
        assert len(stub.requests) == len(questions_of(pairs))
        assert not (repository / "runs/test/judge/.replaced").exists()
        judge_run(params(judge=judge | {"temperature": 0.0}, limit=1, methods=["best-of-n"]))
        assert len(stub.requests) == len(questions_of(pairs)) + 4
    assert len(list((repository / "runs/test/judge/.replaced").iterdir())) == 1


def test_equal_answers_are_asked_about_once_and_tie(repository):
    """Bug: the same text of two methods judged twice, with luck differently."""
    same = pd.DataFrame(
        [line("p0", method, "It is 0.") for method in ("base", "best-of-n", "inferenceguard")]
    )
    pairs = pairs_of(same, params())
    asked_ = questions_of(pairs)
    assert len(asked_) == 2
    judged = verdicts(pairs, dict.fromkeys(asked_, (9, 2)), dict.fromkeys(ASPECTS, "j"))
    assert set(judged["verdict"]) == {"tie"}


def test_the_key_stays_in_the_environment(repository, monkeypatch, capsys):
    """Bug: a key in params.json, a manifest, a log, or sent to nobody at all."""
    monkeypatch.setenv("IGCORE_JUDGE_TEST", f"{KEY}\n")
    with stub_judge() as stub:
        judge_run(params(judge=endpoint(stub, api_key_env="IGCORE_JUDGE_TEST")))
        assert set(stub.keys) == {f"Bearer {KEY}"}
        judge_run(params(judge=endpoint(stub, temperature=0.0), run="y", limit=1))
        assert stub.keys[-1] is None
    written = [path for path in repository.rglob("*") if path.is_file()]
    assert len(written) > 8 and not any(KEY.encode() in path.read_bytes() for path in written)
    assert KEY not in "".join(capsys.readouterr())


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"judge": "opnai"}, "unknown judge 'opnai'; did you mean 'openai'"),
        ({"judge": "openai"}, "parameter model is missing"),
        ({"judge": {"model": "m"}}, "unknown judge ''; allowed: openai, scorer"),
        ({"judge": {"name": "openai", "model": "m", "api_key": KEY}},
         "unknown parameter 'api_key'; did you mean"),
        ({"judge": {"name": "openai", "model": "m", "timeout": 1e308}},
         "parameter timeout is 1e.308: it must be less than or equal to 86400"),
        ({"workers": 10**6}, "parameter workers is 1000000: it must be less than or equal to 1024"),
        ({"judge": {"name": "openai", "model": "m", "base_url": f"https://me:{KEY}@x/v1"}},
         "base_url is not a plain http address"),
        ({"judge": {"name": "scorer", "helpfulness": "minilm"}},
         "unknown helpfulness scorer 'minilm'"),
        ({"baseline": "bas"}, "unknown baseline 'bas'; did you mean 'base'"),
        ({"methods": ["best-of-n", "base"]},
         "methods and baseline are .*'best-of-n', 'base'.; name each method once"),
    ],
)  # fmt: skip
def test_bad_settings_are_named(changes, message):
    """Bug: a run that stops after hours, or a secret repeated in an error."""
    with pytest.raises(ParameterError, match=message) as error:
        params(**changes)
    assert KEY not in str(error.value)


def test_the_embedded_scorers_judge():
    """Guards the default of notebook 60: what it names is there; an empty answer has a score."""
    judge = load_judge("scorer")
    texts = "What is the capital of France?", "The capital of France is Paris.", ""
    asked_ = [Question(aspect, "p", *texts) for aspect in ASPECTS]
    replies = {question.aspect: reply for question, reply in judge.ask(asked_, 0, 1)}
    assert replies["helpfulness"].scores[0] > replies["helpfulness"].scores[1]
    assert replies["harmlessness"].scores is not None
    assert judge.names == {"helpfulness": "minilm-relevance", "harmlessness": "smollm2-harm-2"}
