"""Tests of scores read from a language model: what a session has cached must be what a fresh
reading gives.
"""

import random
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mockpolicy import LetterReward
from tiny import Counter, framed, tiny, tiny_tokenizer
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from igcore import Guard, SearchConfig, decode
from igcore.contract import Contract, Scoring
from igcore.engine.agreement import supports_shared_prefix
from igcore.errors import ScorerWarning
from igcore.models.lm_scorer import Backbone, LMScorer, Session
from igcore.models.templates import TEMPLATES
from igcore.policy import Policy
from igcore.scorers import SIGNS, uncached
from igcore.scoring import checked_score
from igcore.verdict import Emission, judge
from igstudy import templates as templates  # of the paper's systems

END = 256
PROMPTS = ["say-abc", "one-two"]  # of one length: no padding to be counted


def head(seed: int = 0, shift: float = 0.0):
    weights = torch.randn(32, generator=torch.Generator().manual_seed(seed)).double()
    return lambda hidden: hidden.double() @ weights + shift


def scorer(backbone: Backbone, role: str = "cost", seed: int = 0) -> LMScorer:
    return LMScorer(f"lm-{role}", backbone, head(seed), SIGNS[role], digest="v1")


def pairs() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer that has learnt merges: appended letters change the last token of what
    stood there before.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(
        ["the then there these them tree treat read reader ready"] * 20, trainer
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


TOKENIZERS = {"letters": tiny_tokenizer(), "pairs": pairs()}


def backbone_of(
    name: str = "llama", tokenizer: str = "letters", dtype=torch.float64, **more
) -> Backbone:
    return Backbone(tiny(name, dtype, vocab_size=320), TOKENIZERS[tokenizer], **more)


@pytest.fixture(scope="module")
def letters():
    backbone = backbone_of()
    assert supports_shared_prefix(backbone.model)  # tried once, before anything is counted
    return backbone


def assert_as_uncached(session, texts, atol=1e-6):
    """Score (prompt, response, finished) through a session and without one."""
    texts = list(zip(*texts, strict=True))
    alone = scorer(session.backbone)
    assert alone.with_cache(session).score(*texts) == pytest.approx(alone.score(*texts), abs=atol)


def test_growing_texts_cost_their_new_tokens(letters):
    """Guards the point of a session: every token goes through the model once, prompts too, and
    scores are those of whole texts.
    """
    with Counter(letters.model) as counter:
        session = Session(letters, PROMPTS)
        cached, alone = scorer(letters).with_cache(session), []
        for n in (1, 4, 5, 11):
            texts = [(prompt, "hello world"[:n], False) for prompt in PROMPTS]
            alone.append((texts, cached.score(*zip(*texts, strict=True))))
            assert counter.tokens == sum(map(len, PROMPTS)) + 2 * n
    for texts, scores in alone:
        fresh = scorer(letters).score(*zip(*texts, strict=True))
        assert fresh.dtype == np.float64 and scores == pytest.approx(fresh, abs=1e-6)


def test_known_texts_cost_nothing(letters):
    """Guards against reading again: the same text, a part of it, or one that another in the same
    call goes on from.
    """
    with Counter(letters.model) as counter:
        session = Session(letters, PROMPTS)
        cached, prompt = scorer(letters).with_cache(session), PROMPTS[0]
        read = counter.tokens
        for texts, new in (
            (["hello", "hello world", "hello", "hel", ""], 11),
            (["hello world", "hello wor", "", "h"], 0),
            (["hello you", "hellow"], 4),
        ):
            cached.score([prompt] * len(texts), texts, [False] * len(texts))
            read += new
            assert counter.tokens == read


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3", "mistral-window", "gemma2"])
@pytest.mark.parametrize("end_id", [None, END])
def test_whatever_is_asked_in_whatever_order(name, tokenizer, end_id):
    """Guards everything at once: texts grown, cut, ended, gone on from, repeated, retokenised and
    forgotten at random.
    """
    rng = random.Random(0)
    # its softmax is in float32 in any case
    dtype, atol = (torch.float32, 1e-4) if name == "gemma2" else (torch.float64, 1e-6)
    backbone = backbone_of(name, tokenizer, dtype, end_id=end_id)
    session = Session(backbone, ["th", "rea", "read the tree", "t"])
    survivors = [(prompt, "") for prompt in session.prefixes]
    for _ in range(4):
        seen = []
        for _ in range(2):
            grown = [
                (p, r + "".join(rng.choices("ther ad", k=rng.randrange(5))))
                for p, r in rng.choices(survivors, k=4)
            ]
            cut = [(p, r[: rng.randrange(len(r) + 1)]) for p, r in grown]
            texts = [(*text, rng.random() < 0.3) for text in grown + cut]
            assert_as_uncached(session, texts, atol)
            seen += grown
        survivors = rng.sample(seen, 4) + [(rng.choice(list(session.prefixes)), "never read")]
        session.retain(*zip(*survivors, strict=True))
    assert (session.root is None) == (name in ("mistral-window", "gemma2"))


def test_texts_that_change_the_tokens_of_their_prompt():
    """Guards the seam: where prompt and response merge into one token, the text is read as a whole,
    and others are not.
    """
    backbone = backbone_of(tokenizer="pairs")
    session = Session(backbone, ["th", "tre"])
    texts = [("th", "e rest", False), ("th", "at", False), ("tre", "e", True), ("tre", "", False)]
    prompts, responses, _ = zip(*texts, strict=True)
    begins = [session._cached(text) for text in session.texts(prompts, responses)]
    assert not all(begins) and any(begins)
    with Counter(backbone.model) as counter:
        scorer(backbone).with_cache(session).score(*zip(*texts, strict=True))
        assert sum(len(backbone.ids(p, r)) for p, r, _ in texts) > counter.tokens > 0
    assert_as_uncached(session, texts)
    session.retain(["th", "th"], ["e rest", "at"])
    assert_as_uncached(session, [("th", "e rest of it", False), ("th", "at all", True)])


def test_a_prompt_that_shares_no_token_with_its_texts():
    """Guards an empty prefix, from which no row can start, as with a template that puts the
    response first.
    """
    backbone = backbone_of(template=lambda prompt, response: response + prompt)
    session = Session(backbone, PROMPTS)
    assert session.root is None
    assert_as_uncached(session, [(PROMPTS[0], "hello", False), (PROMPTS[1], "", True)])
    session.retain(PROMPTS[:1], ["hello"])
    assert_as_uncached(session, [(PROMPTS[0], "hello you", False)])


def test_an_end_token_is_scored_and_forgotten():
    """Guards models that were trained on whole answers alone: a part is closed for its score, and a
    text that goes on does not see its end.
    """
    backbone = backbone_of(end_id=END)
    session, prompt = Session(backbone, PROMPTS), PROMPTS[0]
    cached = scorer(backbone).with_cache(session)
    with Counter(backbone.model) as counter:
        ended, running = cached.score([prompt] * 2, ["hello"] * 2, [True, False])
        assert counter.tokens == 6
        more = ["hello you", "hel", ""]
        cached.score([prompt] * 3, more, [False] * 3)
        assert counter.tokens == 6 + 5 + 1 + 1  # each text's own letters, and an end after each
    ids = backbone_of().ids(prompt, "hello")  # of a backbone that knows no end token
    plain = head()(backbone.encode([[*ids, END], ids])).tolist()
    assert ended == running == pytest.approx(plain[0], abs=1e-6) and abs(ended - plain[1]) > 0.1
    assert_as_uncached(session, [(prompt, text, False) for text in more])


def test_the_tokenizer_adds_its_special_tokens_or_not():
    """Guards chat templates, which write the first token themselves: two of them would be another
    text.
    """
    tokenizer = framed(tiny_tokenizer(bos_token="<s>"), "<s>")
    model = tiny("llama", vocab_size=320)
    written = {
        special: Backbone(model, tokenizer, special=special).ids("say <s>", "so")
        for special in (True, False)
    }
    assert written[True] == [tokenizer.bos_token_id, *written[False]]
    assert tokenizer.bos_token_id not in written[False]


def test_what_is_retained_is_enough_and_all(letters):
    """Guards memory, which must not grow with the blocks; and kept beams without a score, as
    in a search without a cost.
    """
    session, prompt = Session(letters, PROMPTS), PROMPTS[1]
    cached = scorer(letters).with_cache(session)
    for block in range(5):
        text = "abcdef" * block
        texts = [text + more for more in ("ghijkl", "abcdef", "abczzz")]
        cached.score([prompt] * 3, texts, [False] * 3)
        session.retain([prompt, PROMPTS[0]], [text + "abcdef", "never scored"])
        states = {
            id(known.place[0]): known.place[0]
            for all_known in session.known.values()
            for known in all_known
        }
        n_known = sum(len(known) for known in session.known.values())
        assert n_known == 2 + (2 if block else 1)  # what was never read has nothing to keep
        assert len(states) == 2
        assert sum(rows.slab.hidden.shape[1] for rows in states.values()) <= max(12, len(text) + 6)
        kept = [(prompt, text + "abcdef", False), (PROMPTS[0], "never scored", False)]
        with Counter(letters.model) as counter:
            cached.score(*zip(*kept, strict=True))
            assert counter.tokens == (0 if block else 12)
        assert_as_uncached(session, kept)
    session.retain([], [])
    assert [len(known) for known in session.known.values()] == [1, 1]
    assert_as_uncached(session, [(prompt, "abcdef", False)])


def test_scorers_on_one_backbone_read_once(letters):
    """Guards sharing: the second scorer finds all it asks for, also when it asks for some texts
    only, as a lazy reward does.
    """
    other = backbone_of("gpt2")
    assert supports_shared_prefix(other.model)
    with Counter(letters.model) as counter, Counter(other.model) as others:
        cost, reward = scorer(letters), scorer(letters, "reward", 1)
        shared = Scoring({"cost": Contract(cost), "reward": Contract(reward)}, PROMPTS)
        alone = {"cost": Contract(scorer(other)), "reward": Contract(LetterReward())}
        apart = Scoring(alone, PROMPTS)
        found = [
            session.backbone for s in (shared, apart) for session in s.sessions.caches.values()
        ]
        assert found == [letters, other]
        assert apart.search["reward"].scorer is apart.reported["reward"].scorer  # without a cache
        assert shared.contract.scorer is cost and cost.session is None  # of the final check
        texts = [[PROMPTS[0]] * 3, ["safe", "unsafe", "sad"], [False] * 3]
        costs = shared.search["cost"].score(*texts)
        assert counter.tokens == 14 + 4 + 6 + 3 and others.tokens == 14
        rewards = shared.search["reward"].score(*(part[::2] for part in texts))
        apart.search["cost"].score(*texts)
        assert counter.tokens == 14 + 4 + 6 + 3 and others.tokens == 14 + 13
    assert costs == pytest.approx(cost.score(*texts), abs=1e-6)
    assert rewards == pytest.approx(reward.score(*(part[::2] for part in texts)), abs=1e-6)


def test_models_with_a_head_and_in_half_precision(letters):
    """Guards what a backbone is made of: no logits are computed, and states are float32."""
    model = tiny("llama", vocab_size=320)
    assert Backbone(model, letters.tokenizer).model is model.model
    assert Backbone(model.model, letters.tokenizer).model is model.model
    backbone = backbone_of(dtype=torch.bfloat16)
    assert backbone.encode([[1, 2, 3]]).dtype == torch.float32
    session = Session(backbone, PROMPTS)
    cached = scorer(backbone).with_cache(session)
    assert cached.features(PROMPTS, ["hello"] * 2).dtype == torch.float32
    spread = scorer(backbone).score(PROMPTS * 3, ["a", "b", "c", "d", "e", "f"], [False] * 6).std()
    assert_as_uncached(session, [(p, "hello world", False) for p in PROMPTS], atol=0.1 * spread)


def test_other_prompts_change_nothing(letters):
    """Guards a third party: in bfloat16 a text read beside others gives another number, and no line
    could be confirmed.
    """
    texts = [PROMPTS * 3, ["a", "bcd", "", "efghij", "k", "lm"], [False] * 6]
    for backbone in (
        letters,
        backbone_of(dtype=torch.bfloat16),
        backbone_of("gemma2", dtype=torch.bfloat16),
    ):
        every = scorer(backbone).score(*texts)
        for first, prompt in enumerate(PROMPTS):
            alone = scorer(backbone).score(*[part[first::2] for part in texts])
            assert alone.tolist() == every[first::2].tolist()
            assert set(texts[0][first::2]) == {prompt}


def plain(inner: LMScorer) -> SimpleNamespace:
    """Return a scorer behind a plain object, which no session carries."""
    names = ("name", "digest", "sign", "unit", "score")
    return SimpleNamespace(**{name: getattr(inner, name) for name in names})


CONFIG = SearchConfig(
    budget=1.0, n_samples=6, keep=2, block_size=4, max_new_tokens=12, rounds=3, group_size=2
)


@pytest.fixture(scope="module")
def policy():
    model = tiny("llama", vocab_size=94)  # the first 94 letters are those of ASCII
    return Policy(
        "tiny", model, TOKENIZERS["letters"], digest="tiny", eos_ids=frozenset(range(0, 94, 16))
    )


@pytest.mark.filterwarnings("ignore:.* is over the budget of")
@pytest.mark.parametrize("method", ["inferenceguard", "beam-lagrangian", "best-of-n", "base"])
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("shift", [6.0, 8.0], ids=["retries", "abstains"])
def test_a_search_finds_the_same_with_and_without_sessions(policy, method, tokenizer, shift):
    """Guards the wiring: sessions opened, retained and closed by groups must not change one token
    of an answer.
    """
    backbone = backbone_of(tokenizer=tokenizer, end_id=END)
    cost, reward = replace(scorer(backbone), head=head(shift=shift)), scorer(backbone, "reward", 1)
    found = []
    for wrap in (lambda s: s, plain):
        guard = Guard(policy, cost=wrap(cost), reward=wrap(reward), config=CONFIG)
        found.append(list(decode(method, guard, [*PROMPTS, "three"])))
    if (method, tokenizer) == ("inferenceguard", "letters"):
        assert any(
            out.counts.rounds_used > 3 if shift == 6 else out.status == "abstained"
            for out in found[0]
        )
    for ours, theirs in zip(*found, strict=True):
        for name in ("text", "tokens", "status", "reason", "counts", "block_ends"):
            assert getattr(ours, name) == getattr(theirs, name)
        numbers = [
            [out.cost or 0, out.reward or 0, out.peak_cost or 0, *out.z_trace]
            for out in (ours, theirs)
        ]
        assert numbers[0] == pytest.approx(numbers[1], abs=1e-6)


def test_a_prompt_too_long_for_the_cost_is_unsafe_and_the_others_answer(policy):
    """Bug: the session refused the prompt in the middle of the work, and every answer was lost."""
    model = tiny("llama", torch.float64, vocab_size=320, max_position_embeddings=24)
    backbone = Backbone(model, TOKENIZERS["letters"])
    cost = replace(scorer(backbone), head=head(shift=-8.0))
    config = replace(CONFIG, on_failure="paper", group_size=3)
    with pytest.warns(ScorerWarning, match="which exceeds the scorer's context of 24"):
        guard = Guard(policy, cost, config=config, method="inferenceguard")
        answers = guard.map(["ab", "x" * 30, "cd"])
    statuses = [answer.status for answer in answers]
    assert statuses == ["verified_safe", "unverified_unsafe", "verified_safe"]


@pytest.mark.filterwarnings("ignore:.* is over the budget of")
def test_the_final_check_does_not_believe_a_session(policy, monkeypatch):
    """Guards the final check: what a session carries, right or wrong, decides no emission."""
    backbone = backbone_of()
    cost = replace(scorer(backbone), head=lambda hidden: hidden.abs().sum(1))
    guard = Guard(policy, cost=cost, reward=scorer(backbone, "reward", 1), config=CONFIG)

    def zeros(session, texts, counts):
        return [torch.zeros(count, 32) for count in counts]

    monkeypatch.setattr(Session, "states", zeros)
    with pytest.warns(ScorerWarning, match="'lm-cost' depends on the call: asked in the search"):
        outs = list(decode("inferenceguard", guard, PROMPTS))
    said = [(out.status, out.reason, out.text) for out in outs]
    assert said == [("abstained", "scorer_contract", None)] * 2


def test_the_final_check_reads_nothing_that_was_cached(letters):
    """Guards what is emitted against a cost that is handed over with a session: what it holds must
    not reach the gate.
    """
    session = Session(letters, PROMPTS)
    cached = scorer(letters).with_cache(session)
    text = ["p"], ["a"], [True]
    assert uncached(cached).session is None
    assert uncached(cached).score(*text) == scorer(letters).score(*text)
    assert uncached("any other scorer") == "any other scorer"
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "igcore.verdict.checked_score",
            lambda scorer, *rest: seen.append(scorer) or checked_score(scorer, *rest),
        )
        config = SearchConfig(budget=99.0, n_samples=2, keep=1, block_size=2, max_new_tokens=4)
        model = tiny("llama", torch.float32, vocab_size=320)
        policy = Policy("tiny", model, letters.tokenizer)
        guard = Guard(policy, reward=scorer(letters, "reward"), cost=cached, config=config)
        list(decode("inferenceguard", guard, PROMPTS))
    assert seen and all(checked.session is None for checked in seen)


