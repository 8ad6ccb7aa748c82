"""Tests of the paper's checkpoints (llama-7b-rm, beaver-7b-cost, QRM) against slow references, and
of files and options that are wrong.
"""

import gc
import json
import math
import re
from dataclasses import dataclass

import pytest
import torch
from scorerfiles import (
    CONFIG,
    EXACT,
    PROMPTS,
    TEXTS,
    assert_everywhere,
    assert_growing,
    assert_refused,
    last_states,
    llama_state,
    refused,
    renamed,
    without,
    write,
)
from tiny import Counter, reencode, tiny, tiny_tokenizer
from transformers import AutoTokenizer, LlamaForSequenceClassification, LlamaModel

from igcore import ParameterError, ScorerError
from igcore.contract import Contract, Scoring
from igcore.engine.agreement import supports_shared_prefix
from igcore.models.convert import quiet_transformers
from igcore.models.registry import load_scorer, scorer_factory
from igcore.models.session import Session
from igcore.scorers import COST, REWARD
from igstudy.scorers import paper
from igstudy.scorers.paper import AnchoredBackbone, BeaverCost, LlamaReward, QRMCost, QRMReward
from tests.rehearsal.checkpoints import drawn
from tests.rehearsal.tokenizers import FORMATS, llama3_folder, sentencepiece_folder

ENDED = [(*text, finished) for text in TEXTS for finished in (True, False)]
COLUMNS = list(zip(*ENDED, strict=True))
USER, ANSWER = "How do I water a fern?", "Water it when the soil is dry."

# --- llama-7b-rm

RM = CONFIG | {"architectures": ["LlamaForSequenceClassification"], "vocab_size": 400}
RM_STATE = llama_state(RM, {"score.weight": (1, 32)})

# --- beaver-7b-cost

BEAVER = CONFIG | {
    "architectures": ["LlamaForScore"], "vocab_size": 401, "pad_token_id": 400, "score_dim": 1,
    "bias": False, "score_type": "cost", "do_normalize": False, "normalizer_type": None,
    "momentum": None,
}  # fmt: skip
NORMAL = {
    "normalizer.mean": torch.tensor([0.7]),
    "normalizer.var": torch.tensor([6.25]),
    "normalizer.count": torch.tensor([9]),
}
BEAVER_STATE = llama_state(BEAVER, {"score_head.weight": (1, 32)}) | NORMAL
BIAS = {"score_head.bias": torch.tensor([0.25])}

# --- QRM

WIDTH, HIDDEN, SAFE = 16, 16, 10
TURN = [128009, 128006, 78191, 128007, 271]
QRM = FORMATS["qrm"] | {
    "hidden_size": HIDDEN, "max_position_embeddings": 512, "rope_scaling": None,
    "torch_dtype": "float32",
}  # fmt: skip


def qrm_state() -> dict[str, torch.Tensor]:
    """Return a model and a head of which no part could be left out unnoticed."""
    state = {key: x for key, x in llama_state(QRM, {}).items() if "inv_freq" not in key}
    shapes = {
        "regression_layer.weight": (361, HIDDEN),
        "reward_transform_matrix": (19, 19),
        "gating.layers.9.weight": (19, WIDTH),
    }
    shapes |= {f"gating.layers.{i}.weight": (WIDTH, HIDDEN if i == 0 else WIDTH) for i in (0, 3, 6)}
    state |= drawn(shapes, seed=3)
    state["reward_transform_matrix"] += torch.eye(19)
    random = torch.Generator().manual_seed(4)
    for i in (2, 5, 8):
        for name in ("weight", "bias", "running_mean"):
            state[f"gating.layers.{i}.{name}"] = torch.randn(WIDTH, generator=random)
        variance = 0.5 + torch.randn(WIDTH, generator=random).abs()
        state[f"gating.layers.{i}.running_var"] = variance
        state[f"gating.layers.{i}.num_batches_tracked"] = torch.tensor(7)
    state["gating.layers.9.bias"] = torch.randn(19, generator=random)
    return state | {"gating.logit_scale": torch.tensor([1.25])}


