"""The candidates of a search as a picture: block under block, a line from parent to child."""

import math
from dataclasses import dataclass, replace
from html import escape
from itertools import groupby
from textwrap import wrap
from unicodedata import east_asian_width

from ..errors import ParameterError
from ..response import Response
from ..scorers import keeps_cache
from .html import GREY, OVER, WITHIN, hidden, mask_prompt, masker_of, verdict_of
from .record import ON_THE_WAY, Node

# in pixels: a page fits two pictures side by side, and a phone one, so that letters stay large
WIDE, LEFT, BOX = 440, 10, 54  # of the picture; where its texts and its boxes begin
LINE, GAP = 17, 7  # height of a line, and from box to box
LETTERS, NUMBERS, TITLE = 45, 63, 66  # letters of a line: of a text, of its numbers, and of a title
JOINER = "\u2060"  # of no width
MONO = ' font-family="monospace" font-size="13"'
LEGEND = "filled: kept · hollow: not kept · z: the budget left"


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
    budget : float
        The budget of the recorded search.
    reward : str
        What the reward is called; without a reward model it is the policy's own likelihood.
    """

    prompt: str
    verdict: str
    nodes: list[Node]
    method: str
    budget: float
    reward: str

    @classmethod
    def of(cls, answer: Response, masked: bool = True) -> "Tree":
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
        reward = "reward" if guard.reward else "mean log p"
        verdict = verdict_of(answer)
        return cls(prompt, verdict, nodes, guard.method, guard.config.budget, reward)

    def _repr_svg_(self) -> str:
        title = _lines(f"{self.method}: {self.verdict}", TITLE)
        prompt = _lines(self.prompt, TITLE, max_lines=3)
        y = len(title) * LINE
        texts = [_text(LEFT, 0, title), _text(LEFT, y, [*prompt, LEGEND], GREY)]
        y += (len(prompt) + 1) * LINE + GAP
        parents = list(dict.fromkeys(node.parent for node in self.nodes))
        boxes, edges, middles = [], [], {}
        for (block, round_), nodes in groupby(self.nodes, lambda node: (node.block, node.round)):
            texts.append(_text(BOX, y, [f"block {block + 1}, round {round_ + 1}"], GREY))
            y += LINE + GAP
            for node in nodes:
                box, high = self._box(node, y)
                boxes.append(box)
                middles[node.number] = y + high // 2
                if node.parent >= 0:
                    lane = parents.index(node.parent) % 6  # six places beside the boxes
                    edges.append(_edge(node, lane, middles[node.parent], middles[node.number]))
                y += high + GAP
        label = f"{len(self.nodes)} candidates of {' '.join(title)}"
        start = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {y}" '
            f'width="{WIDE}" height="{y}" style="max-width:100%;height:auto" '
            f'font-family="sans-serif" font-size="12" role="img" aria-label="{escape(label)}">'
            '<rect width="100%" height="100%" fill="white"/>'
        )
        return "\n".join([start, *texts, *edges, *boxes, "</svg>"])

    def _box(self, node: Node, y: int) -> tuple[str, int]:
        """Return the box of a candidate, with its whole text and its numbers, and its height."""
        color, strong = _color(node), node.fate in ON_THE_WAY
        letters = "white" if strong else "#222222"
        text, numbers = _lines(node.text, LETTERS), _lines(self._numbers(node), NUMBERS)
        high = (len(text) + len(numbers)) * LINE + GAP
        box = (
            f'<rect x="{BOX}" y="{y}" width="{WIDE - LEFT - BOX}" height="{high}" rx="5" '
            f'fill="{color if strong else "white"}" stroke="{color}"/>'
            + _text(BOX + 7, y, text, letters, MONO)
            + _text(BOX + 7, y + len(text) * LINE, numbers, letters)
        )
        return box, high

    def _numbers(self, node: Node) -> str:
        """Return the fate of a candidate and its numbers in words."""
        beam, side = node.beam, "within" if node.within else "over"
        # the budget may be charged with a check inside the block
        cost = f"cost {round(beam.worst, 3):g}" + " inside the block" * (beam.worst > beam.cost)
        line = f"{node.fate} · {cost}, z {round(beam.state.z, 3):g}: {side} the budget of "
        line += f"{self.budget:g} · {self.reward} {beam.reward:.2f}"
        return line + (f" · f1 {beam.f1:.2f}" if math.isfinite(beam.f1) else "")


def _color(node: Node) -> str:
    return WITHIN if node.within else OVER


def _edge(node: Node, lane: int, y0: int, y1: int) -> str:
    """Return the line from the parent's box, by a lane beside the boxes, to a candidate's."""
    width = 2.4 if node.fate in ON_THE_WAY else 0.8
    return (
        f'<path d="M{BOX} {y0 + 5} H{BOX - 8 - 6 * lane} V{y1 - 5} H{BOX}" fill="none" '
        f'stroke="{_color(node)}" stroke-width="{width}"/>'
    )


def _lines(text: str, letters: int, max_lines: int | None = None) -> list[str]:
    """Return a text in lines, without characters that XML forbids."""
    line = "".join(c if c.isprintable() else "�" for c in " ".join(text.split()))
    # letters of two columns count twice
    padded = "".join(c + JOINER * (east_asian_width(c) in "FW") for c in line)
    lines = wrap(padded, letters, max_lines=max_lines, placeholder="…")
    return [line.replace(JOINER, "") for line in lines] or [""]


def _text(x: int, y: int, lines: list[str], color: str = "#222222", look: str = "") -> str:
    """Return lines of text below y."""
    spans = "".join(f'<tspan x="{x}" dy="{LINE}">{escape(line)}</tspan>' for line in lines)
    return f'<text y="{y}" fill="{color}"{look}>{spans}</text>'
