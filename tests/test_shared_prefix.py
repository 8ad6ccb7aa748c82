"""Tests of the cache that keeps every prompt once, against one sequence read alone (float32) and
transformers' own cache; and of the state in that one, against one sequence read alone.
"""

import pytest
import torch
import transformers
from tiny import FITTING, OTHERS, PROMPTS, Counter, reencode, tiny

from igcore import PolicyError
from igcore.engine import agreement
from igcore.engine.agreement import supports_shared_prefix
from igcore.engine.attention import NOT_PLAIN, Packing, attend
from igcore.engine.kv_cache import DynamicRows, cache_name, forward, padded
from igcore.engine.local import LocalEngine
from igcore.engine.prefix_cache import SharedRows
from igcore.engine.prepack import use_prepacked


@pytest.fixture(scope="module")
def llama():
    return tiny("llama")


def tokens_of(n: int, seed: int) -> list[int]:
    return torch.randint(97, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def assert_rows(model, rows, sequences, atol=1e-4):
    """o_t of every new token, and the logits after the last, are those of the whole sequence read
    alone.
    """
    for row, (owner, new) in enumerate(sequences):
        hidden, logits = reencode(model, PROMPTS[owner] + new)
        assert rows.owner(row) == owner and rows.lengths[row] == len(new)
        for length in range(1, len(new) + 1):
            assert torch.allclose(
                rows.last_hidden(row, length), hidden[len(PROMPTS[owner]) + length - 1], atol=atol
            )
        assert torch.allclose(rows.hidden[row], hidden[-1], atol=atol)
        assert rows.logits.shape[1] == 0 or torch.allclose(rows.logits[row], logits[-1], atol=atol)


def grown(root, owners, counts, seed=0):
    """Rows of `root`'s prompts with so many new tokens, and each row's (prompt, new tokens)."""
    rows = root.gather([(root, owner) for owner in owners], reserve=max(counts))
    new = [tokens_of(n, seed + i) for i, n in enumerate(counts)]
    rows.read(new)
    return rows, list(zip(owners, new, strict=True))


@pytest.mark.parametrize("name", FITTING)
def test_many_tokens_at_a_time_on_rows_of_several_lengths(name):
    """Guards positions, causality and packing where rows differ: each token must see its prompt,
    its row's past, and no more.
    """
    model = tiny(name)
    root = SharedRows.open(model, PROMPTS)
    # one prompt has three rows: the others' slots stay empty
    rows, sequences = grown(root, [2, 0, 2, 1, 2], [4, 1, 7, 2, 3])
    assert_rows(model, rows, sequences)
    wider = root.gather([(rows, row) for row in (3, 4, 4, 0)], reserve=6)
    new = [tokens_of(n, 50 + n) for n in (6, 1, 2, 5)]
    wider.read(new)
    sequences = [
        (sequences[row][0], sequences[row][1] + more)
        for row, more in zip((3, 4, 4, 0), new, strict=True)
    ]
    assert_rows(model, wider, sequences)


def test_rows_of_several_states_are_gathered_in_any_order_and_left_alone(llama):
    """Guards the copies: rows that share a source must not share their slots, and a retry needs the
    sources as they were.
    """
    root = SharedRows.open(llama, PROMPTS)
    one, in_one = grown(root, [0, 1, 2], [3, 3, 3])
    two, in_two = grown(root, [1, 1], [2, 5], seed=10)
    before = [
        x.clone()
        for state in (one, two)
        for x in (*state.slab.keys, *state.slab.values, state.slab.hidden, state.logits)
    ]
    rows = root.gather([(two, 1), (one, 2), (two, 0), (two, 1), (one, 1), (root, 0)], reserve=2)
    new = [tokens_of(n, 70 + i) for i, n in enumerate((1, 2, 2, 2, 1, 1))]
    rows.read(new)
    chosen = [in_two[1], in_one[2], in_two[0], in_two[1], in_one[1], (0, [])]
    assert_rows(
        llama, rows, [(owner, old + more) for (owner, old), more in zip(chosen, new, strict=True)]
    )
    after = [
        x
        for state in (one, two)
        for x in (*state.slab.keys, *state.slab.values, state.slab.hidden, state.logits)
    ]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert_rows(llama, one, in_one), assert_rows(llama, two, in_two)


def test_a_cropped_row_forgets_what_followed(llama):
    """Guards the mask over a slab that still holds other tokens: scorers crop to what two texts
    share.
    """
    root = SharedRows.open(llama, PROMPTS)
    old, sequences = grown(root, [0, 1, 2], [6, 4, 5])
    rows = root.gather([(old, 0), (old, 1), (old, 2), (old, 2)])
    rows.lengths = [2, 4, 0, 3]
    new = [[1, 2, 3], [4], [5], [6, 7]]
    rows = root.gather([(rows, i) for i in range(4)], reserve=1)
    rows.read(new)
    kept = [sequences[i][1][:n] for i, n in zip((0, 1, 2, 2), (2, 4, 0, 3), strict=True)]
    assert_rows(
        llama,
        rows,
        [(owner, k + more) for owner, k, more in zip((0, 1, 2, 2), kept, new, strict=True)],
    )


@pytest.mark.parametrize("prompts", [PROMPTS, [[1, 2], [3, 4]]], ids=["padded", "even"])
@pytest.mark.parametrize("order", [[0, 0, 1, 1], [1, 0, 1, 0]], ids=["dense", "scattered"])
@pytest.mark.parametrize(
    "first", [[0, 0, 0, 0], [3, 3, 3, 3], [1, 4, 2, 3]], ids=["new", "level", "ragged"]
)
def test_single_steps(llama, prompts, order, first):
    """Guards the short cuts of a step whose rows are all alike: no mask, or nothing to scatter."""
    root = SharedRows.open(llama, prompts)
    rows = root.gather([(root, owner) for owner in order], reserve=4 + max(first))
    new = [tokens_of(n, 90 + i) for i, n in enumerate(first)]
    if any(first):
        rows.read(new)
    for step in range(4):
        tokens = tokens_of(4, step)
        rows = rows.step(range(4), tokens)
        new = [n + [t] for n, t in zip(new, tokens, strict=True)]
        for row, owner in enumerate(order):
            hidden, logits = reencode(llama, prompts[owner] + new[row])
            assert torch.allclose(rows.hidden[row], hidden[-1], atol=1e-4)
            assert torch.allclose(rows.logits[row], logits[-1], atol=1e-4)


def test_rows_that_end_are_dropped_and_their_slots_given_back(llama):
    """Guards compaction: it happens when half of the slots can go, not before, and changes nothing
    in the rows that go on.
    """
    root = SharedRows.open(llama, PROMPTS)
    rows, room = root.gather([(root, r) for r in (0, 0, 0, 0, 1, 1, 1, 1)], reserve=7), 7
    sequences, slots = [(owner, []) for owner in (0, 0, 0, 0, 1, 1, 1, 1)], []
    for step, going in enumerate(
        ([7, 6, 5, 4, 3, 2, 1, 0], [0, 1, 2, 3, 4, 5, 7], [0, 2, 5], [0, 1, 2], [2, 0], [1], [0])
    ):
        tokens = tokens_of(len(going), step)
        rows = rows.step(going, tokens)
        sequences = [
            (sequences[i][0], sequences[i][1] + [t]) for i, t in zip(going, tokens, strict=True)
        ]
        slots.append(len(rows.slab.hidden))
        # room for what is still to come, and no more
        assert rows.slab.hidden.shape[1] == rows.slab.keys[0].shape[2] == room
        assert_rows(llama, rows, sequences)
    assert slots == [8, 8, 4, 4, 2, 1, 1]


def test_slots_are_not_copied_at_every_step(llama, monkeypatch):
    """Guards the gain of slots where the rows of one prompt outlive the others: copying them again
    would free none.
    """
    root = SharedRows.open(llama, [[1, 2, 3]] * 4)
    rows = root.gather([(root, r) for r in range(4) for _ in range(4)], reserve=9)
    copies, gather = [], SharedRows.gather
    monkeypatch.setattr(
        SharedRows,
        "gather",
        lambda self, *args, **more: copies.append(1) or gather(self, *args, **more),
    )
    # 7 of 16 rows go on, and still need 16 slots
    rows = rows.step([0, 1, 2, 3, 4, 8, 12], range(7))
    for _ in range(4):
        rows = rows.step(range(7), range(7))
    assert not copies
    rows = rows.step([0, 1, 4], range(3))  # 3 rows of 2 prompts
    assert len(copies) == 1 and len(rows.slab.hidden) == 4


@torch.inference_mode()
def test_a_prompt_is_read_once_while_the_weights_stay(llama, monkeypatch):
    """Guards the time of many methods on the same prompts; and prompts of weights that are gone."""
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8], [9], [1, 2, 3, 4, 5, 6, 7], [9]]
    alone = SharedRows.open(llama, prompts)
    with Counter(llama) as count, use_prepacked(llama):
        first, again = SharedRows.open(llama, prompts), SharedRows.open(llama, prompts[::-1])
        assert count.tokens == 2 * 8 + 1  # two of about one length together, and the short one
        SharedRows.open(llama, prompts[:1], watch=0)
        assert count.tokens == 17 + 8, "its states are others"
        for rows in (first, again):
            order = range(4) if rows is first else range(3, -1, -1)
            torch.testing.assert_close(rows.logits, alone.logits[list(order)])
            for ours, theirs in zip(rows.prompts.keys, alone.prompts.keys, strict=True):
                seen = rows.prompts.mask[:, None, :, None]
                torch.testing.assert_close(ours * seen, theirs[list(order)] * seen)
    with Counter(llama) as count:
        SharedRows.open(llama, prompts[:1])
        assert count.tokens == 8, "weights may have changed since"
    monkeypatch.setattr("igcore.engine.prefix_cache.MOST_KEPT", 0)
    with Counter(llama) as count, use_prepacked(llama):
        for _ in range(2):
            torch.testing.assert_close(SharedRows.open(llama, prompts).logits, alone.logits)
        assert count.tokens == 2 * 17, "nothing is kept"


