"""Tests of texts that are encoded from others: they have the tokens that they have as a whole."""

import logging
import random

import pytest
from tiny import Counter, framed, tiny
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from igcore.engine.agreement import supports_shared_prefix
from igcore.models.lm_scorer import Backbone, LMScorer
from igcore.models.texts import SAMPLE, Tokens, shared
from igcore.scorers import COST

WORDS = (
    "the then there tree treat reader ready house built old isn't x_y 1999 Café 天気です".split()
)
SPECIAL = ["<unk>", "<s>", "</s>"]


def trained(model, pre_tokenizer, normalizer=None, trainer=trainers.BpeTrainer, **options):
    tokenizer = Tokenizer(model)
    if pre_tokenizer:
        tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer:
        tokenizer.normalizer = normalizer
    learner = trainer(vocab_size=600, special_tokens=SPECIAL, show_progress=False, **options)
    # one word at a time: no merge crosses a space
    tokenizer.train_from_iterator([f" {word}" for word in WORDS + SAMPLE.split()] * 20, learner)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def byte_level():
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return trained(models.BPE(), split, initial_alphabet=alphabet)


def byte_fallback():
    """As of Llama 2: spaces are letters of the words after them, and a text begins with one."""
    marks = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    model = models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    return framed(trained(model, None, marks), "<s>")


def metaspace():
    normalizer, split = normalizers.NFKC(), pre_tokenizers.Metaspace()
    model = models.Unigram()
    return trained(model, split, normalizer, trainers.UnigramTrainer, unk_token="<unk>")


def word_piece():
    """As of BERT: lower case, and every text ends with a special token."""
    normalizer, split = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    model = models.WordPiece(unk_token="<unk>")
    return framed(trained(model, split, normalizer, trainers.WordPieceTrainer), "<s>", "</s>")


def across_words():
    """Tokens that hold spaces inside: what stands before a space changes the tokens after it."""
    tokenizer = Tokenizer(models.BPE())
    learner = trainers.BpeTrainer(vocab_size=600, show_progress=False)
    tokenizer.train_from_iterator([SAMPLE, "the house, built"] * 20, learner)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="e")


MADE = {make.__name__: make() for make in (byte_level, byte_fallback, metaspace, word_piece)}


def random_text(rng: random.Random) -> str:
    parts = [*WORDS, *SAMPLE.split(" ")]
    parts += [" ", "  ", "\n", "\n\n", "\t", ",", "!", "日本", "👍🏽", "</s>"]
    return "".join(rng.choice(parts) + rng.choice(["", " "]) for _ in range(rng.randrange(12)))


@pytest.mark.parametrize("end_id", [None, 1])
@pytest.mark.parametrize("name", MADE)
def test_tokens_of_a_text_that_was_cut_or_goes_on(name, end_id):
    """Guards against ids that no reader of the whole text would see, and against their places."""
    tokens, rng = Tokens(MADE[name], True, end_id), random.Random(0)
    assert tokens.can_cut
    n_kept = 0
    for _ in range(400):
        begun = random_text(rng)
        one, other = begun + random_text(rng), begun + random_text(rng)
        cut = one[: rng.randrange(len(one) + 1)]
        known, *wholes = tokens.whole([one, cut, other, begun])
        found = tokens.after([cut, other, begun], [(one, known)] * 3)
        for (kept, rest), whole in zip(found, wholes, strict=True):
            assert known.followed(kept, rest) == whole
            n_kept += kept
    assert n_kept > 2000  # most words are not encoded again


def test_a_tokenizer_that_cannot_be_cut_says_so_once(caplog):
    """Guards tokens across spaces: each text is then encoded as a whole."""
    tokens = Tokens(across_words(), True, None)
    texts = [SAMPLE[:n] for n in range(0, len(SAMPLE), 7)]
    (known,) = tokens.whole([SAMPLE])
    with caplog.at_level(logging.WARNING, logger="igcore"):
        for _ in range(2):
            found = tokens.after(texts, [(SAMPLE, known)] * len(texts))
    assert [(0, whole) for whole in tokens.whole(texts)] == found
    (message,) = caplog.messages
    assert message.endswith("cannot cut texts: each one is encoded as a whole, which is slower")


