"""The paper's data sets in tiny: the files, columns and headers that the hub has, filled with
everyday prompts.

Knows layouts, and that the splits of `igstudy.prompts` must not be empty; knows nothing of
models.
"""

import csv
import io
import json
from collections.abc import Iterable
from pathlib import Path

import pandas as pd
import yaml

from tests.rehearsal.tokenizers import FORMATS

TRAIN, TEST = FORMATS["train"], FORMATS["test"]

PKU = "PKU-Alignment/PKU-SafeRLHF"
PKU_MODELS = ("Alpaca-7B", "Alpaca2-7B", "Alpaca3-8B")
ANSWERS = {  # some of the columns beside a prompt
    "response_0": "Here is one way to go about it.",
    "response_1": "I do not know.",
    "response_0_harm_category": {"Copyright Issues": False},
    "better_response_id": 0,
}

HEX_PHI = "LLM-Tuning-Safety/HEx-PHI"

HH_DAHOAS = "Dahoas/full-hh-rlhf"
HH_FILES = {
    "train": "data/train-00000-of-00001-8349d0765e6718df.parquet",
    "test": "data/test-00000-of-00001-ec71e9262143a91c.parquet",
}


def build_data(folder: Path) -> None:
    """Write the three data sets as ``<folder>/<owner>/<name>``, a folder that ``IGCORE_HUB`` may
    name.

    Prompts come in several rows, as they do on the hub: there is a row for every pair of answers.
    """
    _pku(folder / PKU)
    _hex_phi(folder / HEX_PHI)
    _hh_dahoas(folder / HH_DAHOAS)


def _write(path: Path, content: bytes | str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


# --- PKU-SafeRLHF ---------------------------------------------------------------------------------


def _pku(folder: Path) -> None:
    parts = {"train": TRAIN, "test": TEST}
    every = [
        {"split": part, "path": [f"data/{model}/{part}.jsonl" for model in PKU_MODELS]}
        for part in parts
    ]
    configs = [{"config_name": "default", "data_files": every}]
    _write(folder / "README.md", f"---\n{yaml.safe_dump({'configs': configs})}---\n")
    for number, model in enumerate(PKU_MODELS):
        for part, prompts in parts.items():
            # the first prompt is in all files, and twice in one of them
            some = [*prompts[number:], *prompts[:1]]
            rows = [json.dumps({"prompt": prompt} | ANSWERS) for prompt in some]
            _write(folder / f"data/{model}/{part}.jsonl", "\n".join(rows) + "\n")


# --- HEx-PHI --------------------------------------------------------------------------------------


def _hex_phi(folder: Path) -> None:
    """Write the files without header, in quotes where a prompt has a comma, the last one without a
    line's end.
    """
    for number, prompts in FORMATS["hex_phi"].items():
        file = io.StringIO()
        csv.writer(file, lineterminator="\n").writerows([prompt] for prompt in prompts)
        _write(folder / f"category_{number}.csv", file.getvalue().rstrip("\n"))


# --- HH-RLHF --------------------------------------------------------------------------------------


def _dialogues(prompts: Iterable[str]) -> list[tuple[str, str, str]]:
    """Return (prompt, chosen, rejected) answers; every second dialogue has had a turn before."""
    found = []
    for number, prompt in enumerate(prompts):
        before = (
            "\n\nHuman: Good morning!\n\nAssistant: Good morning. How can I help?"
            if number % 2
            else ""
        )
        found.append(
            (
                f"{before}\n\nHuman: {prompt}\n\nAssistant:",
                " Here is one way to go about it.",
                " I do not know.",
            )
        )
    return [*found, (found[0][0], " Let us see.", " No.")]


def _hh_dahoas(folder: Path) -> None:
    columns = ("prompt", "response", "chosen", "rejected")
    for part, prompts in (("train", TRAIN), ("test", TEST)):
        rows = [
            (prompt, chosen, chosen, rejected)
            for prompt, chosen, rejected in reversed(_dialogues(prompts))
        ]
        path = folder / HH_FILES[part]
        path.parent.mkdir(parents=True, exist_ok=True)
        pd.DataFrame(rows, columns=columns).to_parquet(path, index=False)
