"""The OpenAI-compatible HTTP side: what comes in is checked, what goes out is timed and accounted for.

A request flows: `body` (bytes -> JSON) -> `schema` (JSON -> model) -> `prepare` (model -> engine request)
-> `exchange` (engine chunks -> wire, and one RequestRecord). `app` routes, `state` holds what is in force,
`server` owns the process: sockets, signals, loading, draining.
"""