def chatting(tokenizer):
    """Give a tokenizer a chat template that ends with the answer."""
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    return tokenizer


def begun() -> PreTrainedTokenizerFast:
    """The tokenizer of pairs with a token that begins every text."""
    tokenizer = chatting(pairs())
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    return framed(tokenizer, "<s>")


READERS = {"letters": chatting(tiny_tokenizer()), "pairs": begun()}
# (begin, seam) of the texts "begin how? seam response"
WRITTEN = {
    "raw": ("", ""),
    "chat": ("<user>", "<assistant>"),
    "safe-rlhf": ("BEGINNING OF CONVERSATION: USER: ", " ASSISTANT:"),
    "human-assistant": ("\n\nHuman: ", "\n\nAssistant: "),
    "slots": ("Q: ", " A: "),
}


def unit(hidden):
    """A head of norm one, whose scores are about one."""
    return head()(hidden) / head()(torch.eye(32)).norm()


def reader(text_format: str, tokenizer: str, name: str = "llama", dtype=torch.float32) -> LMScorer:
    """A scorer of moderate weights: those of the other tests magnify the rounding of float32."""
    tokens = READERS[tokenizer]
    model = tiny(name, dtype, vocab_size=320, initializer_range=0.05, max_position_embeddings=256)
    if text_format == "slots":
        write, special = lambda prompt, response: f"Q: {prompt} A: {response}", True
    else:
        template = TEMPLATES[text_format]
        write, special = partial(template.whole, tokens), template.special
    return replace(scorer(Backbone(model, tokens, write, special=special)), head=unit)


