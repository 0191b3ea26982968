"""Work for data groups that have nothing left to decode: who does it, and for how long."""
