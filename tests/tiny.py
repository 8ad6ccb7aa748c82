"""Tiny random models with their tokenizers, as policies; and tiny networks that read them."""

from dataclasses import replace
from datetime import datetime
from types import SimpleNamespace

import torch
from mockpolicy import EOS, LetterCost, LetterReward, MockTokenizer
from tinymodels import tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from igcore.critic.latent import latents
from igcore.critic.network import Critic
from igcore.policy import Policy
from igstudy.baselines.re_control import ValueNetwork, ValueSpec
from igstudy.training.critic import CriticConfig, names_of, spec_of
from igstudy.training.latents import encode

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


def letters(tokenizer=None):
    model = tiny("llama", vocab_size=7, initializer_range=0.1)
    return Policy("letters", model, tokenizer or Letters(), digest="l1", eos_ids=frozenset({EOS}))


def untrained(features="m", config=None, **changes):
    """A critic of the real kind, with weights wide enough to tell texts apart."""
    made = spec_of(
        letters(),
        **SCORERS,
        config=config or CriticConfig(budget=1.0, features=features, layer=0, width=8),
        max_new_tokens=6,
    )
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
