"""The names of the public page, for editors and type checkers."""

from igserve.generate import custom_generate as custom_generate

from . import rules as rules
from .catalog import POLICIES as POLICIES
from .catalog import SCORERS as SCORERS
from .config import SearchConfig as SearchConfig
from .decoding import decode as decode
from .errors import AssetError as AssetError
from .errors import IgcoreError as IgcoreError
from .errors import ParameterError as ParameterError
from .errors import PolicyError as PolicyError
from .errors import RunError as RunError
from .errors import ScorerError as ScorerError
from .errors import ScorerWarning as ScorerWarning
from .guard import Guard as Guard
from .methods import METHODS as METHODS
from .models.policies import load_policy as load_policy
from .models.prompts import load_prompts as load_prompts
from .models.registry import load_scorer as load_scorer
from .policy import Policy as Policy
from .prompt import Prompt as Prompt
from .response import Response as Response
from .scorers import Scorer as Scorer
from .tools.suggest import suggest_budget as suggest_budget

__version__: str
