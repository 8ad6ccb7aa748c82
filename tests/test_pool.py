"""Tests of the pool of samples and scores, and of the engine that looks there first."""

import json
import math
import multiprocessing
import os
import sqlite3
import time
from contextlib import closing
from dataclasses import replace

import pytest
from copiedcode import edit, forget, know_code_from
from mockpolicy import LetterCost, LetterReward, MockModel, mock_policy, outcome
from tiny import SCORERS, letters, numbers, tiny, untrained, value_network

from igcore import Guard, ParameterError, RunError, decode, load_scorer
from igcore.engine.diversity import Failures, diversity_penalty
from igcore.engine.local import LocalEngine
from igcore.engine.sampling import Sampling
from igcore.methods import METHODS, method_of
from igcore.models.maximum import maximum_of
from igstudy.baselines.args import ArgsConfig
from igstudy.baselines.re_control import ReControlConfig
from igstudy.pool import Pool, policy_digest, scorer_digest, value_of
from igstudy.pool.pooled import PooledEngine
from igstudy.scorers.last_words import LastWordsScorer

PROMPTS = ["ab", "fed", "c", "dd", "eae", "fcb"]
SETTINGS = dict(budget=0.5, n_samples=4, keep=2, block_size=3, max_new_tokens=9, rounds=3)
SEARCHES = [name for name in METHODS if not method_of(name).network]
POOLED = [name for name in SEARCHES if not method_of(name).search]  # the others sample themselves
ENDS = {0}


def answered(policy, method, pool=None, prompts=PROMPTS, scorers=SCORERS, critic=None, **settings):
    kind = ReControlConfig if method.startswith("re-") else ArgsConfig
    config = kind(**SETTINGS | settings | ({"token_top_k": 5} if kind is ArgsConfig else {}))
    guard = Guard(policy, **scorers, config=config, critic=critic, pool=pool)
    return [outcome(response) for response in decode(method, guard, prompts)]


def no_engine(*_):
    raise AssertionError("the pool has everything, and no model is needed")


# --- answers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("diversity", ["half", "paper", "none"])
def test_answers_are_the_same_with_a_pool_empty_half_full_and_full(
    tmp_path, diversity, monkeypatch
):
    """Guards all that a pool might change: which tokens, which retries, what is counted, and which
    KV cache is carried from block to block. With the full pool there is no model at all.
    """
    policy, settings = mock_policy(), dict(diversity=diversity)
    alone = {name: answered(policy, name, **settings) for name in SEARCHES}
    half = Pool(tmp_path / "half")
    for i, name in enumerate(SEARCHES):  # another writer has answered some of the prompts
        answered(policy, name, half, PROMPTS[: 1 + i % 4], **settings)
    for folder, order in (("empty", SEARCHES), ("half", SEARCHES[::-1]), ("empty", SEARCHES)):
        pool = Pool(tmp_path / folder)
        for name in order:
            assert answered(policy, name, pool, **settings) == alone[name], (folder, name)
    assert not pool.drawn and pool.reused
    monkeypatch.setattr("igcore.engine.local.LocalEngine", no_engine)
    for name in POOLED:
        assert answered(policy, name, pool, **settings) == alone[name], name


@pytest.mark.parametrize("cache", ["shared", "dynamic"])
@pytest.mark.parametrize(
    ("method", "critic"),
    [
        ("inferenceguard-mix", untrained("m", accounting="peak", checks="word")),
        ("inferenceguard-critic", untrained("ho")),
        ("re-control", value_network()),
        ("args-lagrangian", None),
    ],
)
def test_what_reads_the_model_gets_the_same_from_a_pool(tmp_path, method, critic, cache):
    """Guards latents and steering over sequences that the model has not sampled itself."""
    policy = replace(letters(), cache=cache)
    more = dict(max_new_tokens=8 if method == "re-control" else 6, rounds=2, budget=1.0)
    alone = answered(policy, method, critic=critic, **more)
    for name in ("beam-augmented", "best-of-n", method, method):
        pool = Pool(tmp_path)
        wanted = alone if name == method else answered(policy, name, **more)
        found = answered(policy, name, pool, critic=critic, **more)
        for a, b in zip(wanted, found, strict=True):
            for field in ("text", "status", "tokens", "counts", "reason"):
                assert a[field] == b[field], (name, field)
            assert a["z_trace"] == pytest.approx(b["z_trace"])


