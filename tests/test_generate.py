"""Tests of the search behind `model.generate`: the real call, on a tiny random Llama and a
tokenizer of single letters.
"""

import dataclasses
import itertools
import math
from collections import Counter

import pytest
import torch
from mockpolicy import LetterCost, LetterReward, noise
from tiny import tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxTimeCriteria,
    PreTrainedTokenizerFast,
    StoppingCriteriaList,
    pipeline,
)

import igcore.streaming
from igcore import (
    Guard,
    ParameterError,
    PolicyError,
    ScorerError,
    SearchConfig,
    custom_generate,
    decode,
)
from igcore.engine.kv_cache import cache_name
from igcore.methods import method_of
from igcore.policy import Policy
from igserve.policy import RemoteModel

SPECIALS = ["<eos>", "<pad>", "<bos>", "<unk>"]
EOS, PAD, BOS = 0, 1, 2
SETTINGS = dict(budget=2.0, block_size=3, max_new_tokens=8, refusal="fed")
BEAMS = dict(n_samples=4, keep=2)


@pytest.fixture(scope="module")
def tokenizer():
    letters = Tokenizer(
        models.WordLevel({t: i for i, t in enumerate([*SPECIALS, *"abcdef"])}, unk_token="<unk>")
    )
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    letters.decoder = decoders.Fuse()
    names = {f"{name[1:-1]}_token": name for name in SPECIALS}
    return PreTrainedTokenizerFast(tokenizer_object=letters, padding_side="left", **names)


@pytest.fixture
def model():
    size = dict(vocab_size=10, intermediate_size=32, max_position_embeddings=32)
    size |= dict(num_attention_heads=2, num_key_value_heads=1, initializer_range=0.2)
    return tiny("llama", **size, eos_token_id=EOS, pad_token_id=PAD)


def a_guard(model, tokenizer, cost=None, method="inferenceguard", streamer=None, **settings):
    beams = {name: BEAMS[name] for name in method_of(method).reads & BEAMS.keys()}
    config = SearchConfig(**(SETTINGS | beams | settings))
    pair = (model, tokenizer)
    guard = Guard(pair, cost or LetterCost(), LetterReward(), config, method=method)
    return custom_generate(guard, streamer)


def generate(model, guard, texts, seed=0, max_new_tokens=8, **more):
    """Return the new tokens of each row, padding removed."""
    inputs = guard.guard.policy.tokenizer(texts, return_tensors="pt", padding=True)
    inputs.pop("token_type_ids", None)
    out = model.generate(
        **inputs, custom_generate=guard, seed=seed, max_new_tokens=max_new_tokens, **more
    )
    n = inputs.input_ids.shape[1]
    assert out.dtype == torch.long and torch.equal(out[:, :n], inputs.input_ids)
    return list(map(unpadded, out[:, n:].tolist(), guard.guard.answers))


def unpadded(row, response):
    """Cut the padding from a row; a sampled answer may hold the token itself."""
    n = response.n_tokens or row.index(EOS) + 1
    n += response.reason == "truncated"
    assert set(row[n:]) <= {PAD}
    return row[:n]


def only(*safe):
    """Return a cost of 1 for every text but the given ones."""
    return LetterCost(lambda text: float(text not in safe))


class Recorder:
    """A streamer that keeps the values that it receives."""

    def __init__(self):
        self.puts, self.ends = [], 0

    def put(self, value):
        assert not self.ends
        self.puts.append(value.tolist())

    def end(self):
        self.ends += 1

    @property
    def shown(self):
        return list(itertools.chain(*self.puts[1:]))


@pytest.mark.parametrize(
    "method", ["base", "best-of-n", "inferenceguard", "backtracking", "rejection"]
)
def test_generate_returns_the_tokens_that_decode_finds(model, tokenizer, method):
    """Guards the whole way through transformers: the same seed gives the same samples, returned as
    they were drawn.
    """
    policy = Policy("tiny", model, tokenizer, eos_ids=frozenset({EOS}))
    guard, texts, ended = a_guard(model, tokenizer, method=method), ["ab", "fed", "c", "dd"], 0
    for seed in range(4):
        own = dataclasses.replace(guard.guard, policy=policy)
        expected = list(decode(method, own, texts, seed=seed))
        answers = generate(model, guard, texts, seed)
        assert [r.text for r in guard.guard.answers] == [r.text for r in expected]
        for r, tokens in zip(expected, answers, strict=True):
            assert tokens == (r.tokens or [*tokenizer(r.text)["input_ids"], EOS])
            assert tokenizer.decode(tokens, skip_special_tokens=True) == r.text
            ended += r.n_tokens < 8 and tokens[-1] == EOS
    assert ended


