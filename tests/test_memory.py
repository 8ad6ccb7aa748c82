"""Tests of the memory plan, on numbers worked out by hand and on work that runs out of memory when
told to; and of the number of threads.
"""

import logging
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mockpolicy import LetterCost, LetterReward, mock_policy
from tiny import Counter, tiny, tiny_model, tiny_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import igcore as ig
from igcore.config import SearchConfig
from igcore.engine import device, memory
from igcore.engine import threads as module
from igcore.engine.attention import Slab
from igcore.engine.device import GIB, out_of_memory
from igcore.engine.memory import (
    CHECKS,
    batch_size,
    check_bytes,
    halving,
    search_bytes,
    session_bytes,
)
from igcore.engine.threads import faster_threads
from igcore.errors import ParameterError, PolicyError
from igcore.models.lm_scorer import Backbone, LMScorer
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


def test_bytes_of_a_search_worked_out_by_hand():
    """Guards the formula: 3 layers, keys and values, 2 key heads of 8 numbers of 4 bytes, o_t of 32
    numbers; 6 samples, 2 beams, two rounds, two blocks of 4 tokens, a prompt of 5.
    """
    model = tiny("llama", num_hidden_layers=3)
    token, state, drawn = 3 * 2 * 2 * 8 * 4, 32 * 4, 6 * 97 * 8
    # a prompt twice; then while the last block is sampled, while it is scored, and the one before
    new = [6 * 8 + 2 * 4, 2 * 8, 6 * 4 + 2 * 4]
    shared = [token * 2 * 5 + (token + state) * n + drawn for n in new]
    assert search_bytes(model, CONFIG, 5, "shared") == shared
    assert search_bytes(model, CONFIG, 5, "auto") == shared
    assert search_bytes(model, CONFIG, 5, "dynamic") == [token * 2 * 10 * (5 + 8) + drawn] * 3
    # a scorer keeps the candidates of both rounds
    kept = [6 * 8 + 2 * 4, 2 * 6 * 8 + 2 * 4, 2 * 6 * 4]
    assert session_bytes(model, CONFIG, 5) == [token * 5 + (token + state) * n for n in kept]
    assert check_bytes(model, CONFIG) == (token + state) * 32 * 8


class Held:
    """The bytes of the slabs that exist, and the most at one time."""

    def __init__(self, monkeypatch):
        self.now = self.most = self.rows = 0
        empty = Slab.empty

        def counted(prompts, width, *sizes):
            slab = empty(prompts, width, *sizes)
            size = sum(x.nbytes for x in [*slab.keys, *slab.values, slab.hidden])
            self.now += size
            self.most = max(self.most, self.now)
            self.rows = max(self.rows, width * len(prompts.ids))
            weakref.finalize(slab, self.free, size)
            return slab

        monkeypatch.setattr(Slab, "empty", counted)

    def free(self, size):
        self.now -= size


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
def test_an_end_token_after_each_word_costs_little(monkeypatch, n_samples, keep, length, most):
    """Bug: a cost with an end token read each prefix of a candidate in a row of its own: 20 times
    the policy's tokens, in 14 times the memory that was planned.
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
    held = Held(monkeypatch)
    with Counter(policy.model) as drawn, Counter(reader) as read:
        answer = guard("ab cd ef gh ij")
    assert answer.n_tokens == length and len(answer.text.split()) == length
    assert read.tokens <= most * drawn.tokens
    assert held.rows <= max(n_samples, CHECKS)
    parts = search_bytes(policy.model, guard.config, 0), session_bytes(reader, guard.config, 0)
    drawn_bytes = n_samples * len(tokenizer) * 8  # logits are no KV cache
    planned = max(map(sum, zip(*parts, strict=True))) - drawn_bytes
    planned += check_bytes(reader, guard.config)
    assert held.most == pytest.approx(planned, rel=0.05)


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
    needed = max(search_bytes(mock_policy().model, CONFIG, 4, "auto"))
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
        "session_bytes": lambda *_: [GIB, 2 * GIB], "free_bytes": free.get,
        "missing_bytes": lambda *models: 0, "check_bytes": lambda *_: 0,
    }.items():  # fmt: skip
        monkeypatch.setattr(memory, name, does)
    monkeypatch.setattr(memory, "all_bytes", lambda: 130 * GIB)
    drawing = SimpleNamespace(model=policy, search_bytes=lambda *_: [GIB, 4 * GIB])

    def room(readers, memory_gb=None):
        return memory.max_batch(drawing, set(readers), CONFIG, 3, memory_gb)

    share = memory.PLANNED_SHARE
    assert room([]) == int(share * 100 / 4)
    assert room([beside]) == int(share * 100 / (4 + 2))
    assert room([policy]) == int(share * 100 / (4 + 2))  # one model draws and scores
    assert room([elsewhere]) == int(share * 30 / 2) < int(share * 100 / 4)
    assert room([beside, elsewhere], memory_gb=12) == 2


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
    free = int(table["MemAvailable"].split()[0]) * 1024
    # Bug: pages of the file cache counted as taken, so a busy machine decoded one prompt at a time
    assert device.free_bytes(torch.device("cpu")) == pytest.approx(free, rel=0.2)


# --- the number of threads: the faster one, tried once, and torch's own afterwards ----------------

TOKENIZER = tiny_tokenizer()
SETTINGS = dict(max_new_tokens=6, block_size=3)
PROMPTS = ["Hello", "Good morning", "How are you?"]


class Machine:
    """torch's numbers of threads, as torch keeps them, and a clock of simulated steps."""

    def __init__(self, cores, seconds):
        self.of_new = cores  # what a new thread of Python begins with
        self.here = threading.local()
        self.seconds, self.now, self.steps = seconds, 0.0, []

    def get(self):
        return self.here.__dict__.setdefault("n", self.of_new)

    def set(self, n):
        self.here.n = self.of_new = n

    def step(self, *_, **__):
        self.steps.append(self.get())
        first = self.steps.count(self.get()) == 1  # which starts the threads
        self.now += 99 if first else self.seconds[self.get()]


