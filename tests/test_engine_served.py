"""Tests of the engine whose model is in a server, of the way there, and of its policy."""

import itertools
import json
import math
from collections import Counter
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from mockpolicy import EOS, LetterCost, LetterReward, MockTokenizer, mock_policy, probabilities
from scipy.stats import chisquare
from servedstub import MODEL, Reply, served
from test_sampling import processed
from tiny import framed, tiny_tokenizer

from igcore import AssetError, Guard, ParameterError, PolicyError, decode, load_policy
from igcore.critic.latent import shape_of
from igcore.engine.sampling import Sampling, random_key
from igcore.models.registry import SCORERS
from igcore.prompt import as_prompt
from igserve import client as way
from igserve.client import Client
from igserve.engine import SEEDS, ServedEngine
from igserve.policy import RemoteModel, ServedPolicy
from igserve.server import Server
from igstudy.baselines.args import ArgsConfig
from igstudy.linefile import read
from igstudy.runs.decode_params import DecodeParams
from igstudy.runs.decode_run import decode_run
from igstudy.runs.verify import verify

PROMPTS = [[1, 2], [3]]
SETTINGS = dict(budget=0.5, n_samples=4, keep=2, block_size=3, max_new_tokens=9, rounds=3)


def keys_of(rows, length, at=0):
    return [[random_key(0, f"p{row}", 0, c, at + t) for t in range(length)] for c, row in rows]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(way, "FIRST_PAUSE", 0.001)


def server_of(stub, **options):
    client = Client(stub.url, **dict(timeout=5.0, retries=2, at_once=32) | options)
    return Server(client, MODEL)


def engine_of(stub, sampling=None, **options):
    engine = ServedEngine(server_of(stub, **options), {EOS}, sampling=sampling)
    engine.open(PROMPTS)
    return engine


def policy_of(stub, **options):
    return ServedPolicy(
        "served", RemoteModel("served"), MockTokenizer(), digest="s", eos_ids=frozenset({EOS}),
        server=server_of(stub, **options), context=64,
    )  # fmt: skip


def sampled(engine, rows, length=3, **more):
    return engine.sample_block(rows, keys_of(list(enumerate(rows)), length), **more)


# --- the engine -----------------------------------------------------------------------------------


def test_ids_go_out_and_come_back_with_their_log_probabilities():
    """Bug: text between server and search, which re-tokenizes a block's end; one request per
    sample; samples that come in another order.
    """
    with served() as stub:
        engine = engine_of(stub)
        block = sampled(engine, [0, 0, 0, 1, 1])
        assert [(r["prompt"], r["n"], r["max_tokens"]) for r in stub.requests] in (
            [([1, 2], 3, 3), ([3], 2, 3)],
            [([3], 2, 3), ([1, 2], 3, 3)],  # they are under way at the same time
        )
        for c, row in enumerate([0, 0, 0, 1, 1]):
            sequence = list(PROMPTS[row])
            for token, x, q in zip(block.tokens[c], block.log_p[c], block.log_q[c], strict=True):
                assert x == q == pytest.approx(math.log(probabilities(tuple(sequence))[token]))
                sequence.append(token)
            first = next(r for r in stub.requests if r["prompt"] == PROMPTS[row])
            child = c - 3 * row
            assert block.tokens[c] == [token for token, _ in stub.sample(first, child)]
    assert not any(map(any, block.near)) and block.first == 0


def test_a_request_asks_for_the_policy_itself_and_its_seed_is_that_of_a_key():
    """Bug: a server's default temperature or top-p in place of the policy; seeds that repeat from
    round to round or beam to beam.
    """
    with served() as stub:
        engine = engine_of(stub)
        keys = keys_of([(0, 0), (1, 0), (2, 1)], 3)
        engine.sample_block([0, 0, 1], keys)
        asked = {tuple(r["prompt"]): r for r in stub.requests}
        for request in asked.values():
            wanted = dict(temperature=1.0, top_p=1.0, top_k=-1, min_p=0.0, repetition_penalty=1.0)
            assert wanted.items() <= request.items()
            assert request["stop_token_ids"] == [EOS] and request["model"] == MODEL
        assert asked[1, 2]["seed"] == keys[0][0] % SEEDS
        assert asked[(3,)]["seed"] == keys[2][0] % SEEDS


