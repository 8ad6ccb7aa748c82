"""Tests of what pip is told to install from pylock.toml."""

import pytest

from docs.lock import CPU, requirements

PLAIN, CUBLAS, NUMPY = "1" * 64, "2" * 64, "3" * 64
PACKAGES = [
    {
        "name": name,
        "version": "2.13.0",
        "wheels": [{"hashes": {"sha256": digest}}],
        **({"marker": "sys_platform == 'linux'"} if digest == CUBLAS else {}),
    }
    for name, digest in (("torch", PLAIN), ("nvidia-cublas", CUBLAS), ("numpy", NUMPY))
]


def report(digest, *needed):
    """pip's report on a file of torch."""
    info = {"url": "https://example.org/torch.whl", "archive_info": {"hashes": {"sha256": digest}}}
    return [{"download_info": info, "metadata": {"requires_dist": list(needed)}}]


def test_a_torch_for_processors_is_installed_by_its_hash_and_without_cuda():
    """Bug: with PyPI's hash beside it, pip leaves the build in a folder and takes gigabytes."""
    expected = [f"torch==2.13.0 --hash=sha256:{CPU[0]}", f"numpy==2.13.0 --hash=sha256:{NUMPY}"]
    assert requirements(PACKAGES, report(CPU[0], "filelock")) == expected


def test_a_torch_of_the_public_index_is_installed_with_cuda():
    """Bug: what CUDA needs is left out, and torch cannot be imported."""
    torch, cublas, _ = requirements(PACKAGES, report(PLAIN, "cuda-toolkit[cublas]==13; x == 'y'"))
    assert torch == f"torch==2.13.0 --hash=sha256:{PLAIN}"
    assert cublas == f"nvidia-cublas==2.13.0 ; sys_platform == 'linux' --hash=sha256:{CUBLAS}"


def test_a_torch_that_the_lock_does_not_have_is_refused():
    """Bug: the largest file of all is installed unseen."""
    with pytest.raises(SystemExit, match="no file https://example.org/torch.whl; if you trust it"):
        requirements(PACKAGES, report("4" * 64))


def test_a_torch_that_is_installed_stays():
    """Bug: a torch for another graphics card is replaced, or gets the CUDA of PyPI's beside it."""
    torch, numpy = requirements(PACKAGES, [])
    assert PLAIN in torch and NUMPY in numpy