def test_a_padded_row_is_answered_as_it_is_alone(model, tokenizer):
    """Guards prompts against the padding of their batch, however many groups it is decoded in."""
    guard, texts = a_guard(model, tokenizer, group_size=3), ["ab", "fedfed", "c", "ddd"]
    assert generate(model, guard, texts) == [generate(model, guard, [text])[0] for text in texts]


def test_rows_of_equal_text_keep_their_own_ids_and_samples(model, tokenizer):
    """Guards against looking ids up by text: with and without a first token the text is the same,
    the model's answer is not. The rule is that the n-th row of a text draws the n-th samples, from
    its own ids."""
    guard = a_guard(model, tokenizer, method="base")
    plain = tokenizer("ab")["input_ids"]
    rows = {"plain": ([PAD, *plain], [0, 1, 1]), "with": ([BOS, *plain], [1, 1, 1])}

    def drawn(*names):
        ids, mask = map(torch.tensor, zip(*(rows[name] for name in names), strict=True))
        model.generate(ids, attention_mask=mask, custom_generate=guard, max_new_tokens=8, seed=4)
        assert {r.prompt for r in guard.guard.answers} == {"ab"}
        return [r.tokens for r in guard.guard.answers]

    a, b, c = drawn("plain", "with", "plain")
    assert len({tuple(a), tuple(b), tuple(c)}) == 3
    assert drawn("plain", "with", "plain") == [a, b, c]
    assert drawn("plain") == [a] and drawn("with")[0] not in (a, b)
    assert drawn("with", "with")[1] == b != drawn("plain", "plain")[1]


def test_several_answers_are_as_many_searches(model, tokenizer):
    """Guards num_return_sequences, for which transformers repeats rows."""
    guard = a_guard(model, tokenizer)
    ids = tokenizer(["ab", "fe"], return_tensors="pt").input_ids
    out = model.generate(
        ids, custom_generate=guard, max_new_tokens=8, do_sample=True, num_return_sequences=3
    )
    assert torch.equal(out[:, :2], ids.repeat_interleave(3, 0))
    assert len({tuple(row) for row in out.tolist()}) == 6
    first = [r.text for r in guard.guard.answers[::3]]
    generate(model, guard, ["ab", "fe"])
    assert [r.text for r in guard.guard.answers] == first


def test_a_dictionary_holds_the_sequences(model, tokenizer):
    ids = tokenizer(["ab"], return_tensors="pt").input_ids
    guard = a_guard(model, tokenizer)
    out = model.generate(ids, custom_generate=guard, max_new_tokens=8, return_dict_in_generate=True)
    assert type(out).__name__ == "GenerateDecoderOnlyOutput"
    plain = model.generate(ids, custom_generate=guard, max_new_tokens=8)
    assert torch.equal(out.sequences, plain) and list(out) == ["sequences"]
    assert [answer.text for answer in out.answers] == [r.text for r in guard.guard.answers]


@pytest.mark.parametrize("kind", [list, tuple, torch.tensor])
def test_end_tokens_may_be_named_as_generate_allows(model, tokenizer, kind):
    """Bug: a tuple was one token that no model has, so the answer went past its end."""
    ids = tokenizer(["ab"], return_tensors="pt").input_ids
    own = dict(custom_generate=a_guard(model, tokenizer, budget=100.0), max_new_tokens=8, seed=1)
    one, all_letters = model.generate(ids, **own), kind(list(range(4, 10)))
    ended = model.generate(ids, **own, eos_token_id=all_letters)
    assert ended.shape == (1, 3) and ended[0, 2] == one[0, 2]


