"""Tests of what the policy says of recorded answers: honest ones hold, and what nobody sampled is
refused, wherever it claims to come from.
"""

import json
import math

import pytest
import torch
from forgeries import DTYPES, KINDS, METHODS, RUN, decode, forge, forged, verdict_on, write
from tiny import saved, tiny

from igcore import load_policy
from igcore.methods import method_of
from igcore.prompt import as_prompt
from igstudy import linefile
from igstudy.runs import asking, verify
from igstudy.runs.asking import NotDecided, Question, ask
from igstudy.runs.decode_params import DecodeParams

SMALL = dict(limit=3, max_new_tokens=16)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """A folder with a random model over the vocabulary of SmolLM2."""
    folder = tmp_path_factory.mktemp("policies") / "tiny"
    tokenizer = load_policy("smollm2-raw").tokenizer
    model = tiny("llama", vocab_size=len(tokenizer), eos_token_id=0)
    return str(saved(folder, model, tokenizer))


@pytest.fixture(scope="module")
def runs(tmp_path_factory, policy):
    """Decode a run once for each of its settings; return its request and its lines."""
    known = {}

    def of(**changes):
        name = json.dumps(changes, sort_keys=True)
        if name not in known:
            asked = SMALL | {"policy": policy} | changes
            path = decode(tmp_path_factory.mktemp("runs") / "r", **asked)
            known[name] = DecodeParams(**RUN | asked), path
        return known[name]

    return of


def question(runs, method="backtracking", number=0, line=None, **changes):
    """The question about a line of an honest run, with some of its fields changed."""
    params, path = runs(methods=[method], **changes)
    lines = [x for x in linefile.read(path) if x["tokens"]]
    given = lines[number] | (line or {})
    policy = load_policy(params.policy.name, params.dtype)
    ids = policy.ids_of(as_prompt(given["prompt"], given["prompts"]))
    config = method_of(method).settings_under(params.search())
    return Question(policy, ids, given, config, params.seed, params.block_size)


def said(*args, **changes):
    """What the policy says of a line: problems, or why it cannot tell."""
    problems = []
    try:
        for problem in ask(question(*args, **changes)):
            problems.append(problem)
    except NotDecided as why:
        return problems or str(why)
    return problems


# --- honest, and by a forger ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "method", [*METHODS, "base", "best-of-n-augmented", "beam-augmented", "beam-lagrangian-freq"]
)
def test_honest_answers_hold(runs, method, dtype):
    """Guards every method that samples from the policy, under each type."""
    params, path = runs(methods=[method], dtype=dtype)
    found, sentence = verdict_on(path, params)
    assert found == "holds" and " of 3 lines; " in sentence


@pytest.mark.parametrize(
    "changes",
    [
        dict(temperature=1.3, top_p=0.8),
        dict(temperature=0.7, top_k=20),
        dict(step=8, choices=2),
        dict(back="doubling", spend=200),
        dict(block_size=5, checks="block"),
        dict(on_failure="paper", strict=True),  # every check fails, and the last draw goes on
        dict(on_failure="paper", spend=18, block_size=4),
    ],
)
def test_honest_answers_hold_under_other_settings(runs, changes):
    """Guards what decides a token: its distribution, and which draws a search makes."""
    params, path = runs(methods=["backtracking"], **changes)
    assert verdict_on(path, params)[0] == "holds"


def test_what_nobody_sampled_is_refused(tmp_path, policy):
    """Bug: answers by hand in bfloat16, or with a near tie, were not refused if the record named
    another processor. 60 forgeries: accepted 0, undecided 0.
    """
    found = list(forged(tmp_path, **SMALL | {"policy": policy, "limit": 2}))
    assert len(found) == 2 * len(KINDS) * len(METHODS) * len(DTYPES) == 60
    assert [row for row in found if row[4] != "refused"] == []


OTHERWISE = {"began_at": "2026-01-01", "finished_at": "2031-01-01T00:00:00Z"}


