"""`decode`: any method over any number of prompts, in groups that fit the memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from numbers import Integral
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from .beams import Method, PromptSearch, method_of, new_search
from .engine.block import Engine
from .engine.device import device_of, free_bytes
from .engine.memory import (
    CRITIC_ROWS,
    batch_size,
    critic_bytes,
    halving,
    session_bytes,
)
from .engine.pooled import PooledEngine
from .engine.prepack import missing_bytes, packed, turn
from .errors import ParameterError
from .policy import Policy, Prompt, as_prompt
from .pool import policy_digest
from .response import Response
from .scorers import keeps_cache, uncached
from .scoring import Scoring
from .search import Batch
from .verdict import Emission, measure
from .work import OnBlock, Work

if TYPE_CHECKING:
    from .guard import Guard, PromptLike


def decode(
    method: str,
    guard: Guard,
    prompts: Iterable[PromptLike],
    *,
    seed: int = 0,
    on_block: OnBlock | None = None,
    memory_gb: float | None = None,
    record: bool = False,
) -> Iterator[Response]:
    """Answer prompts with one method.

    Parameters
    ----------
    method : str
        A key of `METHODS`.
    guard : Guard
    prompts : iterable of str, chat messages or Prompt
        Decoded together in groups of ``config.group_size``, in this order. Chat messages are a list
        of ``{"role": ..., "content": ...}`` that ends with the user's, see `igcore.policy.Chat`.
    seed : int
        Together with (prompt, round, beam, position) it decides every token.
    on_block : callable, optional
        Called as ``on_block(prompt, beams)`` after every block of a search that has not failed,
        with the beams kept, best first; it must not change them. The answer will continue one of
        them. They may be unsafe under a method without a final check, or where costs are known only
        at the end.
    memory_gb : float, optional
        Memory for KV caches and logits, in GiB. Fewer prompts are decoded together where they would
        exceed it, see `igcore.engine.memory`. By default most of what is free. If memory runs out
        all the same, the batch is halved.
    record : bool
        Whether to keep every candidate in ``Response.candidates``, for `Response.tree`. Cost and
        reward are then scored for all candidates, also where the method does not ask.

    Yields
    ------
    Response
        In the order of the prompts, as each group finishes.

    Raises
    ------
    ParameterError
        Before anything is decoded: for an unknown method, no prompt, an empty or too long prompt, a
        missing critic or one that was trained for something else, or too little memory for one
        prompt.
    ScorerError
        When a scorer fails on more texts than ``failure_rate`` allows.
    PolicyError
        When the policy's logits are not finite, or memory runs out for a single prompt.
    """
    if not isinstance(method, str):  # a slip that every other function with a guard invites
        raise ParameterError(
            f"method is of type {type(method).__name__}; give decode(method, guard, prompts)"
        )
    resolved, how = guard.under(method), method_of(method)
    seed = check_seed(seed)
    policy, length = guard.policy, guard.config.max_new_tokens
    # all prompts are encoded first, so that a prompt that is too long is refused before any work
    pairs = encoded(policy, listed(prompts), length)
    longest = max(len(ids) for _, ids in pairs)
    with turn(policy.model, *readers_of(guard)):
        room = room_for(how, resolved, longest, memory_gb)  # prompts that fit at once

    def work(pairs: Sequence[tuple[Prompt, list[int]]]) -> list[Response]:
        """Answer one group of prompts; `halving` may call it again with a smaller group."""
        searches = [
            new_search(prompt, tokens, row, how, resolved.config)
            for row, (prompt, tokens) in enumerate(pairs)
        ]
        with packed(policy.model, *readers_of(guard)):
            recorder = resolve_name("igcore.watch.record:Recorder")() if record else None
            account = Work(how, resolved.config, on_block, recorder)
            # measured at the user's block size: a method may change its own (Best-of-N has one
            # block), and peak costs are only comparable on one grid
            batch = open_batch(resolved, how, searches, seed, account, guard.config.block_size)
            emissions = resolve_name(how.search)(batch)
            return responses(batch, emissions)

    return halving(pairs, min(guard.config.group_size, room), work)


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


def readers_of(guard: Guard) -> set[Any]:
    """Return the language models behind the scorers that keep a KV cache."""
    scorers: list[Any] = []
    for scorer in (guard.reward, guard.cost):
        scorers += getattr(scorer, "parts", [scorer])  # a maximum of several costs has parts
    # a set: scorers may share a backbone, which takes memory once
    return {scorer.backbone.model for scorer in scorers if keeps_cache(scorer)}


def room_for(method: Method, guard: Guard, prompt_tokens: int, memory_gb: float | None) -> int:
    """Return how many prompts fit at once: the least over the devices of all models."""
    model, config = guard.policy.model, guard.config
    needed = {model: guard.policy.search_bytes(config, prompt_tokens)}
    if method.asks_critic and guard.critic.reads_keys:
        rows = min(CRITIC_ROWS, config.n_samples)
        # of another's critic nothing says that it reads the prompt
        prompt = prompt_tokens if getattr(guard.critic, "reads_prompt", False) else 0
        needed[model] += critic_bytes(model, rows, prompt + config.max_new_tokens)
    for reader in readers_of(guard):
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


def open_batch(
    guard: Guard, method: Method, searches: list[PromptSearch], seed: int, work: Work, grid: int
) -> Batch:
    """Return what a search function works with: the searches, a new engine and the scorers."""
    prompts = [search.prompt.text for search in searches]
    with work.timed("cost"):  # scorers with a KV cache prefill the prompts now
        scoring = Scoring(guard.contracts, prompts, guard.pool)
    policy = guard.policy
    # the engine keeps a middle layer's output only for a critic that reads it
    watch = guard.critic.watch if method.asks_critic else None
    make = partial(policy.engine, watch)
    engine: Engine
    if guard.pool is None:
        engine = make()
    else:
        engine = PooledEngine(make, policy.eos_ids, guard.pool, policy_digest(policy))
    return Batch(guard, method, searches, engine, scoring, seed, work, grid)


def responses(batch: Batch, emissions: Sequence[Emission]) -> list[Response]:
    """Return the answers with their metrics and the account of the work for them."""
    prompts = [search.prompt for search in batch.searches]
    reward, cost = batch.scoring.reported.get("reward"), uncached(batch.guard.cost)
    metrics = measure(emissions, prompts, reward, cost, batch.config)
    # prompts are decoded together, so their seconds cannot be told apart: equal shares
    seconds: dict[str, Any] = {
        f"{part}_s": s / len(prompts) for part, s in batch.work.seconds.items()
    }
    out, recorder = [], batch.work.recorder
    for search, emission, metric in zip(batch.searches, emissions, metrics, strict=True):
        answer = Response(
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
            **vars(metric),
            **vars(batch.work.reports[search]),
            **seconds,
        )
        answer.guard = batch.guard
        out.append(answer)
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
