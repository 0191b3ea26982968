"""The adaptive drafter: its update, the texts and rollouts that it learns from, and its training on idle data groups.

Public: recipe (Recipe, create), batch (Batch, make_batch), update (update, program), corpus (answer,
read, PackedCorpus), replay (Replay, ReplayConfig), idle_training (IdleTraining), micro_step
(MicroStep), merge (spread, merged).
"""