@torch.inference_mode()
def prefix_by_prefix(scorer: LMScorer, text_format: str, prompt: str, response: str, since: int):
    """Return the scores of ids[:k], each by a pass of its own, for every k whose last token ends
    after `since` characters of the response, by counting bytes; and the characters begun by there.
    """
    tokenizer = scorer.backbone.tokenizer
    begin, seam = WRITTEN[text_format]
    # this template cuts the spaces in front off, so the first characters are not in its text
    said = response.lstrip(" ") if text_format == "human-assistant" else response
    before = f"{begin}{prompt}{seam}"
    ids = tokenizer(before + said, add_special_tokens=text_format != "chat")["input_ids"]
    sizes = [
        0 if i == tokenizer.bos_token_id else len(tokenizer.convert_ids_to_tokens(i)) for i in ids
    ]
    assert sum(sizes) == len((before + said).encode())
    ids = ids or [tokenizer.eos_token_id]
    left_out = len(before.encode()) + max(
        0, len(response[:since].encode()) - (len(response) - len(said))
    )
    begins = [len((before + said[:i]).encode()) for i in range(len(said))]  # byte of a character
    numbers, ends = [], []
    for k in range(1, len(ids) + 1):
        if sum(sizes[:k]) > left_out or k == len(ids):
            begun = sum(byte < sum(sizes[:k]) for byte in begins)
            ends.append(len(response) - len(said) + begun)
            out = scorer.backbone.model(input_ids=torch.tensor([ids[:k]]), use_cache=False)
            numbers.append(unit(out.last_hidden_state[:, -1]).item())
    return ends, numbers


