"""Tests of the package's front door."""

import subprocess
import sys

import igcore


def test_every_public_name_exists_and_no_other():
    assert all(getattr(igcore, name) is not None for name in igcore.__all__)
    assert set(igcore.__all__) <= set(dir(igcore))
    assert not hasattr(igcore, "decoed")


def test_safety_state_and_statistics_need_no_torch():
    """Guards the lecturer's notebook against a gigabyte of dependencies that its theory does not
    use.
    """
    modules = "igcore.budget, igcore.report.statistics, igcore.report.tables"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
