"""A mock policy over the letters a-f whose every probability is a function of the prefix; scorers
and a critic that read letters.

The model keeps the token ids themselves as its keys, so that its logits depend on the whole carried
state: a cache that is rolled back, selected or padded wrongly changes what it says.
"""

import hashlib
import math
from dataclasses import replace
from types import SimpleNamespace

import torch
from transformers import LlamaConfig

from igcore.contract import TEXTS
from igcore.policy import Policy

EOS = 0
LETTERS = "|abcdef"  # token 0 ends a response


def logits_of(prefix: tuple[int, ...]) -> list[float]:
    """Return seven logits in [-1.5, 1.5], fixed by the prefix alone; the end token is rarer."""
    raw = hashlib.sha256(repr(prefix).encode()).digest()[: len(LETTERS)]
    return [3 * b / 255 - 1.5 - (1.5 if token == EOS else 0) for token, b in enumerate(raw)]


def probabilities(prefix: tuple[int, ...]) -> list[float]:
    """Return softmax(logits) by plain arithmetic, independent of torch."""
    weights = [math.exp(x) for x in logits_of(prefix)]
    return [w / sum(weights) for w in weights]


class MockModel(torch.nn.Module):
    """Speaks the part of transformers that the engine uses."""

    device, dtype = torch.device("cpu"), torch.float32
    config = LlamaConfig(
        hidden_size=4, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1,
        vocab_size=7, max_position_embeddings=64,
    )  # fmt: skip

    def __init__(self, logits=logits_of):
        super().__init__()
        self.logits, self.head = logits, torch.nn.Identity()
        self.forwarded = []  # a list, which views of the model share

    @property
    def tokens_forwarded(self):
        return sum(self.forwarded)

    def get_output_embeddings(self):
        return self.head

    def forward(
        self,
        input_ids,
        attention_mask,
        position_ids,
        logits_to_keep,
        use_cache,
        past_key_values=None,
    ):
        keys = input_ids[:, None, :, None].float()  # (R, 1, S, 1)
        if use_cache:
            keys, _ = past_key_values.update(keys, keys, 0)
        self.forwarded.append(int(attention_mask[:, -input_ids.shape[1] :].sum()))
        rows = []
        ids = keys[:, 0, :, 0].long().tolist()
        for row, mask in zip(ids, attention_mask.tolist(), strict=True):
            read = [t for t, m in zip(row, mask, strict=True) if m]
            ends = range(1, len(read) + 1) if logits_to_keep == 0 else [len(read)]
            rows.append([self.logits(tuple(read[:end])) for end in ends])
        return SimpleNamespace(
            logits=self.head(torch.tensor(rows)), past_key_values=past_key_values
        )


class MockTokenizer:
    """One letter, one token."""

    all_special_tokens = ["|"]

    added_tokens_decoder = {}

    def __call__(self, text, add_special_tokens=True):
        # any text has ids, as with a real tokenizer: other characters read as the last letter
        return {"input_ids": [LETTERS.find(c) % len(LETTERS) for c in text]}

    def decode(self, tokens, skip_special_tokens, clean_up_tokenization_spaces):
        return "".join(LETTERS[t] for t in tokens if t != EOS)


def mock_policy(logits=logits_of) -> Policy:
    return Policy(
        "mock", MockModel(logits), MockTokenizer(), digest="mock", eos_ids=frozenset({EOS})
    )


def some_number(*of) -> float:
    """Return a number in [0, 1) with two digits, fixed by what it is given: enough of them to
    differ, and few enough to tie.
    """
    return int.from_bytes(hashlib.sha256(repr(of).encode()).digest()[:4]) % 100 / 100


def letter_f1(text: str, z: float) -> float:
    return some_number("f1", text, z)


def letter_f2(text: str, z: float) -> float:
    return some_number("f2", text, z) - 0.5


