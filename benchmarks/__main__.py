"""Run the benchmark: ``python -m benchmarks``.

It writes ``bench``, ``bench_ratios`` and ``bench_words`` into ``runs/bench/figures/tables``. It
runs in one process, with one thread on the CPU, and takes the cases of a section in turn. Every
finished case and repeat is a line of ``runs/bench/responses.jsonl``: a killed benchmark resumes,
and a change of code, versions or processor restarts it. With ``--only`` the results lie beside
these lines, because a part never replaces the whole.
"""

import argparse
import gc
import re
import sys
from collections.abc import Sequence
from functools import partial

import torch

from benchmarks import measure, models, others, ours, plan, report
from benchmarks.measure import Case
from benchmarks.models import Models
from igcore.errors import IgcoreError, ParameterError
from igcore.files import digest_of, root
from igstudy.linefile import key
from igstudy.provenance import processor, versions
from igstudy.runs.folders import Run, open_run
from igstudy.runs.identity import code_of


def bench(sections: Sequence[Sequence[Case]], run: Run, repeats: int, loaded: Models) -> None:
    """Measure what the run lacks.

    The repeats go through all cases of a section, then through all of them again.
    """
    done = {key(line) for line in run.lines}
    warm: set[Case] = set()
    for cases in sections:
        for repeat, case in [(repeat, case) for repeat in range(repeats) for case in cases]:
            if (repr(case), str(repeat)) in done:
                continue
            if (first := plan.warm_up(case)) not in warm:
                _once(first, loaded, repeat)
            warm.add(first)
            line = measure.line(case, repeat, _once(case, loaded, repeat))
            run.append(line)
            done.add(key(line))
            print(f"{case}, repeat {repeat + 1}: {line['cpu_s']:.2f} CPU s", flush=True)


def _once(case: Case, loaded: Models, seed: int) -> float:
    """Return the CPU seconds of a case, with memory cleared before."""
    prompts = loaded.prompts(case.prompts, case.prompt_tokens)
    work = partial(plan.VARIANTS[case.variant], loaded, case, prompts, seed)
    gc.collect()
    return measure.timed(work, case.prompts)


def _identity() -> dict:
    """Return the inputs of the numbers: versions, code and processor."""
    code = code_of(*(module.__name__ for module in (measure, models, others, ours, plan)))
    known = {"versions": versions(), "code": code, "processor": processor()}
    return known | {"its_hub": others.installed()}


def _options(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Measure what decoding costs, here and elsewhere."
    )
    add = parser.add_argument
    add("--only", default="", metavar="REGEX", help="only cases that match, as in 'encoder'")
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
    every = plan.sections()
    sections = [[c for c in cases if re.search(options.only, str(c))] for cases in every]
    chosen = [case for cases in sections for case in cases]
    if options.repeats < 1 or not chosen:
        raise ParameterError(
            f"repeats {options.repeats} and only {options.only!r} choose nothing to measure; give "
            "at least one repeat and a pattern that a case matches"
        )
    folder = root() / "runs" / "bench"
    out = folder if options.only else folder / "figures"
    identity = _identity()
    with open_run(folder, identity) as run:
        bench(sections, run, options.repeats, models.smollm2())
    pairs = [pair for pair in plan.pairs() if {*pair} <= {*chosen}]
    names = [f"{name} {version}" for name, version in identity["versions"].items()]
    hub = others.installed()
    names.append(f"its_hub {hub}" if hub else "without its_hub, which is not installed")
    notes = [f"measured on {identity['processor']}, one thread"]
    notes.append(", ".join([f"code {digest_of(identity)[:8]}", *names]))
    for path in report.write(run.lines, chosen, pairs, notes, out):
        print(f"wrote {path.relative_to(root())}")


if __name__ == "__main__":
    sys.exit(main())