def test_shared_characters():
    assert [shared(*pair) for pair in (("", "a"), ("ab", "abc"), ("abx", "aby"), ("x", "y"))] == [
        0, 2, 2, 0,
    ]  # fmt: skip


def cost_of(tokenizer, **more) -> LMScorer:
    """A cost of moderate weights: those of other tests magnify the rounding of float32."""
    model = tiny("qwen2", vocab_size=700, initializer_range=0.05, max_position_embeddings=256)
    assert supports_shared_prefix(model)  # tried once, before anything is counted
    backbone = Backbone(model, tokenizer, **more)
    return LMScorer("cost", backbone, lambda hidden: hidden.sum(1), COST, "v1")


class Spelled:
    """Counts the characters that a tokenizer encodes."""

    def __init__(self, tokenizer):
        self.tokenizer, self.n = tokenizer, 0

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def __call__(self, texts, **options):
        self.n += sum(map(len, [texts] if isinstance(texts, str) else texts))
        return self.tokenizer(texts, **options)


def test_a_check_encodes_its_last_word():
    """Bug: each check encoded the prompt and the whole prefix again, 80 % of the time of a cost."""
    tokenizer = Spelled(byte_level())
    cost = cost_of(tokenizer)
    prompt, words = "the old house" * 2, " read the tree, reader!" * 2 + " "
    cached = cost.with_cache(cost.open_cache([prompt]))
    opened = tokenizer.n
    answers = [words[:n] for n in range(1, len(words)) if words[n] in " ,!"]
    with Counter(cost.backbone.model) as counter:
        scores = cached.score([prompt] * len(answers), answers, [False] * len(answers))
        read = counter.tokens
    assert tokenizer.n - opened < 3 * len(words) < len(prompt) * len(answers)
    assert read < len(words) and len(set(scores.tolist())) == len(answers)
    fresh = [cost.score([prompt], [answer], [False])[0] for answer in answers]
    assert scores.tolist() == pytest.approx(fresh, rel=0, abs=1e-5)


TAILS = {
    "a turn": lambda prompt, response: f"{prompt} A:{response}</s>",
    "a question": lambda prompt, response: f"{prompt} A:{response}, is it so?",
    "trimmed": lambda prompt, response: f"{prompt} A:\n{response.strip()} B:",
}


@pytest.mark.parametrize("write", TAILS.values(), ids=TAILS)
def test_what_a_check_appends_is_read_from_its_prefix(write):
    """Bug: texts that end with a turn or a question are no prefixes of each other, so every check
    of a candidate was read in a row of its own.
    """
    tokenizer = byte_level()
    cost = cost_of(tokenizer, template=write)
    prompts, words = ["the house", "a tree"], " the tree, the reader isn't ready there "
    answers = [words[:n] for n in range(1, len(words)) if words[n] in " ,"]
    columns = (
        prompts * len(answers),
        [a for a in answers for _ in prompts],
        [False] * 2 * len(answers),
    )
    cached = cost.with_cache(cost.open_cache(prompts))
    with Counter(cost.backbone.model) as counter:
        scores = cached.score(*columns)
        alone = sum(len(cost.backbone.ids(*pair)) for pair in zip(*columns[:2], strict=True))
        assert counter.tokens < alone / 2
    assert scores.tolist() == pytest.approx(cost_alone(cost, columns), rel=0, abs=1e-5)
    # goes on from what was read, behind what was appended there
    more = prompts, [words + "there", words[:9] + " old"], [True] * 2
    assert cached.score(*more).tolist() == pytest.approx(cost_alone(cost, more), rel=0, abs=1e-5)


def cost_alone(cost: LMScorer, columns) -> list[float]:
    """Return the costs of texts, each read by itself."""
    return [cost.score([p], [r], [f])[0] for p, r, f in zip(*columns, strict=True)]
