"""When float32 rollouts are the same: every token of each is the reference's choice on its own prefix, or a near-tie.

Float32 logits change bits with the batch, the mesh and the tree, so two correct rollouts may part where two tokens are as
good as equal. So every token is judged on its own prefix, after such a parting too: a wrong one is never excused by a
tail that differs anyway. Near-ties are counted: they are rare, or something is less exact than float32. Knows any target
through a function of whole rows; that of the policy is `policy`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from tlt_jax.models import transformer
from tlt_jax.models.architecture import ModelConfig, Params
from tlt_jax.rollout.recorder import Completion
from tlt_jax.spec_decode import noise
from tlt_jax.spec_decode.interface import Sampling

ROWS = 32  # sequences of one reference forward
FACTOR, WIDEST, RARE = 4, 1e-3, 10_000

Score = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
"""tokens[B, T] -> logits of the token after each position, [B, T, V], by a float32 and by a float64 forward."""


@dataclass(frozen=True)
class Law:
    """What the tokens of a rollout are a function of, and where its answers end; `keys` are the sequences', by uid."""

    score: Score
    prompts: Sequence[Sequence[int]]
    limits: Sequence[int]
    keys: np.ndarray
    sampling: Sampling
    eos_ids: Sequence[int] = ()
    stop_ids: Sequence[Sequence[int]] = ()

    def prompt(self, uid: int) -> int:
        return uid // (len(self.keys) // len(self.prompts))

    def ending(self, uid: int, answer: Sequence[int]) -> str | None:
        """Why an answer ends with this token: "stop", "length", or None when it goes on."""
        stops = any(tuple(answer[-len(stop) :]) == tuple(stop) for stop in self.stop_ids)
        if answer[-1] in self.eos_ids or stops:
            return "stop"
        return "length" if len(answer) == self.limits[self.prompt(uid)] else None


@dataclass(frozen=True)
class Verdict:
    """The tokens of all rollouts, how many were excused, the margin below which they are, and what is wrong."""

    tokens: int
    excused: int
    margin: float
    wrong: tuple[str, ...]

    @property
    def is_same(self) -> bool:
        return not self.wrong and self.excused * RARE <= self.tokens

    def __str__(self) -> str:
        rate = (
            f"{self.excused} of {self.tokens} tokens are excused by a margin of {self.margin:.2g}"
        )
        return "\n".join([f"{rate}, {len(self.wrong)} findings", *self.wrong[:10]])


def compare(law: Law, base: Sequence[Completion], *others: Sequence[Completion]) -> Verdict:
    """Whether the other rollouts are the base one. The base is judged whole, the others from where they leave it."""
    wrong, parts = [], [(one.uid, one.tokens.tolist(), 0) for one in base]
    for rollout in (base, *others):
        if [one.uid for one in rollout] != list(range(len(law.keys))):
            raise ValueError(
                f"uids {[one.uid for one in rollout]} instead of 0 to {len(law.keys) - 1}"
            )
        wrong += [finding for one in rollout for finding in judge_ending(law, one)]
    for rollout in others:
        for one, same in zip(rollout, base, strict=True):
            if len(
                apart := np.flatnonzero(
                    one.tokens[: len(same.tokens)] != same.tokens[: len(one.tokens)]
                )
            ):
                parts.append((one.uid, one.tokens.tolist(), int(apart[0])))
            elif len(one.tokens) != len(same.tokens):
                wrong.append(
                    f"uid {one.uid}: {len(one.tokens)} tokens, the first of {len(same.tokens)}"
                )
    excused, margin, found = judge_tokens(law, parts)
    return Verdict(
        sum(len(one.tokens) for rollout in (base, *others) for one in rollout),
        excused,
        margin,
        (*wrong, *found),
    )


def judge_ending(law: Law, one: Completion) -> list[str]:
    """What is wrong with where an answer ends: it goes on past a stop, ends without one, or says another reason."""
    answer = one.tokens.tolist()
    ends = [(n, why) for n in range(1, len(answer) + 1) if (why := law.ending(one.uid, answer[:n]))]
    if ends and ends[0] == (len(answer), one.finish):
        return []
    return [
        f"uid {one.uid}: {len(answer)} tokens and {one.finish!r}, where the rules say {ends[:1] or 'more tokens'}"
    ]


