"""Slow and plain versions of what the package does fast, in NumPy: what the tests compare with."""

from __future__ import annotations

import numpy as np

from tlt_jax.spec_decode.interface import ABSENT


def filtered(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """Scaled logits of one position, -inf where top-k or then top-p drops the token; ties with the last kept one stay."""
    if temperature == 0:
        return logits
    scaled = logits / temperature
    if 0 < top_k < len(scaled):
        scaled = np.where(scaled >= np.sort(scaled)[-top_k], scaled, -np.inf)
    if top_p < 1:
        probs = softmax(scaled)
        order = np.sort(probs)[::-1]
        last = order[np.argmax(np.cumsum(order) >= top_p)]
        scaled = np.where(probs >= last, scaled, -np.inf)
    return scaled


def softmax(x: np.ndarray) -> np.ndarray:
    """Probabilities of one position."""
    e = np.exp(x - x.max())
    return e / e.sum()


def ancestors(parents: np.ndarray) -> np.ndarray:
    """Row i marks node i and the nodes on its way to the root."""
    seen = np.eye(len(parents), dtype=bool)
    for node in range(1, len(parents)):
        seen[node] |= seen[parents[node]]
    return seen


def orphans(tree) -> np.ndarray:
    """Nodes whose parent is not before them or not one level above; a sound tree has none."""
    tokens, parents, depths = map(np.asarray, (tree.tokens, tree.parents, tree.depths))
    nodes = np.arange(tokens.shape[1])
    above = np.take_along_axis(depths, parents, axis=1) + 1 == depths
    return ((parents >= nodes) | ~above) & (nodes > 0) & (tokens != ABSENT)


def walk(
    tokens: np.ndarray, parents: np.ndarray, chosen: np.ndarray, depth: int
) -> tuple[list[int], list[int]]:
    """Nodes visited from the root while a child equals the chosen token, and the tokens emitted."""
    path = [0]
    while len(path) <= depth:
        children = [
            i
            for i in range(1, len(tokens))
            if parents[i] == path[-1] and tokens[i] == chosen[path[-1]]
        ]
        if not children:
            break
        path.append(children[0])
    return path, [int(chosen[node]) for node in path]


def decode(
    logits_of, noise_of, prompt, sampling, eos_ids, stop_ids, max_new_tokens
) -> tuple[list[int], list[float], str]:
    """Plain decoding, one token at a time from the whole prefix: tokens, log-probs, and why it ended.

    logits_of(prefix) gives the next token's logits, noise_of(position) the Gumbel noise of that position.
    """
    prefix, logprobs = list(prompt), []
    for _ in range(max_new_tokens):
        logits = np.asarray(logits_of(prefix))
        scores = filtered(logits, sampling.temperature, sampling.top_k, sampling.top_p)
        scores = scores if sampling.temperature == 0 else scores + np.asarray(noise_of(len(prefix)))
        token = int(np.argmax(scores))
        logprobs.append(float(np.log(softmax(logits / (sampling.temperature or 1)))[token]))
        prefix.append(token)
        answer = prefix[len(prompt) :]
        if token in eos_ids or any(
            len(stop) <= len(answer) and answer[-len(stop) :] == list(stop) for stop in stop_ids
        ):
            return answer, logprobs, "stop"
    return prefix[len(prompt) :], logprobs, "length"


def expected_tokens(so_far: int, most: int, lengths: list[int]) -> float:
    """What an answer of `so_far` tokens still gets: the mean of what the longer ones had left there."""
    longer = np.asarray([length for length in lengths if length > so_far])
    left = float(longer.mean() - so_far) if len(longer) else float(max(so_far, 1))
    return min(left, most)
