"""The HTTP server: an OpenAI-compatible address, the dashboard, and the thread that owns the engine."""