def test_samples_follow_the_policy():
    """Bug: seeds of neighbouring requests that give correlated tokens would bias every search.
    4000 samples: a deviation of .04 has odds of about 1 in 10^6.
    """
    with served() as stub:
        engine = engine_of(stub)
        engine.open([[3]] * 2)
        rows = [0] * 2000 + [1] * 2000
        block = sampled(engine, rows, length=1)
    assert len(stub.requests) == 2 and len({r["seed"] for r in stub.requests}) == 2
    counts = Counter(tokens[0] for tokens in block.tokens)
    for token, p in enumerate(probabilities((3,))):
        assert counts[token] / 4000 == pytest.approx(p, abs=0.04)


@pytest.mark.parametrize("overrun", [False, True])
def test_a_sample_ends_at_its_first_end_token(overrun):
    """Bug: tokens after the end in an answer, from a server that does not know all end tokens; an
    ended sample that is continued.
    """
    with served() as stub:
        stub.overrun = overrun
        engine = engine_of(stub)
        block = sampled(engine, [0] * 60, length=9, last=True)
        for c, tokens in enumerate(block.tokens):
            assert EOS not in tokens[:-1] and (len(tokens) == 9 or tokens[-1] == EOS)
            assert block.ended[c] == (tokens[-1] == EOS)
            assert block.encoded[c] == len(tokens) - 1
        assert 0 < sum(block.ended) < 60
        with pytest.raises(KeyError):
            engine.select([block.ended.index(True)])


def test_blocks_go_on_from_the_selected_candidates_of_any_round():
    """Bug: a retry that numbers candidates from 0 again; a beam that continues another's tokens."""
    with served() as stub:
        engine = engine_of(stub)
        first = sampled(engine, [0, 1])
        engine.rollback(keep=[1])
        again = sampled(engine, [0, 0])
        assert again.first == 2 and engine.sequences == PROMPTS
        with pytest.raises(KeyError):
            engine.select([0])  # freed by the rollback
        engine.select([3, 1])
        assert engine.sequences == [[1, 2, *again.tokens[1]], [3, *first.tokens[1]]]
        engine.select([])
        assert engine.sequences == []


WIDE = 60  # tokens of `wide_logits`


def wide_logits(prefix):
    """Logits over `WIDE` tokens, fixed by the prefix."""
    rng = np.random.default_rng([*prefix, 5])
    return (2 * rng.standard_normal(WIDE)).tolist()


def frequencies_are(tokens, q):
    """Compare tokens with probabilities (V,) by chi-square."""
    counts = np.bincount(tokens, minlength=len(q))
    assert not counts[q == 0].any()
    expected = len(tokens) * q[q > 0]
    assert chisquare(counts[q > 0], expected).pvalue > 1e-3


def wide_q(prefix, sampling):
    return processed(torch.tensor([wide_logits(prefix)]), sampling)[0].numpy()


def test_tempered_and_truncated_samples_follow_the_processors_of_transformers():
    """Guards the fields of a request: 10^5 draws by chi-square. log_p is the policy's own; log q is
    not known."""
    sampling, n = Sampling(0.7, 0.9, 20), 100_000
    with served(wide_logits, ends=frozenset()) as stub:
        engine = engine_of(stub, sampling, timeout=60.0)
        block = engine.sample_block([1] * n, [[c] for c in range(n)])
        asked = stub.requests[1:]  # the first is about the server's log-probabilities
    assert {(r["temperature"], r["top_p"], r["top_k"]) for r in asked} == {(0.7, 0.9, 20)}
    tokens = [token for (token,) in block.tokens]
    frequencies_are(tokens, wide_q((3,), sampling))
    p = torch.tensor(wide_logits((3,))).double().log_softmax(-1)
    assert [x for (x,) in block.log_p[:99]] == pytest.approx(p[tokens[:99]].tolist(), abs=1e-5)
    assert all(map(math.isnan, itertools.chain(*block.log_q)))


