"""The baselines: the search as a competent user of transformers writes it.

Each gets its best options, and none uses `igcore.search` or the engine, which they are compared
with. A variant maps ``(models, case, prompts, seed)`` to one text per prompt.
"""

from collections.abc import Callable, Sequence

import torch

from benchmarks.measure import Case
from benchmarks.models import Models
from igcore.engine.device import free_bytes
from igcore.engine.kv_cache import padded
from igcore.engine.memory import batch_size, kv_bytes

Variant = Callable[[Models, Case, Sequence[str], int], list[str]]
BUDGET = 1e9  # above every cost: all candidates are safe


def one_by_one(answer: Callable[..., list[int]], **options) -> Variant:
    """Return a variant that answers one prompt after another.

    Parameters
    ----------
    answer : callable
        From (models, case, ids of a prompt) and the options to the tokens of its answer.
    """

    def run(models: Models, case: Case, prompts: Sequence[str], seed: int) -> list[str]:
        """Answer the prompts."""
        torch.manual_seed(seed)
        policy = models.policy
        return [policy.text(answer(models, case, policy.encode(p), **options)) for p in prompts]

    return run


def naive(
    models: Models,
    case: Case,
    prompt: list[int],
    generate_rows: int | None = None,
    score_rows: int | None = None,
) -> list[int]:
    """Return the tokens of a beam search over blocks that encodes every prefix again.

    Of `case.n_samples` blocks the best `case.keep` go on, by (unsafe, -reward).

    Parameters
    ----------
    generate_rows, score_rows : int or None
        Sequences given to ``generate``, and to a scorer, at a time; None stands for all of a block.
    """
    beams: list[list[int]] = [[]]
    while len(beams[0]) < case.new_tokens:
        length = min(case.block, case.new_tokens - len(beams[0]))
        prefixes = [prompt + beams[i * len(beams) // case.n_samples] for i in range(case.n_samples)]
        texts: list[list[int]] = []
        for part in _batches(prefixes, generate_rows):
            texts += generate(models, part, length)
        scores: dict[str, list[float]] = {role: [] for role in models.scorers}
        for role, scorer in models.scorers.items():
            for part in _batches(texts, score_rows):
                scores[role] += _score(*scorer, part)
        order = [
            (cost > BUDGET, -reward, i)
            for i, (cost, reward) in enumerate(zip(scores["cost"], scores["reward"], strict=True))
        ]
        beams = [texts[i][len(prompt) :] for *_, i in sorted(order)[: case.keep]]
    return beams[0]


def _batches(rows: list, size: int | None) -> list[list]:
    """Return rows in batches of a size; None stands for one batch."""
    size = size or len(rows)
    return [rows[at : at + size] for at in range(0, len(rows), size)]


def generate(models: Models, rows: list[list[int]], length: int, **options) -> list[list[int]]:
    """Continue rows by `length` tokens at temperature 1, with transformers' own KV cache."""
    ids, mask = padded(rows, models.device)  # (R, L)
    model = models.policy.model
    out = model.generate(ids, attention_mask=mask, max_new_tokens=length, **options)
    return out.tolist()


@torch.inference_mode()
def _score(model, weights: torch.Tensor, rows: list[list[int]]) -> list[float]:
    """Score whole texts of one length as a sequence classifier does.

    The score is a linear head on the last hidden state.
    """
    ids = torch.tensor(rows, device=model.device)
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[:, -1]
    return (hidden.float() @ weights).tolist()


def transformers_generate(
    models: Models, case: Case, prompts: Sequence[str], seed: int
) -> list[str]:
    """Sample with transformers' own ``num_return_sequences``: Best-of-N with a free reward.

    As many prompts as fit into memory are one batch, padded on the left.
    """
    torch.manual_seed(seed)
    policy = models.policy
    each = kv_bytes(policy.model, 0, 0, case.n_samples, case.prompt_tokens + case.new_tokens)
    together = batch_size(each, free_bytes(models.device), None)
    answers: list[str] = []
    for rows in _batches([policy.encode(prompt) for prompt in prompts], together):
        texts = generate(models, rows, case.new_tokens, num_return_sequences=case.n_samples)
        answers += [policy.text(text[-case.new_tokens :]) for text in texts[:: case.n_samples]]
    return answers


VARIANTS: dict[str, Variant] = {
    "A1": one_by_one(naive, generate_rows=1, score_rows=1),
    "A2": one_by_one(naive, score_rows=1),
    "A3": one_by_one(naive),
    "generate": transformers_generate,
}
