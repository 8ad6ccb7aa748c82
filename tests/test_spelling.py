"""Tests that returned ids and streams are the scored text, whatever bytes the policy writes."""

import random
from collections import Counter
from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace

import pytest
import torch
from mockpolicy import LetterCost, noise
from tiny import tiny
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast, TextIteratorStreamer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from igcore import Guard, PolicyError, SearchConfig, custom_generate
from igcore.beams import Beam
from igcore.budget import start
from igcore.contract import Contract
from igcore.models.templates import CHAT
from igcore.policy import Policy
from igcore.prompt import as_prompt
from igcore.streaming import Shown
from igcore.template import RAW
from igserve.generate import ExactPolicy, _Streamed
from igstudy.templates import SAFE_RLHF, VICUNA_1_1

SPECIALS = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{value:02X}>" for value in range(256)]
# with the space of sentencepiece, and the character that stands for wrong bytes
WORDS = ["▁", "▁a", "a", "b", "é", "雨", "▁☂", ".", "\ufffd"]
RAIN = " a雨b é☂"


def _sentencepiece(prepended: str, *decoding):
    """Return a tokenizer with byte pieces; `decoding` follows after the bytes are read."""
    pieces = {piece: i for i, piece in enumerate([*SPECIALS, *BYTES, *WORDS])}
    made = Tokenizer(models.BPE(pieces, [], byte_fallback=True, unk_token="<unk>"))
    space = normalizers.Replace(" ", "▁")
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), space] if prepended else [space]
    )
    made.decoder = decoders.Sequence([*decoding])
    return _wrapped(made)


def llama_2():
    """Encoding adds a space at the beginning, and decoding takes one away."""
    return _sentencepiece(
        "▁",
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    )


def gemma():
    return _sentencepiece("", decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse())


def metaspace():
    """Spaces are read after the bytes, so that bytes may write a space as well."""
    return _sentencepiece("▁", decoders.ByteFallback(), decoders.Metaspace())


