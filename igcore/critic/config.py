"""Settings of rollouts and of networks trained on them, with their allowed ranges."""

from dataclasses import dataclass

from ..budget import check_accounting, start
from ..config import check_at_least, check_types
from ..errors import ParameterError, unknown_name
from .latent import check_features

PRECISIONS = ("no", "bf16")


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How rollouts are sampled.

    Attributes
    ----------
    n_rollouts : int
        Responses per prompt.
    max_new_tokens : int
        Length at which a response is finished [T].
    block_size : int
        Policy tokens between the prefixes that the cost model scores, for accountings that look
        before the end.
    group_size : int
        Prompts decoded together; part of the settings, because float sums depend on it in their
        last bits.
    seed : int
        With (prompt, response, position) it decides every token. A search with the same seed has
        the same random numbers.
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
        check_at_least(
            self, n_rollouts=1, max_new_tokens=1, block_size=1, group_size=1, shard=0, n_shards=1
        )
        if self.shard >= self.n_shards:
            raise ParameterError(
                f"shard is {self.shard}; with n_shards {self.n_shards} it must be below that"
            )


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How a network is trained on rollouts; the paper's value for its critic in brackets.

    Attributes
    ----------
    width : int
        Width of the layers [4096].
    dropout : float
        In [0, 1), between the layers.
    lr, weight_decay : float
        Of AdamW [lr 1.0e-5].
    epochs, batch_size : int
        Largest number of passes [50], and rollouts per batch, of all processes together [8].
    patience : int
        Training stops after so many epochs without a lower loss on the validation split; the best
        epoch is kept.
    validation : float
        Share of the prompts, in (0, 1), that only decide when to stop. All rollouts of a prompt are
        in one split.
    mixed_precision : str
        ``no`` or ``bf16``.
    memory_gb : float
        Latents are computed once and kept in memory when they take at most so many GiB; if not,
        they are computed again for every batch.
    seed : int
        Decides the initial weights, the order, dropout and the budgets of rollouts.
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
        check_at_least(self, width=1, epochs=1, batch_size=1, patience=1)
        check_at_least(self, lr=0, weight_decay=0, dropout=0, memory_gb=0, seed=0)
        if self.mixed_precision not in PRECISIONS:
            raise unknown_name("mixed_precision", self.mixed_precision, PRECISIONS)
        if not 0 < self.validation < 1:  # 0 would never stop, 1 would learn nothing
            raise ParameterError(
                f"parameter validation is {self.validation}; it must lie between 0 and 1"
            )
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
        When given, every rollout has a budget sampled uniformly from [`budget`, `budget_high`],
        anew in every epoch, which decides its label and z. So with `use_z` one critic serves all
        budgets in between.
    accounting, gamma_safety
        See `igcore.SearchConfig`. ``terminal`` is for costs that only exist for finished answers.
    gamma_task : float
        Discount of the task cost, in (0, 1] [.999].
    features : str
        A key of `igcore.critic.latent.FEATURES` [``ho``].
    layer : int, optional
        Middle layer of features ``m``, from 0; for the embedded policies layer 8 of 30 works best.
    use_z : bool
        Whether z_t is an input of the critic.
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
        start(self.budget)  # raises for a budget below 0
        check_accounting(self.accounting)
        check_at_least(self, budget_high=self.budget, f2_weight=0)
        check_features(self.features)
        for name in ("gamma_safety", "gamma_task"):
            value = getattr(self, name)
            if not 0 < value <= 1:
                raise ParameterError(f"parameter {name} is {value}; it must lie in (0, 1]")
