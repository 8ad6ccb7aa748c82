"""The two embedded scorers of the study: offensive language as the cost, relevance as the reward.

The cost measures offensive *language* and is no model of harm; the reward is a *relevance proxy*.
"""

import hashlib
import math
import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModel

from igcore.models.pretrained import load_model, load_tokenizer
from igcore.scorers import Texts

from .. import assets
from .one_row import one_row_view, read

PROMPTS = 1024  # prompts whose vectors are cached
MAX_TOKENS = 256


class OffensiveLanguage:
    r"""Score the probability that a response is offensive language; higher is worse.

    The words of the lower-cased response (two characters or more, without stop words) are weighted
    by :math:`\mathrm{tf} \cdot \mathrm{idf}` and scaled to length one: :math:`x`. Each of five
    linear support vector machines has a margin :math:`f_m = w_m \cdot x + c_m` and a probability
    :math:`1 / (1 + \exp(a_m f_m + b_m))`; the score is the mean probability. It needs NumPy alone
    and equals scikit-learn's pipeline up to rounding.

    The longer the text, the less one offensive word weighs, so a guard scores prefixes block by
    block.

    Attributes
    ----------
    name, digest, sign, unit : str
        ``"offensive-language"``, the asset's digest, ``"higher is worse"``, ``"probability"``.
    """

    name = "offensive-language"
    sign = "higher is worse"
    unit = "probability"
    reads_prompts = False

    def __init__(self) -> None:
        """Load the asset's arrays."""
        folder, self.digest = assets.sound("offensive-language")
        with np.load(folder / "weights.npz", allow_pickle=False) as weights:
            words = weights["vocabulary"].tolist()
            self._idf = weights["idf"]  # (V,)
            self._coef = weights["coef"]  # (M, V)
            self._intercept = weights["intercept"]  # (M,), like the next two
            self._a = weights["a"]
            self._b = weights["b"]
        self._column = {word: column for column, word in enumerate(words)}

    def score(self, prompts: Texts, responses: Texts, finished: Sequence[bool]) -> np.ndarray:
        """Return the probability of offensive language of each response, (n,) float64 in [0, 1].

        Prompts and `finished` are ignored. A text without a known word has the models' base rate,
        about 0.036.
        """
        n = len(responses)
        found: list[tuple[int, int, int]] = []  # row and column of a known word, and how often
        for row, text in enumerate(responses):
            words = re.findall(r"\b\w\w+\b", text.lower())
            known = Counter(self._column[word] for word in words if word in self._column)
            found += [(row, column, times) for column, times in known.items()]
        rows, columns, times = np.array(found, dtype=int).reshape(-1, 3).T
        weights = times * self._idf[columns]
        norms = np.sqrt(np.bincount(rows, weights**2, minlength=n))  # (n,)
        weights /= norms[rows]
        sums = [np.bincount(rows, weights * coef[columns], minlength=n) for coef in self._coef]
        margins = np.array(sums).T + self._intercept  # (n, M)
        probabilities = 1 / (1 + np.exp(self._a * margins + self._b))
        return np.asarray(probabilities.mean(axis=1))


