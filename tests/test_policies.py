"""Tests of policies made of a loaded model: models of many kinds, wrappers, pairs mixed up."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from tiny import framed, tiny_model, tiny_tokenizer

import igcore as ig
from igcore.engine.kv_cache import cache_name
from igcore.models.policies import policy_of, unwrapped

SETTINGS = dict(budget=1e6, block_size=3, max_new_tokens=6)
TOKENIZER = tiny_tokenizer()
TEXT = dict(
    vocab_size=len(TOKENIZER), hidden_size=16, intermediate_size=24, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1, head_dim=8, max_position_embeddings=48,
    initializer_range=0.3,
)  # fmt: skip
SEES = dict(
    hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, image_size=8,
    patch_size=4,
)  # fmt: skip
SEES_QWEN = dict(depth=1, hidden_size=8, intermediate_size=8, num_heads=1, out_hidden_size=16)
ROTATED = dict(rope_parameters=dict(rope_type="default", mrope_section=[2, 1, 1], rope_theta=1e4))
LINEAR = dict(
    layer_types=["linear_attention", "full_attention"], linear_num_value_heads=1,
    linear_num_key_heads=1, linear_key_head_dim=8, linear_value_head_dim=8,
)  # fmt: skip
COMPOSITE = {
    "VipLlava": dict(
        text=dict(model_type="llama"), sees=SEES | dict(model_type="clip_vision_model")
    ),
    "Mistral3": dict(text=dict(model_type="mistral"), sees=SEES | dict(model_type="pixtral")),
    "Qwen2_5_VL": dict(text=ROTATED, sees=SEES_QWEN),
    "Qwen3VL": dict(text=ROTATED, sees=SEES_QWEN | dict(deepstack_visual_indexes=[0])),
    "Qwen3_5": dict(text=LINEAR, sees=SEES_QWEN),
    "Llama4": dict(
        text=dict(intermediate_size_mlp=24, num_local_experts=2, attention_chunk_size=4),
        sees=SEES | dict(vision_output_dim=8, projector_input_dim=8, projector_output_dim=8),
    ),
    "Idefics3": dict(text=dict(model_type="llama"), sees=SEES),
    "Gemma3": dict(text=dict(sliding_window=4), sees=SEES),
}


def composite(name):
    """A tiny model of pictures and text, whose sizes are in the text_config."""
    torch.manual_seed(1)
    parts = COMPOSITE[name]
    config = getattr(transformers, f"{name}Config")(
        text_config=TEXT | parts["text"], vision_config=parts["sees"]
    )
    return getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()


def a_guard(model, tokenizer=TOKENIZER, **more):
    return ig.Guard((model, tokenizer), cost=len, **(SETTINGS | more))


@torch.inference_mode()
def read_anew(model, ids, new):
    """The mean log-probability of new tokens, every prefix read without a cache."""
    total = 0.0
    for i, token in enumerate(new):
        out = model(input_ids=torch.tensor([ids + new[:i]]), use_cache=False)
        total += out.logits[0, -1].float().log_softmax(-1)[token].item()
    return total / len(new)


@pytest.mark.parametrize("name", COMPOSITE)
def test_a_model_of_pictures_and_text_decodes_its_text(name):
    """Bug: AttributeError: 'LlavaConfig' object has no attribute 'eos_token_id'; and a context of
    2^31, so that texts grew past the positions that the model has.
    """
    model = composite(name)
    try:
        model(torch.tensor([[5]]))
    except AttributeError as error:  # Llama4 in transformers 5.24
        pytest.skip(f"transformers {transformers.__version__} cannot run it: {error}")
    guard = a_guard(model)
    assert guard.policy.context == 48 and TOKENIZER.eos_token_id in guard.policy.eos_ids
    ends = model.generation_config.eos_token_id
    assert {ends} <= guard.policy.eos_ids or ends is None
    answers = guard.map(["Tea?", "Why is the sea so salt"])
    for answer, prompt in zip(answers, ["Tea?", "Why is the sea so salt"], strict=True):
        expected = read_anew(model, TOKENIZER(prompt)["input_ids"], answer.tokens)
        assert answer.reward == pytest.approx(expected, abs=1e-5)
    with pytest.raises(ig.ParameterError, match="exceeds the context of 48"):
        a_guard(model, max_new_tokens=46)("Tea?")
    ids = TOKENIZER("Tea?", return_tensors="pt")
    assert model.generate(**ids, custom_generate=guard, max_new_tokens=6).shape[0] == 1


def test_a_template_that_reads_parts_gets_the_prompt():
    """Bug: LLaVA's template, which reads a list of parts, left out every prompt in silence."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message.role }}: {% for part in message.content | "
        "selectattr('type', 'equalto', 'text') %}{{ part.text }}{% endfor %}{% endfor %}"
    )
    policy = a_guard(composite("VipLlava"), tokenizer).policy
    assert tokenizer.decode(policy.encode("Tea?")) == "user: Tea?"


