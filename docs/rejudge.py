"""Write the page on which recorded searches are judged under other budgets.

``docs/rejudge.html`` is written by hand but for the searches inside, which come from
``records/trees.jsonl``. ``python -m docs.rejudge``, a part of ``make readme``, puts them there.
``python -m docs.rejudge record`` decodes them again first: two minutes on one core.

Each question is decoded under its first budget, and under every whole number above it, until no
block is over the budget. The costs are whole numbers, so these are all budgets that matter. A
search that is that of the budget before is recorded once.
"""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from igcore import Guard, IgcoreError, Response, SearchConfig
from igstudy.files import replace_file, root

PAGE, RECORD = "docs/rejudge.html", "records/trees.jsonl"
DATA = re.compile(r'(?<=<script type="application/json" id="searches">\n).*?(?=</script>)', re.S)
POLICY = "smollm2-chat"
# short answers, and few tokens and tries, so that a screen holds a search
SETTINGS = dict(max_new_tokens=40, block_size=8, temperature=0.7, tries=2, spend=120)


@dataclass(frozen=True)
class Question:
    """A question of the page, and the rule for its answers.

    Attributes
    ----------
    prompt : str
        The question.
    rule : str
        What the cost counts, in words.
    cost : dict
        The cost of the guard.
    first : int
        The least budget of the page.
    seed : int
        The seed of all searches.
    """

    prompt: str
    rule: str
    cost: dict
    first: int
    seed: int


QUESTIONS = (
    Question(
        prompt="What should I see in Paris?",
        rule="mentions of the Eiffel Tower or the Louvre",
        cost={"name": "without-words", "words": ["Eiffel Tower", "Louvre"]},
        first=0,
        seed=2,
    ),
    Question(
        prompt="When should I go to bed?",
        rule="numbers that are not in the question",
        cost={"name": "without-new-numbers"},
        first=0,
        seed=6,
    ),
    Question(
        prompt="How do I make friends in a new city?",
        rule="words in the longest sentence",
        cost={"name": "longest-sentence"},
        first=14,
        seed=2,
    ),
    Question(
        prompt="What should I see in Paris?",
        rule="capital letters",
        cost={"name": "without-pattern", "pattern": r"\p{Lu}"},
        first=2,
        seed=1,
    ),
)


# --- decoding -------------------------------------------------------------------------------------


def recorded(question: Question) -> Iterator[dict]:
    """Yield the search under each budget that changes it, from the first budget on."""
    before: list[dict] = []
    for budget in count(question.first):
        config = SearchConfig(budget=budget, **SETTINGS)
        guard = Guard(POLICY, cost=question.cost, method="backtracking", config=config)
        chat = [{"role": "user", "content": question.prompt}]
        answer = guard(chat, record=True, seed=question.seed)
        search = in_json(answer, budget)
        if search["nodes"] != before:
            yield vars(question) | search
        before = search["nodes"]
        if all(node["within"] for node in before):
            return


def in_json(answer: Response, budget: int) -> dict:
    """Return a recorded answer in JSON values, with what decides about each block."""
    nodes = [
        {
            "number": node.number,
            "parent": node.parent,
            "block": node.block,
            "round": node.round,
            "text": node.text,
            "worst": node.beam.worst,
            "cost": node.cost,
            "length": len(node.beam.tokens),
            "finished": node.beam.finished,
            "within": node.within,
            "fate": node.fate,
        }
        for node in answer.candidates
    ]
    return {
        "policy": POLICY,
        "method": "backtracking",
        "settings": SETTINGS,
        "budget": budget,
        "status": answer.status,
        "answer": answer.text,
        "answer_cost": answer.cost,
        "sampled": answer.counts.policy_tokens,
        "nodes": nodes,
    }


def in_line(search: dict) -> str:
    """Return a search as a line of JSON."""
    return json.dumps(search, ensure_ascii=False, separators=(",", ":"))


# --- the page -------------------------------------------------------------------------------------


def with_needs(search: dict) -> dict:
    """Return a search in which each block says the least budget that it and its path keep.

    The accounting is ``peak``: the budget is charged with the worst cost so far, at least 0.
    """
    needs = {-1: 0.0}
    for node in search["nodes"]:
        needs[node["number"]] = max(needs[node["parent"]], node["worst"])
    return search | {"nodes": [node | {"needs": needs[node["number"]]} for node in search["nodes"]]}


def filled(page: str, base: Path) -> str:
    """Return the page with the searches of the record."""
    lines = (base / RECORD).read_text(encoding="utf-8").splitlines()
    searches = [in_line(with_needs(json.loads(line))) for line in lines]
    data = "[\n" + ",\n".join(searches).replace("</", r"<\/") + "\n]\n"  # which would end the data
    return DATA.sub(lambda _: data, page, count=1)


def main() -> None:
    """Decode the searches if asked to, and write the page."""
    base = root()
    try:
        if sys.argv[1:] == ["record"]:
            lines = [in_line(search) for asked in QUESTIONS for search in recorded(asked)]
            replace_file(base / RECORD, "\n".join(lines) + "\n")
        page = (base / PAGE).read_text(encoding="utf-8")
        replace_file(base / PAGE, filled(page, base))
    except IgcoreError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
