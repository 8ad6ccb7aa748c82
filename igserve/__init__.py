"""What speaks HTTP, and the search inside transformers' `generate`.

Policies in a server, and the adapter of `generate`. Importing it adds them to a table of igcore,
which imports it when one of their names is used.
"""

from igcore.catalog import PARTS

PARTS |= {
    "answer_rows": "igserve.generate:answer_rows",
    "custom_generate": "igserve.generate:custom_generate",
    "load_served": "igserve.policy:load_served",
}
