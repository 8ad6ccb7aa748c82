"""Run the benchmark: ``python -m benchmarks``.

It writes ``figures/tables/bench.csv`` and ``bench.md`` and ``figures/bench.{png,pdf}``. It runs in
one process, with one thread on a CPU, and takes the cases of a section in turn. Every finished case
and repeat is a line of ``runs/bench/raw.jsonl``: a killed benchmark resumes, and a change of code
or versions starts it anew. With ``--only``, rows that were not measured this time stay as the table
has them, and the table says when each was measured.
"""

import argparse
import gc
import importlib.metadata
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import torch

from benchmarks import measure, plan, report
from benchmarks.measure import Case, Log
from benchmarks.models import MODELS, Models
from igcore.errors import IgcoreError, ParameterError, PolicyError
from igcore.folders import digest_of, open_run, root
from igcore.runs.identity import code_of, versions


def _order(sections: dict[str, list[Case]], only: str, repeats: int) -> Iterator[tuple[Case, int]]:
    """Yield cases and repeats: section after section, within one all cases once, then all again."""
    for name, cases in sections.items():
        for repeat in range(repeats):
            yield from ((case, repeat) for case in cases if re.search(only, f"{name}: {case}"))


def bench(
    sections: dict[str, list[Case]],
    log: Log,
    only: str,
    repeats: int,
    load: Callable[[str, str], Models],
) -> list[str]:
    """Measure what is not in the log yet; return a sentence for every case that was skipped.

    Parameters
    ----------
    sections : dict of str to list of Case
        See `benchmarks.plan.sections`.
    only : str
        Regular expression searched for in ``section: case``.
    load : callable
        From the name of models and a dtype to the models.
    """
    work = list(dict.fromkeys(_order(sections, only, repeats)))
    warm, skipped = set(), {}
    for number, (case, repeat) in enumerate(work, start=1):
        if log.has(case, repeat) or case in skipped:
            continue
        try:
            models = load(case.models, case.dtype)
            if (case.run, case.models, case.dtype) not in warm:
                _once(plan.warm_up(case), models, repeat)
                warm.add((case.run, case.models, case.dtype))
            found = _once(case, models, repeat)
        except (torch.OutOfMemoryError, PolicyError) as error:
            skipped[case] = (
                f"{case}: skipped, "
                f"{error if isinstance(error, PolicyError) else 'the device has too little memory'}"
            )
            print(skipped[case], flush=True)
            continue
        log.append(case, repeat, found)
        took = (
            f"{found['cpu_s'] / case.prompts:.2f} CPU s, {found['wall_s'] / case.prompts:.2f} s "
            f"per prompt"
        )
        print(f"[{number}/{len(work)}] {case}, repeat {repeat + 1}: {took}", flush=True)
    return list(skipped.values())


def _once(case: Case, models: Models, seed: int) -> dict:
    """Measure one case once, with memory cleared before."""
    prompts = models.prompts(case.prompts, case.prompt_tokens)
    gc.collect()
    if models.device.type == "cuda":
        torch.cuda.empty_cache()
    return measure.timed(
        lambda: plan.VARIANTS[case.run](models, case, prompts, seed), models.all, case.prompts
    )


def _identity() -> dict:
    """Return what the numbers depend on: versions and code, but not how they are shown."""
    of = versions() | (
        {"its_hub": importlib.metadata.version("its_hub")} if plan.has_its_hub() else {}
    )
    return {"versions": of, "code": code_of(measure.__name__, plan.__name__, "benchmarks.models")}


def _versions(identity: dict) -> str:
    """Return versions and a hash of the code as text, to tell measurements apart."""
    code = digest_of(identity)[:8]
    return ", ".join(
        [f"code {code}", *(f"{name} {version}" for name, version in identity["versions"].items())]
    )


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Measure what decoding costs, with rivals."
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="REGEX",
        help=(
            "measure only cases that match, as in 'peers' or 'C .*float32', and keep the other rows"
        ),
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=3,
        help="times each case is measured; medians are shown (default 3)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny random models and sizes, into runs/bench-quick"
    )
    parser.add_argument("--fresh", action="store_true", help="forget what was measured before")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark from the command line; return the exit status."""
    options = _parser().parse_args(arguments)
    folder = root() / "runs" / ("bench-quick" if options.quick else "bench")
    out = folder if options.quick else root() / "figures"
    torch.set_num_threads(1)
    try:
        if options.repeats < 1:
            raise ParameterError(f"repeats is {options.repeats}; it must be at least 1")
        identity = _identity()
        with open_run(folder, identity):
            raw = folder / "raw.jsonl"
            if options.fresh:
                raw.unlink(missing_ok=True)
            _measure_and_report(options, Log(raw), out, _versions(identity))
    except (IgcoreError, re.error) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _measure_and_report(options: argparse.Namespace, log: Log, out: Path, versions: str) -> None:
    """Measure all cases, then write and print the results."""
    skipped = (
        []
        if plan.has_its_hub()
        else ["its_hub: skipped, it is not installed; pip install 'igcore[bench]' adds it"]
    )
    skipped += ["sizes and models are tiny: these numbers say nothing"] if options.quick else []
    for line in skipped:
        print(line, flush=True)
    sections = plan.sections(options.quick)
    skipped += bench(
        sections, log, options.only, options.repeats, cache(lambda name, dtype: MODELS[name](dtype))
    )
    table = measure.table(
        log.lines, [case for cases in sections.values() for case in cases], versions
    )
    if not len(table):
        raise ParameterError(f"nothing was measured: --only {options.only!r} matches no case")
    if options.only:
        table = report.with_earlier(table, out)
    ratios = plan.ratios(options.quick)
    notes = report.notes(table, ratios, skipped)
    for path in report.write(table, notes, report.summary(table, ratios), out):
        print(f"wrote {path.relative_to(root())}")
    print("\n".join(notes))


if __name__ == "__main__":
    sys.exit(main())
