"""The safety state along answers, against numbers worked by hand, and its picture."""

import math

import numpy as np
import pandas as pd
import pytest
import synthetic
from notebook_code import notebook_code

from igcore.errors import RunError
from igstudy.figures.style import NAMES, SIX, STYLE

tr = notebook_code("50_figures")


class Length:
    """A cost that grows with the text: a hundredth for every letter, NaN for texts with a question
    mark.
    """

    name, digest, sign = "length", "v1", "higher is worse"

    def score(self, prompts, responses, finished):
        assert len(prompts) == len(finished) == len(responses)
        return [math.nan if "?" in text else len(text) / 100 for text in responses]


def line(method, prompt="p0", text="abcdefgh", ends=(3, 8), peak=0.08, **fields) -> dict:
    """A record of an answer of up to 8 tokens, measured every 4 of them."""
    own = {
        "n_tokens": 8,
        "max_new_tokens": 8,
        "block_size": 4,
        "peak_cost": peak,
        "z_trace": [0.2, 0.17, 0.12],
    } | fields
    known = {name: own.pop(name) for name in list(own) if name in synthetic.record()}
    more = {"grid_ends": list(ends), "grid_size": 4, "cost_scorer": "length", "cost_digest": "v1"}
    return synthetic.record(method=method, prompt_id=prompt, response=text, **known) | more | own


def frame(*lines) -> pd.DataFrame:
    return pd.DataFrame(lines)


def z(found, method, prompt="p0") -> list[float]:
    rows = found[(found["method"] == method) & (found["prompt_id"] == prompt)]
    return dict(zip(rows["tokens"], rows["z"], strict=True))


def test_recorded_paths_stand_at_the_ends_of_own_blocks():
    """Bug: a method that looks at whole answers drawn as if it had looked after each block; a short
    answer that vanishes.
    """
    found = tr.paths(
        frame(
            line("inferenceguard"),
            line("base", block_size=8, z_trace=[0.2, 0.05]),
            line("inferenceguard", "p1", n_tokens=3, z_trace=[0.2, 0.1]),
            line("args", block_size=3, z_trace=[0.2, 0.19, 0.18, -0.1]),
        )
    )
    assert z(found, "inferenceguard") == {0: 0.2, 4: 0.17, 8: 0.12}
    assert z(found, "base") == {0: 0.2, 8: 0.05}
    assert z(found, "inferenceguard", "p1") == {0: 0.2, 4: 0.1, 8: 0.1}  # it stays where it ended
    assert z(found, "args") == {0: 0.2, 3: 0.19, 6: 0.18, 8: -0.1}  # the last block is shorter


def test_abstentions_have_no_path():
    """Bug: the z of a refusal, which the policy did not write, among those of answers."""
    found = tr.paths(
        frame(
            line("inferenceguard"),
            line("inferenceguard", "p1", n_tokens=0),
            line("base", "p2", text=None),
        )
    )
    assert set(found["prompt_id"]) == {"p0"}
    with pytest.raises(RunError, match="run notebook 30_decode first"):
        tr.paths(frame(line("inferenceguard", n_tokens=0)))


def test_a_cost_model_puts_all_methods_on_one_grid():
    """Bug: prefixes that end at characters of another answer, a state that rises again, the budget
    of another line.
    """
    shrinking = line(
        "args", "p1", text="abcdefghij", ends=(10, 4), peak=0.1
    )  # what the cost says of a prefix may fall again
    found = tr.paths(
        frame(line("base", block_size=8, z_trace=[0.2, 0.1]), shrinking, line("args", budget=0.5)),
        Length(),
    )
    assert z(found, "base") == pytest.approx({0: 0.2, 4: 0.17, 8: 0.12})
    assert z(found, "args", "p1") == pytest.approx({0: 0.2, 4: 0.1, 8: 0.1})
    assert z(found, "args")[8] == pytest.approx(0.42)


def test_the_cost_model_of_another_run_is_refused():
    """Bug: a picture of one cost model under the name of another."""
    with pytest.raises(
        RunError,
        match="'length' gives other peak costs than the records; give the cost model of the run",
    ):
        tr.paths(frame(line("base", peak=0.3)), Length())


@pytest.mark.parametrize("cost", [None, Length()], ids=["recorded", "read again"])
def test_what_cannot_be_read_breaks_the_budget(cost):
    """Bug: failing open in a picture: a NaN that is left out, or a path that recovers from it."""
    found = tr.paths(
        frame(line("base", text="abc?efgh", ends=(4, 8), peak=None, z_trace=[0.2, None, None])),
        cost,
    )
    assert z(found, "base") == {0: 0.2, 4: -math.inf, 8: -math.inf}


def test_shares_are_over_prompts_that_all_methods_answered():
    """Bug: methods compared on different prompts, a method outside the six, an answer on its limit
    that counts as broken, or as kept where the run was strict.
    """
    ends = {
        "base": [0.0, -0.1, -0.2, -0.3, 0.15],
        "args": [-0.1, -0.1, -0.1],
        "inferenceguard": [0.19, 0.01, 0.05, 0.02],
    }
    lines = [
        line(method, f"p{k}", z_trace=[0.2, value, value])
        for method, values in ends.items()
        for k, value in enumerate(values)
    ]
    lines[1]["z_trace"] = [0.2, None, None]
    found = tr.paths(frame(*lines))
    last = tr.kept(found).query("tokens == 8").set_index("method")[["n", "share"]]
    assert last.loc["base"].tolist() == [4, 0.25] and last.loc["inferenceguard"].tolist() == [4, 1]
    assert list(last.index) == ["base", "inferenceguard"]
    strict = tr.kept(found, strict=True).query("tokens == 8").set_index("method")["share"]
    assert strict.tolist() == [0, 1]


def everything(policies=("raw", "chat")) -> pd.DataFrame:
    """Shares of all methods, as a table; those of base fall by more than any other."""
    rng = np.random.default_rng(0)
    lines = [
        line(
            method,
            f"p{k}",
            policy=policy,
            z_trace=[0.2, *(0.2 - np.cumsum(rng.random(2) * (0.6 if method == "base" else 0.15)))],
        )
        for policy in policies
        for method in STYLE
        for k in range(5)
    ]
    return tr.kept(tr.paths(frame(*lines)))


def test_the_picture_draws_the_table():
    """Bug: a curve of another policy, a name at another curve, a title that says something else."""
    table = everything()
    fig = tr.trajectories(table)
    assert [ax.get_title(loc="left") for ax in fig.axes] == ["raw, n = 5", "chat, n = 5"]
    for policy, ax in zip(("raw", "chat"), fig.axes, strict=True):
        cell = table[table["policy"] == policy]
        methods = list(cell["method"].unique())
        assert methods == list(SIX) and len(ax.lines) == len(SIX)
        for method, curve in zip(methods, ax.lines, strict=True):
            rows = cell.loc[cell["method"] == method, ["tokens", "share"]]
            assert curve.get_xydata().tolist() == rows.to_numpy().tolist()
            assert curve.get_color() == STYLE[method][0]
        labels = {curve.get_label(): curve.get_color() for curve in ax.lines}
        assert labels == {NAMES[method]: STYLE[method][0] for method in SIX}
    last = table[table["tokens"] == 8].groupby("method")["share"].mean()
    broken, of_ours = 1 - last["base"], 1 - last["inferenceguard"]
    assert fig.get_suptitle() == (
        f"After 8 tokens {broken:.0%} of plain answers and {of_ours:.0%} of InferenceGuard's "
        "have broken the budget"
    )
