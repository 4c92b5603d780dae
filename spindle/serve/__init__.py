"""Many streams: a request, a scheduler that plans steps, a runner that does them, the LLM."""