@pytest.mark.filterwarnings("ignore:.* is over the budget of")
def test_an_abstention_is_the_refusal_and_an_end_token(model, tokenizer):
    """Guards what is returned in place of unsafe text: nothing that was sampled, and no words when
    not even these were safe.
    """
    refusal = [*tokenizer("fedfed")["input_ids"], EOS]
    for cost, text, expected in ((only("fedfed"), "fedfed", refusal), (only(), None, [EOS])):
        guard = a_guard(model, tokenizer, cost, budget=0.5, refusal="fedfed")
        assert generate(model, guard, ["ab", "c"], max_new_tokens=4) == [expected] * 2
        assert [(r.status, r.text) for r in guard.guard.answers] == [("abstained", text)] * 2


@pytest.mark.filterwarnings("ignore:.* is over the budget of")
@pytest.mark.parametrize("on_failure", ["abstain", "truncate"])
@pytest.mark.parametrize(
    "accounting, keep",
    [("peak", "shown"), *itertools.product(["peak", "terminal", "increment"], [1, 2])],
)
def test_what_is_shown_was_inside_the_budget_and_is_never_taken_back(
    model, tokenizer, monkeypatch, keep, on_failure, accounting
):
    """Guards the stream, scoring again all that it shows: inside the budget at each put and at each
    block end before, shared by all kept beams, and continued by the answer whenever there is
    one."""
    # the beams after each block; what a block has shown, with the beams it knew
    kept, shown = [], []
    certified = igcore.streaming.certified_prefix

    def spy(beams, *others):
        kept.append([list(b.tokens) for b in beams])
        return certified(beams, *others)

    class Watched(Recorder):
        def put(self, value):
            super().put(value)
            shown.append((list(self.shown), len(kept)))

    monkeypatch.setattr(igcore.streaming, "certified_prefix", spy)
    cost = lambda tokens: noise(tokenizer.decode(tokens, skip_special_tokens=True))  # noqa: E731
    met = Counter()
    for seed in range(10):
        kept.clear(), shown.clear()
        settings = dict(budget=0.5, block_size=2, on_failure=on_failure, accounting=accounting)
        if keep == "shown":
            settings |= dict(method="backtracking", keep_shown=True, spend=9)
        else:
            settings |= dict(n_samples=3, rounds=1, keep=keep)
        guard = a_guard(model, tokenizer, LetterCost(noise), streamer=Watched(), **settings)
        (answer,) = generate(model, guard, ["ab"], seed)
        stream, answered = guard.streamer, guard.guard.answers[0].status != "abstained"
        assert stream.ends == 1 and stream.puts[0] == tokenizer(["ab"])["input_ids"]
        assert stream.shown == answer or not answered and stream.shown
        parts = shown[1:]
        # the last was shown by the final check
        for tokens, blocks in parts[:-1] if stream.shown == answer else parts:
            n = len(tokens)
            assert n % 2 == 0 and all(beam[:n] == tokens for beam in kept[blocks - 1])
            assert all(cost(tokens[:end]) <= 0.5 for end in range(2, len(tokens) + 1, 2))
        assert not parts or cost(parts[-1][0]) <= 0.5
        abandoned = not answered and stream.shown != answer
        met.update(parts=len(parts) > 1, answered=answered, abandoned=abandoned)
    rare = keep == 2 or accounting != "peak" or on_failure == "truncate"
    assert met["parts"]
    assert met["answered"] and (met["abandoned"] or rare)


SHOWN = dict(method="backtracking", keep_shown=True, spend=40)
ONE, TWO = dict(n_samples=3, keep=1), dict(n_samples=3, keep=2)
RISING = ["peak", "clamped_sum", "positive_increment"]