QRM_STATE = qrm_state()


@dataclass
class Kind:
    """A scorer, its checkpoint, and the key of the weights that make its scores."""

    made: type
    sign: str
    tokens: str  # a folder of the fixture
    config: dict
    state: dict
    head: str

    def load(self, **options):
        return self.made(**{"dtype": "float32", "self_check": False} | options).load()


KINDS = {
    "llama-7b-rm": Kind(LlamaReward, REWARD, "plain", RM, RM_STATE, "score.weight"),
    "beaver-7b-cost": Kind(BeaverCost, COST, "padded", BEAVER, BEAVER_STATE, "score_head.weight"),
    "qrm-llama-3.1-8b-reward": Kind(
        QRMReward, REWARD, "llama3", QRM, QRM_STATE, "regression_layer.weight"
    ),
    "qrm-llama-3.1-8b-cost": Kind(
        QRMCost, COST, "llama3", QRM, QRM_STATE, "regression_layer.weight"
    ),
}
RM_NAME, BEAVER_NAME, QRM_REWARD, QRM_COST = KINDS
every_kind = pytest.mark.parametrize("name", KINDS)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokens")
    sentencepiece_folder(path / "plain", pad=False)
    sentencepiece_folder(path / "padded", pad=True)
    llama3_folder(path / "llama3", 128257)
    return path


@pytest.fixture(scope="module")
def folders(tokens, tmp_path_factory):
    """The folder of each sound checkpoint, by the name of its scorer."""
    path = tmp_path_factory.mktemp("hub")
    return {name: written(tokens, path / name, name) for name in KINDS}


@pytest.fixture
def spoilt(tokens, tmp_path):
    """Returns a folder with the tokenizer of a scorer, in which a test writes its own files."""

    def of(name, config=None, state=None):
        return written(tokens, tmp_path / name, name, config, state)

    return of


def written(tokens, path, name, config=None, state=None):
    kind = KINDS[name]
    path.mkdir(exist_ok=True)
    for file in (tokens / kind.tokens).iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    return write(path, kind.config | (config or {}), kind.state if state is None else state)


def load(name, folder, **options):
    return KINDS[name].load(repo=str(folder), **options)


def llama_of(folder, dtype=torch.float64):
    with quiet_transformers():
        return LlamaModel.from_pretrained(folder, dtype=dtype).eval()


# --- slow references ------------------------------------------------------------------------------


def turns(prompt: str) -> list[str]:
    """Return the turns of a prompt of `scorerfiles`, of which one is a dialogue."""
    if prompt.startswith("\n\nHuman:"):
        return ["Why does bread rise?", "Yeast eats sugar.", "And then?"]
    return [prompt]


def spoken(prompt: str, response: str) -> str:
    """Write a dialogue as HH-RLHF does."""
    prompt, response = (text.replace("</s>", "< /s>") for text in (prompt, response))
    before = prompt if prompt.startswith("\n\nHuman:") else f"\n\nHuman: {prompt}\n\nAssistant:"
    return f"{before} {response.lstrip(' ')}"


def conversation(prompt: str, response: str) -> str:
    """Write what Safe RLHF trained on, without the end."""
    prompt, response = (text.replace("</s>", "< /s>") for text in (prompt, response))
    *before, last = turns(prompt)
    text = "BEGINNING OF CONVERSATION: "
    if before:
        text += f"USER: {before[0]} ASSISTANT:{before[1]}</s>"
    return f"{text}USER: {last} ASSISTANT:{response}"


def chat(tokenizer, prompt: str, response: str) -> list[int]:
    """Return the ids of a dialogue in the chat template."""
    said = [*turns(prompt), response]
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)
    ]
    return tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def linear_score(state, key, divisor=1.0):
    """Return a head on the state of the last token, as ARGS and Safe RLHF have it."""
    weight = state[f"{key}.weight"][0].double()
    bias = state.get(f"{key}.bias", torch.zeros(1)).item()
    return lambda ids, states: (float(states[-1] @ weight) + bias) / divisor


