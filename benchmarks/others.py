"""What this package is compared with: ``generate`` of transformers, and the searches of its_hub.

Each gets its best options, and none uses the engine, with which it is compared. its_hub asks a
server for its samples; here it asks the policy, for all of them in one batch.
"""

from collections.abc import Sequence
from importlib import metadata
from typing import Any

import torch

from benchmarks.measure import Case, Variant
from benchmarks.models import Models
from igcore.engine.kv_cache import padded
from igcore.errors import needs


def installed() -> str | None:
    """Return the version of its_hub, or None where it is not installed."""
    try:
        return metadata.version("its_hub")
    except metadata.PackageNotFoundError:
        return None


def continued(models: Models, texts: Sequence[str], length: int, **options: Any) -> list[str]:
    """Continue texts by `length` tokens at temperature 1, in one batch, padded on the left."""
    policy = models.policy
    ids, mask = padded([policy.encode(text) for text in texts], policy.model.device)  # (R, L)
    out = policy.model.generate(ids, attention_mask=mask, max_new_tokens=length, **options)
    return [policy.text(row[-length:]) for row in out.tolist()]


def generate(models: Models, case: Case, prompts: Sequence[str], seed: int) -> list[str]:
    """Sample with transformers' own ``num_return_sequences``: Best-of-N with a free reward."""
    torch.manual_seed(seed)
    n = case.n_samples
    return continued(models, prompts, case.new_tokens, num_return_sequences=n)[::n]


class Batch:
    """The policy as its_hub asks it, and who asks it: one batch for all that is wanted."""

    def __init__(self, models: Models, length: int):
        """Keep the models, and the tokens of an answer."""
        self.models, self.length = models, length

    async def agenerate(self, *asked: Any, max_completion_tokens: int = 0, **_: Any) -> list[dict]:
        """Return a message for each conversation: a prompt, and perhaps the beginning of one."""
        texts = ["".join(message.content for message in messages) for messages in asked[-1]]
        answers = continued(self.models, texts, max_completion_tokens or self.length)
        return [{"role": "assistant", "content": answer} for answer in answers]


class Free:
    """A reward that costs nothing."""

    async def ascore(self, *asked: Any, **_: Any) -> list[float]:
        """Return 0 for every answer."""
        return [0.0] * len(asked[-1])


def hub_best_of_n(models: Models, case: Case) -> Any:
    """Return its_hub's Best-of-N."""
    batch = Batch(models, case.new_tokens)
    return needs("its_hub.core.algorithms.bon", "its_hub").BestOfN(Free(), batch)


def hub_beam_search(models: Models, case: Case) -> Any:
    """Return its_hub's beam search, which encodes each beam again at each step."""
    steps = needs("its_hub.core.lms.step_generation", "its_hub").StepGeneration(
        max_steps=case.new_tokens // case.block - 1, tokens_per_step=case.block, temperature=1.0
    )
    searches = needs("its_hub.core.algorithms.beam_search", "its_hub")
    return searches.BeamSearch(steps, Free(), case.keep)


def searched(make: Any) -> Variant:
    """Return a search of its_hub as a variant."""

    def run(models: Models, case: Case, prompts: Sequence[str], seed: int) -> list[str]:
        """Answer one prompt after the other."""
        torch.manual_seed(seed)
        batch = Batch(models, case.new_tokens)
        search = make(models, case)
        return [search.infer(batch, prompt, case.n_samples)["content"] for prompt in prompts]

    return run


HUB: dict[str, Variant] = {
    "its_hub best-of-n": searched(hub_best_of_n),
    "its_hub beam search": searched(hub_beam_search),
}
VARIANTS: dict[str, Variant] = {"transformers generate": generate} | HUB
