"""What parameters of runs need besides `igcore.settings`: the settings of all methods, names of
folders, parts of settings.
"""

from dataclasses import fields
from pathlib import PurePath
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationInfo

from igcore.config import SearchConfig
from igcore.errors import ParameterError, shown
from igcore.settings import NAME, Count, Natural, Weight, settings


def check_name(kind: str, value: Any) -> None:
    """Raise ``ParameterError`` unless a value can name the folder of a run, see `NAME`.

    Parameters
    ----------
    kind : str
        What the value is, such as ``"parameter run"``.
    """
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise ParameterError(
            f"{kind} is {shown(value)}, which cannot name a folder; give text of the letters a to "
            "z and A to Z, digits, _ and - alone"
        )


def _check_inside(folder: str, info: ValidationInfo) -> str:
    """Raise ``ParameterError`` for a folder outside the repository."""
    # the folder is written to, so a parameter file of somebody else must not lead outside
    path = PurePath(folder)
    if path.is_absolute() or not path.parts or ".." in path.parts or "\0" in folder:
        raise ParameterError(
            f"parameter {info.field_name} is {shown(folder)}; give a folder inside the repository, "
            "seen from its root and without .., such as runs/mine/figures"
        )
    return folder


@settings
class ArgsConfig(SearchConfig):
    """Settings of ARGS besides those of `SearchConfig`; the paper's symbol in brackets.

    Attributes
    ----------
    token_top_k : int
        Tokens that are proposed at each position [k].
    policy_weight : float
        Weight of the policy's probability [omega].
    """

    token_top_k: Count = 16
    policy_weight: Weight = 2.5


@settings
class ReControlConfig(SearchConfig):
    """Settings of RE-Control besides those of `SearchConfig`; the paper's symbol in brackets.

    Attributes
    ----------
    value_steps : int
        Gradient steps on the hidden state of each token [n steps].
    value_step_size : float
        Size of a step [step size].
    """

    value_steps: Natural = 30
    value_step_size: Weight = 0.5


@settings
class Settings(ArgsConfig, ReControlConfig):
    """Settings of all methods: those of the search and of the baselines in `igstudy.baselines`."""


FolderName = Annotated[str, Field(pattern=f"^{NAME.pattern}$")]
InsideFolder = Annotated[str, AfterValidator(_check_inside)]  # seen from the repository's root


def project_settings(kind: type, config: Any) -> Any:
    """Return the settings of a kind that `config` holds, with defaults for those that it lacks."""
    known = [field.name for field in fields(kind) if hasattr(config, field.name)]
    return kind(**{name: getattr(config, name) for name in known})


def upcast_settings(kind: type, config: Any) -> Any:
    """Return settings as another kind; fields that they lack get its defaults."""
    # a user may give ARGS a plain SearchConfig, and one guard may run every method
    return config if isinstance(config, kind) else project_settings(kind, config)
