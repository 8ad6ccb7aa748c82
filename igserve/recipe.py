"""A guard in a file: its policy, its scorers and the settings of its search, as YAML.

policy: smollm2-chat
cost: smollm2-harm-2
budget: 0.5
keep_shown: true
"""

from collections.abc import Collection
from dataclasses import fields
from pathlib import Path
from typing import Any

from igcore import Guard, ParameterError, SearchConfig
from igcore.critic.network import load_critic
from igcore.files import file_digest
from igcore.models.policies import load_policy
from igcore.models.registry import ScorerName
from igcore.scorers import Scorer
from igcore.settings import Named, settings

from .trust import admit, load_trusted, source_of
from .yamlfile import read_yaml


@settings(kw_only=True)
class Recipe(SearchConfig):
    """The parts of a guard beside the settings of its search, as `igcore.Guard` takes them.

    Attributes
    ----------
    policy : str or dict
        See `igcore.load_policy`.
    cost, reward : str, dict or list
        See `igcore.load_scorer`. A function is of a module below the folder of the file.
    critic : str, optional
        Folder of a trained critic, seen from the folder of the file.
    method : str
        A key of `igcore.METHODS`.
    seed : int
    device, dtype : str
        See `igcore.load_policy`.
    """

    policy: Named
    cost: ScorerName
    reward: ScorerName | None = None
    critic: str | None = None
    method: str = "backtracking"
    seed: int = 0
    device: str = "auto"
    dtype: str = "float32"


def read_recipe(path: Path, allow: Collection[str] = ()) -> Recipe:
    """Return the recipe in a file; nothing that it names is loaded.

    Parameters
    ----------
    allow : collection of str
        Modules of the current folder that it may name, see `igserve.trust.admit`.

    Raises
    ------
    ParameterError
        When it cannot be read, holds other settings, or names a module that is not allowed.
    """
    given = read_yaml(path, "it must be the recipe of a guard")
    admit(given, path, allow)
    try:
        return Recipe(**given)
    except ParameterError as error:
        raise ParameterError(f"{path}: {error}") from None


def guard_of(recipe: Recipe, folder: Path) -> Guard:
    """Return the guard of a recipe that lies in a folder; everything that it names is loaded.

    Raises
    ------
    ParameterError, AssetError, RunError
        As `igcore.Guard`, and for scorers and a critic that cannot be loaded.
    """
    cost, reward = scorers_of(recipe)
    policy = load_policy(recipe.policy, recipe.dtype, recipe.device)
    parts: dict[str, Any] = {"policy": policy, "cost": cost, "reward": reward}
    critic = load_critic(folder / recipe.critic, **parts) if recipe.critic else None
    search = {one.name: getattr(recipe, one.name) for one in fields(SearchConfig)}
    return Guard(**parts, critic=critic, method=recipe.method, seed=recipe.seed, **search)


def scorers_of(recipe: Recipe) -> tuple[Scorer, Scorer | None]:
    """Return cost and reward of a recipe; a function has the digest of its module's file."""
    cost, reward = (
        None if named is None else load_trusted(named, role)
        for role, named in (("cost", recipe.cost), ("reward", recipe.reward))
    )
    for scorer in (cost, reward):
        for part in getattr(scorer, "parts", [scorer]):
            source = source_of(getattr(part, "home", None) or "")
            if source and not part.digest:
                part.digest = file_digest(source)
    assert cost is not None  # a recipe without one was refused
    return cost, reward
