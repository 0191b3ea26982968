"""The real scheduler on a virtual clock: programs that compute nothing and take as long as a cost function says."""