def test_a_server_that_cannot_report_the_reference_is_refused_once_it_matters():
    """Bug: likelihood, KL and shares of failed blocks made of probabilities after truncation."""
    with served() as stub:
        stub.processed = True
        assert sampled(engine_of(stub), [0]).tokens  # the policy itself: both are the same
        with pytest.raises(PolicyError, match="probabilities after temperature.*raw_logprobs"):
            sampled(engine_of(stub, Sampling(0.7)), [0])
    with served() as stub:
        engine = engine_of(stub, Sampling(0.7))
        sampled(engine, [0]), sampled(engine, [0])
        assert [r["top_k"] for r in stub.requests] == [1, -1, -1]  # asked once


# --- searches -------------------------------------------------------------------------------------


def answers(policy, method="inferenceguard", prompts=("ab", "fed", "c"), **settings):
    config = ArgsConfig(**SETTINGS | {"token_top_k": 5} | settings)
    guard = Guard(policy, LetterCost(), LetterReward(), config=config)
    return list(decode(method, guard, prompts))


def test_a_search_guards_a_served_model():
    """Bug: a served answer without the final check, or over budget; a retry that never happens, or
    is drawn from another distribution than the policy's.
    """
    with served() as stub:
        found = answers(policy_of(stub), n_samples=2, keep=1)
    for answer in found:
        assert answer.status in ("verified_safe", "abstained")
        assert LetterCost().score([""], [answer.text], [True])[0] <= 0.5 or answer.reason
    assert {"verified_safe"} <= {answer.status for answer in found}
    rounds = [step for answer in found for step in answer.trace]
    assert any(step["round"] > 0 for step in rounds) and all(step["kl"] == 0 for step in rounds)


@pytest.mark.parametrize("settings", [dict(diversity="paper"), dict(diversity_penalty=2.0)])
def test_a_penalty_is_refused_before_anything_is_decoded(settings):
    """Bug that must not come: a penalty that does nothing, where the settings ask for one."""
    with served() as stub:
        policy = policy_of(stub)
        with pytest.raises(ParameterError, match="a server samples every retry from the policy"):
            answers(policy, **settings)
        assert not stub.requests
        answers(policy, diversity="none")
        answers(policy, "backtracking", **settings)  # which reads neither


@pytest.mark.parametrize("method", ["backtracking", "rejection"])
def test_a_search_with_steps_back_asks_block_by_block(method, monkeypatch):
    """Bug: whole answers of which the first word was over budget; what the server sampled after a
    failed check, and was paid for, was counted nowhere.
    """
    sampled, samples_of = [], ServedEngine._samples

    def counted(engine, bodies):
        found = samples_of(engine, bodies)
        sampled.extend(len(sample.tokens) for samples in found for sample in samples)
        return found

    monkeypatch.setattr(ServedEngine, "_samples", counted)
    with served() as stub:
        found = answers(policy_of(stub), method, spend=40)
        lengths = {request["max_tokens"] for request in stub.requests}
    assert lengths <= set(range(1, SETTINGS["block_size"] + 1))
    assert sum(answer.counts.policy_tokens for answer in found) == sum(sampled)
    assert "verified_safe" in {answer.status for answer in found}
    assert all(answer.counts.policy_tokens <= 40 for answer in found)
    assert max(answer.counts.samples_drawn for answer in found) > 1


def test_best_of_n_and_its_counts_are_those_of_the_local_engine():
    """Bug: counts of work that depend on where the model is."""
    with served() as stub:
        found, local = answers(policy_of(stub), "base"), answers(mock_policy(), "base")
    for a, b in zip(found, local, strict=True):
        assert a.counts.samples_drawn == b.counts.samples_drawn
        assert a.counts.policy_tokens == a.n_tokens and b.counts.policy_tokens == b.n_tokens
        assert a.counts.forward_tokens - a.n_tokens == b.counts.forward_tokens - b.n_tokens