def test_layers_of_several_sizes_are_decoded():
    """Bug: AmbiguousGlobalPerLayerAttributeError: 'head_dim' of Gemma 4."""
    kinds = ["sliding_attention", "full_attention"]
    torch.manual_seed(1)
    config = transformers.Gemma4TextConfig(
        **TEXT, sliding_window=4, layer_types=kinds, global_head_dim=16
    )
    model = transformers.Gemma4ForCausalLM(config).eval()
    answer = a_guard(model)("Tea?")
    expected = read_anew(model, TOKENIZER("Tea?")["input_ids"], answer.tokens)
    assert answer.reward == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    "wrap",
    [
        torch.nn.DataParallel,
        torch.compile,
        lambda model: torch.compile(torch.nn.DataParallel(model)),
    ],
)
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_the_model_inside_a_wrapper_is_the_policy(wrap):
    """Bug: AttributeError of a wrapper, and a guard "made for another model"."""
    model = tiny_model(TOKENIZER)
    guard = a_guard(wrap(model))
    assert guard.policy.model is model
    assert guard("Tea?").tokens == a_guard(model)("Tea?").tokens
    ids = TOKENIZER("Tea?", return_tensors="pt")
    assert model.generate(**ids, custom_generate=guard, max_new_tokens=6).shape[0] == 1


def adapted(model, **config):
    """A wrapper that has what `unwrapped` reads of one of PEFT, which is not installed here."""
    plain = dict(is_prompt_learning=False, peft_type=SimpleNamespace(value="LORA"))
    wrapper = torch.nn.Module()
    wrapper.peft_config = {"mine": SimpleNamespace(**plain | config)}
    wrapper.get_base_model = lambda: model
    return wrapper


def test_a_model_of_peft_is_taken_or_refused():
    """Bug: a prompt of virtual tokens was left out, and the likelihoods were of neither model."""
    model = tiny_model(TOKENIZER)
    assert unwrapped(adapted(model)) is policy_of(adapted(model), TOKENIZER).model is model
    for config in (
        dict(is_prompt_learning=True),
        dict(alora_invocation_tokens=[5]),
        dict(peft_type=Kind("XLORA")),
    ):
        with pytest.raises(ig.ParameterError, match="^adapter 'mine' of the kind .* merge it"):
            a_guard(adapted(model, **config))


class Kind(str):
    """A name that is its own value, as those of PEFT."""

    value = property(str)


@pytest.mark.parametrize(
    "pair",
    [
        lambda model: (TOKENIZER, model),
        lambda model: (model, "a/folder"),
        lambda model: ("a/folder", TOKENIZER),
        lambda model: (model, model),
        lambda model: (model, SimpleNamespace(tokenizer=TOKENIZER)),  # such as a processor
    ],
)
def test_a_pair_that_is_mixed_up_is_named(pair):
    """Bug: AttributeError: TokenizersBackend has no attribute eval."""
    pair = pair(tiny_model(TOKENIZER))
    with pytest.raises(ig.ParameterError, match=r"^policy is a pair \(\w+, \w+\); give") as caught:
        ig.Guard(pair, cost=len, **SETTINGS)
    assert all(type(part).__name__ in str(caught.value) for part in pair)


def test_a_model_that_cannot_continue_a_text_is_named():
    """Bug: AttributeError 'generation_config', ValueError, IndexError in the first answer."""
    config = tiny_model(TOKENIZER).config
    bart = transformers.BartConfig(
        vocab_size=300, d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=1,
        decoder_attention_heads=1, encoder_ffn_dim=8, decoder_ffn_dim=8,
    )  # fmt: skip
    for model, message in (
        (transformers.BartForConditionalGeneration(bart), "is an encoder-decoder model"),
        (transformers.AutoModel.from_config(config), "has no head over the vocabulary"),
        (
            transformers.AutoModelForSequenceClassification.from_config(config),
            "has no head over the vocabulary",
        ),
    ):
        with pytest.raises(ig.ParameterError, match=message):
            a_guard(model)


def test_special_tokens_need_an_embedding_only_where_a_prompt_has_them():
    """Bug: a pad token without a row refused a fine-tuned model; a word without one was an
    IndexError in the first answer.
    """
    model, tokenizer = tiny_model(TOKENIZER), tiny_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    assert a_guard(model, tokenizer)("Tea?").status == "verified_safe"
    tokenizer.chat_template = "<pad>{{ messages[0]['content'] }}"
    with pytest.raises(ig.AssetError, match="resize_token_embeddings"):
        a_guard(model, tokenizer)
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["quokka"])
    with pytest.raises(ig.AssetError, match="has 258 tokens, but its model has .* 257"):
        a_guard(model, tokenizer)


