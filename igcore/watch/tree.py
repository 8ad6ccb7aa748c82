"""The candidates of a search as a picture: a column per block, an arrow from parent to child."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape

from ..config import SearchConfig
from ..errors import ParameterError
from ..response import Response
from ..scorers import keeps_cache
from .html import GREY, OVER, WITHIN, hidden, mask_prompt, masker_of, verdict_of
from .record import CHECK_FAILED, EMITTED, ON_THE_WAY, Node, rejudged

WIDE, HIGH = 236, 40  # size of a candidate's box, in pixels
GAP, ROW = 54, 48  # between columns, and from one candidate to the next
TOP, LEFT, TITLE = 66, 12, 700  # TITLE is the least width, for the verdict
LETTERS = 34  # letters of a candidate's text that fit into its box
MONO = ' font-family="monospace"'


@dataclass(frozen=True)
class Tree:
    """The candidate tree of one answer; a notebook shows it as a picture.

    Attributes
    ----------
    prompt, verdict : str
        The displayed prompt and verdict.
    nodes : list of Node
        See `igcore.watch.record`; with the displayed texts.
    method : str
        A key of `igcore.METHODS`.
    config : SearchConfig
        The settings of the recorded search.
    """

    prompt: str
    verdict: str
    nodes: list[Node]
    method: str
    config: SearchConfig

    @classmethod
    def of(cls, answer: Response, masked: bool = True) -> Tree:
        """Return the tree of a recorded answer.

        Parameters
        ----------
        masked : bool
            True masks the words whose cost alone is too high, and under a cost that judges answers
            as wholes every candidate over budget.

        Raises
        ------
        ParameterError
            When the search was not recorded, or the answer is a copy without its guard.
        """
        if not answer.candidates:
            raise ParameterError(
                "the search of this answer was not recorded; answer again with record=True"
            )
        if answer.guard is None:
            raise ParameterError("this answer is a copy, which has no guard; set answer.guard")
        guard, prompt, nodes = answer.guard, answer.prompt, answer.candidates
        if masked:
            mask, prompt = masker_of(answer), mask_prompt(answer)
            if keeps_cache(guard.cost):
                nodes = [n if n.within else replace(n, text=hidden(n.text)) for n in nodes]
            nodes = [replace(node, text=mask(node.text)) for node in nodes]
        return cls(prompt, verdict_of(answer), nodes, guard.method, guard.config)

    def rejudge(self, budget: float) -> Tree:
        """Return the same candidates judged under another budget, without decoding."""
        before = rejudged(self.nodes, self.config, self.config.budget)
        after = rejudged(self.nodes, self.config, budget)
        pairs = zip(before, after, strict=True)
        changed = [new.block for old, new in pairs if old.within != new.within]
        verdict = "the same candidates are within budget"
        if changed:
            verdict = (
                f"other candidates are within budget from block {changed[0] + 1} on; decode again "
                "to see what is kept"
            )
        return replace(self, nodes=after, verdict=f"under the budget of {budget:g} {verdict}")

    def _repr_svg_(self) -> str:
        places, labels = _layout(self.nodes)
        width = max(LEFT + max(x for x, _ in places.values()) + WIDE + 20, TITLE)
        height = max(y for _, y in places.values()) + HIGH + 46
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" style="max-width:100%;height:auto" '
            'font-family="sans-serif" font-size="11">',
            '<rect width="100%" height="100%" fill="white"/>',
            _text(LEFT, 16, self.method, look=' font-weight="bold"'),
            _text(LEFT, 32, self.verdict),
            _text(LEFT, 48, _short(self.prompt, 110), GREY),
        ]
        parts += [_edge(node, places) for node in self.nodes]
        parts += [*labels, *(_box(node, *places[node.number]) for node in self.nodes)]
        parts += [_legend(height - 14), "</svg>"]
        return "\n".join(parts)


def _layout(nodes: Sequence[Node]) -> tuple[dict[int, tuple[int, int]], list[str]]:
    """Return the top left corner of every candidate, and labels above retried rounds."""
    filled: dict[int, int] = {}  # block -> height in use
    places, labels, before = {}, [], (0, 0)
    for node in nodes:
        x, y = LEFT + node.block * (WIDE + GAP), filled.get(node.block, TOP)
        if node.round > 0 and (node.block, node.round) != before:
            y += 18
            labels.append(_text(x, y - 5, f"retry {node.round}", GREY))
        before = node.block, node.round
        places[node.number] = x, y
        filled[node.block] = y + ROW
    return places, labels


def _color(node: Node) -> str:
    return WITHIN if node.within else OVER


def _edge(node: Node, places: dict[int, tuple[int, int]]) -> str:
    """Return the line from a candidate's parent; empty for the first block."""
    if node.parent < 0:
        return ""
    x0, y0 = places[node.parent]
    x1, y1 = places[node.number]
    x0, y0, y1 = x0 + WIDE, y0 + HIGH // 2, y1 + HIGH // 2
    middle = (x0 + x1) // 2
    width = 2.4 if node.fate in ON_THE_WAY else 0.8
    return (
        f'<path d="M{x0} {y0} C{middle} {y0} {middle} {y1} {x1} {y1}" fill="none" '
        f'stroke="{_color(node)}" stroke-width="{width}"/>'
    )


def _box(node: Node, x: int, y: int) -> str:
    """Return the box of a candidate: its text, its numbers and its fate."""
    color, strong = _color(node), node.fate in ON_THE_WAY
    fill = color if strong else "white"
    letters = "white" if strong else "#222222"
    beam, whole = node.beam, f"{node.fate}: {_short(node.text, 1000)}"
    cost = f"cost {beam.cost:.3f}"
    if beam.worst > beam.cost:  # the budget was charged with a check inside the block
        cost, whole = f"worst {beam.worst:.3f}", f"{whole} (cost at its end {beam.cost:.3f})"
    line = f"{cost} · z {beam.state.z:.3f} · reward {beam.reward:.2f}"
    if math.isfinite(beam.f1):
        line += f" · f1 {beam.f1:.2f}"
    mark = {EMITTED: "✓ ", CHECK_FAILED: "✗ "}.get(node.fate, "")
    return (
        f"<g><title>{escape(whole)}</title>"
        f'<rect x="{x}" y="{y}" width="{WIDE}" height="{HIGH}" rx="5" fill="{fill}" '
        f'stroke="{color}" stroke-width="{1.5 if strong else 1}"/>'
        + _text(x + 7, y + 16, mark + _short(node.text, LETTERS - len(mark)), letters, MONO)
        + _text(x + 7, y + 32, line, letters)
        + "</g>"
    )


def _legend(y: int) -> str:
    """Return the legend of colours and marks, on one line."""
    marks = "filled: kept · hollow: not kept · ✓ emitted · ✗ failed the final check"
    entries = [("■ within budget", WITHIN), ("■ over budget", OVER), (marks, GREY)]
    return "\n".join(
        _text(LEFT + 110 * i, y, label, color) for i, (label, color) in enumerate(entries)
    )


def _short(text: str, letters: int) -> str:
    """Return the beginning of a text on one line, without characters that XML forbids."""
    line = "".join(c if c.isprintable() else "�" for c in " ".join(text.split()))
    return line if len(line) <= letters else line[: letters - 1] + "…"


def _text(x: int, y: int, text: str, color: str = "#222222", look: str = "") -> str:
    return f'<text x="{x}" y="{y}" fill="{color}"{look}>{escape(text)}</text>'