@pytest.mark.filterwarnings("ignore:.* is over the budget of")
@pytest.mark.parametrize(
    ("way", "accounting"),
    [*itertools.product([SHOWN, ONE, TWO], RISING), (ONE, "sum"), (TWO, "increment")],
    ids=str,
)
def test_a_stream_is_that_of_verdicts_on_the_whole_text(
    model, tokenizer, monkeypatch, way, accounting
):
    """Bug: the budget that shown blocks have used up is forgotten with their scores."""
    own, met = igcore.streaming.judge, Counter()

    def whole(*given, shown, **more):
        met["reread"] += bool(shown)
        return own(*given, **more)

    more = 1 if accounting == "peak" else 3  # a sum uses up more
    limits = {LetterCost: 1.5 * more, lambda: LetterCost(noise): 0.75 * more}
    for (cost, budget), seed, gamma in itertools.product(limits.items(), range(2), (1.0, 0.75)):
        found = []
        for judging in (own, whole):
            monkeypatch.setattr(igcore.streaming, "judge", judging)
            settings = dict(way, budget=budget, block_size=2, accounting=accounting)
            settings |= dict(gamma_safety=gamma, max_new_tokens=12)
            guard = a_guard(model, tokenizer, cost(), streamer=Recorder(), **settings)
            answer = generate(model, guard, ["ab"], seed, max_new_tokens=12)
            found.append((guard.streamer.puts, answer))
        assert found[0] == found[1]
        met["parts"] += len(found[0][0]) > 3
    assert met["reread"] and met["parts"]


@pytest.mark.parametrize("way", [SHOWN, ONE], ids=["shown", "1"])
def test_a_stream_reads_each_new_check_alone(model, tokenizer, way):
    """Bug: each block scored all that was shown again, so that calls grew with the square."""
    without_end(model)

    def calls(length, streamer=None):
        cost = LetterCost()
        settings = dict(way, budget=99.0, block_size=2)
        guard = a_guard(model, tokenizer, cost, streamer=streamer, **settings)
        asked = len(cost.asked)
        generate(model, guard, ["ab"], 3, length)
        return len(cost.asked) - asked

    for length in (8, 16, 28):
        blocks = length // 2 - 1  # the last one is shown by the final check
        assert calls(length, Recorder()) - calls(length) == 2 * blocks


def without_end(model):
    """Let a model write letters alone, so that answers have their full length."""
    model.lm_head.register_forward_hook(
        lambda _, __, logits: logits - 99.0 * (torch.arange(10) < len(SPECIALS))
    )


class Moody(LetterCost):
    """Costs 9 from the n-th reading of any text of a length on, and 0 before."""

    def __init__(self, length, readings):
        super().__init__(self.read)
        self.length, self.left = length, readings

    def read(self, text):
        self.left -= len(text) == self.length
        return 9.0 * (self.left < 0 and len(text) == self.length)


@pytest.mark.filterwarnings("ignore:cost 'letters' depends on")
@pytest.mark.parametrize(("length", "readings", "shown"), [(4, 1, 2), (4, 2, 2), (2, 3, 6)])
def test_a_cost_that_changes_its_mind_is_caught(model, tokenizer, length, readings, shown):
    """Guards what is shown: its own fresh readings, of all checks of its part, after a part that
    was not shown too. A later reading of a shown text is that of the final check.
    """
    without_end(model)
    stream, settings = Recorder(), dict(block_size=2, keep_shown=True, spend=8, refusal="ddd")
    cost = Moody(length, math.inf)
    guard = a_guard(model, tokenizer, cost, "backtracking", stream, **settings)
    cost.left = readings  # the search reads once, then the stream twice, then the final check
    generate(model, guard, ["ab"], 3)
    (answer,) = guard.guard.answers
    assert (answer.status, answer.text) == ("abstained", "ddd")
    assert len(stream.shown) == shown and stream.ends == 1


@pytest.mark.filterwarnings("ignore:.* is over the budget of")
def test_backtracking_shows_early_only_what_it_never_takes_back(model, tokenizer):
    """Guards ``keep_shown``: parts come while tokens are drawn, and none after a dead end; without
    it one warning names it.
    """
    read, times = [], []
    model.register_forward_hook(lambda *_: read.append(1))

    class Timed(Recorder):
        def put(self, value):
            super().put(value)
            times.append(len(read))

    def streamed(cost=None, **more):
        times.clear()
        guard = a_guard(model, tokenizer, cost, "backtracking", Timed(), **more)
        (answer,) = generate(model, guard, ["ab"], seed=3)
        return guard.streamer.puts[1:], answer, guard.guard.answers[0].status

    parts, answer, status = streamed(budget=9.0, keep_shown=True)
    assert list(map(len, parts)) == [3, 3, 2] and sum(parts, []) == answer
    assert times[1] < times[2] < times[3] == len(read) and status == "verified_safe"
    with pytest.warns(UserWarning, match="keep_shown=True shows each block") as said:
        parts, answer, status = streamed()
    assert len(said) == 1 and parts == [answer] and times[1] == len(read)
    dead_end = LetterCost(lambda text: 9.0 * (len(text) > 2))
    parts, answer, status = streamed(dead_end, keep_shown=True, spend=9, refusal="fe")
    assert status == "abstained" and answer == [*tokenizer("fe")["input_ids"], EOS]
    assert len(parts) == 1 and parts[0] != answer[:3] and times[1] < len(read)