def test_every_token_is_drawn_once(tmp_path):
    """Guards the purpose: tokens drawn by all methods are the distinct ones among them."""
    pool, policy, wanted = Pool(tmp_path), mock_policy(), 0
    for name in POOLED:
        for n in (2, 4):
            found = answered(policy, name, pool, n_samples=n)
            wanted += sum(answer["counts"].policy_tokens for answer in found)
    values = []
    for path in tmp_path.iterdir():
        with closing(sqlite3.connect(path)) as database:
            values += database.execute("SELECT value FROM records").fetchall()
    samples = [value for (value,) in values if isinstance(json.loads(value), list)]
    assert pool.drawn == len(samples) < len(values)
    assert pool.drawn + pool.reused == wanted > 2.5 * pool.drawn


# --- the engine -----------------------------------------------------------------------------------


def pooled(make, ends, pool, digest="llama"):
    return PooledEngine(make, replace(mock_policy(), eos_ids=frozenset(ends), digest=digest), pool)


@pytest.fixture(scope="module")
def llama():
    return tiny("llama")


@pytest.mark.parametrize("cache", ["shared", "dynamic"])
def test_the_head_of_a_block_is_reused_and_its_rest_sampled(llama, tmp_path, cache):
    """Guards blocks of other lengths: what is known of each row differs, some rows have ended."""
    ends, prompts = set(range(0, 97, 8)), [[5, 9, 11], [7, 8]]
    rows, keys = [0, 0, 0, 1, 1, 1], numbers(6, 9)
    make = lambda: LocalEngine(llama, ends, cache)  # noqa: E731
    engine = make()
    engine.open(prompts)
    whole = engine.sample_block(rows, keys)
    for first in (2, 5, 9):
        pool = Pool(tmp_path / f"{first}")
        begun = pooled(make, ends, pool)
        begun.open(prompts)
        begun.sample_block(rows[:4], [row[:first] for row in keys[:4]], last=True)
        again = pooled(make, ends, pool)
        again.open(prompts)
        block = again.sample_block(rows, keys)
        assert block.tokens == whole.tokens and block.ended == whole.ended
        assert block.encoded == whole.encoded and block.first == 0
        for a, b in zip(block.log_p, whole.log_p, strict=True):
            assert a == pytest.approx(b, abs=1e-4)
        assert pool.drawn == sum(map(len, whole.tokens))
        live = [c for c in range(6) if not block.ended[c]]
        again.select(live), engine.rollback()
        engine.sample_block(rows, keys)
        engine.select([c + 6 for c in live])
        assert again.history is not None and len(again.rows) == len(live)
        engine.open(prompts), engine.sample_block(rows, keys)


@pytest.mark.parametrize("cache", ["shared", "dynamic"])
def test_the_model_reads_only_the_prompts_that_lack_a_sample(llama, tmp_path, cache):
    """Guards time: one miss among many prompts must not make the model read them all."""
    prompts, keys, opened = [[5, 9, 11], [7, 8], [3]], numbers(6, 4), []

    class Counting(LocalEngine):
        def open(self, prompts):
            opened.append([list(prompt) for prompt in prompts])
            super().open(prompts)

    def blocks(pool, losses):
        """Sample three blocks; from the block on where it is lost, a prompt has no samples."""
        engine = pooled(lambda: Counting(llama, {97}, cache), {97}, pool)
        engine.open(prompts)
        found = []
        for at, lost in enumerate(losses):
            gone = [tuple(prompts[prompt]) for prompt in lost]
            engine.rows = [
                replace(row, place=os.urandom(16)) if row.prompt in gone else row
                for row in engine.rows
            ]
            rows = [0, 0, 1, 1, 2, 2]
            block = engine.sample_block(rows, [[key + at for key in row] for row in keys])
            found.append((block.tokens, block.encoded))
            engine.select([1, 2, 5])
        return found

    whole = blocks(Pool(tmp_path), [[], [], []])
    assert opened == [prompts]
    opened.clear()
    assert blocks(Pool(tmp_path), [[], [], []]) == whole and not opened
    assert blocks(Pool(tmp_path), [[], [1], []]) == whole
    assert opened == [[prompts[1]]], "it goes on from where it is"
    opened.clear()
    assert blocks(Pool(tmp_path), [[1], [0], [2]]) == whole
    assert opened == [[prompts[1]], prompts[:2], prompts]


def test_a_penalty_and_a_policy_part_what_they_change(tmp_path):
    """Guards the key: a retry with another penalty, or another policy, has samples of its own."""
    pool, keys = Pool(tmp_path), numbers(2, 3)
    drawn = []
    for policy in ("a", "b"):
        for seen in ((), (3,), (3, 4)):
            failures = Failures(frozenset(), None)
            for token in seen:
                failures.add([token])
            penalty = diversity_penalty(failures, 0, 1) if seen else None
            engine = pooled(lambda: LocalEngine(MockModel(), ENDS), ENDS, pool, policy)
            engine.open([[1, 2]])
            before = pool.drawn
            block = engine.sample_block([0, 0], keys, [penalty] * 2)
            drawn.append(pool.drawn - before)
            assert not {tokens[0] for tokens in block.tokens} & set(seen)
    assert all(drawn)


