"""Where labels stand in a picture: near their points, and hiding nothing."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.text import Annotation, Text
from matplotlib.transforms import Bbox

from .style import INK

# 1/72 inch from a point, near first; of equal distances the upper right first
ANGLES = np.deg2rad((45, 0, 315, 90, 270, 135, 180, 225, 67, 22, 338, 292, 112, 158, 202, 248))
SPOTS = [r * np.array([np.cos(a), np.sin(a)]) for r in (11, 17, 25, 34, 45, 58) for a in ANGLES]
MARK = 4.5  # 1/72 inch: half the width of a marker


def spread(values: np.ndarray, limits: tuple[float, float], gap: float) -> np.ndarray:
    """Return a height in [0, 1] for the label of each value.

    Labels are in the order of the values, near them, and `gap` apart.
    """
    rank = np.argsort(values, kind="stable")
    steps = gap * np.arange(len(values))
    free = (values[rank] - limits[0]) / (limits[1] - limits[0]) - steps
    # the mean of the nondecreasing hulls from above and below: neighbours stay a gap apart and push
    # each other equally
    free = (np.maximum.accumulate(free) + np.minimum.accumulate(free[::-1])[::-1]) / 2
    heights = np.empty(len(values))
    heights[rank] = np.clip(free, 0, 1 - gap * (len(values) - 1)) + steps
    return heights


def place(ax: Axes, points: np.ndarray, labels: Sequence[str]) -> list[Annotation]:
    """Write a label beside each point, as near as it hides nothing, and return what was written.

    Call it last: the figure must have been laid out, and the panel have its final limits.

    Parameters
    ----------
    ax : Axes
    points : ndarray, shape (n, 2)
        Data coordinates; a point with NaN is not there.
    labels : sequence of str, length n
        A point without a label is kept free of others'.
    """
    at = ax.transData.transform(points)  # (n, 2), pixels
    scale = ax.figure.dpi / 72  # pixels per point
    there = np.flatnonzero(np.isfinite(at).all(axis=1))
    taken = [Bbox([at[k] - MARK * scale, at[k] + MARK * scale]) for k in there]
    out = []
    for k in [k for k in there if labels[k]]:
        look = {
            "ha": "center",
            "va": "center",
            "size": 10,
            "color": INK,
            "textcoords": "offset points",
        }
        line = {"arrowstyle": "-", "lw": 0.6, "color": INK, "shrinkA": 0, "shrinkB": MARK}
        text = ax.annotate(labels[k], points[k], (0, 0), arrowprops=line, **look)
        text.set_in_layout(False)
        half = np.array(Text.get_window_extent(text).size) / 2  # without the line
        boxes = [Bbox([at[k] + scale * spot - half, at[k] + scale * spot + half]) for spot in SPOTS]
        best = np.argmin([_hidden(box, taken, ax.bbox) for box in boxes])  # the first of equals
        text.set_position(SPOTS[best])
        far = best >= 2 * len(ANGLES)
        text.arrow_patch.set_visible(bool(far))  # a line leads to a label that stands further off
        taken.append(boxes[best])
        out.append(text)
    return out


def _hidden(box: Bbox, taken: Sequence[Bbox], panel: Bbox) -> int:
    """Count what a label would hide, and whether it would leave the panel."""
    return box.count_overlaps(taken) + (
        box.x1 > panel.x1 or box.x0 < panel.x0 or box.y0 < panel.y0 or box.y1 > panel.y1
    )
