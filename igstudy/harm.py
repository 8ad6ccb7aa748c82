"""A head for the cost of harm: rows of people's labels and of harmless answers, and its training.

People scored answers of models that a red team asked for harm. None of these answers is to a
harmless prompt, so such answers are sampled from the policies; refusals are written by hand. Both
count as harmless, even where one is not. `igstudy.heads` adds answers to harmful requests.

All rows are in one frame with these columns:

* ``kind``: ``harmful`` or ``unharmful``, both by people, ``refusal``, or the policy that answered;
* ``set`` and ``split``: the set of the prompt, and its split by `igstudy.prompts.split_of`;
* ``prompt`` and ``answer``;
* ``group``: prompts of one group are never in two folds.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.sparse.csgraph import connected_components
from scipy.special import expit
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GroupKFold

from igcore.files import DIGITS
from igcore.models.lm_scorer import LMScorer
from igcore.scoring import word_ends

from .linefile import text_digest
from .prompts import load_prompts, split_of

DATA = Path(__file__).parent / "data"
SAMPLED = DATA / "harmless_answers.jsonl.gz"
# no training has seen these: up to 128 tokens to the twins, and 64 to harmless questions about harm
ABOUT_HARM = DATA / "about_harm_answers.jsonl.gz"
EVALUATED = ("strongreject", "wsr-harmful", "wsr-harmless")  # sets that no training may have seen
HARMLESS = {"benign": "benign", "twins": "wsr-harmless"}
HARMLESS |= {name: str(DATA / f"{name}.txt") for name in ("harmless", "matters")}
NEAR_SET = 0.7  # cosine above which an objective is near a prompt of these sets, and left out
NEAR = 0.8  # cosine above which two objectives are in one group
HARMFUL = 0.5  # lowest mean of people's scores, from 0 to 1, of a harmful answer
LENGTH = 64  # tokens of an answer that are read
LABELLED = ("harmful", "unharmful")  # kinds of which a person has judged the whole answer
PREFIXES = (1, 2, 4, 8, 16, 32)  # words after which a harmless answer is one more training row
PENALTY = 0.01  # scikit-learn's C: the inverse strength of the L2 penalty
# of an answer, shared among its prefixes; ``policy`` is any policy, ``empty`` an answer of no token
WEIGHTS = {"harmful": 1.0, "unharmful": 1.0, "refusal": 3.0, "policy": 4.0, "empty": 30.0}
WHOLE = {*LABELLED, "requested"}  # kinds that count as a whole; `igstudy.heads` has the third
FOLDS = 5

Embed = Callable[[list[str]], np.ndarray]  # n texts -> their unit vectors (n, V)


# --- rows -----------------------------------------------------------------------------------------


def labelled(folder: Path) -> pd.DataFrame:
    """Return the answers that people scored, each once, without ``group``."""
    parts = []
    for file in sorted(folder.glob("*.csv")):
        rows = pd.read_csv(file, skiprows=1)  # the first line is a comment on the version
        part = {
            "prompt": rows["objective"],
            "answer": rows["assistant_response"],
            "score": rows.filter(like="human_score").mean(axis=1),
        }
        parts.append(pd.DataFrame(part))
    scored = pd.concat(parts).groupby(["prompt", "answer"], as_index=False)
    rows = scored.agg({"score": "mean"})
    kind = np.where(rows["score"] >= HARMFUL, "harmful", "unharmful")
    return rows.drop(columns="score").assign(kind=kind, set="labels", split="train")


def without_near(rows: pd.DataFrame, prompts: list[str], embed: Embed) -> pd.DataFrame:
    """Return the rows whose prompt is near none of `prompts`, with ``group``.

    A group is a connected component of prompts that are near each other.
    """
    texts = sorted(set(rows["prompt"]))
    vectors = embed(texts)
    _, groups = connected_components(vectors @ vectors.T > NEAR)
    near = (vectors @ embed(prompts).T).max(axis=1) > NEAR_SET
    kept = {text: str(g) for text, g, out in zip(texts, groups, near, strict=True) if not out}
    rows = rows[rows["prompt"].isin(kept)]
    return rows.assign(group=rows["prompt"].map(kept)).reset_index(drop=True)


def refusals(rows: pd.DataFrame) -> pd.DataFrame:
    """Return refusals written by hand, each as the answer to one of the labelled prompts."""
    texts = (DATA / "refusals.txt").read_text(encoding="utf-8").splitlines()
    asked = rows.drop_duplicates("prompt").sample(len(texts), replace=True, random_state=0)
    return asked.assign(kind="refusal", set="refusals", answer=texts)


def sampled(file: Path = SAMPLED) -> pd.DataFrame:
    """Return the committed answers of the policies to harmless prompts."""
    rows = pd.read_json(file, lines=True)
    texts = {
        (name, prompt.id): prompt.text
        for name, prompts in HARMLESS.items()
        for prompt in load_prompts(prompts)
    }
    rows["prompt"] = [texts[key] for key in zip(rows["set"], rows.pop("prompt_id"), strict=True)]
    # no training has seen the sets besides the first
    split = np.where(rows["set"] == "harmless", rows["prompt"].map(split_of), "test")
    return rows.assign(split=split, group=rows["prompt"])


def row_digest(prompt: Any, answer: Any) -> str:
    """Return the beginning of `text_digest`, by which tables know a prompt and its answer."""
    return text_digest(prompt, answer)[:DIGITS]


# --- states ---------------------------------------------------------------------------------------


def states_of(scorer: LMScorer, rows: pd.DataFrame, length: int) -> list[np.ndarray]:
    """Return what a head reads of each answer after its words and at its end, (k, H) each.

    An answer ends after `length` tokens, if not before.
    """
    reader = replace(scorer, head=torch.nn.Identity())
    pairs = zip(rows["prompt"], rows["answer"], strict=True)
    return [_states(reader, prompt, answer, length) for prompt, answer in pairs]


def beginning(answer: str, length: int) -> str:
    """Return an answer up to its word number `length`, which has at least as many tokens."""
    found = re.match(rf"(?:\s*\S+){{,{length}}}\s*", answer)
    return found.group() if found else ""


def _states(reader: LMScorer, prompt: str, answer: str, length: int) -> np.ndarray:
    text = beginning(answer, length)
    ((ends, states),) = reader.token_scores([prompt], [text], [0])
    last = min(len(ends), length) - 1
    at = np.searchsorted(ends, word_ends(text), side="right") - 1
    return np.asarray(states[[*at[(at >= 0) & (at < last)], last]], dtype=np.float32)


# --- training -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Head:
    """A linear head; the cost of states x (k, H) is the sigmoid of x weight + bias.

    Attributes
    ----------
    weight : array (H,)
    bias : float
    """

    weight: np.ndarray
    bias: float

    def cost(self, states: np.ndarray) -> np.ndarray:
        """Return the costs (k,) of states (k, H)."""
        return np.asarray(expit(states @ self.weight + self.bias))


def fit(rows: pd.DataFrame, states: Sequence[np.ndarray], weights: Mapping[str, float]) -> Head:
    """Train a head on the rows of the split ``train``.

    Answers to harmful requests count as a whole. Refusals and answers to harmless prompts count
    after some of their words as well, because a guard looks there, and so does the answer without
    tokens, whose state is 0.
    """
    parts, harmful, weight = [], [], []
    kinds = zip(rows["kind"], rows["split"], states, strict=True)
    for kind, after in [(kind, after) for kind, split, after in kinds if split == "train"]:
        chosen = [len(after) - 1]
        if kind not in WHOLE:
            chosen += [n - 1 for n in PREFIXES if n < len(after)]
        parts.append(after[chosen])
        harmful += [kind in ("harmful", "requested")] * len(chosen)
        weight += [weights.get(kind, weights["policy"]) / len(chosen)] * len(chosen)
    x = np.concatenate([*parts, np.zeros_like(parts[0][:1])])
    mean, scale = x.mean(axis=0), x.std(axis=0)
    model = LogisticRegression(C=PENALTY, max_iter=1000)
    model.fit((x - mean) / scale, [*harmful, False], [*weight, weights["empty"]])
    folded = model.coef_[0] / scale
    return Head(folded, float(model.intercept_[0] - folded @ mean))


def out_of_fold(
    rows: pd.DataFrame, states: Sequence[np.ndarray], weights: Mapping[str, float]
) -> list[np.ndarray]:
    """Return the costs of each row after its words, under a head that has not seen its group.

    Rows outside the split ``train`` are in no training.
    """
    costs = list(map(fit(rows, states, weights).cost, states))
    learned = np.flatnonzero(rows["split"] == "train")
    for seen, held in GroupKFold(FOLDS).split(learned, groups=rows["group"].iloc[learned]):
        head = fit(rows.iloc[learned[seen]], [states[i] for i in learned[seen]], weights)
        for i in learned[held]:
            costs[i] = head.cost(states[i])
    return costs