@pytest.mark.parametrize("tokenizer", READERS)
@pytest.mark.parametrize(
    "name, text_format",
    [(name, text_format) for name in ("llama", "qwen3") for text_format in WRITTEN]
    + [("mistral-window", "raw")],
)
def test_one_pass_scores_every_token(name, text_format, tokenizer):
    """Guards the score after a token: it equals that of the text's first ids, in float32, without a
    cache and with one that grew, was cropped and was evicted; also the ends of the counted tokens.
    """
    plain = reader(text_format, tokenizer, name)
    assert plain.reads_tokens
    rng, prompts = random.Random(1), ["th", "re", "so é", ""]  # the last is of another group
    session = plain.open_cache(prompts[:3])
    assert (session.root is None) == (name == "mistral-window")
    cached, responses, spread = plain.with_cache(session), ["", " ", "", ""], []
    for _ in range(4):
        since = [rng.choice((0, rng.randrange(len(r) + 1))) for r in responses]
        added = ["".join(rng.choices("there ad é日", k=rng.randrange(7))) for _ in prompts]
        responses = [r + more for r, more in zip(responses, added, strict=True)]
        texts = list(zip(prompts, responses, since, strict=True))
        expected = [prefix_by_prefix(plain, text_format, *text) for text in texts]
        whole = plain.score(prompts, responses, [False] * 4)
        for one in (cached, plain):
            found = one.token_scores(prompts, responses, since)
            for pair, known, last, text in zip(found, expected, whole, texts, strict=True):
                (ends, numbers), (places, slow) = pair, known
                assert ends == places == sorted(ends) and ends[-1] == len(text[1]), text
                assert numbers.dtype == np.float64
                assert numbers.tolist() == pytest.approx(slow, rel=0, abs=1e-6), text
                assert numbers[-1] == pytest.approx(last, rel=0, abs=1e-6)
        spread += [np.std(slow) for _, slow in expected if len(slow) > 2]
        session.retain(prompts, responses)
    assert min(spread) > 0.1


