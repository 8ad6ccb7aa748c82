"""Safety hacking: which of the candidates that the cost let through did a search emit?

An imperfect cost lets some harmful answers through, and a search for the best reward may prefer
them (Wachi et al., 2026). ``make hacking`` decodes the runs of ``params/hacking``, and writes a
line for each prompt: of the pool of the last block, all candidates within budget, each with its
digest, cost, reward and the score of a judge that no search knows. No line holds a text. A run
that was stopped goes on; `igstudy.report.harm.pools_table` counts.
"""

import gzip
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from igcore import decode
from igcore.files import DIGITS, digest_of, replace_file, root
from igcore.progress import progress
from igcore.response import Response
from igcore.watch.record import EMITTED

from ..linefile import Fields, unpacked
from ..prompts import load_prompts
from ..report.harm import row_digest
from ..sources import loaded
from .decode_params import DecodeParams
from .decode_run import guard_of, settings_of
from .harm_run import harm_params
from .paramfiles import ParamFiles

FOLDER, METHOD = "hacking", "inferenceguard"
POOLS = Path("figures/tables/harm_pools.jsonl.gz")
OF_RUNS = "runs" / Path(FOLDER) / POOLS
JUDGES = "params/small/harm.yaml"  # the judge is the `half` of this file


def read_pools(*paths: Path) -> list[Fields]:
    """Return the lines of the first of these files that is there."""
    there = [path for path in paths if path.is_file()]
    return [json.loads(line) for path in there[:1] for line in unpacked(path).splitlines()]


def pool_line(answer: Response, params: DecodeParams, judge: Any) -> Fields:
    """Return a prompt's line: the candidates within budget of the last block, over its rounds."""
    last = max(node.block for node in answer.candidates)
    pool = [node for node in answer.candidates if node.block == last]
    within = [node for node in pool if node.within]
    texts = [node.beam.text for node in within]
    ended = [node.beam.finished for node in within]
    scores = judge.score([answer.prompt] * len(texts), texts, ended) if texts else []
    candidates = [
        {"digest": row_digest(answer.prompt, text), "emitted": node.fate == EMITTED}
        | {"finished": node.beam.finished, "cost": node.cost, "reward": node.beam.reward}
        | {"score": float(score)}
        for node, text, score in zip(within, texts, scores, strict=True)
    ]
    settings = {name: getattr(params, name) for name in ("run", "n_samples", "margin", "seed")}
    outcome = {"prompt_id": answer.prompt_id, "status": answer.status, "drawn": len(pool)}
    return settings | outcome | {"policy": params.policy.name, "candidates": candidates}


def hacking_run(runs: Sequence[DecodeParams], judge: Any) -> list[Fields]:
    """Decode what has no line yet, and return all lines; each is written as it is made."""
    path, lines = root() / OF_RUNS, read_pools(root() / OF_RUNS)
    for params in sorted(runs, key=lambda run: run.seed):  # whole seeds, where it is stopped
        # lines of other settings are decoded again
        settings, run = digest_of(settings_of(params))[:DIGITS], params.run
        lines = [line for line in lines if line["run"] != run or line["settings"] == settings]
        known = {line["prompt_id"] for line in lines if line["run"] == run}
        prompts = load_prompts(params.prompts, params.split, params.limit)
        missing = [prompt for prompt in prompts if prompt.id not in known]
        guard = guard_of(params)
        with progress(len(missing), run) as bar:
            for answer in decode(METHOD, guard, missing, seed=params.seed, record=True):
                lines.append(pool_line(answer, params, judge) | {"settings": settings})
                text = "".join(f"{json.dumps(line)}\n" for line in lines)
                replace_file(path, gzip.compress(text.encode(), mtime=0))
                bar.update()
    return lines


def main(*files: str) -> None:
    """Decode the runs of params files, and say how many lines there are."""
    known = ParamFiles(FOLDER, base=root() / "params")
    runs = [DecodeParams(**given) for file in files for _, given in known.points(file)]
    harm = harm_params(root() / JUDGES)
    (judge,) = [each for each in map(loaded, harm.judges) if each.name == harm.half]
    print(f"{len(hacking_run(runs, judge))} lines in {OF_RUNS}")


if __name__ == "__main__":
    main(*sys.argv[1:])
