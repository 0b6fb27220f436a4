"""The serving half of Outrider: a speculative engine behind an OpenAI-compatible API."""
