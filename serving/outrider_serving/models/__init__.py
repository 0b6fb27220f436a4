"""From what a user calls a model to a loaded one."""
