"""The data behind the pictures of the theory, and that every axis says its unit."""

import numpy as np
import pytest
from matplotlib.colors import to_hex
from theory import random_tree

from igcore.figures import style as figures
from igcore.figures import theory as tf
from igcore.theory import counterexamples
from igcore.theory.constrained import expectation_optimum, outcomes
from igcore.theory.finite_sample import abstention_bound, samples_needed
from igcore.theory.mdp import augment

DRAWS = np.arange(1, 100)


def gap():
    mdp, d = counterexamples.lagrangian_gap()
    found = outcomes(mdp)
    return tf.lagrangian_gap(found, d, expectation_optimum(found, d))


PICTURES = {
    "prefix_tree": lambda: tf.prefix_tree(augment(random_tree(0), 3)),
    "identities": lambda: tf.identities([2, 1.5, 1], [2, 1.4, 0.8], [2, 2, 1.4], 2),
    "accounting": lambda: tf.accounting(
        {"(1, 2)": {"peak": 2, "clamped_sum": 3}, "(0, -1)": {"peak": 0, "clamped_sum": 0}}, 2
    ),
    "value_iteration_error": lambda: tf.value_iteration_error([40, 38, 36.1], [40, 38, 36.1]),
    "truncation": lambda: tf.truncation(
        np.array([0.1, 0.5, 1]),
        np.array([[0.1, 0.1], [0.5, 0.2], [0.6, 0.2]]),
        np.array([0.6, 0.2]),
        np.array([0.6, 0.2]),
    ),
    "latent": lambda: tf.latent({"last token, no z": (3, 9), "last token, with z": (0, 9)}),
    "lagrangian_gap": gap,
    "abstention": lambda: tf.abstention(
        DRAWS, {0.5: np.array([abstention_bound([0.5] * 4, int(k)) for k in DRAWS])}, (0.05, 0.01)
    ),
    "certificate": lambda: tf.certificate(
        np.array([0.1, 1]), np.array([0.9, 1]), np.array([10, 100]), np.array([0.3, 0.03])
    ),
}
UNITS = (
    "token",
    "cost",
    "sweep",
    "budget",
    "scores",
    "share",
    "prompts",
    "rate",
    "samples",
    "P(",
    "critic",
)


def axes(name):
    fig = PICTURES[name]()
    fig.draw_without_rendering()
    return fig.axes


@pytest.mark.parametrize("name", PICTURES)
def test_every_axis_is_labelled_with_its_unit(name):
    """Guards a reader who sees one picture alone."""
    for ax in axes(name):
        assert any(unit in ax.get_xlabel() for unit in UNITS)
        assert any(unit in ax.get_ylabel() for unit in (*UNITS, "error"))


def test_every_picture_function_is_tried():
    public = {
        name
        for name in vars(tf)
        if not name.startswith("_") and getattr(vars(tf)[name], "__module__", "") == tf.__name__
    }
    assert public == {*PICTURES, "panels"}


def test_the_tree_puts_every_state_at_its_budget():
    """Guards colours: unsafe states are below zero and orange, finished ones blue."""
    mdp = augment(random_tree(0), 3)
    (ax,) = axes("prefix_tree")
    prefix, finished, broken = (np.asarray(points.get_offsets()) for points in ax.collections)
    ends = ~mdp.allowed.any(axis=1)
    assert (
        sorted(broken[:, 1]) == sorted(float(z) for z in mdp.z[~mdp.safe])
        and broken[:, 1].max() < 0
    )
    assert sorted(finished[:, 1]) == sorted(float(z) for z in mdp.z[mdp.safe & ends])
    assert len(prefix) == (mdp.safe & ~ends).sum()
    assert to_hex(ax.collections[2].get_facecolor()[0]) == figures.OUTCOMES["unsafe"]
    assert len(ax.lines) == mdp.allowed.sum() + 1


def test_tiles_are_orange_only_above_the_budget():
    (ax,) = axes("accounting")
    assert [text.get_text() for text in ax.texts] == ["2", "3", "0", "0"]
    assert [text.get_weight() for text in ax.texts] == ["normal", "bold", "normal", "normal"]
    assert [to_hex(tile.get_facecolor()) for tile in ax.patches].count(
        figures.OUTCOMES["unsafe"]
    ) == 1


def test_the_gap_shows_the_three_optima():
    """Guards the example: B at (2, .6), the mixture at (2, 1/3) with P(violation) .67, the hull
    from C to A.
    """
    (ax,) = axes("lagrangian_gap")
    lines = {line.get_label(): line.get_xydata().tolist() for line in ax.lines}
    assert lines["what some λ picks"] == [[0, 1], [3, 0]]
    assert lines["augmented optimum"] == [[2, 0.6]]
    np.testing.assert_allclose(
        lines["optimum in expectation, P(violation) = 0.67"], [[2, 1 / 3]], rtol=0, atol=1e-12
    )
    assert [text.get_text() for text in ax.texts] == ["0.67", "0.33"]


def test_markers_stand_where_a_level_is_first_met():
    (ax,) = axes("abstention")
    line = next(line for line in ax.lines if line.get_label() == "p = 0.5")
    assert [DRAWS[i] for i in line.get_markevery()] == [
        samples_needed(0.5, 4, delta) for delta in (0.05, 0.01)
    ]


def test_bars_and_curves_carry_the_given_numbers():
    (bars,) = axes("latent")
    assert [bar.get_width() for bar in bars.patches] == [3, 0]
    assert [text.get_text().strip() for text in bars.texts] == ["3 of 9", "0 of 9"]
    (curves,) = axes("truncation")
    assert curves.lines[0].get_ydata().tolist() == [0.1, 0.5, 0.6]
    assert [line.get_xydata().tolist() for line in curves.lines if "n*" in line.get_label()] == [
        [[0.6, 0.6]],
        [[0.2, 0.2]],
    ]
    (tracks,) = axes("identities")
    assert [line.get_ydata()[-1] for line in tracks.lines[:3]] == [1, 0.8, 1.4]
    assert axes("value_iteration_error")[0].get_yscale() == "log"
    left, right = axes("certificate")
    assert left.lines[0].get_ydata().tolist() == [0.9, 1] and right.lines[
        0
    ].get_ydata().tolist() == [0.3, 0.03]
