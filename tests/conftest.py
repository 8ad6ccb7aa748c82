"""Settings shared by all tests: one thread, so that timings and float sums do not depend on the
machine's load; and how tests are shared among processes.
"""

import gc
import os
import sys

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"  # a test that reaches for the network must fail, not wait

import pytest
import torch
from xdist.scheduler import LoadScopeScheduling

import igstudy as igstudy  # which adds methods and scorers to the tables

torch.set_num_threads(1)


class FileScheduling(LoadScopeScheduling):
    """Run the tests of a file on one process, and all notebooks on one, in their order."""

    def _split_scope(self, nodeid: str) -> str:
        """Return the name of what stays together; later notebooks read runs of earlier ones."""
        path = nodeid.partition("::")[0]
        return "notebooks" if path.endswith(".ipynb") else path


@pytest.fixture(scope="session")
def rollouts(tmp_path_factory):
    """Rollouts of a tiny random Llama, see `tiny.sampled`."""
    from tiny import sampled  # here: other tests need none of it

    return sampled(tmp_path_factory.mktemp("rollouts"))


@pytest.fixture
def write(tmp_path):
    """Write a file of text or bytes in the folder of a test; return its path."""

    def write(name, content):
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


@pytest.fixture(autouse=True)
def _no_policy_of_an_earlier_test():
    """Let no test find the policy that another one has loaded."""
    yield
    if run := sys.modules.get("igstudy.runs.decode_run"):
        run._LAST.clear()


def pytest_collection_finish():
    """Let the collector skip all that was imported: statsmodels, Snakemake's tests and the
    benchmark call it often, and each call would walk the objects of all libraries.
    """
    gc.freeze()


@pytest.hookimpl
def pytest_xdist_make_scheduler(config, log):
    """Tell pytest-xdist how to share the tests, where it has more than one process."""
    return FileScheduling(config, log)