@pytest.mark.parametrize("method", ["inferenceguard-critic", "inferenceguard-mix", "re-control"])
def test_methods_with_latents_are_refused_by_name_before_anything_is_decoded(method):
    """Bug: a search that fails in the middle, or tells its user to train a critic."""
    with served() as stub:
        policy = policy_of(stub)
        with pytest.raises(ParameterError, match=f"'{method}' uses a .*hidden states"):
            answers(policy, method)
        with pytest.raises(ParameterError, match="'args' chooses each token"):
            answers(policy, "args")
        with pytest.raises(PolicyError, match="the model of served is in a server"):
            shape_of(policy.model)  # what training and loading of a critic ask first
    assert not stub.requests
    policy = {"server": stub.url, "model": MODEL, "tokenizer": "smollm2-raw"}
    with pytest.raises(ParameterError, match=f"'{method}' uses a .*hidden states"):
        DecodeParams(
            profile="p", run="r", policy=policy, methods=[method], prompts="rtp", budget=1.0
        )


# --- servers that fail ----------------------------------------------------------------------------


def always(body):
    return lambda number: Reply(body)


def reply(**changes):
    """Return a reply that is right but for some fields of its first sample."""
    logprobs = {"token_logprobs": [-1.0, -1.0, -1.0]}
    sample = {"index": 0, "logprobs": logprobs, "token_ids": [1, 2, 3]} | changes
    return json.dumps({"choices": [sample]}).encode()


