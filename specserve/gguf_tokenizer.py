"""tokenizer.json from the metadata of a GGUF file.

GGUF stores a vocabulary and, for the pre-tokenizer, only a name; llama.cpp keeps the regexes in
its source. They are repeated here for the names whose ids were compared with llama.cpp's own, and
any other name is refused: a nearly right pre-tokenizer gives silently worse text. (The tokenizer
that transformers 5.24 builds from SmolLM2's GGUF lacks the splitting of digits.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any  # GGUF metadata values

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from specserve.errors import ModelError

# tokenizer.ggml.token_type
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE_MARK = "▁"

GPT2_REGEX = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_REGEX = LLAMA3_REGEX.replace(r"\p{N}{1,3}", r"\p{N}")


def _digits_then_gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


def _split(*patterns: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    def build() -> pre_tokenizers.PreTokenizer:
        steps: list[pre_tokenizers.PreTokenizer] = [
            pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns
        ]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        return pre_tokenizers.Sequence(steps)

    return build


# tokenizer.ggml.pre -> pre-tokenizer of a byte-level BPE
PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "smollm": _digits_then_gpt2,
    "starcoder": _digits_then_gpt2,
    "refact": _digits_then_gpt2,
    "command-r": _digits_then_gpt2,
    "codeshell": _digits_then_gpt2,
    "gpt-2": _split(GPT2_REGEX),
    "mpt": _split(GPT2_REGEX),
    "olmo": _split(GPT2_REGEX),
    "llama-bpe": _split(LLAMA3_REGEX),
    "llama3": _split(LLAMA3_REGEX),
    "llama-v3": _split(LLAMA3_REGEX),
    "qwen2": _split(QWEN2_REGEX),
    "deepseek-r1-qwen": _split(QWEN2_REGEX),
    "default": _split(r"[\p{P}\$\+<=>\^~\|]+", GPT2_REGEX, r"\p{N}+", "[0-9][0-9][0-9]"),
}
LLAMA3_NAMES = frozenset({"llama-bpe", "llama3", "llama-v3"})


def build_tokenizer(metadata: dict[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer, and the content of tokenizer_config.json.

    ModelError names what is unsupported or damaged.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens, token_types = _vocabulary(metadata)
    try:
        if kind == "gpt2":
            tokenizer = _byte_level_bpe(metadata, tokens)
        elif kind == "llama":
            tokenizer = _sentencepiece_bpe(metadata, tokens, token_types)
        else:
            raise ModelError(
                f"the GGUF file's tokenizer is of kind {kind!r}; 'gpt2' (byte-level BPE) and "
                "'llama' (sentencepiece BPE) can be read: use the model's Hugging Face directory"
            )
        _add_special_tokens(tokenizer, tokens, token_types)
        config = _tokenizer_config(metadata, tokens)
        if config["add_bos_token"] and "bos_token" in config:
            tokenizer.post_processor = _prepend(config["bos_token"], metadata)
    except ModelError:
        raise
    except Exception as error:  # the Rust library raises bare Exception for inconsistent merges
        raise ModelError(f"the GGUF file's tokenizer is damaged: {error}") from error
    return tokenizer, config


def _vocabulary(metadata: dict[str, Any]) -> tuple[list[str], list[int]]:
    """Tokens and their types by id, without unused padding at the end."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
        raise ModelError("the GGUF file has no vocabulary (tokenizer.ggml.tokens)")
    token_types = metadata.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    if len(token_types) != len(tokens):
        raise ModelError(
            f"the GGUF file has {len(tokens)} tokens but {len(token_types)} token types: "
            "it is damaged"
        )
    end = len(tokens)
    while end > 0 and token_types[end - 1] == UNUSED:
        end -= 1
    if len(set(tokens[:end])) != end:
        raise ModelError("the GGUF file's vocabulary holds the same token twice: it is damaged")
    return tokens[:end], token_types[:end]


