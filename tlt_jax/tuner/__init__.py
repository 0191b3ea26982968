"""Which strategy pays: tuners as pure functions over a JSON-able state. No JAX.

Public: interface (Tuner, Choice, Measurement), make (arms, make_tuner, largest_batches).
"""
