"""The baselines: the search as a competent user of transformers writes it, and its_hub.

Each gets its best options, and none uses `igcore.search` or the engine, which they are compared
with. A variant maps ``(models, case, prompts, seed)`` to one text per prompt.
"""

import asyncio
from collections.abc import Callable, Sequence

import torch
from transformers import DynamicCache

from benchmarks.measure import Case
from benchmarks.models import Models
from igcore.engine.device import free_bytes
from igcore.engine.kv_cache import cache_name, padded
from igcore.engine.memory import batch_size, kv_bytes

Variant = Callable[[Models, Case, Sequence[str], int], list[str]]
BUDGET = 1e9  # above every cost: all candidates are safe
OMEGA = 2.5  # weight of the policy's probability in ARGS, the paper's


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


@torch.inference_mode()
def naive_args(models: Models, case: Case, prompt: list[int], cached: bool) -> list[int]:
    """Return the tokens of ARGS that scores whole texts for every token, in one batch.

    Each is the one of the `case.n_samples` most probable tokens with the lowest -omega pi - reward.

    Parameters
    ----------
    cached : bool
        Whether the policy keeps a KV cache; else its prefix is encoded again as well.
    """
    text, model = list(prompt), models.policy.model
    cache = DynamicCache(config=model.config) if cached else None
    while len(text) < len(prompt) + case.new_tokens:
        unread = text[cache.get_seq_length() :] if cached else text
        ids = torch.tensor([unread], device=models.device)
        kept = {cache_name(model): cache}
        out = model(input_ids=ids, use_cache=cached, logits_to_keep=1, **kept)
        p, tokens = out.logits[0, -1].float().softmax(-1).topk(case.n_samples)
        rewards = _score(*models.scorers["reward"], [[*text, token] for token in tokens.tolist()])
        best = (OMEGA * p.cpu().double() + torch.tensor(rewards)).argmax()
        text.append(int(tokens[best]))
    return text[len(prompt) :]


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


def its_hub(beam: bool) -> Variant:
    """Return its_hub's Best-of-N or beam search, with a free reward.

    Its orchestrator has no limit of concurrency, so that all requests reach the model as one batch.
    The first step of its beam search samples only ``n_samples / keep`` candidates.
    """

    def run(models: Models, case: Case, prompts: Sequence[str], seed: int) -> list[str]:
        """Answer the prompts one after another."""
        from its_hub.core.algorithms.beam_search import BeamSearch
        from its_hub.core.algorithms.bon import BestOfN
        from its_hub.core.lms.step_generation import StepGeneration
        from its_hub.core.orchestrator import LMOrchestrator

        torch.manual_seed(seed)
        if beam:
            # it compares the number of steps before the last with max_steps, hence one less
            most = case.new_tokens // case.block - 1
            steps = StepGeneration(max_steps=most, tokens_per_step=case.block, temperature=1.0)
            search = BeamSearch(steps, FreeReward(), beam_width=case.keep)
        else:
            search = BestOfN(FreeReward(), LMOrchestrator(max_concurrency=-1))
        lm = _its_hub_lm(models, case.new_tokens)
        return [search.infer(lm, prompt, case.n_samples)["content"] for prompt in prompts]

    return run


class FreeReward:
    """A reward of 0 for everything, for both of its_hub's algorithms."""

    async def ascore(self, prompt_or_conversations, steps=None, orchestrator=None):
        """Return 0 for every text or step, under the names that its_hub passes."""
        return [0.0] * len(prompt_or_conversations if steps is None else steps)


def _its_hub_lm(models: Models, max_tokens: int):
    """Return its_hub's language model over ``generate``, a batch at a time.

    Conversations are continued as plain text.
    """
    from its_hub.api import AbstractLanguageModel, ChatMessage

    policy = models.policy

    class BatchingLM(AbstractLanguageModel):
        """A language model that collects requests into batches."""

        def __init__(self):
            """Start without requests."""
            self.waiting: list[tuple[list, asyncio.Future]] = []

        async def agenerate(self, messages, stop=None, max_completion_tokens=None, **_):
            """Continue one conversation, or a batch of them."""
            if isinstance(messages[0], ChatMessage):
                return (await self.agenerate([messages], stop, max_completion_tokens))[0]
            texts = ["".join(m.content for m in conversation) for conversation in messages]
            rows = [policy.encode(text) for text in texts]
            length = max(map(len, rows))
            out = generate(models, rows, max_completion_tokens or max_tokens)
            return [{"role": "assistant", "content": policy.text(row[length:])} for row in out]

        async def agenerate_single(self, messages, **_):
            """Collect all requests of one turn of the event loop, then answer them in one batch."""
            answer = asyncio.get_running_loop().create_future()
            self.waiting.append((messages, answer))
            if len(self.waiting) == 1:
                asyncio.get_running_loop().create_task(self.answer_waiting())
            return await answer

        async def answer_waiting(self):
            """Answer all collected requests with one batch."""
            batch, self.waiting = self.waiting, []
            responses = await self.agenerate([messages for messages, _ in batch])
            for (_, answer), response in zip(batch, responses, strict=True):
                answer.set_result(response)

    return BatchingLM()


VARIANTS: dict[str, Variant] = {
    "A1": one_by_one(naive, generate_rows=1, score_rows=1),
    "A2": one_by_one(naive, score_rows=1),
    "A3": one_by_one(naive),
    "args, KV cache": one_by_one(naive_args, cached=True),
    "args, uncached": one_by_one(naive_args, cached=False),
    "generate": transformers_generate,
    "its_hub best-of-n": its_hub(beam=False),
    "its_hub beam": its_hub(beam=True),
}
