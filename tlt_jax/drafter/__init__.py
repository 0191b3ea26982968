"""The adaptive drafter: its update, its data, and its training on idle data groups and in the policy update.

Public: recipe (Recipe, create), batch (Batch, make_batch), update (update, program), corpus (answer, read, PackedCorpus),
replay (Replay, ReplayConfig), idle_training (IdleTraining), micro_step (MicroStep), merge (spread, merged), step_training
(StepTraining, Lesson), investment (Investment).
"""