def judge_tokens(
    law: Law, parts: Sequence[tuple[int, list[int], int]]
) -> tuple[int, float, list[str]]:
    """(uid, answer, first token to judge) of each part: how many tokens are excused, the margin, and wrong ones."""
    longest = [len(prompt) + limit for prompt, limit in zip(law.prompts, law.limits, strict=True)]
    width = max(
        *longest, *(len(law.prompts[law.prompt(uid)]) + len(answer) for uid, answer, _ in parts)
    )
    rows = np.zeros((-(-len(parts) // ROWS) * ROWS, width), np.int32)
    uids = np.zeros(len(rows), np.int32)
    where = []  # (row, position) of each judged token
    for row, (uid, answer, first) in enumerate(parts):
        prompt, uids[row] = law.prompts[law.prompt(uid)], uid
        rows[row, : len(prompt) + len(answer)] = [*prompt, *answer]
        where += [(row, at) for at in range(len(prompt) + first, len(prompt) + len(answer))]
    row_T, at_T = np.array(where).T
    narrow, wide = (
        np.concatenate(kind)
        for kind in zip(*map(law.score, rows.reshape(-1, ROWS, width)), strict=True)
    )
    narrow, wide, tokens = narrow[row_T, at_T - 1], wide[row_T, at_T - 1], rows[row_T, at_T]
    temperature, drawn = law.sampling.temperature or 1.0, np.zeros_like(wide)
    if law.sampling.temperature:
        keys = law.keys[uids].reshape(-1, ROWS, 2)
        drawn = np.concatenate([draw(part, width, wide.shape[-1]) for part in keys])[row_T, at_T]
    margin = min(FACTOR * float(np.abs(narrow - wide).max()) / temperature, WIDEST)
    best, gap, is_excused = judge(wide / temperature, drawn, tokens, law.sampling, margin)
    found = [
        f"uid {uids[row_T[i]]}, position {at_T[i]}: token {tokens[i]} where the reference has {best[i]}, {gap[i]:.2g} better"
        for i in np.flatnonzero((best != tokens) & ~is_excused)
    ]
    return int(is_excused.sum()), margin, found


def judge(
    scaled: np.ndarray, drawn: np.ndarray, tokens: np.ndarray, sampling: Sampling, margin: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """From scaled logits and noise [T, V]: the reference's choice, how much better it is, and whether a token is excused.

    A token that is not the choice is excused when it may be in the top-k and top-p set, and is less than the margin
    worse than every token that is surely in that set.
    """
    perturbed, rows = scaled + drawn, np.arange(len(tokens))
    best = np.where(kept(scaled, sampling, 0), perturbed, -np.inf).argmax(axis=-1)
    own = np.where(kept(scaled, sampling, margin), perturbed, -np.inf)[rows, tokens]
    rival = np.where(kept(scaled, sampling, -margin), perturbed, -np.inf).max(axis=-1)
    with np.errstate(invalid="ignore"):
        return (
            best,
            perturbed[rows, best] - own,
            (best != tokens) & np.isfinite(own) & (rival - own < margin),
        )


def kept(scaled: np.ndarray, sampling: Sampling, slack: float) -> np.ndarray:
    """The top-k and top-p set of each row; with what may be in it (slack > 0), or only what surely is (slack < 0).

    An error e of the logits moves the mass of a set by at most e / 2: the slack also bounds that.
    """
    inside = np.ones(scaled.shape, bool)
    if sampling.temperature == 0:
        return inside
    if 0 < sampling.top_k < scaled.shape[-1]:
        inside = widened(
            scaled, scaled >= np.sort(scaled, axis=-1)[:, -sampling.top_k, None], slack
        )
    if sampling.top_p < 1:
        weights = np.where(inside, np.exp(scaled - scaled.max(axis=-1, keepdims=True)), 0)
        probs = weights / weights.sum(axis=-1, keepdims=True)
        ordered = -np.sort(-probs, axis=-1)
        last = (np.cumsum(ordered, axis=-1) < sampling.top_p + slack).sum(axis=-1, keepdims=True)
        border = np.take_along_axis(ordered, np.minimum(last, scaled.shape[-1] - 1), axis=-1)
        inside = widened(scaled, inside & (probs >= border), slack)
    return inside


def widened(scaled: np.ndarray, inside: np.ndarray, slack: float) -> np.ndarray:
    """The set with all within the slack below its lowest member, or without all within it above the highest outsider."""
    if slack >= 0:
        return scaled >= np.where(inside, scaled, np.inf).min(axis=-1, keepdims=True) - slack
    return inside & (scaled > np.where(inside, -np.inf, scaled).max(axis=-1, keepdims=True) - slack)


@partial(jax.jit, static_argnames=("width", "vocab"))
def draw(keys: jax.Array, width: int, vocab: int) -> jax.Array:
    """The noise of the rollout itself, [B, T, V], in float32: its rounding is the same in every rollout."""
    return noise.gumbel(
        keys, jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (len(keys), width)), vocab
    )


@partial(jax.jit, static_argnames=("model", "dtype"))
def forward(params: Params, tokens: jax.Array, model: ModelConfig, dtype: str) -> jax.Array:
    """Logits after every token of whole rows, by the training forward."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    x, _ = transformer.hidden(
        params, model, tokens, positions, jnp.ones_like(tokens), compute_dtype=dtype
    )
    return transformer.logits(params, model, x)[..., : model.vocab_size]


def policy(params: Params, model: ModelConfig) -> Score:
    """The score of the policy with these float32 parameters of a mesh of one device."""
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf), jnp.float64), params)

    def score(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        narrow = np.asarray(forward(params, tokens, model, "float32"))
        with jax.enable_x64(True):
            return narrow, np.asarray(forward(wide, tokens, model, "float64"))

    return score
