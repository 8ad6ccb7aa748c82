"""Tests of strict loading: errors of damaged folders, and equal numbers from old formats."""

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import transformers
from copiedcode import edit_json, edit_tensors
from safetensors.torch import load_file, save_file
from scorerfiles import without
from transformers import AutoModel, AutoModelForCausalLM

from igcore import AssetError, ParameterError, load_policy
from igcore.models.pretrained import (
    check_vocabulary,
    contents_of,
    files_of,
    load_model,
    load_tokenizer,
    one_sentence,
    tensors_of,
)
from tests.rehearsal.checkpoints import build_checkpoints, save

ALPACA = "PKU-Alignment/alpaca-7b-reproduced"
VICUNA = "lmsys/vicuna-7b-v1.5"


@pytest.fixture(scope="module")
def mirror(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mirror")
    build_checkpoints(folder, [ALPACA, VICUNA])
    return folder


@pytest.fixture
def copy(mirror, tmp_path):
    """Return what copies a checkpoint to a place where it may be damaged."""
    return lambda repo: shutil.copytree(mirror / repo, tmp_path / "copy")


def loaded(folder, heads=(), **more):
    return load_model(AutoModelForCausalLM, folder, "float32", "cpu", heads, **more)


def refusal(folder, *parts):
    """Load tokenizer and model, and return the one sentence that refuses them."""
    with pytest.raises(AssetError) as caught:
        check_vocabulary(load_tokenizer(folder), loaded(folder)[0], folder)
    message = str(caught.value)
    assert str(folder) in message and "\n" not in message and len(message) < 700
    assert all(part in message for part in parts), message


def rewrite(folder, change):
    edit_tensors(folder / "model.safetensors", change)


def reconfigure(folder, name="config.json", **changes):
    edit_json(folder / name, **changes)


@pytest.mark.parametrize(
    "key", ["model.norm.weight", "lm_head.weight", "model.layers.1.self_attn.k_proj.weight"]
)
def test_a_missing_key_is_refused(copy, key):
    """Bug: transformers goes on with random numbers, and every answer is noise."""
    folder = copy(ALPACA)
    rewrite(folder, lambda state: without(state, key))
    refusal(folder, f"lacks the weights ['{key}']")


def test_an_unexpected_key_is_refused(copy):
    """Bug: a model with a head or an adapter of its own read as if it had none."""
    folder = copy(ALPACA)
    rewrite(folder, lambda state: state | {"score_head.weight": torch.zeros(1, 32)})
    refusal(folder, "holds the unknown weights ['score_head.weight']")


def test_a_vocabulary_of_another_size_is_refused(copy):
    """Bug: 32000 tokens in one file and 32001 in another."""
    folder = copy(ALPACA)
    reconfigure(folder, vocab_size=400)
    refusal(folder, "other shapes than its config.json says", "[401, 32]", "[400, 32]")
    reconfigure(folder, vocab_size=10**12)  # Bug: a small file that takes all memory
    refusal(folder, "other shapes than its config.json says")


@pytest.mark.parametrize("keep", [0, 4, -1000])
def test_a_truncated_safetensors_file_is_refused(copy, keep):
    path = copy(ALPACA) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    refusal(path.parent, "cannot be loaded", "fetch or save the whole model again")


@pytest.mark.parametrize("keep", [0, 4, -1000])
def test_a_truncated_pickle_is_refused(copy, keep):
    path = files_of(copy(VICUNA))[1]
    path.write_bytes(path.read_bytes()[:keep])
    refusal(path.parent)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pytorch_model-00002-of-00002.bin", "cannot be loaded (FileNotFoundError"),
        ("pytorch_model.bin.index.json",
         "no weights (model.safetensors or pytorch_model.bin, or their index); give a folder as"),
    ],
)  # fmt: skip
def test_a_missing_shard_or_index_is_refused(copy, name, message):
    folder = copy(VICUNA)
    (folder / name).unlink()
    refusal(folder, message)


