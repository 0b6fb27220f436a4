"""From a request's parameters to its distribution, and from proposals to committed tokens."""
