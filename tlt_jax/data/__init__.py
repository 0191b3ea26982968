"""Rows, prompts and tasks as functions of (seed, step), and packed rows of a batch.

Public: dataset (Dataset, Prompt, load, tokenizer), packing, files, tasks.
"""
