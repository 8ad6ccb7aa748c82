"""The embedded scorers: the cost against scikit-learn, the reward against its formula computed
another way.
"""

import math

import numpy as np
import pytest
import torch
from sklearn.calibration import CalibratedClassifierCV
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.svm import LinearSVC
from transformers import AutoModel, AutoTokenizer

from igcore.models.convert import quiet_transformers
from igstudy import assets
from igstudy.assets import save_offensive_language_weights
from igstudy.scorers.embedded import MiniLMRelevance, OffensiveLanguage
from igstudy.scorers.one_row import attend

GRUMPY = [
    "I hate Mondays", "this soup is awful", "what a boring, boring film", "the queue was terrible",
    "awful noise",
]  # fmt: skip
KIND = [
    "I like Mondays", "this soup is lovely", "what a splendid film", "the queue was short",
    "lovely music",
]  # fmt: skip
TEXTS = [
    *GRUMPY,
    *KIND,
    "",
    "the of and",
    "SOUP soup Soup awful",
    "a b c",
    "awful_soup",
    "naïve İstanbul ﬁlm Straße",
    "queue\n\tfilm",
    "It's awful; isn't it?",
    "lovely " * 400 + "awful",
    "🙂🙂",
]


@pytest.fixture(scope="module")
def cost():
    return OffensiveLanguage()


@pytest.fixture(scope="module")
def encoder():
    return MiniLMRelevance()


def offensive(scorer, texts):
    return scorer.score([""] * len(texts), texts, [True] * len(texts))


def relevance(scorer, prompts, responses):
    return scorer.score(prompts, responses, [True] * len(responses))


def test_cost_equals_scikit_learn(tmp_path, monkeypatch):
    """Bug: any difference in tokens, stop words, idf, norm, margins, sigmoids or their mean."""
    vectorizer = TfidfVectorizer(stop_words="english").fit(TEXTS)
    labels = np.array([1] * len(GRUMPY) + [0] * len(KIND))
    classifier = CalibratedClassifierCV(LinearSVC(), cv=5).fit(
        vectorizer.transform(GRUMPY + KIND), labels
    )
    save_offensive_language_weights(vectorizer, classifier, tmp_path / "weights.npz")
    monkeypatch.setattr(assets, "sound", lambda name: (tmp_path, "0" * 64))
    expected = classifier.predict_proba(vectorizer.transform(TEXTS))[:, 1]
    assert np.ptp(expected) > 0.1  # the comparison would see an error
    np.testing.assert_allclose(offensive(OffensiveLanguage(), TEXTS), expected, rtol=0, atol=1e-12)


def test_cost_of_mild_sentences_is_pinned(cost):
    """Bug: another wheel, another class column, or a sign turned round. Values from scikit-learn
    1.9.1 itself.
    """
    pinned = {
        "": 0.03637575,
        "I hate Mondays": 0.90536267,
        "I will hurt you": 0.44210307,
        "I would rather not answer that.": 0.0877978,
        "I'd rather not say that.": 0.02993088,
        "I am sorry, I cannot help with that.": 0.00224849,
    }
    np.testing.assert_allclose(
        offensive(cost, list(pinned)), list(pinned.values()), rtol=0, atol=5e-9
    )
    assert cost.digest == assets.sound("offensive-language")[1]


def test_cost_of_a_text_does_not_depend_on_its_neighbours(cost):
    """Bug: rows mixed up in the flat arrays, or prompts and endings that leak into the score."""
    together = cost.score(["I hate Mondays"] * len(TEXTS), TEXTS, [False] * len(TEXTS))
    alone = np.concatenate([offensive(cost, [text]) for text in TEXTS])
    np.testing.assert_array_equal(together, alone)
    assert offensive(cost, []).shape == (0,) and together.dtype == np.float64


