"""This package as variants of the benchmark: whole searches, the engine alone, sampling alone."""

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch

from benchmarks.measure import Case
from benchmarks.models import Models
from benchmarks.rivals import BUDGET, OMEGA, Variant
from igcore.baselines.args import ArgsConfig
from igcore.decoding import decode
from igcore.engine.local import LocalEngine
from igcore.engine.prepack import packed
from igcore.engine.sampling import draw, random_key, uniforms
from igcore.guard import Guard


def search(method: str, cache: str = "shared", free: Collection[str] = ()) -> Variant:
    """Return a method of `igcore.decode`, with all prompts in one batch.

    Parameters
    ----------
    cache : str
        How the engine stores its KV cache, see `igcore.engine.local.CACHES`.
    free : collection of str
        Scorers that cost nothing, of ``cost`` and ``reward``; with both only decoding is measured.
    """

    def run(models: Models, case: Case, prompts: Sequence[str], seed: int) -> list[str]:
        """Answer the prompts with this method."""
        scorers = models.lm_scorers() | {
            role: scorer for role, scorer in models.free_scorers().items() if role in free
        }
        config = ArgsConfig(
            budget=BUDGET,
            n_samples=case.n_samples,
            keep=case.keep,
            block_size=case.block,
            max_new_tokens=case.new_tokens,
            group_size=len(prompts),
            top_k=case.n_samples,
            policy_weight=OMEGA,
        )
        policy = replace(models.policy, cache=cache)
        return [
            out.text
            for out in decode(method, Guard(policy, **scorers, config=config), prompts, seed=seed)
        ]

    return run


def engine_alone(models: Models, case: Case, prompts: Sequence[str], seed: int) -> list[str]:
    """Sample all answers in one block: no text, no scores, no search."""
    engine = LocalEngine(models.policy.model, models.policy.eos_ids, "shared")
    rows = [row for row in range(len(prompts)) for _ in range(case.n_samples)]
    with packed(models.policy.model):
        engine.open([models.policy.encode(prompt) for prompt in prompts])
        block = engine.sample_block(rows, _keys(len(rows), case.new_tokens, seed), last=True)
    return [models.policy.text(block.tokens[row * case.n_samples]) for row in range(len(prompts))]


def draw_alone(models: Models, case: Case, prompts: Sequence[str], seed: int) -> list[str]:
    """Sample the tokens of `engine_alone` one step after the other from given logits."""
    rows = len(prompts) * case.n_samples
    # logits (R, V)
    logits = torch.randn(rows, models.policy.model.config.vocab_size, device=models.device)
    keys = _keys(rows, case.new_tokens, seed)
    steps = [
        draw(logits, torch.from_numpy(uniforms([row[step] for row in keys])).to(models.device), {})[
            0
        ]
        for step in range(case.new_tokens)
    ]
    return [
        models.policy.text([tokens[row * case.n_samples] for tokens in steps])
        for row in range(len(prompts))
    ]


def _keys(rows: int, length: int, seed: int) -> list[list[int]]:
    """Return random keys for each row and step."""
    return [
        [random_key(seed, "bench", 0, row, step) for step in range(length)] for row in range(rows)
    ]
