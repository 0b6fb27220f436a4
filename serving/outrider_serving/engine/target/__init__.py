"""The target: its attention over pages, a batch of new tokens, and what memory there is for them."""
