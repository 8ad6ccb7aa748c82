"""This package as variants of the benchmark: whole searches, and the engine alone."""

import functools
from collections.abc import Collection, Sequence
from dataclasses import replace

from benchmarks.baselines import BUDGET, Variant
from benchmarks.measure import Case
from benchmarks.models import Models, free
from igcore.config import SearchConfig
from igcore.contract import Contract
from igcore.engine.local import LocalEngine
from igcore.engine.prepack import use_prepacked
from igcore.engine.sampling import random_key
from igcore.guard import Guard, decode
from igcore.models.registry import load_scorer
from igcore.scorers import SIGNS

# once, in the warm-up: loading is no part of decoding
loaded = functools.cache(load_scorer)


def search(
    method: str, cache: str = "shared", costless: Collection[str] = SIGNS, cost: str = ""
) -> Variant:
    """Return a method of `igcore.decode`, with all prompts in one batch.

    Parameters
    ----------
    cache : str
        How the engine stores its KV cache, see `igcore.engine.agreement.CACHES`.
    costless : collection of str
        Scorers that cost nothing, of ``cost`` and ``reward``; with both only decoding is measured.
    cost : str
        A cost by name, with the default reward. Neither's tokens are counted.
    """

    def run(models: Models, case: Case, prompts: Sequence[str], seed: int) -> list[str]:
        """Answer the prompts with this method."""
        scorers = {
            role: free(role) if role in costless else models.lm_scorer(role) for role in SIGNS
        }
        if cost:
            scorers = {"cost": loaded(cost), "reward": loaded("minilm-relevance")}
        config = SearchConfig(
            budget=BUDGET,
            n_samples=case.n_samples,
            keep=case.keep,
            block_size=case.block,
            max_new_tokens=case.new_tokens,
            group_size=len(prompts),
        )
        # the examination of the cost model is part of loading, and not of decoding
        contracts = {role: Contract(scorer) for role, scorer in scorers.items()}
        policy = replace(models.policy, cache=cache)
        guard = Guard(policy, **scorers, config=config, contracts=contracts)
        return [response.text for response in decode(method, guard, prompts, seed=seed)]

    return run


def engine_alone(models: Models, case: Case, prompts: Sequence[str], seed: int) -> list[str]:
    """Sample all answers in one block: no text, no scores, no search."""
    engine = LocalEngine(models.policy.model, models.policy.eos_ids, "shared")
    rows = [row for row in range(len(prompts)) for _ in range(case.n_samples)]
    steps = range(case.new_tokens)
    keys = [[random_key(seed, "bench", 0, row, step) for step in steps] for row in range(len(rows))]
    with use_prepacked(models.policy.model):
        engine.open([models.policy.encode(prompt) for prompt in prompts])
        block = engine.sample_block(rows, keys, last=True)
    return [models.policy.text(tokens) for tokens in block.tokens[:: case.n_samples]]


VARIANTS: dict[str, Variant] = {
    "B": search("inferenceguard", "dynamic", costless=[]),
    "C": search("inferenceguard", costless=[]),
    "guarded, free": search("inferenceguard"),
    "guarded, rude": search("inferenceguard", cost="offensive-language"),
    "guarded, harm": search("inferenceguard", cost="smollm2-harm"),
    "unguarded, free": search("beam-augmented"),
    "one block, free": search("best-of-n-augmented"),
    "sample dynamic": search("best-of-n", "dynamic"),
    "sample shared": search("best-of-n"),
    "engine": engine_alone,
}
