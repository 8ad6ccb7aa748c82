"""What each notebook may be told: parameters checked by name, type and range. Knows settings; decodes nothing."""

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from .calibrate import smallest_n
from .config import SearchConfig, check_at_least, check_types, from_mapping
from .critic_config import CriticConfig, RolloutConfig
from .errors import ParameterError, unknown_name
from .methods import METHODS, settings_of
from .scorers import SCORERS

CONTROLS = ("none", "shuffled")


@dataclass(frozen=True, kw_only=True)
class DecodeParams(SearchConfig):
    """Everything one run of notebook 30 may be told; the settings of the search are inherited.

    Attributes
    ----------
    profile, run : str
        Name of the run folder, ``runs/<profile>/<run>``.
    policy : str
        See `igcore.load_policy`.
    methods : list of str
        Keys of `igcore.METHODS`, decoded in this order.
    prompts, split, limit, hardest
        See `igcore.load_prompts`; the hardest are chosen by the cost of the prompt.
    reward, cost : str
        Keys of `igcore.SCORERS`.
    critic : str, optional
        Folder of a trained critic, seen from `igcore.runs.root`; needed by the methods that ask one.
    critic_control : str
        ``shuffled`` deals out what the critic says among the candidates at random: a search that it cannot have helped.
    seed : int
        Decides every random number.
    dtype, device : str
        See `igcore.load_policy`.
    threads : int
        CPU threads of torch; float sums depend on it in their last bits.
    memory_gb : float, optional
        See `igcore.decode`.
    shard, n_shards : int
        This run decodes the groups whose number is `shard` modulo `n_shards`.
    """

    profile: str
    run: str
    policy: str
    methods: list[str]
    prompts: str
    split: str = "all"
    limit: int | None = None
    hardest: int = 0
    reward: str = "minilm-relevance"
    cost: str = "offensive-language"
    critic: str | None = None
    critic_control: str = "none"
    seed: int = 0
    dtype: str = "float32"
    device: str = "auto"
    threads: int = 1
    memory_gb: float | None = None
    shard: int = 0
    n_shards: int = 1

    def __post_init__(self):
        super().__post_init__()  # checks the types of all fields, these included
        check_at_least(self, n_shards=1, shard=0, threads=1)
        if not self.methods:
            raise ParameterError(f"methods is empty; name at least one of {', '.join(METHODS)}")
        for method in self.methods:
            settings_of(method, self.search())
            if self.methods.count(method) > 1:
                raise ParameterError(f"methods names {method!r} twice; name each method once")
            if METHODS[method].asks_critic and not self.critic:
                raise ParameterError(
                    f"methods names {method!r}, which asks a critic, but critic names none; train one with notebook 20 and "
                    "give its folder, or leave the method out"
                )
        if self.critic_control not in CONTROLS:
            raise unknown_name("critic_control", self.critic_control, CONTROLS)
        for role, name in (("reward", self.reward), ("cost", self.cost)):
            if name not in SCORERS:
                raise unknown_name(f"{role} scorer", name, SCORERS)
        if self.shard >= self.n_shards:
            raise ParameterError(f"shard is {self.shard}; with n_shards {self.n_shards} it must be below that")
        if self.limit is not None and self.limit < 1:
            raise ParameterError(f"limit is {self.limit}; give at least 1 prompt, or null for all")

    def search(self) -> SearchConfig:
        """Return the settings of the search alone."""
        return SearchConfig(**{f.name: getattr(self, f.name) for f in fields(SearchConfig)})


