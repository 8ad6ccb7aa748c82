"""This package as variants of the benchmark: guards, the engine alone, and the least time."""

from collections.abc import Sequence
from functools import cache

import torch
from torch import nn

from benchmarks.measure import Case, Variant
from benchmarks.models import Models, free
from igcore import Guard, SearchConfig, decode
from igcore.contract import Contract
from igcore.engine.prepack import prepacked, use_prepacked
from igcore.engine.sampling import random_key

BUDGET = 1e9  # above every cost: all texts are safe
SQUARE = 512  # rows and columns of the matrices whose product is the measure of the processor


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


def engine_alone(models: Models, case: Case, prompts: Sequence[str], seed: int) -> list[str]:
    """Sample all answers in one block: no text, no scores, no search."""
    engine = models.policy.engine()
    rows = [row for row in range(len(prompts)) for _ in range(case.n_samples)]
    steps = range(case.new_tokens)
    keys = [[random_key(seed, "bench", 0, row, step) for step in steps] for row in range(len(rows))]
    with use_prepacked(models.policy.model):
        engine.open([models.policy.encode(prompt) for prompt in prompts])
        block = engine.sample_block(rows, keys, last=True)
    return [models.policy.text(tokens) for tokens in block.tokens[:: case.n_samples]]


def operations(model: nn.Module, case: Case) -> int:
    """Return the additions and multiplications of the linear layers in the engine alone.

    It reads a prompt once, and every sampled token but the last of an answer, which nothing
    follows. The output head reads the last token of the prompt, and the sampled ones.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    head = model.get_output_embeddings().weight.numel()
    inner = sum(layer.weight.numel() for layer in layers) - head
    sampled = case.n_samples * (case.new_tokens - 1)
    return 2 * case.prompts * (inner * (case.prompt_tokens + sampled) + head * (1 + sampled))


@cache
def square() -> nn.Module:
    """Return a layer with the fastest product of this build of torch."""
    return prepacked(nn.Sequential(nn.Linear(SQUARE, SQUARE, bias=False)))


@torch.inference_mode()
def products(models: Models, case: Case, prompts: Sequence[str], seed: int) -> list[str]:
    """Multiply large square matrices, with as many operations as the engine's linear layers."""
    matrix = torch.randn(SQUARE, SQUARE, generator=torch.Generator().manual_seed(seed))
    for _ in range(round(operations(models.policy.model, case) / (2 * SQUARE**3))):
        square()(matrix)
    return [""] * len(prompts)


VARIANTS: dict[str, Variant] = {
    "inferenceguard": guarded("inferenceguard"),
    "backtracking": guarded("backtracking"),
    "engine alone": engine_alone,
    "matrix products": products,
}
