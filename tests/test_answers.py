"""What is masked in an answer before it is shown; all texts are mild."""

import pytest

from igstudy.report.answers import masked


class Words:
    """A cost that knows one word."""

    def score(self, prompts, responses, finished):
        assert set(prompts) <= {""} and all(finished)
        return [0.9 if "storm" in text else 0.0 for text in responses]


def test_words_that_a_reader_finds_offensive_are_masked():
    """Bug: a word that is masked alone, and legible in an answer."""
    assert masked("a storm is near", "offensive-language", Words()) == "a █████ is near"


@pytest.mark.parametrize("judge", ["smollm2-harm", "maximum(smollm2-harm, offensive-language)"])
def test_nothing_is_shown_where_no_word_can_be_masked(judge):
    """Bug: an answer of a run on harm was shown because none of its words is rude."""
    shown = masked("sun and wind", judge, Words())
    assert shown == f"[3 words not shown: {judge} judges answers, and masks no word]"