def test_only_live_candidates_can_be_selected(tmp_path):
    ends = {0, 3}
    engine = pooled(lambda: LocalEngine(MockModel(), ends), ends, Pool(tmp_path))
    engine.open([[1]])
    block = engine.sample_block([0] * 30, numbers(30, 4))
    ended = block.ended.index(True)
    with pytest.raises(KeyError, match=f"^{ended}$"):
        engine.select([ended])
    live = [c for c in range(30) if not block.ended[c]]
    engine.rollback(keep=live[:1])
    with pytest.raises(KeyError, match=f"^{live[1]}$"):
        engine.select(live[:2])


# --- processes ------------------------------------------------------------------------------------

NAMES = ["best-of-n", "inferenceguard", "beam-lagrangian", "beam-augmented"]


class Slow(MockModel):
    def forward(self, *given, **named):
        time.sleep(0.05)
        return super().forward(*given, **named)


def answer_slowly(folder):
    for name in NAMES:
        answered(replace(mock_policy(), model=Slow()), name, Pool(folder))


def test_two_processes_share_a_pool_and_one_may_be_killed(tmp_path):
    """Bug: a process that waits for one that is dead, or reads what it has half written."""
    expected = {name: answered(mock_policy(), name) for name in NAMES}
    other = multiprocessing.get_context("spawn").Process(target=answer_slowly, args=[tmp_path])
    other.start()
    while not list(tmp_path.glob("*.sqlite")):
        assert other.is_alive()
        time.sleep(0.01)
    pool = Pool(tmp_path)
    assert answered(mock_policy(), "best-of-n", pool) == expected["best-of-n"]
    assert other.is_alive()
    other.kill()
    other.join()
    assert {name: answered(mock_policy(), name, pool) for name in NAMES} == expected
    assert pool.drawn and pool.reused


# --- the files ------------------------------------------------------------------------------------


def test_a_pool_gives_back_what_it_was_given(tmp_path):
    """Bug: a NaN, which some engines give, read as None; a later value that replaces the first."""
    values = {b"a": [7, -1.5, math.nan, True], b"b": [2**31, 0.1, -math.inf, False], b"c": 1e-17}
    Pool(tmp_path).add((b"p", key, value) for key, value in values.items())
    Pool(tmp_path).add([(b"p", b"a", [99, 0.0, 0.0, False]), (b"q", b"d", 1.0)])
    with Pool(tmp_path).opened(b"p") as database:
        assert str({key: value_of(database, key) for key in values}) == str(values)
        assert value_of(database, b"d") is None


