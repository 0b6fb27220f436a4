"""The OpenAI-compatible HTTP side: what comes in is checked, what goes out is timed and accounted for.

A request flows: `body` (bytes -> JSON) -> `parse`, `schema` (JSON -> model) -> `prepare` (-> engine requests)
-> `choices`, `completion` (engine deltas -> pieces of text) -> `exchange`, `wire` (pieces -> HTTP, and one
RequestRecord). `app` routes, `state` holds what is in force, `server` owns the process: sockets, signals,
loading, draining.
"""
