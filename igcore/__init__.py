"""Guarded decoding of frozen language models at inference time: a reproduction of InferenceGuard.

Only the public names; each module's docstring says what it knows.
"""

from .config import SearchConfig
from .errors import AssetError, IgcoreError, ParameterError, RunError, ScorerError
from .methods import METHODS
from .policy import POLICIES, Policy, load_policy
from .prompts import Prompt, load_prompts
from .response import Response
from .scorers import SCORERS, Scorer, load_scorer
from .search import decode

__version__ = "0.1.0"
__all__ = [
    "METHODS",
    "POLICIES",
    "SCORERS",
    "AssetError",
    "IgcoreError",
    "ParameterError",
    "Policy",
    "Prompt",
    "Response",
    "RunError",
    "Scorer",
    "ScorerError",
    "SearchConfig",
    "decode",
    "load_policy",
    "load_prompts",
    "load_scorer",
]