MALFORMED = {
    "no JSON": b"<html>",
    "an error in place of samples": b'{"error": {"message": "no slot"}}',
    "a probability too few": reply(logprobs={"token_logprobs": [-1.0, -2.0]}),
    "a probability that is none": reply(logprobs={"token_logprobs": [-1.0, "x", -2.0]}),
    "too few samples": b'{"choices": []}',
    "another sample": reply(index=1),
    "text in place of ids": reply(token_ids=["a", "b", "c"]),
    "negative ids": reply(token_ids=[1, -2, 3]),
    "huge ids": reply(token_ids=[1, 2**40, 3]),
    "no log-probabilities": reply(logprobs=None),
    "NaN": reply(logprobs={"token_logprobs": [-1.0, math.nan, -1.0]}),
    "no token at all": reply(token_ids=[], logprobs={"token_logprobs": []}),
    "an unknown end": reply(token_ids=[1], logprobs={"token_logprobs": [-1.0]}),
    "true for an id": reply(token_ids=[True, 2, 3]),
    "a log-probability above 0": reply(logprobs={"token_logprobs": [-1.0, 0.3, -1.0]}),
    "an id that the tokenizer has not": reply(token_ids=[1, 2, 77]),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_reply_is_one_sentence(name):
    """Bug: a reply that is no sample taken for one, or a traceback."""
    with served(fault=always(MALFORMED[name])) as stub:
        engine = engine_of(stub)
        engine.server.vocabulary = 50
        with pytest.raises(PolicyError, match="gave a reply that is no completion") as caught:
            sampled(engine, [0])
        assert len(stub.requests) == 1 and "\n" not in str(caught.value)


def test_a_rounding_above_0_is_none():
    """Guards a server whose float32 arithmetic gives a sure token 1e-6 more than probability 1."""
    with served(fault=always(reply(logprobs={"token_logprobs": [1e-6, -1.0, 0]}))) as stub:
        assert sampled(engine_of(stub), [0]).log_p == [[0.0, -1.0, 0.0]]


# --- the policy by name, and runs -----------------------------------------------------------------


def byte_logits(prefix):
    """Logits over 257 bytes that write letters and spaces, and now and then end."""
    some = Counter(prefix[-2:])
    wanted = {ord(c) - 33: 2.0 + some[ord(c) - 33] for c in "abcdef"}  # see `tiny_tokenizer`
    return [wanted.get(token, -6.0) for token in range(256)] + [0.5]


@pytest.fixture
def tokenizer(tmp_path):
    """A folder with a tokenizer alone."""
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    return str(tmp_path / "tokenizer")


@contextmanager
def byte_server(**options):
    with served(logits=byte_logits, ends=frozenset({256}), **options) as stub:
        stub.tokenized = lambda text: tiny_tokenizer()(text)["input_ids"]
        yield stub


def named(stub, tokenizer, **options):
    return dict(server=f"{stub.url}/v1", model=MODEL, tokenizer=tokenizer, max_retries=1) | options


def test_a_policy_says_who_serves_it(tokenizer):
    """Bug: records that do not distinguish servers, or promise to be repeated; the watermark of a
    server in samples.
    """
    with byte_server() as stub:
        guard = Guard(named(stub, tokenizer), cost=lambda text: 0.0, budget=1.0)
        guard("ab")
        marks = {request.get("watermarking") for request in stub.requests}
    assert marks == {False}
    policy = guard.policy
    assert policy.name == "letters@vLLM"
    known = policy.identity()["served"]
    assert stub.url not in json.dumps(known) and known["model"] == MODEL
    assert (known["software"], known["version"]) == ("vLLM", "0.32.0")
    assert policy.eos_ids == {256} and policy.context == 64
    assert set(policy.files) >= {"tokenizer.json"}
    with byte_server() as other:  # at another address the same
        assert load_policy(named(other, tokenizer)).digest == policy.digest
        sure = load_policy(named(other, tokenizer, batch_invariant=True))
    assert sure.digest != policy.digest


def test_the_tokenizer_of_a_served_policy_writes_its_prompts(tmp_path):
    """Bug: thinking could not be switched off; a tokenizer that ends every prompt was taken."""
    template = "{{ messages[0].content }}{% if think %}?{% endif %}"
    tokenizer = tiny_tokenizer(chat_template=template)
    tokenizer.save_pretrained(tmp_path)
    with byte_server() as stub:
        policy = load_policy(named(stub, str(tmp_path), chat_options={"think": True}))
        assert tokenizer.decode(policy.encode("fed")) == "fed?"
        framed(tokenizer, end="</s>").save_pretrained(tmp_path)
        with pytest.raises(AssetError, match="the end token '</s>' after every prompt"):
            load_policy(named(stub, str(tmp_path), template="raw"))


def test_options_of_a_served_policy_are_checked(tokenizer):
    with byte_server() as stub:
        for options, message in {
            "model": ("model of the server at .*allowed: mock/letters", "other"),
            "timeout": ("timeout is -1", -1),
        }.items():
            with pytest.raises(ParameterError, match=message[0]):
                load_policy(named(stub, tokenizer) | {options: message[1]})
        with pytest.raises(ParameterError, match="parameter model is missing"):
            load_policy({"server": stub.url, "tokenizer": tokenizer})
        with pytest.raises(ParameterError, match="unknown parameter 'weights'"):
            load_policy(named(stub, tokenizer, weights=1))


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("no list", "does not answer /v1/models as vLLM does"),
        ([{"id": MODEL, "max_model_len": "512"}], "does not answer /v1/models as vLLM does"),
        ([{"id": MODEL, "max_model_len": -1}], "does not answer /v1/models as vLLM does"),
        ([{"id": MODEL, "max_model_len": 64.5}], "does not answer /v1/models as vLLM does"),
        ([{"id": MODEL, "owned_by": "llamacpp"}], "is not vLLM; serve the model with it"),
    ],
)
def test_a_server_that_is_described_otherwise_is_one_sentence(tokenizer, said, message):
    """Bug: a TypeError or AttributeError at the first prompt."""
    with byte_server() as stub:
        stub.facts = lambda path: {"data": said}
        with pytest.raises(PolicyError, match=message):
            load_policy(named(stub, tokenizer))


# --- the server's own tokenizer -------------------------------------------------------------------


def test_another_tokenizer_is_refused_when_the_policy_is_loaded(tokenizer):
    """Bug: the ids of one model sent to another, whose samples are read as text of the first."""
    own = tiny_tokenizer()
    with byte_server() as stub:
        stub.tokenized = lambda text: [token + 1 for token in own(text)["input_ids"]]
        with pytest.raises(PolicyError, match="has another tokenizer than the policy: its tokens"):
            load_policy(named(stub, tokenizer))
        stub.tokenized = lambda text: [10**6]
        with pytest.raises(PolicyError, match="has another tokenizer"):
            load_policy(named(stub, tokenizer))
        # the same, with a space in front as some write it
        stub.tokenized = lambda text: own(" " + text)["input_ids"]
        assert load_policy(named(stub, tokenizer)).server.vocabulary == 257
        for nothing in (None, "text", ["1"], {}):
            stub.tokenized = lambda text, nothing=nothing: nothing
            with pytest.raises(PolicyError, match="does not answer /tokenize as vLLM does"):
                load_policy(named(stub, tokenizer))