@pytest.mark.parametrize(
    "template", ["Hello.", "{% if false %}{% endif %}", "{{ messages[0].role }}"]
)
def test_a_template_that_leaves_out_the_prompt_is_refused(template):
    """Bug: every prompt had one answer, without an error."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(
        ig.ParameterError, match="leaves out the user's message 'How do plants grow"
    ):
        a_guard(tiny_model(TOKENIZER), tokenizer)


def ending(kind):
    """A tokenizer that writes an end token after every text."""
    if kind == "Llama":  # of sentencepiece
        pieces = ("<unk>", "<s>", "</s>", "\u2581", *"Howdplantsgr?")
        vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
        return transformers.LlamaTokenizer(vocabulary, [], add_eos_token=True)
    return framed(tiny_tokenizer(), end="</s>")


@pytest.mark.parametrize("kind", ["Llama", "fast"])
def test_a_tokenizer_that_ends_every_prompt_is_refused(tmp_path, kind):
    """Bug: the model of a tokenizer that was left from fine-tuning continued an ended text."""
    model, tokenizer = tiny_model(TOKENIZER), ending(kind)
    model.save_pretrained(tmp_path), tokenizer.save_pretrained(tmp_path)
    message = "the end token '</s>' after every prompt; set its add_eos_token to False"
    for policy in ((model, tokenizer), tmp_path):
        with pytest.raises(ig.AssetError, match=message):
            ig.Guard(policy, cost=len, **SETTINGS)
    # DialoGPT's template ends every turn itself, and is right to
    tokenizer.chat_template = "{{ messages[0]['content'] }}</s>"
    assert a_guard(model, tokenizer).policy.encode("Tea?")[-1] == tokenizer.eos_token_id


class Foreign(transformers.PreTrainedTokenizerFast):
    """As mistral-common's: a method is there in place of a property."""

    def added_tokens_decoder(self):
        return {}


def test_a_tokenizer_of_another_library_is_named(tmp_path, monkeypatch):
    """Bug: 'function' object has no attribute 'items'."""
    model, tokenizer = tiny_model(TOKENIZER), tiny_tokenizer()
    model.save_pretrained(tmp_path), tokenizer.save_pretrained(tmp_path)
    tokenizer.__class__ = Foreign
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: tokenizer)
    for policy in ((model, tokenizer), tmp_path):
        with pytest.raises(ig.AssetError, match="is a Foreign, which lacks the methods of other"):
            ig.Guard(policy, cost=len, **SETTINGS)


def test_making_a_guard_leaves_the_model_in_training():
    """Bug: making a guard switched the user's model to evaluation."""
    model = tiny_model(TOKENIZER).train()
    a_guard(model)
    assert all(module.training for module in model.modules())


def test_the_folder_of_here_has_a_name(tmp_path, monkeypatch):
    """Bug: a policy whose name was empty."""
    folder = tmp_path / "quokka-1b"
    tiny_model(TOKENIZER).save_pretrained(folder), TOKENIZER.save_pretrained(folder)
    monkeypatch.chdir(folder)
    for path in (".", "../quokka-1b/"):
        assert ig.load_policy(path).name == "quokka-1b"


def test_dtype_and_device_are_for_policies_that_are_loaded_by_name(tmp_path, monkeypatch):
    """Bug: bfloat16 without units for it, ten times slower; `device` was an unknown parameter."""
    model = tiny_model(TOKENIZER)
    TOKENIZER.save_pretrained(tmp_path)

    def dtype_of(saved, has_units, **given):
        monkeypatch.setattr("igcore.models.pretrained.multiplies_bfloat16", lambda: has_units)
        model.to(saved).save_pretrained(tmp_path)
        return ig.Guard(tmp_path, cost=len, device="cpu", **given, **SETTINGS).policy.model.dtype

    for saved, has_units, expected in (
        (torch.bfloat16, True, torch.bfloat16),
        (torch.bfloat16, False, torch.float32),
        (torch.float16, True, torch.float32),
        (torch.float32, True, torch.float32),
    ):
        assert dtype_of(saved, has_units) == expected
    for name in ("bfloat16", torch.bfloat16):
        assert dtype_of(torch.float32, False, dtype=name) == torch.bfloat16
    assert ig.load_policy(tmp_path).model.dtype == torch.float32  # as params files name it
    for given in (dict(device="cpu"), dict(dtype="bfloat16")):
        with pytest.raises(ig.ParameterError, match="was loaded before; move it yourself"):
            a_guard(model, **given)


def test_the_cache_has_the_name_that_the_model_reads():
    """Bug: a deprecated argument, which a later version would take away."""

    class Old:
        def forward(self, past_key_values):
            pass

    class New:
        def forward(self, cache):
            pass

    assert [cache_name(kind()) for kind in (Old, New)] == ["past_key_values", "cache"]
