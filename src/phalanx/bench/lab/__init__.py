"""`phalanx lab`: the TP experiment as one command."""
