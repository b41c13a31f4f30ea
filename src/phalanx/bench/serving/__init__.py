"""`phalanx bench serve`: load on an OpenAI-compatible server, and what it delivers."""
