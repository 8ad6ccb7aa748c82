"""Tests of the rules as costs: against the rules written a second time, character by character, on
random texts; that a guard answers with exactly the texts of a few letters that a rule allows; and
the cost of the last words, on examples worked by hand.

``make audit`` compares 10,000 random texts.
"""

import random
import re
from itertools import product
from unicodedata import category, decimal, name, normalize

import pytest
from mockpolicy import EOS, mock_policy

from igcore import Guard, ParameterError, load_scorer, rules
from igcore.prompt import Encoded
from igstudy.runs.identity import part_identity

FORMS = "NFC", "NFKC"
HIDDEN = dict.fromkeys(map(ord, "\u00ad\u200b\u200d\u2060\ufe0f"))
WORDS = ["Acme", "acme  Corp", "Straße", "東京", "ラー", "C++", "Ｚürich", "don't", "4x4"]
PATTERN = "(?i)acme ?(?:corp|[0-9])|\u00ad"
ATOMS = (
    "acme ACME Acme acm Acme’s Acmes Ａcme Acme™ corp Corp. straße STRASSE Strasse 東京 京 カラー "
    "ラー C++ c+ Zu\u0308rich zürich DON'T don't 4x4 14x4 e\u0301 w-k _ 🙂 1 2 12 125 3.5 1,251 "
    "1251 1,251 1251 ٣ ४ ７ ½ ² ① 1/2 7:30 , . ! ) : ' \u00ad \u00ad \u200b \u200d 0 0 , ."
).split() + ["\n", "\n1. ", "\n2)", "\n # 3. ", "\n12. ", "\n125. ", "acme\u00a0\ncorp", *" " * 20]
# piece of a sentence -> its words, below 0 where it ends the sentence
PIECES = {"don't": 1, "well-known": 2, "3.5": 1, "1,000": 1, "東京": 2, "—": 0, "🙂": 0, "e.g": 1}
PIECES |= {"e\u0301te\u0301": 1, "co\u00adop": 1, "١٢": 1, "カラー": 1, "a_b": 1, "(so)": 1, "É": 1}
PIECES |= {"so.": -1, "so?”": -1, "(3!)": -1, "so\n": -1, "*so.*": -1, "東京。": -2, "a-b…": -2}


# --- a second implementation ----------------------------------------------------------------------


def slow_numbers(text):
    """Return the numbers of a text, line by line and run of digits by run."""
    apart = "".join(f" {c} " if category(c) == "No" else c for c in text.translate(HIDDEN))
    found = []
    for line in "".join(str(decimal(c, c)) for c in normalize("NFKC", apart)).split("\n"):
        head = line.lstrip(" \t#*")
        for n in (1, 2):
            ends = head[n : n + 1] in (".", ")") and not head[n + 1 : n + 2].strip()
            line = head[n + 1 :] if ends and head[:n].isdigit() else line
        runs, i = re.split("([0-9]+)", line), 1
        while i < len(runs):
            number, i, may_go_on = runs[i], i + 2, len(runs[i]) <= 3
            while may_go_on and runs[i - 1] == "," and len("".join(runs[i : i + 1])) == 3:
                number, i = number + runs[i], i + 2
            if runs[i - 1] == "." and i < len(runs):
                number, i = f"{number}.{runs[i]}", i + 2
            found.append(number)
    return found


def new_numbers(prompt, text):
    return [number in slow_numbers(prompt) for number in slow_numbers(text)].count(False)


def spaced(c):
    """True for a character of a word, in a script with spaces between words."""
    is_word = category(c)[0] in "LM" or category(c) in ("Nd", "Pc")
    return is_word and not re.match("CJK|HIRAGANA|KATAKANA|THAI", name(c, ""))


def count_of(word, text):
    """Return how often a word appears in a normal form of a text."""
    plain = " ".join(text.casefold().split())
    wanted = {" ".join(normalize(f, word).casefold().split()) for f in FORMS}
    edges = {i for i in range(len(plain) + 1) if not all(map(spaced, f".{plain}."[i : i + 2]))}
    i = count = 0
    while i < len(plain):
        ends = edges & {i + len(w) for w in wanted if plain.startswith(w, i)}
        i, count = (max(ends), count + 1) if ends and i in edges else (i + 1, count)
    return count


def sentences(rng):
    """Return a text of random sentences, and the words of each."""
    text, counts = "", [0]
    for piece in rng.choices([*PIECES], k=rng.randrange(12)):
        text += piece + rng.choice(" \u00a0")
        counts[-1] += abs(PIECES[piece])
        counts += [0] * (PIECES[piece] < 0)
    return text, counts