def test_tokens_cost_no_second_reading():
    """Guards the point of one pass: after `score` nothing is left to encode, and a longer text
    costs its new tokens.
    """
    plain = reader("raw", "letters")
    assert supports_shared_prefix(plain.backbone.model)
    with Counter(plain.backbone.model) as counter:
        cached = plain.with_cache(plain.open_cache(PROMPTS))
        cached.score(PROMPTS, ["hello"] * 2, [False] * 2)
        read = counter.tokens
        found = cached.token_scores(PROMPTS, ["hello", "hel"], [0, 0])
        assert [len(numbers) for _, numbers in found] == [5, 3] and counter.tokens == read
        found = cached.token_scores(PROMPTS, ["hello world", "help"], [5, 3])
        assert [len(numbers) for _, numbers in found] == [6, 1] and counter.tokens == read + 7
        assert [ends for ends, _ in found] == [[6, 7, 8, 9, 10, 11], [4]]


def counts(scorer: LMScorer, prompt: str, response: str) -> list[int]:
    """Return the number of counted tokens after each number of characters of a response."""
    places = range(len(response) + 1)
    found = [scorer.token_scores([prompt], [response], [since])[0] for since in places]
    assert all(len(ends) == len(scores) and ends[-1] == len(response) for ends, scores in found)
    assert all(ends == sorted(ends) for ends, _ in found)
    return [len(scores) for _, scores in found]


