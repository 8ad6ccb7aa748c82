"""Tests of the states that a server writes for a critic, on files in the exact form of vLLM's."""

import fcntl
import threading
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from mockpolicy import EOS, LetterCost, LetterReward
from safetensors.torch import save
from servedstub import MODEL, served
from test_engine_served import byte_server, keys_of, named, server_of
from tiny import Letters, letters, tiny_model, tiny_tokenizer, untrained

from igcore import Guard, ParameterError, PolicyError, SearchConfig, decode, load_policy
from igcore.critic.latent import encode, latents
from igcore.serve.engine import ServedEngine
from igcore.serve.policy import RemoteModel, ServedPolicy
from igcore.serve.states import HiddenStates

WIDTH, LAYER = 32, 0
PROMPTS = [[1, 2, 3], [4]]
CONFIG = SearchConfig(
    budget=1.0, n_samples=4, keep=2, block_size=3, max_new_tokens=6, rounds=2, group_size=3
)


class Writer:
    """Writes the files of vLLM's connector: complete some time after the reply, under a lock."""

    def __init__(self, folder, model, seconds=0.02):
        self.folder, self.model, self.seconds, self.written = folder, model, seconds, 0
        self.changed = lambda tensors: tensors  # what a test makes wrong
        self.one = threading.Lock()

    def __call__(self, ids):
        with self.one:  # a hook of `encode` on the model would catch another thread's states
            return self.begun(ids)

    def begun(self, ids):
        self.written += 1
        path = self.folder / f"cmpl-{self.written}.safetensors"
        lock = open(f"{path}.lock", "wb")  # noqa: SIM115 (closed when the file is complete)
        fcntl.flock(lock, fcntl.LOCK_EX)
        # the whole prompt as one response: its first token is given
        (later,) = encode(self.model, [ids[:1]], [ids[1:] or ids], "m", LAYER).middle
        (first,) = encode(self.model, [ids[:1]], [ids[:1]], "m", LAYER).middle * torch.nan
        states = torch.cat([first, later])[: len(ids), None]
        tensors = {"hidden_states": states.contiguous(), "token_ids": torch.tensor(ids)}
        threading.Timer(self.seconds, self.write, (path, self.changed(tensors), lock)).start()
        return str(path)

    def write(self, path, tensors, lock):
        path.write_bytes(tensors if isinstance(tensors, bytes) else save(tensors))
        lock.close()


def model_logits(model):
    """The next-token logits of a model, in the form of the stub."""

    def logits(prefix):
        with torch.no_grad():
            return model(torch.tensor([prefix])).logits[0, -1].tolist()

    return logits


@pytest.fixture
def stub(tmp_path):
    """A server whose model is the policy `letters`, and which writes its states."""
    model = letters().model
    with served(logits=model_logits(model), ends=frozenset({EOS})) as stub:
        # a copy: `encode` hooks its model, which samples at the same time
        stub.states = Writer(tmp_path, deepcopy(model))
        yield stub


def reader_of(stub, tmp_path, **options):
    return HiddenStates(server_of(stub, **options), tmp_path, WIDTH)


def policy_of(stub, tmp_path):
    own = dict(digest="served", eos_ids=frozenset({EOS}), server=server_of(stub), context=64)
    states = dict(states=reader_of(stub, tmp_path), origin=letters())
    return ServedPolicy("served", RemoteModel("served"), Letters(), **own, **states)


def test_a_critic_sees_what_the_local_engine_would_give_it(stub, tmp_path):
    """Bug: states of the prompt taken for those of the response, of another candidate, or short of
    the last token, which vLLM has not read when it samples it.
    """
    engine = ServedEngine(server_of(stub), {EOS}, reader_of(stub, tmp_path).read)
    engine.open(PROMPTS)
    first = engine.sample_block([0, 1, 1], keys_of([(0, 0), (1, 1), (2, 1)], 3))
    live = [c for c in range(3) if not first.ended[c]]
    engine.select(live)
    rows = list(range(len(live)))
    second = engine.sample_block(rows, keys_of([(c, c) for c in rows], 2, at=3))
    asked = [c for c in rows if not second.ended[c]]
    found = engine.history([second.first + c for c in asked], keys=False)
    prompts = [PROMPTS[min(live[c], 1)] for c in asked]
    responses = [first.tokens[live[c]] + second.tokens[c] for c in asked]
    expected = encode(letters().model, prompts, responses, "m", LAYER)
    assert len(asked) > 1 and torch.equal(found.mask, expected.mask)
    assert torch.allclose(latents(found, "m").middle, latents(expected, "m").middle, atol=1e-5)
    assert not list(tmp_path.iterdir())  # a file takes megabytes at 7B


