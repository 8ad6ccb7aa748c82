"""What `igcore.guard.decode` does for a group of prompts: encode, fit the memory, make answers."""

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

from .beams import PromptSearch
from .config import SearchConfig
from .engine.device import device_of, free_bytes
from .engine.memory import batch_size, session_bytes
from .engine.prepack import missing_bytes
from .errors import ParameterError
from .policy import Message, Policy, Prompt, as_prompt
from .response import Response
from .scorers import Scorer, keeps_cache, uncached
from .search import Batch
from .verdict import Emission, measure

PromptLike = str | Prompt | Sequence[Message]


def listed(prompts: Iterable[PromptLike]) -> list[PromptLike]:
    """Return prompts as a list; refuse what is iterated by letters or by columns."""
    whole = isinstance(prompts, str | Mapping) or hasattr(prompts, "columns")
    if whole or not isinstance(prompts, Iterable):
        shown = " ".join(repr(prompts).split())
        raise ParameterError(
            f"prompts is {shown:.60}; give a list of prompts, even of one, or of a data set the "
            'texts, ds["prompt"]'
        )
    found = list(prompts)
    if not found:
        raise ParameterError("there are no prompts; give at least one")
    return found


def encoded(
    policy: Policy, prompts: Sequence[PromptLike], length: int
) -> list[tuple[Prompt, list[int]]]:
    """Return prompts with their ids; an error names the number of its prompt."""
    pairs = []
    for number, given in enumerate(prompts):
        try:
            prompt = as_prompt(given)
            pairs.append((prompt, policy.ids_of(prompt, length)))
        except ParameterError as why:
            if len(prompts) == 1:
                raise
            raise ParameterError(f"prompts[{number}]: {why}") from None
    return pairs


def check_seed(seed: int) -> int:
    """Return a seed, or raise ``ParameterError`` unless it is a whole number."""
    # a seed is hashed as text, so 0, 0.0 and False would give three different answers
    if not isinstance(seed, Integral) or isinstance(seed, bool):
        raise ParameterError(f"seed is {seed!r}; it must be a whole number")
    return int(seed)  # numpy has whole numbers, too


def readers_of(*scorers: Scorer | None) -> set[Any]:
    """Return the language models behind the scorers that keep a KV cache."""
    parts: list[Any] = []
    for scorer in scorers:
        parts += getattr(scorer, "parts", [scorer])  # a maximum of several costs has parts
    # a set: scorers may share a backbone, which takes memory once
    return {part.backbone.model for part in parts if keeps_cache(part)}


def room_for(
    policy: Policy,
    readers: Iterable[Any],
    config: SearchConfig,
    prompt_tokens: int,
    memory_gb: float | None,
) -> int:
    """Return how many prompts fit at once: the least over the devices of all models.

    Parameters
    ----------
    readers : iterable of models
        See `readers_of`.
    """
    model = policy.model
    needed = {model: policy.search_bytes(config, prompt_tokens)}
    for reader in readers:
        # added and not set: a scorer may read with the policy's own model
        cached = session_bytes(reader, config, prompt_tokens)
        needed[reader] = needed.get(reader, 0) + cached
    sizes = []
    for device in {device_of(model) for model in needed}:
        models = [model for model in needed if device_of(model) == device]
        # prepacked copies of the weights are made later, when decoding starts: leave room for them
        free = free_bytes(device) - missing_bytes(*models)
        sizes.append(batch_size(sum(needed[model] for model in models), free, memory_gb))
    return min(sizes)


def responses(batch: Batch, emissions: Sequence[Emission]) -> list[Response]:
    """Return the answers with their metrics and the account of the work for them."""
    prompts = [search.prompt for search in batch.searches]
    reward, cost = batch.scoring.reported.get("reward"), uncached(batch.scoring.contract.scorer)
    metrics = measure(emissions, prompts, reward, cost, batch.config)
    # prompts are decoded together, so their seconds cannot be told apart: equal shares
    seconds: dict[str, Any] = {
        f"{part}_s": s / len(prompts) for part, s in batch.work.seconds.items()
    }
    out, recorder = [], batch.work.recorder
    for search, emission, metric in zip(batch.searches, emissions, metrics, strict=True):
        out.append(
            Response(
                prompt_id=search.prompt.id,
                prompt=search.prompt.text,
                set_name=search.prompt.set_name,
                text=emission.text,
                status=emission.status,
                reason=emission.reason,
                finished=emission.finished,
                n_tokens=emission.n_tokens,
                fail_open_cost=fail_open_cost(batch, search, emission),
                block_ends=emission.ends,
                grid_ends=emission.grid,
                tokens=emission.tokens,
                candidates=recorder.nodes(batch, search, emission) if recorder else [],
                **metric,
                **vars(batch.work.reports[search]),
                **seconds,
            )
        )
    return out


def fail_open_cost(batch: Batch, search: PromptSearch, emission: Emission) -> float | None:
    """Return the cost of what would have been emitted without abstention.

    None when the search stopped before that was known.
    """
    if emission.status != "abstained" and emission.reason != "truncated":
        return emission.verdict.cost if emission.verdict else None
    if search.stopped:  # not searched for, see `SearchConfig.probe_fail_open`
        return None
    cost = batch.scoring.search["cost"]
    return float(cost.score([search.prompt.text], [search.best.text], [True])[0])
