"""Labels beside the points of a picture, where they hide nothing."""

import itertools
from collections.abc import Sequence

import numpy as np
from adjustText import adjust_text
from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke
from matplotlib.text import Annotation, Text

from .style import INK

# how strongly adjustText pushes labels across and up; the next one where two labels overlap
FORCES = ((0.2, 0.4), (0.4, 0.8), (0.3, 0.6), (0.1, 0.2), (0.2, 0.6), (0.6, 1.2))
NEAR = 6  # 1/72 inch: a label that is nearer to its point needs no line


def place(ax: Axes, points: np.ndarray, labels: Sequence[str], size: int = 10) -> list[Annotation]:
    """Write a label near each point, joined to it by a thin line, and return what was written.

    Call it last: the figure must have been laid out, and the panel have its final limits.

    Parameters
    ----------
    ax : Axes
    points : ndarray, shape (n, 2)
        Data coordinates; a point with NaN is not there.
    labels : sequence of str, length n
        A point without a label is kept free of others'.
    size : int
        Of the letters, in points.
    """
    there = np.isfinite(points).all(axis=1)
    look = {"size": size, "color": INK, "ha": "center", "va": "center", "in_layout": False}
    look["path_effects"] = [withStroke(linewidth=2, foreground="white")]
    line = {"arrowstyle": "-", "lw": 0.6, "color": INK, "shrinkA": 0, "shrinkB": 4}
    texts = [
        ax.annotate(label, point, point, arrowprops=line, **look)
        for label, point, drawn in zip(labels, points, there, strict=True)
        if label and drawn
    ]
    marks = ax.scatter(*points[there].T, s=90)  # what no label may hide
    look = {"objects": marks, "expand": (1.04, 1.1), "prevent_crossings": False}
    for x, y in FORCES:
        for text in texts:
            text.set_position(text.xy)
        # a number of steps and no time limit, so that the picture is the same each time
        forces = {"force_text": (x, y), "force_static": (x, y)}
        adjust_text(texts, ax=ax, iter_lim=1000, **look, **forces)
        boxes = [Text.get_window_extent(text) for text in texts]
        if not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2)):
            break
    marks.remove()
    for text, box in zip(texts, boxes, strict=True):
        around = box.padded(NEAR * ax.figure.dpi / 72)
        text.arrow_patch.set_visible(not around.contains(*ax.transData.transform(text.xy)))
    return texts
