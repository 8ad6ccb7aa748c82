"""The held-out judge: its network computed again by hand from the Keras file, and what the wheel's
own page prints.
"""

import json
import os
import pickle
import sys
import types
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from unittest.mock import patch

import h5py
import numpy as np
import pytest
import torch

from igcore import load_scorer
from igcore.errors import AssetError
from igstudy.assets import convert_jigsaw, read_plain_pickle, save_vocabulary, sound
from igstudy.scorers import jigsaw
from igstudy.scorers.jigsaw import LENGTH, TOXICITY_HEADS, JigsawToxicity

WORDS = ["the", "soup", "is", "cold", "warm", "naïve", "film", "long", "short", "rare"]
NUM_WORDS = 10  # of the ten words the last has index 10 and is not known
SIZES = {"embedding": 3, "hidden": 4, "dense": 5, "classes": 6}
FILTERS = "!?.,\n"


def write_weights(path: Path, seed: int = 0) -> None:
    """Write a model.weights.h5 as Keras 3 does, with weights large enough to tell gates and
    directions apart.
    """
    e, h, d, c = SIZES.values()
    shapes = {
        "embedding/vars": [(NUM_WORDS, e)],
        "bidirectional/forward_layer/cell/vars": [(e, 4 * h), (h, 4 * h), (4 * h,)],
        "bidirectional/backward_layer/cell/vars": [(e, 4 * h), (h, 4 * h), (4 * h,)],
        "dense/vars": [(2 * h, d), (d,)],
        "dense_1/vars": [(d, c), (c,)],
    }
    rng = np.random.default_rng(seed)
    with h5py.File(path, "w") as file:
        for layer, arrays in shapes.items():
            for number, shape in enumerate(arrays):
                file[f"layers/{layer}/{number}"] = rng.normal(size=shape).astype(np.float32)


def write_tokenizer(path: Path, **changes) -> None:
    """Pickle an object of Keras's class name with its attributes, `changes` among them."""
    name = "keras.src.legacy.preprocessing.text"
    packages = [name.rsplit(".", depth)[0] for depth in range(5)]
    modules = {package: types.ModuleType(package) for package in packages}
    modules[name].Tokenizer = type("Tokenizer", (), {"__module__": name})
    tokenizer = modules[name].Tokenizer()
    index_word = dict(enumerate(WORDS, start=1))
    vars(tokenizer).update(
        word_counts=OrderedDict.fromkeys(WORDS, 2),
        word_docs=defaultdict(int, dict.fromkeys(WORDS, 1)),
        filters=FILTERS,
        split=" ",
        lower=True,
        num_words=NUM_WORDS,
        document_count=3,
        char_level=False,
        oov_token=None,
        analyzer=None,
        index_word=index_word,
        word_index={word: index for index, word in index_word.items()},
    )
    vars(tokenizer).update(changes)
    with patch.dict(sys.modules, modules):
        path.write_bytes(pickle.dumps(tokenizer))


def write_wheel_members(folder: Path) -> None:
    write_weights(folder / "model.weights.h5")
    write_tokenizer(folder / "tokenizer.pickle")


TEXTS = [
    "the soup is cold",
    "The FILM, is long!",
    "",
    "   ",
    "!?",
    "unknown words only",
    "rare",
    "naïve",
    "NAÏVE film",
    "soup\nfilm",
    "the soup is warm " * 40,
    "cold " * 99,
    "cold " * 100,
    "warm " + "cold " * 100,
    "long long film, short soup",
]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    write_wheel_members(folder)
    return folder


@pytest.fixture
def tiny(source, tmp_path, monkeypatch):
    convert_jigsaw(source, tmp_path)
    monkeypatch.setattr(jigsaw, "sound", lambda name: (tmp_path, "0" * 64))
    return JigsawToxicity()


@pytest.fixture(scope="module")
def judge():
    return load_scorer("jigsaw-toxicity")


def score(scorer, texts):
    return scorer.score([""] * len(texts), texts, [True] * len(texts))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def lstm(inputs, kernel, recurrent, bias):
    """Return the states of a Keras LSTM, (T, H): gates in the order input, forget, cell, output."""
    h = c = np.zeros(recurrent.shape[0])
    states = []
    for x in inputs:
        i, f, g, o = np.split(x @ kernel + h @ recurrent + bias, 4)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        states.append(h)
    return np.array(states)


def by_hand(text, weights):
    """Return the six probabilities as Keras computes them: words, padding in front, LSTM both ways,
    maximum, two layers.
    """
    for separator in FILTERS:
        text = text.replace(separator, " ")
    known = [
        WORDS.index(word) + 1 for word in text.lower().split(" ") if word in WORDS[: NUM_WORDS - 1]
    ]
    padded = np.concatenate([np.zeros(100, dtype=int), known]).astype(int)[-100:]
    with h5py.File(weights) as file:
        array = {
            name: [np.float64(part[n][:]) for n in sorted(part)]
            for name, part in parts(file["layers"])
        }
    inputs = array["embedding/vars"][0][padded]
    forward = lstm(inputs, *array["bidirectional/forward_layer/cell/vars"])
    backward = lstm(inputs[::-1], *array["bidirectional/backward_layer/cell/vars"])[::-1]
    pooled = np.concatenate([forward, backward], axis=1).max(axis=0)
    dense, out = array["dense/vars"], array["dense_1/vars"]
    return sigmoid(np.maximum(pooled @ dense[0] + dense[1], 0) @ out[0] + out[1])


