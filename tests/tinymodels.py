"""Tiny random models of many families, and the slow reference: one sequence at a time, without
padding and without a cache.

Their weights are drawn wide, so that attention matters: a key too many or a position too low moves
every logit.
"""

import torch
import transformers

from igcore.engine.kv_cache import forward
from igcore.engine.sampling import random_key

PROMPTS = [[5, 9, 11], [7], [3, 3, 8, 20, 41]]
SIZE = dict(
    vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=64,
    bos_token_id=None, eos_token_id=None, pad_token_id=None, initializer_range=0.3,
)  # fmt: skip
GROUPED = SIZE | dict(num_key_value_heads=2)
SMALL_HEADS = GROUPED | dict(head_dim=8)
FULL = dict(layer_types=["full_attention"] * 2)
EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)
LATENT = SIZE | dict(
    kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, n_routed_experts=4, n_shared_experts=1,
    num_experts_per_tok=2,
    first_k_dense_replace=1, moe_intermediate_size=16, n_group=1, topk_group=1,
)  # fmt: skip
GPT2 = dict(
    vocab_size=97, n_positions=64, n_embd=32, n_layer=2, n_head=4,
    bos_token_id=None, eos_token_id=None, initializer_range=0.3,
)  # fmt: skip

SHORT = dict(vocab_size=97, initializer_range=0.3)
MAMBA = dict(
    mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=4, mamba_n_groups=1,
    mamba_chunk_size=8,
)  # fmt: skip

FITTING = {  # models whose attention is plain
    "llama": ("Llama", GROUPED),
    "gpt2": ("GPT2", GPT2),  # learned positions
    "qwen2": ("Qwen2", GROUPED),
    "qwen3": ("Qwen3", SMALL_HEADS),  # normed queries and keys
    "mistral": ("Mistral", GROUPED | dict(sliding_window=None)),
    "phi": ("Phi", SIZE),  # partial rotary positions
    "olmo2": ("Olmo2", GROUPED),
    "granite": ("Granite", GROUPED | dict(attention_multiplier=0.7)),  # scores scaled otherwise
    "mixtral": ("Mixtral", GROUPED | EXPERTS | dict(sliding_window=None)),
}
OTHERS = {  # models that need transformers' own cache
    "mistral-window": ("Mistral", GROUPED | dict(sliding_window=4)),
    "gemma2": (
        "Gemma2",
        SMALL_HEADS | dict(sliding_window=4, query_pre_attn_scalar=8, attn_logit_softcapping=2.0),
    ),
    "gemma2-full": (
        "Gemma2",
        SMALL_HEADS | FULL | dict(query_pre_attn_scalar=8, attn_logit_softcapping=2.0),
    ),
    "gemma3": ("Gemma3Text", SMALL_HEADS | dict(sliding_window=4)),
    "gpt-oss": ("GptOss", SMALL_HEADS | EXPERTS | dict(sliding_window=4)),
    "gpt-oss-full": ("GptOss", SMALL_HEADS | EXPERTS | FULL),  # attention sinks in every layer
    "bloom": ("Bloom", SHORT | dict(hidden_size=32, n_layer=2, n_head=4)),  # biased by distance
    "mpt": ("Mpt", SHORT | dict(d_model=32, n_layers=2, n_heads=4, max_seq_len=64)),
    "deepseek-v2": ("DeepseekV2", LATENT | dict(q_lora_rank=None, v_head_dim=8)),
    # keys as wide as values
    "deepseek-v3": ("DeepseekV3", LATENT | dict(q_lora_rank=16, v_head_dim=12)),
    # convolution and attention
    "lfm2": ("Lfm2", GROUPED | dict(layer_types=["conv", "full_attention"])),
    "falcon-h1": ("FalconH1", GROUPED | MAMBA),  # state space and attention in one layer
}


def tiny(name: str, dtype=torch.float32, **more):
    """Build a causal language model of a family named above, the same every time."""
    kind, settings = (FITTING | OTHERS)[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**settings | more)
    return transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()


@torch.inference_mode()
def reencode(model, ids) -> tuple[torch.Tensor, torch.Tensor]:
    """Return o_t (n, H) and W o_t (n, V) of every token of one sequence."""
    hidden, logits = forward(model, input_ids=torch.tensor([ids]), logits_to_keep=0)
    return hidden[0], logits[0]


def numbers(n: int, length: int, name: str = "p") -> list[list[int]]:
    return [[random_key(0, name, 0, i, step) for step in range(length)] for i in range(n)]


class Counter:
    """Count the ids that go through a model's embedding, and the shapes that they have."""

    def __init__(self, model):
        self.tokens = 0
        self.shapes = []
        self.hook = model.get_input_embeddings().register_forward_pre_hook(self._add)

    def _add(self, _, args) -> None:
        self.tokens += args[0].numel()
        self.shapes.append(tuple(args[0].shape))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.hook.remove()