def divided(folder, suffix):
    """Divide the weights of a folder between two files, and return them."""
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save(folder, state, suffix, 2)
    return state


@pytest.fixture
def sharded(copy):
    """A model in two safetensors files with an index."""
    divided(folder := copy(ALPACA), ".safetensors")
    return folder


def named(folder, index="model.safetensors.index.json", change=lambda name: name):
    """Rewrite the names of files in an index; return them in order."""
    names = {
        key: change(name)
        for key, name in json.loads((folder / index).read_text())["weight_map"].items()
    }
    reconfigure(folder, index, weight_map=names)
    return sorted(set(names.values()))


def whole_beside_index(folder):
    whole = shutil.copy(folder / named(folder)[0], folder / "model.safetensors")
    return [whole.name]


def linked(folder):
    """Lay the files out as the hub's cache does."""
    blobs = folder.parent / "blobs"
    blobs.mkdir()
    for i, name in enumerate(names := named(folder)):
        (folder / name).rename(blobs / str(i))
        (folder / name).symlink_to(Path("../blobs") / str(i))
    return names


def pickled_as_well(folder):
    torch.save({}, folder / "pytorch_model.bin")
    return named(folder)


@pytest.mark.parametrize("arranged", [named, whole_beside_index, linked, pickled_as_well])
def test_the_files_of_a_folder_are_those_that_transformers_loads(sharded, monkeypatch, arranged):
    """Bug: files found by a glob, decoys among them, while transformers loads those that an index
    names.
    """
    expected = arranged(sharded)
    save_file({"decoy": torch.zeros(1)}, sharded / "model-00009-of-00009.safetensors")
    assert [path.relative_to(sharded).as_posix() for path in files_of(sharded)] == expected
    resolve, opened = transformers.modeling_utils._get_resolved_checkpoint_files, []
    monkeypatch.setattr(
        transformers.modeling_utils,
        "_get_resolved_checkpoint_files",
        lambda **given: opened.extend((found := resolve(**given))[0]) or found,
    )
    with suppress(AssetError):  # half the weights, in the case of the whole file
        loaded(sharded)
    found = [Path(path).relative_to(sharded).as_posix() for path in opened]
    assert list(dict.fromkeys(found)) == expected
    hashed = contents_of(sharded)
    assert {*expected} == {name for name in hashed if name.endswith((".safetensors", ".bin"))}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda name: f"../outside/{name}", "names ['../outside/"),
        (lambda name: f"w/{name}", "names ['w/"),
        (lambda name: f"/outside/{name}", "names ['/outside/"),
        (lambda name: "model-00003-of-00003.safetensors", "model-00003-of-00003.safetensors"),
        (lambda name: 3, "cannot be loaded"),
    ],
)
def test_an_index_that_names_no_file_of_its_folder_is_refused(sharded, change, message):
    """Bug: weights from anywhere on the disk, which no hash covers."""
    named(sharded, change=change)
    refusal(sharded, message)
    with pytest.raises(AssetError, match="model.safetensors.index.json|No such file"):
        contents_of(sharded)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {}'])
def test_a_damaged_index_is_refused(sharded, content):
    (sharded / "model.safetensors.index.json").write_text(content)
    refusal(sharded, "model.safetensors.index.json cannot be loaded")
    with pytest.raises(AssetError, match="cannot be loaded"):
        contents_of(sharded)


def test_an_adapter_beside_a_model_is_refused(copy):
    """Bug: transformers adds the adapter, and the digest stays."""
    folder = copy(ALPACA)
    (folder / "adapter_config.json").write_text("{}")
    refusal(folder, "has an adapter_config.json; give a folder as", "after merge_and_unload")


def emptied(folder):
    shutil.rmtree(folder)
    folder.mkdir()


def adapter_alone(folder):
    (folder / "config.json").unlink()
    (folder / "adapter_config.json").write_text("{}")


