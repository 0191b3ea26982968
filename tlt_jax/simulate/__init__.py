"""The real scheduler on a virtual clock: its programs compute nothing and take the seconds of a cost function."""
