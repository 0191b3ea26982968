"""Rotary position embeddings: what describes one, and its entries in config.json of Hugging Face, in both dialects."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tlt_jax.errors import ModelError, refuse

ROPES = "default", "linear", "llama3", "yarn"


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding: base frequency, and scaling to longer contexts."""

    theta: float = 10000.0
    kind: str = "default"  # default | linear | llama3 | yarn | longrope | proportional
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    fraction: float = 1.0  # of the numbers of a head, from the first on, that are rotated
    # Of longrope, for each rotated pair: what the angle is divided by, in runs whose sequences all end before
    # original_max_positions, and in runs with longer ones (`is_long`).
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    is_long: bool = False


def read_ropes(
    raw: Mapping[str, Any],
    max_positions: int,
    windows: tuple[int, ...],
    ropes: tuple[str, ...],
    local_theta: float | None,
) -> dict[str, Rope]:
    """The rotary embedding, and that of layers with a window where they have their own; see hf_families.Family."""
    if local_theta is None:
        return {"rope": read_rope(raw, max_positions, ropes)}
    given = raw.get("rope_parameters") or {}
    nested = {
        name: given[name] for name in ("full_attention", "sliding_attention") if given.get(name)
    }
    usual = nested.get("full_attention", {} if nested else given)
    rope = read_rope({**raw, "rope_parameters": usual}, max_positions, ropes)
    local = nested.get("sliding_attention") or {
        "rope_theta": raw.get("rope_local_base_freq") or local_theta or rope.theta
    }
    local = read_rope({"rope_parameters": local}, max_positions, ropes)
    return {"rope": rope} | ({"window_rope": local} if windows and local != rope else {})


def read_rope(raw: Mapping[str, Any], max_positions: int, ropes: tuple[str, ...]) -> Rope:
    """The rotary embedding in either dialect: rope_theta + rope_scaling, or rope_parameters; `ropes`: the types that may be."""
    scaling = dict(raw.get("rope_parameters") or {}) | dict(raw.get("rope_scaling") or {})
    per_layer = any(isinstance(value, Mapping) for value in scaling.values())
    unused = sorted(scaling.keys() - {"rope_theta", "partial_rotary_factor", "rope_type", "type"})
    named = scaling.get("rope_type") or scaling.get("type")
    kind = "longrope" if named == "su" else named or "default"
    part = scaling.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0
    known, is_partial = f"{', '.join(ropes[:-1])} or {ropes[-1]}", ropes != ROPES
    theta = scaling.get("rope_theta") or raw.get("rope_theta") or 10000.0
    refuse(
        (per_layer, f"rope_parameters per layer type ({', '.join(scaling)}) are not supported, only one for all"),
        (unused and not named,
         f"rope_scaling with {', '.join(unused)} has no rope_type: add one of {', '.join(ropes)}"),
        (kind not in ropes, f"rope type {kind!r} is not supported: use {known}"),
        (part != 1 and not is_partial, f"partial_rotary_factor {part} is not supported, only 1.0"),
        (not 0 < part <= 1, f"partial_rotary_factor {part}: use a number above 0 and at most 1"),
    )  # fmt: skip
    if kind == "default":
        return Rope(theta=float(theta), fraction=float(part))
    if kind == "proportional":
        return Rope(float(theta), kind, float(scaling.get("factor") or 1), fraction=float(part))
    needed = {
        "longrope": ("short_factor", "long_factor"),
        "llama3": ("low_freq_factor", "high_freq_factor", "factor"),
        "linear": ("factor",),
        "yarn": (),
    }[kind]
    missing = [name for name in needed if scaling.get(name) is None]
    if missing:
        raise ModelError(f"rope scaling {kind} lacks {', '.join(missing)}")
    original = raw.get("original_max_position_embeddings") or scaling.get(
        "original_max_position_embeddings"
    )
    original = original or max_positions
    factor = float(scaling.get("factor") or max_positions / original)
    rope = Rope(float(theta), kind, factor, fraction=float(part))
    if kind == "linear":
        return rope
    rope = replace(rope, original_max_positions=original)
    if kind == "longrope":
        return replace(
            rope,
            short_factors=tuple(map(float, scaling["short_factor"])),
            long_factors=tuple(map(float, scaling["long_factor"])),
            attention_factor=longrope_attention_factor(scaling, factor, original),
        )
    if kind == "llama3":
        low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
        return replace(rope, low_freq_factor=low, high_freq_factor=high)
    return replace(
        rope,
        beta_fast=float(scaling.get("beta_fast") or 32),
        beta_slow=float(scaling.get("beta_slow") or 1),
        truncate=bool(scaling.get("truncate", True)),
        attention_factor=yarn_attention_factor(scaling, factor),
    )


def longrope_attention_factor(scaling: Mapping[str, Any], factor: float, original: int) -> float:
    """LongRoPE's factor of cosine and sine, as transformers computes it where it is not given (arXiv 2402.13753)."""
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def yarn_attention_factor(scaling: Mapping[str, Any], factor: float) -> float:
    """YaRN's factor of cosine and sine: given, or from the scaling factor (arXiv 2309.00071, eq. 22)."""
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    above, below = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return scale(above) / scale(below) if above and below else scale(1.0)


def write_rope(rope: Rope) -> dict[str, Any] | None:
    """The rope_scaling entry."""
    fields = {
        "default": {},
        "linear": {"factor": rope.factor},
        "llama3": {
            "factor": rope.factor,
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_positions,
        },
        "yarn": {
            "factor": rope.factor,
            "original_max_position_embeddings": rope.original_max_positions,
            "attention_factor": rope.attention_factor,
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "truncate": rope.truncate,
        },
        "proportional": {"partial_rotary_factor": rope.fraction}
        | ({"factor": rope.factor} if rope.factor != 1 else {}),
        "longrope": {
            "short_factor": list(rope.short_factors),
            "long_factor": list(rope.long_factors),
            "attention_factor": rope.attention_factor,
        },
    }[rope.kind]
    return {"rope_type": rope.kind, **fields} if fields else None


def write_ropes(full: Rope, local: Rope) -> dict[str, Any]:
    """Rotary embeddings by the type of layer, in the dialect of transformers 5 alone."""

    def of(rope: Rope) -> dict[str, Any]:
        return {"rope_theta": rope.theta, **(write_rope(rope) or {"rope_type": "default"})}

    return {"rope_parameters": {"full_attention": of(full), "sliding_attention": of(local)}}
