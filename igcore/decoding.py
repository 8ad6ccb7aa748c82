"""Answer prompts with one method, in groups."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from .candidates import PromptSearch, new_search
from .catalog import found, room
from .contract import Scoring
from .critic.network import Judge
from .engine.local import Engine
from .engine.memory import halving
from .engine.prepack import use_prepacked
from .engine.sampling import Sampling
from .errors import ParameterError
from .methods import Method, method_of
from .policy import Policy
from .prompt import Message, Prompt, as_prompt
from .response import Response
from .scorers import readers_of, uncached
from .search import Batch, guarded_beam_search
from .setup import Setup, check_seed
from .verdict import Emission, measure
from .work import OnBlock, Work

PromptLike = str | Prompt | Sequence[Message]


def decode(
    method: str,
    guard: Setup,
    prompts: Iterable[PromptLike],
    *,
    seed: int = 0,
    on_block: OnBlock | None = None,
    on_answer: Callable[[Prompt, Response], None] | None = None,
    cancelled: Callable[[Prompt], bool] | None = None,
    record: bool = False,
) -> Iterator[Response]:
    """Answer prompts with one method.

    Parameters
    ----------
    method : str
        A key of `METHODS`.
    guard : Guard
    prompts : iterable of str, chat messages or Prompt
        Decoded together in groups of ``config.group_size``, in this order; where memory runs out,
        the groups are halved. Chat messages are a list of ``{"role": ..., "content": ...}`` that
        ends with the user's, see `igcore.prompt.Chat`.
    seed : int
        Together with (prompt, round, beam, position) it decides every token.
    on_block : callable, optional
        Called as ``on_block(prompt, beams)`` after every block of a search that has not failed, of
        ``backtracking`` only with ``keep_shown``, as it may go back behind any other block,
        with the beams kept, best first; it must not change them. The answer will continue one of
        them. They may be unsafe where a method has no final check or knows costs only at the end.
    on_answer : callable, optional
        Called as ``on_answer(prompt, answer)`` when an answer is known: of a search in steps before
        the others of its group. Its seconds are those until then.
    cancelled : callable, optional
        Called as ``cancelled(prompt)`` before every block. Where it is true, the search for this
        prompt ends there, which frees its rows, and abstains for the reason ``cancelled``. ARGS and
        RE-Control do not ask.
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
        Before anything is decoded: for an unknown method, an empty or too long prompt, and a
        missing critic or one that was trained for something else.
    ScorerError
        When a scorer fails on more texts than ``failure_rate`` allows.
    PolicyError
        When the policy's logits are not finite, or memory runs out for a single prompt.
    """
    if not isinstance(method, str) or not isinstance(guard, Setup):  # in another order
        kinds = f"{type(method).__name__}, {type(guard).__name__}, ..."
        raise ParameterError(f"decode was given ({kinds}); give decode(method, guard, prompts)")
    seed = check_seed(seed)
    setup = replace(guard.with_method(method), seed=seed)
    # all prompts are encoded first, so that a prompt that is too long is refused before any work
    pairs = encoded(guard.policy, listed(prompts), guard.config.max_new_tokens)
    # peaks are measured at the user's block size: a method may change its own (Best-of-N has one
    # block), and peak costs are only comparable on one grid
    grid = guard.config.block_size
    group = partial(_decode_group, setup, grid, on_block, on_answer, cancelled, record)
    return halving(pairs, guard.config.group_size, group)


def _decode_group(
    setup: Setup,
    grid: int,
    on_block: OnBlock | None,
    on_answer: Callable[[Prompt, Response], None] | None,
    cancelled: Callable[[Prompt], bool] | None,
    record: bool,
    pairs: Sequence[tuple[Prompt, list[int]]],
) -> list[Response]:
    """Answer one group of prompts; `halving` may call it again with a smaller group.

    Parameters
    ----------
    grid : int
        See `igcore.search.Batch`.
    pairs : sequence of (Prompt, list of int)
        The prompts with their ids.
    """
    policy, config, how = setup.policy, setup.config, method_of(setup.method)
    searches = [
        new_search(prompt, ids, row, how, config) for row, (prompt, ids) in enumerate(pairs)
    ]
    readers = readers_of(setup.reward, setup.cost)
    with use_prepacked(policy.model, *readers):
        work = Work(how, config, on_block, room("Recorder")() if record else None)
        with work.timed("cost"):  # scorers with a KV cache prefill the prompts now
            scoring = Scoring(setup.contracts, [prompt.text for prompt, _ in pairs])
        batch = Batch(
            policy=policy,
            reward=setup.reward,
            critic=setup.critic,
            config=config,
            method=how,
            searches=searches,
            engine=_engine_of(setup, how),
            scoring=scoring,
            seed=setup.seed,
            work=work,
            grid=grid,
            cancelled=cancelled,
        )
        run = found(how.search) or guarded_beam_search
        if on_answer is None:
            return responses(batch, run(batch), setup)
        known: dict[PromptSearch, Response] = {}

        def settle(search: PromptSearch, emission: Emission) -> None:
            if search not in known:
                (known[search],) = responses(replace(batch, searches=[search]), [emission], setup)
                on_answer(search.prompt, known[search])

        batch.settled = settle
        for search, emission in zip(searches, run(batch), strict=True):
            settle(search, emission)  # those of methods that settle all at once
        return [known[search] for search in searches]


def _engine_of(setup: Setup, method: Method) -> Engine:
    """Return a new engine of the policy."""
    # the engine keeps a middle layer's output only for a critic that reads it
    watch = setup.critic.watch if method.asks_critic and isinstance(setup.critic, Judge) else None
    return setup.policy.engine(watch, Sampling.of(setup.config))


def listed(prompts: Iterable[PromptLike]) -> list[PromptLike]:
    """Return prompts as a list; refuse a text and a table: they iterate over letters or columns."""
    whole = isinstance(prompts, str | Mapping) or hasattr(prompts, "columns")
    if whole or not isinstance(prompts, Iterable):
        shown = " ".join(repr(prompts).split())
        raise ParameterError(
            f"prompts is {shown:.60}; give a list of prompts, even of one, or of a data set the "
            'texts, ds["prompt"]'
        )
    return list(prompts)


def encoded(
    policy: Policy, prompts: Sequence[PromptLike], length: int
) -> list[tuple[Prompt, list[int]]]:
    """Return prompts with their ids; an error names the prompt's number."""
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


def responses(batch: Batch, emissions: Sequence[Emission], setup: Setup) -> list[Response]:
    """Return the answers with their metrics, the counts of their work and their guard."""
    prompts = [search.prompt for search in batch.searches]
    reward, cost = batch.scoring.reported.get("reward"), uncached(batch.scoring.contract.scorer)
    metrics = measure(emissions, prompts, reward, cost, batch.config)
    # prompts are decoded together, so nobody knows the seconds of each: equal shares
    seconds = {part: s / len(batch.work.reports) for part, s in batch.work.seconds.items()}
    out, recorder = [], batch.work.recorder
    for search, emission, metric in zip(batch.searches, emissions, metrics, strict=True):
        reasoning, text = "", emission.text
        if emission.tokens and text:
            reasoning = batch.policy.reasoning_in(search.ids, emission.tokens, text)
            text = text.removeprefix(reasoning)
        out.append(
            Response(
                prompt_id=search.prompt.id,
                prompt=search.prompt.text,
                set_name=search.prompt.set_name,
                text=text,
                reasoning=reasoning,
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
                generate_s=seconds["generate"],
                cost_s=seconds["cost"],
                reward_s=seconds["reward"],
                critic_s=seconds["critic"],
            )
        )
        out[-1].guard = setup
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