def test_what_cannot_be_kept_is_said(tmp_path):
    """Guards a policy that nobody could tell from another, and a folder that cannot be made."""
    with pytest.raises(ParameterError, match="policy 'mock' has no digest"):
        answered(replace(mock_policy(), digest=""), "base", Pool(tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot write in .*Not a directory.; free some space"):
        Pool(tmp_path / "file" / "pool")


def test_a_damaged_file_is_one_sentence(tmp_path):
    """Guards every damage that SQLite sees; without the file all goes on."""
    alone = answered(mock_policy(), "best-of-n")
    for damage in (lambda data: b"no database" * 99, lambda data: data[:4096] + b"x" * 4096):
        answered(mock_policy(), "base", Pool(tmp_path))
        for path in tmp_path.iterdir():
            path.write_bytes(damage(path.read_bytes()))
        with pytest.raises(RunError, match="cannot use .*sqlite .*delete this file"):
            answered(mock_policy(), "best-of-n", Pool(tmp_path))
        for path in tmp_path.iterdir():
            path.unlink()
        assert answered(mock_policy(), "best-of-n", Pool(tmp_path)) == alone


def test_a_full_disk_ends_in_one_sentence_and_loses_nothing(tmp_path, monkeypatch):
    """Guards what was kept before, and that half a block is not."""
    answered(mock_policy(), "base", Pool(tmp_path))
    connect = sqlite3.connect

    def full(*given, **named):
        database = connect(*given, **named)
        database.execute("PRAGMA max_page_count = 2")
        return database

    with monkeypatch.context() as context:
        context.setattr(sqlite3, "connect", full)
        with pytest.raises(RunError, match="cannot use .*disk is full.; free some space"):
            answered(mock_policy(), "best-of-n", Pool(tmp_path), n_samples=64)
    pool = Pool(tmp_path)
    assert answered(mock_policy(), "base", pool) == answered(mock_policy(), "base")
    assert pool.reused and not pool.drawn


def test_scores_are_kept_by_scorer_and_text(tmp_path):
    """Guards the key of a score: the scorer, its code, the prompt, the text, whether it is whole; a
    failure is asked again.
    """
    pool, cost = Pool(tmp_path), LetterCost()
    scores = pool.scores_of(cost)
    scores.add({("p", "ab", True): 2.0, ("p", "c", False): math.nan, ("q", "ab", True): 0.5})
    texts = [("p", "ab", True), ("p", "ab", False), ("p", "c", False), ("q", "ab", True)]
    fresh = Pool(tmp_path).scores_of(LetterCost())
    assert fresh.get(texts) == {texts[0]: 2.0, texts[3]: 0.5}
    assert not pool.scores_of(LetterReward()).get(texts)
    assert not pool.scores_of(cost, "KV cache").get(texts)
    # a function may call what its digest does not cover
    by_function = Guard(mock_policy(), cost=lambda text: float(len(text)), budget=1.0)
    assert scorer_digest(by_function.cost) is None
    # bug: a maximum with such a part gave the scores of the function before it was edited
    costs = [LetterCost(), lambda text: float(len(text))]
    assert scorer_digest(Guard(mock_policy(), cost=costs, budget=1.0).cost) is None
    ending = LastWordsScorer((by_function.cost,), 2)
    assert scorer_digest(maximum_of([cost, ending])) is None
    # people in JupyterLab edit a class and run its cell again
    of_a_cell = type("Cost", (LetterCost,), {"__module__": "__main__"})()
    assert scorer_digest(of_a_cell) is None
    assert scorer_digest(Guard(mock_policy(), cost=costs[:1] * 2, budget=1.0).cost)


def test_the_same_texts_are_scored_once(tmp_path):
    pool, cost = Pool(tmp_path), LetterCost()
    scorers = dict(cost=cost, reward=LetterReward())
    answered(mock_policy(), "beam-lagrangian", pool, scorers=scorers)
    before = cost.texts
    answered(
        mock_policy(), "beam-lagrangian", Pool(tmp_path), scorers=scorers, lagrange_multiplier=5.0
    )
    contract = 28  # texts that a new guard examines its cost model by
    final = before  # not pooled: the final check reads anew
    assert cost.texts - before < final and cost.texts > before + contract


def test_a_reported_reward_is_not_that_of_the_pool(tmp_path, monkeypatch):
    """Bug: a reward whose list of words had changed, under the same digest, was reported from the
    pool, and nobody could recompute it.
    """
    before = answered(mock_policy(), "best-of-n", Pool(tmp_path))
    monkeypatch.setattr(SCORERS["reward"], "of", lambda text: 100.0 + len(text))
    after = answered(mock_policy(), "best-of-n", Pool(tmp_path))
    assert [line["text"] for line in after] == [line["text"] for line in before]
    assert all(line["reward"] == 100.0 + len(line["text"]) for line in after)


def test_a_store_of_length_zero_is_used(tmp_path):
    """Bug: a store of a user's own with a method `__len__` was left out while it was empty."""
    pool = type("Sized", (Pool,), {"__len__": lambda self: 0})(tmp_path)
    answered(mock_policy(), "best-of-n", pool)
    assert pool.drawn and list(tmp_path.glob("*.sqlite"))


# --- around the pool ------------------------------------------------------------------------------


def test_changed_code_has_samples_and_scores_of_its_own(tmp_path, monkeypatch):
    """Bug: a scorer of the package whose neighbour module had changed found its old scores."""

    def digests():
        forget()
        return scorer_digest(load_scorer("offensive-language")), policy_digest(mock_policy())

    code, known = know_code_from(monkeypatch, tmp_path), [digests()]
    for module in ("igcore/models/wording.py", "igserve/client.py"):
        edit(code / module, "\nimport ", "\nother = 1\nimport ")
        known.append(digests())
    forget()
    scores, samples = zip(*known, strict=True)
    assert len({*scores}) == len({*samples}) == 3


@pytest.mark.parametrize("shape", [dict(temperature=0.7), dict(top_p=0.5), dict(top_k=2)])
def test_a_pool_tells_samplings_apart(tmp_path, shape):
    """Bug: a sample of one temperature, top-p or top-k found by a search with another."""
    policy, pool = mock_policy(), Pool(tmp_path)
    answered(policy, "inferenceguard", pool)
    alone = answered(policy, "inferenceguard", **shape)
    for drawn in (True, False):  # from an empty pool, then from a full one
        pool = Pool(tmp_path)
        assert answered(policy, "inferenceguard", pool, **shape) == alone
        assert bool(pool.drawn) == drawn
    assert Pool(tmp_path).engine(None, policy, Sampling()).policy == policy_digest(policy)
