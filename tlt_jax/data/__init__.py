"""Rows, prompts and generated tasks as functions of (seed, step), and packing of training batches.

Public: dataset (Dataset, Prompt, load, tokenizer), packing, files, tasks.
"""
