"""This package as variants of the benchmark: its guards."""

from collections.abc import Sequence

from benchmarks.measure import Case, Variant
from benchmarks.models import Models, free
from igcore import Guard, SearchConfig, decode
from igcore.contract import Contract

BUDGET = 1e9  # above every cost: all texts are safe


def guarded(method: str) -> Variant:
    """Return a method of `igcore.decode`, with all prompts in one batch."""

    def run(models: Models, case: Case, prompts: Sequence[str], seed: int) -> list[str]:
        """Answer the prompts with this method."""
        scorers = {"cost": models.cost(case.cost), "reward": free("reward")}
        config = SearchConfig(
            budget=BUDGET,
            n_samples=case.n_samples,
            keep=case.keep,
            block_size=case.block,
            max_new_tokens=case.new_tokens,
            checks=case.checks,
            group_size=len(prompts),
        )
        # the examination of the cost model is part of loading, and not of decoding
        contracts = {role: Contract(scorer) for role, scorer in scorers.items()}
        guard = Guard(models.policy, **scorers, config=config, contracts=contracts)
        return [response.text for response in decode(method, guard, prompts, seed=seed)]

    return run


VARIANTS: dict[str, Variant] = {name: guarded(name) for name in ("inferenceguard", "backtracking")}
