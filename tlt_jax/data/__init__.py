"""Rows, prompts and generated tasks as functions of (seed, step), and packing of training batches.

Public: dataset (Dataset, load, tokenizer), prompt_format (Encoder, Prompt), packing, files, tasks.
"""
