"""Run the benchmark: ``python -m benchmarks``.

It writes ``bench``, ``bench_ratios`` and ``bench_words`` into ``runs/bench/figures/tables``. It
runs in one process, with one thread on the CPU, and takes the cases of a section in turn.
"""

import gc
import sys
from collections.abc import Sequence
from functools import partial
from itertools import product

import torch

from benchmarks import measure, models, others, plan, report
from benchmarks.measure import Case
from benchmarks.models import Models
from igcore.errors import IgcoreError
from igstudy.files import root
from igstudy.provenance import processor, versions

REPEATS = 2  # of each case


def bench(sections: Sequence[Sequence[Case]], repeats: int, loaded: Models) -> list[dict]:
    """Return a line for each measurement.

    The repeats go through all cases of a section, then through all of them again.
    """
    lines = []
    warm: set[Case] = set()
    for cases in sections:
        for repeat, case in product(range(repeats), cases):
            if (first := plan.warm_up(case)) not in warm:
                _once(first, loaded, repeat)
            warm.add(first)
            lines.append(measure.line(case, repeat, _once(case, loaded, repeat)))
            print(f"{case}, repeat {repeat + 1}: {lines[-1]['cpu_s']:.2f} CPU s", flush=True)
    return lines


def _once(case: Case, loaded: Models, seed: int) -> float:
    """Return the CPU seconds of a case, with memory cleared before."""
    prompts = loaded.prompts(case.prompts, case.prompt_tokens)
    work = partial(plan.VARIANTS[case.variant], loaded, case, prompts, seed)
    gc.collect()
    return measure.timed(work, case.prompts)


def main() -> int:
    """Run the benchmark; return the exit status."""
    torch.set_num_threads(1)
    try:
        _measure_and_report()
    except IgcoreError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _measure_and_report() -> None:
    """Measure all cases, then write the results."""
    sections = plan.sections()
    cases = [case for section in sections for case in section]
    lines = bench(sections, REPEATS, models.smollm2())
    names = [f"{name} {version}" for name, version in versions().items()]
    hub = others.installed()
    names.append(f"its_hub {hub}" if hub else "without its_hub, which is not installed")
    notes = [f"measured on {processor()}, one thread", ", ".join(names)]
    for path in report.write(lines, cases, plan.pairs(), notes, root() / "runs/bench/figures"):
        print(f"wrote {path.relative_to(root())}")


if __name__ == "__main__":
    sys.exit(main())
