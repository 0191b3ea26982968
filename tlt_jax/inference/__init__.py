"""Answers to the prompts of a user, for the command `generate` and for notebooks.

Public: model (Model), chat (converse).
"""
