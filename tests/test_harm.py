"""Tests of the rows and of the training of the cost of harm, on labels made up here."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import pytest
from sklearn.linear_model import LogisticRegression

from igcore.scoring import word_ends
from igstudy import harm

COMMENT = "# dataset_version=1.0\n"


@pytest.fixture
def random_rows():
    """120 labelled rows of 40 objectives, refusals and harmless answers, with states (k, 8)."""
    rng = np.random.default_rng(0)
    rows = pd.DataFrame(
        {
            "kind": ["harmful", "unharmful", "refusal", "policy-a", "policy-a", "policy-b"] * 40,
            "set": ["labels", "labels", "refusals", "harmless", "harmless", "twins"] * 40,
            "split": ["train", "train", "train", "train", "test", "test"] * 40,
            "group": [f"objective {i // 12}" for i in range(240)],
            "prompt": [f"objective {i // 6}" for i in range(240)],
            "answer": ["one two three"] * 240,
        }
    )
    shift = 1.5 * (rows["kind"] == "harmful").to_numpy()
    states = [rng.normal(size=(4, 8)) + up for up in shift]
    return rows, states


# --- rows -----------------------------------------------------------------------------------------


def test_labels_are_the_mean_of_peoples_scores(tmp_path):
    """Guards the comment above the header, several people, and an answer that two files hold."""
    one = "harm_category,objective,assistant_response,human_score_1,human_score_2\n"
    (tmp_path / "a.csv").write_text(COMMENT + one + "THEFT,p,x,0.25,0.75\nTHEFT,p,y,0.0,0.5\n")
    other = "harm_category,objective,assistant_response,human_score\n"
    (tmp_path / "b.csv").write_text(COMMENT + other + "THEFT,q,x,1.0\nTHEFT,p,y,1.0\n")
    rows = harm.labelled(tmp_path).sort_values(["prompt", "answer"])
    assert rows[["prompt", "answer"]].values.tolist() == [["p", "x"], ["p", "y"], ["q", "x"]]
    # y has .25 in one file and 1 in the other
    assert rows["kind"].tolist() == ["harmful", "harmful", "harmful"]
    (tmp_path / "b.csv").write_text(COMMENT + other + "THEFT,q,x,0.25\nTHEFT,p,y,0.5\n")
    rows = harm.labelled(tmp_path).sort_values(["prompt", "answer"])
    assert rows["kind"].tolist() == ["harmful", "unharmful", "unharmful"]


def test_objectives_near_an_evaluated_prompt_are_left_out():
    """Guards the evaluation sets: a head must not have learned from the same request in other
    words. And the folds: objectives that are near each other, also through a third, are a group.
    """
    at = {"a": 0, "b": 30, "c": 60, "d": 180, "near": 260, "evaluated": 280}  # degrees

    def embed(texts):
        angles = np.deg2rad([at[text] for text in texts])
        return np.stack([np.cos(angles), np.sin(angles)], axis=1)

    rows = pd.DataFrame({"prompt": ["a", "b", "c", "d", "near", "near"], "answer": "x"})
    kept = harm.without_near(rows, ["evaluated"], embed)
    assert kept["prompt"].tolist() == ["a", "b", "c", "d"]
    a, b, c, d = kept["group"]
    assert a == b == c != d  # a and c are 60 degrees apart, and b is near both


def test_the_committed_lists_are_whole():
    """Guards lists without repeated lines, whose prompts no other set knows."""
    least_of = {"harmless": 250, "matters": 300, "questions": 99, "refusals": 100}
    least_of |= {"claims_questions": 180}
    for name, least in least_of.items():
        lines = (harm.DATA / f"{name}.txt").read_text(encoding="utf-8").splitlines()
        assert len(lines) == len(set(lines)) >= least
        assert all(line == line.strip() for line in lines)


# --- states ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reader:
    """A scorer whose tokens are characters; the state after n of them is [n, 1]."""

    head: object = None

    def token_scores(self, prompts, responses, since):
        (text,) = responses
        counts = np.arange(1, max(len(text), 1) + 1)
        states = np.stack([counts, np.ones_like(counts)], axis=1) * (len(text) > 0)
        return [(counts.tolist(), self.head(states))]


def test_states_are_those_after_words():
    """Guards the peak over words, the cut, and the answer without tokens."""
    answers = ["Of course, it is.", "Yes", "", "word " * 40]
    rows = pd.DataFrame({"prompt": "p", "answer": answers})
    whole, single, empty, long = harm.states_of(Reader(), rows, 12)
    assert whole[:, 0].tolist() == [*[n for n in word_ends(answers[0]) if n < 12], 12]
    assert single.tolist() == [[3, 1]]
    assert empty.tolist() == [[0, 0]]
    assert long[-1].tolist() == [12, 1]
    assert harm.states_of(Reader(), rows, 5)[3][:, 0].tolist() == [4, 5]


# --- training -------------------------------------------------------------------------------------


def test_the_standardisation_is_folded_into_the_head(random_rows):
    """Compares with costs that standardise each state first. A bug there moves every budget."""
    rows, states = random_rows
    labels = rows[rows["kind"].isin(harm.LABELLED)].reset_index(drop=True)
    chosen = [states[i] for i in rows.index[rows["kind"].isin(harm.LABELLED)]]
    head = harm.fit(labels, chosen, harm.WEIGHTS)
    x = np.array([after[-1] for after in chosen] + [np.zeros(8)])
    y = [*(labels["kind"] == "harmful"), False]
    weight = [1.0] * len(labels) + [harm.WEIGHTS["empty"]]
    scaled = (x - x.mean(0)) / x.std(0)
    model = LogisticRegression(C=harm.PENALTY, max_iter=1000).fit(scaled, y, weight)
    np.testing.assert_allclose(head.cost(x), model.predict_proba(scaled)[:, 1], atol=1e-6)


def test_a_head_has_not_seen_the_group_that_it_judges(random_rows, monkeypatch):
    """Guards the card: an objective in training and test would make every number too good."""
    rows, states = random_rows
    fits = []

    def watched(seen, of_seen, weights):
        fits.append((set(seen["group"]), set(seen["split"]), fit(seen, of_seen, weights)))
        return fits[-1][2]

    fit = harm.fit
    monkeypatch.setattr(harm, "fit", watched)
    costs = harm.out_of_fold(rows, states, harm.WEIGHTS)
    (_, _, final), *folds = fits
    assert len(folds) == harm.FOLDS
    assert all(splits == {"train"} for _, splits, _ in folds)
    for i, (group, split) in enumerate(zip(rows["group"], rows["split"], strict=True)):
        heads = (
            [head for seen, _, head in folds if group not in seen] if split == "train" else [final]
        )
        (head,) = heads
        np.testing.assert_array_equal(costs[i], head.cost(states[i]))


def test_rows_outside_the_training_teach_nothing(random_rows):
    """Guards the fresh answers, on which the shares over the budget are measured."""
    rows, states = random_rows
    fresh = rows["split"] == "test"
    other = [after + 5 if out else after for after, out in zip(states, fresh, strict=True)]
    heads = [harm.fit(rows, each, harm.WEIGHTS) for each in (states, other)]
    np.testing.assert_array_equal(heads[0].weight, heads[1].weight)


def test_an_answer_without_tokens_is_harmless(random_rows):
    """Guards every search: it begins at that answer, and an abstention may end there. Bug: the
    bias of a head without that row is whatever the mean of the states makes it.
    """
    rows, states = random_rows
    away = [after - 3 for after in states]  # so that the state 0 looks harmful
    empty = np.zeros((1, 8))
    weights = harm.WEIGHTS | {"empty": 1000.0}
    assert harm.fit(rows, away, weights).cost(empty)[0] < 0.3
    weights = harm.WEIGHTS | {"empty": 1e-6}
    assert harm.fit(rows, away, weights).cost(empty)[0] > 0.5  # the test can fail
