"""An engine over HTTP, for agents that own their loop: `server` in front of what `backend` describes."""
