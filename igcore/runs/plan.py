"""The runs of params files before they start, and the most tokens that each can take.

``python -m igcore.runs.plan FILE.yaml ...`` prints them. No weights are loaded and nothing is
downloaded.
"""

import argparse
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..beams import settings_of
from ..config import SearchConfig
from ..errors import IgcoreError, ParameterError
from ..models.prompts import SPLITS, check_prompts, load_prompts
from .critic_params import CriticParams
from .decode_params import DecodeParams
from .paramfiles import DECODED, ParamFiles

KINDS = {"critic": CriticParams} | dict.fromkeys(DECODED, DecodeParams)
# published sizes of the prompt sets that would have to be downloaded
WHOLE = {"rtp": 623, "hex-phi": 300}
TEST_PARTS = {"hh-rlhf": 12451, "pku-saferlhf": 759}  # as the paper's percentages have it
SHARES = {"all": 1.0} | dict(zip(SPLITS, np.diff([0.0, *SPLITS.values()]), strict=True))
SEARCH = "inferenceguard-critic"  # the method by which notebook 20 tries a critic


def count(prompts: str | Mapping, split: str, limit: int | None) -> float:
    """Return how many prompts a run takes, NaN when that is not known. Downloads nothing."""
    source, options = check_prompts(prompts)
    size = math.inf
    if source in WHOLE:
        size = round(WHOLE[source] * SHARES[split])
    elif source not in TEST_PARTS:
        size = len(load_prompts(prompts, split))
    elif (split, options.part) in (("all", "test"), ("test", None), ("all", None)):
        size = TEST_PARTS[source]
    least = min(size, limit or math.inf)
    return math.nan if math.isinf(least) else least


class Job(NamedTuple):
    """One run of a params file: its prompts and tokens at most, NaN where that is not known."""

    file: Path
    run: str
    prompts: float
    tokens: float


def most_tokens(method: str, config: SearchConfig) -> int:
    """Return the most tokens that a method samples or considers for one prompt."""
    settings = settings_of(method, config)
    return settings.n_samples * settings.max_new_tokens * settings.rounds


def decode_job(file: Path, params: DecodeParams) -> Job:
    """Return the plan of a run of notebook 30."""
    prompts = count(params.prompts, params.split, params.limit)
    config = params.search()
    tokens = prompts * sum(most_tokens(method, config) for method in params.methods)
    return Job(file, params.run, prompts, tokens)


def critic_job(file: Path, params: CriticParams) -> Job:
    """Return the plan of a run of notebook 20: its rollouts and the search of its trial."""
    test = count(params.prompts, "test", params.test_limit)
    prompts = test + count(params.prompts, "train", params.limit)
    searched = min(params.search_limit, test)
    tokens = searched * most_tokens(SEARCH, params.searching())
    if not params.rollouts:
        tokens += prompts * params.n_rollouts * params.max_new_tokens
    return Job(file, f"critics/{params.run}", prompts, tokens)


def jobs(paths: Iterable[Path | str]) -> Iterator[Job]:
    """Yield the plan of every run of params files; files of other kinds have none.

    Raises
    ------
    ParameterError
        For a file that holds a bad parameter; the sentence names the file.
    """
    for file in map(Path, paths):
        settings = KINDS.get(file.stem.partition("-")[0])
        if settings is None:
            continue
        folder = file.absolute().parent
        files = ParamFiles(folder.name, base=folder.parent)
        try:
            for _, given in files.points(file.absolute()):
                params = settings(**given)
                training = isinstance(params, CriticParams)
                yield critic_job(file, params) if training else decode_job(file, params)
        except IgcoreError as error:
            raise type(error)(f"{file}: {error}") from error


def report(paths: Iterable[Path | str]) -> str:
    """Return a line for every run of params files, and what they take in all."""
    found = list(jobs(paths))
    if not found:
        raise ParameterError("no file has a run; give files named decode-... or critic-....yaml")
    lines = [f"{'million tokens':>14} {'prompts':>8}  run (tokens are the most that it can take)"]
    for job in found:
        lines.append(f"{_shown(job.tokens / 1e6, 2):>14} {_shown(job.prompts):>8}  {job.run}")
    total = _shown(sum(job.tokens for job in found) / 1e6, 2)
    files = len({job.file for job in found})
    lines.append(f"{total:>14} {'':>8}  in all: {len(found)} runs of {files} params files")
    return "\n".join(lines)


def _shown(number: float, digits: int = 0) -> str:
    """Return a number as text."""
    return "unknown" if math.isnan(number) else f"{number:,.{digits}f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the runs of params files and their tokens at most. Nothing is started."""
    parser = argparse.ArgumentParser(prog="python -m igcore.runs.plan", description=main.__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    try:
        print(report(parser.parse_args(arguments).files))
    except IgcoreError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
