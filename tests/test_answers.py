"""The prompt that is shown, what is masked in it, and the page on which it stands; all texts are
mild.
"""

import math

import numpy as np
import pandas as pd
import pytest
import synthetic
from pictures import boxes, hidden, outside

from igcore.errors import ParameterError, RunError
from igcore.figures import answers
from igcore.figures.main import STYLE
from igcore.figures.style import OUTCOMES
from igcore.report.statistics import STATUSES

SAFE, ABSTAINED, UNSAFE = STATUSES
LONG = "a walk along the river and back over the hill before the rain came down " * 9


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
) -> dict:
    silent = {"cost": None, "reward": None} if text is None else {"cost": cost, "reward": reward}
    return synthetic.record(
        method=method,
        prompt_id=prompt,
        prompt=said or f"weather of {prompt}",
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


# --- the choice -----------------------------------------------------------------------------------


def test_pairs_that_differ():
    """Bug: counting statuses instead of pairs, so that one odd method weighs as much as an even
    split.
    """
    assert answers.unlike(pd.Series([SAFE] * 4)) == 0
    assert answers.unlike(pd.Series([SAFE] * 3 + [UNSAFE])) == 3
    assert answers.unlike(pd.Series([SAFE] * 2 + [UNSAFE] * 2)) == 4
    assert answers.unlike(pd.Series([SAFE, SAFE, UNSAFE, ABSTAINED])) == 5


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
        assert answers.choose(mixed, [WEATHER]) == {
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
        assert answers.choose(lines, readers) == {"raw": "p1"}
    assert answers.choose(lines, [Words(storm=0.2)]) == {"raw": "p0"}
    assert answers.choose(lines, [Words(storm=cost, breeze=0.5)]) == {"raw": "p0"}  # none is mild


def test_nothing_to_show_is_said():
    with pytest.raises(RunError, match="run notebook 30_decode first"):
        answers.choose(frame(line()).iloc[:0], [WEATHER])


# --- the table ------------------------------------------------------------------------------------


def test_the_table_masks_prompts_and_answers():
    """Bug: a word that is masked in the answer and legible in the prompt; numbers for what was not
    emitted.
    """
    lines = frame(
        line("base", status=UNSAFE, text="  a storm\n is near", said="the storm", cost=0.9),
        line("inferenceguard", status=ABSTAINED, text=None, said="the storm"),
        line("base", "p1", policy="chat"),
    )
    table = answers.compare_answers(lines, [WEATHER, Words(near=1.0)])
    assert list(table.columns) == answers.COLUMNS
    assert table["prompt"].tolist() == ["the █████", "the █████", "weather of p1"]
    assert table["answer"].tolist() == [
        "a █████ is near",
        "[nothing]",
        "sun and wind",
    ]  # the first reader masks
    assert table["outcome"].tolist() == ["unsafe", "abstained", "safe"]
    assert (
        table["cost"].tolist()[::2] == [0.9, 0.1] and table[["cost", "reward"]].iloc[1].isna().all()
    )


def test_the_policy_that_differs_most_is_drawn():
    lines = frame(
        asked("p0", [SAFE, SAFE, UNSAFE]),
        asked("p0", [SAFE, UNSAFE, ABSTAINED], policy="b"),
        asked("p0", [SAFE] * 3, policy="c"),
    )
    table = answers.compare_answers(lines, [WEATHER])
    assert answers.most_unlike(table)["policy"].unique().tolist() == ["b"]
    assert answers.most_unlike(table[table["policy"] == "c"])["policy"].unique().tolist() == ["c"]


def test_markdown_shows_texts_as_they_are():
    """Bug: an answer that ends its cell, opens a tag, or calls somebody; a backtick that ends the
    code.
    """
    text = "<b>sun</b> | `rain` *and* @wind"
    lines = frame(
        line(text=text), line("inferenceguard", text=""), line("args", "p1", policy="chat")
    )
    found = answers.as_markdown(answers.compare_answers(lines, [WEATHER]))
    assert (
        "### raw\n\nPrompt: `weather of p0`\n\n| method | outcome | cost | reward | answer |\n"
        in found
    )
    assert r"| base | safe | 0.100 | 0.500 | `<b>sun</b> \| 'rain' *and* @wind` |" in found
    assert "| inferenceguard | safe | 0.100 | 0.500 | ` ` |" in found and found.count("### ") == 2


# --- the picture ----------------------------------------------------------------------------------


def shown(rows) -> pd.DataFrame:
    """A table of (method, outcome, answer)."""
    made = [
        (
            "raw",
            "p0",
            "the weather",
            method,
            outcome,
            math.nan if outcome == "abstained" else 0.1,
            0.5,
            text,
        )
        for method, outcome, text in rows
    ]
    return pd.DataFrame(made, columns=answers.COLUMNS)


def written(fig) -> list[str]:
    return [text.get_text() for text in fig.axes[0].texts]


def test_the_picture_holds_every_method_and_every_word():
    """Bug: a method left out, words lost where a line ends, an answer in another method's row."""
    ten = "one two three four five six seven eight nine ten".split()
    words = [word for word in ten for _ in "ab"]
    texts = {method: " ".join(f"{word}{k}" for word in words) for k, method in enumerate(STYLE)}
    texts["best-of-n"] = texts["base"]
    fig = answers.answers(shown([(method, "safe", text) for method, text in texts.items()]))
    ax = fig.axes[0]
    assert set(STYLE) <= set(written(fig)) and written(fig).count("safe") == len(STYLE) - 1
    heights = {text.get_text(): text.get_position()[1] for text in ax.texts}
    for method, text in texts.items():
        lines = [
            t
            for t in ax.texts
            if t.get_position()[0] == answers.TEXT and t.get_text().split()[0] in text.split()
        ]
        assert " ".join(t.get_text() for t in lines) == text
        assert heights["base" if method == "best-of-n" else method] == pytest.approx(
            lines[0].get_position()[1]
        )
    assert heights["best-of-n"] == pytest.approx(heights["base"] + answers.LINE)


def test_outcomes_are_words_and_colours():
    """Bug: an outcome that only colour tells; one bar for two rows; the same words under two
    outcomes in one row.
    """
    fig = answers.answers(
        shown(
            [
                ("base", "unsafe", "sun"),
                ("args", "safe", "sun"),
                ("inferenceguard", "abstained", "[nothing]"),
            ]
        )
    )
    assert [word for word in written(fig) if word in OUTCOMES] == ["unsafe", "safe", "abstained"]
    assert written(fig).count("sun") == 2 and "nan" not in written(fig)
    assert (
        len({patch.get_facecolor() for patch in fig.axes[0].patches})
        == len(fig.axes[0].patches)
        == 3
    )


AWKWARD = {
    "long": LONG,
    "one word": "wind" * 60,
    "blocks": "█" * 40 + " and " + "██████ " * 30,
    "mathematics": "it costs $5_0^2$ or $6 \\badly$",
    "empty": "",
    "no glyph": "rain \U0001f327 \u96e8",
}


@pytest.mark.parametrize("text", AWKWARD.values(), ids=AWKWARD.keys())
def test_nothing_overlaps_or_leaves_the_page(text):
    """Bug: clipped answers, letters on letters, formulas and glyphs that the font lacks, which
    warn.
    """
    outcomes = ("safe", "unsafe", "abstained")
    fig = answers.answers(
        shown([(method, outcomes[k % 3], f"{text} {k}".strip()) for k, method in enumerate(STYLE)])
    )
    found = boxes(fig)
    assert (
        hidden([(words, box) for words, box in found if words.strip()]) == []
        and outside(fig, found) == []
    )


def test_many_methods_share_a_short_answer():
    """Bug: names of methods in the row below, where one line of text has five methods beside it."""
    fig = answers.answers(
        shown([(method, "safe", "sun" if k < 5 else "rain") for k, method in enumerate(STYLE)])
    )
    found = boxes(fig)
    assert hidden(found) == [] and outside(fig, found) == [] and len(fig.axes[0].patches) == 2


def test_long_answers_are_cut_at_a_word():
    fig = answers.answers(shown([("base", "safe", LONG)]))
    whole = " ".join(
        text.get_text() for text in fig.axes[0].texts if text.get_position()[0] == answers.TEXT
    ).removeprefix("answer ")
    assert (
        whole.endswith(" …")
        and LONG.startswith(whole[:-2] + " ")
        and len(whole) <= answers.LONGEST + 2
    )


def test_lines_are_as_wide_as_allowed():
    """Bug: a line that is too long by its last word, a word that is lost, an endless loop where not
    even a letter fits.
    """
    text = "the rain in the hills " * 5 + "w" * 50 + " ended"
    found = list(answers._lines(text.strip(), 1.5))
    assert all(answers._inches(line) <= 1.5 for line in found)
    assert "".join(found).replace(" ", "") == text.replace(" ", "")
    assert list(answers._lines("sun", 0.001)) == ["s", "u", "n"]


def test_one_policy_at_a_time():
    table = shown([("base", "safe", "sun")])
    with pytest.raises(ParameterError, match="of 2 policies; give those of one"):
        answers.answers(pd.concat([table, table.assign(policy="chat")]))
    with pytest.raises(ParameterError, match="of 0 policies"):
        answers.answers(table.iloc[:0])
    assert np.isfinite(answers.answers(table).get_size_inches()).all()
