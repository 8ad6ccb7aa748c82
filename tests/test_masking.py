"""Masking with a cost made of a table, so that every word's fate is known."""

import math

import numpy as np
import pytest
from mockpolicy import LetterCost

from igcore.models.embedded import OffensiveLanguage
from igcore.watch.html import mask


def table(**costs):
    """Return a cost that knows some words, and is 0 for others."""
    return LetterCost(lambda word: costs.get(word, 0.0))


def test_blocks_keep_length_space_and_punctuation():
    """Bug: masking eats punctuation or white space, so that lines of a figure shift."""
    text = "I  hate Mondays,\n(hate!) don't-hate \thate"
    assert mask(text, table(hate=0.9)) == "I  ████ Mondays,\n(████!) don't-████ \t████"


@pytest.mark.parametrize(
    ("score", "masked"),
    [
        (0.2, False),
        (0.2000001, True),
        (-5.0, False),
        (math.nan, True),
        (math.inf, True),
        (-math.inf, True),
    ],
)
def test_threshold_is_the_highest_readable_cost(score, masked):
    """Bug: the comparison is turned round, or NaN compares as "not above the threshold"."""
    shown = mask("I like Mondays", table(Mondays=score))
    assert shown == ("I like ███████" if masked else "I like Mondays")


def test_threshold_that_is_no_number_masks_all():
    """Bug: a NaN threshold shows everything."""
    assert mask("I like Mondays", table(), threshold=math.nan) == "█ ████ ███████"


def test_each_distinct_word_is_asked_once():
    """Bug: one call per word makes a notebook wait."""
    cost = table()
    mask("so so very very late", cost)
    assert [[word for _, word, _ in call] for call in cost.asked] == [["late", "so", "very"]]


def test_text_without_words():
    """Bug: an empty text or bare punctuation raises."""
    assert mask("", table()) == "" and mask("... \n", table()) == "... \n"


def test_with_the_embedded_cost():
    """Bug: the real cost's array is not understood; "hate" alone scores .905."""
    cost = OffensiveLanguage()
    assert mask("I hate Mondays", cost) == "I ████ Mondays"
    assert mask("I hate Mondays", cost, threshold=np.float64(0.95)) == "I hate Mondays"
