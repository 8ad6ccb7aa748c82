"""What speaks HTTP, and the search inside transformers' `generate`.

Policies and scorers in a server, and the adapter of `generate`. Importing it adds them to igcore's
tables; igcore imports it when one of their names is used.
"""

from igcore.catalog import PARTS, SCORERS

SCORERS |= {"endpoint": "igserve.endpoint:Endpoint", "llama-labels": "igserve.endpoint:LlamaLabels"}
PARTS |= {
    "answer_rows": "igserve.generate:answer_rows",
    "custom_generate": "igserve.generate:custom_generate",
    "load_served": "igserve.policy:load_served",
}
