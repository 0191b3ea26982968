"""The adaptive drafter: its losses and update, the texts that it learns from, and the replay buffer of a rollout.

Public: update (Recipe, create, update, program), corpus (answer, read, PackedCorpus), replay
(Replay, ReplayConfig).
"""
