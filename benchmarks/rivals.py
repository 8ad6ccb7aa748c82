"""The baselines: the same search as a competent user of transformers writes it, and its_hub.

Each gets its best options, and none uses `igcore.search` or the engine, which they are compared
with. A variant maps ``(models, case, prompts, seed)`` to one text per prompt.
"""

import asyncio
from collections.abc import Callable, Sequence

import torch
from transformers import DynamicCache

from benchmarks.measure import Case
from benchmarks.models import Models
from igcore.engine.kv_cache import padded

Variant = Callable[[Models, Case, Sequence[str], int], list[str]]
BUDGET = 1e9  # above every cost: all candidates are safe
OMEGA = 2.5  # weight of the policy's probability in ARGS, the paper's


def naive(generate_rows: int | None, score_rows: int | None) -> Variant:
    """Return the blockwise search that encodes every prefix again, one prompt at a time.

    Parameters
    ----------
    generate_rows, score_rows : int or None
        Sequences given to ``generate``, and to a scorer, at a time; None stands for all of a block.
    """

    def run(models: Models, case: Case, prompts: Sequence[str], seed: int) -> list[str]:
        """Answer the prompts one after another."""
        torch.manual_seed(seed)
        return [
            models.policy.text(
                _search(models, case, models.policy.encode(p), generate_rows, score_rows)
            )
            for p in prompts
        ]

    return run


