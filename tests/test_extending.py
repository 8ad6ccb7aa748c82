"""What it takes to add a method, a scorer or a data set: one entry of a table, which a params file
then names.
"""

import json
from functools import partial

import pytest
from tiny import saved, tiny_model, tiny_tokenizer

from igcore import beams
from igcore.catalog import METHODS, PROMPT_SETS, SCORERS
from igcore.methods import Method, one_block
from igcore.scorers import of_function
from igstudy.runs.decode_run import decode_run
from igstudy.runs.verify import request_of, verify

SIZE = dict(
    policy="model", prompts="mild", limit=1, methods=["base"], cost="long-sentence", reward=None,
    budget=9.0, max_new_tokens=4, block_size=4, device="cpu",
)  # fmt: skip
ADDED = [  # a table, its new entry, settings of a params file, what a line has then
    (METHODS, Method(beams.unranked, one_block, cost=False, reward=False),
     {"methods": ["mine"], "n_samples": 5}, {"method": "mine", "samples_drawn": 5}),
    (SCORERS, partial(of_function, len, "cost", digest="v1"), {"cost": "mine"},
     {"cost_scorer": "len"}),
    (PROMPT_SETS, lambda: ["Good day"], {"prompts": "mine"}, {"prompt": "Good day"}),
]  # fmt: skip


@pytest.mark.parametrize(("table", "entry", "named", "expected"), ADDED)
def test_what_is_added_has_one_place(tmp_path, monkeypatch, table, entry, named, expected):
    """Bug: a name that a guard knows, and a params file, a run or `verify` does not."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(table, "mine", entry)
    tokenizer = tiny_tokenizer()
    saved("model", tiny_model(tokenizer), tokenizer)
    file, folder = tmp_path / "decode-a.yaml", tmp_path / "decode-a"
    file.write_text(json.dumps(SIZE | named))
    request = request_of(folder / "responses.jsonl", file)
    run = decode_run(request, folder)
    assert verify(run.responses, request, None).problems == []
    (line,) = run.lines
    assert {name: line[name] for name in expected} == expected
