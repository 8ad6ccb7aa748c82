"""Tests of work that runs out of memory when told to, and of what the machine says of itself."""

import logging
from itertools import product
from pathlib import Path

import pytest
import torch
from mockpolicy import LetterCost, LetterReward, mock_policy
from tiny import Counter, tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import igcore as ig
from igcore.config import SearchConfig
from igcore.engine import device
from igcore.engine.attention import Slab
from igcore.engine.device import out_of_memory
from igcore.engine.memory import halving
from igcore.errors import PolicyError
from igcore.models.lm_scorer import Backbone, LMScorer
from igcore.models.session import CHECKS
from igcore.policy import Policy
from igcore.scorers import COST

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


@pytest.fixture
def slots(monkeypatch):
    """The number of slots of each slab that is made."""
    made, empty = [], Slab.empty

    def counted(prompts, width, *sizes):
        made.append(width * len(prompts.ids))
        return empty(prompts, width, *sizes)

    monkeypatch.setattr(Slab, "empty", counted)
    return made


def of_words() -> PreTrainedTokenizerFast:
    """A tokenizer whose every token is a word of two letters."""
    letters = "abcdefghijklmnopqrst"
    words = {f"▁{a}{b}": at for at, (a, b) in enumerate(product(letters, letters))}
    tokenizer = Tokenizer(models.WordLevel(words | {"<unk>": len(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


@pytest.mark.parametrize(
    "n_samples, keep, length, most",
    [(16, 4, 64, 2.5), (128, 32, 128, 1.8)],
    ids=["small", "as in the paper"],
)
def test_an_end_token_after_each_word_costs_little(slots, n_samples, keep, length, most):
    """Bug: a cost with an end token read each prefix of a candidate in a row of its own: 20 times
    the policy's tokens, in 14 times their memory.
    """
    tokenizer = of_words()
    sizes = dict(vocab_size=len(tokenizer), max_position_embeddings=256)
    policy = Policy("words", tiny("llama", **sizes), tokenizer)
    reader = tiny("qwen2", **sizes)
    weights = torch.randn(32, generator=torch.Generator().manual_seed(0))

    def head(states):
        return (states @ weights).sigmoid()

    end_id = len(tokenizer) - 1
    cost = LMScorer("ended", Backbone(reader, tokenizer, end_id=end_id), head, COST, "v1", "share")
    guard = ig.Guard(
        policy, cost, budget=1, method="inferenceguard", rounds=1, block_size=32, keep=keep,
        n_samples=n_samples, max_new_tokens=length,
    )  # fmt: skip
    with Counter(policy.model) as drawn, Counter(reader) as read:
        answer = guard("ab cd ef gh ij")
    assert answer.n_tokens == length and len(answer.text.split()) == length
    assert read.tokens <= most * drawn.tokens
    assert max(slots) <= max(n_samples, CHECKS)


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


def texts(cost):
    prompts = ["abc", "fed", "add", "face", "bed"]
    guard = ig.Guard(mock_policy(), cost, LetterReward(), CONFIG)
    answers = ig.decode("inferenceguard", guard, prompts)
    return [(r.prompt, r.text, r.status, r.counts) for r in answers]


def test_a_search_that_runs_out_of_memory_gives_the_same_answers():
    """Guards against a scorer's lack of memory being taken for a failure of the scorer, and against
    lost or doubled prompts.
    """
    assert texts(Hungry()) == texts(LetterCost())


# --- memory and units of the machine --------------------------------------------------------------


def test_units_for_bfloat16_are_asked_of_the_processor(monkeypatch):
    """Guards the automatic type where torch has no such question."""
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    for answers in ((True, False), (False, True), (False, False)):
        for name, answer in zip(names, answers, strict=True):
            monkeypatch.setattr(torch.cpu, name, lambda answer=answer: answer, raising=False)
        assert device.multiplies_bfloat16() == any(answers)
    for name in names:
        monkeypatch.delattr(torch.cpu, name)
    assert not device.multiplies_bfloat16()


def test_memory_is_that_of_the_kernels_own_table(monkeypatch, tmp_path):
    """Bug: pages, or kB, taken for bytes."""
    monkeypatch.setattr(device, "CGROUP", tmp_path / "none")
    table = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    assert device.installed_bytes() == 1024 * int(table["MemTotal"].split()[0])
