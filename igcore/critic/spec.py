"""The specification of a trained network, and the check that a search uses it as specified."""

from typing import ClassVar

from ..config import SearchConfig
from ..errors import ParameterError
from ..policy import Policy
from ..scorers import Scorer
from ..settings import Number, settings


@settings(kw_only=True)
class Origin:
    """The policy, scorers and sizes that a network was trained for.

    Attributes
    ----------
    policy, policy_digest, cost, cost_digest, reward, reward_digest : str
        Names and hashes; the network is valid for no others.
    max_new_tokens : int
        Length T at which the rollouts were finished.
    hidden, width : int
        Size of the policy's hidden state, and of the network's layers.
    """

    KIND: ClassVar = "network"  # its name in messages
    SAME: ClassVar[tuple[str, ...]] = (
        "max_new_tokens",
    )  # settings in which search and training must agree

    policy: str
    policy_digest: str
    cost: str
    cost_digest: str
    reward: str
    reward_digest: str
    max_new_tokens: int
    hidden: int
    width: int

    def check_scorers(self, policy: Policy, cost: Scorer, reward: Scorer | None = None) -> None:
        """Raise ``ParameterError`` unless it was trained for these, by name and hash.

        The reward is checked when given.
        """
        for role, part in (("policy", policy), ("cost", cost), ("reward", reward)):
            name, digest = getattr(self, role), getattr(self, f"{role}_digest")
            if part is not None and (part.name, part.digest) != (name, digest):
                raise ParameterError(
                    f"the {self.KIND} was trained for {role} {name!r} of hash {digest[:12]!r}, not "
                    f"for {part.name!r} of hash {part.digest[:12]!r}; give it that {role}, or "
                    f"train a {self.KIND} for this one"
                )

    def check_settings(self, method: str, settings: SearchConfig) -> None:
        """Raise ``ParameterError`` unless it was trained for the settings of a method."""
        for name in self.SAME:
            trained, value = getattr(self, name), getattr(settings, name)
            if value != trained:
                raise ParameterError(
                    f"the {self.KIND} was trained for {name} {trained!r}, but {method!r} runs with "
                    f"{value!r}; set {name} to {trained!r} where the method leaves it open, or "
                    f"train a {self.KIND} for this one"
                )


@settings(kw_only=True)
class Spec(Origin):
    """The specification of a critic; names, hashes and sizes are inherited.

    Attributes
    ----------
    accounting, checks, gamma_safety
        How costs use up the budget, see `igcore.SearchConfig`.
    budget, budget_high : float
        It was trained on all budgets from the one to the other.
    gamma_task : float
        Discount of the task cost.
    features : str
        One of `igcore.critic.latent.FEATURES`.
    layer : int or None
        The middle layer of features ``m``.
    use_z : bool
        Whether z_t is an input.
    n_layers, kv_width : int
        Of the policy: number of layers, and size of the KV cache of one token in one layer.
    """

    KIND: ClassVar = "critic"
    SAME: ClassVar[tuple[str, ...]] = (
        "accounting",
        "checks",
        "gamma_safety",
        "gamma_task",
        "max_new_tokens",
    )

    accounting: str
    checks: str
    gamma_safety: Number
    budget: Number
    budget_high: Number
    gamma_task: Number
    features: str
    layer: int | None
    use_z: bool
    n_layers: int
    kv_width: int

    def check_settings(self, method: str, settings: SearchConfig) -> None:
        """Raise ``ParameterError`` unless it was trained for these settings and this budget."""
        super().check_settings(method, settings)
        self.check_budget(settings.budget)

    def check_budget(self, budget: float) -> None:
        """Raise ``ParameterError`` unless the critic was trained for this budget."""
        if not self.budget <= budget <= self.budget_high:
            raise ParameterError(
                f"budget is {budget}, but the critic was trained for budgets from {self.budget} to "
                f"{self.budget_high}; choose one of these, or train a critic for this one"
            )