def _byte_level_bpe(metadata: dict[str, Any], tokens: list[str]) -> Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in PRE_TOKENIZERS:
        raise ModelError(
            f"the GGUF file's pre-tokenizer {pre!r} is not one of {', '.join(PRE_TOKENIZERS)}: "
            "use the model's Hugging Face directory, which has a tokenizer.json"
        )
    merges = []
    for merge in metadata.get("tokenizer.ggml.merges", []):
        cut = merge.find(" ", 1)
        if cut < 0:
            raise ModelError(f"the GGUF file's merge {merge!r} is not a pair: it is damaged")
        merges.append((merge[:cut], merge[cut + 1 :]))
    model = BPE(
        vocab={token: token_id for token_id, token in enumerate(tokens)},
        merges=merges,
        ignore_merges=pre in LLAMA3_NAMES,  # a word that is in the vocabulary is not merged at all
    )
    tokenizer = Tokenizer(model)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()  # as published; llama.cpp leaves it out
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece_bpe(
    metadata: dict[str, Any], tokens: list[str], token_types: list[int]
) -> Tokenizer:
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) < len(tokens):
        raise ModelError("the GGUF file's sentencepiece vocabulary has no scores: it is damaged")
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    unk = next((t for t, kind in zip(tokens, token_types, strict=True) if kind == UNKNOWN), None)
    model = BPE(
        vocab=vocab,
        merges=_merges_from_scores(vocab, token_types, scores),
        unk_token=unk,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    add_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    replace = normalizers.Replace(" ", SPACE_MARK)
    prefix = [normalizers.Prepend(SPACE_MARK)] if add_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, replace])
    strip = [decoders.Strip(" ", 1, 0)] if add_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges_from_scores(
    vocab: dict[str, int], token_types: list[int], scores: list[float]
) -> list[tuple[str, str]]:
    """Every way to make a token of two tokens, best score of the result first."""
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, token_id in vocab.items():
        if token_types[token_id] != NORMAL:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                ranked.append((-scores[token_id], vocab[left], vocab[right], left, right))
    return [(left, right) for _, _, _, left, right in sorted(ranked)]


def _add_special_tokens(tokenizer: Tokenizer, tokens: list[str], token_types: list[int]) -> None:
    special, plain = [], []
    for token, kind in zip(tokens, token_types, strict=True):
        if kind in (CONTROL, UNKNOWN):
            special.append(AddedToken(token, special=True, normalized=False))
        elif kind == USER_DEFINED:
            plain.append(AddedToken(token, special=False, normalized=False))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)


def _tokenizer_config(metadata: dict[str, Any], tokens: list[str]) -> dict[str, Any]:
    names = {
        "bos_token": "tokenizer.ggml.bos_token_id",
        "eos_token": "tokenizer.ggml.eos_token_id",
        "unk_token": "tokenizer.ggml.unknown_token_id",
        "pad_token": "tokenizer.ggml.padding_token_id",
    }
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": _adds_bos(metadata),
        "clean_up_tokenization_spaces": False,
    }
    for name, key in names.items():
        token_id = metadata.get(key)
        if token_id is not None and 0 <= token_id < len(tokens):
            config[name] = tokens[token_id]
    if template := metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return config


def _adds_bos(metadata: dict[str, Any]) -> bool:
    """The file's flag; where it has none, what llama.cpp does for this kind of tokenizer."""
    by_kind = (
        metadata.get("tokenizer.ggml.model") == "llama"
        or metadata.get("tokenizer.ggml.pre") in LLAMA3_NAMES
    )
    return bool(metadata.get("tokenizer.ggml.add_bos_token", by_kind))


def _prepend(bos: str, metadata: dict[str, Any]) -> TemplateProcessing:
    bos_id = metadata["tokenizer.ggml.bos_token_id"]
    return TemplateProcessing(
        single=[bos, "$A"], pair=[bos, "$A", bos, "$B"], special_tokens=[(bos, bos_id)]
    )
