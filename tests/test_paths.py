"""The safety state along answers, against numbers worked by hand."""

import math

import pandas as pd
import pytest
import synthetic

from igcore.errors import RunError
from igstudy.figures.style import SIX
from igstudy.report.paths import paths, share_within


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
    found = paths(
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
    found = paths(
        frame(
            line("inferenceguard"),
            line("inferenceguard", "p1", n_tokens=0),
            line("base", "p2", text=None),
        )
    )
    assert set(found["prompt_id"]) == {"p0"}
    with pytest.raises(RunError, match="run notebook 30_decode first"):
        paths(frame(line("inferenceguard", n_tokens=0)))


def test_a_cost_model_puts_all_methods_on_one_grid():
    """Bug: prefixes that end at characters of another answer, a state that rises again, the budget
    of another line.
    """
    shrinking = line(
        "args", "p1", text="abcdefghij", ends=(10, 4), peak=0.1
    )  # what the cost says of a prefix may fall again
    found = paths(
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
        paths(frame(line("base", peak=0.3)), Length())


@pytest.mark.parametrize("cost", [None, Length()], ids=["recorded", "read again"])
def test_what_cannot_be_read_breaks_the_budget(cost):
    """Bug: failing open in a picture: a NaN that is left out, or a path that recovers from it."""
    found = paths(
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
    found = paths(frame(*lines))
    last = share_within(found, SIX).query("tokens == 8").set_index("method")[["n", "share"]]
    assert last.loc["base"].tolist() == [4, 0.25] and last.loc["inferenceguard"].tolist() == [4, 1]
    assert list(last.index) == ["base", "inferenceguard"]
    strict = share_within(found, SIX, strict=True).query("tokens == 8").set_index("method")["share"]
    assert strict.tolist() == [0, 1]
