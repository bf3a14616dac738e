"""A Hugging Face config.json of the Llama family, parsed once into a frozen value.

What the decoder cannot compute exactly is refused here, with the field and its value: a model
that loads is a model that is right. Both spellings of RoPE are read: `rope_scaling` beside
`rope_theta`, and `rope_parameters` of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal  # Any: JSON documents

import msgspec

from specserve.errors import ModelError

Family = Literal["llama", "mistral", "qwen2", "qwen3"]
FAMILIES: tuple[Family, ...] = ("llama", "mistral", "qwen2", "qwen3")
RopeKind = Literal["default", "linear", "llama3", "yarn"]
ROPE_KINDS: tuple[RopeKind, ...] = ("default", "linear", "llama3", "yarn")


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary embedding. Fields beyond theta are read by the kinds that name them."""

    kind: RopeKind = "default"
    theta: float = 10000.0
    factor: float = 1.0  # linear, llama3, yarn: how much the context was stretched
    original_max_positions: int = 0  # llama3, yarn: context length before stretching
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    attention_factor: float | None = None  # yarn; None: from factor, mscale, mscale_all_dim
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Shape and options of one decoder. Legend: N query heads, G KV heads, H head size."""

    family: Family
    vocab_size: int  # rows of the embedding, padding included
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int  # N
    num_kv_heads: int  # G
    head_dim: int  # H
    rms_norm_eps: float
    max_position_embeddings: int
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    sliding_windows: tuple[int | None, ...] = ()  # per layer; None: sees everything
    rope: RopeConfig = RopeConfig()
    eos_token_ids: tuple[int, ...] = ()


def parse_model_config(document: Mapping[str, Any]) -> ModelConfig:
    """document: config.json. ModelError names the field that is missing or unsupported."""
    family = _family(document)
    num_heads = _positive_int(document, "num_attention_heads")
    hidden_size = _positive_int(document, "hidden_size")
    num_layers = _positive_int(document, "num_hidden_layers")
    num_kv_heads = _positive_int(document, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads {num_heads} is no multiple of "
            f"num_key_value_heads {num_kv_heads}"
        )
    if document.get("head_dim") is None and hidden_size % num_heads:
        raise ModelError(
            f"config.json: hidden_size {hidden_size} is no multiple of num_attention_heads "
            f"{num_heads} and no head_dim is given"
        )
    # Qwen3's head size does not follow from its width
    default_head_dim = 128 if family == "qwen3" else hidden_size // num_heads
    head_dim = _positive_int(document, "head_dim", default_head_dim)
    if head_dim % 2:
        raise ModelError(f"config.json: head_dim {head_dim} is odd, RoPE turns pairs")
    if (activation := document.get("hidden_act", "silu")) != "silu":
        raise ModelError(f"config.json: hidden_act {activation!r} is not supported, only 'silu' is")
    max_positions = _positive_int(document, "max_position_embeddings", 2048)
    attention_bias = _flag(document, "attention_bias") and family in ("llama", "qwen3")
    return ModelConfig(
        family=family,
        vocab_size=_positive_int(document, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_positive_int(document, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=_number(document, "rms_norm_eps", 1e-6),
        max_position_embeddings=max_positions,
        qkv_bias=attention_bias or family == "qwen2",
        output_bias=attention_bias,
        mlp_bias=family == "llama" and _flag(document, "mlp_bias"),
        qk_norm=family == "qwen3",
        tie_word_embeddings=_flag(document, "tie_word_embeddings"),
        sliding_windows=_sliding_windows(document, family, num_layers),
        rope=_parse_rope(document, max_positions),
        eos_token_ids=_eos_ids(document),
    )


def _family(document: Mapping[str, Any]) -> Family:
    model_type = document.get("model_type")
    for family in FAMILIES:
        if model_type == family:
            break
    else:
        raise ModelError(
            f"config.json: model_type {model_type!r} is not supported: the native decoder runs "
            f"{', '.join(FAMILIES)} (SmolLM2 and TinyLlama are llama)"
        )
    for name in document.get("architectures") or ():
        if not str(name).endswith(("ForCausalLM", "Model")) or "Eagle" in str(name):
            raise ModelError(
                f"config.json: architectures {name!r} is not supported: only causal language "
                f"models ({family.capitalize()}ForCausalLM) are"
            )
    if document.get("quantization_config"):
        method = document["quantization_config"].get("quant_method", "unknown")
        raise ModelError(
            f"config.json: quantization_config with quant_method {method!r} is not supported: "
            "use the model's unquantised weights"
        )
    return family


def _sliding_windows(
    document: Mapping[str, Any], family: Family, num_layers: int
) -> tuple[int | None, ...]:
    """Per layer: how many positions back a token sees, itself included; None: all."""
    full = (None,) * num_layers
    if family == "llama" or document.get("sliding_window") is None:
        return full
    if family in ("qwen2", "qwen3") and not _flag(document, "use_sliding_window"):
        return full
    window = _positive_int(document, "sliding_window")
    if family == "mistral":
        return (window,) * num_layers
    layer_types = document.get("layer_types")
    if layer_types is None:
        first = document.get("max_window_layers", 28)  # layers below see everything
        return tuple(None if layer < first else window for layer in range(num_layers))
    known = {"full_attention": None, "sliding_attention": window}
    unknown = sorted({str(kind) for kind in layer_types} - set(known))
    if unknown or len(layer_types) != num_layers:
        raise ModelError(
            f"config.json: layer_types has {len(layer_types)} entries of kinds {unknown or 'known'}"
            f", it needs {num_layers} of full_attention or sliding_attention"
        )
    return tuple(known[kind] for kind in layer_types)


def _parse_rope(document: Mapping[str, Any], max_positions: int) -> RopeConfig:
    field = "rope_parameters" if document.get("rope_parameters") else "rope_scaling"
    fields = document.get(field) or {}
    if not isinstance(fields, Mapping):
        raise ModelError(f"config.json: {field} is {fields!r}, it must be an object")
    if any(isinstance(value, Mapping) for value in fields.values()):
        raise ModelError(
            f"config.json: {field} differs by layer type ({', '.join(fields)}): not supported"
        )
    kind = fields.get("rope_type", fields.get("type", "default"))
    if kind not in ROPE_KINDS:
        raise ModelError(
            f"config.json: {field}.rope_type {kind!r} is not supported (only "
            f"{', '.join(ROPE_KINDS)} are): it would make a token depend on the whole batch's "
            "length, or is unknown"
        )
    partial = fields.get("partial_rotary_factor", document.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ModelError(f"config.json: partial_rotary_factor {partial!r} is not supported, only 1")
    theta = _number(fields, "rope_theta", _number(document, "rope_theta", 10000.0))
    if kind == "default":
        return RopeConfig(theta=theta)
    original = document.get("original_max_position_embeddings") or fields.get(
        "original_max_position_embeddings", max_positions
    )
    factor = fields.get("factor")
    if factor is None and kind == "yarn":
        factor = max_positions / original
    if not isinstance(factor, int | float) or factor <= 0:
        raise ModelError(f"config.json: {field}.factor is {factor!r}, it must be above 0")
    if kind == "llama3":
        for name in ("low_freq_factor", "high_freq_factor"):
            if name not in fields:
                raise ModelError(f"config.json: {field}.{name} is missing, llama3 needs it")
    optional = {
        name: None if fields.get(name) is None else float(fields[name])
        for name in ("attention_factor", "mscale", "mscale_all_dim")
    }
    return RopeConfig(
        kind=kind,
        theta=theta,
        factor=float(factor),
        original_max_positions=int(original),
        low_freq_factor=_number(fields, "low_freq_factor", 1.0),
        high_freq_factor=_number(fields, "high_freq_factor", 4.0),
        beta_fast=_number(fields, "beta_fast", 32.0),
        beta_slow=_number(fields, "beta_slow", 1.0),
        truncate=bool(fields.get("truncate", True)),
        **optional,
    )


def _eos_ids(document: Mapping[str, Any]) -> tuple[int, ...]:
    value = document.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(token_id, int) for token_id in ids):
        raise ModelError(f"config.json: eos_token_id is {value!r}, it must be an id or a list")
    return tuple(ids)


def _positive_int(document: Mapping[str, Any], field: str, default: int | None = None) -> int:
    value = document.get(field)
    if value is None:
        value = default
    if value is None:
        raise ModelError(f"config.json: {field} is missing")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"config.json: {field} is {value!r}, it must be a whole number above 0")
    return value


def _number(document: Mapping[str, Any], field: str, default: float) -> float:
    value = document.get(field)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ModelError(f"config.json: {field} is {value!r}, it must be a number")
    return float(value)


def _flag(document: Mapping[str, Any], field: str) -> bool:
    value = document.get(field)
    if value is not None and not isinstance(value, bool):
        raise ModelError(f"config.json: {field} is {value!r}, it must be true or false")
    return bool(value)
