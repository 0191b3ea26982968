"""The adaptive drafter: its update, its data, and its training on idle data groups and in the policy update.

Public: recipe (DrafterRecipe, create), update (update, program, Copies, MicroStep), corpus (answer, read, PackedCorpus),
replay (Replay, ReplayConfig), idle_training (IdleTraining), step_training (StepTraining, learn), investment (Investment).
"""