def prefixed(begins, **more):
    """Return what writes all keys with another beginning, and other tensors beside them."""

    def change(state):
        moved = {begins + key: tensor for key, tensor in state.items()}
        return moved | {name: torch.zeros(1, 32) for name in more.values()}

    return lambda folder: rewrite(folder, change)


GPTQ = dict(quant_method="gptq", bits=4)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (emptied, "has no config.json or no weights .*; give a folder as"),
        (lambda folder: (folder / "config.json").unlink(), "has no config.json or no weights"),
        (adapter_alone, "has an adapter_config.json; .* after merge_and_unload"),
        (lambda folder: (folder / "model.safetensors").rename(folder / "quokka-q8.gguf"),
         "no weights .*, of a GGUF file after from_pretrained.folder, gguf_file=....$"),
        (lambda folder: reconfigure(folder, quantization_config=GPTQ),
         "ImportError: Loading a GPTQ .* install the package that it names"),
        (lambda folder: reconfigure(folder, model_type="quokka"),
         "your version of Transformers is out of date"),
        (lambda folder: reconfigure(folder, model_type="quokka", auto_map={"AutoConfig": "q.Q"}),
         "because code in a model's folder is not run"),
        (lambda folder: reconfigure(folder, model_type="llava"), "Unrecognized configuration"),
        (lambda folder: reconfigure(folder, model_type="t5"), "Unrecognized configuration"),
        (prefixed("_orig_mod."), "lacks the weights .*; save the model inside a wrapper"),
        (prefixed("", head="v_head.summary.weight"), "unknown weights ..v_head.*; save the model"),
    ],
)  # fmt: skip
def test_each_fault_of_a_folder_has_its_own_remedy(copy, damage, message):
    """Bug: "download or save the whole model again" for all of them, which helps none."""
    damage(folder := copy(ALPACA))
    with pytest.raises(AssetError, match=message) as caught:
        load_policy(str(folder))
    assert "\n" not in str(caught.value)


def test_a_file_is_no_folder(copy, monkeypatch):
    """Bug: a local .gguf file is looked for on the hub."""
    monkeypatch.chdir(copy(ALPACA).parent)
    with pytest.raises(ParameterError, match="unknown policy 'copy/config.json'; .* or a folder"):
        load_policy("copy/config.json")


def test_a_panic_of_the_tokenizers_is_one_sentence(monkeypatch):
    """Bug: PanicException of Rust, which is no Exception, past every handler."""

    class Panic(BaseException):
        pass

    with pytest.raises(AssetError, match="a/folder cannot be loaded .Panic: retry-limit"):
        with one_sentence("a/folder"):
            raise Panic("retry-limit-in-match over\nstack")
    with pytest.raises(KeyboardInterrupt), one_sentence("a/folder"):
        raise KeyboardInterrupt


def test_code_in_a_pickle_is_not_run(copy):
    """Bug: a checkpoint that runs a program when it is read."""

    class Program:
        def __reduce__(self):
            return os.mkdir, (str(folder / "ran"),)

    folder = copy(VICUNA)
    path = files_of(folder)[1]
    torch.save(torch.load(path) | {"model.norm.weight": Program()}, path)
    refusal(folder, "cannot be loaded (UnpicklingError: Weights only load failed")
    # the tensors of a head are read on another way
    with pytest.raises(AssetError, match="UnpicklingError"):
        tensors_of(folder, ["model.norm.weight"])
    assert not (folder / "ran").exists()


OWN = "import pathlib\npathlib.Path(__file__).with_name('ran').mkdir()\n"


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        (
            "config.json",
            {
                "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"},
                "model_type": "own",
            },
        ),
        ("tokenizer_config.json",
         {"auto_map": {"AutoTokenizer": ["own.Own", None]}, "tokenizer_class": "Own"}),
    ],
)  # fmt: skip
def test_code_beside_a_checkpoint_is_not_run(copy, file, changes):
    """Bug: a question on the terminal whether to run it, which a job in a queue never answers."""
    folder = copy(ALPACA)
    reconfigure(folder, file, **changes)
    (folder / "own.py").write_text(OWN)
    refusal(folder, "cannot be loaded", "custom code")
    assert not (folder / "ran").exists()


