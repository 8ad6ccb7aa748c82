"""Hand-made tokenizers that write rare characters byte by byte, as those of Llama 2, Gemma and
GPT-2 do; and a tiny random model that is fond of such bytes.
"""

from itertools import combinations

import torch
from tinymodels import tiny
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIALS = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{value:02X}>" for value in range(256)]
# with the space of sentencepiece, and the character that stands for wrong bytes
WORDS = ["▁", "▁a", "a", "b", "é", "雨", "▁☂", ".", "\ufffd"]
RAIN = " a雨b é☂"


def _sentencepiece(prepended: str, *decoding):
    """Return a tokenizer with byte pieces; `decoding` follows after the bytes are read."""
    pieces = {piece: i for i, piece in enumerate([*SPECIALS, *BYTES, *WORDS])}
    made = Tokenizer(models.BPE(pieces, [], byte_fallback=True, unk_token="<unk>"))
    space = normalizers.Replace(" ", "▁")
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), space] if prepended else [space]
    )
    made.decoder = decoders.Sequence([*decoding])
    return _wrapped(made)


def llama_2():
    """Encoding adds a space at the beginning, and decoding takes one away."""
    return _sentencepiece(
        "▁",
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    )


def gemma():
    return _sentencepiece("", decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse())


def metaspace():
    """Spaces are read after the bytes, so that bytes may write a space as well."""
    return _sentencepiece("▁", decoders.ByteFallback(), decoders.Metaspace())


def gpt_2(add_prefix_space=False):
    """A byte-level tokenizer; many of its tokens begin or end inside a character."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space, use_regex=False)
    ((rain, _),) = pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str(RAIN)
    parts = {rain[i:j] for i, j in combinations(range(len(rain) + 1), 2) if j - i <= 4}
    pieces = [*SPECIALS, *sorted({*pre_tokenizers.ByteLevel.alphabet(), *parts})]
    made.model = models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>")
    made.decoder = decoders.ByteLevel()
    return _wrapped(made)


def gpt_2_with_a_space():
    return gpt_2(add_prefix_space=True)


def _wrapped(made):
    return PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


KINDS = {make.__name__: make for make in (llama_2, gemma, metaspace, gpt_2, gpt_2_with_a_space)}


def favourites(tokenizer) -> list[int]:
    """Return tokens after which decoders go wrong: spaces, lines, specials, parts of characters."""
    rain = tokenizer(RAIN + "\n", add_special_tokens=False)["input_ids"]
    return sorted({*rain, *tokenizer.convert_tokens_to_ids(["<s>", "</s>"])})


def writer(tokenizer):
    """Return a random model that writes any token, and the favourites more often."""
    eos = tokenizer.eos_token_id
    sizes = {"vocab_size": len(tokenizer), "num_hidden_layers": 1}
    model = tiny("phi", **sizes, eos_token_id=eos, pad_token_id=eos)
    with torch.no_grad():
        model.lm_head.bias[favourites(tokenizer)] += 2.5
    return model
