"""Models that answer (`rollouts`): `chat` for people, `engine` for a training loop."""