def test_a_model_that_transformers_knows_loads_without_the_code_beside_it(copy):
    folder = copy(ALPACA)
    reconfigure(folder, auto_map={"AutoModelForCausalLM": "own.Own"})
    (folder / "own.py").write_text(OWN)
    assert type(loaded(folder)[0]).__name__ == "LlamaForCausalLM" and not (folder / "ran").exists()


@pytest.mark.parametrize("content", [None, b"", b"no pieces", -500])
def test_a_damaged_tokenizer_is_refused(copy, content):
    """Bug: transformers makes an empty tokenizer of a missing file."""
    path = copy(ALPACA) / "tokenizer.model"
    whole = path.read_bytes()
    path.unlink()
    if content is not None:
        path.write_bytes(whole[:content] if isinstance(content, int) else content)
    sentence = r"tokenizer\.json or other vocabulary|cannot be loaded"
    with pytest.raises(AssetError, match=sentence) as caught:
        load_tokenizer(path.parent)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "config.json", "tokenizer_config.json", "generation_config.json", "special_tokens_map.json",
        "added_tokens.json", "tokenizer.json",
    ],
)  # fmt: skip
def test_a_damaged_settings_file_is_refused(copy, name):
    """Bug: transformers continues without the end tokens of a damaged generation_config.json."""
    folder = copy(ALPACA)
    path = folder / name
    path.write_text(path.read_text().rstrip()[:-1] if path.exists() else "{")
    refusal(folder, f"{path} cannot be loaded (JSONDecodeError")


@torch.inference_mode()
def test_both_formats_give_the_same_numbers(mirror, copy):
    """Guards the .bin files of 2023 with their keys of rotary positions, in shards and whole."""
    ids = torch.tensor([[1, 300, 320, 340, 5]])
    model, _ = loaded(mirror / VICUNA)
    folder = copy(VICUNA)
    state = {key: tensor for path in files_of(folder) for key, tensor in torch.load(path).items()}
    assert [key for key in state if key.endswith("inv_freq")] == [
        f"model.layers.{n}.self_attn.rotary_emb.inv_freq" for n in (0, 1)
    ]
    expected = model(ids).logits
    assert expected.std() > 1
    for suffix, shards in ((".bin", 1), (".safetensors", 1), (".safetensors", 3)):
        for path in [*files_of(folder), *folder.glob("*.index.json")]:
            path.unlink()
        save(folder, state, suffix, shards)
        assert len(files_of(folder)) == shards
        assert torch.equal(loaded(folder)[0](ids).logits, expected)
        # scorers load it without its head
        body, _ = load_model(AutoModel, folder, "float32", "cpu", ["lm_head.weight"])
        found = body(ids).last_hidden_state @ state["lm_head.weight"].float().T
        torch.testing.assert_close(found, expected)


def test_the_weights_are_those_of_the_file(mirror):
    """Guards against a random head from transformers, and against a type that loses digits."""
    stored = load_file(mirror / ALPACA / "model.safetensors")
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        model, _ = load_model(AutoModelForCausalLM, mirror / ALPACA, name, "auto")
        assert not model.training and stored.keys() == model.state_dict().keys()
        for key, tensor in model.state_dict().items():
            assert tensor.dtype == dtype and torch.equal(tensor.float(), stored[key].float()), key


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_the_tensors_of_a_head_are_read_beside_the_model(copy, suffix):
    """Guards adapters: what their own head needs is there, in the type of the file, and nothing
    else may be.
    """
    folder = copy(ALPACA)
    state = divided(folder, suffix)
    model, tensors = load_model(AutoModel, folder, "float32", "cpu", ["lm_head.weight"])
    assert tensors.keys() == {"lm_head.weight"}
    assert torch.equal(tensors["lm_head.weight"], state["lm_head.weight"])
    assert torch.equal(model.norm.weight, state["model.norm.weight"].float())
    with pytest.raises(AssetError, match=r"lacks the weights \['score.weight'\]"):
        load_model(AutoModel, folder, "float32", "cpu", ["lm_head.weight", "score.weight"])


