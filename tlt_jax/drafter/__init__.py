"""The adaptive drafter: its losses and update, and the texts that it learns from.

Public: update (Recipe, create, update, program), corpus (answer, read, PackedCorpus).
"""
