r"""Rules as costs that a reader can check by eye; higher is worse, and 0 where a rule is kept.

Each public function returns a cost for a guard::

    import igcore as ig

    guard = ig.Guard("smollm2-chat", cost=ig.rules.without_words(["Acme"]), budget=0)

Several rules are a list of costs, which is their maximum. A params file writes hyphens, as in
``cost: {name: without-words, words: [Acme]}``.

A text is read as it is, finished or not: a block that ends in ``Acme`` breaks the rule, also
where ``Acmeist`` might have come of it, because a stream may show that block and then end. Numbers
alone are read otherwise, see `without_new_numbers`.
"""

import unicodedata
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import regex  # type: ignore[import-untyped]

from .errors import ParameterError, shown, unknown_name
from .files import digest_of
from .scorers import COST, FunctionScorer
from .scoring import word_ends

INVISIBLE = regex.compile(r"\p{Default_Ignorable_Code_Point}")  # soft hyphens, zero-width joiners
# scripts that put no space between words; Complex_Context has Thai
UNSPACED = r"[\p{scx=Han}\p{scx=Hiragana}\p{scx=Katakana}\p{Line_Break=Complex_Context}]"
EDGE = rf"(?:(?<!(?!{UNSPACED})\w)|(?!(?!{UNSPACED})\w))"  # not between two characters of a word
NUMBER = regex.compile(r"\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?")
# such as "1." or "2)" at the start of a line
MARKER = regex.compile(r"^[ \t#*]*\d{1,2}[.)](?=\s|\Z)", regex.MULTILINE)
# a mark at the end of a word, as no mark within 3.5 is; a full stop of Chinese; a line break
SENTENCE_END = regex.compile(r"[.!?…؟।]+[\p{Pe}\p{Pf}\"'*_]*(?=\s|\Z)|[。！？｡\r\n]")


def rule(
    name: str, unit: str, count: Callable[..., float], *settings: Any, reads: str = "response"
) -> FunctionScorer:
    """Return the cost `count`, which takes its settings, and then by name what it reads."""
    digest = digest_of([name, 1, *settings])  # another number where a text costs something else
    takes = {text: text for text in reads.split()}
    return FunctionScorer(partial(count, *settings), name, COST, takes, unit=unit, digest=digest)


# a setting that has to be given has a default that is refused in a sentence, as in a params file
def refuse(name: str, value: object, why: str) -> NoReturn:
    """Raise the error for a setting of a rule."""
    raise ParameterError(f"{name} is {shown(value)}; {why}")


# --- numbers --------------------------------------------------------------------------------------


def without_new_numbers() -> FunctionScorer:
    """Return the cost: how many numbers of a response are not in its prompt.

    A number is written in decimal digits, of any script. A point between digits belongs to it, and
    so does a comma before each three digits: "1,000" is 1000, and "3.5" is one number. "1/2",
    "7:30", "1,5" and "H2O" hold each run of their digits by itself. Two numbers are the same if
    their digits are, so 3.50 is not 3.5. "½", "m²" and "①" hold the digits 1, 2 and so on. Signs
    and units do not count, nor do numbers in words, such as twelve, and Roman ones, nor the markers
    of a list: one or two digits with a point or bracket at the start of a line, "1." or "2)".

    An unfinished text costs what its cheapest continuation does: "1" passes where the prompt has
    12. A finished one is read as it is, and "1" costs 1, so no answer ends there. A stream that
    ends in an abstention may.
    """
    reads = "prompt response finished"
    return rule("without-new-numbers", "new numbers", count_new_numbers, reads=reads)


def count_new_numbers(prompt: str, response: str, finished: bool) -> int:
    """Return how many numbers of a response are not in its prompt, see `without_new_numbers`."""
    known, text = {*numbers_in(prompt)}, in_digits(response)
    endings = {""}
    if not finished:  # the point of a marker, and the rest of a group or of a number that is known
        forms = known | {grouped(number) for number in known}
        begun = [(form, n) for form in forms for n in range(1, len(form))]
        endings |= {".", "0", "00"} | {form[n:] for form, n in begun if text.endswith(form[:n])}
    return min(sum(n not in known for n in numbers_in(text + ending)) for ending in endings)


def numbers_in(text: str) -> list[str]:
    """Return the numbers of a text without their commas; markers of a list are left out."""
    found = NUMBER.findall(MARKER.sub("", in_digits(text)))
    return [number.replace(",", "") for number in found]


def in_digits(text: str) -> str:
    """Return a text with its digits as 0 to 9."""
    apart = regex.sub(r"\p{No}", r" \g<0> ", text)  # 1½ is 1, 1 and 2, and not 11 and 2
    plain = unicodedata.normalize("NFKC", INVISIBLE.sub("", apart))
    return "".join(str(unicodedata.decimal(c)) if c.isdecimal() else c for c in plain)


def grouped(number: str) -> str:
    """Return a number with a comma before each three digits."""
    whole, point, rest = number.partition(".")
    return "".join([regex.sub(r"(?<=\d)(?=(?:\d{3})+\Z)", ",", whole), point, rest])


