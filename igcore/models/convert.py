"""Convert the files of a pinned wheel to safe formats: safetensors and plain NumPy arrays.

Raise `igcore.models.assets.CONVERTER_VERSION` when a function here writes something else: the names
of the cached folders contain it.
"""

import contextlib
import json
import os
import pickle
import threading
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import AssetError, needs

_LOADING = threading.RLock()


def _forget_lock() -> None:
    """Use a new lock: in a forked child, no thread is left that could release the old one."""
    global _LOADING
    _LOADING = threading.RLock()


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(after_in_child=_forget_lock)


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' progress bars, reports and warnings inside the block."""
    from transformers.utils import logging

    # the settings are of the process: a second thread would take the quiet ones for the former
    with _LOADING, warnings.catch_warnings(action="ignore"):
        verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
        logging.set_verbosity_error()
        logging.disable_progress_bar()  # in a notebook they are widgets, not text
        try:
            yield
        finally:
            logging.set_verbosity(verbosity)
            (logging.enable_progress_bar if bars else logging.disable_progress_bar)()


def convert_policy(source: Path, target: Path, tied: bool = False) -> None:
    """Convert the one GGUF file in `source` to float32 safetensors with their tokenizer.

    With `tied` the output matrix is also the embedding: the file holds both, quantised differently,
    of a model that has one.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    needs("gguf")
    (gguf,) = source.glob("*.gguf")
    with quiet_transformers():
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(
            source, gguf_file=gguf.name, dtype=torch.float32
        )
        if tied:
            model.get_input_embeddings().weight = model.get_output_embeddings().weight
            model.config.tie_word_embeddings = True
        model.hf_quantizer = None  # the weights are float32 now; with a quantizer saving fails
        # _model_name_or_path is the title in the GGUF file, which is no path
        del model.config.quantization_config, model.config._model_name_or_path
        model.save_pretrained(target)
        # without this line the value depends on HF_HUB_OFFLINE
        tokenizer.init_kwargs["local_files_only"] = False
        tokenizer.save_pretrained(target)
    # without the version of transformers, equal settings have equal bytes on all machines
    for path in (target / "config.json", target / "generation_config.json"):
        settings = json.loads(path.read_text(encoding="utf-8"))
        del settings["transformers_version"]
        path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    for path in (*target.glob("*.json"), *target.glob("*.jinja")):  # Windows writes \r\n
        path.write_bytes(path.read_bytes().replace(b"\r\n", b"\n"))


convert_tied_policy = partial(convert_policy, tied=True)


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