@pytest.mark.parametrize(
    ("kind", "expected"), [(lambda line, *_: line, "holds"), (KINDS[0], "refused")]
)
def test_the_origin_of_a_record_decides_nothing(tmp_path, runs, kind, expected):
    """Bug: whether a difference may be excused was read from the record. Each field that says where
    it comes from is altered.
    """
    params, path = runs(methods=["rejection"], limit=1)
    policy = load_policy(params.policy.name)
    for file, part in (("params.json", "params"), ("manifest.json", "manifest")):
        for name in sorted(verify.NOT_CERTIFIED[file]):
            record = linefile.read_record(path)
            forge(record, 0, kind, policy, {}, None)
            getattr(record, part)[name] = OTHERWISE.get(name, {"other": "abacus"})
            forged = write(record, tmp_path / f"{name}-{part}")
            assert verdict_on(forged, params)[0] == expected, name


# --- one answer, altered --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "sentence"),
    [
        (lambda tokens: tokens[:5], "its 5 tokens end before an end token"),
        (lambda tokens: [0, *tokens[1:]], "go on behind an end token"),
        (lambda tokens: [*tokens, *tokens], "it has 32 tokens, more than max_new_tokens, 16"),
        (lambda tokens: [2**31, *tokens[1:]], "not all whole numbers from 0 to 49151"),
        (lambda tokens: [-1, *tokens[1:]], "not all whole numbers"),
        (lambda tokens: [True, *tokens[1:]], "not all whole numbers"),
        (lambda tokens: [*tokens[:-1], 5], "response is "),
    ],
)
def test_tokens_that_are_no_answer_are_refused(runs, tokens, sentence):
    """Bug: an answer that was cut, or goes on behind its end, has only tokens that keys draw."""
    own = question(runs).line["tokens"]
    (first, *_) = said(runs, line={"tokens": tokens(own)})
    assert sentence in first


def test_a_text_without_tokens_is_an_abstention(runs):
    """Bug: a text by hand without any token, which there was nothing to ask about."""
    for status, problems in (("verified_safe", 1), ("unverified_unsafe", 1), ("abstained", 0)):
        assert len(said(runs, line={"tokens": [], "status": status})) == problems


@pytest.mark.parametrize(
    ("name", "value"),
    [("response", "By hand."), ("finished", False), ("block_ends", [1]), ("grid_ends", [1])],
)
def test_what_tokens_say_is_read_from_them(runs, name, value):
    """Bug: a text beside tokens of another one."""
    (only,) = said(runs, line={name: value})
    assert only.startswith(f"its tokens: {name} is ")


def test_a_likelihood_that_the_policy_does_not_give_is_refused(runs):
    """Guards the reward where there is no reward model: nobody else knows it."""
    reward = question(runs).line["reward"]
    assert said(runs, line={"reward": reward + 1e-5}) == []
    (only,) = said(runs, line={"reward": reward + 1e-3})
    assert "not its log-likelihood" in only


@pytest.mark.parametrize("method", METHODS)
def test_only_the_draws_of_the_trace_are_tried(runs, method):
    """Bug: among all draws that a request allows, one often gives a short block."""
    own = question(runs, method).line["trace"]
    # bug: in a key 0.0 and False are other numbers, so that each opened draws of its own
    for draw in (10**6, -1, 0.0, False, "0", None):
        trace = [entry | {"round": draw} for entry in own]
        (only,) = said(runs, method, line={"trace": trace})
        assert "in any of the draws [] that its trace names" in only
    (only,) = said(runs, method, line={"trace": []})
    assert "in any of the draws []" in only


def test_a_request_may_limit_its_draws(runs):
    """Bug: an answer of a later draw than the request allows."""
    trace = [entry | {"round": 1} for entry in question(runs, "rejection").line["trace"]]
    assert "draws [1]" in said(runs, "rejection", line={"trace": trace})[0]
    assert "draws []" in said(runs, "rejection", line={"trace": trace}, draws=1)[0]


def fitting(monkeypatch, strains):
    """Let draws fit blocks of tokens as a mapping from (draw, first token) to strain says."""
    monkeypatch.setattr(
        asking, "measure_strain", lambda *given: strains.get((given[3], given[4]), math.inf)
    )


