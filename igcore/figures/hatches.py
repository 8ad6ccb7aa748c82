"""Hatches on bars whose colours are alike in grey, or to eyes without one kind of cone."""

from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.patheffects import withStroke

from .style import OUTCOMES

HATCHES = {  # colour of a bar -> its hatch; a bar of another colour has none
    OUTCOMES["unsafe"]: "///",
    OUTCOMES["abstained"]: "...",
    "#5a5a5a": "xxx",
}


def hatch(ax: Axes) -> None:
    """Hatch the bars of a panel by their colour; the numbers in them keep a clear ground.

    Numbers are those of `igcore.figures.style.stacked_bars`: one text a bar, in the same order.
    """
    bars = [bar for group in ax.containers for bar in group]
    for bar, text in zip(bars, ax.texts, strict=True):
        ground = to_hex(bar.get_facecolor())
        bar.set_hatch(HATCHES.get(ground))
        text.set_path_effects([withStroke(linewidth=4, foreground=ground)])