@torch.inference_mode()
def test_a_prompt_is_found_again_in_the_same_company_alone(monkeypatch):
    """Guards repeated calls: a prompt that was read beside others has other last bits, and in
    bfloat16 another answer than in a new process.
    """
    read, prompts = [], [[1, 2, 3, 4, 5], [9, 8, 7, 6, 5]]
    before = DynamicRows.open
    monkeypatch.setattr(
        DynamicRows, "open", lambda model, *args: read.append(args[0]) or before(model, *args)
    )
    model = tiny("llama")
    wanted = [prompts, prompts[:1], prompts, prompts[::-1] + prompts, prompts[:1], prompts[1:]]
    found = []
    for several in wanted:
        with use_prepacked(model):
            found.append(SharedRows.open(model, several).logits)
    assert read == [[*map(tuple, several)] for several in (prompts, prompts[:1], prompts[1:])]
    assert torch.equal(found[0], found[2]) and torch.equal(found[3][2:], found[0])
    assert torch.equal(found[1], found[4])


@torch.inference_mode()
@pytest.mark.parametrize("new", [[], [6, 2, 9]])
def test_a_sequence_of_a_long_prompt_is_read_alone_from_where_the_prompt_ends(
    llama, new, monkeypatch
):
    """Guards the time of near ties, which grew with the prompt. Bug: bits of the batch that the
    prompt was read in; so they are the same bits with and without other prompts and rows.
    """
    monkeypatch.setattr("igcore.engine.prefix_cache.LONG", 5)
    long, same, short = [3, 3, 8, 20, 41, 7], [4, 11, 8, 2, 41, 1], [5, 9, 11]
    hidden, logits = [], []
    for prompts in ([long], [short, same, long]):
        with Counter(llama) as count:
            rows = SharedRows.open(llama, prompts)
            assert count.shapes == [(1, len(prompt)) for prompt in sorted(prompts, key=len)]
        rows = rows.gather([(rows, i) for i in range(len(prompts) - 1, -1, -1)], reserve=2)
        rows.read([[50 + i] for i in range(len(prompts))])
        with Counter(llama) as count:
            alone = rows.alone(0, long + new)
            assert count.tokens == 1 + len(new)
            if len(prompts) == 3:
                rows.alone(2, short + new)
                assert count.tokens == 1 + len(new) + len(short + new), "a short prompt is read"
        hidden.append(alone.hidden)
        logits.append(alone.logits)
    assert torch.equal(*hidden) and torch.equal(*logits)
    expected_hidden, expected = reencode(llama, long + new)
    torch.testing.assert_close(hidden[0], expected_hidden[-1:], rtol=0, atol=1e-5)
    torch.testing.assert_close(logits[0], expected[-1:], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_an_attention_that_is_not_plain_is_refused(llama, name):
    """Guards against ignoring what a model asks of its attention."""
    with pytest.raises(NotImplementedError, match=name):
        attend(llama.base_model.layers[0].self_attn, None, None, None, None, **{name: 0.5})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_slip_is_no_fit_in_any_dtype(dtype, monkeypatch):
    """Guards the tolerance of `supports_shared_prefix`: wide enough for rounding, too narrow for
    one key too many or positions off by one.
    """
    model, packing, place = tiny("llama", dtype), Packing.__init__, Packing._mask
    assert supports_shared_prefix(model)

    def shifted(self, *args):
        packing(self, *args)
        self.position = self.position + 1

    for name, slip in (("__init__", shifted), ("_mask", lambda self, *args: None)):
        with monkeypatch.context() as patch:
            patch.setattr(Packing, name, slip)
            assert agreement._try(model, SharedRows)
    assert Packing._mask is place and not agreement._try(model, SharedRows)


def test_a_model_is_tried_once():
    """Guards the cost of `supports_shared_prefix`, which is called for every group of prompts, and
    vocabularies of a few tokens.
    """
    model = tiny("llama", vocab_size=4)
    with Counter(model) as counter:
        assert supports_shared_prefix(model) and (first := counter.tokens) > 0
        assert supports_shared_prefix(model) and counter.tokens == first


def test_half_precision_is_as_good_as_transformers_own():
    """Guards accumulation in bfloat16: against float32 weights both caches are off by rounding, and
    by much the same.
    """
    exact, model = tiny("llama"), tiny("llama", torch.bfloat16)
    exact.load_state_dict(model.float().state_dict()), model.bfloat16()

    def hidden(model, kind):
        root = kind.open(model, PROMPTS)
        rows, out = root.gather([(root, r) for r in (0, 0, 1, 2, 2)], reserve=20), []
        for step in range(20):
            rows = rows.step(range(5), tokens_of(5, step))
            out.append(rows.hidden.float())
        return torch.stack(out)

    truth = hidden(exact, DynamicRows)
    ours, theirs = (
        (hidden(model, kind) - truth).norm() / truth.norm() for kind in (SharedRows, DynamicRows)
    )
    assert ours < 1.5 * theirs < 0.05


# --- the state in transformers' own cache ---------------------------------------------------------

# keys, a window of them, convolutions, recurrent states
HELD = ["llama", "mistral-window", "lfm2", "falcon_h1"]


def tensors(x):
    """Every tensor of a state, copied."""
    if isinstance(x, torch.Tensor):
        return [x.clone()]
    parts = (
        x
        if isinstance(x, list)
        else (x if isinstance(x, dict) else getattr(x, "__dict__", {})).values()
    )
    return [t for part in parts for t in tensors(part)]


def state_of(rows) -> list[torch.Tensor]:
    return tensors(rows.cache.layers) + tensors([rows.mask, rows.hidden, rows.logits, rows.past])


@pytest.mark.parametrize("name", HELD)
def test_rows_of_two_states_are_copied_and_their_sources_left_alone(name):
    """Guards retries: a step on a copy must not write into what it was copied from, in whatever a
    layer keeps.
    """
    model = tiny(name)
    root = DynamicRows.open(model, PROMPTS)
    one = (
        root.gather([(root, row) for row in (0, 1, 2)])
        .step(range(3), [1, 2, 3])
        .step(range(3), [4, 5, 6])
    )
    two = (
        root.gather([(root, row) for row in (2, 1)]).step(range(2), [7, 8]).step(range(2), [9, 10])
    )
    before = [state_of(rows) for rows in (root, one, two)]
    rows = root.gather([(two, 0), (one, 2), (one, 0), (two, 0)]).step(range(4), [11, 12, 13, 14])
    rows = rows.step([3, 1, 2], [15, 16, 17])
    expected = [
        PROMPTS[2] + [7, 9, 14, 15],
        PROMPTS[2] + [3, 6, 12, 16],
        PROMPTS[0] + [1, 4, 13, 17],
    ]
    for row, ids in enumerate(expected):
        hidden, logits = reencode(model, ids)
        assert torch.allclose(rows.logits[row], logits[-1], atol=1e-4)
        assert torch.allclose(rows.past[row], hidden[-4:], atol=1e-4)
    for old, state in zip(before, (root, one, two), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(old, state_of(state), strict=True))


@torch.inference_mode()
def test_the_history_of_a_window_is_what_it_still_keeps():
    """Guards slices by absolute position, which are empty or of other tokens in a cache that has
    forgotten its beginning.
    """
    model = tiny("mistral-window")
    rows = DynamicRows.open(model, PROMPTS)
    full = tiny("mistral")
    read = ([1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12], [13, 14, 15])
    for length, tokens in enumerate(read, start=1):
        rows = rows.step(range(3), tokens)
        history = rows.history(range(3))
        n = min(length, 3)  # a window of 4 keeps 3 for the next token
        assert history.hidden.shape[1] == length
        assert history.keys[0].shape[2] == history.values[1].shape[2] == n
    past = transformers.DynamicCache(config=full.config)
    full(torch.tensor([PROMPTS[1] + [2, 5, 8, 11, 14]]), **{cache_name(full): past})
    # of the first layer: no window before it
    assert torch.allclose(history.keys[0][1], past.layers[0].keys[0, :, -3:], atol=1e-5)


def test_the_history_names_only_layers_with_attention():
    """Guards hybrid models: a convolution keeps no keys."""
    rows = DynamicRows.open(tiny("lfm2"), PROMPTS).step(range(3), [1, 2, 3])
    history = rows.history(range(3))
    assert len(history.keys) == len(history.values) == 1 and history.keys[0].shape == (3, 2, 1, 8)


def test_a_model_that_ignores_its_past_is_refused():
    """Guards against drawing every token without its context: RWKV swallows a cache and has a state
    of another name, as Mamba had until transformers 5.23.
    """
    settings = dict(vocab_size=97, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32)
    model = transformers.RwkvForCausalLM(transformers.RwkvConfig(**settings)).eval()
    with pytest.raises(PolicyError, match="RwkvForCausalLM does not carry"):
        LocalEngine(model, {-1}).open(PROMPTS)


@pytest.mark.parametrize("name", ["llama", "gpt2", *OTHERS])
def test_a_backbone_gives_the_hidden_states_of_the_whole_model(name):
    """Guards models without a head, as scorers have them: the same states, and no logits."""
    model = tiny(name)
    ids, mask = padded(PROMPTS, "cpu")
    inputs = dict(
        input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)
    )
    hidden, logits = forward(model, **inputs, logits_to_keep=0)
    alone, none = forward(model.base_model, **inputs, logits_to_keep=0)
    assert torch.equal(hidden, alone) and logits.shape == (3, 5, 97) and none.shape == (3, 5, 0)


def test_the_hook_on_the_head_is_taken_off():
    """Guards the user's model, also when a step fails."""
    head = torch.nn.Identity()

    def fail(**_):
        raise ValueError("no")

    class Model:
        device = torch.device("cpu")
        __call__ = staticmethod(fail)
        get_output_embeddings = staticmethod(lambda: head)

    with pytest.raises(ValueError, match="no"):
        forward(Model(), input_ids=None)
    assert not head._forward_pre_hooks
