"""Tiny random models of many families, with tokenizers, as policies; tiny networks that read them
and are trained; and the slow reference: one sequence at a time, without padding and without a
cache.

The weights of models are drawn wide, so that attention matters: a key too many or a position too
low moves every logit.
"""

from dataclasses import replace
from datetime import datetime
from types import SimpleNamespace

import torch
import transformers
from mockpolicy import EOS, LetterCost, LetterReward, MockTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from igcore import Prompt
from igcore.critic.latent import latents
from igcore.critic.network import Critic
from igcore.engine.kv_cache import forward
from igcore.engine.sampling import random_key
from igcore.models.convert import quiet_transformers
from igcore.policy import Policy
from igstudy.baselines.re_control import ValueNetwork, ValueSpec
from igstudy.runs.critic_params import RolloutConfig
from igstudy.runs.rollout_run import roll_out
from igstudy.training.critic import CriticConfig, names_of, spec_of, train
from igstudy.training.latents import encode

PROMPTS = [[5, 9, 11], [7], [3, 3, 8, 20, 41]]
SIZE = dict(
    vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, bos_token_id=None, eos_token_id=None,
    pad_token_id=None, initializer_range=0.3,
)  # fmt: skip
HEADS, WINDOW, DENSE = dict(head_dim=8), dict(sliding_window=4), dict(first_k_dense_replace=1)
ALL_HEADS, FULL = dict(num_key_value_heads=4), dict(layer_types=["full_attention"] * 2)
CAPPED = dict(query_pre_attn_scalar=8, attn_logit_softcapping=2.0)
MOE = dict(
    num_local_experts=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, n_group=1,
    n_routed_experts=4, n_shared_experts=1, topk_group=1, shared_expert_intermediate_size=16,
)  # fmt: skip
LATENT = ALL_HEADS | dict(
    kv_lora_rank=16, q_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8
)
MAMBA = dict(mamba_n_heads=8, mamba_d_head=8, mamba_d_state=4, mamba_n_groups=1, mamba_chunk_size=8)

# type of a model, with a word behind a hyphen where there are several -> what it has besides SIZE
FITTING = {  # models whose attention is plain
    "llama": {},
    "gpt2": ALL_HEADS,  # learned positions
    "qwen2": {},
    "qwen3": HEADS,  # normed queries and keys
    "mistral": dict(sliding_window=None),
    "phi": ALL_HEADS,  # partial rotary positions
    "olmo2": {},
    "granite": dict(attention_multiplier=0.7),  # scores scaled otherwise
    "mixtral": MOE | dict(sliding_window=None),
}
OTHERS = {  # models that need transformers' own cache
    "mistral-window": WINDOW,
    "gemma2": HEADS | WINDOW | CAPPED,
    "gemma2-full": HEADS | FULL | CAPPED,
    "gemma3_text": HEADS | WINDOW,
    "gpt_oss": MOE | HEADS | WINDOW,
    "gpt_oss-full": MOE | HEADS | FULL,  # attention sinks in every layer
    "bloom": ALL_HEADS,  # biased by distance
    "mpt": ALL_HEADS,
    "deepseek_v2": MOE | LATENT | DENSE | dict(q_lora_rank=None),
    "deepseek_v3": MOE | LATENT | DENSE | dict(v_head_dim=12),  # keys as wide as values
    "lfm2": dict(layer_types=["conv", "full_attention"]),  # convolution and attention
    # state space and attention in one layer
    "falcon_h1": MAMBA | dict(mamba_d_ssm=32, mamba_n_heads=4),
}


def random_model(kind: str, settings: dict, of=transformers.AutoModelForCausalLM, seed: int = 0):
    """Build a model of a type of transformers, the same every time."""
    torch.manual_seed(seed)
    return of.from_config(transformers.AutoConfig.for_model(kind, **SIZE | settings))


def tiny(name: str, dtype=torch.float32, **more):
    """Build a causal language model that is named above."""
    settings = (FITTING | OTHERS)[name] | more
    return random_model(name.partition("-")[0], settings).to(dtype).eval()


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


SCORERS = {"cost": LetterCost(), "reward": LetterReward()}
RESPONSES = [[7, 2, 9, 1], [4], [11, 6, 3]]
LAYER = 0


def tiny_tokenizer(letters="", **more):
    """A byte-level tokenizer without merges: one byte, one token; special tokens at the end. It
    knows all bytes, or some letters.
    """
    alphabet = letters or sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", pad_token="</s>", **more
    )


