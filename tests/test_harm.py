"""Tests of the training of the cost of harm, and of its card, on labels made up here."""

import hashlib
from dataclasses import dataclass

import numpy as np
import pandas as pd
import pytest
from scipy.special import expit
from sklearn.linear_model import LogisticRegression

from igcore.models.head import HARM, load_head
from igcore.scoring import word_ends
from igstudy import harm
from igstudy.report import harm_card

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
            "category": ["theft", "theft", None, None, None, None] * 40,
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
    assert set(rows["category"]) == {"theft"}
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


def test_states_are_those_after_words(monkeypatch):
    """Guards the peak over words, the cut, and the answer without tokens."""
    monkeypatch.setattr(harm, "LENGTH", 12)
    answers = ["Of course, it is.", "Yes", "", "word " * 40]
    rows = pd.DataFrame({"prompt": "p", "answer": answers})
    whole, single, empty, long = harm.states_of(Reader(), rows)
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
    head = harm.fit(labels, chosen)
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
    costs = harm.out_of_fold(rows, states)
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
    np.testing.assert_array_equal(harm.fit(rows, states).weight, harm.fit(rows, other).weight)


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


def test_a_saved_head_is_what_the_cost_reads(tmp_path):
    head = harm.Head(np.arange(4) / 8, -0.5)
    head.save(tmp_path / "mine.safetensors", {"layer": "3"})
    weight, bias, about = load_head(tmp_path / "mine.safetensors", 4)
    assert (weight.tolist(), bias.tolist(), about) == (list(head.weight), [-0.5], {"layer": "3"})
    digest = hashlib.sha256((tmp_path / "mine.safetensors").read_bytes()).hexdigest()
    assert (tmp_path / "mine.sha256").read_text() == f"{digest}  mine.safetensors\n"
    assert head.cost(np.ones((1, 4)))[0] == pytest.approx(expit(0.25))


def test_the_shipped_head_lets_the_empty_answer_pass():
    weight, bias, about = load_head(HARM, 576)
    shipped = harm.Head(weight.numpy(), float(bias))
    assert shipped.cost(np.zeros((1, 576)))[0] < 0.2
    assert (about["layer"], about["pooling"]) == ("15", "mean")


# --- the card -------------------------------------------------------------------------------------


def test_quality_orders_scores_and_compares_within_objectives():
    rows = pd.DataFrame(
        {
            "kind": ["harmful", "unharmful"] * 6,
            "prompt": [f"p{i // 2}" for i in range(12)],
            "answer": ["a " * n for n in range(1, 13)],
        }
    )
    right = np.array([1.0, 0.0] * 6)
    within = right + np.repeat(np.arange(6) * 10, 2)
    table = harm_card.quality(rows, {"right": right, "wrong": -right, "within": within})
    table = table.set_index("score")
    assert table["auroc"].tolist() == [1.0, 0.0, pytest.approx(21 / 36)]
    assert table["auroc_within_prompt"].tolist() == [1.0, 0.0, 1.0]
    assert table["auroc_thirds"].tolist() == [1.0, 0.0, 0.75]


def test_shares_over_a_budget_at_the_end_and_at_a_word():
    rows = pd.DataFrame({"kind": ["a", "a", "b"], "set": "s", "split": "test"})
    costs = [np.array([0.9, 0.1]), np.array([0.2, 0.6]), np.array([0.5, 0.5])]
    table = harm_card.shares(rows, costs, 0.5).set_index("kind")
    assert table["at_end"].tolist() == [0.5, 0.0]
    assert table["at_a_word"].tolist() == [1.0, 0.0]
    assert (table["at_end_low"] < table["at_end"] + 1e-9).all()


def test_the_suggested_budget_is_the_lowest_that_all_policies_allow():
    """Guards a budget that one policy's harmless answers would break, or fresh ones have chosen."""
    kinds = ["a"] * 20 + ["b"] * 20 + ["c"]
    rows = pd.DataFrame({"kind": kinds, "set": "harmless", "split": "train"})
    costs = [np.array([0.1, 0.1])] * 18 + [np.array([0.43, 0.1])] * 2
    costs += [np.array([0.1, 0.1])] * 17 + [np.array([0.58, 0.1])] * 3  # 15 % at a word
    rows.loc[40, "split"] = "test"
    costs += [np.array([0.9, 0.9])]
    table = harm_card.budgets(rows, costs)
    assert set(table.loc[table["suggested"], "budget"]) == {0.6}
    assert set(table["kind"]) == {"a", "b"}


def test_categories_are_judged_by_heads_that_never_saw_them(random_rows):
    rows, states = random_rows
    rows.loc[rows["category"].notna() & (rows.index >= 120), "category"] = "fraud"
    costs = harm.out_of_fold(rows, states)
    table = harm_card.categories(rows, states, costs).set_index("category")
    assert table.index.tolist() == ["fraud", "theft"]
    assert table["n"].sum() == rows["category"].notna().sum()
    part = rows[rows["category"] == "fraud"]
    seen = np.flatnonzero(~rows["group"].isin(part["group"]))
    head = harm.fit(rows.iloc[seen], [states[i] for i in seen])
    cost = np.array([head.cost(states[i])[-1] for i in part.index])
    bad = (part["kind"] == "harmful").to_numpy()
    pairs = cost[bad][:, None] > cost[~bad][None]
    assert table.loc["fraud", "auroc_left_out"] == pytest.approx(pairs.mean())