def test_a_trainers_pickles_are_no_weights(copy):
    """Bug: training_args.bin, a pickle of settings, in the hash of the weights or their keys."""
    folder = copy(VICUNA)
    torch.save({"anything": 1}, folder / "training_args.bin")
    assert len(files_of(folder)) == 2
    load_model(AutoModel, folder, "float32", "cpu", ["lm_head.weight"])


def changed(before, after):
    """Name the files that differ."""
    return sorted(
        name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
    )


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors", "config.json", "generation_config.json", "tokenizer_config.json",
        "tokenizer.model", "special_tokens_map.json", "chat_template.jinja",
        "additional_chat_templates/tools.jinja", "bpe.codes", "source.spm",
    ],
)  # fmt: skip
def test_every_file_that_is_read_has_a_hash(copy, name):
    """Bug: another template, tokenizer or end token under the digest of before."""
    folder = copy(ALPACA)
    before = contents_of(folder)
    (folder / name).parent.mkdir(exist_ok=True)
    with (folder / name).open("ab") as file:
        file.write(b" ")
    assert changed(before, contents_of(folder)) == [name]


@pytest.mark.parametrize("name", ["README.md", "training_args.bin", "onnx/config.json"])
def test_a_file_that_is_not_read_has_none(copy, name):
    """Bug: every run started again for a line in a README."""
    folder = copy(ALPACA)
    before = contents_of(folder)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("{}")
    assert contents_of(folder) == before and list(before) == sorted(before)


@pytest.mark.parametrize("ends", [[[2]], "x", {"a": 1}, 1.5, True])
def test_end_tokens_that_are_none_are_refused(copy, ends):
    """Bug: tracebacks of sets and sorting; transformers checks config.json alone."""
    folder = copy(ALPACA)
    reconfigure(folder, "generation_config.json", eos_token_id=ends)
    with pytest.raises(AssetError, match="^the end tokens are .*, but must be whole numbers"):
        load_policy(folder)


@pytest.mark.parametrize("name", ["a" * 5000, "~nobody-at-all/b/c", "a\0b", "a\ud800/b"])
def test_what_can_be_no_path_is_an_unknown_policy(name):
    """Bug: tracebacks of pathlib."""
    with pytest.raises(ParameterError, match="^(unknown policy|there is no folder ~n)") as caught:
        load_policy(name)
    assert len(str(caught.value)) < 400


def test_a_bad_placement_is_named(mirror):
    for options, message in (
        ({"dtype": "float31"}, "unknown dtype 'float31'; did you mean 'float32'"),
        ({"device": "cuda:99"}, "device is 'cuda:99', which this machine does not have; choose"),
        ({"device": "meta"}, "device is 'meta', which this machine does not have; choose one of"),
    ):
        with pytest.raises(ParameterError, match=message):
            load_policy(mirror / ALPACA, **options)


def test_accelerate_fills_one_gpu_after_the_other(mirror, monkeypatch):
    """Bug: accelerate splits a model that one device holds, and every token waits for all."""
    asked, report = [], dict.fromkeys(("unexpected_keys", "mismatched_keys", "missing_keys"), ())

    class Kind:
        def from_pretrained(folder, **given):
            asked.append(given["device_map"])
            return torch.nn.Identity(), report

    load_model(Kind, mirror / ALPACA, "bfloat16", "auto")
    load_model(Kind, mirror / ALPACA, "bfloat16", "cpu")
    assert asked == ["meta", "sequential", "meta", "cpu"]
