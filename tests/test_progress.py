"""Tests of progress where nobody watches and where somebody does."""

import sys

from igcore.progress import progress


def test_a_log_gets_few_whole_lines(capsys, monkeypatch):
    """Guards a cluster's log against thousands of redrawn bars on one endless line."""
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    monkeypatch.delenv("VSCODE_PID", raising=False)
    bar = progress(1000, "decode-raw")
    for _ in range(1000):
        bar.update()
    bar.close()
    out, err = capsys.readouterr()
    assert "\r" not in out and err == ""
    assert out.startswith("decode-raw:   0%") and 2 <= out.count("\n") <= 4 and "1000/1000" in out


def test_somebody_watching_gets_a_live_bar(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    bar = progress(3, "x")
    bar.close()
    assert capsys.readouterr().out == ""
