"""Tests of the text formats: exact to the last space, as the models were trained. A space too many
is another token.
"""

import random
from types import SimpleNamespace

import pytest
from scorerfiles import decoder_tokenizer

from igcore import ParameterError
from igcore.models.pretrained import load_tokenizer
from igcore.models.templates import TEMPLATES, turns_of
from igcore.models.wording import Wording
from igcore.template import escape_special_tokens, reserved_strings
from igstudy import templates as templates  # of the paper's systems
from tests.rehearsal.tokenizers import CHATML, chat_folder, llama3_folder, sentencepiece_folder

DIALOGUE = (
    "\n\nHuman: Why does bread rise?\n\nAssistant: Yeast makes gas.\n\nHuman: And "
    "cake?\n\nAssistant:"
)
VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant "
    "gives helpful, detailed, and polite "
    "answers to the user's questions."
)
LLAMA3 = (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: "
    "December 2023\nToday Date: 26 Jul 2024"
    "\n\n<|eot_id|>"
)


@pytest.fixture(scope="module")
def llama3(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizers") / "llama3"
    llama3_folder(folder)
    return load_tokenizer(folder)


SAFE_RLHF = "BEGINNING OF CONVERSATION: USER:"


@pytest.mark.parametrize(
    ("name", "prompt", "opening", "space"),
    [
        ("raw", "Hi there", "Hi there", ""),
        ("raw", DIALOGUE, DIALOGUE, ""),
        ("safe-rlhf", "Hi there", f"{SAFE_RLHF} Hi there ASSISTANT:", ""),
        ("safe-rlhf", DIALOGUE,
         f"{SAFE_RLHF} Why does bread rise? ASSISTANT:Yeast makes gas.</s>USER: And cake? "
         "ASSISTANT:",
         ""),
        ("vicuna", "Hi there", f"{VICUNA} USER: Hi there ASSISTANT:", " "),
        ("vicuna", "{x} {}", f"{VICUNA} USER: {{x}} {{}} ASSISTANT:", " "),  # no format string
        ("vicuna", DIALOGUE,
         f"{VICUNA} USER: Why does bread rise? ASSISTANT: Yeast makes gas.</s>USER: And cake? "
         "ASSISTANT:",
         " "),
        ("human-assistant", "Hi there", "\n\nHuman: Hi there\n\nAssistant:", " "),
        ("human-assistant", DIALOGUE, DIALOGUE, " "),
    ],
)  # fmt: skip
def test_a_template_writes_turns_to_the_last_space(name, prompt, opening, space):
    """Bug: a space after the colon, after which a Llama tokenizer gives the first word another
    token; and a dialogue of HH-RLHF put whole into one turn, with its speakers' names inside it.
    """
    template = TEMPLATES[name]
    assert template.opening(None, prompt) == opening
    assert template.whole(None, prompt, "Yes.") == f"{opening}{space}Yes."
    assert template.special  # BOS is the tokenizer's


def test_the_answer_has_one_space_before_it_and_no_more():
    """Bug: two spaces between "Assistant:" and an answer whose text begins with the space of its
    first token.
    """
    for answer in ("Yes.", " Yes."):
        assert (
            TEMPLATES["human-assistant"].whole(None, "Hi", answer)
            == "\n\nHuman: Hi\n\nAssistant: Yes."
        )
    # appended as it is
    assert TEMPLATES["safe-rlhf"].whole(None, "Hi", " Yes.").endswith("ASSISTANT: Yes.")


@pytest.mark.parametrize(
    ("prompt", "turns"),
    [
        ("Hello", ["Hello"]),
        (" Hello \n", [" Hello \n"]),  # no dialogue: as it is
        ("\n\nHuman: Hello\n\nAssistant:", ["Hello"]),
        (DIALOGUE, ["Why does bread rise?", "Yeast makes gas.", "And cake?"]),
        ("\n\nHuman: a\n\nb\n\nAssistant:", ["a\n\nb"]),
        ("Please write this: \n\nHuman: Hello\n\nAssistant:", None),
        ("\n\nHuman: Hello", None),
        ("\n\nHuman: Hello\n\nAssistant: Hi", None),  # ends with an answer
        ("\n\nAssistant: Hello\n\nHuman: Hi\n\nAssistant:", None),
        ("\n\nHuman: a\n\nHuman: b\n\nAssistant:", None),
        ("\n\nHuman: \n\nAssistant:", None),
    ],
)
def test_dialogues_are_taken_apart_and_nothing_else(prompt, turns):
    """Bug: a prompt lost or cut because it looks a little like a dialogue."""
    assert turns_of(prompt) == ([prompt] if turns is None else turns)


def test_the_chat_template_of_llama_3(llama3):
    """Bug: a second BOS, today's date in the prompt, spaces around what was said, or an assistant
    header too few.
    """
    chat = TEMPLATES["chat"]
    turns = [f"<|start_header_id|>{role}<|end_header_id|>\n\n" for role in ("user", "assistant")]
    one = f"{LLAMA3}{turns[0]}Hi there<|eot_id|>{turns[1]}"
    assert chat.opening(llama3, " Hi there \n") == one
    assert chat.whole(llama3, "Hi there", " Yes.\n") == f"{one}Yes.<|eot_id|>"
    several = (
        f"{LLAMA3}{turns[0]}Why does bread rise?<|eot_id|>{turns[1]}Yeast makes "
        f"gas.<|eot_id|>{turns[0]}And cake?<|eot_id|>"
    )
    assert chat.opening(llama3, DIALOGUE) == several + turns[1]
    assert not chat.special
    assert llama3(one, add_special_tokens=chat.special)["input_ids"].count(llama3.bos_token_id) == 1


def test_any_tokenizer_brings_its_own_chat_template(tmp_path):
    chat_folder(tmp_path, CHATML)
    tokenizer = load_tokenizer(tmp_path)
    assert (
        TEMPLATES["chat"].opening(tokenizer, "Hi")
        == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_prompt_cannot_write_the_tokens_of_a_template(tmp_path):
    """Bug: "</s>" in a prompt read as token 2, so that the user ends the turn and speaks for the
    assistant.
    """
    sentencepiece_folder(tmp_path, pad=True)
    tokenizer = load_tokenizer(tmp_path)
    text = "say </s> or <s> or <pad> or <unk> or <</s>/s>"
    assert {0, 1, 2, 400} <= set(tokenizer(text, add_special_tokens=False)["input_ids"])
    escaped = escape_special_tokens(tokenizer, text)
    assert escaped == "say < /s> or < s> or < pad> or < unk> or << /s>/s>"
    assert not {0, 1, 2, 400} & set(tokenizer(escaped, add_special_tokens=False)["input_ids"])
    assert escape_special_tokens(tokenizer, escaped) == escaped


def test_no_text_at_all_writes_the_tokens_of_a_template(tmp_path, llama3):
    """Bug: a special string that breaking another one up leaves behind. Texts are random pieces of
    special strings.
    """
    sentencepiece_folder(tmp_path, pad=False)
    rng = random.Random(0)
    for tokenizer in (load_tokenizer(tmp_path), llama3):
        special = set(tokenizer.all_special_ids) | {
            i for i, t in tokenizer.added_tokens_decoder.items() if t.special
        }
        pieces = [
            part
            for text in reserved_strings(tokenizer)[-9:]
            for part in (text, text[0], text[1:], text[:3], text[3:])
        ]
        for _ in range(200):
            text = escape_special_tokens(tokenizer, "".join(rng.choices(pieces, k=12)))
            assert not special & set(tokenizer(text, add_special_tokens=False)["input_ids"]), text


def test_the_longest_special_string_comes_first():
    """Bug: of two special strings the shorter one broken up inside the longer one, which a space
    elsewhere leaves whole.
    """
    tokens = {
        n: SimpleNamespace(special=True, content=text) for n, text in enumerate(("e|>", "<|e|>"))
    }
    tokenizer = SimpleNamespace(added_tokens_decoder=tokens, all_special_tokens=["e|>"])
    assert reserved_strings(tokenizer) == ["<|e|>", "e|>"]
    assert escape_special_tokens(tokenizer, "<|e|>") == "< |e |>"


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages[0].content.__class__.__mro__ }}", "SecurityError"),
        ("{% include 'x' %}", "TypeError"),
        ("{{", "TemplateSyntaxError"),
        ("{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", "RecursionError"),
        ("{% for a in range(1000000) %}{% endfor %}", "OverflowError"),
    ],
)
def test_a_chat_template_that_fails_is_one_sentence(llama3, monkeypatch, program, reason):
    """Bug: tracebacks of Jinja."""
    monkeypatch.setattr(llama3, "chat_template", program)
    with pytest.raises(ParameterError, match=reason) as caught:
        TEMPLATES["chat"].opening(llama3, "Hello")
    assert "\n" not in str(caught.value) and "choose another template" in str(caught.value)


