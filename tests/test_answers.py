"""The prompt that is shown and what is masked in it; all texts are mild."""

import math

import pandas as pd
import pytest
import synthetic

from igstudy.figures.style import STYLE
from igstudy.report.answers import answers, chosen_prompt
from igstudy.report.statistics import STATUSES

SAFE, ABSTAINED, UNSAFE = STATUSES


class Words:
    """A cost that knows some words, and finds every text with one of them as costly as the word."""

    def __init__(self, **costs):
        self.costs = costs

    def score(self, prompts, responses, finished):
        assert set(prompts) <= {""} and all(finished)
        return [
            max((cost for word, cost in self.costs.items() if word in text), default=0.0)
            for text in responses
        ]


WEATHER = Words(storm=0.9)


def line(
    method="base",
    prompt="p0",
    status=SAFE,
    text="sun and wind",
    said=None,
    policy="raw",
    cost=0.1,
    reward=0.5,
    judge="offensive-language",
) -> dict:
    silent = {"cost": None, "reward": None} if text is None else {"cost": cost, "reward": reward}
    return synthetic.record(
        method=method,
        prompt_id=prompt,
        prompt=said or f"weather of {prompt}",
        cost_scorer=judge,
        response=text,
        status=status,
        policy=policy,
        **silent,
    )


def asked(prompt, statuses, said=None, policy="raw") -> list[dict]:
    return [
        line(method, prompt, status, said=said, policy=policy)
        for method, status in zip(STYLE, statuses, strict=False)
    ]


def frame(*lines) -> pd.DataFrame:
    return pd.DataFrame(
        [row for rows in lines for row in (rows if isinstance(rows, list) else [rows])]
    )


def chosen(records, readers) -> dict[str, str]:
    """Return the prompt that is shown of each policy."""
    return {policy: chosen_prompt(cell, readers) for policy, cell in records.groupby("policy")}


# --- the choice -----------------------------------------------------------------------------------


def test_the_prompt_on_which_most_pairs_differ_is_shown():
    """Bug: a choice that depends on the order of lines, or on prompts that only some methods were
    asked.
    """
    lines = frame(
        asked("p3", [SAFE] * 5),
        asked("p2", [SAFE, UNSAFE, SAFE, SAFE, SAFE]),
        asked("p1", [UNSAFE, SAFE, SAFE, SAFE, SAFE]),
        asked("p0", [SAFE, SAFE, UNSAFE, ABSTAINED]),  # more pairs, but of four methods only
        asked("p3", [SAFE, UNSAFE], policy="chat"),
    )
    for seed in range(3):
        mixed = lines.sample(frac=1, random_state=seed)
        assert chosen(mixed, [WEATHER]) == {
            "raw": "p1",
            "chat": "p3",
        }  # of two alike the lower id


@pytest.mark.parametrize("cost", [0.21, math.nan])
def test_mild_prompts_come_first(cost):
    """Bug: an offensive prompt on a page because methods differ on it; a failed score taken for
    mild; a reader unheard.
    """
    lines = frame(
        asked("p0", [SAFE, UNSAFE], said="a storm"), asked("p1", [SAFE, SAFE], said="a breeze")
    )
    for readers in ([Words(storm=cost)], [Words(), Words(storm=cost)]):
        assert chosen(lines, readers) == {"raw": "p1"}
    assert chosen(lines, [Words(storm=0.2)]) == {"raw": "p0"}
    assert chosen(lines, [Words(storm=cost, breeze=0.5)]) == {"raw": "p0"}  # none is mild


# --- the table ------------------------------------------------------------------------------------


def rows_of(text: str) -> list[list[str]]:
    """Return the cells of the rows of all Markdown tables, without headers and rules."""
    rows = [row.strip("| ").split(" | ") for row in text.splitlines() if row.startswith("|")]
    cells = [[cell.strip() for cell in row] for row in rows]
    return [row for row in cells if row[0] in STYLE]


def test_the_table_masks_prompts_and_answers():
    """Bug: a word that is masked in the answer and legible in the prompt; numbers for what was not
    emitted; a reader that masks in the place of another.
    """
    lines = frame(
        line("base", status=UNSAFE, text="  a storm\n is near", said="the storm", cost=0.9),
        line("inferenceguard", status=ABSTAINED, text=None, said="the storm"),
        line("base", "p1", policy="chat"),
    )
    found = answers(lines, [WEATHER, Words(near=1.0)])
    assert "storm" not in found
    assert "### raw\n\nPrompt: `the █████`\n" in found
    assert "### chat\n\nPrompt: `weather of p1`\n" in found
    assert rows_of(found) == [
        ["base", "unsafe", "0.900", "0.500", "`a █████ is near`"],
        ["inferenceguard", "abstained", "n/a", "n/a", "[nothing]"],
        ["base", "safe", "0.100", "0.500", "`sun and wind`"],
    ]


@pytest.mark.parametrize("judge", ["smollm2-harm", "maximum(smollm2-harm, offensive-language)"])
def test_nothing_is_shown_where_no_word_can_be_masked(judge):
    """Bug: prompts and answers of a run on harm stood on a page because none of their words is
    rude.
    """
    lines = frame(line("base", text="sun and wind", judge=judge), line("args", "p1", policy="chat"))
    found = answers(lines, [WEATHER])
    assert f"Prompt: `[3 words not shown: {judge} judges answers, and masks no word]`" in found
    assert "wind" not in found.split("### chat")[0] and "sun and wind" in found


def test_markdown_shows_texts_as_they_are():
    """Bug: an answer that ends its cell, opens a tag, or calls somebody; a backtick that ends the
    code.
    """
    text = "<b>sun</b> | `rain` *and* @wind"
    lines = frame(
        line(text=text), line("inferenceguard", text=""), line("args", "p1", policy="chat")
    )
    found = answers(lines, [WEATHER])
    assert r"`<b>sun</b> \| 'rain' *and* @wind`" in found
    assert "` `" in found and found.count("### ") == 2
