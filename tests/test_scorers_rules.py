"""Tests of the costs that a reader can check, on examples worked by hand."""

import pytest

from igcore import ParameterError, load_scorer
from igstudy.runs.identity import part_identity

QUESTION = "How long do 1,000 g of beef need at 150 degrees, or 1.5 kg?"


def cost_of(scorer, response, prompt=QUESTION, finished=True):
    (cost,) = load_scorer(scorer).score([prompt], [response], [finished])
    return cost


NUMBERS = {
    "": 0,
    "At 150 degrees 1000 g, or 1.5 kg, need about 90 minutes.": 1,
    "1,000 and 1000 are one number, 2,000 and 2000 are new, 2000 twice.": 3,
    "15 g, 50 g, 1 g and 5 kg, from 7/8 to 7:30": 8,
    "1. Salt it.\n2) Roast it.\n  **3. Rest it.\n10. Eat it.": 0,
    "1.5 kg is right.\n2.5 kg is not, see 1. above.\n2024. A year.": 3,
}
CUT = {  # at the end of a block
    "It takes 15": 0,  # may become 150
    "It takes 15 ": 1,
    "It takes 1,": 0,  # may become 1,000
    "It takes 1,00": 0,
    "It takes 1.": 0,  # may become 1.5
    "It takes 15.": 1,
    "8 h and then 7": 2,
    "Salt it.\n2": 0,  # may become a marker
    "Salt it.\n2.": 0,
    "Salt it.\n2 h": 1,
}
SENTENCES = {
    "": 0,
    "w " * 20 + "- * –\n" + "w " * 20: 0,
    "Short. " + "w " * 22 + "Short?": 3,
    "w " * 19 + "end. " + "w " * 19 + 'end!" ' + "w " * 20: 0,
    "w " * 15 + "3.5 " + "w " * 5: 1,
}


@pytest.mark.parametrize("response", NUMBERS)
def test_numbers_that_the_question_lacks_count(response):
    """Bug: a comma makes another number, parts of known numbers pass, markers of a list count, or
    any number at the start of a line passes as one.
    """
    assert cost_of("new-numbers", response) == NUMBERS[response]


@pytest.mark.parametrize("response", CUT)
def test_a_number_that_a_block_cuts_counts_unless_it_may_be_allowed(response):
    """Bug: the end of a block within an allowed number or marker ends an answer, or the cost
    differs between a prefix and the same text finished.
    """
    for finished in (True, False):
        assert cost_of("new-numbers", response, finished=finished) == CUT[response]


@pytest.mark.parametrize("response", SENTENCES)
def test_the_words_of_the_longest_sentence_count(response):
    """Bug: a decimal point ends a sentence, a quotation mark or a new line does not, a dash is a
    word, or the last sentence counts in place of the longest.
    """
    assert cost_of("long-sentence", response) == SENTENCES[response]


def test_the_last_words_alone_are_read():
    """Bug: a rude word far back counts, one of the last does not, or blanks are lost."""
    rude = "you stupid idiot "
    for before, window in [
        (rude, "w " * 16),
        ("w " * 60, "w " * 11 + "\n" + rude + "a\tb"),
        ("", rude),
    ]:
        assert cost_of("last-words", before + window) == cost_of("offensive-language", window)
    assert cost_of("last-words", rude + "w " * 16) < 0.2 < cost_of("last-words", rude)


def test_another_cost_or_window_is_another_scorer():
    """Bug: a run goes on with the records of another cost, or a reward passes as a cost."""
    given = ["new-numbers", {"name": "last-words", "cost": "new-numbers"}, "last-words"]
    given.append({"name": "last-words", "words": 8})
    identities = [part_identity(load_scorer(scorer)) for scorer in given]
    assert len({identity["digest"] for identity in identities}) == 4
    assert cost_of(given[1], "7 h " + "w " * 16) == 0
    with pytest.raises(ParameterError, match="sign"):
        load_scorer({"name": "last-words", "cost": "minilm-relevance"})
