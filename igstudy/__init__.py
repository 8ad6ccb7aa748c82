"""The reproduction of the paper with igcore: runs, records, tables, figures, claims and theory.

Importing it adds the baselines, scorers and prompt sets of the paper to the tables of igcore.
"""

from igcore.catalog import METHODS, PROMPT_SETS, SCORERS

METHODS |= {
    "args": "igstudy.baselines.args:ARGS",
    "args-lagrangian": "igstudy.baselines.args:ARGS_LAGRANGIAN",
    "args-cost": "igstudy.baselines.args:ARGS_COST",
    "re-control": "igstudy.baselines.re_control:RE_CONTROL",
    "re-control-lagrangian": "igstudy.baselines.re_control:RE_CONTROL_LAGRANGIAN",
}
SCORERS |= {
    "jigsaw-toxicity": "igstudy.scorers.jigsaw:JigsawToxicity",
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