def test_the_draws_of_a_stepwise_answer_follow_one_another(runs, monkeypatch):
    """Guards their order: a block of an earlier draw cannot stand behind one of a later draw."""
    trace = [{"block": block, "round": draw} for block in (0, 1) for draw in (0, 1, 2)]
    fitting(monkeypatch, {(1, 0): 0, (1, 8): 0})
    assert said(runs, line={"trace": trace}) == []
    # the draws that take least on the whole count, not the first
    fitting(monkeypatch, {(0, 0): 3.0, (1, 0): 0.5, (0, 8): 0.1, (1, 8): 0.9, (2, 8): 3.0})
    assert said(runs, line={"trace": trace}) == []
    fitting(monkeypatch, {(0, 0): 3.0, (1, 0): 0.5, (0, 8): 0.1, (2, 8): 3.0})
    assert "logits would have moved 0.19 of the most" in said(runs, line={"trace": trace})[0]
    fitting(monkeypatch, {(1, 0): 0, (0, 8): 0})
    (only,) = said(runs, line={"trace": trace})
    assert "its tokens 9 to 16 are not" in only and "draws [0, 1, 2]" in only


def test_an_answer_takes_little_of_what_its_logits_may_move(runs, monkeypatch):
    """Bug: in bfloat16 each token of another temperature was near enough to its edges."""
    fitting(monkeypatch, {(0, 0): 0.9, (0, 8): 1.0})
    assert said(runs, "inferenceguard") == []
    fitting(monkeypatch, {(0, 0): 1.0, (0, 8): 1.2})
    (only,) = said(runs, "inferenceguard")
    assert "logits would have moved 0.14 of the most" in only


def test_a_truncated_answer_ends_with_a_block(runs):
    """Guards mode `truncate`: what the search certified is whole blocks."""
    changes = dict(method="inferenceguard", on_failure="truncate")
    own = question(runs, **changes).line["tokens"]
    beginning = {"reason": "truncated", "finished": False}
    for n, refused in ((8, False), (7, True)):
        line = beginning | {"tokens": own[:n]}
        problems = said(runs, line=line, **changes)
        assert any("end before an end token" in problem for problem in problems) == refused


# --- what one pass cannot tell --------------------------------------------------------------------


def test_steered_answers_and_stop_strings_are_not_decided(runs):
    """Guards what is named in docs/reproduce.md: nothing is said of what was not asked."""
    assert said(runs, line={"method": "args"}) == asking.STEERED
    stopped = {"tokens": question(runs, "base").line["tokens"][:5]}
    own = question(runs, "base").policy.text(stopped["tokens"])
    stopped["reward_scorer"] = "one that is not asked here"
    cut = stopped | {"response": own[:-1]}  # the stop string may begin inside a token
    assert said(runs, "base", line=cut, stop=["#"]) == asking.STOPPED
    # bug: by hand, whatever its tokens
    by_hand = stopped | {"tokens": [9, 8, 7], "response": "By hand."}
    first, *_ = said(runs, "base", line=by_hand, stop=["#"])
    assert first.startswith("its tokens: response is 'By hand.', not a part of ")
    by_hand["response"] = question(runs, "base").policy.text([9, 8, 7])
    assert "are not those that the keys" in said(runs, "base", line=by_hand, stop=["#"])[0]
    assert "end before" in said(runs, "backtracking", line=stopped, stop=["#"])[0]


def test_a_block_of_a_penalised_round_is_decoded_again(tmp_path, runs):
    """Guards rounds with a penalty: what nobody drew may be of one, until the group is decoded."""
    params, path = runs(methods=["inferenceguard"], diversity="paper")
    own = question(runs, "inferenceguard", diversity="paper")
    trace = [entry | {"round": 1} for entry in own.line["trace"]]
    assert said(runs, "inferenceguard", line={"trace": trace}, diversity="paper") == (
        asking.PENALISED
    )
    record = linefile.read_record(path)
    number = next(n for n, line in enumerate(record.lines) if line["tokens"])
    record.lines[number] |= {"trace": trace}
    record.lines[number]["digest"] = linefile.line_digest(record.lines[number])
    found, sentence = verdict_on(write(record, tmp_path / "r"), params)
    assert found == "refused" and "decoded again: trace is" in sentence


# --- how far logits move --------------------------------------------------------------------------


def test_a_lowered_precision_of_float32_counts(runs, monkeypatch):
    """Bug: a GPU that multiplies float32 in TF32 is held to what float32 moves."""
    model = question(runs).policy.model
    assert asking.dtype_of(model) == torch.float32
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "medium")
    assert asking.dtype_of(model) == torch.bfloat16
