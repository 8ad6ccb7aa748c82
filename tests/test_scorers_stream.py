"""Tests of guards with a verdict at every token, on random weights in the layout of the published
checkpoint: against a slow computation that reads the whole text again for each token, with the rule
of the model's authors.
"""

import json
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mockpolicy import mock_policy
from scorerfiles import EXACT, PROMPTS, assert_one_sentence, without
from transformers import AutoTokenizer, Qwen3Config, Qwen3Model

from igcore import AssetError, Guard, ParameterError, load_scorer
from igcore.models.convert import quiet_transformers
from igcore.models.stream import FLOOR, RunScorer, worst_runs
from igcore.scorers import uncached
from igcore.scoring import Cached, readings
from tests.rehearsal.tokenizers import CHATML, chat_folder
from tests.rehearsal.weights import drawn, save, shapes_of

HIDDEN, INNER = 32, 16
MAPS = {"0": "Safe", "1": "Unsafe", "2": "Controversial"}
CONFIG = {
    "architectures": ["Qwen3ForGuardModel"],
    "auto_map": {
        "AutoConfig": "configuration_qwen3_guard.Qwen3GuardConfig",
        "AutoModel": "modeling_qwen3_guard.Qwen3ForGuardModel",
    },
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 262,
    "eos_token_id": 264,
    "guard_inner_size": INNER,
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "initializer_range": 0.02,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
    "max_window_layers": 2,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_category": 8,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_query_category": 9,
    "num_query_risk_level": 3,
    "num_risk_level": 3,
    "query_risk_level_map": MAPS,
    "response_risk_level_map": MAPS,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.55.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 277,
}
HEADS = {
    "risk_level_category_pre.weight": (INNER, HIDDEN),
    "risk_level_category_layernorm.weight": (INNER,),
    "risk_level_head.weight": (3, INNER),
    "category_head.weight": (8, INNER),
    "query_risk_level_category_pre.weight": (INNER, HIDDEN),
    "query_risk_level_category_layernorm.weight": (INNER,),
    "query_risk_level_head.weight": (3, INNER),
    "query_category_head.weight": (9, INNER),
}
# as Qwen3's, as far as it matters: an answer begins after an empty piece of reasoning
THINKING = CHATML.replace(
    "{%- endif %}\n",
    "{%- if enable_thinking is defined and enable_thinking is false %}\n"
    "    {{- '<think>\\n\\n</think>\\n\\n' }}\n{%- endif %}\n{%- endif %}\n",
)
TEXTS = [
    (p, r) for p in PROMPTS for r in ("Water it when the soil is dry.", "No </s> tea: 35 %", "")
]


def state_of(seed: int = 0) -> dict[str, torch.Tensor]:
    body = {f"model.{key}": shape for key, shape in shapes_of(Qwen3Model, CONFIG).items()}
    state = {key: x if x.dim() == 1 else 0.3 * x for key, x in drawn(body, seed).items()}
    heads = {key: 2 * x for key, x in drawn(HEADS, seed + 1).items()}
    for key in HEADS:
        if key.endswith("layernorm.weight"):  # a norm that is left out shows
            heads[key] = torch.linspace(0.5, 2, INNER)
    return state | heads


def write(folder, config=CONFIG, state=None):
    folder.mkdir(parents=True, exist_ok=True)
    chat_folder(folder, THINKING)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling_qwen3_guard.py").write_text('raise RuntimeError("foreign code was run")\n')
    save(folder, state or state_of())
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("stream"))


def load(folder, **options):
    known = {"dtype": "float32", "device": "cpu", "self_check": False}
    return load_scorer({"name": "stream-guard", "repo": str(folder)} | known | options)


# --- the slow computation -------------------------------------------------------------------------


