"""Tests of the memory plan, on numbers worked out by hand and on work that runs out of memory when
told to.
"""

import logging
from types import SimpleNamespace

import pytest
import torch
from mockpolicy import LetterCost, LetterReward, mock_policy
from transformers import LlamaConfig, LlamaForCausalLM

import igcore as ig
from igcore import guard as guard_module
from igcore.config import SearchConfig
from igcore.engine import memory
from igcore.engine.device import GIB, out_of_memory
from igcore.engine.memory import batch_size, halving, search_bytes, session_bytes
from igcore.errors import ParameterError, PolicyError

CONFIG = SearchConfig(budget=1.0, n_samples=6, keep=2, block_size=4, max_new_tokens=8)


def limited(most: int, error: Exception):
    """Work that doubles its items, and fails for more than `most` of them."""
    sizes = []

    def work(batch):
        sizes.append(len(batch))
        if len(batch) > most:
            raise error
        return [2 * x for x in batch]

    return work, sizes


def test_bytes_of_a_search_worked_out_by_hand():
    """Guards the formula: 3 layers, keys and values, 2 key heads of 8 numbers of 4 bytes, 10 rows
    of 8, a prompt of 5 twice.
    """
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    token = 3 * 2 * 2 * 8 * 4
    assert search_bytes(model, CONFIG, 5, "shared") == token * (2 * 5 + 10 * 8) + 6 * 97 * 8
    assert search_bytes(model, CONFIG, 5, "auto") == search_bytes(model, CONFIG, 5, "shared")
    assert search_bytes(model, CONFIG, 5, "dynamic") == token * 2 * 10 * (5 + 8) + 6 * 97 * 8
    # a scorer keeps the candidates of both rounds
    assert session_bytes(model, CONFIG, 5) == token * (5 + (2 * 6 + 2 * 2) * 8)


def test_the_batch_follows_the_budget():
    assert batch_size(GIB // 4, free=0, memory_gb=1.0) == 4
    assert batch_size(GIB // 4, free=GIB, memory_gb=None) == 3  # a fifth is left for activations
    # tried all the same: the system may free some
    assert batch_size(GIB, free=0, memory_gb=None) == 1


def test_more_than_there_is_for_one_prompt_is_one_sentence():
    """Bug: without memory_gb any number of samples started, and filled the machine."""
    message = r"^one prompt needs 1.05e\+06 GiB of memory, but there are .* lower n_samples"
    with pytest.raises(ParameterError, match=message):
        batch_size(2**50, free=0, memory_gb=None)
    with pytest.raises(ParameterError, match="^one prompt needs"):
        batch_size(2**50, free=0, memory_gb=1e308)
    assert batch_size(GIB, free=0, memory_gb=1e308) >= 1  # Bug: no whole number


def test_too_little_for_one_prompt_is_one_sentence():
    message = "^one prompt needs 2 GiB of memory, but there are 0.5, .*, or raise memory_gb"
    with pytest.raises(ParameterError, match=message):
        batch_size(2 * GIB, free=0, memory_gb=0.5)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("full"),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_memory_that_runs_out_halves_the_batch_and_loses_nothing(error, caplog):
    """Guards order and completeness, and that the smaller batch stays: trying the large one again
    each time would fail again.
    """
    work, sizes = limited(2, error)
    with caplog.at_level(logging.WARNING, logger="igcore"):
        assert list(halving(range(9), 8, work)) == [2 * x for x in range(9)]
    assert sizes == [8, 4, 2, 2, 2, 2, 1]
    message = "memory ran out with 8 prompts at a time; going on with 4; only near ties may change"
    assert caplog.messages[0] == message and len(caplog.messages) == 2


def test_memory_that_runs_out_for_one_prompt_is_an_error():
    """Guards against halving one for ever."""
    with pytest.raises(PolicyError, match="single text; lower n_samples"):
        list(halving([1], 4, limited(0, MemoryError())[0]))


def test_other_errors_are_not_taken_for_it():
    with pytest.raises(RuntimeError, match="shape"):
        list(halving([1, 2], 2, limited(0, RuntimeError("shape mismatch"))[0]))
    assert not out_of_memory(ValueError("memory"))


class Hungry(LetterCost):
    """Runs out of memory while it scores more than two prompts at a time."""

    def score(self, prompts, responses, finished):
        if len(set(prompts)) > 2:
            raise torch.OutOfMemoryError("full")
        return super().score(prompts, responses, finished)


def texts(cost, **kwargs):
    prompts = ["abc", "fed", "add", "face", "bed"]
    guard = ig.Guard(mock_policy(), cost, LetterReward(), CONFIG)
    answers = ig.decode("inferenceguard", guard, prompts, **kwargs)
    return [(r.prompt, r.text, r.status, r.counts) for r in answers]


def test_a_search_that_runs_out_of_memory_gives_the_same_answers():
    """Guards against a scorer's lack of memory being taken for a failure of the scorer, and against
    lost or doubled prompts.
    """
    assert texts(Hungry()) == texts(LetterCost())


def test_a_small_budget_gives_the_same_answers():
    needed = search_bytes(mock_policy().model, CONFIG, 4, "auto")
    assert texts(LetterCost(), memory_gb=needed / GIB) == texts(LetterCost())
    with pytest.raises(ParameterError, match="one prompt needs"):
        texts(LetterCost(), memory_gb=0.5 * needed / GIB)


class Standing:
    """A model that stands on a device."""

    def __init__(self, device):
        self.device = torch.device(device)


def test_the_fullest_device_decides_how_many_prompts_fit(monkeypatch):
    """Bug: room counted on the policy's device alone, for a scorer on another; two models of one
    device counted apart.
    """
    policy, beside, elsewhere = Standing("cuda:0"), Standing("cuda:0"), Standing("cuda:1")
    free = {policy.device: 100 * GIB, elsewhere.device: 30 * GIB}
    for name, does in {
        "session_bytes": lambda *_: 2 * GIB, "free_bytes": free.get,
        "missing_bytes": lambda *models: 0,
    }.items():  # fmt: skip
        monkeypatch.setattr(guard_module, name, does)
    monkeypatch.setattr(memory, "all_bytes", lambda: 130 * GIB)
    drawing = SimpleNamespace(model=policy, search_bytes=lambda *_: 4 * GIB)

    def room(readers, memory_gb=None):
        return guard_module.max_batch(drawing, set(readers), CONFIG, 3, memory_gb)

    share = memory.PLANNED_SHARE
    assert room([]) == int(share * 100 / 4)
    assert room([beside]) == int(share * 100 / (4 + 2))
    assert room([policy]) == int(share * 100 / (4 + 2))  # one model draws and scores
    assert room([elsewhere]) == int(share * 30 / 2) < int(share * 100 / 4)
    assert room([beside, elsewhere], memory_gb=12) == 2
