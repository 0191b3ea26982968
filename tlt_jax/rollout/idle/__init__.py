"""Work for idle data groups: its coordination, and the expected idle time."""
