"""Every family of causal language models in transformers that has a tiny configuration: decoded in
a batch of unequal prompts as alone, and as by its own forward pass without a cache; or refused by
name.

The reference gives positions from 0, as `generate` of transformers does. RoBERTa and its kin count
them from their padding id where none are given. That difference is transformers' own.
"""

import pytest
import torch
from tiny import (
    ALL_HEADS,
    DENSE,
    HEADS,
    LATENT,
    MAMBA,
    MOE,
    WINDOW,
    Counter,
    numbers,
    random_model,
    tiny_tokenizer,
)

from igcore import ParameterError, Policy, PolicyError, Prompt
from igcore.engine.agreement import CACHES, cache_for
from igcore.engine.kv_cache import cache_name
from igcore.engine.local import LocalEngine
from igcore.engine.prefix_cache import SharedRows
from igcore.models.lm_scorer import Backbone

IDS = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
DECODER = dict(is_decoder=True)
INDEX = dict(index_topk=64, index_n_heads=2, index_head_dim=8)
HALF = dict(layer_types=["sliding_attention", "full_attention"])
LINEAR = dict(layer_types=["linear_attention", "full_attention"])
DELTA = LINEAR | dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
    linear_value_head_dim=8, linear_conv_kernel_dim=4,
)  # fmt: skip
SEQ2SEQ = dict(
    d_model=32, decoder_layers=2, encoder_layers=1, decoder_attention_heads=4, pad_token_id=1,
    encoder_attention_heads=4, decoder_ffn_dim=48, encoder_ffn_dim=48, init_std=0.3,
)  # fmt: skip
ROBERTA = IDS | DECODER | dict(max_position_embeddings=80)
BORDER = 24  # of LongRoPE, above the texts of these tests
ROPE = dict(
    rope_type="longrope", rope_theta=1e4, original_max_position_embeddings=BORDER,
    short_factor=[1.0] * 4, long_factor=[4.0, 8.0, 16.0, 32.0],
)  # fmt: skip
LONGROPE = dict(original_max_position_embeddings=BORDER, rope_parameters=ROPE)

