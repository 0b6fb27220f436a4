"""The engine: takes tokenized requests, gives committed tokens."""
