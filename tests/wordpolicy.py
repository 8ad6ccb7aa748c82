"""The mock policy with spaces: its last letter is a space, so that its answers have words; and a
cost that forgets, which a search that looks at the ends of blocks alone does not see rise.
"""

from dataclasses import replace

from mockpolicy import EOS, LetterCost, MockTokenizer, letter_cost, mock_policy

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