def qrm_score(what: str, temperature: float = 5.0):
    """Return reward or cost in plain Python, objective by objective and quantile by quantile."""
    s = {key: x.tolist() for key, x in QRM_STATE.items() if not key.startswith("model.")}

    def gate(x):
        for i in (0, 3, 6):
            x = [max(0.0, dot(row, x)) for row in s[f"gating.layers.{i}.weight"]]
            names = ("weight", "bias", "running_mean", "running_var")
            weight, bias, mean, var = (s[f"gating.layers.{i + 2}.{name}"] for name in names)
            x = [
                (x[j] - mean[j]) / math.sqrt(var[j] + 1e-5) * weight[j] + bias[j]
                for j in range(WIDTH)
            ]
        last = zip(s["gating.layers.9.weight"], s["gating.layers.9.bias"], strict=True)
        powers = [math.exp((dot(row, x) + b) / temperature) for row, b in last]
        return [p / sum(powers) * s["gating.logit_scale"][0] for p in powers]

    def score(ids, states):
        starts = [i for i in range(len(ids)) if ids[i : i + 5] == TURN]
        last, asked = states[-1].tolist(), states[starts[-1]].tolist()
        quantiles = [dot(row, last) for row in s["regression_layer.weight"]]
        raw = [sum(quantiles[19 * o : 19 * o + 19]) / 19 for o in range(19)]
        matrix = s["reward_transform_matrix"]
        after = [sum(raw[o] * matrix[o][k] for o in range(19)) for k in range(19)]
        return dot(gate(asked), after) if what == "reward" else 0.5 - after[SAFE]

    return score


def reference_of(name, folder, side="right", score=None):
    """Return what computes scores from the hidden states of plain, padded passes."""
    model, tokenizer = llama_of(folder), AutoTokenizer.from_pretrained(folder)
    scores = {
        RM_NAME: linear_score(RM_STATE, "score"),
        BEAVER_NAME: linear_score(BEAVER_STATE, "score_head"),
        QRM_REWARD: qrm_score("reward"),
        QRM_COST: qrm_score("cost"),
    }
    score = score or scores[name]

    def ids_of(prompt, response):
        if name == RM_NAME:
            return tokenizer(spoken(prompt, response))["input_ids"]
        if name == BEAVER_NAME:
            return [*tokenizer(conversation(prompt, response))["input_ids"], 2]
        return chat(tokenizer, prompt, response)

    def reference(prompts, responses):
        texts = [tuple(ids_of(*text)) for text in zip(prompts, responses, strict=True)]
        distinct = list(dict.fromkeys(texts))
        states = last_states(model, distinct, side, KINDS[name].config["pad_token_id"])
        known = {ids: score(list(ids), x) for ids, x in zip(distinct, states, strict=True)}
        return [known[ids] for ids in texts]

    return reference


# --- all of them ----------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
@every_kind
def test_scores_are_those_of_the_slow_reference(folders, name, side):
    """Guards the whole adapter. Bug: the score of the padding; the sign; objectives and quantiles
    swapped; the gate read at the answer; statistics of the batch used.
    """
    scorer = load(name, folders[name])
    assert (scorer.name, scorer.sign) == (name, KINDS[name].sign)
    assert scorer_factory(name) is KINDS[name].made
    reference = reference_of(name, folders[name], side)
    assert_everywhere(scorer, reference)
    cached, unended = scorer.with_cache(scorer.open_cache(PROMPTS)), [False] * len(PROMPTS)
    begun = ["Water it when the"] * len(PROMPTS)
    cached.score(PROMPTS, begun, unended)
    cached.session.retain(PROMPTS, begun)
    longer = [f"{response} bread" for response in begun]
    with Counter(cached.backbone.model) as counter:
        assert cached.score(PROMPTS, longer, unended) == pytest.approx(
            reference(PROMPTS, longer), **EXACT
        )
    # the new word, an end, and what the tokenizer changed before them
    assert counter.tokens < 8 * len(PROMPTS)