class LetterCritic:
    """A critic that reads the letters so far in the carried keys, which are the token ids.

    Attributes
    ----------
    asked : list of (str, float)
        The letters and z of all candidates that it was asked about.
    """

    watch, reads_keys = None, True

    def __init__(self, f1=letter_f1, f2=letter_f2):
        self.f1, self.f2, self.asked = f1, f2, []

    def judge(self, history, z):
        rows = history.keys[0][:, 0, :, 0].long().tolist()
        texts = ["".join(LETTERS[token] for token in row) for row in rows]
        self.asked += zip(texts, z, strict=True)
        return tuple(
            torch.tensor([f(*x) for x in zip(texts, z, strict=True)], dtype=torch.float64)
            for f in (self.f1, self.f2)
        )


def letter_cost(text: str) -> float:
    return text.count("a") + text.count("b") + 0.5 * text.count("c")


def letter_reward(text: str) -> float:
    return text.count("e") - text.count("d") / 3 + len(text) / 100


class LetterCost:
    """Cost: the number of the letters a and b, plus half a point for every c; higher is worse.

    Another function of the text may take its place, and another name, digest, sign or unit.

    Attributes
    ----------
    asked : list of lists of (str, str, bool)
        The (prompt, response, finished) of each call.
    """

    name, digest, sign, unit = "letters", "v1", "higher is worse", "letters"

    def __init__(self, of=letter_cost, **about):
        self.of, self.asked = of, []
        vars(self).update(about)

    def score(self, prompts, responses, finished):
        self.asked.append(list(zip(prompts, responses, finished, strict=True)))
        return [self.of(r) for r in responses]

    @property
    def texts(self):
        """How many texts were scored."""
        return len(self.read)

    @property
    def read(self):
        """The responses that were scored."""
        return [response for call in self.asked for _, response, _ in call]


class Answering(LetterCost):
    """Cost: whatever a function makes of a call (prompts, responses, finished)."""

    def score(self, *call):
        self.asked.append(list(zip(*call, strict=True)))
        return self.of(*call)


def noise(text: str) -> float:
    """Return a cost like no other: a number in [0, 1), as if at random."""
    return int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) / 16**8


def outcome(response) -> dict:
    """Return all of a response but its seconds and what it came from."""
    fields = {name: value for name, value in vars(response).items() if not name.endswith("_s")}
    return {name: fields[name] for name in fields if name not in ("guard", "candidates")}


def unread(text):
    """A reward that is a number for the examined texts alone."""
    return 0.0 if text in TEXTS[1:] else math.nan


class LetterReward(LetterCost):
    """Reward: the number of e, minus a third for every d, plus the length in hundredths; higher is
    better. Another function of the text may take its place.
    """

    name, digest, sign, unit = "vowels", "v1", "higher is better", "letters"

    def __init__(self, of=letter_reward, **about):
        super().__init__(of, **about)


# --- the mock policy with spaces ------------------------------------------------------------------


WORDS = "|abcde "


class WordTokenizer(MockTokenizer):
    """One character, one token."""

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [WORDS.index(c) for c in text]}

    def decode(self, tokens, skip_special_tokens, clean_up_tokenization_spaces):
        return "".join(WORDS[t] for t in tokens if t != EOS)


def word_policy():
    return replace(mock_policy(), tokenizer=WordTokenizer())


def last_word_cost(text: str) -> float:
    """Return the cost of the last word, so that a new word makes up for the one before."""
    return letter_cost(text.split()[-1]) if text.split() else 0.0


class LastWordCost(LetterCost):
    """Cost: that of the last word; higher is worse."""

    name, digest = "last-word", "w1"

    def __init__(self, of=last_word_cost):
        super().__init__(of)


def slow_checks(text: str) -> list[int]:
    """Return where a text of these letters is checked at its words, the whole text last."""
    inside = [i for i in range(1, len(text)) if text[i] == " " != text[i - 1]]
    return [*inside, len(text)]


def slow_worst(text: str) -> float:
    """Return the highest cost at the checks of a text."""
    return max(last_word_cost(text[:end]) for end in slow_checks(text))
