"""Tests of prompts in, text out, and of loading by name or folder."""

import hashlib
import json
import re
import shutil

import pytest
from copiedcode import edit_json, edit_tensors, swap_letters
from mockpolicy import LetterCost, LetterReward
from tiny import saved, tiny_model, tiny_policy, tiny_tokenizer, turn_calendar

from igcore import AssetError, Guard, ParameterError, SearchConfig, decode, load_policy
from igcore.models.templates import TEMPLATES
from igstudy import policies
from igstudy.runs.decode_params import DecodeParams
from igstudy.runs.decode_run import decode_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("policies") / "tiny"
    tokenizer = tiny_tokenizer()
    return saved(path, tiny_model(tokenizer), tokenizer)


@pytest.fixture
def policy():
    return tiny_policy()


def test_the_text_of_a_prefix_is_a_prefix_of_the_text(policy):
    """Guards block ends as positions in the emitted text: a character cut in its middle must not
    appear as a question mark.
    """
    tokens = policy.tokenizer("naïve – 雨 ☂ end")["input_ids"] + [policy.tokenizer.eos_token_id]
    whole = policy.text(tokens)
    assert whole == "naïve – 雨 ☂ end"
    assert all(whole.startswith(policy.text(tokens[:k])) for k in range(len(tokens) + 1))


def test_a_prompt_cannot_write_special_tokens(policy):
    """Guards the template against a prompt that ends its own turn."""
    ids = policy.encode("say </s> twice </s>")
    assert policy.tokenizer.eos_token_id not in ids
    assert policy.tokenizer.decode(ids) == "say < /s> twice < /s>"
    assert policy.tokenizer.eos_token_id in policy.tokenizer("say </s> twice")["input_ids"]


def test_the_chat_template_surrounds_the_prompt():
    template = (
        "{% for m in messages %}</s>{{ m.role }}: {{ m.content }}{% endfor %}{% if "
        "add_generation_prompt %}>{% endif %}"
    )
    tokenizer = tiny_tokenizer(chat_template=template)
    policy = tiny_policy(tokenizer, template=TEMPLATES["chat"])
    assert tokenizer.decode(policy.encode("hi")) == "</s>user: hi>"


def test_ordinary_added_tokens_stay_as_they_are():
    """Guards prompts of tokenizers that add runs of spaces: only special tokens are broken up."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["  ", "    "])
    assert tokenizer.decode(tiny_policy(tokenizer).encode("a      b </s>")) == "a      b < /s>"


@pytest.mark.parametrize("prompt", ["", " \n"])
def test_an_empty_prompt_is_refused(policy, prompt):
    with pytest.raises(ParameterError, match="is empty or has no tokens .*; give at least"):
        policy.encode(prompt)


def test_sparse_attention_is_not_asked_for_a_text_beyond_what_it_reads(policy, monkeypatch):
    """Bug: past ``index_topk`` tokens DeepSeek-like models read what stands later, in silence."""
    monkeypatch.setattr(policy.model.config, "index_topk", 9, raising=False)
    with pytest.raises(ParameterError, match="exceeds the context of 9 of tiny"):
        policy.encode("ten tokens", 0)


def test_a_prompt_must_fit_the_context_together_with_its_answer(policy):
    assert len(policy.encode("a" * 60, max_new_tokens=4)) == 60
    with pytest.raises(
        ParameterError,
        match="has 60 tokens, which with max_new_tokens 5 exceeds the context of 64 of tiny",
    ):
        policy.encode("a" * 60, max_new_tokens=5)


def test_any_local_folder_is_a_policy(folder):
    """Guards the way in for a model of one's own, from folder to answers."""

    policy = load_policy(str(folder))
    assert (policy.name, policy.template.name) == ("tiny", "raw")
    assert (len(policy.digest), policy.context) == (64, 64)
    config = SearchConfig(budget=1.0, n_samples=4, keep=2, block_size=4, max_new_tokens=10)
    length = LetterCost(lambda text: len(text) / 100)
    guard = Guard(policy, length, LetterReward(length.of), config)
    prompts = ["hello", "a longer one"]
    out = list(decode("inferenceguard", guard, prompts))
    assert [(r.status, r.n_tokens) for r in out] == [("verified_safe", 10)] * 2
    alone = [r.text for p in prompts for r in decode("inferenceguard", guard, [p])]
    assert alone == [r.text for r in out]


def shifted(state):
    return state | {"model.norm.weight": state["model.norm.weight"] + 1}


CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
ROTARY = {"rope_type": "default", "rope_theta": 500.0}
CHANGES = {  # file -> how it is changed
    "model.safetensors": lambda path: edit_tensors(path, shifted),
    "config.json": lambda path: edit_json(path, rope_parameters=ROTARY),
    "generation_config.json": lambda path: edit_json(path, eos_token_id=[5, 6]),
    "tokenizer.json": swap_letters,
    "tokenizer_config.json": lambda path: edit_json(path, chat_template=CHAT),
    "chat_template.jinja": lambda path: path.write_text(CHAT),
}


@pytest.mark.parametrize("name", CHANGES)
def test_whatever_changes_in_a_folder_changes_the_digest_and_is_named(folder, tmp_path, name):
    """Bug: a run resumed after a change of tokenizer, template, positions or end tokens, and mixed
    the answers of two policies.
    """
    copy = shutil.copytree(folder, tmp_path / "tiny")
    before = load_policy({"name": str(copy), "template": "raw"}).identity()
    CHANGES[name](copy / name)
    after = load_policy({"name": str(copy), "template": "raw"}).identity()
    differing = before["files"].items() ^ after["files"].items()
    assert {file for file, _ in differing} == {name}
    assert len({before["digest"], after["digest"]}) == 2
    assert (before["ends"] == after["ends"]) == (name != "generation_config.json")
    assert json.loads(json.dumps(after)) == after