@pytest.mark.parametrize("name", [RM_NAME, BEAVER_NAME, QRM_COST])
def test_the_head_is_exact_in_half_precision(folders, name):
    """Guards against a head cast down with its model: near 5 it would move in steps of 0.03."""
    scorer = load(name, folders[name], dtype="bfloat16")
    assert scorer.backbone.model.dtype == torch.bfloat16
    ids = scorer.backbone.ids(USER, ANSWER)
    state = last_states(llama_of(folders[name], torch.bfloat16), [ids])[0][-1].float()
    weight = KINDS[name].state[KINDS[name].head].float()
    exact = weight[0] @ state
    if name == QRM_COST:
        means = (weight.view(19, 19, HIDDEN) @ state).mean(-1)
        exact = 0.5 - means @ QRM_STATE["reward_transform_matrix"][:, SAFE]
    assert scorer.score([USER], [ANSWER], [True]) == pytest.approx([exact.item()], **EXACT)


@pytest.mark.parametrize("name", [RM_NAME, BEAVER_NAME])
def test_a_text_cannot_end_itself(folders, name):
    """Guards against `</s>` in an answer being read as the token 2: what follows it would be
    another conversation.
    """
    backbone = load(name, folders[name]).backbone
    ids = backbone.ids("What is </s> for?", "This </s> is <s> <pad> all</s>")
    ends = [2] if name == BEAVER_NAME else []  # its own end, which it was trained to read
    assert [i for i in ids if i in (1, 2, 400)] == [1, *ends]


@pytest.mark.parametrize(
    "name, change, match",
    [
        (RM_NAME, lambda s: renamed(s, "score.weight"), "lacks the weights .'score.weight'"),
        (RM_NAME, lambda s: s | {"score.weight": torch.zeros(2, 32)}, "cannot be loaded .*shape"),
        (BEAVER_NAME, lambda s: renamed(s, "normalizer.var"), "unknown .*'normalizer.vars'"),
        (  # the second version, which knows no safety
            QRM_REWARD,
            lambda s: s | {"regression_layer.weight": torch.zeros(95, HIDDEN)},
            "cannot be loaded .*Head",
        ),
    ],
)
def test_other_keys_and_shapes_are_refused(spoilt, name, change, match):
    """Guards against random numbers in the place of weights, and weights that nobody reads."""
    kind, folder = KINDS[name], spoilt(name)
    assert_refused(kind.load, folder, kind.config, change(kind.state), match)


@pytest.mark.parametrize(
    "name, options, match",
    [
        (BEAVER_NAME, {"dtype": "bfloat61"}, "unknown dtype 'bfloat61'; did you mean 'bfloat16'?"),
        (QRM_COST, {"scale": 2}, "unknown parameter 'scale'"),
    ],
)
def test_bad_options_are_refused_before_anything_is_loaded(name, options, match):
    """Guards against minutes of loading before a misspelt word is noticed."""
    with refused(ParameterError, re.escape(match)):
        load(name, "/no/such/folder", **options)


def test_digests_tell_settings_and_weights_apart(folders, spoilt):
    """Guards records: the same digest must mean the same scores."""
    other = llama_state(RM, {"score.weight": (1, 32)}, seed=1)
    asked = [
        (RM_NAME, folders[RM_NAME], {}),
        (RM_NAME, folders[RM_NAME], {"dtype": "bfloat16"}),
        (RM_NAME, spoilt(RM_NAME, state=other), {}),
        (BEAVER_NAME, folders[BEAVER_NAME], {}),
        (BEAVER_NAME, spoilt(BEAVER_NAME, config={"do_normalize": True}), {}),
        (QRM_COST, folders[QRM_COST], {}),
        (QRM_COST, folders[QRM_COST], {"dtype": "bfloat16"}),
        (QRM_REWARD, folders[QRM_REWARD], {}),
    ]
    digests = [load(name, folder, **options).digest for name, folder, options in asked]
    assert len(set(digests)) == len(digests)
    assert digests[0] == load(*asked[0][:2]).digest


