"""The errors that a user may meet.

Every message is one sentence: it names the value, says what is allowed and what to do.
"""

import difflib
import importlib
import reprlib
from collections.abc import Iterable
from types import ModuleType


class IgcoreError(Exception):
    """Base of every error that the caller can fix; commands print it as a line and exit with 1."""


class ParameterError(IgcoreError, ValueError):
    """A parameter is unknown, mistyped or inconsistent with another."""


class AssetError(IgcoreError):
    """A pinned download is missing, damaged or cannot be fetched."""


class PolicyError(IgcoreError):
    """A language model cannot be decoded from."""


class ScorerError(IgcoreError):
    """A scorer failed on more of a run's texts than are allowed to fail."""


class ScorerWarning(UserWarning, ScorerError):
    """A scorer failed, its scores depend on more than the text, or they do not fit the budget.

    It is a ``ScorerError``, too, so that ``python -W error`` ends a run as any error of a scorer.
    """


class RunError(IgcoreError):
    """A run folder cannot be read, written or trusted."""


MOST_NAMES = 16  # in an error message
SHORT = reprlib.Repr()
SHORT.maxstring = SHORT.maxlong = SHORT.maxother = 300  # they are cut in the middle


def shown(value: object, most: int = 100) -> str:
    """Return a value as code, cut to a number of characters; a large or deep one costs no more."""
    try:
        return SHORT.repr(value)[:most]
    except ValueError:  # Python writes no number of thousands of digits
        return "a huge number"


def one_line(error: BaseException) -> str:
    """Return the type and the message of any error, in one line."""
    try:
        message = " ".join(str(error).split())
    except Exception:  # one that cannot even be written
        message = "without a message"
    return f"{type(error).__name__}: {message}"


def unknown_name(kind: str, name: object, allowed: Iterable[str], hint: str = "") -> ParameterError:
    """Return the error for an unknown name, with the nearest allowed name.

    Parameters
    ----------
    kind : str
        What is named, such as ``"method"``.
    name : object
        The value given.
    allowed : iterable of str
        Every allowed name.
    hint : str
        Anything else that would be accepted, appended to the sentence.
    """
    allowed = sorted(allowed)
    written = name[:100] if isinstance(name, str) else shown(name)
    near = difflib.get_close_matches(written, allowed, n=1, cutoff=0.5)
    guess = f" did you mean {near[0]!r}?" if near else ""
    if near and len(allowed) > MOST_NAMES:  # the nearest says more than a long list
        return ParameterError(f"unknown {kind} {shown(name)};{guess}")
    return ParameterError(
        f"unknown {kind} {shown(name)};{guess} allowed: {', '.join(allowed) or 'none'}{hint}"
    )


def no_latents(method: str, network: str) -> ParameterError:
    """Return the error for a method whose network reads a model on a server."""
    return ParameterError(
        f"method {method!r} uses a {network}, which reads the hidden states of the policy, and a "
        "server does not give them; load the policy here, or name another method"
    )


def needs(module: str, package: str = "") -> ModuleType:
    """Return a module of an optional package.

    Parameters
    ----------
    module : str
        Its dotted name, such as ``"sklearn.metrics"``.
    package : str
        What pip installs for it, if it has another name. No extra of ``igcore``: no index has it.

    Raises
    ------
    ParameterError
        When the package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ParameterError(
            f"this needs {error.name or module}; install it by pip install {package or module}"
        ) from error
