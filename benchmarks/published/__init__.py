"""Published numbers of other systems, and what the simulator says for the same inputs."""
