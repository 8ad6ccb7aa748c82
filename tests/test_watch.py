"""Tests of the recorded search: its candidates and its picture; and of masking."""

import math
import re
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from functools import partial
from html import unescape
from types import SimpleNamespace

import numpy as np
import pytest
from mockpolicy import (
    LetterCost,
    LetterCritic,
    LetterReward,
    MockModel,
    MockTokenizer,
    letter_cost,
    mock_policy,
    outcome,
)

import igcore as ig
from igcore import budget as safety
from igcore.errors import ScorerWarning
from igcore.methods import method_of
from igcore.watch.html import mask, mask_answer
from igcore.watch.record import CHECK_FAILED, EMITTED, KEPT, OVER_BUDGET, RETRIED

PROMPTS = ["a", "be", "cab", "deaf", "f", "bead"]
CONFIG = ig.SearchConfig(budget=1.0, n_samples=4, keep=2, block_size=2, max_new_tokens=6, rounds=3)
METHODS = ["inferenceguard", "inferenceguard-mix", "inferenceguard-critic", "best-of-n"]
METHODS += ["beam-lagrangian", "beam-lagrangian-freq", "beam-augmented", "base"]
METHODS += ["best-of-n-augmented", "backtracking", "rejection"]


def guard(budget=1.0, **more):
    config = replace(CONFIG, budget=budget)
    scorers = {"cost": LetterCost(), "reward": LetterReward()} | more
    return ig.Guard(mock_policy(), config=config, method="inferenceguard", **scorers)


def answers(method="inferenceguard", budget=1.0, record=True, **more):
    own = guard(budget, critic=LetterCritic(), **more)
    return list(ig.decode(method, own, PROMPTS, seed=3, record=record))


class Diluted(LetterCost):
    """A cost by letter: what follows may make up for a bad beginning."""

    def __init__(self):
        super().__init__(lambda text: letter_cost(text) / max(len(text), 1))


class Spaced(MockTokenizer):
    """Writes a space for every f, so that texts have words."""

    def decode(self, *args, **options):
        return super().decode(*args, **options).replace("f", " ")


def in_words(method, budget, checks, cost=None):
    """Return answers of several words under a cost that a later letter dilutes."""
    own = guard(budget, cost=cost or Diluted())
    policy = replace(own.policy, tokenizer=Spaced())
    config = replace(own.config, checks=checks, block_size=4, max_new_tokens=8)
    own = replace(own, policy=policy, config=config)
    return list(ig.decode(method, own, PROMPTS * 2, seed=5, record=True))


def costs_at_words(text):
    """Return the diluted cost of a text cut before every space, and of the whole text."""
    ends = [i for i in range(1, len(text)) if text[i] == " " != text[i - 1]]
    return {end: letter_cost(text[:end]) / end for end in [*ends, len(text)] if end}


def path_of(nodes, node):
    path = [node]
    while path[0].parent >= 0:
        path.insert(0, nodes[path[0].parent])
    return path


@pytest.mark.parametrize("method", METHODS)
def test_recording_changes_nothing(method):
    """Guards the observer: a search that is watched must answer as one that is not."""
    recorded, plain = answers(method), answers(method, record=False)
    assert [outcome(a) for a in recorded] == [outcome(b) for b in plain]
    assert not any(answer.candidates for answer in plain)


@pytest.mark.parametrize("method", METHODS)
def test_a_tree_holds_every_sample_and_its_path(method):
    """Guards against a lost or misplaced candidate: numbers, texts and z are worked out again."""
    for answer in answers(method):
        nodes = answer.candidates
        assert [node.number for node in nodes] == list(range(answer.counts.samples_drawn))
        config = answer.guard.config
        for node in nodes:
            path = path_of(nodes, node)
            assert [each.block for each in path] == list(range(node.block + 1))
            if not method_of(method).final_only:
                text = "".join(each.text for each in path)
                assert node.cost == LetterCost().score([""], [text], [True])[0]
                states = safety.trace(
                    [each.cost for each in path],
                    config.budget,
                    config.accounting,
                    config.gamma_safety,
                    [len(each.beam.tokens) - 1 for each in path],
                )
                assert node.beam.state.z == states[-1].z
                assert node.within == (states[-1].omega >= 0)
        emitted = [node for node in nodes if node.fate == EMITTED]
        assert len(emitted) == (answer.status != "abstained")
        for node in emitted:
            assert "".join(each.text for each in path_of(nodes, node)) == answer.text


def test_fates_say_what_became_of_candidates():
    """Guards the words of the picture: a failed round is retried, and what is over budget is
    never kept by the guard.
    """
    found = set()
    for answer in answers():
        last = {node.block: node.round for node in answer.candidates}
        for node in answer.candidates:
            found.add(node.fate)
            assert (node.fate == RETRIED) == (
                node.round < last[node.block] and node.fate not in (KEPT, EMITTED)
            )
            assert node.fate != OVER_BUDGET or not node.within
            assert node.fate not in (KEPT, EMITTED) or node.within
    assert {KEPT, EMITTED, RETRIED, OVER_BUDGET} <= found