FAMILIES = dict.fromkeys(
    """apertus arcee biogpt bitnet bloom cohere diffllama doge ernie4_5 falcon fuyu gpt-sw3 gpt2
    gpt_bigcode gpt_neox gpt_neox_japanese granite hyperclovax internlm3 iquestcoder jais2 llama mpt
    nanochat nemotron olmo olmo2 olmo_hybrid persimmon phi qwen2 seed_oss smollm3
    stablelm""".split(),
    {},
)
FAMILIES |= dict.fromkeys(["bert", "bert-generation", "electra", "ernie", "megatron-bert"], DECODER)
FAMILIES |= dict.fromkeys(["rembert", "roc_bert", "roformer"], DECODER)
FAMILIES |= dict.fromkeys(["mistral", "starcoder2", "cohere2", "olmo3", "vaultgemma"], WINDOW)
FAMILIES |= dict.fromkeys(["gemma", "glm", "glm4", "helium", "hunyuan_v1_dense"], HEADS)
FAMILIES |= dict.fromkeys(["ministral3", "qwen3"], HEADS)
FAMILIES |= dict.fromkeys(["codegen", "gptj"], dict(rotary_dim=8))
FAMILIES |= dict.fromkeys(["camembert", "data2vec-text", "roberta", "xlm-roberta"], ROBERTA)
FAMILIES |= dict.fromkeys(["roberta-prelayernorm", "xlm-roberta-xl"], ROBERTA)
FAMILIES |= dict.fromkeys(["mixtral", "olmoe", "flex_olmo", "granitemoe", "phimoe"], MOE)
FAMILIES |= dict.fromkeys(["granitemoeshared", "aria_text", "qwen2_moe", "cohere2_moe"], MOE)
FAMILIES |= dict.fromkeys(["minimax_m2", "qwen3_moe", "solar_open"], MOE | HEADS)
FAMILIES |= dict.fromkeys(["deepseek_v2", "deepseek_v3", "axk1"], MOE | LATENT | DENSE)
FAMILIES |= dict.fromkeys(["glm4_moe_lite"], MOE | LATENT | DENSE)
FAMILIES |= dict.fromkeys(["deepseek_v32", "glm_moe_dsa"], MOE | LATENT | DENSE | INDEX)
FAMILIES |= dict.fromkeys(["dots1", "glm4_moe", "hy_v3"], MOE | HEADS | DENSE)
FAMILIES |= dict.fromkeys(["kolibri1", "laguna", "mellum", "gpt_oss"], MOE | HEADS | WINDOW)
FAMILIES |= dict.fromkeys(["qwen3_next", "qwen3_5_moe_text"], MOE | HEADS | DELTA)
FAMILIES |= {
    "afmoe": MOE | HEADS | WINDOW | dict(num_dense_layers=1, global_attn_every_n_layers=2),
    "bamba": MAMBA | dict(attn_layer_indices=[1]),
    "big_bird": DECODER | dict(attention_type="original_full"),
    "ctrl": dict(dff=48),
    "cwm": IDS | HALF | WINDOW,
    "dbrx": dict(
        d_model=32, n_heads=4, n_layers=2, max_seq_len=64,
        attn_config=dict(kv_n_heads=2, rope_theta=1e4, clip_qkv=8),
        ffn_config=dict(hidden_size=32, ffn_hidden_size=32, moe_num_experts=4, moe_top_k=2),
    ),
    "ernie4_5_moe": MOE | dict(moe_num_experts=4, moe_k=2, moe_num_shared_experts=1),
    "exaone4": WINDOW | HALF,
    "falcon_h1": MAMBA | dict(mamba_d_ssm=32, mamba_n_heads=4),
    "gemma2": HEADS | WINDOW,
    "gemma3_text": HEADS | WINDOW | HALF,
    "gemma3n_text": HEADS | WINDOW | dict(
        num_kv_shared_layers=2, vocab_size_per_layer_input=97, hidden_size_per_layer_input=8,
        num_hidden_layers=4, layer_types=HALF["layer_types"] * 2,
        activation_sparsity_pattern=[0.0] * 4,
    ),
    "gemma4_text": HEADS | WINDOW | HALF | dict(
        vocab_size_per_layer_input=97, hidden_size_per_layer_input=8, global_head_dim=16
    ),
    "gpt_neo": dict(
        num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=4
    ),
    "granitemoehybrid": MOE | MAMBA | dict(
        layer_types=["mamba", "attention"], shared_intermediate_size=16
    ),
    "hunyuan_v1_moe": MOE | HEADS | dict(moe_topk=2, num_shared_expert=1),
    "jamba": dict(mamba_d_state=4, attn_layer_period=2, attn_layer_offset=1),
    "kimi_linear": MOE | LATENT | LINEAR | dict(
        linear_head_dim=8, linear_num_heads=4, mlp_layer_types=["dense", "sparse"]
    ),
    "lfm2": dict(layer_types=["conv", "full_attention"]),
    "lfm2_moe": MOE | dict(layer_types=["conv", "full_attention"], num_dense_layers=1),
    "llama4_text": HEADS | dict(
        attention_chunk_size=4, num_local_experts=4, intermediate_size_mlp=48
    ),
    "longcat_flash": LATENT | dict(
        num_layers=1, ffn_hidden_size=48, expert_ffn_hidden_size=16, n_routed_experts=4,
        zero_expert_num=2, moe_topk=2, head_dim=4,
    ),
    "minicpm3": LATENT,
    "ministral": HEADS | WINDOW | HALF,
    "modernbert-decoder": IDS | dict(
        local_attention=4, global_attn_every_n_layers=2, cls_token_id=1, sep_token_id=2
    ),
    "moshi": HEADS | dict(ffn_dim=64, num_codebooks=2),
    "opt": dict(ffn_dim=48, word_embed_proj_dim=32),
    "phi3": IDS | dict(sliding_window=None),
    "qwen3_5_text": HEADS | DELTA,
    "xglm": dict(d_model=32, num_layers=2, attention_heads=4, ffn_dim=48),
    "xmod": ROBERTA | dict(default_language="en_XX", languages=["en_XX"]),
    "youtu": LATENT,
}  # fmt: skip
REFUSED = dict.fromkeys("bert bert-generation electra ernie roc_bert openai-gpt".split(), {})
REFUSED |= dict.fromkeys(["megatron-bert", "rembert", "roformer"], {})
REFUSED |= dict.fromkeys(["mamba", "falcon_mamba"], dict(state_size=4))
# positions are counted with the padding
REFUSED |= dict.fromkeys(
    """bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart
    trocr""".split(),
    SEQ2SEQ,
)
REFUSED |= {
    "big_bird": dict(attention_type="original_full"),
    "cpmant": dict(prompt_length=4, prompt_types=4, segment_types=4, dim_head=8, dim_ff=48),
    "git": dict(vision_config=dict(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        image_size=16, patch_size=8,
    )),
    "mamba2": dict(num_heads=8, head_dim=8, state_size=4, n_groups=1, chunk_size=8),
    "minimax": MOE | HEADS | LINEAR | dict(block_size=8),
    "recurrent_gemma": dict(
        lru_width=32, attention_window_size=4, block_types=["recurrent", "attention"]
    ),
    "rwkv": dict(attention_hidden_size=32),
    "xlm": dict(emb_dim=32, n_layers=2, n_heads=4, n_words=97, pad_index=0, pad_token_id=0),
    # a step of their recurrence bounds the time step, and a whole text does not
    "nemotron_h": MOE | HEADS | dict(
        mamba_num_heads=8, mamba_head_dim=8, ssm_state_size=4, n_groups=1, chunk_size=8,
        moe_shared_expert_intermediate_size=16, layers_block_type=["mamba", "attention"],
    ),
    "zamba2": ALL_HEADS | dict(
        mamba_d_state=4, n_mamba_heads=8, mamba_headdim=8, chunk_size=8, num_mem_blocks=1,
        layers_block_type=["mamba", "hybrid"], hybrid_layer_ids=[1], adapter_rank=8,
    ),
    "xlstm": dict(
        embedding_dim=32, num_heads=4, num_blocks=2, qk_dim_factor=0.5, v_dim_factor=1.0,
        chunk_size=8,
    ),
}  # fmt: skip
LONG = {
    "phi3-long": IDS | LONGROPE | dict(sliding_window=None),
    "phi3-window-long": IDS | LONGROPE | dict(sliding_window=2**18),  # as the published ones
    "llama-long": LONGROPE,
    "gemma3_text-long": HEADS | WINDOW | HALF | dict(rope_parameters=dict(
        full_attention=ROPE, sliding_attention=dict(rope_type="default", rope_theta=1e4)
    )),
}  # fmt: skip
FAMILIES |= LONG
KINDS = {name: name.removesuffix("-long").removesuffix("-window") for name in LONG}
PROMPTS = [[5, 9, 11, 23, 44, 60, 71], [3, 7, 20], [31] + [7] * 11]