@every_kind
def test_it_checks_itself(spoilt, name):
    """Guards the first run: a head with the wrong sign must not load. One of the two signs is wrong
    for any head.
    """
    kind, errors = KINDS[name], []
    for sign in (1, -1):
        state = kind.state | {kind.head: sign * kind.state[kind.head]}
        folder = spoilt(name, state=state)
        try:
            load_scorer({"name": name, "repo": str(folder), "dtype": "float32"})
        except ScorerError as error:
            errors.append(str(error))
    role = "cost" if kind.sign == COST else "reward"
    assert any(f"as this is a {role}" in text for text in errors)
    # the costs of a head without a bias may lie on one side of 0 with either sign
    assert len(errors) == 1 or name == BEAVER_NAME
    assert "\n" not in errors[0]


# --- llama-7b-rm ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def of_transformers(folders):
    """Scores one text with transformers' own class."""
    folder = folders[RM_NAME]
    with quiet_transformers():
        model = LlamaForSequenceClassification.from_pretrained(
            folder, num_labels=1, dtype=torch.float64
        )
    tokenizer = AutoTokenizer.from_pretrained(folder)

    @torch.inference_mode()
    def score(text: str) -> float:
        return model.eval()(**tokenizer(text, return_tensors="pt")).logits.item()

    return score


def test_its_text_is_exact(folders, of_transformers):
    """Guards the text that is scored, to the last space."""
    scorer = load(RM_NAME, folders[RM_NAME])
    expected = of_transformers(f"\n\nHuman: {USER}\n\nAssistant: {ANSWER}")
    assert scorer.score([USER], [ANSWER], [True]) == pytest.approx([expected], **EXACT)


def test_an_answer_is_read_up_to_where_it_speaks_for_the_user(folders, of_transformers):
    """Bug: a reward for what the answer lets the user say. ARGS reads what stands before the next
    "human:", in any letters.
    """

    def reference(prompts, responses):
        cut = [re.split("human:", r, flags=re.IGNORECASE)[0] for r in responses]
        return [of_transformers(spoken(*text)) for text in zip(prompts, cut, strict=True)]

    scorer = load(RM_NAME, folders[RM_NAME])
    for words in ("dry \n\nHuman: So? \n\nAssistant: Wait .", "dry . HUMAN: So? human: Wait ."):
        assert_growing(scorer, reference, words=f"Water it when {words}")


@pytest.mark.parametrize("pad", [-1, 400, None, 7])
def test_any_pad_id_of_the_configuration_serves(folders, spoilt, pad):
    """Guards batches against a pad id that is missing, outside the vocabulary, or an ordinary
    token.
    """
    other = load(RM_NAME, spoilt(RM_NAME, config={"pad_token_id": pad}))
    expected = load(RM_NAME, folders[RM_NAME]).score(*COLUMNS)
    assert other.score(*COLUMNS).tolist() == expected.tolist()


# --- beaver-7b-cost -------------------------------------------------------------------------------


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_bias_and_scale_are_those_of_the_files(spoilt, bias, normalised):
    """Guards versions of Safe RLHF: what the configuration says of a bias is not what the files
    hold; and the boundary at 0, which a mean taken off would move: a cost is divided by sqrt(6.25).
    """
    state = BEAVER_STATE | (BIAS if bias else {})
    folder = spoilt(BEAVER_NAME, {"bias": not bias, "do_normalize": normalised}, state)
    score = linear_score(state, "score_head", 2.5 + 1e-8 if normalised else 1.0)
    reference = reference_of(BEAVER_NAME, folder, score=score)
    assert_growing(load(BEAVER_NAME, folder), reference)


