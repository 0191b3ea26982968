"""Selection of the speculative decoding strategy (arXiv 2511.16665, section 5). No JAX.

Tuners are pure functions over a JSON-able state.
Public: interface (Tuner, Choice, Measurement), make (arms, make_tuner, largest_batches).
"""