def compare(n, seed):
    """Compare n random texts under every rule; return which were kept, and which broken."""
    rng, seen, numbers = random.Random(seed), set(), rules.without_new_numbers()
    for _ in range(n):
        prompt, text = ("".join(rng.choices(ATOMS, k=k)) for k in (6, rng.randrange(25)))
        (said, counts), most = sentences(rng), rng.randrange(4)
        forms = [normalize(form, text.translate(HIDDEN)) for form in FORMS]
        matches = max(len(re.findall(PATTERN, form)) for form in [text, *forms])
        names = sum(max(count_of(word, form) for form in forms) for word in WORDS)
        new, cut = new_numbers(prompt, text), text[: -rng.randrange(1, 4)]
        for rule, response, slow in (
            (numbers, text, new),
            (rules.without_words(WORDS), text, names),
            (rules.without_pattern(PATTERN), text, matches),
            (rules.longest_sentence(most), said, max(0, max(counts) - most)),
            (rules.length("words", most), said, max(0, sum(counts) - most)),
            (rules.length("characters", most), text, max(0, len([*text]) - most)),
        ):
            (cost,) = rule.score([prompt], [response], [True])
            assert cost == slow, (rule.name, prompt, response, cost, slow)
            seen.add((rule.name, cost > 0))
        # else a text is lost that ends well
        assert numbers.score([prompt], [cut], [False]) <= [new], (prompt, text, cut)
    return seen


def test_random_texts_cost_what_a_second_implementation_says():
    """Guards what a rule counts: digits of other scripts, ends of words, hidden characters."""
    assert len(compare(1000, seed=7)) == 10  # each of five rules is kept, and is broken


# --- in a guard -----------------------------------------------------------------------------------


def copied(prefix):
    """Return logits that copy what the prompt holds before its end token."""
    asked = [*prefix, EOS].index(EOS)
    wanted = dict(enumerate(prefix[:asked])).get(len(prefix) - asked - 1, EOS)
    return [100.0 * (token == wanted) for token in range(7)]


KNOWN = "12 and 2,112"
IN_A_GUARD = [  # rule, letters, what is allowed, ends of blocks at which it is read as it stands
    (rules.without_new_numbers(), "12,", lambda text: not new_numbers(KNOWN, text), ()),
    (rules.without_words(["ab"]), "ab ", lambda text: "ab" not in text.split(), (2, 4)),
    (rules.without_pattern("a b"), "ab ", lambda text: "a b" not in text, ()),
    (rules.longest_sentence(1), "a .", lambda text: not re.search(r"a( +\.?|\.\.)a", text), ()),
    (rules.length("characters", 3), "ab", lambda text: len(text) < 4, ()),
]


@pytest.mark.parametrize(("rule", "letters", "allows", "ends"), IN_A_GUARD)
def test_a_guard_answers_with_exactly_what_a_rule_allows(rule, letters, allows, ends, monkeypatch):
    """Bug: a block that ends within a number or a word passes it, or ends an answer for good."""
    monkeypatch.setattr("mockpolicy.LETTERS", f"|{letters}")
    policy = mock_policy(copied)
    settings = dict(block_size=2, max_new_tokens=5, spend=10, refusal="")
    texts = {"".join(each) for n in range(5) for each in product(letters, repeat=n)}
    prompts = [Encoded(t, KNOWN, "mock", (*policy.tokenizer(t)["input_ids"], EOS)) for t in texts]
    answers = Guard(policy, rule, budget=0, **settings).map(prompts)
    emitted = {answer.text for answer in answers if answer.status == "verified_safe"}
    allowed = {t for t in texts if allows(t) and all(allows(t[:end]) for end in ends)}
    assert emitted == allowed and allowed < texts


# --- settings -------------------------------------------------------------------------------------


BAD = [
    (rules.without_words, "Acme", "^words is 'Acme'; give a list of texts"),
    (rules.without_words, ["\u00ad"], "not blank"),
    (rules.without_pattern, "(", r"^pattern is '\('; it does not compile \(missing \)"),
    (rules.without_pattern, "a*", "the empty text breaks it"),
    (rules.longest_sentence, -1, "^most is -1; give a whole number"),
    (load_scorer, "length", "^unknown unit ''"),  # a setting that is left out
]


@pytest.mark.parametrize(("rule", "value", "sentence"), BAD)
def test_a_bad_setting_is_one_sentence(rule, value, sentence):
    """Bug: a rule that every answer breaks, or none, or a list of the letters of a word."""
    with pytest.raises(ParameterError, match=sentence):
        rule(value)


def test_a_params_file_names_a_rule_and_records_know_it_by_its_settings():
    """Bug: a run goes on with the records of other words, or of another pattern."""
    same, other = (rules.without_words([word]).digest for word in ("Acme", "Ace"))
    assert load_scorer({"name": "without-words", "words": ["Acme"]}).digest == same != other


# --- the last words -------------------------------------------------------------------------------


def cost_of(scorer, response):
    (cost,) = load_scorer(scorer).score(["How long?"], [response], [True])
    return cost


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
    numbers = "without-new-numbers"
    given = [numbers, {"name": "last-words", "cost": numbers}, "last-words"]
    given.append({"name": "last-words", "words": 8})
    identities = [part_identity(load_scorer(scorer)) for scorer in given]
    assert len({identity["digest"] for identity in identities}) == 4
    assert cost_of(given[1], "7 h " + "w " * 16) == 0
    with pytest.raises(ParameterError, match="sign"):
        load_scorer({"name": "last-words", "cost": "minilm-relevance"})
