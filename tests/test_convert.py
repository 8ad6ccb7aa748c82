"""Tests of the converters: the real policy by its answers, the cost by a small fitted pipeline."""

import json
import sys
import warnings

import numpy as np
import pytest
import torch
from sklearn.calibration import CalibratedClassifierCV
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.svm import LinearSVC
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from igcore.models import assets
from igcore.models.convert import (
    quiet_transformers,
    save_offensive_language_weights,
)


def test_policy_folder_is_plain_float32():
    """Bug: permuted or doubly converted weights, a quantisation entry that breaks loading, or half
    precision.
    """
    folder = assets.fetch("smollm2")
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert not {"quantization_config", "_model_name_or_path"} & set(settings)
    for name in (
        "config.json",
        "generation_config.json",
    ):  # the same bytes, whichever version of transformers wrote them
        assert "transformers_version" not in (folder / name).read_text(encoding="utf-8")
    with quiet_transformers():
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, use_safetensors=True
        )
    assert model.dtype == torch.float32 and model.num_parameters() == 134_515_008
    with torch.inference_mode():
        logits = model(**tokenizer("The capital of France is", return_tensors="pt")).logits
    assert tokenizer.decode(logits[0, -1].argmax()) == " Paris"
    assert "<|im_start|>user" in tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}], tokenize=False
    )


def test_columns_follow_the_sorted_words(tmp_path):
    """Bug: words are sorted but idf and coefficients keep the vectorizer's own order; or a stop
    word is kept.
    """
    texts = ["zebra apple", "apple mango", "mango", "zebra zebra mango", "apple", "zebra mango"] * 3
    vectorizer = TfidfVectorizer(
        vocabulary=["zebra", "apple", "the", "mango"], stop_words="english"
    ).fit(texts)
    classifier = CalibratedClassifierCV(LinearSVC(), cv=3).fit(
        vectorizer.transform(texts), [1, 0, 0, 1, 0, 1] * 3
    )
    save_offensive_language_weights(vectorizer, classifier, tmp_path / "weights.npz")
    with np.load(tmp_path / "weights.npz", allow_pickle=False) as weights:
        assert weights["vocabulary"].tolist() == ["apple", "mango", "zebra"]
        np.testing.assert_array_equal(weights["idf"], vectorizer.idf_[[1, 3, 0]])
        np.testing.assert_array_equal(
            weights["coef"],
            [member.estimator.coef_[0, [1, 3, 0]] for member in classifier.calibrated_classifiers_],
        )
        shapes = [weights[name].shape for name in ("coef", "intercept", "a", "b")]
        assert shapes == [(3, 3), (3,), (3,), (3,)]


@pytest.fixture
def talkative():
    """Loud settings of transformers, and the former ones afterwards."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_info()
    logging.enable_progress_bar()
    yield
    logging.set_verbosity(verbosity)


def test_quiet_is_quiet_and_undone(talkative, capsys):
    """Bug: loading prints into a notebook, or the caller's own log level and progress bars are lost
    afterwards.
    """
    with quiet_transformers():
        print("noise", file=sys.stderr)
        warnings.warn("noise", stacklevel=1)
        assert logging.get_verbosity() == logging.ERROR and not logging.is_progress_bar_enabled()
    assert capsys.readouterr().err == ""
    assert logging.get_verbosity() == logging.INFO and logging.is_progress_bar_enabled()
