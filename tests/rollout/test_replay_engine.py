"""A replay buffer that listens to a tiny engine holds features and states of a fresh forward."""

from __future__ import annotations

import numpy as np
import pytest
import test_harvest_engine as harvests

from tlt_jax.distributed import mesh as meshes
from tlt_jax.drafter.replay import Replay, ReplayConfig


@pytest.mark.parametrize("kind, data, model", [("eagle3", 1, 2), ("eagle", 2, 1)])  # fmt: skip
def test_drawn_texts_have_the_features_of_a_fresh_forward(x64, kind, data, model):
    engine, weights = harvests.engine_of(kind, data, model, captures_states=True)
    prompts = [np.asarray(prompt, np.int32) for prompt in harvests.tiny.PROMPTS]
    request = engine.request(
        prompts, harvests.tiny.SAMPLES, harvests.tiny.PLAIN, harvests.tiny.LIMIT, stream=harvests.TRAIN_STREAM, step=0,
    )  # fmt: skip
    config = ReplayConfig(8, 10**6)
    replays = [
        Replay(config, group, meshes.data_group(engine.mesh, group)) for group in range(data)
    ]
    for replay in replays:
        replay.begin(0, request)
    result, _ = engine.run(
        request, weights, listeners=[replay.listen for replay in replays], harvesters=replays
    )
    texts = {
        one.uid: (*harvests.tiny.PROMPTS[one.prompt], *one.tokens.tolist())
        for one in result.completions
    }
    states, features = harvests.fresh(tuple(texts.values()), kind)
    held = [{window.uid for window in replay.held} for replay in replays]
    assert sorted(uid for uids in held for uid in uids) == sorted(texts), "each in its own group"
    for replay in replays:
        assert not replay.awaited and not replay.parts
        batch = replay.sample(0, 32)
        assert batch.features.sharding.device_set == set(replay.mesh.devices.flat)
        for row, segments in enumerate(np.asarray(batch.segments)):
            for segment in range(1, segments.max() + 1):
                here = row, segments == segment
                positions = np.asarray(batch.positions[here])
                tokens = tuple(np.asarray(batch.tokens[here]).tolist())
                matches = [
                    uid
                    for uid, text in texts.items()
                    if text[positions[0] : positions[-1] + 1] == tokens
                    and np.allclose(batch.features[here], features[uid, positions], atol=1e-9)
                ]
                assert matches, "the tokens and their features"
                np.testing.assert_allclose(
                    batch.states[here], states[matches[0], positions], atol=1e-9
                )
