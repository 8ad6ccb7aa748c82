"""Parameters of notebook 20: rollouts, the critics to train, and the search that tries them.

The module stands alone, as `igcore.runs.decode_params` does: the identity of rollouts and networks
hashes the code that they import, and certificates are no part of that.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from ..baselines.value_training import ValueConfig
from ..config import SearchConfig, check_at_least, check_name, check_threads, from_mapping
from ..critic.config import CriticConfig, RolloutConfig
from ..errors import ParameterError
from ..models.prompts import check_prompts
from ..report.certify import smallest_n


@dataclass(frozen=True, kw_only=True)
class CriticParams(RolloutConfig):
    """Validated parameters of one run of notebook 20; the settings of the rollouts are inherited.

    Attributes
    ----------
    profile, run : str
        Name of the folder, ``runs/<profile>/critics/<run>``.
    policy, prompts
        See `igcore.runs.decode_params.DecodeParams`. Critics are trained on the prompts'
        split ``train`` and evaluated on ``test``.
    budget : float
        Safety budget of all critics.
    critics : dict
        The critics to train: for every name its `CriticConfig`, without the budget. The first one
        must be for terminal accounting; notebook 20 shows it and searches with it.
    value : dict, optional
        `ValueConfig` of a value network for RE-Control; by default none is trained.
    limit, test_limit : int, optional
        Maximum number of prompts of each split.
    rollouts : str, optional
        Folder of another run of notebook 20, seen from `igcore.folders.root`, whose rollouts are
        reused; by default new ones are sampled.
    search : dict
        `igcore.SearchConfig` of the search that tries the first critic, without budget and lengths.
    search_limit : int
        Number of test prompts to search.
    thresholds : list of float
        In [0, 1]; the split ``calibrate`` is searched at each of them, the highest first. If empty,
        it is not searched.
    alpha, delta : float
        See `igcore.report.certify.learn_then_test`.
    reward, cost, dtype, device, threads
        See `igcore.runs.decode_params.DecodeParams`.
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
        """Refuse settings that are out of range or contradict one another."""
        super().__post_init__()
        check_name("parameter profile", self.profile)
        check_name("parameter run", self.run)
        check_at_least(self, limit=2, test_limit=2, search_limit=1)
        check_threads(self.threads)
        check_prompts(self.prompts)
        if not self.critics:
            raise ParameterError(
                "critics is empty; name at least one critic with its settings, such as {'m': "
                "{'layer': 8}}"
            )
        for name, settings in self.critics.items():
            check_name("the name of a critic in critics", name)
            if name in ("none", "value") or name.startswith(("rollouts-", "critic-only-")):
                raise ParameterError(
                    f"critics names a critic {name!r}; give it a name that is not 'none', and none "
                    "of a folder of the run ('value', 'rollouts-...', 'critic-only-...')"
                )
            _check_own(f"critics[{name!r}]", settings, "budget")
        _check_own("search", self.search, "budget", "max_new_tokens", "block_size")
        self.searching(), self.valuing()
        first, config = next(iter(self.configs().items()))
        if config.accounting != "terminal":
            raise ParameterError(
                f"the first critic, {first!r}, is for accounting {config.accounting!r}; put one "
                "for 'terminal' first"
            )
        if self.n_shards != 1:
            raise ParameterError(
                f"n_shards is {self.n_shards}; a critic is trained in one piece, so it must be 1"
            )
        outside = [t for t in self.thresholds if not (isinstance(t, int | float) and 0 <= t <= 1)]
        if outside:
            raise ParameterError(
                f"thresholds holds {outside[0]!r}; every threshold must be a number from 0 to 1"
            )
        smallest_n(self.alpha, self.delta)  # checks both

    def configs(self) -> dict[str, CriticConfig]:
        """Return the settings of every critic."""
        return {
            name: from_mapping(CriticConfig, {"budget": self.budget} | settings)
            for name, settings in self.critics.items()
        }

    def valuing(self) -> ValueConfig | None:
        """Return the settings of the value network, or None when none is to be trained."""
        return None if self.value is None else from_mapping(ValueConfig, self.value)

    def searching(self) -> SearchConfig:
        """Return the settings of the search."""
        own = {
            "budget": self.budget,
            "max_new_tokens": self.max_new_tokens,
            "block_size": self.block_size,
        }
        return from_mapping(SearchConfig, own | self.search)

    def rolling(self) -> RolloutConfig:
        """Return the settings of the rollouts alone."""
        return RolloutConfig(**{f.name: getattr(self, f.name) for f in fields(RolloutConfig)})


def _check_own(what: str, settings: object, *given: str) -> None:
    """Refuse settings that are no mapping, or that repeat one given once for the whole run."""
    if not isinstance(settings, Mapping):
        raise ParameterError(
            f"{what} is {settings!r}; give its settings by name, such as {{'layer': 8}}"
        )
    for name in given:
        if name in settings:
            raise ParameterError(
                f"{what} sets {name}, which is given once for the whole run; leave it out there"
            )