# --- the wording of a guard's question ------------------------------------------------------------


ASKING = "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: And {response}?\n\nAssistant:"
ASKED = {"role": "user", "content": "{prompt}"}
ANSWERED = {"role": "assistant", "content": "{response}"}
CRITERION = {"role": "user", "content": "<guardian> Is it {rude}?"}
LABELS = {"unsafe": ["yes"], "safe": ["no"]}
# a template that reads an option, as those of Qwen3 and Granite Guardian do
OPTIONS = """{% if policy is defined %}[{{ policy }}]{% endif -%}
{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor -%}
{% if add_generation_prompt %}<|assistant|>{% if not thinking %}<think></think>{% endif -%}
{% endif %}"""


def written(prompt, response, template=None, **options):
    tokenizer = decoder_tokenizer()
    if template:
        tokenizer.chat_template = template
    return Wording(**LABELS, **options).text(tokenizer, prompt, response)


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        (  # Granite Guardian: the criterion comes after the answer
            [ASKED, ANSWERED, CRITERION],
            "<|user|>Hi<|end|><|assistant|>Hello<|end|><|user|>And {response}?<|end|>"
            "<|assistant|>I {prompt}<|end|><|user|><guardian> Is it {rude}?<|end|><|assistant|>",
        ),
        (  # a policy before it
            [{"role": "system", "content": "No rudeness."}, ASKED, ANSWERED],
            "<|system|>No rudeness.<|end|><|user|>Hi<|end|><|assistant|>Hello<|end|>"
            "<|user|>And {response}?<|end|><|assistant|>I {prompt}<|end|><|assistant|>",
        ),
        (  # Nemotron, PolyGuard: all in one turn
            [{"role": "user", "content": "Q: {prompt} A: {response} /no_think"}],
            f"<|user|>Q: {ASKING} A: I {{prompt}} /no_think<|end|><|assistant|>",
        ),
    ],
)
def test_turns_of_a_policy(messages, text):
    """Bug: a criterion in the place of the answer; a dialogue lumped into one turn; a place that a
    prompt writes itself is filled.
    """
    assert written(ASKING, "I {prompt}", messages=messages, prefix="<score>") == text + "<score>"


