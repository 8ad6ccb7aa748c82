"""The public front: a `Guard` holds a frozen policy and its scorers, and answers prompts.

guard = igcore.Guard("path/of/a/model", cost=my_cost, budget=0.2)
answer = guard("Dear customer,")
"""

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from .catalog import room
from .config import SearchConfig
from .contract import Contract, contracts_of, doubts
from .critic.network import Judge, Steers
from .decoding import PromptLike, decode, listed
from .errors import ParameterError, ScorerWarning
from .methods import METHODS, READ, method_of
from .models.generation import checkpoint_config
from .models.policies import PolicyLike, as_policy
from .models.registry import CostLike, ScorerLike, as_scorer
from .progress import progress
from .response import Response
from .setup import Setup, check_seed
from .streaming import LATE, shows_parts, stream
from .work import OnBlock


@dataclass(frozen=True, init=False, eq=False)
class Guard(Setup):
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
        Only some methods need one; the others ignore it. It may be an object of your own, see
        `igcore.critic.network.Judge`, or for RE-Control `igcore.critic.network.Steers`. For every
        prediction, a guarded method emits only text that has passed the final check.
    budget : float, optional
        Safety budget d in units of the cost. It has no default: only the user can say what is
        safe. `igcore.suggest_budget` helps to choose it.
    method : str
        A key of `METHODS`; `Guard.decode` may name another.
    seed : int
        Together with a prompt it decides every token, unless a call names another.
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

    def __init__(
        self,
        policy: PolicyLike,
        cost: CostLike | None = None,
        reward: ScorerLike | None = None,
        config: SearchConfig | None = None,
        critic: Judge | Steers | None = None,
        *,
        budget: float | None = None,
        method: str = "backtracking",
        seed: int = 0,
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
        if critic is not None and not isinstance(critic, Judge | Steers):
            raise ParameterError(
                f"critic is {critic!r:.60}; give a network that notebook 20 has trained, or an "
                "object such as igcore.critic.network.Judge or Steers describes"
            )
        # cheap checks first: a policy may take a minute to load
        cost = as_scorer(cost, "cost")
        reward = None if reward is None else as_scorer(reward, "reward")
        seed = check_seed(seed)
        policy = as_policy(policy, device, dtype, chat_options)
        if config.sampling == "checkpoint":
            config = checkpoint_config(policy, config)
        scorers = {"cost": cost} | ({} if reward is None else {"reward": reward})
        examined = contracts_of(scorers, contracts or {}, config.failure_rate)
        super().__init__(policy, cost, reward, config, critic, method, seed, examined)
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
            As `igcore.decode`.
        """
        if input_ids is None and inputs:
            name = next(iter(inputs))
            raise ParameterError(
                f"a call takes no {name}; write guard.with_config({name}=...)(prompt), which loads "
                "nothing again, or give it to igcore.Guard"
            )
        if input_ids is None:
            warn_of_unread(self)
            return next(self.decode([prompt], seed=seed, on_block=on_block, record=record))
        chosen = self.seed if seed is None else seed
        return room("answer_rows")(self, prompt, input_ids, seed=chosen, **inputs)

    def decode(
        self,
        prompts: Iterable[PromptLike],
        *,
        method: str | None = None,
        seed: int | None = None,
        **options: Any,
    ) -> Iterator[Response]:
        """Yield the answers to many prompts as each group finishes, by this or another method.

        The options are those of `igcore.decode`, such as ``on_block`` and ``record``.

        Raises
        ------
        ParameterError, ScorerError, PolicyError
            As `igcore.decode`.
        """
        method = self.method if method is None else method
        seed = self.seed if seed is None else seed
        return decode(method, self, prompts, seed=seed, **options)

    def map(
        self,
        prompts: Iterable[PromptLike],
        *,
        seed: int | None = None,
        out: str | os.PathLike[str] | None = None,
    ) -> list[Response]:
        """Answer many prompts in batches of ``config.group_size``, with a progress bar.

        Parameters
        ----------
        out : path, optional
            A file of JSON lines that gets each answer with its receipt, see
            `igcore.tools.answers`. Answers that it has from an earlier call are not decoded again.

        Raises
        ------
        ParameterError, ScorerError, PolicyError
            As `igcore.decode`.
        RunError
            When the file cannot be written, or holds answers to something else.
        """
        given = listed(prompts)
        warn_of_unread(self)
        seed = self.seed if seed is None else check_seed(seed)
        found = self.decode(given, seed=seed)  # refuses a prompt before anything is written
        if out is not None:
            found = room("answers_in")(Path(out), self, given, seed)
        answers = []
        with progress(len(given), self.method) as bar:
            for answer in found:
                answers.append(answer)
                bar.update()
        return answers

    def stream(self, prompt: PromptLike, *, seed: int | None = None) -> Iterator[str | Response]:
        """Yield the parts of an answer as they pass their checks, then the answer.

        A part is never taken back, and all parts are the text that the cost has judged::

            *parts, answer = guard.stream("Dear customer,")
            assert "".join(parts) == answer.judged or answer.status == "abstained"

        The answer is that of a call with the same prompt and seed. A search in steps may go back
        behind any part, so there are parts before the end with ``keep_shown`` alone. If the guard
        abstains after it has shown something, nothing follows but the answer. A stream that is
        closed ends its search at the next block.

        Raises
        ------
        ParameterError, ScorerError, PolicyError
            As `igcore.decode`.

        Warns
        -----
        UserWarning
            Where the whole answer will come at its end.
        """
        warn_of_unread(self)
        if not shows_parts(self):
            warnings.warn(LATE.format(self.method), stacklevel=2)
        return stream(self, prompt, self.seed if seed is None else seed)

    def with_config(self, **settings: Any) -> Self:
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


def config_of(config: SearchConfig | None, given: Mapping[str, Any]) -> SearchConfig:
    """Return the settings of a guard: a config, or the single settings that were given."""
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