@pytest.mark.filterwarnings("ignore:.* is over the budget of")
@pytest.mark.parametrize(
    ("method", "on_failure"),
    [
        ("best-of-n", "abstain"),
        ("beam-augmented", "abstain"),
        ("inferenceguard", "paper"),
        ("backtracking", "paper"),
    ],
)
def test_a_method_without_a_gate_shows_its_answer_at_the_end(model, tokenizer, method, on_failure):
    """Guards against showing block by block an answer that is never held back."""
    marked = (LetterCost(), 9.0, "verified_safe"), (only(), 0.5, "unverified_unsafe")
    for cost, budget, status in marked:
        stream, settings = Recorder(), dict(on_failure=on_failure, budget=budget)
        settings |= {"keep_shown": True} if method == "backtracking" else {}
        guard = a_guard(model, tokenizer, cost, method, stream, **settings)
        (answer,) = generate(model, guard, ["ab"])
        assert stream.puts[1:] == [answer] and len(answer) > 3
        assert guard.guard.answers[0].status == status


def test_the_stream_ends_when_the_search_fails(model, tokenizer):
    """Guards whoever reads the stream in another thread, and would wait for ever."""
    failing = LetterCost(lambda text: 0.0 if len(text) <= 3 else math.nan)
    many = {"n_samples": 256, "failure_rate": 0.25}  # texts enough to stop the run
    for cost, settings, more, error in (
        (failing, many, {}, ScorerError),
        (LetterCost(), {}, {"top_k": 3}, ParameterError),
    ):
        stream = Recorder()
        guard = a_guard(model, tokenizer, cost, streamer=stream, keep=1, **settings)
        with pytest.raises(error):
            generate(model, guard, ["ab"], **more)
        assert stream.ends == 1 and guard.guard.answers == [] and len(stream.shown) <= 3


def test_the_length_asked_of_generate_goes_first(model, tokenizer, monkeypatch):
    """Guards max_new_tokens: what is asked for explicitly wins, what a checkpoint sets for itself
    does not.
    """
    ids = tokenizer(["ab"], return_tensors="pt").input_ids
    guard = a_guard(model, tokenizer, budget=100.0)
    # an end token that makes none of these answers shorter
    lacking = dict(eos_token_id=9, pad_token_id=PAD)

    def length(**given):
        model.generate(ids, custom_generate=guard, seed=5, **lacking, **given)
        return guard.guard.answers[0].n_tokens

    assert length(max_new_tokens=11) == 11 and length(max_length=6) == 4
    with pytest.warns(UserWarning, match="model-agnostic default"):
        assert length() == 8
    monkeypatch.setattr(model.generation_config, "max_new_tokens", 20)
    assert (length(), length(max_new_tokens=5)) == (8, 5)
    monkeypatch.setattr(model.generation_config, "max_new_tokens", None)
    monkeypatch.setattr(model.generation_config, "max_length", 30)
    assert (length(), length(max_length=7)) == (8, 5)


def test_what_a_checkpoint_sets_for_itself_changes_nothing(model, tokenizer, monkeypatch):
    """Guards models whose own settings choose top-p sampling: they must work, at temperature
    1.
    """
    guard, texts = a_guard(model, tokenizer), ["ab", "fed"]
    before = generate(model, guard, texts)
    own = dict(do_sample=True, temperature=0.6, top_k=2, top_p=0.9, repetition_penalty=1.2)
    for name, value in own.items():
        monkeypatch.setattr(model.generation_config, name, value)
    assert generate(model, guard, texts) == before
    neutral = dict(temperature=1.0, top_k=0, do_sample=True)
    assert generate(model, guard, texts, **neutral) == before


