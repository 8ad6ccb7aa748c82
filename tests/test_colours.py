"""The colours of pictures for those who do not see them: in grey, and with two of three cones."""

import itertools

import numpy as np
import pandas as pd
import pytest
from colorspacious import cspace_convert, deltaE
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
DISTINCT = 15  # in CAM02-UCS: less looks like a shade of the same colour
# what eyes without one kind of cones see
MISSING = {
    kind: {"name": "sRGB1+CVD", "cvd_type": f"{kind}omaly", "severity": 100}
    for kind in ("protan", "deuteran")
}


def seen(colour: str, vision: str) -> np.ndarray:
    """Return a colour as it is seen, in sRGB."""
    return cspace_convert(to_rgb(colour), MISSING.get(vision, "sRGB1"), "sRGB1")


def lab(colour: str, vision: str) -> np.ndarray:
    """Return lightness, a* and b* (CIE 1976) of a colour as seen; of grey, lightness alone."""
    colours = cspace_convert(seen(colour, vision), "sRGB1", "CIELab")
    return colours if vision != "grey" else colours * [1, 0, 0]


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


@pytest.mark.parametrize("vision", ["full", *MISSING])
def test_no_method_has_the_colour_of_over_budget_and_no_rival_that_of_ours(vision):
    """Bug: InferenceGuard was orange, and so was "unsafe": a good line looked like a bad one."""
    colours = {name: seen(colour, vision) for name, (colour, _) in STYLE.items()}
    colours["a user's own"] = seen(style("mine")[0], vision)
    ours, unsafe = colours.pop("inferenceguard"), seen(OUTCOMES["unsafe"], vision)
    assert deltaE(ours, unsafe) > DISTINCT
    for colour in colours.values():
        assert min(deltaE(ours, colour), deltaE(unsafe, colour)) > DISTINCT


def test_bars_get_the_hatch_of_their_colour():
    """Bug: a hatch on the bar of another outcome, or under its number."""
    (ax,) = Figure().subplots(1, 1, squeeze=False).flat
    counts = pd.DataFrame({name: [3, 4] for name in OUTCOMES}, index=["one", "two"])
    stacked_bars(ax, counts, OUTCOMES)
    found = [bar.get_hatch() for bars in ax.containers for bar in bars]
    assert found == [None, None, "...", "...", "///", "///"]
    assert all(text.get_path_effects() for text in ax.texts)