def test_a_search_asks_a_critic_about_a_served_model(stub, tmp_path):
    """Bug: a critic that is refused or never called, or whose files stay."""
    guard = Guard(
        policy_of(stub, tmp_path), LetterCost(), LetterReward(), config=CONFIG, critic=untrained()
    )
    for answer in decode("inferenceguard-critic", guard, ["ab", "fed", "c"]):
        assert answer.status in ("verified_safe", "abstained")
        assert LetterCost().score([""], [answer.text or ""], [True])[0] <= 1.0
    assert stub.states.written and not list(tmp_path.iterdir())


def test_a_critic_on_more_than_a_middle_layer_is_refused_before_anything_is_decoded(stub, tmp_path):
    scorers = LetterCost(), LetterReward()
    guard = Guard(policy_of(stub, tmp_path), *scorers, config=CONFIG, critic=untrained("o"))
    with pytest.raises(ParameterError, match="reads more than a middle layer.*features m"):
        list(decode("inferenceguard-critic", guard, ["ab"]))
    other = replace(policy_of(stub, tmp_path), origin=replace(letters(), digest="other"))
    guard = Guard(other, *scorers, config=CONFIG, critic=untrained())
    with pytest.raises(ParameterError, match="trained for policy 'letters' of hash 'l1'"):
        list(decode("inferenceguard-critic", guard, ["ab"]))
    assert not stub.requests


@pytest.mark.parametrize(
    ("wrong", "message"),
    {
        "no path": (lambda ids, write: None, "TypeError"),
        "another folder": (lambda ids, write: "/etc/hosts", "No such file .*hosts"),
        "above": (lambda ids, write: f"{write.folder}/../keep.me", "No such file .*keep.me.lock"),
        "another file": (lambda ids, write: f"{write.folder}/keep.me", "keep.me.lock"),
        "no file": (lambda ids, write: f"{write.folder}/..", "no plain file|No such file"),
        "not there": (lambda ids, write: f"{write.folder}/no.safetensors", "FileNotFoundError"),
        "a null": (lambda ids, write: "a\0b", "ValueError"),
        "other tokens": (lambda ids, write: write([*ids, 1]), "for 4 tokens, expected .* for 3"),
    }.values(),
)  # fmt: skip
def test_a_reply_that_leads_to_no_states_is_one_sentence(stub, tmp_path, wrong, message):
    """Bug: a server that decides which file is read and removed here; a traceback."""
    (tmp_path / "keep.me").touch()
    write = stub.states
    stub.states = lambda ids: wrong(ids, write)
    with pytest.raises(PolicyError, match=f"wrote no hidden states .*{message}.*; serve the model"):
        reader_of(stub, tmp_path).read([[1, 2, 3]])
    assert (tmp_path / "keep.me").exists()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (lambda x: x | {"hidden_states": x["hidden_states"].repeat(1, 2, 1)}, r"\(3, 2, 32\)"),
        (lambda x: x | {"hidden_states": x["hidden_states"][..., :7].clone()}, r"\(3, 1, 7\)"),
        (lambda x: x | {"hidden_states": x["hidden_states"][:2].clone()}, r"\(2, 1, 32\)"),
        (lambda x: {"token_ids": x["token_ids"]}, "hidden_states"),
        (lambda x: x | {"token_ids": x["token_ids"][0]}, "for 1 tokens, expected .* for 3"),
        (lambda x: b"no tensors", "SafetensorError"),
    ],
)
def test_a_file_of_another_form_is_one_sentence(stub, tmp_path, changed, message):
    stub.states.changed = changed
    with pytest.raises(PolicyError, match=f"wrote no hidden states .*{message}"):
        reader_of(stub, tmp_path).read([[1, 2, 3]])


def test_a_file_that_is_never_complete_ends_in_bounded_time(stub, tmp_path):
    """Bug: a wait for a lock without end."""
    stub.states.seconds = 0.5
    with pytest.raises(PolicyError, match="is not written after 0.2 seconds"):
        reader_of(stub, tmp_path, timeout=0.2).read([[1, 2, 3]])


def test_the_states_of_a_policy_by_name(tmp_path):
    """Bug: a critic that was trained for other weights than those that are named."""
    folder = tmp_path / "policy"
    tokenizer = tiny_tokenizer()
    tiny_model(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    states = {"folder": str(tmp_path)}
    with byte_server() as stub:
        states |= {"server": f"{stub.url}/v1"}
        policy = load_policy(named(stub, str(folder), states=states))
        assert policy.trained.digest == load_policy(folder).digest
        assert policy.identity()["served"]["states"]["digest"] == policy.trained.digest
        assert policy.states.server.url == stub.url and policy.states.width == WIDTH
        for changes, message in [
            ({"server": "nowhere"}, "parameter server of states is not a plain http address"),
            ({"layer": 3}, "unknown parameter 'layer'"),
        ]:
            with pytest.raises(ParameterError, match=message):
                load_policy(named(stub, str(folder), states=states | changes))
    assert policy.server.model == policy.states.server.model == MODEL
