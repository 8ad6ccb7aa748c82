"""What a network was trained for, and whether that is what it is used for."""

from dataclasses import dataclass

from ..config import SearchConfig, check_types
from ..errors import ParameterError
from ..policy import Policy
from ..scorers import Scorer


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What any network that was trained on rollouts is for.

    Attributes
    ----------
    policy, policy_digest, cost, cost_digest, reward, reward_digest : str
        Names and hashes; the network answers for no others.
    max_new_tokens : int
        Length T at which responses finished.
    hidden, width : int
        Size of the policy's hidden state, and of the network's layers.
    """

    KIND = "network"  # what it is called
    SAME = ("max_new_tokens",)  # settings of a search that must be those of the training

    policy: str
    policy_digest: str
    cost: str
    cost_digest: str
    reward: str
    reward_digest: str
    max_new_tokens: int
    hidden: int
    width: int

    def __post_init__(self):
        check_types(self)

    def check_scorers(self, policy: Policy, cost: Scorer, reward: Scorer | None = None) -> None:
        """Raise ``ParameterError`` unless it was trained for these, by name and hash; a reward is
        checked when given.
        """
        for role, given in (("policy", policy), ("cost", cost), ("reward", reward)):
            name, made = getattr(self, role), getattr(self, f"{role}_digest")
            if given is not None and (given.name, given.digest) != (name, made):
                raise ParameterError(
                    f"the {self.KIND} was trained for {role} {name!r} of hash {made[:12]!r}, "
                    f"not for {given.name!r} of hash "
                    f"{given.digest[:12]!r}; give it that {role}, or train a {self.KIND} for "
                    f"this one"
                )

    def check_settings(self, method: str, settings: SearchConfig) -> None:
        """Raise ``ParameterError`` unless it was trained for the settings of a method."""
        for name in self.SAME:
            made, value = getattr(self, name), getattr(settings, name)
            if value != made:
                raise ParameterError(
                    f"the {self.KIND} was trained for {name} {made!r}, but {method!r} runs "
                    f"with {value!r}; set {name} to {made!r} "
                    f"where the method leaves it open, or train a {self.KIND} for this one"
                )


@dataclass(frozen=True, kw_only=True)
class Spec(Origin):
    """What a critic is and what it was trained for; names, hashes and sizes are inherited, its
    width is 4096 in the paper.

    Attributes
    ----------
    accounting, gamma_safety
        How costs use up the budget, see `igcore.SearchConfig`.
    budget, budget_high : float
        Budgets that it was trained on: all between the two.
    gamma_task : float
        Discount of the task cost.
    features : str
        A key of `igcore.critic.latent.FEATURES`.
    layer : int or None
        The middle layer of features ``m``.
    use_z : bool
        Whether it is told z_t.
    n_layers, kv_width : int
        Of the policy: layers, keys and values of one token in one layer.
    """

    KIND = "critic"
    SAME = ("accounting", "gamma_safety", "gamma_task", "max_new_tokens")

    accounting: str
    gamma_safety: float
    budget: float
    budget_high: float
    gamma_task: float
    features: str
    layer: int | None
    use_z: bool
    n_layers: int
    kv_width: int

    def check_settings(self, method: str, settings: SearchConfig) -> None:
        super().check_settings(method, settings)
        self.check_budget(settings.budget)

    def check_budget(self, budget: float) -> None:
        """Raise ``ParameterError`` unless the critic was trained for this budget."""
        if not self.budget <= budget <= self.budget_high:
            raise ParameterError(
                f"budget is {budget}, but the critic was trained for budgets from "
                f"{self.budget} to {self.budget_high}; choose one "
                "of these, or train a critic for this one"
            )
