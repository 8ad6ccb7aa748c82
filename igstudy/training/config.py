"""Settings of networks trained on rollouts, with their allowed ranges."""

from typing import Annotated, Literal

from pydantic import Field

from igcore.config import Accounting, Checks
from igcore.critic.latent import FEATURES
from igcore.settings import Budget, Count, Discount, Rows, Seed, Share, Weight, one_of, settings


@settings(kw_only=True)
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
        Largest number of passes [50], and rollouts per batch [8].
    patience : int
        Training stops after this many epochs without a lower loss on the validation split; the best
        epoch is kept.
    validation : float
        Share of the prompts, in (0, 1), that only decide when to stop. All rollouts of a prompt are
        in one split.
    mixed_precision : str
        ``no`` or ``bf16``.
    memory_gb : float
        Latents are computed once and kept in memory when they take at most this many GiB; if not,
        they are computed again for every batch.
    seed : int
        Decides the initial weights, the order and dropout.
    """

    # small, because the embedded policies have 135M parameters: the paper's 4096 is for 7B. Trained
    # in minutes on two cores
    width: Rows = 64
    dropout: Annotated[Weight, Field(lt=1)] = 0.1
    lr: Weight = 1e-3
    weight_decay: Weight = 0.01
    epochs: Count = 30
    batch_size: Count = 32
    patience: Count = 3
    validation: Share = 0.15  # with 0 it would never stop early, with 1 learn nothing
    mixed_precision: Literal["no", "bf16"] = "no"
    memory_gb: Weight = 4.0
    seed: Seed = 0


@settings(kw_only=True)
class CriticConfig(TrainingConfig):
    """Settings of a critic and its training; how it is trained is inherited.

    Attributes
    ----------
    budget : float
        Safety budget [d], in units of the cost model.
    accounting, checks, gamma_safety
        See `igcore.SearchConfig`. ``terminal`` is for costs that only exist for finished answers.
    gamma_task : float
        Discount of the task cost, in (0, 1] [.999].
    features : str
        One of `igcore.critic.latent.FEATURES` [``m``].
    layer : int, optional
        Middle layer of features ``m``, from 0; for the embedded policies layer 8 of 30 works best.
    use_z : bool
        Whether z_t is an input of the critic.
    f2_weight : float
        Weight of the squared error of f2 in units of its standard deviation.
    """

    budget: Budget  # no default: only the user knows the unit of the cost model
    # not the default of a search: a critic is for costs that exist at the end only
    accounting: Accounting = "terminal"
    checks: Checks = "word"
    gamma_safety: Discount = 1.0
    gamma_task: Discount = 0.999
    features: Annotated[str, one_of(FEATURES)] = "m"
    layer: int | None = None
    use_z: bool = True
    f2_weight: Weight = 0.2
