"""The public front: a `Guard` holds a frozen policy and its scorers, and answers prompts.

guard = igcore.Guard("path/of/a/model", cost=my_cost, budget=0.2)
answer = guard("Dear customer,")
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Integral
from typing import Any

from .beams import METHODS, READ, Method, PromptSearch, method_of, new_search
from .budget import SIGNED
from .catalog import found, room
from .config import SearchConfig
from .contract import Contract, Scoring, contracts_of, doubts
from .engine.device import device_of, free_bytes
from .engine.memory import batch_size, check_bytes, halving, session_bytes
from .engine.prepack import missing_bytes, turn, use_prepacked
from .engine.sampling import AS_IS, Sampling
from .engine.threads import faster_threads
from .errors import ParameterError, ScorerWarning
from .policy import Message, Policy, Prompt, as_prompt
from .progress import progress
from .response import Response
from .scorers import Scorer, TextFunction, as_scorer, keeps_cache, uncached
from .search import Batch, guarded_beam_search
from .settings import Named
from .verdict import Emission, measure
from .work import OnBlock, Work

PolicyLike = Policy | str | os.PathLike[str] | Mapping[str, Any] | Named | tuple[Any, Any]
ScorerLike = Scorer | TextFunction | str | Mapping[str, Any] | Named
CostLike = ScorerLike | list[ScorerLike]
PromptLike = str | Prompt | Sequence[Message]

# options of transformers' `from_pretrained` that users give by mistake
LOADING = {"load_in_8bit", "load_in_4bit", "quantization_config", "device_map", "torch_dtype"}
LOADING |= {"attn_implementation", "trust_remote_code", "revision", "token", "cache_dir"}


@dataclass(frozen=True, init=False, eq=False)
class Guard:
    """A frozen policy with its cost and reward model, a critic, and the settings of the search.

    Calling it answers one prompt; `map` answers many. transformers takes the same object, in
    ``model.generate(**inputs, custom_generate=guard)``, see `igserve.generate`.

    Parameters
    ----------
    policy : Policy, str, path, mapping or (model, tokenizer)
        `igcore.load_policy` loads a text or a mapping: a folder, a name of its table, a name on
        the hub, or a model in a server.
    cost : Scorer, callable, str, mapping or list
        Higher is worse. A function takes ``response``, or ``prompt`` and ``response``, see
        `igcore.scorers.of_function`, and returns a number. It is called for prefixes as well. A
        text is a name of `igcore.SCORERS` or ``module:function``, and so is the ``name`` of a
        mapping, beside options. A list of costs is their maximum.
    reward : Scorer, callable, str or mapping, optional
        Higher is better. Without one, answers rank by the policy's own likelihood: the mean
        log-probability of their tokens, in nats.
    config : SearchConfig, optional
        All settings of the search. Or give `budget` and other fields of `SearchConfig` by name.
    critic : Critic or ValueNetwork, optional
        Only some methods need one; the others ignore it. Any object with ``watch``,
        ``reads_keys`` and ``judge`` as `igcore.critic.network.Critic` has them, or for RE-Control
        with ``steering``. Whatever it predicts, a guarded method emits only text that has passed
        the final check.
    budget : float, optional
        Safety budget d in units of the cost. It has no default: only the user can say what is
        safe. `igcore.suggest_budget` helps to choose it.
    method : str
        A key of `METHODS`, for calls of the guard; `decode` names its own.
    seed : int
        Together with a prompt it decides every token, unless a call names another.
    pool : object, optional
        A cache of samples and scores that searches share. It has ``engine(make, policy,
        sampling)``, an engine that reads samples from the cache and draws missing ones with the
        engine that ``make()`` returns, and ``scores_of(scorer, part)``, which is None or has
        ``get(texts)`` and ``add(scores)``. Answers do not depend on it; their seconds do.
    device, dtype : str or torch.dtype, optional
        Where a policy that is given by name is loaded, and in which type, see `igcore.load_policy`.
        By default (``auto``) the device with most free memory, and the type of the saved weights
        if that device computes in it natively, else ``float32``. So a model saved in float32 gives
        the same answers on every processor, up to near ties.
    chat_options : mapping, optional
        What the chat template of the policy reads besides messages, such as ``{"enable_thinking":
        False}``.

    Attributes
    ----------
    contracts : dict of str to Contract
        By role: the scorers, how they failed, and whether the cost is a function of the text.
    answers : list of Response
        The answers to the last call by ``model.generate``.

    Raises
    ------
    ParameterError
        For a scorer with the wrong sign, one that has a number for none of some fixed texts, no
        budget, or a policy that cannot be loaded.

    Warns
    -----
    ScorerWarning
        For a cost and a budget under which every text would pass, or none, see
        `igcore.contract.doubts`.
    UserWarning
        From a call, for settings or a critic that the method does not read.
    """

    policy: Policy
    cost: Scorer
    reward: Scorer | None
    config: SearchConfig
    critic: Any
    method: str
    seed: int
    pool: Any = field(repr=False)
    contracts: Mapping[str, Contract] = field(repr=False)
    answers: list[Response] = field(init=False, repr=False)

    def __init__(
        self,
        policy: PolicyLike,
        cost: CostLike | None = None,
        reward: ScorerLike | None = None,
        config: SearchConfig | None = None,
        critic: Any = None,
        *,
        budget: float | None = None,
        method: str = "backtracking",
        seed: int = 0,
        pool: Any = None,
        contracts: Mapping[str, Contract] | None = None,
        device: str = "auto",
        dtype: Any = "auto",
        chat_options: Mapping[str, Any] | None = None,
        **settings: Any,
    ):
        method_of(method)  # refuses an unknown name
        if budget is not None:
            settings["budget"] = budget
        config = config_of(config, settings)
        if cost is None:
            raise ParameterError("cost is missing; give a function of a text, or a scorer's name")
        if critic is not None and not (hasattr(critic, "judge") or hasattr(critic, "steering")):
            raise ParameterError(
                f"critic is {critic!r:.60}; give a network that notebook 20 has trained, or an "
                "object with judge or steering, as igcore.critic.network.Critic has it"
            )
        if pool is not None and not hasattr(pool, "engine"):
            raise ParameterError(
                f"pool is {pool!r:.60}; give an object such as igstudy.pool.Pool makes of a folder"
            )
        # cheap checks first: a policy may take a minute to load
        values = {
            "config": config,
            "cost": as_scorer(cost, "cost"),
            "reward": None if reward is None else as_scorer(reward, "reward"),
            "critic": critic,
            "method": method,
            "seed": check_seed(seed),
            "pool": pool,
            "answers": [],
            "policy": as_policy(policy, device, dtype, chat_options),
        }
        if config.sampling == "checkpoint":
            values["config"] = room("checkpoint_config")(values["policy"], config)
        scorers = {role: values[role] for role in ("cost", "reward") if values[role] is not None}
        values["contracts"] = contracts_of(scorers, contracts or {}, config.failure_rate)
        vars(self).update(values)  # the class is frozen
        if contracts is None:
            warn_of_doubts(self)

    def __call__(
        self,
        prompt: PromptLike | Any,
        input_ids: Any = None,
        *,
        seed: int | None = None,
        on_block: OnBlock | None = None,
        record: bool = False,
        **inputs: Any,
    ) -> Response | Any:
        """Answer one prompt: a text, chat messages, or a `Prompt`.

        With `record` the answer keeps every candidate of its search, see `Response.tree`.
        transformers calls it with a model and `input_ids` (B, L), and gets the ids of the answers.

        Raises
        ------
        ParameterError, ScorerError, PolicyError
            As `decode`.
        """
        chosen = self.seed if seed is None else seed
        if input_ids is None and inputs:
            name = next(iter(inputs))
            raise ParameterError(
                f"a call takes no {name}; write guard.with_config({name}=...)(prompt), which loads "
                "nothing again, or give it to igcore.Guard"
            )
        if input_ids is None:
            warn_of_unread(self)
            answers = decode(
                self.method, self, [prompt], seed=chosen, on_block=on_block, record=record
            )
            return next(answers)
        return room("answer_rows")(self, prompt, input_ids, seed=chosen, **inputs)

    def map(self, prompts: Iterable[PromptLike], *, seed: int | None = None) -> list[Response]:
        """Answer many prompts in batches of ``config.group_size``, with a progress bar.

        Raises
        ------
        ParameterError, ScorerError, PolicyError
            As `decode`.
        """
        given = listed(prompts)
        warn_of_unread(self)
        chosen = self.seed if seed is None else seed
        answers = []
        with progress(len(given), self.method) as bar:
            for answer in decode(self.method, self, given, seed=chosen):
                answers.append(answer)
                bar.update()
        return answers

    def explore(self, prompt: str = "", **options: Any) -> Any:
        """Return a panel for JupyterLab to watch the search, see `igcore.watch.explore.explore`."""
        return room("explore")(self, prompt, **options)

    def with_config(self, **settings: Any) -> Guard:
        """Return the guard with other settings of the search, fields of `SearchConfig` by name.

        Nothing is loaded again.

        Raises
        ------
        ParameterError
            For an unknown setting, or a value that is not allowed.
        """
        guard = replace(self, config=replace(self.config, **settings))
        warn_of_doubts(guard)
        return guard

    def with_method(self, name: str) -> Guard:
        """Return the guard with a method and the settings that it runs under.

        Raises
        ------
        ParameterError
            For an unknown method, one that the policy does not support, a missing reward or
            critic, or a critic that was trained for something else.
        """
        method = method_of(name)
        guard = replace(self, config=method.settings_under(self.config), method=name)
        guard.policy.check(name, method)
        # the critics predict a reward, and ARGS weighs one against single tokens
        tokenwise = method.search and not method.stepwise
        if guard.reward is None and (method.network or tokenwise):
            raise ParameterError(
                f"method {name!r} needs a reward, and there is none; name or give one as reward"
            )
        if guard.config.stop and tokenwise:
            raise ParameterError(
                f"method {name!r} does not read stop, which is {[*guard.config.stop]}; leave it "
                "out, or name another method"
            )
        accounting = guard.config.accounting
        early = "keep_shown" in method.reads and accounting not in {"terminal", *SIGNED}
        if guard.config.keep_shown and not early:
            raise ParameterError(
                f"method {name!r} cannot stream under accounting {accounting!r}, because only its "
                "whole answers are judged, and keep_shown is True; leave keep_shown out, or name "
                "'backtracking' and 'peak'"
            )
        if method.network:
            check_network(name, method, guard)
        return guard


def config_of(config: Any, given: Mapping[str, Any]) -> SearchConfig:
    """Return the settings of a guard: a config, or the single settings that were given."""
    if loading := ", ".join(LOADING & given.keys()):
        raise ParameterError(
            f"Guard takes no {loading}; it takes device, dtype and a mapping of name, revision, "
            "template and chat_options: load the model yourself and give (model, tokenizer)"
        )
    if config is None:
        return SearchConfig(**given)
    if not isinstance(config, SearchConfig):
        kind = type(config).__name__
        raise ParameterError(f"config is a {kind}; write SearchConfig(**config) for a dict")
    if given:
        names = ", ".join(given)
        raise ParameterError(f"Guard has {names} beside config; give either config or settings")
    return config


def warn_of_doubts(guard: Guard) -> None:
    """Warn, at the line of the caller's caller, of a cost and a budget that do not fit."""
    method = method_of(guard.method)
    config = method.settings_under(guard.config)
    inside = config.checks != "block" or config.block_size < config.max_new_tokens
    early = method.safety_first and inside and config.accounting != "terminal"
    for doubt in doubts(guard.contracts["cost"], config, early):
        warnings.warn(doubt, ScorerWarning, stacklevel=3)


