"""The reproduction of the paper with igcore: runs, records, tables, figures, claims and theory.

Importing it adds the policies, baselines, scorers and prompt sets of the paper to igcore's tables.
"""

from igcore.catalog import METHODS, POLICIES, PROMPT_SETS, SCORERS

POLICIES |= {
    "qwen-0.5b": "igstudy.policies:QWEN",
    "alpaca-7b": "igstudy.policies:ALPACA",
    "beaver-7b-v3": "igstudy.policies:BEAVER",
    "vicuna-7b": "igstudy.policies:VICUNA",
    "llama-3.1-8b": "igstudy.policies:LLAMA",
}
METHODS |= {
    "args": "igstudy.baselines.args:ARGS",
    "args-lagrangian": "igstudy.baselines.args:ARGS_LAGRANGIAN",
    "args-cost": "igstudy.baselines.args:ARGS_COST",
    "re-control": "igstudy.baselines.re_control:RE_CONTROL",
    "re-control-lagrangian": "igstudy.baselines.re_control:RE_CONTROL_LAGRANGIAN",
}
SCORERS |= {
    "offensive-language": "igstudy.scorers.embedded:OffensiveLanguage",
    "minilm-relevance": "igstudy.scorers.embedded:MiniLMRelevance",
    "last-words": "igstudy.scorers.last_words:LastWords",
    "llama-7b-rm": "igstudy.scorers.paper:LlamaReward",
    "beaver-7b-cost": "igstudy.scorers.paper:BeaverCost",
    "qrm-llama-3.1-8b-reward": "igstudy.scorers.paper:QRMReward",
    "qrm-llama-3.1-8b-cost": "igstudy.scorers.paper:QRMCost",
}
PROMPT_SETS |= {
    "rtp": "igstudy.prompts:rtp",
    "strongreject": "igstudy.prompts:strongreject",
    "wsr-harmful": "igstudy.prompts:wsr_harmful",
    "wsr-harmless": "igstudy.prompts:wsr_harmless",
    "pku-saferlhf": "igstudy.prompts:pku_saferlhf",
    "hex-phi": "igstudy.prompts:hex_phi",
    "hh-rlhf": "igstudy.prompts:hh_rlhf",
}
