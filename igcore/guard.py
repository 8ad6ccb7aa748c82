"""The public front: a `Guard` holds a frozen policy, what it is judged by, and answers prompts.

guard = igcore.Guard("path/of/a/model", cost=my_cost, budget=0.2)
answer = guard("Dear customer,")
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pkgutil import resolve_name
from typing import Any

from .beams import Method, method_of
from .config import SearchConfig
from .contract import Contract
from .decoding import check_seed, decode, listed
from .engine.device import note_threads
from .errors import ParameterError
from .policy import Message, Policy, Prompt
from .pool import Pool
from .progress import progress
from .response import Response
from .scorers import Scorer, TextFunction, as_scorer
from .scoring import Tally
from .work import OnBlock

PolicyLike = Policy | str | os.PathLike[str] | Mapping[str, Any] | tuple[Any, Any]
ScorerLike = Scorer | TextFunction | str | Mapping[str, Any]
CostLike = ScorerLike | list[ScorerLike]
PromptLike = str | Prompt | Sequence[Message]


@dataclass(frozen=True, init=False, eq=False)
class Guard:
    """What decodes: a frozen policy, its cost and reward model, a critic, and the settings.

    Calling it answers one prompt; `map` answers many. The same object stands behind transformers'
    ``model.generate(**inputs, custom_generate=guard)``, see `igcore.adapters.generate`.

    Parameters
    ----------
    policy : Policy, str, path, mapping or (model, tokenizer)
        A text or mapping is given to `igcore.load_policy`: a folder, a name of its table, a name on
        the hub, or a model in a server.
    cost : Scorer, callable, str, mapping or list
        Higher is worse. A function takes ``response``, or ``prompt`` and ``response``, see
        `igcore.scorers.of_function`, and returns a number. It is called for prefixes as well, and
        is recorded by its name and the hash of all that it holds. A text is a name of
        `igcore.SCORERS` or ``module:function``, and so is the ``name`` of a mapping, beside
        options. A list of costs is their maximum.
    reward : Scorer, callable, str or mapping, optional
        Higher is better. Without one, answers rank by the policy's own likelihood: the mean
        log-probability of their tokens, in nats.
    config : SearchConfig, optional
        All settings of the search. Or give `budget` and other fields of `SearchConfig` by name.
    critic : Critic or ValueNetwork, optional
        For the methods that need one; the others ignore it. Any object with ``watch``,
        ``reads_keys`` and ``judge`` as `igcore.critic.network.Critic` has them, or for RE-Control
        with ``steering`` as `igcore.baselines.re_control.ValueNetwork` has it. Whatever it
        predicts, a guarded method emits only text that has passed the final check.
    budget : float, optional
        Safety budget d in units of the cost. It has no default: only the user can say what is
        safe. `igcore.suggest_budget` helps to choose it.
    method : str
        A key of `METHODS`, for calls of the guard; `decode` names its own.
    seed : int
        Together with a prompt it decides every token, unless a call names another.
    pool : Pool or path, optional
        Keeps samples and scores, so that no search draws what another has drawn, see
        `igcore.pool.Pool`. Answers do not depend on it; their seconds do.
    device, dtype : str, optional
        Where a policy that is given by name is loaded, and in which type, see `igcore.load_policy`.
        By default (``auto``) the device with most room, and the type in which its weights were
        saved if that device has units for it, else ``float32``. So a model saved in float32 gives
        the same answers on every processor, up to near ties.

    Attributes
    ----------
    contracts : dict of str to Contract
        By role: the scorers, how they failed, and whether the cost is a function of the text.
    answers : list of Response
        The answers to the last call by ``model.generate``.

    Raises
    ------
    ParameterError
        For a scorer with the wrong sign, a cost that has a number for none of some fixed texts, no
        budget, or a policy that cannot be loaded.
    """

    policy: Policy
    cost: Scorer
    reward: Scorer | None
    config: SearchConfig
    critic: Any
    method: str
    seed: int
    pool: Pool | None = field(repr=False)
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
        method: str = "inferenceguard",
        seed: int = 0,
        pool: Pool | str | os.PathLike[str] | None = None,
        contracts: Mapping[str, Contract] | None = None,
        device: str = "auto",
        dtype: str = "auto",
        **settings: Any,
    ):
        method_of(method)  # refuses an unknown name
        if cost is None:
            raise ParameterError("Guard has no cost; give cost=, a function of a text to a number")
        if budget is not None:
            settings["budget"] = budget
        if config is None:
            config = SearchConfig(**settings)
        elif settings or not isinstance(config, SearchConfig):
            raise ParameterError(
                f"Guard has {', '.join(settings) or 'settings'} beside config={config!r:.60}; give "
                "either a SearchConfig or single settings"
            )
        if critic is not None and not (hasattr(critic, "judge") or hasattr(critic, "steering")):
            raise ParameterError(
                f"critic is {critic!r:.60}; give a network that notebook 20 has trained, or an "
                "object with judge or steering, as igcore.critic.network.Critic has it"
            )
        # cheap checks first: a policy may take a minute to load
        values = {
            "config": config,
            "cost": as_scorer(cost, "cost"),
            "reward": None if reward is None else as_scorer(reward, "reward"),
            "critic": critic,
            "method": method,
            "seed": check_seed(seed),
            "pool": Pool(pool) if isinstance(pool, str | os.PathLike) else pool,
            "answers": [],
            "policy": as_policy(policy, device, dtype),
        }
        scorers = {role: values[role] for role in ("cost", "reward") if values[role] is not None}
        note_threads()
        values["contracts"] = contracts_of(scorers, contracts or {}, config.failure_rate)
        for name, value in values.items():
            object.__setattr__(self, name, value)

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
        if input_ids is None and not inputs:
            answers = decode(
                self.method, self, [prompt], seed=chosen, on_block=on_block, record=record
            )
            return next(answers)
        answer_rows = resolve_name("igcore.adapters.generate:answer_rows")
        return answer_rows(self, prompt, input_ids, seed=chosen, **inputs)

    def map(self, prompts: Iterable[PromptLike], *, seed: int | None = None) -> list[Response]:
        """Answer many prompts in batches of ``config.group_size``, with a progress bar.

        Raises
        ------
        ParameterError, ScorerError, PolicyError
            As `decode`.
        """
        given = listed(prompts)
        chosen = self.seed if seed is None else seed
        answers = []
        with progress(len(given), self.method) as bar:
            for answer in decode(self.method, self, given, seed=chosen):
                answers.append(answer)
                bar.update()
        return answers

    def explore(self, prompt: str = "", **options: Any) -> Any:
        """Return a panel for JupyterLab to watch the search, see `igcore.watch.explore.explore`."""
        return resolve_name("igcore.watch.explore:explore")(self, prompt, **options)

    def under(self, name: str) -> Guard:
        """Return the guard with a method and the settings that it runs under.

        Raises
        ------
        ParameterError
            For an unknown method, one that the policy cannot be decoded by, a missing reward or
            critic, or a critic that was trained for something else.
        """
        method = method_of(name)
        guard = replace(self, config=method.settings_under(self.config), method=name)
        guard.policy.check(name, method, guard.critic)
        check_reward(name, method, guard)
        check_network(name, method, guard)
        return guard


def contracts_of(
    scorers: Mapping[str, Scorer], known: Mapping[str, Contract], failure_rate: float
) -> dict[str, Contract]:
    """Return the contract of each scorer by role: a known one, or what an examination finds.

    A reward decides no verdict, so it is not examined.
    """
    contracts = {}
    for role, scorer in scorers.items():
        contract = known.get(role)
        if contract is not None and contract.tally.rate != failure_rate:
            contract = replace(contract, tally=Tally(failure_rate))
        if contract is None or contract.scorer is not scorer:
            tally = Tally(failure_rate)
            examined = Contract.examined if role == "cost" else Contract
            contract = examined(scorer, tally=tally)
        contracts[role] = contract
    return contracts


def as_policy(policy: PolicyLike, device: str = "auto", dtype: str = "auto") -> Policy:
    """Return a `Policy`: itself, loaded by name or folder, or made of (model, tokenizer)."""
    if isinstance(policy, str | os.PathLike | Mapping):
        name = policy if isinstance(policy, Mapping) else os.fspath(policy)
        loaded: Policy = resolve_name("igcore.models.policies:load_policy")(name, dtype, device)
        return loaded
    if (device, dtype) != ("auto", "auto"):
        raise ParameterError(
            f"device is {device!r} and dtype {dtype!r}, but the policy is a model that was loaded "
            "before; move it yourself, such as by model.to(...)"
        )
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, tuple) and len(policy) == 2:
        made: Policy = resolve_name("igcore.models.policies:policy_of")(*policy)
        return made
    raise ParameterError(
        f"policy is of type {type(policy).__name__}; give the name or folder of a model, a mapping "
        "such as for a server, a pair (model, tokenizer), or an igcore.Policy"
    )


def check_reward(name: str, method: Method, guard: Any) -> None:
    """Refuse a method that needs a reward model where there is none."""
    # the critics predict a reward, and ARGS weighs one against single tokens
    own_search = method.search != Method.search
    if guard.reward is None and (method.network or own_search):
        raise ParameterError(
            f"method {name!r} needs a reward, and there is none; name or give one as reward"
        )


def check_network(name: str, method: Method, guard: Guard) -> None:
    """Refuse a missing critic or value network, and one that was trained for something else."""
    if not method.network:
        return
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
    spec.check_scorers(guard.policy.trained, guard.cost, guard.reward)
    spec.check_settings(name, guard.config)
