"""The colours of pictures for those who do not see them: in grey, and with two of three cones."""

import itertools

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from igstudy.figures import critic
from igstudy.figures.style import (
    HATCHES,
    MARKERS,
    OUTCOMES,
    PALETTE,
    SIX,
    STYLE,
    stacked_bars,
)

APART = 10  # of 100 steps of lightness: less is the same grey on paper
# linear RGB -> what the long, middle and short cones see, white as 1
LMS = np.array(
    [[0.31399, 0.63951, 0.04650], [0.15537, 0.75789, 0.08670], [0.01775, 0.10945, 0.87257]]
)
# what a missing cone would see, guessed from the others so that white and blue stay the same
MISSING = {
    "protanopia": [[0, 1.05118, -0.05116], [0, 1, 0], [0, 0, 1]],
    "deuteranopia": [[1, 0, 0], [0.9513, 0, 0.04866], [0, 0, 1]],
}
D65 = np.array([0.95047, 1.0, 1.08883])
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def lab(colour: str, vision: str) -> np.ndarray:
    """Return lightness, a* and b* (CIE 1976) of a colour as seen; of grey, lightness alone."""
    rgb = np.array(to_rgb(colour))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    if vision in MISSING:
        seen = np.array(MISSING[vision]) @ LMS @ linear
        linear = np.clip(np.linalg.solve(LMS, seen), 0, 1)
    x, y, z = np.cbrt(np.maximum(XYZ @ linear / D65, 1e-9))
    colours = [116 * y - 16, 500 * (x - y), 200 * (y - z)]
    return np.array(colours if vision != "grey" else [colours[0], 0, 0])


def alike(looks: dict, vision: str) -> list[tuple]:
    """Return the pairs of looks (colour, marker or hatch) that cannot be told apart."""
    return [
        (one, two)
        for (one, (a, mark)), (two, (b, other)) in itertools.combinations(looks.items(), 2)
        if mark == other and np.linalg.norm(lab(a, vision) - lab(b, vision)) < APART
    ]


def bars(colours: dict[str, str]) -> dict:
    return {name: (colour, HATCHES.get(colour)) for name, colour in colours.items()}


TOGETHER = {  # looks of one picture
    "six methods": {name: STYLE[name] for name in SIX},
    "all methods": STYLE,
    "critics": {n: (critic.look_of(n)["color"], critic.look_of(n)["marker"]) for n in range(8)},
    "beams": {k: (PALETTE[k], MARKERS[k]) for k in range(3)},
    "outcomes": bars(OUTCOMES),
}


@pytest.mark.parametrize("vision", ["full", "grey", *MISSING])
@pytest.mark.parametrize("picture", TOGETHER)
def test_looks_of_one_picture_can_be_told_apart(picture, vision):
    """Bug: two lines or bars that are one on paper or to one man in twelve: neither another
    marker or hatch, nor another lightness.
    """
    assert alike(TOGETHER[picture], vision) == []


@pytest.mark.parametrize("vision", MISSING)
def test_the_simulation_keeps_white_and_merges_red_with_green(vision):
    """Bug: a matrix that tells apart what such eyes cannot, or that gives a tint to white."""
    assert lab("#ffffff", vision) == pytest.approx([100, 0, 0], abs=0.5)
    apart = [
        lab("#b04020", vision) - lab("#607020", vision),
        lab("#b04020", "") - lab("#607020", ""),
    ]
    assert abs(apart[0][1]) < abs(apart[1][1]) / 5


def test_bars_get_the_hatch_of_their_colour():
    """Bug: a hatch on the bar of another outcome, or under its number."""
    (ax,) = Figure().subplots(1, 1, squeeze=False).flat
    counts = pd.DataFrame({name: [3, 4] for name in OUTCOMES}, index=["one", "two"])
    stacked_bars(ax, counts, OUTCOMES)
    found = [bar.get_hatch() for bars in ax.containers for bar in bars]
    assert found == [None, None, "...", "...", "///", "///"]
    assert all(text.get_path_effects() for text in ax.texts)
