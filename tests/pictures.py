"""What is written in a picture, and whether it can be read."""

import itertools

from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

Boxes = list[tuple[str, Bbox]]


def boxes(fig: Figure) -> Boxes:
    """Return every text that is seen and its box in pixels, without the line that leads to it."""
    fig.draw_without_rendering()
    axes = [
        (axis, sorted(axis.get_view_interval())) for ax in fig.axes for axis in (ax.xaxis, ax.yaxis)
    ]
    ticks = [
        (tick, span)
        for axis, span in axes
        for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]
    ]
    beyond = {tick.label1 for tick, (low, high) in ticks if not low <= tick.get_loc() <= high}
    written = [
        text
        for text in fig.findobj(Text)
        if text.get_visible() and text.get_text() and text not in beyond
    ]
    return [(text.get_text(), Text.get_window_extent(text)) for text in written]


def hidden(found: Boxes) -> list[tuple[str, str]]:
    """Return the pairs of texts of which one lies on the other."""
    return [(one, two) for (one, a), (two, b) in itertools.combinations(found, 2) if a.overlaps(b)]


def outside(fig: Figure, found: Boxes) -> list[str]:
    """Return the texts that leave the page."""
    return [
        text
        for text, b in found
        if min(b.x0, b.y0) < -1 or b.x1 > fig.bbox.x1 + 1 or b.y1 > fig.bbox.y1 + 1
    ]
