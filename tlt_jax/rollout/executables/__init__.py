"""The compiled programs of the rollout: what they are, how they are compiled and cached, and what compiling costs."""
