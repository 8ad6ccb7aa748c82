"""Tokenizers in the formats of the paper's models, small and the same every time. Knows files, not
models.

The ids that code may rely on are the real ones: 0 to 2 of Llama 2, and the special tokens and chat
headers of Llama 3.
"""

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

# of models, tokenizers and data sets
FORMATS = yaml.safe_load(
    (Path(__file__).parents[1] / "data/rehearsal.yaml").read_text(encoding="utf-8")
)
PIECES = 400
BYTES = 256
SAFE, UNSAFE = ("safe", "Ġsafe"), ("unsafe", "Ġunsafe")  # Ċ stands for a line feed, Ġ for a space
WORDS = {"user": 882, "system": 9125, "assistant": 78191, "ĊĊ": 271}
SPECIAL = FORMATS["special_tokens"]
LLAMA3_SIZE, PAD = 128256, "<|pad|>"
SPLIT = (  # how Llama 3 cuts a text before it looks for tokens
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHATML = FORMATS["chatml"]


def sentencepiece_folder(folder: Path, pad: bool) -> None:
    """Write a tokenizer of 400 pieces as the Llama-2 family ships it: ``tokenizer.model`` and
    settings, no ``tokenizer.json``.

    Parameters
    ----------
    pad : bool
        Add ``<pad>`` as token 400, as Alpaca and Beaver have it behind their 32000 pieces; else
        ``<unk>`` pads, as in Vicuna.
    """
    import sentencepiece

    folder.mkdir(parents=True, exist_ok=True)
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(FORMATS["sentences"]), model_writer=model, model_type="bpe",
        vocab_size=PIECES, unk_id=0, bos_id=1, eos_id=2, byte_fallback=True, character_coverage=1.0,
        normalization_rule_name="identity", remove_extra_whitespaces=False, split_digits=True,
        num_threads=1, minloglevel=2,
    )  # fmt: skip
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    token = {"lstrip": False, "normalized": True, "rstrip": False, "single_word": False}
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"} | (
        {"pad_token": "<pad>"} if pad else {}
    )
    described = {name: {"content": text} | token for name, text in named.items()}
    config = (
        FORMATS["tokenizer_config"]
        | {"pad_token": None}
        | {name: {"__type": "AddedToken"} | entry for name, entry in described.items()}
    )
    write_json(folder / "tokenizer_config.json", config)
    write_json(
        folder / "special_tokens_map.json", described if pad else described | {"pad_token": "<unk>"}
    )
    if pad:
        write_json(folder / "added_tokens.json", {"<pad>": PIECES})


def llama3_folder(folder: Path, size: int = LLAMA3_SIZE) -> None:
    """Write a byte-level tokenizer with the special ids, the chat headers and a chat template as
    Llama 3.1 has them.

    Of the words of Llama 3 it knows those of `WORDS`; what else a text holds becomes single bytes.
    Ids between them stand for nothing.

    Parameters
    ----------
    size : int
        128256, or 128257 for a pad token at the end, as QRM has it.
    """
    taken = set(SPECIAL.values())
    free = [i for i in range(SPECIAL["<|begin_of_text|>"], LLAMA3_SIZE) if i not in taken]
    special = SPECIAL | {f"<|reserved_special_token_{n}|>": i for n, i in enumerate(free)}
    special |= {PAD: LLAMA3_SIZE} if size > LLAMA3_SIZE else {}
    tokenizer = _byte_level(WORDS, special)
    begin = ("<|begin_of_text|>", special["<|begin_of_text|>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        f"{begin[0]} $A", f"{begin[0]} $A {begin[0]}:1 $B:1", [begin]
    )
    named = {"bos_token": begin[0], "eos_token": "<|eot_id|>"} | (
        {"pad_token": PAD} if PAD in special else {}
    )
    settings = {
        "model_max_length": 131072,
        "clean_up_tokenization_spaces": True,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    _save(folder, tokenizer, named, settings | {"chat_template": FORMATS["llama3_chat"]})


def chat_folder(folder: Path, template: str) -> None:
    """Write a byte-level tokenizer as Qwen2 ships it, with a chat template, that knows a few words:
    `SAFE`, `UNSAFE` and roles.

    Parameters
    ----------
    template : str
        Such as `CHATML`.
    """
    words = ("user", "assistant", *SAFE, *UNSAFE)
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    merges = list(
        dict.fromkeys(
            (word[i], word[i + 1 :]) for word in words for i in range(len(word) - 2, -1, -1)
        )
    )
    known = [*words, *special, *(piece for piece in map("".join, merges) if piece not in words)]
    ids = {text: BYTES + n for n, text in enumerate(known)}
    tokenizer = _byte_level(
        {text: ids[text] for text in ids if text not in special},
        {text: ids[text] for text in special},
        merges,
    )
    named = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    settings = {
        "model_max_length": 32768,
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": "Qwen2Tokenizer",
    }
    _save(folder, tokenizer, named, settings | {"chat_template": template})


def _byte_level(
    words: Mapping[str, int], special: Mapping[str, int], merges: Sequence[tuple[str, str]] = ()
) -> Tokenizer:
    # Llama 3 takes the words that it knows as they are, others merge them piece by piece
    # added tokens keep their ids because the model knows them, too: the ids before them may have
    # gaps
    tokenizer = Tokenizer(
        models.BPE(_alphabet() | words | special, merges=list(merges), ignore_merges=not merges)
    )
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(text, special=True, normalized=False)
            for text in sorted(special, key=special.get)
        ]
    )
    return tokenizer


def _save(folder: Path, tokenizer: Tokenizer, named: Mapping[str, str], settings: Mapping) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    write_json(
        folder / "tokenizer_config.json",
        {"model_input_names": ["input_ids", "attention_mask"]} | settings | named,
    )
    write_json(folder / "special_tokens_map.json", named)


def _alphabet() -> dict[str, int]:
    """Return the characters that stand for bytes with Llama 3's ids: printable bytes first, both
    parts in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = sorted(set(range(BYTES)) - set(printable))
    characters = [chr(b) for b in printable] + [chr(BYTES + n) for n in range(len(rest))]
    return {character: i for i, character in enumerate(characters)}


def write_json(path: Path, content: Mapping) -> None:
    """Write a settings file of a model or tokenizer."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
