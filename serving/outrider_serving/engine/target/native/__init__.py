"""The target on a CPU in one call of compiled code, for the architectures that most models have."""