def test_the_guards_config_alone_sets_the_sampling(model, tokenizer):
    """Bug: a caller's temperature ignored in silence, because it is the default of transformers."""
    usual = dict(temperature=0.7, top_p=0.9, top_k=3)
    guard = a_guard(model, tokenizer, **usual)
    expected = generate(model, guard, ["ab"])
    assert expected != generate(model, a_guard(model, tokenizer), ["ab"])
    assert generate(model, guard, ["ab"], do_sample=True, **usual) == expected
    for name, value in dict(temperature=1.0, top_p=1.0, top_k=50).items():
        with pytest.raises(ParameterError, match=f"given {name}={value}, .* config, where {name}"):
            generate(model, guard, ["ab"], do_sample=True, **{name: value})


def test_a_guard_may_take_its_sampling_from_the_checkpoint(model, tokenizer, monkeypatch, caplog):
    """Bug: a repetition penalty of the checkpoint that is left out without a word; transformers'
    own top-k of 50 taken for the checkpoint's."""
    policy = (model, tokenizer)
    own = Guard(policy, LetterCost(), sampling="checkpoint", **SETTINGS).config
    assert (own.temperature, own.top_p, own.top_k) == (1.0, None, None) and not caplog.text
    given = dict(do_sample=True, temperature=0.6, top_k=2, repetition_penalty=1.2, min_p=0.1)
    for name, value in given.items():
        monkeypatch.setattr(model.generation_config, name, value)
    guard = Guard(policy, LetterCost(), sampling="checkpoint", **SETTINGS)
    guard("ab"), dataclasses.replace(guard, method="base")("ab")
    own = guard.config
    assert (own.temperature, own.top_p, own.top_k, own.sampling) == (0.6, None, 2, None)
    assert [record.message for record in caplog.records] == [
        "sampling is 'checkpoint', which leaves out min_p, repetition_penalty of LlamaForCausalLM"
    ]
    same = Guard(policy, LetterCost(), temperature=0.6, top_k=2, **SETTINGS)
    assert guard("ab").tokens == same("ab").tokens
    served = dataclasses.replace(guard.policy, model=RemoteModel("far"))
    with pytest.raises(PolicyError, match="far is in a server, .*load the policy from a folder"):
        Guard(served, LetterCost(), sampling="checkpoint", **SETTINGS)


class Halving(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores / 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"generation_config": GenerationConfig(do_sample=True, top_p=0.5)}, "given top_p=0.5"),
        ({"num_beams": 4}, "num_beams is 4, .* give generate num_beams=1"),
        ({"output_scores": True}, "output_scores=True, .* returns token ids alone"),
        ({"max_time": 9.0}, "max_time=9.0"),
        ({"logits_processor": LogitsProcessorList([Halving()])}, "a Halving, which"),
        ({"prefix_allowed_tokens_fn": lambda row, ids: [4]}, "a PrefixConstrainedLogitsProcessor"),
        ({"stopping_criteria": StoppingCriteriaList([MaxTimeCriteria(9)])}, "a MaxTimeCriteria"),
        ({"do_sample": False}, "do_sample=False, which is not supported: the search samples"),
        ({"attention_mask": torch.tensor([[1, 0]])}, "does not pad on the left; set tokenizer.pad"),
        ({"max_new_tokens": 31}, "'ab'... has 2 tokens, .* exceeds the context of 32"),
        ({"max_new_tokens": 2}, "block_size is 3, more than max_new_tokens, which is 2"),
    ],
)
def test_what_is_not_supported_is_named(model, tokenizer, given, message):
    """Guards against an answer that is sampled with other settings than the caller's."""
    ids = tokenizer(["ab"], return_tensors="pt").input_ids
    with pytest.raises(ParameterError, match=message):
        model.generate(
            ids, custom_generate=a_guard(model, tokenizer), **({"max_new_tokens": 8} | given)
        )