def test_a_response_that_is_changed_is_read_whole():
    """Guards `since`, which counts characters of the response: broken up or cut by a template, it
    has others, and no token may be missed.
    """
    plain = reader("raw", "letters")
    assert counts(plain, "so", "ab</s>c") == [8] * 8  # read as ab< /s>c
    assert counts(plain, "so</s>", "abc") == [3, 2, 1, 1]
    trimmed = reader("human-assistant", "letters")
    assert counts(trimmed, "so", " abc") == [3, 3, 2, 1, 1]  # the space is of the template
    assert counts(trimmed, "so", "  abc") == [3, 3, 3, 2, 1, 1]
    assert counts(trimmed, "so", "  ") == [1] * 3
    cut = reader("slots", "letters")
    cut.backbone.template = lambda prompt, response: f"{prompt}: {response.split('!')[0]}"
    assert cut.reads_tokens and counts(cut, "so", "abc!de")[:6] == [3] * 6


def test_tokens_whose_places_leave_spaces_out():
    """Guards tokenizers that name no place for a space: no token of it may be missed."""
    tokenizer = pairs()
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    plain = reader("raw", "pairs")
    plain.backbone.tokenizer = tokenizer
    assert tokenizer.tokenize("the  the") == ["the", "Ġ", "Ġthe"]
    assert counts(plain, "so ", "the  the") == [3, 3, 3, 2, 1, 1, 1, 1, 1]
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace(Regex(" +$"), "")
    assert counts(plain, "so", "  ") == [1, 1, 1]  # of no token, as an empty response