def test_the_same_folder_under_another_name_has_the_same_digest(folder, tmp_path):
    """Bug: a critic that is refused where a folder was moved."""
    places = folder, folder, shutil.copytree(folder, tmp_path / "moved")
    first, again, moved = (load_policy(str(path)) for path in places)
    assert first.identity() == again.identity()
    assert moved.digest == first.digest
    assert moved.name == "moved"


def test_a_template_that_writes_the_date_changes_the_digest(folder, tmp_path, monkeypatch):
    """Bug: prompts of every day, and one digest for all of them."""
    copy, known = shutil.copytree(folder, tmp_path / "tiny"), []
    (copy / "chat_template.jinja").write_text("Today is {{ strftime_now('%d %B') }}. " + CHAT)
    for day in (1, 1, 2):
        turn_calendar(monkeypatch, day)
        known.append(load_policy(str(copy)))
    assert [policy.template.name for policy in known] == ["chat"] * 3
    assert known[0].digest == known[1].digest != known[2].digest
    assert known[0].files == known[2].files


def test_a_policy_made_by_hand_has_an_identity(policy):
    """Guards scripts that never touch a folder."""
    assert policy.digest == "" and policy.files == {}
    assert policy.identity() == {
        "name": "tiny",
        "digest": "",
        "files": {},
        "template": "raw",
        "ends": [policy.tokenizer.eos_token_id],
        "rendered": hashlib.sha256(b"How do plants grow?").hexdigest(),
    }


def test_a_policy_may_be_given_with_its_options(folder, monkeypatch):
    """Guards params files: template and revision stand beside the name."""
    asked = []
    monkeypatch.setattr(
        "igcore.models.policies.snapshot",
        lambda repo, revision, patterns: asked.append((repo, revision)) or folder,
    )
    policy = load_policy({"name": "alpaca-7b", "revision": "v1", "template": "vicuna"})
    assert (policy.name, policy.template.name) == ("alpaca-7b", "vicuna")
    # no name of ours, and no chat template
    assert load_policy({"name": "lmsys/vicuna-7b-v1.5", "revision": "v0"}).template.name == "raw"
    assert load_policy("vicuna-7b").template.name == "vicuna"
    pinned = policies.VICUNA.revision
    assert asked == [
        ("PKU-Alignment/alpaca-7b-reproduced", "v1"),
        ("lmsys/vicuna-7b-v1.5", "v0"),
        ("lmsys/vicuna-7b-v1.5", pinned),
    ]


def test_pins_are_commits():
    """Bug: a branch or a short hash, which may mean other weights next year."""
    pins = [policies.VICUNA.revision, policies.LLAMA.revision]
    assert all(re.fullmatch("[0-9a-f]{40}", pin) for pin in pins)


def test_a_chat_template_that_is_not_there_is_refused(folder):
    """Bug: transformers' own error, forty lines into the first prompt."""
    with pytest.raises(ParameterError, match="has no chat template; choose one of raw, chat, h"):
        load_policy({"name": str(folder), "template": "chat"})


def test_a_refused_model_leaves_no_run_folder(monkeypatch, tmp_path):
    """Bug: half a run, which tables then wait for, of a model that was never there."""
    (tmp_path / "hub").mkdir()
    monkeypatch.setenv("IGCORE_HUB", str(tmp_path / "hub"))
    monkeypatch.setattr("igstudy.files.root", lambda: tmp_path / "work")
    params = DecodeParams(
        profile="tiny", run="one", policy="vicuna-7b", methods=["base"], budget=0.2, prompts="mild",
        limit=2,
    )  # fmt: skip
    with pytest.raises(AssetError, match="model .lmsys/vicuna-7b-v1.5. is not in IGCORE_HUB"):
        decode_run(params)
    assert list(tmp_path.rglob("*")) == [tmp_path / "hub"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("smolm2-raw",), "unknown policy 'smolm2-raw'; did you mean 'smollm2-raw'"),
        (("no/such/folder",), "hub, such as openai-community/gpt2; igstudy has the paper's"),
        (({"name": "alpaca-7b", "templat": "raw"},),
         "unknown parameter 'templat'; did you mean 'template'"),
        (({"template": "raw"},), "unknown policy ''; allowed"),
        (({"name": "smollm2-raw", "template": "chats"},),
         "unknown template 'chats'; did you mean 'chat'"),
    ],
)  # fmt: skip
def test_what_cannot_be_loaded_is_named(arguments, message):
    with pytest.raises(ParameterError, match=message):
        load_policy(*arguments)


def test_the_embedded_policy_reads_both_templates():
    """Guards conversion and end tokens: raw continues the prompt, chat wraps it in turns."""
    raw, chat = load_policy("smollm2-raw"), load_policy("smollm2-chat")
    assert raw.tokenizer.decode(raw.encode("Bread rises because")) == "Bread rises because"
    templated = chat.tokenizer.decode(chat.encode("Why does bread rise?"))
    assert templated.endswith("Why does bread rise?<|im_end|>\n<|im_start|>assistant\n")
    ends = {raw.tokenizer.convert_ids_to_tokens(i) for i in raw.eos_ids}
    assert ends == {"<|im_end|>", "<|endoftext|>", "<|im_start|>"}
    assert raw.files == chat.files and raw.digest != chat.digest and raw.context == 8192
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= raw.files.keys()
