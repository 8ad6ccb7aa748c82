"""What the benchmark decodes with: a policy, two language-model scorers of its size, and prompts.

Prompts have the length that a case wants. No token ends an answer here, so that every variant makes
equally many tokens, and every candidate is safe, so that none gains from work left out.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from igcore.models.lm_scorer import Backbone, LMScorer
from igcore.models.policies import load_policy
from igcore.models.pretrained import DTYPES
from igcore.models.prompts import load_prompts
from igcore.policy import Policy
from igcore.scorers import COST, REWARD

SIGNS = {"cost": COST, "reward": REWARD}
# the other defaults of transformers are those of Llama-2-7B
LLAMA_7B = LlamaConfig(max_position_embeddings=4096)
TINY = LlamaConfig(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
)


@dataclass
class Free:
    """A scorer that costs nothing: every text gets 0."""

    sign: str
    name: str = "free"
    digest: str = "bench"
    unit: str = "points"

    def score(self, prompts, responses, finished):
        """Return 0 for every text."""
        return [0.0] * len(responses)


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

    def lm_scorers(self) -> dict[str, LMScorer]:
        """Return the two scorers, each on a backbone of its own.

        Their KV cache is dropped after every search.
        """
        return {
            role: LMScorer(
                f"bench-{role}",
                Backbone(model, self.policy.tokenizer),
                lambda hidden, w=w: hidden @ w,
                sign=SIGNS[role],
                unit="points",
                digest="bench",
            )
            for role, (model, w) in self.scorers.items()
        }

    def free_scorers(self) -> dict:
        """Return two scorers that cost nothing."""
        return {role: Free(sign) for role, sign in SIGNS.items()}


def _models(make: Callable[[], object], policy: Callable[[object], Policy], prompts) -> Models:
    """Put a policy and two scorers together, from three models of one size."""
    first, *others = (make() for _ in range(3))
    first.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0
    )
    generator = torch.Generator().manual_seed(0)
    heads = torch.randn(2, first.config.hidden_size, generator=generator).to(first.device)  # (2, H)
    return Models(
        policy(first),
        {role: (m, w) for role, m, w in zip(SIGNS, others, heads, strict=True)},
        prompts,
    )


def smollm2(dtype: str) -> Models:
    """Load SmolLM2-135M three times, on the CPU.

    Prompts are cut from the embedded prompt set; only their lengths matter.
    """
    loaded = load_policy("smollm2-raw", dtype=dtype, device="cpu")
    made = iter([loaded.model])
    text = "\n".join(prompt.text for prompt in load_prompts("rtp"))
    return _models(
        lambda: next(made, None) or load_policy("smollm2-raw", dtype=dtype, device="cpu").model,
        lambda model: Policy(loaded.name, model, loaded.tokenizer),
        lambda count, length: cut(loaded, text, count, length),
    )


def cut(policy: Policy, text: str, count: int, length: int) -> list[str]:
    """Cut a text into pieces of a number of tokens each.

    A piece is left out when tokenizing it again gives another number.
    """
    ids = policy.tokenizer(text)["input_ids"]
    pieces = (policy.text(ids[at : at + length]) for at in range(0, len(ids) - length + 1, length))
    return list(
        islice(
            (piece for piece in pieces if piece.strip() and len(policy.encode(piece)) == length),
            count,
        )
    )


def random_llama(config: LlamaConfig, dtype: str, device: str) -> Models:
    """Make three Llamas with random weights on a device; nothing is downloaded.

    A token is a character of a private alphabet.
    """
    tokenizer = character_tokenizer(config.vocab_size)
    torch.manual_seed(0)

    def make() -> LlamaForCausalLM:
        """Return one Llama with random weights."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(DTYPES[dtype])
        try:
            with torch.device(device):
                return LlamaForCausalLM(config).eval()
        finally:
            torch.set_default_dtype(before)

    def prompts(count: int, length: int) -> list[str]:
        """Return prompts of fixed sequences of characters."""
        return [
            tokenizer.decode([(7 * i + 3 * t + 1) % config.vocab_size for t in range(length)])
            for i in range(count)
        ]

    return _models(make, lambda model: Policy("random-llama", model, tokenizer), prompts)


def character_tokenizer(size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of `size` characters of a private-use plane.

    Ids and text then agree both ways.
    """
    tokenizer = Tokenizer(
        WordLevel({chr(0xF0000 + i): i for i in range(size)}, unk_token=chr(0xF0000))
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


MODELS: dict[str, Callable[[str], Models]] = {
    "smollm2": smollm2,
    "random 7B": lambda dtype: random_llama(LLAMA_7B, dtype, "cuda"),
    "random tiny": lambda dtype: random_llama(TINY, dtype, "cpu"),
}
