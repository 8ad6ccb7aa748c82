"""Tests of the converters: the real policy by its answers, the cost by a small fitted pipeline."""

import json
import os
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import joblib
import numpy as np
import pytest
import torch
from safetensors import safe_open
from sklearn.calibration import CalibratedClassifierCV
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.svm import LinearSVC
from tiny import random_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2ForCausalLM
from transformers.utils import logging

from igcore.errors import AssetError
from igcore.models import assets
from igcore.models.convert import (
    convert_policy,
    convert_tied_policy,
    quiet_transformers,
    read_fitted,
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


@pytest.fixture
def untied(monkeypatch):
    """What transformers reads from the one GGUF file of a folder: two matrices for one."""
    model = random_model("qwen2", {"tie_word_embeddings": False}, seed=1)
    model.config.quantization_config = model.config._model_name_or_path = "of the file"
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: model)
    tokenizer = tiny_tokenizer()
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: tokenizer)
    return model


@pytest.mark.parametrize("convert", [convert_policy, convert_tied_policy])
def test_a_tied_policy_embeds_by_its_output_matrix(untied, tmp_path, convert):
    """Bug: the coarser of two quantised copies is kept, both are, or every policy is tied."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir(), target.mkdir()
    (source / "model.gguf").touch()
    embedded = untied.get_input_embeddings().weight.clone()
    output = untied.get_output_embeddings().weight.clone()
    assert not torch.equal(embedded, output)
    convert(source, target)
    read = Qwen2ForCausalLM.from_pretrained(target, local_files_only=True)
    tied = convert is convert_tied_policy
    assert read.config.tie_word_embeddings == tied
    assert torch.equal(read.get_output_embeddings().weight, output)
    assert torch.equal(read.get_input_embeddings().weight, output if tied else embedded)
    with safe_open(target / "model.safetensors", "pt") as file:
        matrices = [name for name in file.keys() if file.get_tensor(name).shape == output.shape]
    assert len(matrices) == 2 - tied  # half a gigabyte less


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


@pytest.mark.parametrize("foreign", [os.getcwd, Path("x"), np.array([Path("x")], dtype=object)])
def test_a_pickle_of_other_classes_is_refused(tmp_path, foreign):
    """Guards the one pickle that igcore reads: what it names is imported, and may be called."""
    words = TfidfVectorizer().fit(["a bird", "two birds"])
    joblib.dump(words, tmp_path / "words")
    assert read_fitted(tmp_path / "words").vocabulary_ == words.vocabulary_
    words.stop_words_ = foreign
    joblib.dump(words, tmp_path / "words")
    with pytest.raises(AssetError, match=r"the pickle names (posix|pathlib|numpy).*, so it was"):
        read_fitted(tmp_path / "words")


@pytest.fixture
def talkative():
    """Loud settings of transformers, and the former ones afterwards."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_info()
    logging.enable_progress_bar()
    yield
    logging.set_verbosity(verbosity)


def test_quiet_is_quiet_and_undone(talkative):
    """Bug: loading prints into a notebook, or the caller's own log level and progress bars are lost
    afterwards.
    """
    with quiet_transformers():
        assert logging.get_verbosity() == logging.ERROR and not logging.is_progress_bar_enabled()
    assert logging.get_verbosity() == logging.INFO and logging.is_progress_bar_enabled()


def test_two_threads_that_load_leave_no_trace(talkative):
    """Bug: the second thread found the quiet settings of the first, and left them for good: no
    warning and no traceback of the process was seen again.
    """
    inside, found = threading.Barrier(2, timeout=1), [sys.stderr, list(warnings.filters)]

    def load(_):
        with quiet_transformers(), suppress(threading.BrokenBarrierError):
            inside.wait()  # the other thread must not come in

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(load, range(2)))
    assert inside.broken and [sys.stderr, list(warnings.filters)] == found
    assert logging.get_verbosity() == logging.INFO and logging.is_progress_bar_enabled()