@pytest.fixture
def machine(monkeypatch):
    """Return what sets up a machine: threads of torch, and the seconds of a step by threads."""

    def arrange(cores=4, seconds=None):
        there = Machine(cores, seconds or {1: 1.0, cores: 16.0})
        monkeypatch.setattr(torch, "get_num_threads", there.get)
        monkeypatch.setattr(torch, "set_num_threads", there.set)
        monkeypatch.setattr(module.time, "perf_counter", lambda: there.now)
        monkeypatch.setattr(module, "forward", there.step)
        return there

    return arrange


@pytest.mark.parametrize(
    ("cores", "seconds", "faster"),
    [
        (4, {1: 1.0, 4: 16.0}, 1),  # a busy machine
        (4, {1: 1.0, 4: 0.3}, 4),
        (2, {1: 1.0, 2: 1.0}, 1),
    ],
)
def test_the_faster_number_is_used_and_tried_once(machine, cores, seconds, faster):
    """Bug: on a busy machine of two cores two threads took 16 times as long as one."""
    there, model = machine(cores, seconds), tiny_model(TOKENIZER)
    for _ in range(2):
        with faster_threads(model):
            assert there.get() == faster
        assert there.get() == there.of_new == cores
    assert there.steps == 3 * [1] + 3 * [cores]
    there.set(8)  # by the user
    there.seconds[8] = 0.1
    with faster_threads(model):
        assert there.get() == 8


def test_one_thread_is_taken_as_it_is(machine):
    """Guards OMP_NUM_THREADS=1, under which float sums must be the same in every run."""
    there = machine(1)
    with faster_threads(tiny_model(TOKENIZER)):
        assert there.get() == 1
    assert not there.steps


@pytest.mark.parametrize("model", [object(), tiny_model(TOKENIZER).to("meta")])
def test_a_model_that_computes_elsewhere_is_not_tried(machine, model):
    there = machine()
    with faster_threads(model):
        assert there.get() == 4
    assert not there.steps


@pytest.mark.parametrize("broken", ["the call", "a step"])
def test_the_number_is_restored_after_an_error(machine, monkeypatch, broken):
    """Guards the user's process against a call that is stopped."""
    there = machine()
    if broken == "a step":
        monkeypatch.setattr(module, "forward", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError), faster_threads(tiny_model(TOKENIZER)):
        raise ZeroDivisionError
    assert there.get() == there.of_new == 4
    assert module._BEFORE == [] and not hasattr(module._HERE, "inside")


def test_a_call_inside_a_call_changes_nothing(machine):
    """Guards a guard in a cost: its end would give the outer call all threads again."""
    there, inner = machine(), tiny_model(TOKENIZER)
    with faster_threads(tiny_model(TOKENIZER)):
        with faster_threads(inner):
            assert there.get() == 1
        assert there.get() == 1
    assert there.get() == 4 and len(there.steps) == 6


@pytest.mark.parametrize("first", ["one", "two"])
def test_calls_in_threads_leave_each_thread_as_it_was(machine, first):
    """Bug: a thread that began during a call of another one had its single thread for ever."""
    there, models = machine(), [tiny_model(TOKENIZER) for _ in range(2)]
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as two:
        contexts = {pool: faster_threads(m) for pool, m in zip((one, two), models, strict=True)}
        for pool, context in contexts.items():
            pool.submit(context.__enter__).result()
            assert pool.submit(there.get).result() == 1
        for pool in (one, two) if first == "one" else (two, one):
            pool.submit(contexts[pool].__exit__, None, None, None).result()
        assert [pool.submit(there.get).result() for pool in (one, two)] == [4, 4]
    assert there.of_new == there.get() == 4 and module._BEFORE == []


def test_no_number_is_held_while_the_user_has_the_answers(machine, monkeypatch):
    """Guards the user's own work between two groups of prompts."""
    there, inside = machine(), []
    cost = lambda text: inside.append(there.get()) or 0  # noqa: E731
    monkeypatch.setattr(module, "_faster", lambda model, most: there.set(1) or 1)
    model = tiny_model(TOKENIZER)
    guard = ig.Guard((model, TOKENIZER), cost, budget=1, group_size=1, **SETTINGS)
    monkeypatch.setattr("igcore.decoding.max_batch", lambda *_: inside.append(there.get()) or 9)
    inside.clear()  # of the examination
    answers = ig.decode("backtracking", guard, PROMPTS)
    assert inside == [1]  # the test of the model is work, too
    for _ in answers:
        assert there.get() == 4
    assert inside[1:] and {*inside} == {1}


def test_answers_are_those_of_one_thread():
    """Guards the number that torch itself has: a whole answer with the real one."""
    model = tiny_model(TOKENIZER)
    guard = ig.Guard((model, TOKENIZER), lambda text: len(text), budget=99, **SETTINGS)
    expected, found = guard("Hello").tokens, []

    def answer():  # in a thread of its own, whose number dies with it
        torch.set_num_threads(2)
        found.append((guard("Hello").tokens, torch.get_num_threads()))
        torch.set_num_threads(1)

    thread = threading.Thread(target=answer)
    thread.start()
    thread.join()
    assert found == [(expected, 2)] and module._FASTER[model][0] == 2