def test_relevance_is_the_cosine_of_mean_pooled_states(encoder, monkeypatch):
    """Bug: padding enters the mean, rows come back in sorted order, or the first token is pooled
    instead.
    """
    prompts = [
        "How do I bake bread?",
        "Name a planet.",
        "The train was late again and everyone on board " * 9,
    ]
    responses = ["Mix flour, water and yeast, then bake it.", "Jupiter", "complained."]
    folder = assets.sound("minilm")[0]
    with quiet_transformers():
        tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder)

    def embed(text):
        tokens = tokenizer(
            text, return_tensors="pt", padding=False, truncation=True, max_length=256
        )
        with torch.inference_mode():
            return model(**tokens).last_hidden_state[0].mean(0).double()

    expected = [
        torch.cosine_similarity(embed(x), embed(y), 0)
        for x, y in zip(prompts, responses, strict=True)
    ]
    for weight in ("echo_weight", "length_weight"):
        monkeypatch.setattr(MiniLMRelevance, weight, 0)
    np.testing.assert_allclose(relevance(encoder, prompts, responses), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("response", "share", "words"),
    [
        ("Why does bread rise in the oven?", 1.0, 7),
        ("WHY DOES BREAD rise", 1.0, 4),
        ("Bread does rise in the heat", 1 / 4, 6),  # of its four trigrams only "rise in the"
        ("Yeast makes gas", 0.0, 3),
        ("the oven", 1.0, 2),
        ("bread, yeast", 0.5, 2),
        ("yeast", 0.0, 1),
    ],
)
def test_echo_and_length_terms(encoder, monkeypatch, response, share, words):
    """Bug: an echo of the prompt wins, shares are taken over the wrong words, or length grows
    without limit.
    """
    prompt = "Why does bread rise in the oven?"
    whole = relevance(encoder, [prompt], [response])
    for weight in ("echo_weight", "length_weight"):
        monkeypatch.setattr(MiniLMRelevance, weight, 0)
    difference = whole - relevance(encoder, [prompt], [response])
    assert difference == pytest.approx(-0.5 * share + 0.1 * (1 - math.exp(-words / 20)), abs=1e-12)


def test_relevance_ranks_an_answer_first(encoder):
    """Bug: off-topic text or the prompt itself scores above an answer."""
    prompt = "How do I bake bread?"
    responses = [
        "Mix flour, water and yeast, let it rise and bake it.",
        "The moon is far away tonight.",
        prompt,
    ]
    scores = relevance(encoder, [prompt] * 3, responses)
    assert scores.argmax() == 0 and scores.dtype == np.float64


def test_response_without_a_word_scores_zero(encoder):
    """Bug: an empty response gets the cosine of an empty text, which can beat a real one."""
    assert relevance(encoder, ["Hello there"] * 4, ["", "  \n", "...", "?!"]).tolist() == [0] * 4


def test_relevance_of_a_text_does_not_depend_on_its_neighbours(encoder):
    """Bug: padding, few rows in a matrix product, or a remembered prompt change the last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    prompts = [f"Tell me about number {n}." for n in range(70)]
    responses = [f"{n} comes after {n - 1}. " * (n // 3 + 1) for n in range(70)]
    scores = relevance(encoder, prompts, responses)
    order = np.random.default_rng(0).permutation(70)
    shuffled = relevance(encoder, [prompts[i] for i in order], [responses[i] for i in order])
    fresh = MiniLMRelevance()  # remembers no prompt
    alone = [relevance(fresh, [prompts[i]], [responses[i]])[0] for i in order]
    torch.set_num_threads(before)
    np.testing.assert_array_equal(shuffled, scores[order])
    np.testing.assert_array_equal(alone, scores[order])


def test_an_attention_that_is_more_than_plain_is_refused():
    """Bug: a window that is ignored gives wrong states to every text that is longer than it."""
    q = torch.zeros(1, 2, 5, 4)
    attend(None, q, q, q, None, lengths=[2, 3], scaling=1.0, dropout=0.0, sliding_window=None)
    with pytest.raises(NotImplementedError, match="sliding_window"):
        attend(None, q, q, q, None, lengths=[2, 3], scaling=1.0, sliding_window=64)


def test_each_distinct_text_is_embedded_once(encoder, monkeypatch):
    """Bug: the prompt of 16 candidates costs 16 passes, or one at each of their tokens."""
    seen, embed = [], encoder._embed
    monkeypatch.setattr(encoder, "_embed", lambda texts: seen.extend(texts) or embed(texts))
    relevance(encoder, ["Name a large planet."] * 3, ["Mars", "Venus", "Mars"])
    relevance(encoder, ["Name a large planet."], ["Jupiter"])
    assert sorted(seen) == ["Jupiter", "Mars", "Name a large planet.", "Venus"]


def test_long_text_is_cut_not_refused(encoder):
    """Bug: a text beyond the encoder's positions ends in an index error; words after token 256
    still count as words.
    """
    long = "bread rises because yeast makes gas " * 200
    assert np.isfinite(relevance(encoder, [long], [long])).all()


def test_relevance_refuses_unequal_lists(encoder):
    """Bug: zip drops the last responses in silence."""
    with pytest.raises(ValueError, match="argument 2 is longer"):
        relevance(encoder, ["Hello"], ["Hello", "there"])
    assert relevance(encoder, [], []).shape == (0,)


def test_digest_covers_the_formula(encoder, monkeypatch):
    """Bug: a reward with other weights is re-scored as if it were the default."""
    monkeypatch.setattr(MiniLMRelevance, "length_scale", 30)
    assert MiniLMRelevance().digest != encoder.digest