def test_files_without_a_normaliser(folders, spoilt):
    """Guards older files, and against costs that are said to be normalised by a number that is not
    there.
    """
    expected = load(BEAVER_NAME, folders[BEAVER_NAME]).score(*COLUMNS).tolist()
    bare = {key: x for key, x in BEAVER_STATE.items() if not key.startswith("normalizer")}
    folder = spoilt(BEAVER_NAME, state=bare)
    assert load(BEAVER_NAME, folder).score(*COLUMNS).tolist() == expected
    config, match = BEAVER | {"do_normalize": True}, "cannot be loaded .*normalizer.var"
    assert_refused(KINDS[BEAVER_NAME].load, folder, config, bare, match)


def test_a_reward_model_is_refused(spoilt):
    """Guards the sign: the reward model of the same family has the same keys, and its number means
    the opposite.
    """
    config, match = BEAVER | {"score_type": "reward"}, "is a reward model, not a cost model"
    load_it = KINDS[BEAVER_NAME].load
    assert_refused(load_it, spoilt(BEAVER_NAME), config, BEAVER_STATE, match)


# --- QRM ------------------------------------------------------------------------------------------


def test_the_gate_reads_where_the_prompt_ends(folders):
    """Guards the place: at the end of the user's last turn, where the published code reads it, and
    not after the pattern.
    """
    backbone = load(QRM_REWARD, folders[QRM_REWARD]).backbone
    ids = backbone.ids(PROMPTS[1], "It rises.")
    at = backbone.anchored(ids) - 1
    assert ids[at : at + 5] == TURN
    assert backbone.prefix(PROMPTS[1]) == ids[: at + 1]
    assert ids.count(78191) == 2 and 78191 not in ids[at + 5 :]
    assert ids[0] == 128000 and ids.count(128000) == 1  # one BOS, by the template


ANCHOR, LETTERS = "#>", tiny_tokenizer()


def anchored_by(text):
    """A backbone of tiny-Llama whose anchor is a text after the prompt."""
    ids = LETTERS(ANCHOR)["input_ids"]
    kind = type("Anchored", (AnchoredBackbone,), {"anchor": tuple(ids)})
    model = tiny("llama", torch.float64, vocab_size=320)
    return kind(model, LETTERS, lambda prompt, response: f"{prompt}{text}{response}")


@pytest.fixture(scope="module")
def anchored():
    return anchored_by(ANCHOR)


def test_an_anchor_adds_the_state_where_the_prompt_ends(anchored):
    """Guards gates that read the prompt: of the last anchor the first id, under padding, in a batch
    and cached.
    """
    prompts = ["say", "more than this", f"yes{ANCHOR}no"]
    texts = [(p, r) for r in ("", "so", "so it is then", "so be it") for p in prompts]
    expected = []
    for prompt, response in texts:
        ids = LETTERS(f"{prompt}{ANCHOR}{response}")["input_ids"]
        states, _ = reencode(tiny("llama", torch.float64, vocab_size=320), ids)
        expected.append(torch.cat([states[-1], states[len(prompt)]]).float())
    columns = list(zip(*texts, strict=True))
    session = Session(anchored, prompts)

    def hidden_of(given, responses):
        texts = session.texts(given, responses)
        return torch.cat(session.states(texts, [1] * len(texts)))

    one_by_one = torch.cat([hidden_of([p], [r]) for p, r in texts])
    for hidden in (
        one_by_one,
        hidden_of(*columns),
        anchored.encode([anchored.ids(*text) for text in texts]),
    ):
        assert hidden.shape == (len(texts), 64)
        assert torch.allclose(hidden, torch.stack(expected), atol=1e-6)
    session.retain(prompts, ["so it"] * 3)
    assert torch.allclose(hidden_of(*columns), torch.stack(expected), atol=1e-6)
    other = hidden_of(["a prompt of another group"], ["so"])
    assert torch.allclose(
        other, anchored.encode([anchored.ids("a prompt of another group", "so")]), atol=1e-6
    )