def made(name, settings):
    """A tiny random model whose norms and biases are random, too."""
    model = random_model(KINDS.get(name, name), settings).eval()
    with torch.no_grad():
        for weights in model.parameters():
            if weights.dim() < 2:
                weights.add_(torch.randn_like(weights), alpha=0.1)
    return model


def decoded(model, prompts, of, length=4):
    """Two blocks for each prompt, of the second of two samples: tokens and log-probabilities."""
    engine = LocalEngine(model, frozenset())
    engine.open(prompts)
    tokens, log_p = [[] for _ in prompts], [[] for _ in prompts]
    for block in range(2):
        rows = [row for row in range(len(prompts)) for _ in range(2)]
        keys = [key for name in of for key in numbers(2, length, f"{name}{block}")]
        sampled = engine.sample_block(rows, keys)
        for row, c in enumerate(range(1, len(rows), 2)):
            tokens[row] += sampled.tokens[c]
            log_p[row] += sampled.log_p[c]
        engine.select(range(1, len(rows), 2))
    return tokens, log_p


@torch.inference_mode()
def likelihood(model, prompt, tokens):
    """Mean log-probability of tokens, with every prefix read anew, without cache and batch."""
    total = 0.0
    for i, token in enumerate(tokens):
        ids = torch.tensor([prompt + tokens[:i]])
        where = dict(
            attention_mask=torch.ones_like(ids), position_ids=torch.arange(ids.shape[1])[None]
        )
        logits = model(input_ids=ids, use_cache=False, **where).logits[0, -1]
        total += logits.float().log_softmax(-1)[token].item()
    return total / len(tokens)


