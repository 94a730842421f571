"""The border: compiled programs, drivers and the event loop."""