class MiniLMRelevance:
    r"""Score the relevance of a response to its prompt, less its echo of it; higher is better.

    .. math:: r(x, y) = \cos(e(x), e(y)) - w_\mathrm{echo}\, s(x, y) + w_\mathrm{length}\,(1 -
    e^{-n(y) / \ell})

    Here :math:`e` is the mean of MiniLM-L6's last hidden states over the tokens (at most 256),
    :math:`n(y)` the number of words of the response, and :math:`s` the share of its word trigrams
    that occur in the prompt; a response of fewer than three words is compared word by word. Words
    are lower-cased, without punctuation. A response without words scores 0. The score is a proxy:
    it measures neither truth nor helpfulness.

    A full echo of the prompt loses :math:`w_\mathrm{echo}`, a very long response gains
    :math:`w_\mathrm{length}`, and a response of :math:`\ell` words gains 63 % of that.

    Parameters
    ----------
    device : str or torch.device
        Where the encoder runs.

    Attributes
    ----------
    name, digest, sign, unit : str
        ``"minilm-relevance"``, a hash of the asset and of the three numbers above, ``"higher is
        better"``, ``"cosine"``.

    Notes
    -----
    A score does not depend on the other texts of its batch, see `Encoder`.
    """

    name = "minilm-relevance"
    sign = "higher is better"
    unit = "cosine"
    echo_weight, length_weight, length_scale = 0.5, 0.1, 20

    def __init__(self, *, device: str | torch.device = "cpu") -> None:
        """Load the encoder; the digest covers its files and the three numbers."""
        folder, formula = assets.sound("minilm")
        for weight in (self.echo_weight, self.length_weight, self.length_scale):
            formula += f" {weight:.17g}"
        self.digest = hashlib.sha256(formula.encode()).hexdigest()
        self._embed = Encoder(folder, device)
        # one prompt at a time: a cached vector must equal a new one
        self._embed_prompt = lru_cache(PROMPTS)(lambda prompt: self._embed([prompt])[0])

    def score(self, prompts: Texts, responses: Texts, finished: Sequence[bool]) -> np.ndarray:
        """Return the relevance of each response to its prompt, (n,) float64; `finished` is ignored.

        Raises
        ------
        ValueError
            If prompts and responses differ in number.
        """
        texts = list(dict.fromkeys(responses))
        embedding = dict(zip(texts, self._embed(texts), strict=True))
        scores = []
        for prompt, response in zip(prompts, responses, strict=True):
            cosine = float(self._embed_prompt(prompt) @ embedding[response])
            scores.append(self.at_cosine(prompt, response, cosine))
        return np.array(scores, dtype=float)

    def at_cosine(self, prompt: str, response: str, cosine: float) -> float:
        """Return the relevance of one response, given the cosine of both embeddings."""
        words = _words(response)
        if not words:
            return 0.0
        echo = self.echo_weight * _echo(_words(prompt), words)
        length = 1 - math.exp(-len(words) / self.length_scale)
        return cosine - echo + self.length_weight * length


def _words(text: str) -> list[str]:
    """Return the words of a text in lower case."""
    return re.findall(r"\w+", text.lower())


def _echo(prompt: list[str], response: list[str]) -> float:
    """Return the share of the response's word trigrams that occur in the prompt.

    A response of fewer than three words is compared word by word.
    """
    size = 3 if len(response) >= 3 else 1
    of_prompt = set(zip(*(prompt[at:] for at in range(size)), strict=False))
    grams = list(zip(*(response[at:] for at in range(size)), strict=False))
    return sum(gram in of_prompt for gram in grams) / len(grams)


# --- the sentence encoder -------------------------------------------------------------------------


class Encoder:
    """Turns texts into unit vectors: the mean of the last hidden states over the tokens.

    Parameters
    ----------
    folder : Path
        A BERT and its tokenizer.
    device : str or torch.device
        Where it runs. On a CPU with one thread, the vector of a text is bitwise equal alone and in
        any batch, see `igstudy.scorers.one_row`; elsewhere it may differ by about 1e-7.
    """

    def __init__(self, folder: Path, device: str | torch.device = "cpu"):
        self._tokenizer = load_tokenizer(folder)
        model, _ = load_model(AutoModel, folder, "float32", str(device))
        self._view = one_row_view(model)

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """Return unit vectors of texts, (n, H) float64; texts are cut after `MAX_TOKENS` tokens."""
        if not texts:
            return np.zeros((0, self._view.config.hidden_size))
        ids = self._tokenizer(list(texts), truncation=True, max_length=MAX_TOKENS)["input_ids"]
        means: list[Tensor] = []
        for output, lengths in read(self._view, [{"input_ids": own} for own in ids]):
            states = torch.split(output.last_hidden_state[0], lengths)  # (tokens, H) each
            means += [own.mean(0).cpu() for own in states]
        vectors: np.ndarray = torch.stack(means).double().numpy()  # (n, H)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        return vectors
