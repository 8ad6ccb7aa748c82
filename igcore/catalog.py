"""The tables of what has a name: where each policy, method, scorer and prompt set is defined.

A text is imported on first use, so that importing igcore stays light. Other packages add policies,
methods, scorers and prompt sets of their own to these tables; igserve, which may be missing, is
imported when a name is used that it adds. `PARTS` has what lower layers use of higher ones.
"""

from collections.abc import Callable
from importlib.metadata import entry_points
from pkgutil import resolve_name
from typing import Any, TypeVar

from .errors import needs

T = TypeVar("T")

# name -> what makes the scorer with its options, or where that is
SCORERS: dict[str, Callable[..., Any] | str] = {
    "smollm2-harm-2": "igcore.models.head:smollm2_harm_2",
    "classifier": "igcore.models.classifier:Classifier",
    "probe": "igcore.models.head:Probe",
    "guard": "igcore.models.guard:GenerativeGuard",
    "maximum": "igcore.models.registry:Maximum",
    "without-new-numbers": "igcore.rules:without_new_numbers",
    "without-words": "igcore.rules:without_words",
    "without-pattern": "igcore.rules:without_pattern",
    "longest-sentence": "igcore.rules:longest_sentence",
    "length": "igcore.rules:length",
}
PROMPT_SETS: dict[str, Callable[[], list[str]] | str] = {  # name -> its texts, or where they are
    "mild": "igcore.models.prompts:mild",
    "benign": "igcore.models.prompts:benign",
}
POLICIES: dict[str, Any] = {  # name -> a `igcore.models.policies.PolicyEntry`, or where that is
    "smollm2-raw": "igcore.models.policies:SMOLLM2_RAW",
    "smollm2-chat": "igcore.models.policies:SMOLLM2_CHAT",
}
METHODS: dict[str, Any] = {}  # those besides the package's own, see `igcore.methods.METHODS`
PARTS = {  # name used by a lower layer, by `room` -> where it is defined
    "answers_in": "igcore.tools.answers:answers_in",
    "Recorder": "igcore.watch.record:Recorder",
    "Tree": "igcore.watch.tree:Tree",
    "answer_html": "igcore.watch.html:answer_html",
    "receipt_of": "igcore.tools.receipt:receipt_of",
    "rendered": "igcore.models.templates:rendered",
    "written_by": "igcore.models.templates:written_by",
}


def found(entry: T | str) -> T:
    """Return an entry of a table; a text is imported as ``module:name``."""
    return resolve_name(entry) if isinstance(entry, str) else entry


def extend() -> None:
    """Import igserve, which adds its names to these tables.

    Its entry point in the group ``igcore`` says where an installed one is; else it may lie beside
    igcore.

    Raises
    ------
    ParameterError
        When there is no igserve.
    """
    installed = [point.value for point in entry_points(group="igcore", name="igserve")]
    for module in installed or ["igserve"]:
        needs(module)


def room(name: str) -> Any:
    """Return a function or class of `PARTS`, and import its module.

    Raises
    ------
    KeyError
        For a name that is not in `PARTS`.
    ParameterError
        For a name that igserve adds, when it is not installed.
    """
    if name not in PARTS:
        extend()
    return resolve_name(PARTS[name])