class Turncoat(LetterCost):
    """A cost that finds any whole answer to a prompt bad once the search is over."""

    def score(self, prompts, responses, finished):
        if len(responses) == 1 and finished[0] and prompts == ["deaf"]:
            return [9.0]
        return super().score(prompts, responses, finished)


def test_a_failed_final_check_shows():
    """Guards the last word: a text that only the final check rejects is marked in the tree, and
    the verdict blames its cost model.
    """
    own = guard(3.0, cost=Turncoat())
    with pytest.warns(ScorerWarning, match="asked in the search and once more, it gave 9"):
        answer = own("deaf", seed=3, record=True)
    assert (answer.status, answer.reason) == ("abstained", "scorer_contract")
    assert [node.fate for node in answer.candidates].count(CHECK_FAILED) == 1
    assert CHECK_FAILED in answer.tree()._repr_svg_()
    assert "gives one text different costs" in answer._repr_html_()


def test_a_cost_inside_a_block_shows_in_its_candidate():
    """Bug: an orange candidate over budget whose picture shows a cost within budget."""
    inside = 0
    for answer in in_words("inferenceguard", 0.6, "word"):
        nodes, picture = answer.candidates, answer.tree()._repr_svg_()
        for node in nodes:
            path = path_of(nodes, node)
            text = "".join(each.text for each in path)
            before = len(text) - len(node.text)
            costs = {end: u for end, u in costs_at_words(text).items() if end > before}
            assert node.beam.worst == pytest.approx(max(costs.values(), default=node.cost))
            assert node.beam.state.z == pytest.approx(
                0.6 - max(0, *(each.beam.worst for each in path))
            )
            assert node.within == (node.beam.state.z >= 0)
            hidden = node.beam.worst > node.cost
            inside += hidden and not node.within
            z = f"z {round(node.beam.state.z, 3):g}"
            shown = f"cost {round(node.beam.worst, 3):g} inside the block, {z}"
            assert not hidden or shown in " ".join(readable(picture))
    assert inside


@pytest.mark.parametrize("method", ["inferenceguard", "base"])
def test_a_word_over_budget_between_the_ends_of_blocks_is_said(method):
    """Bug: a text shown as within budget all the way because no check was inside its blocks."""
    found = 0
    for answer in in_words(method, 0.6, "block"):
        html = answer._repr_html_()
        if answer.status == "verified_safe" and answer.peak_cost <= 0.6:
            worst = max(costs_at_words(answer.text).values(), default=0)
            said = f"though it was over budget before the end ({worst:.3f})"
            assert (said in html) == (worst > 0.6)
            found += worst > 0.6
    assert found


