"""Parameters of notebook 20: rollouts, and the critics to train."""

from typing import Annotated

from pydantic import Field

from igcore.config import Checks
from igcore.errors import ParameterError
from igcore.models.registry import ScorerName
from igcore.settings import Budget, Count, Named, Options, settings

from ..baselines.value_training import ValueConfig
from ..settings import FolderName, project_settings
from ..training.config import CriticConfig
from .decode_params import RunParams

Several = Annotated[int, Field(ge=2)]


@settings(kw_only=True)
class RolloutConfig:
    """How rollouts are sampled.

    Attributes
    ----------
    n_rollouts : int
        Responses per prompt. With `rollouts` it is not read, and neither is the seed: that run has
        decided both.
    max_new_tokens : int
        Length at which a response is finished [T].
    block_size : int
        Policy tokens between the prefixes that the cost model scores, for accountings that look
        before the end.
    checks : str
        Where a search under ``peak`` will look at the cost, see `igcore.SearchConfig`.
    group_size : int
        Prompts decoded together; part of the settings, because float sums depend on it in their
        last bits.
    seed : int
        With (prompt, response, position) it decides every token. A search with the same seed has
        the same random numbers.
    """

    n_rollouts: Count = 5
    max_new_tokens: Count = 32
    block_size: Count = 8
    checks: Checks = "word"
    group_size: Count = 32
    seed: int = 1


@settings(kw_only=True)
class CriticParams(RolloutConfig, RunParams):
    """Validated parameters of one run of notebook 20; the settings of the rollouts are inherited.

    Critics are trained on the split ``train`` of the prompts and evaluated on ``test``.

    Attributes
    ----------
    budget : float
        Safety budget of all critics.
    critics : dict
        The critics to train: for every name its `CriticConfig`, without the budget. It may be empty
        if a value network is trained.
    value : dict, optional
        `ValueConfig` of a value network for RE-Control; by default none is trained.
    limit, test_limit : int, optional
        Maximum number of prompts of each split.
    rollouts : str, optional
        Folder of another run of notebook 20, seen from `igstudy.files.root`, whose rollouts are
        reused; by default new ones are sampled.
    reward : str or dict
        See `igcore.load_scorer`.
    """

    budget: Budget
    critics: dict[FolderName, Options]
    value: Options | None = None
    limit: Several | None = None
    test_limit: Several | None = None
    rollouts: str | None = None
    reward: ScorerName = Named("minilm-relevance")

    def __post_init__(self) -> None:
        """Refuse settings that contradict one another, and build those of every part once."""
        for name, options in self.critics.items():
            if name in ("none", "value") or name.startswith("rollouts-"):
                raise ParameterError(
                    f"critics names a critic {name!r}; give it another name than 'none', 'value' "
                    "and 'rollouts-...'"
                )
            _check_own(f"critics[{name!r}]", options)
        if not self.valuing() and not self.critics:
            raise ParameterError("critics is {} and value is null; name a network to train")
        self.configs()  # which refuses settings that no critic has

    def configs(self) -> dict[str, CriticConfig]:
        """Return the settings of every critic."""
        return {
            name: CriticConfig(budget=self.budget, checks=self.checks, **options)
            for name, options in self.critics.items()
        }

    def valuing(self) -> ValueConfig | None:
        """Return the settings of the value network, or None when none is to be trained."""
        return None if self.value is None else ValueConfig(**self.value)

    def rolling(self) -> RolloutConfig:
        """Return the settings of the rollouts alone."""
        rolling: RolloutConfig = project_settings(RolloutConfig, self)
        return rolling


def _check_own(part: str, options: Options) -> None:
    """Refuse options that repeat a setting of the whole run."""
    for name in ("budget", "max_new_tokens", "block_size", "checks"):
        if name in options:
            raise ParameterError(
                f"{part} sets {name}, which is given once for the whole run; leave it out there"
            )