def _search(
    models: Models, case: Case, prompt: list[int], generate_rows: int | None, score_rows: int | None
) -> list[int]:
    """Return the tokens of one answer, by a beam search over blocks.

    Of `case.n_samples` blocks the best `case.keep` go on, by (unsafe, -reward).
    """
    beams = [[]]
    while len(beams[0]) < case.new_tokens:
        length = min(case.block, case.new_tokens - len(beams[0]))
        prefixes = [prompt + beams[i * len(beams) // case.n_samples] for i in range(case.n_samples)]
        texts = [
            row
            for part in _batches(prefixes, generate_rows)
            for row in generate(models, part, length)
        ]
        scores = {
            role: [
                x
                for part in _batches(texts, score_rows)
                for x in _score(*models.scorers[role], part)
            ]
            for role in models.scorers
        }
        best = sorted(
            range(case.n_samples), key=lambda i: (scores["cost"][i] > BUDGET, -scores["reward"][i])
        )
        beams = [texts[i][len(prompt) :] for i in best[: case.keep]]
    return beams[0]


def _batches(rows: list, size: int | None) -> list[list]:
    """Return rows in batches of a size; None stands for one batch."""
    size = size or len(rows)
    return [rows[at : at + size] for at in range(0, len(rows), size)]


def generate(models: Models, rows: list[list[int]], length: int, **options) -> list[list[int]]:
    """Continue rows by `length` tokens at temperature 1, with transformers' own KV cache."""
    ids, mask = padded(rows, models.device)  # (R, L)
    with torch.inference_mode():
        out = models.policy.model.generate(
            ids, attention_mask=mask, max_new_tokens=length, **options
        )
    return out.tolist()


@torch.inference_mode()
def _score(model, weights: torch.Tensor, rows: list[list[int]]) -> list[float]:
    """Score whole texts of one length as a sequence classifier does.

    The score is a linear head on the last hidden state.
    """
    hidden = model.base_model(
        input_ids=torch.tensor(rows, device=model.device), use_cache=False
    ).last_hidden_state[:, -1]
    return (hidden.float() @ weights).tolist()


def args(carried: bool) -> Variant:
    """Return ARGS that scores whole texts for every token, one prompt at a time.

    All candidates of a token form one batch.

    Parameters
    ----------
    carried : bool
        Whether the policy keeps a KV cache; else its prefix is encoded again as well.
    """

    def run(models: Models, case: Case, prompts: Sequence[str], seed: int) -> list[str]:
        """Answer the prompts one after another."""
        return [
            models.policy.text(_args(models, case, models.policy.encode(prompt), carried))
            for prompt in prompts
        ]

    return run


@torch.inference_mode()
def _args(models: Models, case: Case, prompt: list[int], carried: bool) -> list[int]:
    """Return the tokens of one answer, by ARGS.

    Each is the one of the `case.n_samples` most probable tokens with the lowest -omega pi - reward.
    """
    text, model = list(prompt), models.policy.model
    cache = DynamicCache(config=model.config) if carried else None
    while len(text) < len(prompt) + case.new_tokens:
        ids = torch.tensor(
            [text[cache.get_seq_length() :] if carried else text], device=models.device
        )
        logits = model(
            input_ids=ids, past_key_values=cache, use_cache=carried, logits_to_keep=1
        ).logits[0, -1]
        p, tokens = (x.tolist() for x in logits.float().softmax(-1).topk(case.n_samples))
        rewards = _score(*models.scorers["reward"], [[*text, token] for token in tokens])
        best = min(range(len(tokens)), key=lambda i: -OMEGA * p[i] - rewards[i])
        text.append(tokens[best])
    return text[len(prompt) :]


def transformers_generate(
    models: Models, case: Case, prompts: Sequence[str], seed: int
) -> list[str]:
    """Sample with transformers' own ``num_return_sequences``: Best-of-N with a free reward."""
    torch.manual_seed(seed)
    answers = []
    for prompt in prompts:
        ids = models.policy.encode(prompt)
        rows = generate(models, [ids], case.new_tokens, num_return_sequences=case.n_samples)
        answers.append(models.policy.text(rows[0][len(ids) :]))
    return answers


def its_hub_best_of_n(models: Models, case: Case, prompts: Sequence[str], seed: int) -> list[str]:
    """Run its_hub's Best-of-N with a free reward.

    Its orchestrator has no limit of concurrency, so that all requests reach the model as one batch.
    """
    from its_hub.core.algorithms.bon import BestOfN
    from its_hub.core.orchestrator import LMOrchestrator

    torch.manual_seed(seed)
    search = BestOfN(_free_reward(), LMOrchestrator(max_concurrency=-1))
    lm = _its_hub_lm(models, case.new_tokens)
    return [search.infer(lm, prompt, case.n_samples)["content"] for prompt in prompts]


def its_hub_beam_search(models: Models, case: Case, prompts: Sequence[str], seed: int) -> list[str]:
    """Run its_hub's beam search with a free process reward.

    Its first step samples only ``n_samples / keep`` candidates. It compares the number of steps
    before the last with `max_steps`, hence one less.
    """
    from its_hub.core.algorithms.beam_search import BeamSearch
    from its_hub.core.lms.step_generation import StepGeneration

    torch.manual_seed(seed)
    steps = StepGeneration(
        max_steps=case.new_tokens // case.block - 1, tokens_per_step=case.block, temperature=1.0
    )
    search = BeamSearch(steps, _free_reward(), beam_width=case.keep)
    lm = _its_hub_lm(models, case.new_tokens)
    return [search.infer(lm, prompt, case.n_samples)["content"] for prompt in prompts]


def _free_reward():
    """Return a reward for both of its_hub's algorithms: 0 for everything."""

    class FreeReward:
        """A reward of 0 for everything."""

        async def ascore(self, prompt_or_conversations, steps=None, orchestrator=None):
            """Return 0 for every text or step, under the names that its_hub passes."""
            return [0.0] * len(prompt_or_conversations if steps is None else steps)

    return FreeReward()


def _its_hub_lm(models: Models, max_tokens: int):
    """Return its_hub's language model over ``generate``, a batch at a time.

    Conversations are continued as plain text.
    """
    from its_hub.api import AbstractLanguageModel, ChatMessage

    class BatchingLM(AbstractLanguageModel):
        """A language model that collects requests into batches."""

        def __init__(self):
            """Start without requests."""
            self.waiting: list[tuple[list, asyncio.Future]] = []

        async def agenerate(self, messages, stop=None, max_completion_tokens=None, **_):
            """Continue one conversation, or a batch of them."""
            if isinstance(messages[0], ChatMessage):
                return (await self.agenerate([messages], stop, max_completion_tokens))[0]
            rows = [
                models.policy.encode("".join(m.content for m in conversation))
                for conversation in messages
            ]
            length = max(map(len, rows))
            out = generate(models, rows, max_completion_tokens or max_tokens)
            return [
                {"role": "assistant", "content": models.policy.text(row[length:])} for row in out
            ]

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
