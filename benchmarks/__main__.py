"""Run the benchmark: ``python -m benchmarks``.

It writes ``tables/bench.csv``, ``bench.md`` and ``bench_ratios.md`` and ``bench.{png,pdf}`` into
``runs/bench/figures``. It runs in one process, with one thread on the CPU, and takes the cases
of a section in turn. Every finished case and repeat is a line of ``runs/bench/responses.jsonl``: a
killed benchmark resumes, and a change of code, versions or processor restarts it. With
``--only`` the results lie beside these lines, because a part never replaces the whole.
"""

import argparse
import gc
import re
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache, partial

import torch

from benchmarks import measure, plan, report
from benchmarks.measure import Case
from benchmarks.models import MODELS, Models
from igcore.errors import IgcoreError, ParameterError
from igcore.files import digest_of, root
from igstudy.linefile import key
from igstudy.provenance import processor, versions
from igstudy.runs.folders import Run, open_run
from igstudy.runs.identity import code_of


def bench(
    sections: dict[str, list[Case]], run: Run, repeats: int, load: Callable[[str, str], Models]
) -> None:
    """Measure what the run lacks.

    The repeats go through all cases of a section, then through all of them again. Its models are
    freed at its end, so that the next section has the memory.

    Parameters
    ----------
    sections : dict of str to list of Case
        See `benchmarks.plan.sections`.
    load : callable
        From the name of models and a dtype to the models.
    """
    done = {key(line) for line in run.lines}
    warm: set[tuple[str, str, str]] = set()
    for cases in sections.values():
        loaded = cache(load)  # without the models of the section before
        gc.collect()
        for repeat, case in [(repeat, case) for repeat in range(repeats) for case in cases]:
            if (repr(case), str(repeat)) in done:
                continue
            same_code = (case.run, case.models, case.dtype)
            # no name is bound to the models, which would outlive their section
            if same_code not in warm:
                _once(plan.warm_up(case), loaded(case.models, case.dtype), repeat)
            warm.add(same_code)
            found = _once(case, loaded(case.models, case.dtype), repeat)
            line = measure.line(case, repeat, found)
            run.append(line)
            done.add(key(line))
            seconds = line["cpu_s"] / case.prompts
            print(f"{case}, repeat {repeat + 1}: {seconds:.2f} CPU s per prompt", flush=True)


def _once(case: Case, models: Models, seed: int) -> dict:
    """Measure one case once, with memory cleared before."""
    counts = Counter(case.lengths)
    prompts = [text for length, n in counts.items() for text in models.prompts(n, length)]
    gc.collect()
    variant = plan.VARIANTS[case.run]
    work = partial(variant, models, case, prompts, seed)
    return measure.timed(work, models.all, case.prompts)


def _identity() -> dict:
    """Return the inputs of the numbers: versions, code and processor."""
    code = code_of(measure.__name__, plan.__name__, "benchmarks.models")
    return {"versions": versions(), "code": code, "processor": processor()}


def _options(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Measure what decoding costs, with baselines."
    )
    add = parser.add_argument
    add("--only", default="", metavar="REGEX", help="only cases that match, as in 'C .*float32'")
    add("--repeats", type=int, default=3, help="times each case is measured (default 3)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark from the command line; return the exit status."""
    options = _options(arguments)
    torch.set_num_threads(1)
    try:
        _measure_and_report(options)
    except (IgcoreError, re.error) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _measure_and_report(options: argparse.Namespace) -> None:
    """Measure all cases, then write and print the results."""
    sections = {
        name: [case for case in cases if re.search(options.only, f"{name}: {case}")]
        for name, cases in plan.sections().items()
    }
    if options.repeats < 1 or not any(sections.values()):
        raise ParameterError(
            f"repeats {options.repeats} and only {options.only!r} choose nothing to measure; give "
            "at least one repeat and a pattern that a case matches"
        )
    folder = root() / "runs" / "bench"
    out = folder if options.only else folder / "figures"
    identity = _identity()
    with open_run(folder, identity) as run:
        bench(sections, run, options.repeats, lambda name, dtype: MODELS[name](dtype))
        table = measure.table(run.lines, sections)
    names = [f"{name} {version}" for name, version in identity["versions"].items()]
    notes = [", ".join([f"code {digest_of(identity)[:8]}", *names])]
    for path in report.write(table, plan.ratios(), identity["processor"], notes, out):
        print(f"wrote {path.relative_to(root())}")


if __name__ == "__main__":
    sys.exit(main())