def test_the_key_comes_from_the_environment_and_is_in_no_record(tokenizer, monkeypatch):
    """Bug: a key in params.json."""
    monkeypatch.setenv("IGCORE_SERVER_KEY", " sk-0123456789 \n")
    with byte_server() as stub:
        policy = load_policy(named(stub, tokenizer))
        keys = {headers["authorization"] for _, _, headers in stub.asked}
        assert keys == {"Bearer sk-0123456789"}
    assert "0123456789" not in json.dumps(policy.identity()) + repr(policy)


def run_params(stub, tokenizer, **changes):
    settings = dict(
        profile="mine", run="served", policy=named(stub, tokenizer, max_retries=0), prompts="rtp",
        methods=["inferenceguard", "base"], limit=6, group_size=2, budget=0.3, n_samples=4,
        block_size=4, max_new_tokens=8, cost="offensive-language", reward="short",
    )  # fmt: skip
    return DecodeParams(**settings | changes)


class Short:
    """Higher is better: shorter."""

    name, digest, sign, unit = "short", "s1", "higher is better", "letters"

    def score(self, prompts, responses, finished):
        return [-float(len(response)) for response in responses]


@pytest.fixture
def run_home(tmp_path, monkeypatch):
    """A root for runs, prompts and scorers that need no download."""
    prompts = [as_prompt(f"say {i}", "mine") for i in range(6)]
    monkeypatch.setattr("igstudy.runs.decode_run.load_prompts", lambda *_, **__: prompts)
    monkeypatch.setattr("igstudy.runs.verify.load_prompts", lambda *_, **__: prompts)
    monkeypatch.setitem(SCORERS, "short", Short)
    monkeypatch.setitem(SCORERS, "offensive-language", LetterCost)
    monkeypatch.setenv("IGCORE_ROOT", str(tmp_path))
    return tmp_path


def test_a_run_goes_on_where_a_killed_server_stopped_it(tokenizer, run_home):
    """Bug: lines lost, or answered twice, when a server dies in the middle of a run."""
    folder = run_home / "run"
    with byte_server() as stub:
        port = stub.server_port
        params = run_params(stub, tokenizer)

        # after some groups
        stub.fault = lambda number: Reply(drop=True) if number > 8 else None
        with pytest.raises(PolicyError, match="does not reply; start it"):
            decode_run(params, folder)
    before = (folder / "responses.jsonl").read_bytes()
    assert 0 < len(before.splitlines()) < 12
    with byte_server(port=port):
        run = decode_run(params, folder)
        asked = decode_run(params, folder)  # nothing is left to do
    after = (folder / "responses.jsonl").read_bytes()
    assert after.startswith(before)
    answered = [(line["method"], line["prompt_id"]) for line in run.lines]
    assert len(answered) == len(set(answered)) == 12 and len(asked.lines) == 12
    known = json.loads((folder / "params.json").read_text())["parts"]["policy"]["served"]
    assert known["software"] == "vLLM" and known["version"] == "0.32.0"


def test_a_served_run_is_not_decoded_again(tokenizer, run_home):
    """Bug: differences claimed where a server never promised the same tokens; a connection to an
    address that only a record names.
    """
    folder = run_home / "run"
    with byte_server() as stub:
        params = run_params(stub, tokenizer, methods=["inferenceguard"], limit=2)
        decode_run(params, folder)
        asked = len(stub.asked)
        report = verify(folder / "responses.jsonl", params, replay=None)
        assert report.problems == [] and report.replayed.startswith("0 of 6 lines were replayed")
        (said,) = report.undecided
        assert "a policy in a server" in said and "`batch_invariant: true`" in said
        assert len(stub.asked) == asked
    lines = read(folder / "responses.jsonl")
    assert {line["policy"] for line in lines} == {"letters@vLLM"}
