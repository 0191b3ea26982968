"""Models that answer: `chat` for people, `engine` for a training loop."""