def tokens_of(folder, prompt: str, response: str) -> tuple[list[int], int]:
    """Return the ids of a text, and the number of those before the response."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    said = [prompt]
    if prompt.startswith("\n\nHuman:"):  # the second of the prompts
        said = ["Why does bread rise?", "Yeast eats sugar.", "And then?"]
    text = ""
    for i, turn in enumerate(said):
        text += f"<|im_start|>{('user', 'assistant')[i % 2]}\n{turn}<|im_end|>\n"
    text += "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    before = tokenizer(text, add_special_tokens=False)["input_ids"]
    ids = tokenizer(text + response, add_special_tokens=False)["input_ids"]
    assert ids[: len(before)] == before
    return ids, len(before)


@cache
def model_of() -> Qwen3Model:
    """Return the language model of the files in float64."""
    keys = {
        key.removeprefix("model."): x for key, x in state_of().items() if key.startswith("model.")
    }
    settings = {key: value for key, value in CONFIG.items() if key != "auto_map"}
    with quiet_transformers():
        model = Qwen3Model(Qwen3Config(**settings))
    model.load_state_dict(keys)
    return model.double().eval()


@cache
@torch.inference_mode()
def levels(folder, prompt: str, response: str) -> np.ndarray:
    """Return the probabilities (T, 3) of the levels at each token of a response in float64, each
    from a pass over the whole text up to it.
    """
    model, state = model_of(), state_of()
    pre, norm, head = (state[key].double().numpy() for key in list(HEADS)[:3])
    ids, start = tokens_of(folder, prompt, response)
    out = []
    for end in range(start + 1, len(ids) + 1):
        hidden = model(input_ids=torch.tensor([ids[:end]])).last_hidden_state[0, -1].numpy()
        inner = pre @ hidden
        inner = norm * inner / np.sqrt(np.mean(inner**2) + 1e-6)
        logits = head @ inner
        out.append(np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum())
    return np.array(out).reshape(-1, 3)


def expected_cost(p: np.ndarray, counted=(1,), run: int = 2) -> float:
    """Return by hand the largest margin that some tokens in a row all reach."""
    margins = []
    for row in p:
        bad = max(row[i] for i in counted)
        margins.append(bad - max(row[i] for i in range(3) if i not in counted))
    best = -1.0
    for start in range(len(margins) - run + 1):
        best = max(best, min(margins[start : start + run]))
    return best


def two_in_a_row(p: np.ndarray) -> bool:
    """Say what the rule of the model's authors says: two consecutive tokens are Unsafe."""
    verdicts = [row.argmax() == 1 for row in p]
    return any(a and b for a, b in zip(verdicts, verdicts[1:], strict=False))


# --- tests ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "counted", "run"),
    [
        ({}, (1,), 2),
        ({"run": 1}, (1,), 1),
        ({"run": 3, "counted": ["Controversial", "Unsafe"]}, (1, 2), 3),
        ({"run": 1000}, (1,), 1000),
    ],
)
def test_costs_are_those_of_whole_texts_read_again_for_each_token(folder, options, counted, run):
    """Guards the whole adapter. Bug: the head of what the user says, a norm that is left out,
    tokens of the template that count as the answer's, a run over the end of a text.
    """
    scorer = load(folder, **options)
    assert isinstance(scorer, RunScorer) and scorer.reads_tokens
    prompts, responses = zip(*TEXTS, strict=True)
    wanted = [expected_cost(levels(folder, *text), counted, run) for text in TEXTS]
    assert run > 3 or np.std(wanted) > 0.01
    assert scorer.score(prompts, responses, [True] * len(TEXTS)) == pytest.approx(wanted, **EXACT)
    cached = scorer.with_cache(scorer.open_cache(prompts))
    for n in (0, 3, 9, 20, 40):  # answers that grow
        texts = [(p, r[:n]) for p, r in TEXTS]
        parts = [expected_cost(levels(folder, *text), counted, run) for text in texts]
        found = cached.score(*zip(*texts, strict=True), [False] * len(texts))
        assert found == pytest.approx(parts, **EXACT)


def test_the_budget_0_is_the_rule_of_two_consecutive_tokens(folder):
    """Bug: a cost above 0 where no two neighbours are Unsafe, or at 0 and below where they are."""
    scorer = load(folder)
    words = "Water it when the soil is dry then wait and pour tea over it again 35 times".split()
    verdicts = []
    for n in range(1, len(words), 2):
        text = " ".join(words[-n:] + words[:n])
        said = two_in_a_row(levels(folder, PROMPTS[0], text))
        (cost,) = scorer.score([PROMPTS[0]], [text], [True])
        assert (cost > 0) == said
        verdicts.append(said)
    assert len(set(verdicts)) == 2


@pytest.mark.parametrize("session", [False, True])
def test_the_cost_after_every_token(folder, session):
    """Bug: checks at tokens see the cost of another token, or of the block alone."""
    scorer = load(folder)
    if session:
        scorer = scorer.with_cache(scorer.open_cache(PROMPTS))
    prompt, text = PROMPTS[0], "Water it when the soil is dry."
    p = levels(folder, prompt, text)
    wanted = [expected_cost(p[:end]) for end in range(1, len(p) + 1)]
    ((ends, costs),) = scorer.token_scores([prompt], [text], [0])
    assert costs == pytest.approx(wanted, **EXACT) and ends[-1] == len(text)
    assert ends == sorted(set(ends)) and len(ends) == len(p)
    ((later, rest),) = scorer.token_scores([prompt], [text], [9])
    assert later == [end for end in ends if end > 9]
    assert rest == pytest.approx(wanted[-len(later) :], **EXACT)
    ((last, one),) = scorer.token_scores([prompt], [text], [len(text)])
    assert last == [len(text)] and one == pytest.approx(wanted[-1:], **EXACT)
    (reading,) = readings(Cached(scorer), "token", [prompt], [text], [True], [9])
    assert reading.one_pass and reading.costs == pytest.approx(rest.tolist(), **EXACT)


