"""The parts of a model; each knows how it is sharded."""
