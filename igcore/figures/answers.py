"""What each method answered to one and the same prompt: a masked table, and its picture.

A rule chooses the prompt, not a hand. It looks for differences and finds them: what is shown is an
example, and no measure of how often anything happens.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.patches import Rectangle
from matplotlib.textpath import TextToPath

from ..errors import ParameterError, RunError
from ..report.masking import mask
from ..report.statistics import STATUSES
from ..report.tables import markdown
from ..scorers import Scorer, checked_score
from .style import INK, OUTCOMES, WIDTH, style, styled

# the highest score of a text, or of a word in it, that is shown, see `igcore.report.masking.mask`
MILD = 0.2
COLUMNS = ["policy", "prompt_id", "prompt", "method", "outcome", "cost", "reward", "answer"]
NAMES = dict(zip(STATUSES, OUTCOMES, strict=True))  # status -> safe, abstained, unsafe
# outcomes as words: dark enough to be read on white
INKS = {"safe": "#0173b2", "abstained": "#5a5a5a", "unsafe": "#a84900"}
NOTHING = "[nothing]"
LONGEST = 300  # characters of an answer in the picture; the table holds all of them
SIZE = 10  # points of the text
LINE, GAP = 0.2, 0.11  # inches from line to line, and between two answers
# inches: where the columns begin, but where those of numbers end
METHOD, OUTCOME, NUMBERS, TEXT = 0.34, 2.36, (3.5, 4.22), 4.46
MARGIN = 0.25  # on the right: letters on a screen are a little wider than in print
FONT, PAPER = FontProperties(family="DejaVu Sans", size=SIZE), TextToPath()


def unlike(statuses: pd.Series) -> int:
    """Return how many pairs of methods differ in status."""
    counts = statuses.value_counts().to_numpy()
    return int((counts.sum() ** 2 - (counts**2).sum()) // 2)


def choose(records: pd.DataFrame, readers: Sequence[Scorer]) -> dict[str, str]:
    """Return the prompt to be shown of each policy: policy -> prompt_id.

    Parameters
    ----------
    records : DataFrame
        Lines of ``responses.jsonl``. Of a policy's prompts, only those that most methods were asked
        come into question.
    readers : sequence of Scorer
        Costs of a text alone (higher is worse). A prompt is mild when none of them finds more than
        `MILD`.

    Returns
    -------
    dict
        The mild prompt on which most pairs of methods differ in status, of equals the one with the
        lowest id; where no prompt is mild, the same among all.

    Raises
    ------
    RunError
        When there are no records.
    """
    if not len(records):
        raise RunError("there is no answer to show; run notebook 30_decode first")
    prompts = records.drop_duplicates("prompt_id").set_index("prompt_id")["prompt"]
    blank, whole = [""] * len(prompts), [True] * len(prompts)
    scores = [checked_score(reader, blank, prompts.tolist(), whole) for reader in readers]
    all_mild = np.all([score <= MILD for score in scores], axis=0)  # never for NaN
    mild = pd.Series(all_mild, prompts.index)
    chosen = {}
    for policy, lines in records.groupby("policy", sort=False):
        asked = lines.groupby("prompt_id")["status"].agg(["size", unlike])
        asked = asked[asked["size"] == asked["size"].max()]
        ranks = [(not mild[id_], -differing, id_) for id_, differing in asked["unlike"].items()]
        chosen[policy] = min(ranks)[-1]
    return chosen


def compare_answers(records: pd.DataFrame, readers: Sequence[Scorer]) -> pd.DataFrame:
    """Return what each method answered to the chosen prompt of each policy.

    Every word is masked that a cost finds offensive.

    Parameters
    ----------
    records : DataFrame
        Lines of ``responses.jsonl``; methods stay in the order of their lines.
    readers : sequence of Scorer
        See `choose`; the first of them masks (`igcore.report.masking.mask`).

    Returns
    -------
    DataFrame
        Columns `COLUMNS`: ``outcome`` (safe, abstained, unsafe), ``cost`` (higher is worse) and
        ``reward`` of the answer, NaN where nothing was emitted. White space is one blank.
    """
    frames = []
    for policy, id_ in choose(records, readers).items():
        lines = records[(records["policy"] == policy) & (records["prompt_id"] == id_)]
        texts = [
            mask(" ".join(text.split()), readers[0]) if isinstance(text, str) else NOTHING
            for text in lines["response"]
        ]
        prompt = mask(" ".join(lines["prompt"].iloc[0].split()), readers[0])
        numbers = {name: lines[name].astype(float) for name in ("cost", "reward")}
        said = {"prompt": prompt, "outcome": lines["status"].map(NAMES), "answer": texts}
        frames.append(lines.assign(**said, **numbers)[COLUMNS])
    return pd.concat(frames, ignore_index=True)


def most_unlike(shown: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the policy whose methods differ most in outcome, the first of equals.

    Parameters
    ----------
    shown : DataFrame
        `compare_answers`.
    """
    differing = shown.groupby("policy", sort=False)["outcome"].agg(unlike)
    return shown[shown["policy"] == differing.idxmax()]