def test_a_search_with_it_is_verified_token_by_token(folder):
    """Guards the whole path, with two scorers in one session and a check at every token."""
    scorer = load(folder, run=1)
    options = {"n_samples": 4, "block_size": 2, "max_new_tokens": 8, "checks": "token"}
    free = Guard(mock_policy(), scorer, budget=2.0, **options)("ab")
    budget = max(0.0, free.cost - 0.02)
    answer = Guard(mock_policy(), scorer, budget=budget, **options)("ab")
    assert free.status == "verified_safe" and free.cost <= 1
    if answer.status == "verified_safe":
        (cost,) = uncached(scorer).score(["ab"], [answer.text], [True])
        assert max(cost, 0) == pytest.approx(answer.cost, **EXACT) and cost <= budget


@given(st.lists(st.floats(-1, 1), max_size=12), st.integers(1, 5))
def test_runs_by_hand(margins, run):
    """Bug: a run that is counted over fewer tokens at the beginning; a cost that falls later."""
    found = worst_runs(np.array(margins), run)
    wanted = [FLOOR]
    for end in range(1, len(margins) + 1):
        runs = [min(margins[at : at + run]) for at in range(end - run + 1)]
        wanted.append(max([FLOOR, *runs]))
    assert found.tolist() == (wanted[1:] or [FLOOR])
    assert (np.diff(found) >= 0).all()


def test_a_nan_is_never_forgotten():
    """Bug: max() passes over a token that could not be read."""
    found = worst_runs(np.array([-0.5, np.nan, -0.5, -0.5]), 2)
    assert found[0] == FLOOR and np.isnan(found[1:]).all()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"counted": ["Safe"]}, "counted.0 is 'Safe': Input should be 'Unsafe' or"),
        ({"counted": []}, "parameter counted is []: List should have at least 1 item"),
        ({"counted": ["unsafe"]}, "counted.0 is 'unsafe': Input should be 'Unsafe' or"),
        ({"run": 0}, "parameter run is 0: Input should be greater than or equal to 1"),
    ],
)
def test_options_that_do_not_fit_are_named(folder, options, sentence):
    with pytest.raises(ParameterError) as caught:
        load(folder, **options)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("config", "state", "sentence"),
    [
        ({}, without(state_of(), "risk_level_head.weight"), "lacks the weights ['risk_level_head"),
        (
            {},
            state_of() | {"odd.weight": torch.ones(1)},
            "holds the unknown weights ['odd.weight']",
        ),
        (
            {"response_risk_level_map": MAPS | {"1": "Controversial", "2": "Unsafe"}},
            None,
            "has the levels ('Safe', 'Controversial', 'Unsafe'); choose a guard whose levels are",
        ),
        (
            {},
            state_of() | {"risk_level_head.weight": torch.ones(2, INNER)},
            "cannot be loaded",
        ),
        (
            {},
            state_of() | {"risk_level_category_pre.weight": torch.ones(INNER, HIDDEN + 1)},
            "cannot be loaded",
        ),
    ],
)
def test_files_of_something_else_are_refused(tmp_path, config, state, sentence):
    """Bug: random heads, or levels in another order: the safest answers would be kept out."""
    with pytest.raises(AssetError) as caught:
        load(write(tmp_path / "x", CONFIG | config, state))
    assert sentence in str(caught.value)
    assert_one_sentence(str(caught.value))


def test_without_a_chat_template_or_fast_tokenizer_it_is_refused(tmp_path):
    """Bug: the tokens of the answer cannot be told from others, and every one counts, or none."""
    place = write(tmp_path / "x")
    path = place / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {"chat_template": "{{ messages }}"}))
    load(place)  # writes the response last all the same
    del settings["chat_template"]
    path.write_text(json.dumps(settings))
    with pytest.raises(ParameterError, match="has no chat template"):
        load(place)


def test_the_digest_covers_the_rule(folder):
    """Bug: costs of another rule under one hash."""
    known = [
        load(folder, **options).digest
        for options in ({}, {"run": 3}, {"counted": ["Controversial"]}, {"dtype": "bfloat16"})
    ]
    both = [
        load(folder, counted=levels).digest
        for levels in (["Unsafe", "Controversial"], ["Controversial", "Unsafe"])
    ]
    assert len(set(known)) == len(known) and both[0] == both[1] not in known
