"""Who runs when, and where its keys and values lie: plain bookkeeping, no torch."""
