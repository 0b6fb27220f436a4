"""The engine in a process of its own, as seen from both sides."""
