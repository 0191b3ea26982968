"""The scheduler of a data group: chooses the sequences, the shape and the strategy of every chunk."""
