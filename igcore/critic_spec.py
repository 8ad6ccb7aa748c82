"""What a critic was trained for, and whether that is what it is given to. Knows names, hashes and settings; runs nothing."""

from dataclasses import dataclass

from .config import SearchConfig, check_types
from .errors import ParameterError
from .methods import METHODS
from .policy import Policy
from .scorers import Scorer


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What a critic is and what it was trained for.

    Attributes
    ----------
    policy, policy_digest, cost, cost_digest, reward, reward_digest : str
        Names and hashes; a critic answers for no others.
    accounting, gamma_safety
        How costs use up the budget, see `igcore.SearchConfig`.
    budget, budget_high : float
        Budgets that it was trained on: all between the two.
    gamma_task : float
        Discount of the task cost.
    max_new_tokens : int
        Length T at which responses finished.
    features : str
        A key of `igcore.latent.FEATURES`.
    layer : int or None
        The middle layer of features ``m``.
    use_z : bool
        Whether it is told z_t.
    n_layers, kv_width, hidden : int
        Of the policy: layers, keys and values of one token in one layer, hidden state.
    width : int
        Of the critic [4096 in the paper].
    """

    policy: str
    policy_digest: str
    cost: str
    cost_digest: str
    reward: str
    reward_digest: str
    accounting: str
    gamma_safety: float
    budget: float
    budget_high: float
    gamma_task: float
    max_new_tokens: int
    features: str
    layer: int | None
    use_z: bool
    n_layers: int
    kv_width: int
    hidden: int
    width: int

    def __post_init__(self):
        check_types(self)

    def check_scorers(self, policy: Policy, cost: Scorer, reward: Scorer | None = None) -> None:
        """Raise ``ParameterError`` unless the critic was trained for these, by name and hash; a reward is checked when given."""
        for role, given in (("policy", policy), ("cost", cost), ("reward", reward)):
            name, made = getattr(self, role), getattr(self, f"{role}_digest")
            if given is not None and (given.name, given.digest) != (name, made):
                raise ParameterError(
                    f"the critic was trained for {role} {name!r} of hash {made[:12]!r}, not for {given.name!r} of hash "
                    f"{given.digest[:12]!r}; give it that {role}, or train a critic for this one"
                )

    def check_budget(self, budget: float) -> None:
        """Raise ``ParameterError`` unless the critic was trained for this budget."""
        if not self.budget <= budget <= self.budget_high:
            raise ParameterError(
                f"budget is {budget}, but the critic was trained for budgets from {self.budget} to {self.budget_high}; choose one "
                "of these, or train a critic for this one"
            )


def check_critic(method: str, critic, policy: Policy, reward: Scorer, cost: Scorer, settings: SearchConfig) -> None:
    """Refuse a missing critic, and one that was trained for something else.

    Parameters
    ----------
    critic : Critic or None
        Not looked at for a method that asks none. One without a ``spec`` does not say what it was trained for and is believed.
    settings : SearchConfig
        The method's effective settings, see `igcore.methods.settings_of`.

    Raises
    ------
    ParameterError
        Naming what the critic was trained for and what it was given to.
    """
    if not METHODS[method].asks_critic:
        return
    if critic is None:
        raise ParameterError(f"method {method!r} asks a critic; train one with notebook 20 and give it to decode as critic=")
    spec = getattr(critic, "spec", None)
    if spec is None:
        return
    spec.check_scorers(policy, cost, reward)
    for name in ("accounting", "gamma_safety", "gamma_task", "max_new_tokens"):
        made, value = getattr(spec, name), getattr(settings, name)
        if value != made:
            raise ParameterError(
                f"the critic was trained for {name} {made!r}, but {method!r} runs with {value!r}; set {name} to {made!r} where the "
                "method leaves it open, or train a critic for this one"
            )
    spec.check_budget(settings.budget)
