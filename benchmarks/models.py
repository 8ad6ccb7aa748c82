"""The models of the benchmark: a policy, two language-model scorers of its size, and prompts.

Prompts have the length that a case wants. No token ends an answer here, so that every variant makes
equally many tokens, and every candidate is safe, so that none gains from work left out.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

from igcore.models.lm_scorer import Backbone, LMScorer
from igcore.models.policies import load_policy
from igcore.models.pretrained import DTYPES
from igcore.policy import Policy
from igcore.scorers import SIGNS, FunctionScorer, of_function
from igstudy.prompts import load_prompts

SAMPLING = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0)
# a small Llama 3: three queries share a key, and most weights are those of the vocabulary
LLAMA_128K = LlamaConfig(
    vocab_size=128_256,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=4,
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
)


@dataclass
class Models:
    """A policy and two scorers.

    Attributes
    ----------
    policy : Policy
        Without end tokens.
    scorers : dict of str to (model, weights)
        ``cost`` and ``reward``: a language model of the policy's size, and a linear head (H,)
        float32 on its last hidden state.
    prompts : callable
        ``prompts(count, length)`` returns so many different texts, each of exactly so many tokens.
    """

    policy: Policy
    scorers: dict[str, tuple[object, torch.Tensor]]
    prompts: Callable[[int, int], list[str]]

    @property
    def all(self) -> list:
        """Every language model."""
        return [self.policy.model, *(model for model, _ in self.scorers.values())]

    @property
    def device(self) -> torch.device:
        """The device of the policy."""
        return self.policy.model.device

    def lm_scorer(self, role: str) -> LMScorer:
        """Return a scorer on a backbone of its own, whose KV cache is dropped after a search."""
        model, weights = self.scorers[role]
        backbone = Backbone(model, self.policy.tokenizer)
        return LMScorer(
            f"bench-{role}", backbone, lambda hidden: hidden @ weights, SIGNS[role], "bench"
        )


def free(role: str) -> FunctionScorer:
    """Return a scorer that costs nothing: every text gets 0."""
    return of_function(lambda text: 0.0, role, digest="bench")


def _models(policy: Policy, scorers: list, prompts: Callable[[int, int], list[str]]) -> Models:
    """Put a policy and the models of two scorers together."""
    policy.model.generation_config = SAMPLING
    generator = torch.Generator().manual_seed(0)
    size = policy.model.config.hidden_size
    heads = torch.randn(2, size, generator=generator)  # (2, H)
    return Models(policy, dict(zip(SIGNS, zip(scorers, heads, strict=True), strict=True)), prompts)


def smollm2(dtype: str) -> Models:
    """Load SmolLM2-135M three times, on the CPU.

    Prompts are cut from the embedded prompt set; only their lengths matter.
    """
    policy, *others = (load_policy("smollm2-raw", dtype=dtype, device="cpu") for _ in range(3))
    policy = replace(policy, eos_ids=frozenset())
    text = "\n".join(prompt.text for prompt in load_prompts("rtp"))

    def prompts(count: int, length: int) -> list[str]:
        """Return prompts from the embedded set."""
        return cut(policy, text, count, length)

    return _models(policy, [other.model for other in others], prompts)


def cut(policy: Policy, text: str, count: int, length: int) -> list[str]:
    """Cut a text into pieces of a number of tokens each.

    A piece is left out when tokenizing it again gives another number.
    """
    ids = policy.tokenizer(text)["input_ids"]
    pieces = (policy.text(ids[at : at + length]) for at in range(0, len(ids) - length + 1, length))
    fitting = (p for p in pieces if p.strip() and len(policy.encode(p)) == length)
    return list(islice(fitting, count))


def random_llama(config: LlamaConfig, dtype: str) -> Models:
    """Make three Llamas with random weights; nothing is downloaded.

    A token is a character of a private alphabet.
    """
    tokenizer = character_tokenizer(config.vocab_size)
    torch.manual_seed(0)
    models = [
        AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype]).eval() for _ in range(3)
    ]
    policy = Policy("random-llama", models[0], tokenizer)
    return _models(policy, models[1:], partial(character_prompts, tokenizer))


def character_prompts(tokenizer: PreTrainedTokenizerFast, count: int, length: int) -> list[str]:
    """Return prompts of fixed sequences of characters."""
    numbers = torch.arange(count)[:, None] * 7 + torch.arange(length) * 3 + 1
    return tokenizer.batch_decode(numbers % len(tokenizer))


def character_tokenizer(size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of `size` characters of a private-use plane.

    Ids and text then agree both ways.
    """
    characters = {chr(0xF0000 + i): i for i in range(size)}
    tokenizer = Tokenizer(WordLevel(characters, unk_token=chr(0xF0000)))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


MODELS: dict[str, Callable[[str], Models]] = {
    "smollm2": smollm2,
    "random 128k": lambda dtype: random_llama(LLAMA_128K, dtype),
}
