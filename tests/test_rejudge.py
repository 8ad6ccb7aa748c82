"""Tests of the page on which recorded searches are judged under other budgets."""

import json
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from docs import rejudge, site
from igcore.beams import Beam
from igcore.budget import start
from igcore.config import SearchConfig
from igcore.models.registry import load_scorer
from igcore.watch.record import Node, rejudged

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / rejudge.PAGE).read_text(encoding="utf-8")
SCRIPT = PAGE.partition('"use strict"')[2]
SEARCHES = json.loads(rejudge.DATA.search(PAGE)[0])
LINES = (ROOT / rejudge.RECORD).read_text(encoding="utf-8").splitlines()
RECORDED = [json.loads(line) for line in LINES]


def as_nodes(search) -> list[Node]:
    """Return the blocks of a search as the package records them."""
    texts = {-1: ""}
    nodes = []
    for n in search["nodes"]:
        text = texts[n["number"]] = texts[n["parent"]] + n["text"]
        beam = Beam([0] * n["length"], text, n["finished"], start(0.0), [], 0, worst=n["worst"])
        where = (n["number"], n["parent"], n["block"], n["round"], n["text"])
        nodes.append(Node(*where, beam, n["within"], n["fate"]))
    return nodes


def config_of(search) -> SearchConfig:
    return SearchConfig(budget=search["budget"], **search["settings"])


def budgets_of(search) -> np.ndarray:
    """Return budgets below, at, between and above all costs of a search."""
    worst = {node["worst"] for node in search["nodes"]} | {search["budget"]}
    budgets = np.unique([0, *worst, *(cost - 0.5 for cost in worst), max(worst) + 7])
    return budgets[budgets >= 0]


def test_the_page_holds_the_committed_record():
    """Guards a page whose searches are not those of the record."""
    assert rejudge.filled(PAGE, ROOT) == PAGE
    bare = rejudge.DATA.sub("", PAGE, count=1)
    assert len(bare) < len(PAGE) / 3 and rejudge.filled(bare, ROOT) == PAGE  # bug: its script went


@pytest.mark.parametrize("search", SEARCHES, ids=lambda s: f"{s['rule']}, {s['budget']:g}")
def test_the_page_judges_as_the_package_does(search):
    """Guards verdicts of the page that the package would not give. The page compares `needs` with
    the budget, and nothing else.
    """
    nodes, config = as_nodes(search), config_of(search)
    for budget in budgets_of(search):
        judged = [node.within for node in rejudged(nodes, config, budget)]
        assert [n["needs"] <= budget for n in search["nodes"]] == judged
    assert [n["needs"] <= search["budget"] for n in search["nodes"]] == [n.within for n in nodes]
    assert "const within = (node, budget) => node.needs <= budget;" in SCRIPT
    assert len(re.findall(r"\.needs [<>=]", SCRIPT)) == 1


def test_a_path_is_charged_with_its_worst_block():
    """Bug: a block after one over the budget needed only its own cost."""
    costs = [3.0, 1.0, -2.0, 4.0]
    nodes = [{"number": i, "parent": i - 1, "worst": c} for i, c in enumerate(costs)]
    nodes += [{"number": 4, "parent": -1, "worst": -2.0}]
    needs = [node["needs"] for node in rejudge.with_needs({"nodes": nodes})["nodes"]]
    assert needs == [3, 3, 3, 4, 0]


@pytest.mark.parametrize("question", rejudge.QUESTIONS, ids=lambda q: q.rule)
def test_the_searches_cover_every_budget(question):
    """Guards a slider that shows a search where another was decoded: a search judges as recorded up
    to the next one, and the last one has no block over its budget.
    """
    own = [s for s in SEARCHES if (s["prompt"], s["rule"]) == (question.prompt, question.rule)]
    assert vars(question).items() <= own[0].items()
    assert own[0]["budget"] == question.first and question.prompt in PAGE
    assert all(node["within"] for node in own[-1]["nodes"])
    for search, after in pairwise(own):
        over = [n["needs"] for n in search["nodes"] if not n["within"]]
        assert search["budget"] < after["budget"] <= min(over)
        assert search["nodes"] != after["nodes"]


@pytest.mark.parametrize("search", RECORDED, ids=lambda s: f"{s['rule']}, {s['budget']:g}")
def test_a_reader_finds_the_costs_in_the_texts(search):
    """Guards recorded costs that are not those of the texts beside them."""
    cost, nodes = load_scorer(search["cost"]), as_nodes(search)
    prompts, finished = [search["prompt"]] * len(nodes), [n.beam.finished for n in nodes]
    scores = cost.score(prompts, [n.beam.text for n in nodes], finished)
    assert scores == [n["cost"] for n in search["nodes"]]
    assert search["answer_cost"] <= search["budget"]


def test_the_page_shows_answers_abstentions_and_steps_back():
    """Guards a page without one of the three things that a guard does."""
    assert {s["status"] for s in RECORDED} == {"verified_safe", "abstained"}
    assert any(n["fate"] == "dropped" for s in RECORDED for n in s["nodes"])
    assert sum(s["status"] == "verified_safe" and len(s["nodes"]) > 5 for s in RECORDED) > 5


def test_the_page_needs_no_network_and_no_glasses(tmp_path):
    """Guards a page that is blank on a train, letters below 14 px, and a slider without a label."""
    (tmp_path / "rejudge.html").write_text(PAGE, encoding="utf-8")
    assert not list(site.faults(tmp_path))
    assert not re.findall(r"https?:|//\w+\.|@import|url\(|fetch\(|src=", PAGE)
    sizes = [float(n) for n in re.findall(r"(?:font|font-size):[^;}]*?([\d.]+)px", PAGE)]
    assert len(sizes) > 10 and min(sizes) >= 14
    assert not re.findall(r"font(?:-size)?:[^;}]*\d(?:r?em|%|pt|vw)", PAGE)
    for needed in ('<html lang="en">', '<meta name="viewport"', '<label for="budget">', "<title>"):
        assert needed in PAGE
    assert 'aria-live="polite"' in PAGE


def test_a_link_to_the_page_opens_it_on_the_site():
    """Bug: Sphinx made a download of it, which no visitor sees in ten seconds."""
    text = "[slide](rejudge.html) and [other](guard.md)"
    shown = site.as_shown(text, ROOT / "docs/page.md", ROOT)
    assert shown == '<a href="rejudge.html">slide</a> and [other](guard.md)'
    for page, link in (("README.md", "(docs/rejudge.html)"), ("docs/guard.md", "(rejudge.html)")):
        assert link in (ROOT / page).read_text(encoding="utf-8")