# --- what may not appear --------------------------------------------------------------------------


def without_words(words: Sequence[str] = ()) -> FunctionScorer:
    """Return the cost: how often words or names appear, in upper or lower case.

    A word has no letter, mark or digit beside it: "Acme" appears in "ACME's" and "Acme-like", and
    not in "Acmeist", which is another word, as an inflection is. In scripts without spaces, such as
    Chinese, Japanese and Thai, a word counts wherever it occurs. A space stands for any blanks, and
    for line breaks. Invisible characters, such as soft hyphens, hide no word, and neither do other
    forms of its letters, such as full-width ones; look-alikes of another alphabet do. Each word of
    the list counts by itself.

    Raises
    ------
    ParameterError
        For anything but a list of texts that are not blank.
    """
    given = words if isinstance(words, list | tuple) else []
    seen = [isinstance(word, str) and INVISIBLE.sub("", word).strip() for word in given]
    if not seen or not all(seen):
        refuse("words", words, "give a list of texts that are not blank, such as ['Acme']")
    patterns = sorted({"|".join(sorted(map(whole, folded(word)))) for word in given})
    return rule("without-words", "forbidden words", count_matches, patterns, True)


def whole(word: str) -> str:
    """Return the pattern of a word with nothing of a word beside it."""
    parts = r"\s+".join(map(regex.escape, word.split()))
    return EDGE + parts + EDGE


def without_pattern(pattern: str = "") -> FunctionScorer:
    r"""Return the cost: how often a regular expression matches.

    The library regex reads it, as ``re`` would; ``(?i)`` ignores case. It is tried on the text as
    it is, and without invisible characters and other forms of letters, see `without_words`; the
    largest number of matches is the cost. A match counts as soon as it is at the end of a text,
    so take care with ``$`` and what looks ahead.

    Raises
    ------
    ParameterError
        For a pattern that does not compile, or that matches the empty text, as ``\d*`` does.
    """
    try:
        on_nothing = regex.search(pattern, "")
    except (regex.error, TypeError) as error:
        refuse("pattern", pattern, f"it does not compile ({error}); correct it")
    if on_nothing:
        refuse("pattern", pattern, "the empty text breaks it; give one that needs a character")
    return rule("without-pattern", "matches", count_matches, [pattern], False)


def count_matches(patterns: Sequence[str], any_case: bool, response: str) -> int:
    """Return how often patterns match, each in the form of a text where it does so most often."""
    texts = folded(response) if any_case else {response, *forms(response)}
    return sum(max(len([*regex.finditer(p, t)]) for t in texts) for p in patterns)


def forms(text: str) -> set[str]:
    """Return a text without invisible characters, and that in plain ones (Unicode's NFKC)."""
    # both, because NFKC makes one word of a name and a trade mark sign
    visible = INVISIBLE.sub("", text)
    return {unicodedata.normalize(form, visible) for form in ("NFC", "NFKC")}


def folded(text: str) -> set[str]:
    """Return the forms of a text without upper case, in which "ß" is "ss"."""
    return {unicodedata.normalize("NFC", form.casefold()) for form in forms(text)}


# --- length ---------------------------------------------------------------------------------------


def longest_sentence(most: int = 0) -> FunctionScorer:
    """Return the cost: the words of the longest sentence, less `most`.

    A sentence ends with ``.``, ``!``, ``?`` or ``…`` at the end of a word, as "e.g." does, with
    such a mark of another script, or with its line. A word is one of those at which a guard checks
    a text (`igcore.scoring.word_ends`): "don't" and "3.5" are one, "well-known" is two, and so is
    every Chinese character. A word that the end of the text cuts is one.

    Parameters
    ----------
    most : int
        With the limit here and a budget of 0 it goes into a list with other rules.
    """
    return rule("longest-sentence", "words", count_in_sentence, checked(most))


def count_in_sentence(most: int, response: str) -> int:
    """Return by how many words the longest sentence is longer than `most`."""
    return max(0, max(map(count_words, SENTENCE_END.split(response))) - most)


def length(unit: str = "", most: int = 0) -> FunctionScorer:
    """Return the cost: the length of a response, less `most`.

    Parameters
    ----------
    unit : str
        ``words``, as in `longest_sentence`, or ``characters``, which are Python's.
    most : int
        As in `longest_sentence`.

    Raises
    ------
    ParameterError
        For another unit.
    """
    if unit not in LENGTHS:
        raise unknown_name("unit", unit, LENGTHS)
    return rule("length", unit, count_length, unit, checked(most))


def count_length(unit: str, most: int, response: str) -> int:
    """Return by how much a response is longer than `most`."""
    return max(0, LENGTHS[unit](response) - most)


def count_words(text: str) -> int:
    """Return the number of words of a text."""
    return len(word_ends(f"{text}\n"))


LENGTHS: dict[str, Callable[[str], int]] = {"words": count_words, "characters": len}


def checked(most: int) -> int:
    """Return a limit of a rule; raise ``ParameterError`` unless it is a whole number from 0."""
    if type(most) is not int or most < 0:
        refuse("most", most, "give a whole number of at least 0")
    return most
