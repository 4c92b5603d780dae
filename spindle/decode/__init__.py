"""One stream: the engine, what it samples with, and what it measures."""
