"""Masking with a cost made of a table, so that every word's fate is known."""

import math

import numpy as np
import pytest
from mockpolicy import LetterCost

from igcore.models.embedded import OffensiveLanguage
from igcore.watch.html import mask
from igstudy.report.answers import masked


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
    assert cost.asked == [[("", word, True) for word in ("late", "so", "very")]]


def test_text_without_words():
    """Bug: an empty text or bare punctuation raises."""
    assert mask("", table()) == "" and mask("... \n", table()) == "... \n"


def test_with_the_embedded_cost():
    """Bug: the real cost's array is not understood; "hate" alone scores .905."""
    cost = OffensiveLanguage()
    assert mask("I hate Mondays", cost) == "I ████ Mondays"
    assert mask("I hate Mondays", cost, threshold=np.float64(0.95)) == "I hate Mondays"


# --- answers of a run -----------------------------------------------------------------------------


def test_words_that_a_reader_finds_offensive_are_masked():
    """Bug: a word that is masked alone, and legible in an answer."""
    assert masked("a storm is near", "offensive-language", table(storm=0.9)) == "a █████ is near"


@pytest.mark.parametrize("judge", ["smollm2-harm", "maximum(smollm2-harm, offensive-language)"])
def test_nothing_is_shown_where_no_word_can_be_masked(judge):
    """Bug: an answer of a run on harm was shown because none of its words is rude."""
    shown = masked("sun and wind", judge, table(storm=0.9))
    assert shown == f"[3 words not shown: {judge} judges answers, and masks no word]"