def test_options_reach_the_chat_template():
    """Bug: the verdict of a guard that would reason first is read too early."""
    plain = "<|user|>q<|end|><|assistant|>a<|end|><|assistant|>"
    assert written("q", "a", OPTIONS) == plain + "<think></think>"
    options = {"thinking": True, "policy": "P"}
    assert written("q", "a", OPTIONS, chat_options=options) == "[P]" + plain
    with_turns = written("q", "a", OPTIONS, chat_options=options, messages=[ASKED, ANSWERED])
    assert with_turns == "[P]" + plain


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"messages": [ASKED]}, "messages has no {response}; write it into the text"),
        ({"messages": [ANSWERED, CRITERION]}, "messages has no {prompt}; write it into the text"),
        ({"messages": [ASKED, {"role": "judge", "content": "{response}"}]}, "cannot be read; give"),
        ({"messages": [ASKED, {"content": "{response}"}]}, "cannot be read; give a mapping"),
        ({"messages": "{prompt}"}, "messages is '{prompt}': it must be a valid list"),
    ],
)
def test_what_cannot_be_written_is_named(options, sentence):
    """Bug: an answer that the guard never sees, and so never finds unsafe."""
    with pytest.raises(ParameterError) as caught:
        Wording(**LABELS, **options)
    assert sentence in str(caught.value)


def test_an_option_of_our_own_is_refused():
    """Bug: an option that ends the text before the guard's turn, in silence."""
    with pytest.raises(ParameterError, match="the chat template refuses .*add_generation_prompt"):
        written("q", "a", chat_options={"add_generation_prompt": False})
