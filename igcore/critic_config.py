"""Settings of rollouts, of networks that learn from them, and of notebook 20. Knows what a value may be; runs nothing."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from .budget import check_accounting, start
from .calibrate import smallest_n
from .config import SearchConfig, check_at_least, check_name, check_types, from_mapping
from .errors import ParameterError, unknown_name
from .latent import FEATURES
from .prompts import check_prompts

PRECISIONS = ("no", "bf16")


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How rollouts are drawn.

    Attributes
    ----------
    n_rollouts : int
        Responses per prompt.
    max_new_tokens : int
        Length at which a response is finished [T].
    block_size : int
        Policy tokens between the prefixes that the cost model scores, for accountings that look before the end.
    group_size : int
        Prompts decoded together; part of the settings, because float sums depend on it in their last bits.
    seed : int
        With (prompt, response, position) it decides every token. A search with the same seed draws the same numbers.
    shard, n_shards : int
        These rollouts are of the groups whose number is `shard` modulo `n_shards`.
    """

    n_rollouts: int = 5
    max_new_tokens: int = 32
    block_size: int = 8
    group_size: int = 32
    seed: int = 1
    shard: int = 0
    n_shards: int = 1

    def __post_init__(self):
        check_types(self)
        check_at_least(self, n_rollouts=1, max_new_tokens=1, block_size=1, group_size=1, shard=0, n_shards=1)
        if self.shard >= self.n_shards:
            raise ParameterError(f"shard is {self.shard}; with n_shards {self.n_shards} it must be below that")


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How a network is trained on rollouts; the paper's value for its critic in brackets.

    Attributes
    ----------
    width : int
        Of its layers [4096].
    dropout : float
        In [0, 1), between its layers.
    lr, weight_decay : float
        Of AdamW [lr 1.0e-5].
    epochs, batch_size : int
        At most so many passes [50], over batches of so many rollouts [8], all processes together.
    patience : int
        Training stops after so many epochs without a lower loss on the validation split; the best epoch is kept.
    validation : float
        Share of the prompts, in (0, 1), that only decide when to stop. All rollouts of a prompt are on one side.
    mixed_precision : str
        ``no`` or ``bf16``.
    memory_gb : float
        Latents are computed once and held in memory when they take at most so many GiB, else made again for every batch.
    seed : int
        Decides weights, order, dropout and whatever else is drawn.
    """

    width: int = 64
    dropout: float = 0.1
    lr: float = 1e-3
    weight_decay: float = 0.01
    epochs: int = 30
    batch_size: int = 32
    patience: int = 3
    validation: float = 0.15
    mixed_precision: str = "no"
    memory_gb: float = 4.0
    seed: int = 0

    def __post_init__(self):
        check_types(self)
        check_at_least(self, width=1, lr=0, weight_decay=0, epochs=1, batch_size=1, patience=1, memory_gb=0, dropout=0, seed=0)
        if self.mixed_precision not in PRECISIONS:
            raise unknown_name("mixed_precision", self.mixed_precision, PRECISIONS)
        if not 0 < self.validation < 1:
            raise ParameterError(f"parameter validation is {self.validation}; it must lie between 0 and 1")
        if self.dropout >= 1:
            raise ParameterError(f"parameter dropout is {self.dropout}; it must be below 1")


@dataclass(frozen=True, kw_only=True)
class CriticConfig(TrainingConfig):
    """Settings of a critic and its training; how it is trained is inherited.

    Attributes
    ----------
    budget : float
        Safety budget [d], in units of the cost model.
    budget_high : float, optional
        When given, every rollout gets a budget drawn evenly from `budget` to this, anew in every epoch; its label and z follow, so
        that with `use_z` one critic serves all budgets between them.
    accounting, gamma_safety
        See `igcore.SearchConfig`. ``terminal`` is for costs that only exist for finished answers.
    gamma_task : float
        Discount of the task cost, in (0, 1] [.999].
    features : str
        A key of `igcore.latent.FEATURES` [``ho``].
    layer : int, optional
        Middle layer of features ``m``, from 0: the embedded policies are read best at 8 of 30.
    use_z : bool
        Whether the critic is told z_t.
    f2_weight : float
        Weight of the squared error of f2 in units of its standard deviation.
    """

    budget: float
    budget_high: float | None = None
    accounting: str = "terminal"
    gamma_safety: float = 1.0
    gamma_task: float = 0.999
    features: str = "m"
    layer: int | None = None
    use_z: bool = True
    f2_weight: float = 0.2

    def __post_init__(self):
        super().__post_init__()  # checks the types of all fields, these included
        start(self.budget)
        check_accounting(self.accounting)
        check_at_least(self, budget_high=self.budget, f2_weight=0)
        if self.features not in FEATURES:
            raise unknown_name("features", self.features, FEATURES)
        for name in ("gamma_safety", "gamma_task"):
            if not 0 < getattr(self, name) <= 1:
                raise ParameterError(f"parameter {name} is {getattr(self, name)}; it must lie in (0, 1]")


@dataclass(frozen=True, kw_only=True)
class ValueConfig(TrainingConfig):
    """Settings of a value network, see `igcore.value`: those of any training, with the embedded policies' own defaults.

    RE-Control's public code has width 4096, lr 1.0e-4, 100 epochs and batches of 512.

    Attributes
    ----------
    n_prompts : int, optional
        The network learns from, and is judged on, the rollouts of at most so many prompts, the first by id, because o_t takes a
        pass through all layers of the policy. By default of all.
    """

    width: int = 128
    lr: float = 3e-4
    n_prompts: int | None = None

    def __post_init__(self):
        super().__post_init__()
        check_at_least(self, n_prompts=2)


@dataclass(frozen=True, kw_only=True)
class CriticParams(RolloutConfig):
    """Everything one run of notebook 20 may be told; the settings of the rollouts are inherited.

    Attributes
    ----------
    profile, run : str
        Name of the folder, ``runs/<profile>/critics/<run>``.
    policy, prompts
        See `igcore.decode_params.DecodeParams`. Critics are trained on the prompts' split ``train`` and judged on ``test``.
    budget : float
        Safety budget of all critics.
    critics : dict
        The critics to train: for every name its `CriticConfig`, without the budget. The first one,
        for terminal accounting, is shown and searched with.
    value : dict, optional
        `ValueConfig` of a value network for RE-Control; by default none is trained.
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
        See `igcore.decode_params.DecodeParams`.
    """

    profile: str
    run: str
    policy: str | dict
    prompts: str | dict
    budget: float
    critics: dict
    value: dict | None = None
    limit: int | None = None
    test_limit: int | None = None
    rollouts: str | None = None
    search: dict = field(default_factory=dict)
    search_limit: int = 24
    thresholds: list = field(default_factory=list)
    alpha: float = 0.05
    delta: float = 0.1
    reward: str | dict = "minilm-relevance"
    cost: str | dict = "offensive-language"
    dtype: str = "float32"
    device: str = "auto"
    threads: int = 1

    def __post_init__(self):
        super().__post_init__()
        check_name("parameter profile", self.profile)
        check_name("parameter run", self.run)
        check_at_least(self, threads=1, limit=2, test_limit=2, search_limit=1)
        check_prompts(self.prompts)
        if not self.critics:
            raise ParameterError("critics is empty; name at least one critic with its settings, such as {'m': {'layer': 8}}")
        for name, settings in self.critics.items():
            check_name("the name of a critic in critics", name)
            if name in ("none", "value") or name.startswith(("rollouts-", "critic-only-")):
                raise ParameterError(
                    f"critics names a critic {name!r}; give it a name that is not 'none', and none of a folder of the run "
                    "('value', 'rollouts-...', 'critic-only-...')"
                )
            _check_own(f"critics[{name!r}]", settings, "budget")
        _check_own("search", self.search, "budget", "max_new_tokens", "block_size")
        self.searching(), self.valuing()
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

    def valuing(self) -> ValueConfig | None:
        """Return the settings of the value network, if one is wanted."""
        return None if self.value is None else from_mapping(ValueConfig, self.value)

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