def as_markdown(shown: pd.DataFrame) -> str:
    """Return `compare_answers` as Markdown, a section per policy.

    Texts are code spans, so that nothing in them is markup.
    """
    sections = []
    for policy, rows in shown.groupby("policy", sort=False):
        table = rows[["method", "outcome", "cost", "reward"]].assign(
            answer=[_span(text) for text in rows["answer"]]
        )
        sections.append(
            f"### {policy}\n\nPrompt: {_span(rows['prompt'].iloc[0])}\n\n{markdown(table)}"
        )
    return "\n".join(sections)


def _span(text: str) -> str:
    return f"`{text.replace('`', chr(39)) or ' '}`"


# --- the picture ----------------------------------------------------------------------------------


@styled
def answers(shown: pd.DataFrame) -> Figure:
    """Draw the answers of every method to one prompt, as a table.

    Methods that gave the same answer share a row.

    Parameters
    ----------
    shown : DataFrame
        Rows of `compare_answers`, of one policy. Answers are cut after `LONGEST` characters.

    Raises
    ------
    ParameterError
        For rows of no policy, or of several.
    """
    if shown["policy"].nunique() != 1:
        raise ParameterError(
            f"the answers are of {shown['policy'].nunique()} policies; give those of one, "
            f"see most_unlike"
        )
    key = ["answer", "outcome", "cost", "reward"]
    same = [rows for _, rows in shown.groupby(key, sort=False, dropna=False)]
    texts = [list(_lines(_cut(rows["answer"].iloc[0]), WIDTH - TEXT - MARGIN)) for rows in same]
    heights = [
        max(len(rows), len(lines)) * LINE + GAP for rows, lines in zip(same, texts, strict=True)
    ]
    prompt = list(_lines(_cut(shown["prompt"].iloc[0]), WIDTH - 1 - MARGIN))
    top = 0.66 + LINE * len(prompt)
    height = top + sum(heights) + 0.05
    fig = Figure(figsize=(WIDTH, height))
    ax = fig.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(height, 0))
    ax.set_axis_off()
    text = {"size": SIZE, "color": INK, "va": "center", "parse_math": False}
    ax.text(0.1, 0.18, shown["policy"].iloc[0], **text | {"size": 12}, weight="bold")
    ax.text(0.1, 0.44, "prompt", **text, weight="bold")
    for k, line in enumerate(prompt):
        ax.text(1.0, 0.44 + LINE * k, line, **text)
    names = ("method", "outcome", "cost", "reward", "answer")
    for name, across in zip(names, (METHOD, OUTCOME, *NUMBERS, TEXT), strict=True):
        side = "right" if name in ("cost", "reward") else "left"
        ax.text(across, top - 0.13, name, **text, weight="bold", ha=side)
    start = top
    for rows, lines, size in zip(same, texts, heights, strict=True):
        ax.plot([0.1, WIDTH - 0.1], [start, start], color="#c9c9c9", lw=0.8)
        _row(ax, start + GAP / 2, rows, lines, text)
        colour = OUTCOMES[rows["outcome"].iloc[0]]
        ax.add_patch(Rectangle((0, start + 0.02), 0.05, size - 0.04, fc=colour, lw=0))
        start += size
    return fig


def _row(ax: Axes, top: float, rows: pd.DataFrame, lines: Sequence[str], text: dict) -> None:
    """Write one answer with the methods that gave it, from `top` downwards."""
    first = rows.iloc[0]
    place = top + LINE / 2
    for k, method in enumerate(rows["method"]):
        colour, marker = style(method)
        ax.plot(0.2, place + LINE * k, marker=marker, color=colour, ms=6, ls="none")
        ax.text(METHOD, place + LINE * k, method, **text)
    ax.text(
        OUTCOME, place, first["outcome"], **text | {"color": INKS[first["outcome"]]}, weight="bold"
    )
    for across, name in zip(NUMBERS, ("cost", "reward"), strict=True):
        if np.isfinite(first[name]):
            ax.text(across, place, f"{first[name]:.2f}", **text, ha="right")
    for k, line in enumerate(lines):
        ax.text(TEXT, place + LINE * k, line, **text)


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else text[:LONGEST].rsplit(" ", 1)[0] + " …"


def _lines(text: str, width: float) -> Iterator[str]:
    """Yield the lines of a text, `width` inches long at most.

    A longer word is broken, a character without a glyph replaced.
    """
    known = get_font(findfont(FONT)).get_charmap()
    text = "".join(c if ord(c) in known else "\N{REPLACEMENT CHARACTER}" for c in text)
    line = ""
    for word in text.split(" "):
        if line and _inches(f"{line} {word}") > width:
            yield line
            line = ""
        line = f"{line} {word}".strip()
        while len(line) > 1 and _inches(line) > width:
            end = _fitting(line, width)
            yield line[:end]
            line = line[end:]
    yield line


def _fitting(line: str, width: float) -> int:
    """Return how many characters of a line that is too long fit, but at least one."""
    starts = [line[:end] for end in range(1, len(line))]
    return max(1, bisect_right(starts, width, key=_inches))


def _inches(line: str) -> float:
    return PAPER.get_text_width_height_descent(line, FONT, ismath=False)[0] / 72
