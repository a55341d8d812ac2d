"""`flowcheck inspect`: what is in a capture, and what is missing of it (docs/inspect.md). `report.inspect` reads it."""
