"""The templates of the paper's systems, exact to the last space.

Importing this module adds them to `igcore.models.templates.TEMPLATES`.
"""

from igcore.models.templates import TEMPLATES, plain_text

VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives "
    "helpful, detailed, and polite answers to the user's questions. "
)
SAFE_RLHF = plain_text(  # Alpaca and Beaver
    "safe-rlhf", "BEGINNING OF CONVERSATION: ", "USER: {} ASSISTANT:", seam="", end="</s>"
)
VICUNA_1_1 = plain_text("vicuna", VICUNA, "USER: {} ASSISTANT:", seam=" ", end="</s>")

TEMPLATES |= {template.name: template for template in (SAFE_RLHF, VICUNA_1_1)}