@dataclass(frozen=True, kw_only=True)
class CriticParams(RolloutConfig):
    """Everything one run of notebook 20 may be told; the settings of the rollouts are inherited.

    Attributes
    ----------
    profile, run : str
        Name of the folder, ``runs/<profile>/critics/<run>``.
    policy, prompts
        See `DecodeParams`. Critics are trained on the prompts' split ``train`` and judged on ``test``.
    budget : float
        Safety budget of all critics.
    critics : dict
        The critics to train: for every name its `igcore.critic_config.CriticConfig`, without the budget. The first one,
        for terminal accounting, is shown and searched with.
    limit, test_limit : int, optional
        At most so many prompts of each split.
    rollouts : str, optional
        Folder of another run of notebook 20, seen from `igcore.runs.root`, whose rollouts are used; by default they are drawn.
    search : dict
        `igcore.SearchConfig` of the search by which the first critic is tried, without budget and lengths.
    search_limit : int
        Test prompts that are searched.
    thresholds : list of float
        In [0, 1]; the split ``calibrate`` is searched with each of them, the highest first. Empty: none is.
    alpha, delta : float
        See `igcore.calibrate.learn_then_test`.
    reward, cost, dtype, device, threads
        See `DecodeParams`.
    """

    profile: str
    run: str
    policy: str
    prompts: str
    budget: float
    critics: dict
    limit: int | None = None
    test_limit: int | None = None
    rollouts: str | None = None
    search: dict = field(default_factory=dict)
    search_limit: int = 24
    thresholds: list = field(default_factory=list)
    alpha: float = 0.05
    delta: float = 0.1
    reward: str = "minilm-relevance"
    cost: str = "offensive-language"
    dtype: str = "float32"
    device: str = "auto"
    threads: int = 1

    def __post_init__(self):
        super().__post_init__()
        check_at_least(self, threads=1, limit=2, test_limit=2, search_limit=1)
        if not self.critics:
            raise ParameterError("critics is empty; name at least one critic with its settings, such as {'m': {'layer': 8}}")
        for name, settings in self.critics.items():
            if not isinstance(name, str) or name == "none" or name.startswith(("rollouts-", "critic-only-")):
                raise ParameterError(
                    f"critics names a critic {name!r}; give it a name that is text, not 'none', and none of a folder of the run "
                    "('rollouts-...', 'critic-only-...')"
                )
            _check_own(f"critics[{name!r}]", settings, "budget")
        _check_own("search", self.search, "budget", "max_new_tokens", "block_size")
        self.searching()
        first, config = next(iter(self.configs().items()))
        if config.accounting != "terminal":
            raise ParameterError(
                f"the first critic, {first!r}, is for accounting {config.accounting!r}; put one for 'terminal' first"
            )
        if self.n_shards != 1:
            raise ParameterError(f"n_shards is {self.n_shards}; a critic is trained in one piece, so it must be 1")
        outside = [t for t in self.thresholds if not (isinstance(t, int | float) and 0 <= t <= 1)]
        if outside:
            raise ParameterError(f"thresholds holds {outside[0]!r}; every threshold must be a number from 0 to 1")
        smallest_n(self.alpha, self.delta)  # checks both

    def configs(self) -> dict[str, CriticConfig]:
        """Return the settings of every critic."""
        return {name: from_mapping(CriticConfig, {"budget": self.budget} | settings) for name, settings in self.critics.items()}

    def searching(self) -> SearchConfig:
        """Return the settings of the search."""
        own = {"budget": self.budget, "max_new_tokens": self.max_new_tokens, "block_size": self.block_size}
        return from_mapping(SearchConfig, own | self.search)

    def rolling(self) -> RolloutConfig:
        """Return the settings of the rollouts alone."""
        return RolloutConfig(**{f.name: getattr(self, f.name) for f in fields(RolloutConfig)})


def _check_own(what: str, settings: object, *given: str) -> None:
    """Refuse settings that are no mapping, or that set anew what is given once for the whole run."""
    if not isinstance(settings, Mapping):
        raise ParameterError(f"{what} is {settings!r}; give its settings by name, such as {{'layer': 8}}")
    for name in given:
        if name in settings:
            raise ParameterError(f"{what} sets {name}, which is given once for the whole run; leave it out there")


@dataclass(frozen=True, kw_only=True)
class OutputParams:
    """Which runs the notebooks 40 and 50 read, and where they write.

    Attributes
    ----------
    profile : str
        Folder of `runs` whose finished runs are read.
    figures : str
        Folder, seen from `root`, for pictures; tables go to its subfolder ``tables``.
    """

    profile: str
    figures: str

    def __post_init__(self):
        check_types(self)


@dataclass(frozen=True, kw_only=True)
class StartParams:
    """Parameters of notebook 00.

    Attributes
    ----------
    policy : str
        See `igcore.load_policy`.
    prompt : str
        What is answered.
    budget : float
        Safety budget, in units of the embedded cost.
    seed : int
        Decides every random number.
    """

    policy: str
    prompt: str
    budget: float
    seed: int

    def __post_init__(self):
        check_types(self)


@dataclass(frozen=True, kw_only=True)
class TheoryParams:
    """Parameters of notebook 10.

    Attributes
    ----------
    seed : int
        Of the three random transformers.
    gamma : float
        Task discount, in (0, 1).
    """

    seed: int
    gamma: float

    def __post_init__(self):
        check_types(self)
        if not 0 < self.gamma < 1:
            raise ParameterError(f"gamma is {self.gamma}; it must lie strictly between 0 and 1")


PARAMS = {"start": StartParams, "theory": TheoryParams, "critic": CriticParams, "decode": DecodeParams, "output": OutputParams}


def notebook_params(kind: str, namespace: Mapping):
    """Return the checked parameters of a notebook.

    papermill only prints a line about a parameter that the notebook does not have; checked by name, a misspelling stops the run.

    Parameters
    ----------
    kind : str
        A key of `PARAMS`.
    namespace : mapping
        ``globals()`` of the notebook, in the cell after the parameters.

    Raises
    ------
    ParameterError
        Naming a parameter that is unknown, missing, of the wrong type or out of range.
    """
    return from_mapping(PARAMS[kind], notebook_parameters(namespace))


def notebook_parameters(namespace: Mapping) -> dict:
    """Collect what the cells that begin with ``# Parameters`` have set, the one that papermill injects included.

    Where a kernel keeps no history of its cells (nbval), that is all plain data in the namespace under a lower-case name.
    """
    sources = [source for source in namespace.get("In", ()) if source.startswith("# Parameters")]
    if not sources:
        plain = (bool, int, float, str, list, dict, type(None))
        return {k: v for k, v in namespace.items() if isinstance(v, plain) and k.islower() and not k.startswith("_")}
    targets = [t for source in sources for node in ast.parse(source).body if isinstance(node, ast.Assign) for t in node.targets]
    return {t.id: namespace[t.id] for t in targets if isinstance(t, ast.Name)}
