"""The scheduler of a data group: which sequences it decodes, in which shapes and with which strategy, chunk by chunk."""
