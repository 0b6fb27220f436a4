"""What goes wrong while a model is found and loaded."""


class ModelError(Exception):
    """A model cannot be served; the message names what was given and what is allowed."""