def warn_of_unread(guard: Guard) -> None:
    """Warn, at the line of the caller's caller, of what was given and the method does not read."""
    config = guard.config
    if type(config) is not SearchConfig:  # of a params file, which has the settings of all methods
        return
    plain = SearchConfig(budget=config.budget)
    given = [name for name, value in vars(config).items() if value != getattr(plain, name)]
    given += ["critic"] if guard.critic is not None else []
    ignored = (READ & {*given}) - method_of(guard.method).reads
    if ignored:
        # the method that reads most of them; the first one, if several do
        reader = max(METHODS, key=lambda name: len(method_of(name).reads & ignored))
        unread = ", ".join(name for name in given if name in ignored)
        warnings.warn(
            f"method {guard.method!r} does not read {unread}, but {reader!r} does; name that "
            "method, or leave the setting out",
            stacklevel=3,
        )


def as_policy(
    policy: PolicyLike,
    device: str = "auto",
    dtype: Any = "auto",
    chat_options: Mapping[str, Any] | None = None,
) -> Policy:
    """Return a `Policy`: itself, loaded by name or folder, or made of (model, tokenizer)."""
    options = {"chat_options": dict(chat_options)} if chat_options else {}
    if isinstance(policy, str | os.PathLike | Mapping | Named):
        name = policy if isinstance(policy, Mapping | Named) else os.fspath(policy)
        named = Named.of(name, "policy")
        loaded: Policy = room("load_policy")(
            Named(named.name, named.options | options), dtype, device
        )
        return loaded
    if (device, dtype) != ("auto", "auto"):
        raise ParameterError(
            f"device is {device!r} and dtype {dtype!r}, but the policy is a model that was loaded "
            "before; move it yourself, such as by model.to(...)"
        )
    if isinstance(policy, Policy) and options:
        raise ParameterError(
            "chat_options is given, but the policy is an igcore.Policy; load it with these options"
        )
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, tuple) and len(policy) == 2:
        made: Policy = room("policy_of")(*policy, **options)
        return made
    if hasattr(policy, "model") and hasattr(policy, "tokenizer"):
        raise ParameterError("policy is a pipeline; give (pipe.model, pipe.tokenizer)")
    raise ParameterError(
        f"policy is of type {type(policy).__name__}; give the name or folder of a model, a mapping "
        "such as for a server, a pair (model, tokenizer), or an igcore.Policy"
    )