def assert_right(model, tolerance=1e-5):
    tokens, log_p = decoded(model, PROMPTS, "abc")
    for row, prompt in enumerate(PROMPTS):
        alone, _ = decoded(model, [prompt], "abc"[row])
        assert tokens[row] == alone[0]
        mean = sum(log_p[row]) / len(log_p[row])
        assert mean == pytest.approx(likelihood(model, prompt, tokens[row]), abs=tolerance)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_decodes_as_its_own_forward_pass(name):
    """Guards padding, positions, windows, recurrent states and experts."""
    model = made(name, FAMILIES[name])
    assert_right(model)


@pytest.mark.parametrize("name", LONG)
def test_longrope_is_read_up_to_its_first_border(name):
    """Bug: beyond it the longest text of a batch decided how all were read."""
    model, tokenizer = made(name, LONG[name]), tiny_tokenizer()
    policy = Policy("long", model, tokenizer)
    assert policy.context == BORDER
    with pytest.raises(ParameterError, match=f"exceeds the context of {BORDER}"):
        policy.ids_of(Prompt("", "a" * BORDER, ""), 1)
    with pytest.raises(ParameterError, match=f"exceeds the scorer's context of {BORDER}"):
        Backbone(model, tokenizer).ids("a" * BORDER, "b")


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_does_not_decode_is_refused_by_name(name):
    """Bug: models that read both ways decoded with the future in sight, and tracebacks of
    transformers.
    """
    model = made(name, REFUSED[name])
    for cache in CACHES:
        with pytest.raises(PolicyError, match=f"^{type(model).__name__} ") as refusal:
            LocalEngine(model, frozenset(), cache)
        assert "\n" not in str(refusal.value) and "; " in str(refusal.value)


@pytest.mark.parametrize("name", ["llama", "mistral", "mixtral", "jamba", "llama-long"])
def test_half_precision_agrees_up_to_its_rounding(name):
    """Guards against refusing sound models in bfloat16, and against a cache that is wrong there
    alone: 8 times its eps in mean log-probability.
    """
    kind = cache_for(made(name, FAMILIES[name]))
    model = made(name, FAMILIES[name]).bfloat16()
    assert cache_for(model) is kind
    tokens, log_p = decoded(model, PROMPTS, "abc")
    for prompt, said, log in zip(PROMPTS, tokens, log_p, strict=True):
        expected = likelihood(model, prompt, said)
        assert sum(log) / len(log) == pytest.approx(expected, abs=8 * 2**-8)


@pytest.mark.filterwarnings("ignore")
def test_int8_with_the_scales_of_a_batch_is_refused():
    """Bug: activations quantised over the whole batch, so that a row depends on those beside it."""
    layers, whole = {torch.nn.Linear}, made("llama", {})
    model = torch.ao.quantization.quantize_dynamic(whole, layers, dtype=torch.qint8)
    with pytest.raises(PolicyError, match="^LlamaForCausalLM .* rounds over a whole batch"):
        LocalEngine(model, frozenset())


def test_a_refused_model_is_tried_again_and_a_sound_one_is_not():
    """Bug: a model whose weights were not loaded yet at its first try stayed refused for good."""
    model = made("gpt2", {})
    weight = model.transformer.h[0].attn.c_attn.weight
    sound = weight.clone()
    with torch.no_grad():
        weight.fill_(torch.nan)
        with pytest.raises(PolicyError, match="logits that are not finite"):
            cache_for(model)
        weight.copy_(sound)
    assert cache_for(model) is SharedRows
    with Counter(model) as counter:
        assert cache_for(model) is SharedRows and counter.tokens == 0


def test_a_cache_that_gives_no_number_does_not_agree():
    """Bug: NaN counted as no difference, so the fastest cache was taken whatever it gave."""
    model = made("llama", {})

    def spoil(_, args, inputs, out):
        if inputs.get(cache_name(model)) is not None:
            out.logits = out.logits * torch.nan

    model.register_forward_hook(spoil, with_kwargs=True)
    with pytest.raises(PolicyError, match="^LlamaForCausalLM "):
        cache_for(model)
