"""The catalogue: where the parts of optional rooms are that others ask for by name.

The core imports no room: this module and the lazy front of the package are the only ones that know
the optional ones. A room is imported when something in it is asked for, so that importing igcore
stays light.
"""

from importlib import import_module
from typing import Any

SCORERS = {  # name -> its module, with what it is called there
    "offensive-language": "models.embedded:OffensiveLanguage",
    "minilm-relevance": "models.embedded:MiniLMRelevance",
    "jigsaw-toxicity": "models.jigsaw:JigsawToxicity",
    "llama-7b-rm": "models.paper:LlamaReward",
    "beaver-7b-cost": "models.paper:BeaverCost",
    "qrm-llama-3.1-8b-reward": "models.paper:QRMReward",
    "qrm-llama-3.1-8b-cost": "models.paper:QRMCost",
    "classifier": "models.classifier:Classifier",
    "guard": "models.guard:GenerativeGuard",
    "stream-guard": "models.stream:StreamGuard",
    "endpoint": "serve.endpoint:Endpoint",
    "maximum": "models.maximum:Maximum",
}

PARTS = {  # name -> its module, with what it is called there, or the table that holds it
    "answer_rows": "adapters.generate",
    "explore": "watch.explore",
    "Recorder": "watch.record",
    "Tree": "watch.tree",
    "answer_html": "watch.html",
    "load_policy": "models.policies",
    "policy_of": "models.policies",
    "load_served": "serve.policy",
    "load_scorer": "models.registry",
    "maximum_of": "models.maximum",
    "Pool": "pool",
    "PooledEngine": "pool.engine",
    "CriticParams": "runs.critic_params",
    "DecodeParams": "runs.decode_params",
    "JudgeParams": "judge",
    # methods, see `igcore.METHODS`
    "args": "baselines.args:METHODS",
    "args-lagrangian": "baselines.args:METHODS",
    "args-cost": "baselines.args:METHODS",
    "re-control": "baselines.re_control:METHODS",
    "re-control-lagrangian": "baselines.re_control:METHODS",
    **SCORERS,
}


def room(name: str) -> Any:
    """Return a function, class or method of an optional room, and import the room.

    Raises
    ------
    KeyError
        For a name that is not here.
    """
    module, _, known_as = PARTS[name].partition(":")
    found = getattr(import_module(f"{__package__}.{module}"), known_as or name)
    return found[name] if known_as == "METHODS" else found