def check_network(name: str, method: Method, guard: Guard) -> None:
    """Refuse a missing critic or value network, and one that was trained for something else."""
    if guard.critic is None:
        raise ParameterError(
            f"method {name!r} needs a {method.network}; train one with notebook 20 and give it to "
            "Guard as critic="
        )
    spec = getattr(guard.critic, "spec", None)
    if spec is None:  # the user's own object, which does not say what it was trained for
        return
    if spec.KIND != method.network:
        raise ParameterError(
            f"method {name!r} needs a {method.network}, but critic= gives it a {spec.KIND}; give "
            f"it a {method.network}"
        )
    if Sampling.of(guard.config) != AS_IS:
        raise ParameterError(
            f"the {spec.KIND} was trained on samples of the policy itself, not of others; "
            "leave out temperature, top_p and top_k, or name another method"
        )
    spec.check_scorers(guard.policy, guard.cost, guard.reward)
    spec.check_settings(name, guard.config)


# --- decoding -------------------------------------------------------------------------------------


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
        Called as ``on_block(prompt, beams)`` after every block of a search that has not failed, of
        ``backtracking`` only with ``keep_shown``, as it may go back behind any other block,
        with the beams kept, best first; it must not change them. The answer will continue one of
        them. They may be unsafe where a method has no final check or knows costs only at the end.
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
        Before anything is decoded: for an unknown method, an empty or too long prompt, a
        missing critic or one that was trained for something else, or too little memory for one
        prompt.
    ScorerError
        When a scorer fails on more texts than ``failure_rate`` allows.
    PolicyError
        When the policy's logits are not finite, or memory runs out for a single prompt.
    """
    if not isinstance(method, str) or not isinstance(guard, Guard):  # in another order
        kinds = f"{type(method).__name__}, {type(guard).__name__}, ..."
        raise ParameterError(f"decode was given ({kinds}); give decode(method, guard, prompts)")
    resolved, how = guard.with_method(method), method_of(method)
    seed = check_seed(seed)
    policy, length = guard.policy, guard.config.max_new_tokens
    # all prompts are encoded first, so that a prompt that is too long is refused before any work
    pairs = encoded(policy, listed(prompts), length)
    if not pairs:
        return iter(())
    longest = max(len(ids) for _, ids in pairs)
    readers = readers_of(guard.reward, guard.cost)
    with turn(policy.model, *readers), faster_threads(policy.model):
        # prompts that fit at once; the first time, the model is tested here
        fitting = max_batch(policy, readers, resolved.config, longest, memory_gb)

    def work(pairs: Sequence[tuple[Prompt, list[int]]]) -> list[Response]:
        """Answer one group of prompts; `halving` may call it again with a smaller group."""
        searches = [
            new_search(prompt, tokens, row, how, resolved.config)
            for row, (prompt, tokens) in enumerate(pairs)
        ]
        with faster_threads(policy.model), use_prepacked(policy.model, *readers):
            recorder = room("Recorder")() if record else None
            account = Work(how, resolved.config, on_block, recorder)
            with account.timed("cost"):  # scorers with a KV cache prefill the prompts now
                texts = [prompt.text for prompt, _ in pairs]
                scoring = Scoring(resolved.contracts, texts, resolved.pool)
            # the engine keeps a middle layer's output only for a critic that reads it
            watch = resolved.critic.watch if how.asks_critic else None
            sampling, pool = Sampling.of(resolved.config), resolved.pool
            make = partial(policy.engine, watch, sampling)
            # a method with its own search needs logits at every token, which no pool keeps
            alone = pool is None or how.search
            batch = Batch(
                policy=policy,
                reward=resolved.reward,
                critic=resolved.critic,
                config=resolved.config,
                method=how,
                searches=searches,
                engine=make() if alone else pool.engine(make, policy, sampling),
                scoring=scoring,
                seed=seed,
                work=account,
                # measured at the user's block size: a method may change its own (Best-of-N has one
                # block), and peak costs are only comparable on one grid
                grid=guard.config.block_size,
                places=fitting,
            )
            search = found(how.search) or guarded_beam_search
            answers = responses(batch, search(batch))
        for answer in answers:
            answer.guard = resolved
        return answers

    size = guard.config.group_size
    return halving(pairs, size if how.stepwise else min(size, fitting), work)


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


def max_batch(
    policy: Policy,
    readers: Iterable[Any],
    config: SearchConfig,
    prompt_tokens: int,
    memory_gb: float | None,
) -> int:
    """Return how many prompts fit in memory at once: the least over the devices of all models.

    Parameters
    ----------
    readers : iterable of models
        See `readers_of`.
    """
    model, scoring = policy.model, set(readers)
    needed = {model: policy.search_bytes(config, prompt_tokens)}
    for reader in scoring:
        # added and not set: a scorer may read with the policy's own model
        cached = session_bytes(reader, config, prompt_tokens)
        drawn = needed.get(reader, [0] * len(cached))
        needed[reader] = [sum(moment) for moment in zip(cached, drawn, strict=True)]
    sizes = []
    for device in {device_of(model) for model in needed}:
        models = [model for model in needed if device_of(model) == device]
        # prepacked copies of the weights are made later, when decoding starts: leave room for them
        free = free_bytes(device) - missing_bytes(*models)
        fixed = sum(check_bytes(model, config) for model in models if model in scoring)
        moments = zip(*(needed[model] for model in models), strict=True)
        sizes.append(batch_size(max(map(sum, moments)), free, memory_gb, fixed))
    return min(sizes)


def responses(batch: Batch, emissions: Sequence[Emission]) -> list[Response]:
    """Return the answers with their metrics and the counts of their work."""
    prompts = [search.prompt for search in batch.searches]
    reward, cost = batch.scoring.reported.get("reward"), uncached(batch.scoring.contract.scorer)
    metrics = measure(emissions, prompts, reward, cost, batch.config)
    # prompts are decoded together, so their seconds cannot be told apart: equal shares
    seconds: dict[str, Any] = {
        f"{part}_s": s / len(prompts) for part, s in batch.work.seconds.items()
    }
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