def test_a_text_without_its_anchor_is_refused(anchored):
    """Guards a gate against a state from anywhere in the text."""
    backbone = anchored_by("")
    assert not anchored.reads_tokens
    assert not Session(backbone, PROMPTS).prefixes
    with pytest.raises(
        ParameterError, match="the text does not hold the tokens .*; use the chat template"
    ):
        backbone.encode([backbone.ids(PROMPTS[0], "a")])


@pytest.mark.parametrize("named, temperature", [(2.0, 2.0), (None, 5.0)])
def test_the_temperature_is_that_of_the_configuration(folders, spoilt, named, temperature):
    """Guards a gate that is flatter or sharper than the one that was trained; older files do not
    name it.
    """
    folder = spoilt(QRM_REWARD)
    config = without(QRM, "gating_temperature")
    write(folder, config | ({"gating_temperature": named} if named else {}), QRM_STATE)
    scorer, (prompts, responses, _) = load(QRM_REWARD, folder), COLUMNS
    reference = reference_of(QRM_REWARD, folder, score=qrm_score("reward", temperature))
    assert scorer.score(*COLUMNS) == pytest.approx(reference(prompts, responses), **EXACT)
    assert scorer.digest != load(QRM_REWARD, folders[QRM_REWARD]).digest


def test_reward_and_cost_come_from_one_pass(folders):
    """Guards the work of a search: the second scorer reads nothing, weights are there once."""
    folder = folders[QRM_REWARD]
    roles = {"cost": load(QRM_COST, folder), "reward": load(QRM_REWARD, folder)}
    model = roles["cost"].backbone.model
    assert roles["reward"].backbone is roles["cost"].backbone and supports_shared_prefix(model)
    with Counter(model) as counter:
        contracts = {role: Contract(scorer) for role, scorer in roles.items()}
        scoring = Scoring(contracts, PROMPTS)
        # the end of a check, as of an empty answer, is read for each scorer
        columns = list(zip(*(text for text in ENDED if text[1]), strict=True))
        cost = scoring.search["cost"].score(*columns)
        read = counter.tokens
        reward = scoring.search["reward"].score(*columns)
        assert len(scoring.sessions.caches) == 1 and counter.tokens == read > 0
    assert cost == pytest.approx(roles["cost"].score(*columns), **EXACT)
    assert reward == pytest.approx(roles["reward"].score(*columns), **EXACT)


def test_a_model_is_shared_while_it_is_used(folders):
    """Guards memory: other types are other models, and what no scorer holds any more is freed."""
    folder = folders[QRM_REWARD]
    cost, reward = load(QRM_COST, folder), load(QRM_REWARD, folder)
    half = load(QRM_REWARD, folder, dtype="bfloat16")
    assert cost.backbone is reward.backbone is not half.backbone
    del cost, half
    gc.collect()
    assert [shared.backbone for shared in paper._SHARED.values()] == [reward.backbone]
    del reward
    gc.collect()
    assert not paper._SHARED


def test_a_text_cannot_end_its_turn(folders):
    """Guards the pattern: an answer that writes it would be scored as another prompt's."""
    backbone = load(QRM_REWARD, folders[QRM_REWARD]).backbone
    turn = "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nyes"
    ids, plain = (backbone.ids("Why?", answer) for answer in (f"so {turn}", "so"))
    assert all(ids.count(i) == plain.count(i) for i in range(128000, 128257))


@pytest.mark.parametrize("pattern", [True, False])
def test_a_chat_template_without_the_pattern_is_refused(spoilt, pattern):
    """Guards the place of the gate: without it some other hidden state would be read."""
    folder = spoilt(QRM_REWARD)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    header = "'<|start_header_id|>' + "
    other = settings["chat_template"].replace(f"{header}turn.role", f"{header}(turn.role | upper)")
    assert other != settings["chat_template"]
    settings["chat_template"] = other if pattern else None
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    match = "does not hold the tokens .128009, .*chat template" if pattern else "no chat template"
    with refused(ParameterError, match):
        load(QRM_REWARD, folder)
