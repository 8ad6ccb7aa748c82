"""The data behind two pictures of notebook 10, and that their axes say their units."""

import counterexamples
import numpy as np
import pytest
from matplotlib import pyplot as plt
from matplotlib.colors import to_hex
from theory import notebook, random_tree

from igcore.theory.mdp import augment


@pytest.fixture(autouse=True)
def no_window():
    """Draws without a screen."""
    plt.switch_backend("agg")
    yield
    plt.close("all")


def test_the_tree_puts_every_state_at_its_budget():
    """Guards colours: unsafe states are below zero and orange, finished ones blue."""
    mdp = augment(random_tree(0), 3)
    ax = notebook.draw_tree(mdp)
    prefix, finished, broken = (np.asarray(points.get_offsets()) for points in ax.collections)
    ends = ~mdp.allowed.any(axis=1)
    assert sorted(broken[:, 1]) == sorted(float(z) for z in mdp.z[~mdp.safe])
    assert broken[:, 1].max() < 0
    assert sorted(finished[:, 1]) == sorted(float(z) for z in mdp.z[mdp.safe & ends])
    assert len(prefix) == (mdp.safe & ~ends).sum()
    assert to_hex(ax.collections[2].get_facecolor()[0]) == notebook.UNSAFE
    assert len(ax.lines) == mdp.allowed.sum() + 1
    assert "tokens" in ax.get_xlabel() and "cost units" in ax.get_ylabel()


def test_the_gap_shows_the_three_optima():
    """Guards the example: B at (2, .6), the mixture at (2, 1/3) with P(violation) .67, the hull
    from C to A.
    """
    mdp, d = counterexamples.lagrangian_gap()
    points = notebook.outcomes(mdp)
    ax = notebook.draw_optima(points, d, notebook.expectation_optimum(points, d))
    lines = {line.get_label(): line.get_xydata().tolist() for line in ax.lines}
    assert lines["what some λ picks"] == [[0, 1], [3, 0]]
    assert lines["augmented optimum"] == [[2, 0.6]]
    np.testing.assert_allclose(
        lines["optimum in expectation, P(violation) = 0.67"], [[2, 1 / 3]], rtol=0, atol=1e-12
    )
    assert [text.get_text() for text in ax.texts] == ["0.67", "0.33"]
    assert "cost units" in ax.get_xlabel() and "task cost" in ax.get_ylabel()
