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
    style,
)

APART = 10  # of 100 steps of lightness: less is the same grey on paper
DISTINCT = 15  # CIEDE2000: less looks like a shade of the same colour
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


def difference(one: np.ndarray, two: np.ndarray) -> float:
    """Return the colour difference CIEDE2000 of two colours in L*, a*, b*."""
    (l1, a1, b1), (l2, a2, b2) = one, two
    chroma = (np.hypot(a1, b1) + np.hypot(a2, b2)) / 2
    stretch = 1.5 - 0.5 * np.sqrt(chroma**7 / (chroma**7 + 25.0**7))
    c1, c2 = np.hypot(a1 * stretch, b1), np.hypot(a2 * stretch, b2)
    h1, h2 = np.arctan2(b1, a1 * stretch), np.arctan2(b2, a2 * stretch)
    turn = (h2 - h1 + np.pi) % (2 * np.pi) - np.pi
    hue, chroma, light = h1 + turn / 2, (c1 + c2) / 2, ((l1 + l2) / 2 - 50) ** 2
    waves = [(0.17, 1, 150), (0.24, 2, 0), (0.32, 3, 6), (-0.20, 4, -63)]
    weight = 1 + sum(w * np.cos(n * hue + np.radians(at)) for w, n, at in waves)
    by_light = (l2 - l1) / (1 + 0.015 * light / np.sqrt(20 + light))
    by_chroma = (c2 - c1) / (1 + 0.045 * chroma)
    by_hue = 2 * np.sqrt(c1 * c2) * np.sin(turn / 2) / (1 + 0.015 * chroma * weight)
    blue = 60 * np.exp(-(((np.degrees(hue) % 360 - 275) / 25) ** 2))
    rotation = -2 * np.sqrt(chroma**7 / (chroma**7 + 25.0**7)) * np.sin(np.radians(blue))
    return np.sqrt(by_light**2 + by_chroma**2 + by_hue**2 + rotation * by_chroma * by_hue)


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


@pytest.mark.parametrize(
    ("one", "two", "expected"),
    [
        ((50, 2.6772, -79.7751), (50, 0, -82.7485), 2.0425),
        ((50, 2.5, 0), (73, 25, -18), 27.1492),
        ((60.2574, -34.0099, 36.2677), (60.4626, -34.1751, 39.4387), 1.2644),
        ((22.7233, 20.0904, -46.694), (23.0331, 14.973, -42.5619), 2.0373),
    ],
)
def test_the_colour_difference_is_that_of_its_authors(one, two, expected):
    """Guards the formula by test data of Sharma, Wu and Dalal (2005)."""
    assert difference(one, two) == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize("vision", ["full", *MISSING])
def test_no_method_has_the_colour_of_over_budget_and_no_rival_that_of_ours(vision):
    """Bug: InferenceGuard was orange, and so was "unsafe": a good line looked like a bad one."""
    seen = {name: lab(colour, vision) for name, (colour, _) in STYLE.items()}
    seen["a user's own"] = lab(style("mine")[0], vision)
    ours, unsafe = seen.pop("inferenceguard"), lab(OUTCOMES["unsafe"], vision)
    assert difference(ours, unsafe) > DISTINCT
    for colour in seen.values():
        assert min(difference(ours, colour), difference(unsafe, colour)) > DISTINCT


def test_bars_get_the_hatch_of_their_colour():
    """Bug: a hatch on the bar of another outcome, or under its number."""
    (ax,) = Figure().subplots(1, 1, squeeze=False).flat
    counts = pd.DataFrame({name: [3, 4] for name in OUTCOMES}, index=["one", "two"])
    stacked_bars(ax, counts, OUTCOMES)
    found = [bar.get_hatch() for bars in ax.containers for bar in bars]
    assert found == [None, None, "...", "...", "///", "///"]
    assert all(text.get_path_effects() for text in ax.texts)
