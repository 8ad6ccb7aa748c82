"""The picture of the method: its steps and arrows, and that they can be read."""

import itertools

import pytest
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle
from matplotlib.text import Text
from matplotlib.transforms import Bbox
from pictures import boxes, hidden, outside

from igcore.figures import overview
from igcore.figures.style import OUTCOMES


@pytest.fixture(scope="module")
def fig():
    fig = overview.framework()
    fig.draw_without_rendering()
    return fig


def frames(fig) -> dict[str, Bbox]:
    """The box of each step, in pixels."""
    drawn = [patch for patch in fig.axes[0].patches if isinstance(patch, FancyBboxPatch)]
    return dict(zip(overview.FRAMES, [patch.get_window_extent() for patch in drawn], strict=True))


def test_all_steps_are_there_and_every_one_is_reached():
    """Bug: a step without a way in, or a way out of an end."""
    starts, ends = zip(*overview.ARROWS, strict=True)
    assert set(starts) | set(ends) == set(overview.FRAMES)
    assert set(overview.FRAMES) - set(ends) == {"prompt"}
    assert set(overview.FRAMES) - set(starts) == {"answer", "abstain"}


def test_arrows_go_from_frame_to_frame():
    """Bug: an arrow that ends in the void after a frame was moved."""
    for (start, end), (points, _, _) in overview.ARROWS.items():
        for name, (x, y) in ((start, points[0]), (end, points[-1])):
            left, bottom, width, height = overview.FRAMES[name][0]
            beside = (
                min(abs(x - left), abs(x - left - width)) < 1e-6 and bottom <= y <= bottom + height
            )
            below = (
                min(abs(y - bottom), abs(y - bottom - height)) < 1e-6 and left <= x <= left + width
            )
            assert beside or below, (start, end)


def test_everything_can_be_read(fig):
    """Bug: words on words, words that leave their frame or the page, an arrow through words,
    letters that are too small.
    """
    found = boxes(fig)
    assert len(found) >= 20 and hidden(found) == [] and outside(fig, found) == []
    words = {frame[2]: name for name, frame in overview.FRAMES.items()}
    words |= {frame[3]: name for name, frame in overview.FRAMES.items() if frame[3]}
    for text, box in found:
        if text in words:
            frame = frames(fig)[words[text]]
            assert (
                frame.x0 < box.x0 and box.x1 < frame.x1 and frame.y0 < box.y0 and box.y1 < frame.y1
            ), text
    to_pixels = fig.axes[0].transData.transform
    for points, _, _ in overview.ARROWS.values():
        for a, b in itertools.pairwise(to_pixels(points)):
            way = Bbox(
                [
                    [min(a[0], b[0]) - 1, min(a[1], b[1]) - 1],
                    [max(a[0], b[0]) + 1, max(a[1], b[1]) + 1],
                ]
            )
            assert not [text for text, box in found if way.overlaps(box)]
    assert min(text.get_size() for text in fig.findobj(Text) if text.get_text()) >= 11
    assert sum(isinstance(patch, FancyArrowPatch) for patch in fig.axes[0].patches) == len(
        overview.ARROWS
    )


def test_what_is_kept_is_safe_and_colour_is_not_alone(fig):
    """Bug: an example that breaks the rule it explains; a block unsafe by colour alone."""
    assert all(overview.LEFT[lane] >= 0 for lane in overview.KEPT) and min(overview.LEFT) < 0
    assert overview.LEFT[overview.KEPT[0]] == max(overview.LEFT)
    blocks = [patch for patch in fig.axes[0].patches if type(patch) is Rectangle]
    hatched = {patch.get_facecolor() for patch in blocks if patch.get_hatch()}
    plain = {patch.get_facecolor() for patch in blocks if not patch.get_hatch()}
    assert len(hatched) == 1 and not hatched & plain and len(OUTCOMES) == 3
