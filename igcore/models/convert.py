"""Convert the files of a pinned wheel to safe formats: safetensors and plain NumPy arrays.

Raise `igcore.models.assets.CONVERTER_VERSION` when a function here writes something else, because
the cache is keyed by it.
"""

import contextlib
import io
import json
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..errors import AssetError, needs


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' progress bars, reports and warnings inside the block."""
    # before the redirection: its log handler keeps the stream it finds
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()  # in a notebook they are widgets, not text
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def convert_policy(source: Path, target: Path) -> None:
    """Convert the one GGUF file in `source` to float32 safetensors with their tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    needs("gguf", "embedded")
    (gguf,) = source.glob("*.gguf")
    with quiet_transformers():
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(
            source, gguf_file=gguf.name, dtype=torch.float32
        )
        model.hf_quantizer = None  # the weights are plain float32 by now; otherwise saving refuses
        # the latter is the GGUF's own title, which is no path
        del model.config.quantization_config, model.config._model_name_or_path
        model.save_pretrained(target)
        # else it says whether HF_HUB_OFFLINE was set here
        tokenizer.init_kwargs["local_files_only"] = False
        tokenizer.save_pretrained(target)
    # without the version of transformers, equal settings are equal bytes on all machines
    for path in (target / "config.json", target / "generation_config.json"):
        settings = json.loads(path.read_text(encoding="utf-8"))
        del settings["transformers_version"]
        path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    for path in (*target.glob("*.json"), *target.glob("*.jinja")):  # Windows ends lines otherwise
        path.write_bytes(path.read_bytes().replace(b"\r\n", b"\n"))


def save_offensive_language_weights(vectorizer, classifier, path: Path) -> None:
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


def convert_offensive_language(source: Path, target: Path) -> None:
    """Read the two pickles, whose wheel's hash was compared before, and leave only arrays."""
    needs("sklearn", "embedded")  # the pickles name its classes
    joblib = needs("joblib", "embedded")
    parts = [joblib.load(source / name) for name in ("vectorizer.joblib", "model.joblib")]
    save_offensive_language_weights(*parts, target / "weights.npz")


class _Plain(dict):
    """Stand-in for a pickled mapping or object, whose attributes become items.

    The class itself is not needed, nor what it is called with, such as the function that makes the
    missing values of a ``defaultdict``.
    """

    __setstate__ = dict.update

    def __init__(self, *_: object) -> None:
        super().__init__()


# what a pickle may name -> what is called instead
_PLAIN = {
    ("keras.src.legacy.preprocessing.text", "Tokenizer"): _Plain,
    ("collections", "OrderedDict"): _Plain,
    ("collections", "defaultdict"): _Plain,
    ("builtins", "int"): int,
}


class _PlainUnpickler(pickle.Unpickler):
    """An unpickler that imports nothing, and refuses every name that is not in `_PLAIN`."""

    def find_class(self, module: str, name: str):
        """Return the stand-in of an allowed name, or raise ``AssetError``."""
        if (module, name) in _PLAIN:
            return _PLAIN[module, name]
        raise AssetError(
            f"the pickle names {module}.{name}, so it was not loaded; check where it comes from"
        )


def read_plain_pickle(path: Path) -> dict:
    """Return a pickled Keras tokenizer as a dict of plain values.

    Nothing that the file names is imported or called.

    Raises
    ------
    AssetError
        When the pickle names any other class or function than such a tokenizer needs.
    """
    with path.open("rb") as file:
        return _PlainUnpickler(file).load()


def save_vocabulary(tokenizer: dict, path: Path) -> None:
    """Write the words of a Keras tokenizer as JSON.

    Parameters
    ----------
    tokenizer : dict
        Attributes of a ``keras.preprocessing.text.Tokenizer``.
    path : Path
        File to write: `words`, of which the first has index 1, up to ``num_words - 1``, and
        `filters`, the characters that separate words besides the space.
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

    h5py = needs("h5py", "embedded")
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