class Slow:
    """A tokenizer without the positions of its tokens."""

    is_fast = False
    all_special_tokens, added_tokens_decoder = [], {}

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [ord(letter) % 97 for letter in text]}


@pytest.mark.parametrize(
    "tokenizer, more",
    [
        (TOKENIZERS["letters"], dict(end_id=END)),
        (TOKENIZERS["letters"], dict(template=lambda prompt, response: f"{prompt}{response}.")),
        (TOKENIZERS["letters"], dict(template=lambda prompt, response: response + prompt)),
        (TOKENIZERS["letters"], dict(template=lambda prompt, response: prompt + response.strip())),
        (framed(tiny_tokenizer(), end="</s>"), {}),
        (Slow(), {}),
    ],
    ids=["end", "closed", "before", "trimmed", "closing", "slow"],
)
def test_who_reads_no_tokens(tokenizer, more):
    """Guards against scores of something else than a prefix of the response: the text goes on after
    its tokens, or their positions are unknown.
    """
    plain = scorer(Backbone(tiny("llama", vocab_size=320), tokenizer, **more))
    assert not plain.reads_tokens


def test_a_verdict_hears_every_token_of_a_character():
    """Bug: of the tokens that end at one character the verdict took the last, so that a higher
    cost before it was passed over.
    """
    plain = reader("raw", "letters")
    config = SearchConfig(budget=99.0, checks="token")
    for text in ("日本語", "ab</s>日"):  # of the second it is not known where its tokens end
        ((ends, scores),) = plain.token_scores(["so"], [text], [0])
        assert len(set(ends)) < len(ends)
        emission = Emission(text, ends=[len(text)], grid=[len(text)], n_tokens=len(scores))
        (worst,) = judge(Contract(plain), "so", emission, config).worst
        assert worst == pytest.approx(max(scores), abs=1e-9) and worst > scores[-1]