def parts(layers):
    directions = [f"bidirectional/{way}_layer/cell/vars" for way in ("forward", "backward")]
    for name in ("embedding/vars", "dense/vars", "dense_1/vars", *directions):
        yield name, layers[name]


def test_the_network_equals_an_lstm_by_hand(tiny, source):
    """Bug: gates, directions or dense layers mixed up, a matrix not transposed, padding masked or
    put behind, or the first hundred words read instead of the last."""
    expected = np.array([by_hand(text, source / "model.weights.h5") for text in TEXTS])
    assert (
        np.ptp(expected, axis=0).min() > 0.01 and len({tuple(row) for row in expected.round(6)}) > 8
    )  # an error would show
    np.testing.assert_allclose(tiny.probabilities(TEXTS), expected, rtol=0, atol=1e-12)
    np.testing.assert_array_equal(score(tiny, TEXTS), tiny.probabilities(TEXTS)[:, 0])


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ("The SOUP, is cold!", [1, 2, 3, 4]),
        ("the\nsoup", [1, 2]),
        (
            "the\tsoup",
            [],
        ),  # the tab is no separator of this tokenizer, and so part of an unknown word
        ("rare soup", [2]),  # index 10 is not below num_words
        ("NAÏVE", [6]),
        ("", []),
    ],
)
def test_words_are_split_as_by_keras(tiny, text, known):
    """Bug: str.split, which splits at any white space, or words beyond num_words looked up in the
    embedding.
    """
    assert tiny._indices(text) == [0] * (LENGTH - len(known)) + known


def test_a_score_alone_is_that_in_company_to_the_last_bit(judge):
    """Bug: few rows take another path through a matrix product or a sigmoid."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    texts = [f"what a silly, stupid idea number {n} " * (n % 5) + "it was" for n in range(37)]
    together = score(judge, texts)
    alone = np.concatenate([score(judge, [text]) for text in texts])
    torch.set_num_threads(before)
    np.testing.assert_array_equal(together, alone)


def test_the_judge_says_what_the_wheel_says(judge):
    """Bug: another wheel, or any difference to Keras. Means of the six heads as printed on the
    wheel's page, from TensorFlow.
    """
    printed = {
        "This is wonderful news.": 0.0013,
        "Absolutely love your energy!": 0.0088,
        "Have a nice day :)": 0.0115,
        "You're the worst person ever!": 0.0937,
    }
    np.testing.assert_allclose(
        judge.probabilities(list(printed)).mean(axis=1), list(printed.values()), rtol=0, atol=5e-5
    )
    assert judge.digest == sound("jigsaw")[1] and TOXICITY_HEADS[0] == "toxic"


# --- how its files are converted ----------------------------------------------------------------


def test_a_vocabulary_shorter_than_num_words_is_whole(tmp_path):
    """Bug: a KeyError, or the last word lost, where a tokenizer has seen fewer words than it may
    keep.
    """
    write_tokenizer(tmp_path / "t.pickle", num_words=99)
    save_vocabulary(read_plain_pickle(tmp_path / "t.pickle"), tmp_path / "v.json")
    assert json.loads((tmp_path / "v.json").read_text())["words"] == WORDS


class Calls:
    """Pickles as a call of `function` on `argument`."""

    def __init__(self, function, argument):
        self.function, self.argument = function, argument

    def __reduce__(self):
        return self.function, (self.argument,)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (lambda folder: Calls(os.mkdir, f"{folder}/made"), r"(posix|nt)\.mkdir"),
        (lambda folder: Calls(eval, f"__import__('os').mkdir('{folder}/made')"), r"builtins\.eval"),
        (lambda folder: {"words": Counter()}, r"collections\.Counter"),
        (lambda folder: Path("x"), r"pathlib.*Path"),
        (lambda folder: np.zeros(2), r"numpy"),
        (lambda folder: OrderedDict.fromkeys, r"builtins\.getattr"),
    ],
)
def test_a_pickle_with_a_foreign_class_is_refused(tmp_path, value, named):
    """Bug: an unpickler that imports what a file names, and calls it, before anybody looks at the
    result.
    """
    (tmp_path / "t.pickle").write_bytes(pickle.dumps(value(tmp_path)))
    with pytest.raises(AssetError, match=rf"the pickle names {named}.* was not loaded"):
        read_plain_pickle(tmp_path / "t.pickle")
    assert not (tmp_path / "made").exists()


def test_a_pickled_tokenizer_becomes_plain_values(tmp_path):
    """Bug: the class itself is needed to read its attributes, or a subclass of dict with a factory
    comes back.
    """
    write_tokenizer(tmp_path / "t.pickle")
    read = read_plain_pickle(tmp_path / "t.pickle")
    assert isinstance(read, dict)
    assert read["index_word"][2] == WORDS[1]
    assert read["num_words"] == NUM_WORDS
    kinds = {dict if isinstance(value, dict) else type(value) for value in read.values()}
    assert kinds == {dict, str, bool, int, type(None)}
    assert not any(hasattr(value, "default_factory") for value in read.values())