def gpt_2(add_prefix_space=False):
    """A byte-level tokenizer; many of its tokens begin or end inside a character."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space, use_regex=False)
    ((rain, _),) = pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str(RAIN)
    parts = {rain[i:j] for i, j in combinations(range(len(rain) + 1), 2) if j - i <= 4}
    pieces = [*SPECIALS, *sorted({*pre_tokenizers.ByteLevel.alphabet(), *parts})]
    made.model = models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>")
    made.decoder = decoders.ByteLevel()
    return _wrapped(made)


def gpt_2_with_a_space():
    return gpt_2(add_prefix_space=True)


def _wrapped(made):
    return PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


KINDS = {make.__name__: make for make in (llama_2, gemma, metaspace, gpt_2, gpt_2_with_a_space)}


def favourites(tokenizer) -> list[int]:
    """Return tokens after which decoders go wrong: spaces, lines, specials, parts of characters."""
    rain = tokenizer(RAIN + "\n", add_special_tokens=False)["input_ids"]
    return sorted({*rain, *tokenizer.convert_tokens_to_ids(["<s>", "</s>"])})


def writer(tokenizer):
    """Return a random model that writes any token, and the favourites more often."""
    eos = tokenizer.eos_token_id
    sizes = {"vocab_size": len(tokenizer), "num_hidden_layers": 1}
    model = tiny("phi", **sizes, eos_token_id=eos, pad_token_id=eos)
    with torch.no_grad():
        model.lm_head.bias[favourites(tokenizer)] += 2.5
    return model


ANSWERS = 30  # of each kind of tokenizer
BUDGET = 0.6
SETTINGS = dict(budget=BUDGET, block_size=2, max_new_tokens=12, refusal=" a b")
BEAMS = dict(method="inferenceguard", n_samples=3, rounds=1)


class Watched(TextIteratorStreamer):
    """A streamer of transformers that keeps the ids that it is given."""

    def __init__(self, tokenizer):
        super().__init__(tokenizer, skip_prompt=True, timeout=60, skip_special_tokens=True)
        self.puts = []

    def put(self, value):
        self.puts.append(value.flatten().tolist())
        super().put(value)


def differing(kind: str, answers: int) -> tuple[list, Counter]:
    """Return where one answer's scored, decoded and streamed texts differ, and what was met.

    Parameters
    ----------
    kind : str
        A key of `bytetokenizers.KINDS`.
    answers : int
        How many answers are asked for; every second may abstain.
    """
    tokenizer = KINDS[kind]()
    model, wrong, met = writer(tokenizer), [], Counter()
    prompt = tokenizer("a b", return_tensors="pt", return_token_type_ids=False)
    n = prompt.input_ids.shape[1]
    for seed in range(answers):
        cost, stream = LetterCost(noise), Watched(tokenizer)
        failing = "truncate" if seed % 2 else "abstain"
        own = BEAMS | {"keep": 1 + seed % 3} if seed % 3 < 2 else {"keep_shown": True}
        guard = Guard((model, tokenizer), cost, on_failure=failing, **own, **SETTINGS)
        out = model.generate(
            **prompt, custom_generate=custom_generate(guard, stream), max_new_tokens=12, seed=seed
        )
        new, (answer,) = out[0, n:].tolist(), guard.answers
        decoded, shown = tokenizer.decode(new, skip_special_tokens=True), "".join(stream)
        text, early = answer.text or "", stream.puts[1:]
        ids, prefixes = [], []
        for part in early:
            ids = ids + part
            prefixes.append(tokenizer.decode(ids, skip_special_tokens=True))
        # a stream that began before an abstention ends where it is
        abandoned = answer.status == "abstained" and bool(ids) and ids != new
        scored = {read for call in cost.asked for _, read, _ in call}
        certified = all(prefix in scored and noise(prefix) <= BUDGET for prefix in prefixes)
        faithful = shown == (prefixes[-1] if abandoned else text) and (abandoned or ids == new)
        if not (decoded == text and faithful and certified and text in scored | {""}):
            wrong.append((seed, answer.status, text, decoded, shown))
        sampled = tokenizer.decode(answer.tokens, skip_special_tokens=True)
        met["respelled"] += bool(answer.tokens) and sampled != text
        met["in parts"] += len(early) > 1
        met["with lines"] += any("\n" in prefix[:-1] for prefix in prefixes[:-1])
        met[answer.status] += 1
        met[answer.reason] += 1
    return wrong, met


@pytest.mark.parametrize("kind", KINDS)
def test_scored_returned_and_streamed_texts_are_one(kind):
    """Bug: in most answers of a random model with byte pieces the decoder of the user made other
    text of the returned ids than the text that was scored, and streamers showed that.
    """
    wrong, met = differing(kind, ANSWERS)
    assert wrong == []
    # without repair many answers would differ, and most are shown in several parts
    assert met["respelled"] > ANSWERS / 5 and met["in parts"] > ANSWERS / 2
    assert met["verified_safe"] and met["abstained"] and met["truncated"]


def drawn(tokenizer, n=400):
    """Return random token lists, half of their tokens favourites."""
    rng, liked = random.Random(0), favourites(tokenizer)
    known = range(len(tokenizer))
    return [[rng.choice(rng.choice([known, liked])) for _ in range(12)] for _ in range(n)]


def slow_text(tokenizer, tokens):
    """Return the text of tokens by Python's own decoder of their bytes."""
    alphabet = {c: value for value, c in bytes_to_unicode().items()}
    written = b""
    for piece in tokenizer.convert_ids_to_tokens(tokens):
        if piece in BYTES:
            written += bytes([BYTES.index(piece)])
        elif piece not in SPECIALS and BYTES[0] in tokenizer.get_vocab():
            written += piece.replace("▁", " ").encode()
        elif piece not in SPECIALS:
            written += bytes(alphabet[c] for c in piece)
    return written.decode("utf-8", errors="replace").rstrip("\ufffd")


@pytest.mark.parametrize("kind", ["llama_2", "gemma", "gpt_2"])
def test_the_text_is_what_the_bytes_say(kind):
    """Guards the scored text: each part that is no character is one U+FFFD, and the characters
    beside it stay.
    """
    tokenizer = KINDS[kind]()
    policy, wrong = Policy(kind, None, tokenizer), 0
    for tokens in drawn(tokenizer):
        expected = slow_text(tokenizer, tokens)
        wrong += "\ufffd" in expected
        assert policy.text(tokens) == expected, tokens
        stripped = expected.removeprefix(" ") if kind == "llama_2" else expected
        assert replace(policy, template=CHAT).text(tokens) == stripped, tokens
    assert wrong > 100


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_and_answer_are_the_text_of_all_tokens(kind):
    """Bug: scorers of pairs read "I amfine", since the decoder of Llama 2 takes the first space."""
    tokenizer, spaced = KINDS[kind](), 0
    policy = Policy(kind, None, tokenizer)
    for prompt in ("b a", "a☂", "é.", "a b\n"):
        ids = tokenizer(prompt)["input_ids"]
        before = tokenizer.decode(ids, skip_special_tokens=True)
        for tokens in drawn(tokenizer, 60):
            text = policy.text(tokens)
            whole = replace(policy, template=CHAT).text([*ids, *tokens])
            for template in (RAW, SAFE_RLHF):
                asked = template.opening(tokenizer, before)
                assert template.whole(tokenizer, before, text) == asked + text
            assert before + text == whole, (prompt, tokens)
            spaced += text.startswith(" ")
        assert policy.text([]) == ""
    assert spaced >= 4
    assert replace(policy, template=VICUNA_1_1).text(ids) == before


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_settled_stays_and_what_is_spelled_decodes_to_the_text(kind):
    """Guards the stream: ids that were shown are the beginning of those that are returned."""
    tokenizer = KINDS[kind]()
    eos = tokenizer.eos_token_id
    policy, changed = ExactPolicy(kind, None, tokenizer, eos_ids=frozenset({eos})), 0
    for tokens in drawn(tokenizer, 60):
        spelled = policy.exact_ids(tokens)
        changed += spelled != tokens
        for k in range(len(tokens) + 1):
            part = policy.stable_ids(tokens[:k])
            assert spelled[: len(part)] == part, (tokens, k)
            assert policy.decoded(policy.exact_ids(tokens[:k])) == policy.text(tokens[:k])
            assert policy.exact_ids([*tokens[:k], eos])[-1] == eos
            assert policy.text(tokens).startswith(policy.text(tokens[:k]))
    assert changed > 20


