"""Run the benchmark: ``python -m benchmarks``.

It writes ``bench``, ``bench_ratios`` and ``bench_words`` into ``runs/bench/figures/tables``. It
runs in one process, with one thread on the CPU, and takes the cases of a section in turn. Every
finished case and repeat is a line of ``runs/bench/responses.jsonl``: a killed benchmark resumes,
and a change of code, versions or processor restarts it.
"""

import gc
import sys
from collections.abc import Sequence
from functools import partial

import torch

from benchmarks import measure, models, others, ours, plan, report
from benchmarks.measure import Case
from benchmarks.models import Models
from igcore.errors import IgcoreError
from igcore.files import digest_of, root
from igstudy.linefile import key
from igstudy.provenance import processor, versions
from igstudy.runs.folders import Run, open_run
from igstudy.runs.identity import code_of

REPEATS = 2  # of each case


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
    """Measure all cases, then write and print the results."""
    sections = plan.sections()
    cases = [case for section in sections for case in section]
    folder = root() / "runs" / "bench"
    identity = _identity()
    with open_run(folder, identity) as run:
        bench(sections, run, REPEATS, models.smollm2())
    names = [f"{name} {version}" for name, version in identity["versions"].items()]
    hub = others.installed()
    names.append(f"its_hub {hub}" if hub else "without its_hub, which is not installed")
    notes = [f"measured on {identity['processor']}, one thread"]
    notes.append(", ".join([f"code {digest_of(identity)[:8]}", *names]))
    for path in report.write(run.lines, cases, plan.pairs(), notes, folder / "figures"):
        print(f"wrote {path.relative_to(root())}")


if __name__ == "__main__":
    sys.exit(main())
