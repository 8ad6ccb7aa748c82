"""A run that is killed, or finds the disk full, at any call that changes the file system."""

import json
import subprocess
import sys
from pathlib import Path

SHARE = 4  # of all cases; `python tests/crashes.py FOLDER 1` tries every one


def test_a_run_that_was_disturbed_anywhere_ends_as_one_that_was_not(tmp_path):
    """Bug: a full disk before the first line was a traceback. Guards finished lines, the sign of
    success, and what is kept aside.
    """
    script = Path(__file__).with_name("crashes.py")
    command = [sys.executable, str(script), str(tmp_path), str(SHARE)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    cases = [json.loads(line) for line in done.stdout.splitlines()]
    assert [case for case in cases if case[-1]] == []
    calls = {call for _, _, call, _ in cases}
    wanted = "write fsync truncate replace rename mkdir unlink touch write_bytes"
    assert calls == set(wanted.split()) and len(cases) > 30