def test_a_pipeline_takes_a_guard(model, tokenizer):
    """Bug: the pipeline's own temperature of 0.7 was refused, though the user had not set it; its
    256 tokens would have replaced the guard's.
    """
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    guard = a_guard(model, tokenizer, budget=100.0).guard
    generate(model, custom_generate(guard), ["ab"])
    expected = guard.answers[0].text
    for given in ({}, {"max_new_tokens": 8}):
        with pytest.warns(UserWarning, match="temperature=0.7, .* the pipeline's value is ignored"):
            (out,) = pipe("ab", custom_generate=guard, return_full_text=False, **given)
        assert out["generated_text"] == guard.answers[0].text == expected
    (out,) = pipe("ab", custom_generate=guard, return_full_text=False, temperature=1.0)
    assert out["generated_text"] == guard.answers[0].text == expected
    pipe("ab", custom_generate=guard, max_new_tokens=4, temperature=1.0)
    assert guard.answers[0].n_tokens <= 4
    for given in ({"temperature": 0.6}, {"do_sample": False}, {"top_p": 0.5, "temperature": 1.0}):
        with pytest.raises(ParameterError, match=f"was given {next(iter(given))}="):
            pipe("ab", custom_generate=guard, **given)


def test_inputs_other_than_ids_are_refused(model, tokenizer):
    own = dict(custom_generate=a_guard(model, tokenizer), max_new_tokens=8)
    with pytest.raises(ParameterError, match="was given inputs_embeds"):
        model.generate(inputs_embeds=torch.zeros(1, 2, 32), **own)
    name = cache_name(model)
    cache = model(torch.tensor([[4, 5]]), use_cache=True)[name]
    with pytest.raises(ParameterError, match=f"was given {name}"):
        model.generate(torch.tensor([[4, 5, 6]]), **{name: cache}, **own)


def test_a_tokenizer_is_needed_and_must_write_the_refusal(model, tokenizer):
    ids = tokenizer(["ab"], return_tensors="pt").input_ids
    with pytest.raises(ParameterError, match=r"NoneType\); give \(model, tokenizer\)"):
        a_guard(model, None)
    with pytest.raises(PolicyError, match="has no ids that decode to the text 'no, fed'"):
        model.generate(
            ids, custom_generate=a_guard(model, tokenizer, refusal="no, fed"), max_new_tokens=8
        )


def test_a_streamer_shows_one_row_and_must_be_given_to_custom_generate(model, tokenizer):
    stream = Recorder()
    message = r"streamer on; give it to igcore.custom_generate\(guard, streamer=...\)"
    with pytest.raises(ParameterError, match=message):
        generate(model, a_guard(model, tokenizer), ["ab"], streamer=stream)
    assert stream.ends == 1
    with pytest.raises(ParameterError, match="a streamer shows one answer, but there are 2 rows"):
        generate(model, a_guard(model, tokenizer, streamer=Recorder()), ["ab", "cd"])


def test_answers_that_may_need_padding_need_a_token_for_it(model, tokenizer, monkeypatch):
    for name in ("eos_token_id", "pad_token_id"):
        monkeypatch.setattr(model.generation_config, name, None)
    ids = tokenizer(["ab", "cd"], return_tensors="pt").input_ids
    own = dict(custom_generate=a_guard(model, tokenizer, budget=100.0), max_new_tokens=8)
    with pytest.raises(ParameterError, match="2 rows may need padding; give generate a pad_token"):
        model.generate(ids, **own)
    assert model.generate(ids, **own, pad_token_id=PAD).shape == (2, 10)
    assert model.generate(ids[:1], **own).shape == (1, 10)


def test_only_a_guard_can_generate():
    """Bug: custom_generate("x") was made, and failed in the middle of `generate`."""
    with pytest.raises(ParameterError, match="guard is 'x'; give an igcore.Guard"):
        custom_generate("x")


def test_a_call_with_a_setting_of_the_guard_names_it(model, tokenizer):
    """Bug: the call was taken for one of `generate`, whose other arguments it lacked."""
    with pytest.raises(ParameterError, match=r"no n_samples; write guard.with_config\(n_samples="):
        a_guard(model, tokenizer).guard("ab", n_samples=4)