def tiny_model(tokenizer):
    size = dict(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    size |= dict(intermediate_size=32, num_attention_heads=2, num_key_value_heads=1)
    return tiny("llama", **size, initializer_range=0.02)


def saved(folder, model, tokenizer, **more):
    """Write a model with its tokenizer, and return the folder."""
    with quiet_transformers():
        model.save_pretrained(folder, **more)
        tokenizer.save_pretrained(folder)
    return folder


def tiny_policy(tokenizer=None, **more):
    tokenizer = tokenizer or tiny_tokenizer()
    ends = frozenset({tokenizer.eos_token_id})
    return Policy("tiny", tiny_model(tokenizer), tokenizer, eos_ids=ends, **more)


def framed(tokenizer, begin="", end=""):
    """Let a tokenizer write special tokens around every text."""
    marks = [(mark, tokenizer.convert_tokens_to_ids(mark)) for mark in (begin, end) if mark]
    frame = TemplateProcessing(single=f"{begin} $A {end}".strip(), special_tokens=marks)
    tokenizer.backend_tokenizer.post_processor = frame
    return tokenizer


def turn_calendar(monkeypatch, day: int):
    """Let chat templates believe that it is this day of May."""
    clock = SimpleNamespace(now=lambda: datetime(2024, 5, day))
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", clock)


class Letters(MockTokenizer):
    """One letter, one token; a beginning token where special tokens are wanted, which a response
    must not get.
    """

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [1] * add_special_tokens + super().__call__(text)["input_ids"]}


def letters(tokenizer=None, dtype=torch.float32, end=EOS):
    model = tiny("llama", dtype, vocab_size=7, initializer_range=0.1)
    return Policy("letters", model, tokenizer or Letters(), digest="l1", eos_ids=frozenset({end}))


def untrained(features="m", config=None, of=None, max_new_tokens=6, **changes):
    """A critic of the real kind, with weights wide enough to tell texts apart."""
    config = config or CriticConfig(budget=1.0, features=features, layer=0, width=8)
    made = spec_of(of or letters(), **SCORERS, config=config, max_new_tokens=max_new_tokens)
    torch.manual_seed(0)
    critic = Critic(replace(made, **changes)).eval()
    critic.heads.weight.data *= 20
    return critic


def value_network(of=None, seed=0, width=16, wide=6.0, **changes):
    """An untrained network, with weights wide enough to move a hidden state."""
    of = of or letters()
    hidden = of.model.get_output_embeddings().weight.shape[1]
    spec = ValueSpec(**names_of(of, **SCORERS), max_new_tokens=8, hidden=hidden, width=width)
    torch.manual_seed(seed)
    made = ValueNetwork(replace(spec, **changes)).eval()
    made.layers[-1].weight.data *= wide
    made.centre.copy_(torch.tensor([0.3, 2.0])), made.scale.copy_(torch.tensor([0.5, 1.5]))
    return made


def read(model, prompts, responses, features="ho", layer=None):
    """What a critic reads of finished text."""
    return latents(encode(model, prompts, responses, features, layer), features)


# --- a critic's training in small -----------------------------------------------------------------


WRITTEN = [Prompt(f"{i:02d}", "abcdef"[i % 6] + "abcdef"[i // 6], "mock") for i in range(30)]
TRAINING = CriticConfig(
    budget=3.0, features="m", layer=0, width=16, epochs=3, batch_size=16, lr=1e-2, validation=0.2,
    f2_weight=1.0,
)  # fmt: skip


def policy(dtype=torch.float32, end=EOS):
    return letters(MockTokenizer(), dtype, end)


def sampled(folder):
    """Of many lengths: a third of them never end by themselves."""
    found = []
    for n, end in ((4, -1), (8, EOS)):
        config = RolloutConfig(n_rollouts=n, max_new_tokens=10, block_size=4)
        found += roll_out(policy(end=end), WRITTEN, config, **SCORERS, folder=folder / str(n))
    return found


def trained(rollouts, folder, dtype=torch.float32, shared=None, **changes):
    config = replace(TRAINING, **changes)
    return train(policy(dtype), rollouts, config, folder, **SCORERS, shared=shared)


def same(a, b, **close):
    """Whether two networks have the same weights, bit for bit unless told how close."""
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return all(torch.allclose(x, y, **close) if close else torch.equal(x, y) for x, y in pairs)
