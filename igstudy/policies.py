"""The policies of the study by name; importing igstudy adds them to `igcore.catalog.POLICIES`."""

from dataclasses import replace

from igcore.models.policies import SMOLLM2_CHAT, PolicyEntry

from . import assets as assets  # has the pin of QWEN
from . import templates as templates  # has those of the paper's policies

QWEN = replace(SMOLLM2_CHAT, asset="qwen-0.5b")  # Qwen2.5-Coder-0.5B-Instruct

ALPACA = PolicyEntry("safe-rlhf", repo="PKU-Alignment/alpaca-7b-reproduced")
BEAVER = PolicyEntry("safe-rlhf", repo="PKU-Alignment/beaver-7b-v3.0")
VICUNA = PolicyEntry(
    "vicuna", repo="lmsys/vicuna-7b-v1.5", revision="3321f76e3f527bd14065daf69dad9344000a201d"
)
LLAMA = PolicyEntry(
    "chat",
    repo="meta-llama/Llama-3.1-8B-Instruct",
    revision="0e9e39f249a16976918f6564b8830bc894c89659",
)
