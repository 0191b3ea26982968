"""Configurations of drafters of every kind: defaults, and refusals by name."""

from __future__ import annotations

import dataclasses

import drafter_cases as cases
import numpy as np
import pytest

from tlt_jax.distributed import mesh as meshes
from tlt_jax.models import drafter as drafters


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (None, "has 0 tokens, draft_vocab_size says 8"),
        (np.arange(7), "has 7 tokens"),
        (np.arange(8) + 30, "do not ascend within 0..36"),
        (np.arange(8) - 1, "do not ascend"),
        (np.array([0, 1, 2, 2, 3, 4, 5, 6]), "do not ascend"),
    ],
)
def test_invalid_draft_vocabularies_are_refused(ids, message):
    with pytest.raises(ValueError, match=message):
        drafters.check_ids(cases.config("eagle3"), ids)


def test_defaults_follow_the_policy():
    policy = cases.policy()
    config = drafters.for_policy(policy, "eagle")
    assert (config.captures, config.layers.family, config.fc_norm) == ((-1,), "qwen2", False)
    assert (config.layers.qkv_bias, config.feature_width) == (True, 16)
    other = dataclasses.replace(policy, family="qwen3")
    assert not drafters.for_policy(other, "eagle").layers.qkv_bias
    config = drafters.for_policy(policy, "eagle3")
    assert (config.captures, config.fc_norm, config.norm_output) == ((2, 3, 4), True, True)
    assert (config.feature_width, config.has_full_vocab, config.depth) == (48, True, None)
    assert (config.layers.max_positions, config.layers.rope) == (64, policy.rope)
    config = drafters.for_policy(policy, "dspark")
    found = config.layers.num_layers, config.block_size, config.depth, config.markov_rank
    assert found == (2, 8, 8, 16)
    assert (config.captures, config.mask_token_id) == ((2, 3, 4, 5), 36)
    config = drafters.for_policy(policy, "dflash")
    assert (config.depth, config.markov_rank, config.confidence) == (7, 0, False)
    config = drafters.for_policy(policy, "dflash2")
    found = config.depth, config.markov_rank, config.selector_top_k, config.conv_kernel_size
    assert (*found, config.conv_group_size) == (7, 16, 16, 2, 16)


@pytest.mark.parametrize(
    ("default", "known"),
    [
        (drafters.level_captures, {36: (2, 18, 33), 8: (2, 4, 5), 7: (2, 3, 4), 6: (2, 4, 6), 4: (2, 3, 4), 3: (1, 2, 3),
                                   2: (1, 2), 1: (1,)}),
        (drafters.block_captures, {36: (2, 10, 18, 26, 34), 12: (2, 4, 6, 8, 10), 4: (1, 2, 3, 4), 1: (1,), 2: (1, 2)}),
        (drafters.default_rank, {576: 64, 896: 64, 1023: 64, 1024: 128, 3584: 256, 5120: 256, 64: 16, 2: 16}),
    ],
)  # fmt: skip
def test_defaults_by_size(default, known):
    assert {size: default(size) for size in known} == known


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("medusa", {}, "kind 'medusa' is unknown: use eagle, eagle3, dflash, dflash2, dspark"),
        ("eagle", {"fc_norm": True}, "fc_norm True: not for a drafter of kind eagle"),
        ("eagle3", {"fc_bias": True}, "fc_bias True"),
        ("eagle3", {"qkv_bias": True}, "qkv_bias True"),
        ("eagle", {"captures": (1, 2)}, "captures \\(1, 2\\): eagle reads"),
        ("eagle3", {"captures": (2, 2, 3)}, "rising depth"),
        ("eagle3", {"captures": ()}, "rising depth"),
        ("eagle3", {"captures": (0, 2, 3)}, "from 1 on"),
        ("eagle3", {"captures": (2, 3, 8)}, "after layers \\(2, 3, 8\\), the policy has 7 layers"),
        ("eagle3", {"draft_vocab_size": 38}, "draft_vocab_size 38 is not within 1..37"),
        ("eagle", {"draft_vocab_size": 8}, "eagle proposes all 37 tokens"),
        ("eagle3", {"num_kv_heads": 3}, "3 KV heads"),
        ("eagle3", {"hidden_size": 24}, "hidden_size 24 is not the policy's 16"),
        ("eagle", {"vocab_size": 36, "draft_vocab_size": 36}, "vocab_size 36 is not the policy's 37"),
        ("dflash", {"markov_rank": 4}, "markov_rank 4: not for a drafter of kind dflash"),
        ("dflash", {"block_size": 1}, "block_size 1: a dflash drafter needs at least 2"),
        ("dflash2", {"selector_top_k": 0, "conv_kernel_size": 0}, "selector_top_k 0, conv_kernel_size 0: a dflash2"),
        ("dflash2", {"conv_group_size": 3}, "conv_group_size 3 does not divide hidden_size 16"),
        ("dflash2", {"confidence": True}, "confidence True: not for a drafter of kind dflash2"),
        ("dspark", {"conv_kernel_size": 2}, "conv_kernel_size 2: not for a drafter of kind dspark"),
        ("dspark", {"block_size": 0}, "block_size 0: a dspark drafter needs at least 1"),
        ("dspark", {"mask_token_id": 37}, "mask_token_id 37 is not within 0..36"),
        ("dspark", {"captures": (-1, 3)}, "rising depth, from 0 on"),
    ],
)  # fmt: skip
def test_conflicting_fields_are_refused_by_name(kind, changes, message):
    with pytest.raises(ValueError, match=message):
        drafters.for_policy(cases.policy(), kind, **changes)


@pytest.mark.parametrize(
    ("case", "shape", "changes", "message"),
    [
        ("eagle", (1, 3), {}, "4 attention heads.*use one of"),
        ("dflash", (1, 3), {}, "4 attention heads.*use one of"),
        ("dspark", (2, 1), {"markov_rank": 5}, "mesh.data 2 does not divide the drafter's Markov rank 5"),
    ],
)  # fmt: skip
def test_a_mesh_that_does_not_divide_the_drafter_is_refused(case, shape, changes, message):
    with pytest.raises(ValueError, match=message):
        drafters.abstract(
            cases.config(case, **changes), meshes.make_mesh(*shape), "train", "float32"
        )
