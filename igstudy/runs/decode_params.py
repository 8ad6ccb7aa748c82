"""Parameters of notebook 30: the settings of the search, and the prompts, models and methods.

This is data only; `igstudy.runs.decode_run.decode_run` loads what it names.
"""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from igcore.errors import ParameterError, no_latents
from igcore.methods import method_of
from igcore.models.registry import ScorerName
from igcore.prompt import Prompt
from igcore.settings import Count, Named, Natural, Threads, settings

from ..prompts import check_prompts
from ..settings import FolderName, Settings, project_settings
from .folders import groups_of

# network that a method needs -> the parameter that names its folder
NETWORKS = {"critic": "critic", "value network": "value"}


def _check_prompts(prompts: Named) -> Named:
    """Refuse an unknown prompt set or option."""
    check_prompts(prompts)
    return prompts


PromptSet = Annotated[Named, AfterValidator(_check_prompts)]


def network_of(method: str) -> str | None:
    """Return the parameter that names the network of a method, or None when it needs no network."""
    return NETWORKS.get(method_of(method).network)


@settings(kw_only=True)
class RunParams:
    """What runs of notebooks 20 and 30 have in common.

    Attributes
    ----------
    profile, run : str
        Name of the run folder, ``runs/<profile>/<run>``; of notebook 20
        ``runs/<profile>/critics/<run>``.
    policy : str or dict
        See `igcore.load_policy`.
    prompts : str or dict
        See `igstudy.prompts.load_prompts`.
    cost : str, dict or list
        See `igcore.load_scorer`.
    dtype, device : str
        See `igcore.load_policy`.
    threads : int
        CPU threads of torch; the last bits of float sums depend on it.
    """

    profile: FolderName
    run: FolderName
    policy: Named
    prompts: PromptSet
    cost: ScorerName = Named("offensive-language")
    dtype: str = "float32"
    device: str = "auto"
    threads: Threads = 1


@settings(kw_only=True)
class DecodeParams(Settings, RunParams):
    """Validated parameters of one run of notebook 30; the settings of the search are inherited.

    Attributes
    ----------
    methods : list of str
        Keys of `igcore.METHODS`, decoded in this order.
    split, limit, hardest
        See `igstudy.prompts.load_prompts`; the hardest are chosen by the cost of the prompt.
    reward : str or dict, optional
        See `igcore.load_scorer`. Without one, answers rank by the policy's own likelihood.
    critic : str, optional
        Folder of a trained critic, seen from `igstudy.files.root`; needed by the methods that use
        one.
    critic_control : str
        ``shuffled`` permutes the critic's verdicts at random among the candidates of a prompt: a
        control search that the critic cannot have helped.
    value : str, optional
        Folder of a trained value network, seen from `igstudy.files.root`; needed by the methods
        that it steers.
    seed : int
        Seed of every random number.
    shard, n_shards : int
        This run decodes the groups whose number is `shard` modulo `n_shards`.
    """

    methods: Annotated[list[str], Field(min_length=1)]
    split: str = "all"
    limit: Count | None = None
    hardest: int = 0
    reward: ScorerName | None = Named("minilm-relevance")
    critic: str | None = None
    critic_control: Literal["none", "shuffled"] = "none"
    value: str | None = None
    seed: int = 0
    shard: Natural = 0
    n_shards: Count = 1

    def __post_init__(self) -> None:
        """Refuse settings that contradict one another."""
        super().__post_init__()
        if self.shard >= self.n_shards:
            raise ParameterError(
                f"shard is {self.shard}; with n_shards {self.n_shards} it must be below that, "
                "because shards count from 0"
            )
        for method in self.methods:
            method_of(method).settings_under(self.search())
            if self.methods.count(method) > 1:
                raise ParameterError(f"methods names {method!r} twice; name each method once")
            role = network_of(method)
            if role and "server" in self.policy.options:
                raise no_latents(method, method_of(method).network)
            if role and not getattr(self, role):
                raise ParameterError(
                    f"methods names {method!r}, which uses a {method_of(method).network}, but "
                    f"{role} names none; train one with notebook 20 and give its folder, or leave "
                    "the method out"
                )

    def groups(self, prompts: Sequence[Prompt]) -> list[list[Prompt]]:
        """Return the groups of prompts of this shard, which may be none."""
        return groups_of(prompts, self.group_size)[self.shard :: self.n_shards]

    def search(self) -> Settings:
        """Return the settings of the search alone."""
        search: Settings = project_settings(Settings, self)
        return search
