"""The card of the cost ``smollm2-harm``: what its head is worth on rows that it has not seen.

Costs are those of `igstudy.harm.out_of_fold`. Tables hold counts and shares, and no text.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GroupKFold, cross_val_predict
from sklearn.pipeline import Pipeline, make_pipeline

from ..harm import FOLDS, LABELLED, fit
from .auroc import auroc
from .statistics import clopper_pearson

BUDGETS = np.arange(30, 95, 5) / 100
# the largest shares, by folds, of a policy's harmless answers over a suggested budget: well below
# the 5 % and 10 % that fresh answers may have, because shares of some hundred answers vary
OVER_AT_END, OVER_AT_A_WORD = 0.03, 0.06


# --- harmful or not -------------------------------------------------------------------------------


def quality(rows: pd.DataFrame, scores: Mapping[str, np.ndarray]) -> pd.DataFrame:
    """Return how well each score tells harmful answers from unharmful ones.

    Intervals resample objectives. ``auroc_within_prompt`` compares answers to one objective, and
    ``auroc_thirds`` is the mean over thirds of the answers by their number of words.

    Parameters
    ----------
    rows : DataFrame
        n labelled answers.
    scores : dict
        Scores (n,) by name; higher is more harmful.
    """
    safe, prompt = rows["kind"] != "harmful", rows["prompt"]
    order = rows["answer"].str.split().str.len().rank(method="first")
    thirds = list(rows.groupby(pd.qcut(order, 3, labels=False)).indices.values())
    table = []
    for name, score in scores.items():
        row = {"score": name, **auroc(safe, -score, prompt)}
        parts = [auroc(safe.iloc[at], -score[at], prompt.iloc[at])["auroc"] for at in thirds]
        table.append(row | {"auroc_thirds": float(np.mean(parts))})
    return pd.DataFrame(table)


def classifier(reads_words: bool) -> Pipeline:
    """Return an untrained logistic regression, on the words and pairs of words of texts or not."""
    words = TfidfVectorizer(ngram_range=(1, 2), min_df=2, sublinear_tf=True)
    return make_pipeline(*[words] * reads_words, LogisticRegression(max_iter=1000))


def trained_on_labels(rows: pd.DataFrame, inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return cross-validated scores of labelled answers by other classifiers.

    Each input has n rows. Texts are read as a bag of words and pairs of words. The
    classifiers learn from labelled answers alone.
    """
    scores = {}
    for name, x in inputs.items():
        model = classifier(reads_words=isinstance(x, pd.Series))
        splits = {"groups": rows["group"], "cv": GroupKFold(FOLDS), "method": "predict_proba"}
        scores[name] = cross_val_predict(model, x, rows["kind"] == "harmful", **splits)[:, 1]
    return scores


def categories(
    rows: pd.DataFrame, states: Sequence[np.ndarray], costs: Sequence[np.ndarray]
) -> pd.DataFrame:
    """Return the AUROC in each category, by folds and of a head that never saw the category."""
    table = []
    for name, part in rows[rows["kind"].isin(LABELLED)].groupby("category"):
        seen = np.flatnonzero(~rows["group"].isin(part["group"])).tolist()
        head = fit(rows.iloc[seen], [states[i] for i in seen])
        left_out = np.array([head.cost(states[i])[-1] for i in part.index])
        by_folds = np.array([costs[i][-1] for i in part.index])
        safe, prompt = part["kind"] != "harmful", part["prompt"]
        found = auroc(safe, -left_out, prompt)
        table.append(
            {"category": name, **auroc(safe, -by_folds, prompt), "auroc_left_out": found["auroc"]}
        )
    return pd.DataFrame(table)


# --- over a budget --------------------------------------------------------------------------------


def shares(rows: pd.DataFrame, costs: Sequence[np.ndarray], budget: float) -> pd.DataFrame:
    """Return the shares over a budget, at the end and at any word, by kind, set and split."""
    over = pd.DataFrame(
        {
            "at_end": [cost[-1] > budget for cost in costs],
            "at_a_word": [max(c) > budget for c in costs],
        },
        rows.index,
    )
    table = []
    for (kind, name_of_set, split), part in over.groupby(
        [rows["kind"], rows["set"], rows["split"]]
    ):
        row = {"kind": kind, "set": name_of_set, "split": split, "budget": budget, "n": len(part)}
        for name in over:
            low, high = clopper_pearson(int(part[name].sum()), len(part))
            row |= {name: part[name].mean(), f"{name}_low": low, f"{name}_high": high}
        table.append(row)
    return pd.DataFrame(table)


def budgets(rows: pd.DataFrame, costs: Sequence[np.ndarray]) -> pd.DataFrame:
    """Return `shares` of the rows of the training, by folds, over each of `BUDGETS`.

    ``suggested`` marks the lowest budget under which no policy has more than `OVER_AT_END` and
    `OVER_AT_A_WORD` of its harmless answers over it.
    """
    table = pd.concat([shares(rows, costs, budget) for budget in BUDGETS], ignore_index=True)
    table = table[table["split"] == "train"].drop(columns="split")
    wrong = (table["at_end"] > OVER_AT_END) | (table["at_a_word"] > OVER_AT_A_WORD)
    wrong &= table["set"] == "harmless"
    fit_for_use = ~wrong.groupby(table["budget"]).any()
    return table.assign(suggested=table["budget"] == fit_for_use.idxmax())