class Trembling(LetterCost):
    """A cost whose readings differ by two hundredths from call to call."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def score(self, prompts, responses, finished):
        self.calls += 1
        shift = 0.02 * (self.calls % 2)
        return [score + shift for score in super().score(prompts, responses, finished)]


def test_readings_that_differ_show_beside_the_cost():
    """Bug: three digits of a cost whose last two are noise."""
    answer = guard(3.0, cost=Trembling())("deaf", seed=3)
    assert answer.spread == pytest.approx(0.02)
    assert "cost 1, give or take 0.020, within the budget of 3" in answer._repr_html_()
    sound = guard(3.0)("deaf", seed=3)
    assert "give or take" not in sound._repr_html_()


def test_a_picture_is_well_formed_and_masks():
    """Guards what is committed and shown: valid SVG, with no word that is over budget alone."""
    hidden = set()
    for answer in answers():
        tree = ElementTree.fromstring(answer.tree()._repr_svg_())
        boxes = [rect for rect in tree.iter() if rect.tag.endswith("rect") and "rx" in rect.keys()]
        assert len(boxes) == len(answer.candidates)
        texts = " ".join(tree.itertext()).split()
        words = {word for node in answer.candidates for word in node.text.split()}
        dear = {word for word in words if LetterCost().score([""], [word], [True])[0] > 1.0}
        hidden |= dear
        assert not dear & set(texts)
        html = unescape(answer._repr_html_())
        assert not any(f">{word}<" in html for word in dear)
    assert hidden


def readable(picture):
    """Return the texts of a picture, each line by line as one."""
    texts = [e for e in ElementTree.fromstring(picture).iter() if e.tag.endswith("}text")]
    return [" ".join(span.text or "" for span in text) for text in texts]


def test_letters_are_large_and_every_text_is_whole():
    """Bug: pictures as wide as the search is deep, whose letters were five pixels high, and texts
    that ended in dots.
    """
    answer = guard()("deaf", seed=3, record=True)
    long = " ".join(f"word{i}" for i in range(80))
    nodes = [replace(node, text=long) for node in answer.tree().nodes]
    picture = replace(answer.tree(), nodes=nodes)._repr_svg_()
    root = ElementTree.fromstring(picture)
    width = float(root.get("width"))
    sizes = [float(e.get("font-size")) for e in root.iter() if e.get("font-size")]
    # two pictures side by side in 860 pixels, and one on a telephone with a margin
    assert min(sizes) * min(1, 430 / width) >= 11.7
    assert min(sizes) * min(1, 358 / width) >= 9.5
    assert readable(picture).count(long) == len(nodes)


def test_a_picture_says_in_words_what_it_shows():
    """Bug: colours and bare numbers alone told what is over budget, and no alternative text."""
    tree = guard()("deaf", seed=3, record=True).tree()
    root = ElementTree.fromstring(tree._repr_svg_())
    assert root.get("role") == "img"
    label = f"{len(tree.nodes)} candidates of {tree.method}: {tree.verdict}"
    assert root.get("aria-label") == label
    texts = readable(tree._repr_svg_())
    for side, within in (("within", True), ("over", False)):
        count = sum(f": {side} the budget of 1 ·" in text for text in texts)
        assert count == sum(node.within == within for node in tree.nodes) > 0


def test_a_picture_stands_any_character():
    """Bug: a byte that XML forbids, as small models write them, made the picture unreadable."""
    answer = guard()("deaf", seed=3, record=True)
    nodes = [replace(node, text="a\x00b\x0b<&\ud800") for node in answer.tree().nodes]
    ElementTree.fromstring(replace(answer.tree(), nodes=nodes)._repr_svg_())


def test_an_answer_says_its_verdict_in_words():
    """Guards against a verdict that hides a path over budget, or calls a baseline guarded."""
    found = 0
    for method in ("inferenceguard", "best-of-n", "base"):
        for answer in answers(method, 0.5, cost=Diluted()):
            html, passed = answer._repr_html_(), answer.status == "verified_safe"
            assert ("abstained" in html) == (answer.status == "abstained")
            assert ("verified safe by the final check" in html) == (passed and method[0] == "i")
            assert ("not guarded, but within budget" in html) == (passed and method[0] != "i")
            on_the_way = passed and answer.word_peak_cost > 0.5
            assert ("over budget before the end" in html) == on_the_way
            found += on_the_way
    assert found


class Whole(Diluted):
    """A cost that judges answers as wholes, as a language model with a KV cache does."""

    backbone = SimpleNamespace(model=MockModel())

    def open_cache(self, prompts):
        return SimpleNamespace(retain=lambda prompts, responses: None)

    def with_cache(self, session):
        return self

    def uncached(self):
        return self


@pytest.mark.parametrize("cost", [Whole(), [Whole(), Diluted()]], ids=["alone", "maximum"])
def test_an_answer_is_masked_from_its_first_word_over_budget_on(cost):
    """Bug: a cost of whole answers was asked about single words, so that an answer over budget
    stood there, or one within budget was masked; and nothing said that the prompt is not masked.
    """
    shown = hidden = 0
    for answer in in_words("base", 0.6, "block", cost):
        cut = 0
        for end, u in costs_at_words(answer.text).items():
            if u > 0.6:
                break
            cut = end
        words = partial(mask, cost=Diluted(), threshold=0.6) if isinstance(cost, list) else str
        hidden_part = re.sub("[^ ]", "█", answer.text[cut:])
        assert mask_answer(answer) == words(answer.text[:cut]) + hidden_part
        assert f"[not masked] {words(answer.prompt)}" in answer._repr_html_()
        shown += cut == len(answer.text)
        hidden += cut < len(answer.text)
    assert shown and hidden


def test_a_candidate_over_budget_is_masked_where_answers_are_judged():
    """Bug: the picture shows the texts that the search rejected because of what they say."""
    rejected = 0
    for answer in answers(cost=Whole(), budget=0.4):
        tree = answer.tree()
        assert tree.prompt == f"[not masked] {answer.prompt}"
        assert answer.tree(masked=False).prompt == answer.prompt
        for node, original in zip(tree.nodes, answer.candidates, strict=True):
            assert node.text == (original.text if node.within else "█" * len(original.text))
            rejected += not node.within
    assert rejected


@pytest.mark.filterwarnings("ignore:.* is over the budget of")
def test_an_answer_without_a_text_shows_itself():
    """Bug: where not even the empty text is within budget there is no cost to compare."""
    answer = guard(cost=LetterCost(lambda text: 9.0))("deaf", record=True)
    assert answer.text is None and "nothing was emitted" in answer._repr_html_()
    assert {node.fate for node in answer.candidates} == {OVER_BUDGET, RETRIED}


def test_a_tree_needs_a_recorded_search():
    with pytest.raises(ig.ParameterError, match="was not recorded; answer again with record=True"):
        guard()("deaf").tree()


# --- masking, by a cost made of a table -----------------------------------------------------------


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
    cost = ig.load_scorer("offensive-language")
    assert mask("I hate Mondays", cost) == "I ████ Mondays"
    assert mask("I hate Mondays", cost, threshold=np.float64(0.95)) == "I hate Mondays"


def test_numbers_are_left_to_read_and_a_long_one_is_read_once():
    """Bug: a number of 50,000 digits took a minute, as it was read again from each digit on."""
    hides_all = LetterCost(lambda text: 1.0)
    assert mask("In 1999, 8hrs or x2.", hides_all, 0.0) == "██ 1999, ████ ██ ██."
    begun = time.process_time()
    assert mask("1" * 50_000, hides_all, 0.0) == "1" * 50_000
    assert time.process_time() - begun < 5