@pytest.mark.parametrize("make", [llama_2, gpt_2])
def test_whole_characters_keep_their_tokens(make):
    """Guards sampled tokens against needless change: they are replayed and priced."""
    tokenizer = make()
    policy = ExactPolicy("whole", None, tokenizer, eos_ids=frozenset({tokenizer.eos_token_id}))
    a, rain = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("a b", "☂ 雨é"))
    bos, eos = tokenizer.convert_tokens_to_ids(["<s>", "</s>"])
    for tokens in ([], [eos], a, rain, [*a, bos, *rain, eos], [bos, bos, *rain]):
        assert policy.exact_ids(tokens) == policy.stable_ids(tokens) == tokens


def test_a_line_is_shown_with_what_follows():
    """Bug: transformers' streamer decodes afresh after a line, and the decoder of Llama 2 then took
    the first space of the next one.
    """
    tokenizer = llama_2()
    policy, stream = ExactPolicy("lines", None, tokenizer), Watched(tokenizer)
    config = SearchConfig(**SETTINGS)
    tokens = tokenizer.convert_tokens_to_ids(["a", "<0x0A>", "▁a", "b"])
    free = SimpleNamespace(name="free", score=lambda prompts, texts, finished: [0.0] * len(texts))
    guard = SimpleNamespace(policy=policy, config=config, contracts={"cost": Contract(free)})
    guard.method = "backtracking"
    shown = _Streamed(stream, Shown(guard))
    stream.put(torch.tensor([tokens]))  # the prompt
    for end in (2, 3):
        shown.block(as_prompt("a"), [Beam(tokens[:end], "", False, start(BUDGET), [end], 0)])
    shown.show(policy.exact_ids(tokens))
    stream.end()
    assert stream.puts[1:] == [tokens[:3], tokens[3:]]
    assert "".join(stream) == policy.text(tokens) == "a\n ab"


@pytest.fixture
def half():
    """A policy whose tokenizer lacks single bytes, and a token of "b ", half an é behind it."""
    tokenizer = gpt_2()
    (token,) = (i for piece, i in tokenizer.get_vocab().items() if piece == "bĠÃ")
    eos = frozenset({tokenizer.eos_token_id})
    known = tokenizer.convert_tokens_to_ids
    tokenizer.convert_tokens_to_ids = lambda piece: (
        known(piece) if isinstance(piece, str) else [None for _ in piece]
    )
    return ExactPolicy("half", writer(gpt_2()), tokenizer, eos_ids=eos), token


def test_a_text_is_encoded_again_where_there_are_no_bytes_for_a_token(half):
    policy, token = half
    letters = policy.tokenizer("ab ", add_special_tokens=False)["input_ids"]
    tokens, eos = [letters[0], token], policy.tokenizer.eos_token_id
    assert policy.text(tokens) == "ab " and policy.stable_ids(tokens) == letters[:1]
    assert policy.exact_ids([*tokens, eos]) == [*letters, eos]


def test_an_answer_without_fitting_ids_is_not_returned(half, monkeypatch):
    """Guards against ids whose text nobody scored: better none at all."""
    policy, token = half
    # letter by letter: encoded again, this would be an end token
    marked = [policy.tokenizer(letter)["input_ids"][0] for letter in "</s>"]
    tokens = [*marked, token]
    assert policy.text(tokens) == "</s>b "
    message = "of half has no ids that decode to the text '</s>b '"
    with pytest.raises(PolicyError, match=message):
        policy.exact_ids(tokens)

    exact_ids = policy.exact_ids  # of these tokens, whatever was sampled
    monkeypatch.setattr(ExactPolicy, "exact_ids", lambda made, sampled: exact_ids(tokens))
    guard = Guard(policy, LetterCost(noise), keep_shown=True, **SETTINGS | {"budget": 1.0})
    stream = Watched(policy.tokenizer)
    guard.answers.append("of the call before")
    with pytest.raises(PolicyError, match=message):
        policy.model.generate(
            torch.tensor([marked]), custom_generate=custom_generate(guard, stream), max_new_tokens=9
        )
    assert guard.answers == [] and policy.text(marked) not in list(stream)
