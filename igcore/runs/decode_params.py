"""Parameters of notebook 30: the settings of the search, and the prompts, models and methods.

This is data only; `igcore.runs.decode_run.resolve` loads what it names. The module stands alone
because a run's identity hashes the code that decoding imports, and neither judges nor the training
of critics may change that hash.
"""

from dataclasses import dataclass, fields

from ..baselines.args import ArgsConfig
from ..baselines.re_control import ReControlConfig
from ..beams import METHODS, method_of, settings_of
from ..config import check_at_least, check_name, check_threads
from ..errors import ParameterError, unknown_name
from ..models.prompts import check_prompts
from ..models.registry import check_scorer

CONTROLS = ("none", "shuffled")
# network that a method needs -> the parameter that names its folder
NETWORKS = {"critic": "critic", "value network": "value"}


@dataclass(frozen=True)
class Settings(ArgsConfig, ReControlConfig):
    """Settings of all methods: those of the search, of ARGS and of RE-Control."""


def network_of(method: str) -> str | None:
    """Return the parameter that names the network of a method, or None when it needs no network."""
    return NETWORKS.get(method_of(method).network)


@dataclass(frozen=True, kw_only=True)
class DecodeParams(Settings):
    """Validated parameters of one run of notebook 30; the settings of the search are inherited.

    Attributes
    ----------
    profile, run : str
        Name of the run folder, ``runs/<profile>/<run>``.
    policy : str or dict
        See `igcore.load_policy`.
    methods : list of str
        Keys of `igcore.METHODS`, decoded in this order.
    prompts, split, limit, hardest
        See `igcore.load_prompts`; the hardest are chosen by the cost of the prompt.
    reward, cost : str or dict
        See `igcore.load_scorer`.
    critic : str, optional
        Folder of a trained critic, seen from `igcore.folders.root`; needed by the methods that use
        one.
    critic_control : str
        ``shuffled`` permutes the critic's scores at random among the candidates: a control search
        that the critic cannot have helped.
    value : str, optional
        Folder of a trained value network, seen from `igcore.folders.root`; needed by the methods
        that it steers.
    seed : int
        Seed of every random number.
    dtype, device : str
        See `igcore.load_policy`.
    threads : int
        CPU threads of torch; the last bits of float sums depend on it.
    memory_gb : float, optional
        See `igcore.decode`.
    shard, n_shards : int
        This run decodes the groups whose number is `shard` modulo `n_shards`.
    """

    profile: str
    run: str
    policy: str | dict
    methods: list[str]
    prompts: str | dict
    split: str = "all"
    limit: int | None = None
    hardest: int = 0
    reward: str | dict = "minilm-relevance"
    cost: str | dict = "offensive-language"
    critic: str | None = None
    critic_control: str = "none"
    value: str | None = None
    seed: int = 0
    dtype: str = "float32"
    device: str = "auto"
    threads: int = 1
    memory_gb: float | None = None
    shard: int = 0
    n_shards: int = 1

    def __post_init__(self):
        """Refuse settings that are out of range or contradict one another."""
        super().__post_init__()  # checks the types of all fields, these included
        check_name("parameter profile", self.profile)
        check_name("parameter run", self.run)
        check_at_least(self, n_shards=1, shard=0)
        check_threads(self.threads)
        if not self.methods:
            raise ParameterError(f"methods is empty; name at least one of {', '.join(METHODS)}")
        for method in self.methods:
            settings_of(method, self.search())
            if self.methods.count(method) > 1:
                raise ParameterError(f"methods names {method!r} twice; name each method once")
            role = network_of(method)
            if role and not getattr(self, role):
                raise ParameterError(
                    f"methods names {method!r}, which asks a {method_of(method).network}, but "
                    f"{role} names none; train one with notebook 20 and give its folder, or leave "
                    "the method out"
                )
        if self.critic_control not in CONTROLS:
            raise unknown_name("critic_control", self.critic_control, CONTROLS)
        for role, scorer in (("reward", self.reward), ("cost", self.cost)):
            check_scorer(scorer, f"{role} scorer")
        check_prompts(self.prompts)
        if self.shard >= self.n_shards:
            raise ParameterError(
                f"shard is {self.shard}; with n_shards {self.n_shards} it must be below that"
            )
        if self.limit is not None and self.limit < 1:
            raise ParameterError(f"limit is {self.limit}; give at least 1 prompt, or null for all")

    def search(self) -> Settings:
        """Return the settings of the search alone."""
        return Settings(**{f.name: getattr(self, f.name) for f in fields(Settings)})
