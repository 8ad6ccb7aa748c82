"""The models of the benchmark: a policy, its prompts, and costs.

Prompts have the length that a case wants. No token ends an answer here, so that every variant makes
equally many tokens, and every text is within budget, so that none gains from work left out.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count, islice

from transformers import GenerationConfig

from igcore import Policy, Scorer, load_policy, load_scorer
from igcore.scorers import FunctionScorer, of_function
from igstudy.prompts import load_prompts

SAMPLING = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0)


@dataclass
class Models:
    """A policy, a text from which its prompts are cut, and the costs that were used so far.

    Attributes
    ----------
    asked : iterator of int
        How often prompts were cut.
    """

    policy: Policy
    text: str
    costs: dict[str, Scorer] = field(default_factory=dict)
    asked: Iterator[int] = field(default_factory=count)

    def cost(self, name: str) -> Scorer:
        """Return a cost of `COSTS`, the same one every time."""
        if name not in self.costs:
            self.costs[name] = COSTS[name]()
        return self.costs[name]

    def prompts(self, count: int, length: int) -> list[str]:
        """Return different texts of exactly so many tokens each, and others in each call.

        A guard keeps the prompts that it has read, and other libraries do not.
        """
        skipped = 10 * next(self.asked) % (len(self.text) // 2)
        return cut(self.policy, self.text[skipped:], count, length)


def cut(policy: Policy, text: str, count: int, length: int) -> list[str]:
    """Cut a text into pieces of a number of tokens each.

    A piece is left out when tokenizing it again gives another number.
    """
    ids = policy.tokenizer(text)["input_ids"]
    pieces = (policy.text(ids[at : at + length]) for at in range(0, len(ids) - length + 1, length))
    fitting = (p for p in pieces if p.strip() and len(policy.encode(p)) == length)
    return list(islice(fitting, count))


def smollm2() -> Models:
    """Load SmolLM2-135M in float32 on the CPU, with the embedded prompts; only lengths matter."""
    policy = load_policy("smollm2-raw", dtype="float32", device="cpu")
    policy.model.generation_config = SAMPLING
    text = "\n".join(prompt.text for prompt in load_prompts("rtp"))
    return Models(replace(policy, eos_ids=frozenset()), text)


def free(role: str) -> FunctionScorer:
    """Return a scorer that costs nothing: every text gets 0."""
    return of_function(lambda text: 0.0, role, digest="bench")


COSTS: dict[str, Callable[[], Scorer]] = {
    "free": lambda: free("cost"),
    "smollm2-harm-2": lambda: load_scorer("smollm2-harm-2"),
}
