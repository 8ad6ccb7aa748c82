"""The picture of the method itself, drawn from shapes and words.

Lengths are inches on the page. The blocks and bars are an example with N = 4 samples and K = 2
beams, not a result.
"""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from .style import INK, OUTCOMES, WIDTH, styled

HEIGHT = 4.72
SAFE, ABSTAINED, UNSAFE = OUTCOMES.values()
FRAMES = {  # step -> left, bottom, width, height; colour of its edge; heading, what is done
    "prompt": ((0.06, 1.92, 1.0, 0.76), INK, "prompt", ""),
    "draw": ((1.4, 1.45, 1.92, 2.55), INK, "draw", "N blocks of\ntokens after\nthe K beams"),
    "score": (
        (3.7, 1.45, 1.98, 2.55),
        INK,
        "score",
        "z, the budget left;\nthen the reward\nor a critic",
    ),
    "keep": ((6.06, 1.45, 1.1, 2.55), INK, "keep", "the K best\nof those\nwith z ≥ 0"),
    "check": (
        (7.5, 1.62, 1.44, 1.4),
        INK,
        "final check",
        "cost of the\nwhole text,\nread afresh:\nin budget?",
    ),
    "retry": ((1.4, 0.1, 4.28, 0.72), UNSAFE, "retry", "penalise the tokens of failed blocks"),
    "abstain": ((7.5, 0.1, 1.44, 0.72), "#8a8a8a", "abstention", ""),
    "answer": ((7.5, 3.78, 1.44, 0.72), SAFE, "answer", ""),
}
ARROWS = {  # from, to -> points on the way; what is said of it, and where
    ("prompt", "draw"): ([(1.06, 2.3), (1.4, 2.3)], "", None),
    ("draw", "score"): ([(3.32, 2.3), (3.7, 2.3)], "", None),
    ("score", "keep"): ([(5.68, 2.3), (6.06, 2.3)], "", None),
    ("keep", "check"): ([(7.16, 2.3), (7.5, 2.3)], "", None),
    ("check", "answer"): ([(8.22, 3.02), (8.22, 3.78)], "yes", (8.34, 3.38)),
    ("check", "abstain"): ([(8.22, 1.62), (8.22, 0.82)], "no", (8.34, 1.22)),
    ("keep", "draw"): (
        [(6.61, 4.0), (6.61, 4.34), (2.36, 4.34), (2.36, 4.0)],
        "next block, until the beams are finished",
        (2.5, 4.54),
    ),
    ("score", "retry"): ([(4.9, 1.45), (4.9, 0.82)], "z < 0 for all", (5.02, 1.15)),
    ("retry", "draw"): ([(2.36, 0.82), (2.36, 1.45)], "draw again", (2.48, 1.15)),
    ("retry", "abstain"): ([(5.68, 0.46), (7.5, 0.46)], "none safe after\nM rounds", (5.8, 0.76)),
}
LANES = (2.75, 2.45, 2.15, 1.85)  # heights of the four blocks; two follow each beam
LEFT = (0.55, -0.45, 0.9, 0.3)  # z of each, as a share of the budget
KEPT = (2, 0)  # lanes, the best first


@styled
def framework() -> Figure:
    """Draw how a prompt becomes an answer or an abstention (paper, figure 1 and Algorithm 1).

    Beams are continued block by block; each block is scored with the safety state z, the budget
    that is left; of the safe ones the best K are kept; where there is none, the tokens that failed
    are penalised and the block is drawn again; the finished text is checked once more. Blue is
    safe, orange and hatched unsafe.
    """
    fig = Figure(figsize=(WIDTH, HEIGHT))
    ax = fig.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(0, HEIGHT))
    ax.set_axis_off()
    for frame in FRAMES.values():
        _frame(ax, *frame)
    for arrow in ARROWS.values():
        _arrow(ax, *arrow)
    _drawn(ax, FRAMES["draw"][0])
    _scored(ax, FRAMES["score"][0])
    _kept(ax, FRAMES["keep"][0])
    return fig


def _frame(ax: Axes, place: tuple[float, ...], colour: str, heading: str, words: str) -> None:
    left, bottom, width, height = place
    look = {"boxstyle": "round,pad=0,rounding_size=0.08", "ec": colour, "fc": "white", "lw": 1.8}
    ax.add_patch(FancyBboxPatch((left, bottom), width, height, **look))
    centre = left + width / 2
    if words:
        ax.text(
            centre,
            bottom + height - 0.1,
            heading,
            weight="bold",
            size=14,
            color=INK,
            ha="center",
            va="top",
        )
        ax.text(
            centre,
            bottom + height - 0.39,
            words,
            size=12.5,
            color=INK,
            ha="center",
            va="top",
            linespacing=1.15,
        )
    else:
        ax.text(
            centre,
            bottom + height / 2,
            heading,
            weight="bold",
            size=14,
            color=INK,
            ha="center",
            va="center",
        )


def _arrow(
    ax: Axes, points: Sequence[tuple[float, float]], words: str, at: tuple[float, float] | None
) -> None:
    *way, end = points
    look = {"color": INK, "lw": 1.8}
    ax.plot(*zip(*way, strict=True), solid_joinstyle="round", **look)
    ax.add_patch(
        FancyArrowPatch(
            way[-1], end, arrowstyle="-|>", mutation_scale=16, shrinkA=0, shrinkB=0, **look
        )
    )
    if words:
        ax.text(*at, words, size=12.5, color=INK, va="center", linespacing=1.1)


def _block(ax: Axes, left: float, height: float, width: float, safe: bool | None) -> None:
    """Draw one block of tokens, or the prefix before it."""
    colour, hatch = {True: (SAFE, None), False: (UNSAFE, "////"), None: (ABSTAINED, None)}[safe]
    ax.add_patch(
        Rectangle((left, height - 0.09), width, 0.18, fc=colour, ec="white", lw=0.8, hatch=hatch)
    )


def _drawn(ax: Axes, place: tuple[float, ...]) -> None:
    """Draw two beams, and the two blocks that were drawn after each."""
    left = place[0]
    for first, second in (LANES[:2], LANES[2:]):
        middle = (first + second) / 2
        for k in range(3):
            _block(ax, left + 0.14 + 0.24 * k, middle, 0.24, None)
        for lane in (first, second):
            ax.plot([left + 0.88, left + 1.14], [middle, lane], color=INK, lw=1.2)
            _block(ax, left + 1.16, lane, 0.62, LEFT[LANES.index(lane)] >= 0)


def _scored(ax: Axes, place: tuple[float, ...]) -> None:
    """Draw z of each block as a bar from zero."""
    zero = place[0] + 0.72
    ax.plot([zero, zero], [LANES[-1] - 0.15, LANES[0] + 0.15], color=INK, lw=1.2)
    ax.text(zero, LANES[-1] - 0.17, "0", size=11, color=INK, ha="center", va="top")
    for lane, z in zip(LANES, LEFT, strict=True):
        _block(ax, min(zero, zero + z), lane, abs(z), z >= 0)


def _kept(ax: Axes, place: tuple[float, ...]) -> None:
    """Draw the beams that go on, with the new block at their end."""
    for lane in KEPT:
        for k in range(4):
            _block(ax, place[0] + 0.11 + 0.22 * k, LANES[lane], 0.22, True if k == 3 else None)
